package ingress

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// proxyDialTimeout lets a fault of some seconds on the way pass.
const proxyDialTimeout = 30 * time.Second

// ProxyConfig of a Proxy. Resolve and Dial are required.
type ProxyConfig struct {
	Environment string // name, for people's eyes

	// Resolve finds the endpoint of a host name, given in lower case without
	// a final dot. Hosts are all that it finds.
	Resolve func(host string) (endpoint string, ok bool)
	Hosts   func() []string

	// Dial connects to an endpoint's public address. Its errors are told apart
	// as those of Config.Dial.
	Dial func(ctx context.Context, endpoint string, port uint16) (net.Conn, error)

	OwnerUID int       // the only user that is served; root is none unless it is root's
	Owner    OwnerFunc // nil: SocketOwner

	Log *slog.Logger // nil: none
}

// A Proxy is the way from the host to one Environment's endpoints: CONNECT,
// plain HTTP in absolute form, SOCKS5 with names, and /proxy.pac, all on one
// loopback port and for one user.
//
//	accept ──► whose? ──not the owner's──► closed without a word
//	   └──► first byte ──0x05──► SOCKS5 ──────────────┐
//	           └──► HTTP ──CONNECT──────────────────┐ │
//	                  ├──http://HOST/──► RoundTrip ─┤ │   a name of this Environment,
//	                  └──/proxy.pac, /              ▼ ▼   port 443 or 80: Dial
//
// It is no open relay: what is no name of its Environment is refused, addresses
// always.
type Proxy struct {
	config  ProxyConfig
	http    http.Server
	plain   *httputil.ReverseProxy
	carrier *http.Transport
	ctx     context.Context
	cancel  context.CancelFunc

	mu     sync.Mutex
	closed bool
	open   map[io.Closer]struct{}
	work   sync.WaitGroup // everything that holds something open
}

// NewProxy makes a proxy that listens nowhere yet.
func NewProxy(config ProxyConfig) *Proxy {
	if config.Owner == nil {
		config.Owner = SocketOwner
	}
	if config.Hosts == nil {
		config.Hosts = func() []string { return nil }
	}
	if config.Log == nil {
		config.Log = slog.New(slog.DiscardHandler)
	}
	p := &Proxy{config: config, open: map[io.Closer]struct{}{}}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.http = http.Server{
		Handler:           http.HandlerFunc(p.handle),
		ReadHeaderTimeout: headerTimeout, IdleTimeout: clientIdle, MaxHeaderBytes: maxHeaderBytes,
		BaseContext: func(net.Listener) context.Context { return p.ctx },
		ErrorLog:    slog.NewLogLogger(config.Log.Handler(), slog.LevelDebug),
	}
	p.carrier = &http.Transport{
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			host, _, err := net.SplitHostPort(address)
			if err != nil {
				return nil, err
			}
			conn, problem := p.dial(ctx, host, 80)
			if problem != nil {
				return nil, problem
			}
			return conn, nil
		},
		DisableCompression:  true,
		MaxIdleConnsPerHost: maxBackendIdle, MaxIdleConns: maxBackendIdle,
		IdleConnTimeout:       backendIdle,
		ExpectContinueTimeout: time.Second,
	}
	p.plain = &httputil.ReverseProxy{
		Transport: p.carrier,
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Host = fold(r.In.URL.Hostname()) // the pool's key; Out.Host stays as it was
			r.Out.URL.RawQuery = r.In.URL.RawQuery
		},
		FlushInterval: -1,
		ErrorLog:      p.http.ErrorLog,
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if r.Context().Err() != nil {
				panic(http.ErrAbortHandler)
			}
			known, ok := errors.AsType[*problem](err)
			if !ok {
				known = p.dialProblem(r.URL.Hostname(), err)
			}
			known.write(w, r)
		},
	}
	return p
}

// Serve answers connections of l, which it owns and which must be on loopback,
// until Close or an error of l. The error is never nil; after Close it is
// net.ErrClosed.
func (p *Proxy) Serve(l net.Listener) error {
	if !addrPort(l.Addr()).Addr().Unmap().IsLoopback() {
		l.Close()
		return fmt.Errorf("ingress: the proxy listens on loopback only, not on %s", l.Addr())
	}
	if !p.add(l) {
		return net.ErrClosed
	}
	defer p.remove(l)
	requests := &handoff{conns: make(chan net.Conn), closed: make(chan struct{}), address: l.Addr()}
	defer requests.Close()
	p.work.Go(func() { p.http.Serve(requests) })
	for wait := time.Duration(0); ; {
		conn, err := l.Accept()
		if err != nil {
			if p.ctx.Err() != nil {
				return net.ErrClosed
			}
			temporary, ok := errors.AsType[interface {
				error
				Temporary() bool
			}](err)
			if !ok || !temporary.Temporary() { // as net/http does: out of descriptors is not the end
				return err
			}
			wait = min(max(2*wait, 5*time.Millisecond), time.Second)
			select {
			case <-time.After(wait):
			case <-p.ctx.Done():
			}
			continue
		}
		wait = 0
		if p.add(conn) {
			go p.accept(conn, requests)
		}
	}
}

// accept finds out who calls and what they speak.
func (p *Proxy) accept(conn net.Conn, requests *handoff) {
	handed := false
	defer func() {
		if !handed {
			p.remove(conn)
		}
	}()
	uid, err := p.config.Owner(addrPort(conn.LocalAddr()), addrPort(conn.RemoteAddr()))
	if err != nil || uid != p.config.OwnerUID {
		p.config.Log.Warn("connection refused: not the owner's", "uid", uid, "owner", p.config.OwnerUID, "client", conn.RemoteAddr().String(), "error", err)
		return
	}
	conn.SetDeadline(time.Now().Add(headerTimeout))
	reader := bufio.NewReader(conn)
	first, err := reader.Peek(1)
	if err != nil {
		return
	}
	switch first[0] {
	case socksVersion:
		p.socks(conn, reader)
		return
	case socks4Version: // would wait for a reply that HTTP never gives
		conn.Write(socks4Rejected)
		return
	}
	conn.SetDeadline(time.Time{})
	handed = requests.hand(&peeked{Conn: conn, reader: reader, closed: func() { p.remove(conn) }})
}

func (p *Proxy) socks(conn net.Conn, reader *bufio.Reader) {
	method, err := readSocksMethods(reader)
	if err != nil {
		return
	}
	if _, err := conn.Write([]byte{socksVersion, method}); err != nil || method == socksNoneAcceptable {
		return
	}
	request, err := readSocksRequest(reader)
	switch {
	case errors.Is(err, errSocksAddressType):
		conn.Write(socksReply(socksNoAddressType))
		return
	case err != nil:
		return
	case request.command != socksConnect:
		conn.Write(socksReply(socksNoCommand))
		return
	}
	conn.SetDeadline(time.Time{})
	target, problem := p.dial(p.ctx, request.host, request.port)
	if problem != nil {
		conn.Write(socksReply(socksCode(problem)))
		return
	}
	if !p.add(target) {
		return
	}
	defer p.remove(target)
	if _, err := conn.Write(socksReply(socksSucceeded)); err != nil {
		return
	}
	tunnel(conn, reader, target)
}

func (p *Proxy) handle(w http.ResponseWriter, r *http.Request) {
	if !p.begin() {
		panic(http.ErrAbortHandler)
	}
	defer p.work.Done()
	switch {
	case r.Method == http.MethodConnect:
		p.connect(w, r)
	case r.URL.IsAbs():
		if problem := p.admitURL(r); problem != nil {
			problem.write(w, r)
			return
		}
		http.NewResponseController(w).EnableFullDuplex() // as at the edge
		p.plain.ServeHTTP(w, r)
	default:
		p.own(w, r)
	}
}

func (p *Proxy) admitURL(r *http.Request) *problem {
	port, err := uint16(80), error(nil)
	if text := r.URL.Port(); text != "" {
		port, err = parsePort(text)
	}
	if r.URL.Scheme != "http" || err != nil || port == 443 {
		return p.forbidden(r.URL.Host, "port not served", "Only http on port 80 is proxied so; https goes by CONNECT.")
	}
	_, problem := p.admit(r.URL.Hostname(), port)
	return problem
}

// connect is HTTP CONNECT (RFC 9110, 9.3.6).
func (p *Proxy) connect(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Connection", "close") // what follows was meant for the tunnel that is refused
	host, portText, err := net.SplitHostPort(r.Host)
	port, portErr := parsePort(portText)
	if err != nil || portErr != nil {
		p.refuse(http.StatusBadRequest, r.Host, "malformed", "CONNECT takes HOST:PORT.").write(w, r)
		return
	}
	// Not with the request's context: that ends when the client ends its own
	// direction, which it may do behind the first bytes of the tunnel.
	target, problem := p.dial(p.ctx, host, port)
	if problem != nil {
		problem.write(w, r)
		return
	}
	if !p.add(target) {
		panic(http.ErrAbortHandler)
	}
	defer p.remove(target)
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	defer conn.Close()
	conn.SetDeadline(time.Time{})
	if _, err := io.WriteString(conn, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		return
	}
	tunnel(conn, buffered.Reader, target)
}

// own answers for the proxy itself, under its own address only: a page whose
// name was bound to 127.0.0.1 (DNS rebinding) comes with that name as its Host.
func (p *Proxy) own(w http.ResponseWriter, r *http.Request) {
	local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	address := addrPort(local)
	port := strconv.Itoa(int(address.Port()))
	allowed := []string{"127.0.0.1:" + port, "localhost:" + port, "[::1]:" + port}
	switch {
	case !slices.Contains(allowed, strings.ToLower(r.Host)):
		p.forbidden(r.Host, "not this proxy", "The Host of a request to the proxy itself must be the proxy's.").write(w, r)
	case r.Method != http.MethodGet && r.Method != http.MethodHead:
		w.Header().Set("Allow", "GET, HEAD")
		p.refuse(http.StatusMethodNotAllowed, "", "method not allowed", "Only GET and HEAD.").write(w, r)
	case r.URL.Path == "/proxy.pac":
		w.Header().Set("Content-Type", "application/x-ns-proxy-autoconfig")
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Write(pac(p.config.Hosts(), address))
	case r.URL.Path == "/":
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		fmt.Fprintf(w, "The proxy of vz Environment %s: HTTP CONNECT, SOCKS5 (names only) and http://%s/proxy.pac\n\n", p.config.Environment, address)
		for _, host := range p.names() {
			fmt.Fprintf(w, "  %s\n", host)
		}
	default:
		p.refuse(http.StatusNotFound, "", "no such page", "There are / and /proxy.pac.").write(w, r)
	}
}

// admit decides on a host and a port. What it refuses never reaches Dial.
func (p *Proxy) admit(host string, port uint16) (endpoint string, _ *problem) {
	host = fold(host)
	if _, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil {
		return "", p.forbidden(host, "an address", "This proxy serves names of its Environment, no addresses. Let it resolve them: socks5h, not socks5.")
	}
	endpoint, ok := p.config.Resolve(host)
	if !ok {
		return "", p.forbidden(host, "no such name", fmt.Sprintf("%s is no name of this Environment.", host))
	}
	if port != 443 && port != 80 {
		return "", p.forbidden(host, "port not served", fmt.Sprintf("Endpoints are on ports 443 and 80, not on %d.", port))
	}
	return endpoint, nil
}

func (p *Proxy) dial(ctx context.Context, host string, port uint16) (net.Conn, *problem) {
	endpoint, problem := p.admit(host, port)
	if problem != nil {
		p.config.Log.Info("refused", "host", host, "port", port, "reason", problem.Reason)
		return nil, problem
	}
	ctx, cancel := context.WithTimeout(ctx, proxyDialTimeout)
	defer cancel()
	conn, err := p.config.Dial(ctx, endpoint, port)
	if err != nil {
		return nil, p.dialProblem(host, &dialError{err})
	}
	return conn, nil
}

func (p *Proxy) dialProblem(host string, err error) *problem {
	status, reason := reasonOf(err)
	host = fold(host)
	endpoint, _ := p.config.Resolve(host)
	return &problem{Status: status, Environment: p.config.Environment, Endpoint: endpoint, Host: host, Reason: reason,
		Detail: fmt.Sprintf("The way to %s failed.", host), Cause: err.Error(),
		Next: fmt.Sprintf("Is the Environment up, or a fault armed on path host:%s? vz status", endpoint)}
}

func (p *Proxy) forbidden(host, reason, detail string) *problem {
	return p.refuse(http.StatusForbidden, host, reason, detail)
}

func (p *Proxy) refuse(status int, host, reason, detail string) *problem {
	return &problem{Status: status, Environment: p.config.Environment, Host: host, Reason: reason, Detail: detail, Names: p.names()}
}

func (p *Proxy) names() []string {
	hosts := slices.Clone(p.config.Hosts())
	slices.Sort(hosts)
	return hosts
}

// Close ends Serve, cuts what is open, and returns when nothing is.
func (p *Proxy) Close() error {
	p.mu.Lock()
	p.closed = true
	p.cancel()
	for c := range p.open {
		c.Close()
	}
	p.mu.Unlock()
	p.http.Close()
	p.work.Wait()
	p.carrier.CloseIdleConnections()
	return nil
}

// add takes what is to be closed by Close; remove closes it and lets it go.
func (p *Proxy) add(c io.Closer) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		c.Close()
		return false
	}
	p.open[c] = struct{}{}
	p.work.Add(1)
	return true
}

// begin counts a request, unless the proxy is closed.
func (p *Proxy) begin() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed {
		p.work.Add(1)
	}
	return !p.closed
}

func (p *Proxy) remove(c io.Closer) {
	c.Close()
	p.mu.Lock()
	_, was := p.open[c]
	delete(p.open, c)
	p.mu.Unlock()
	if was {
		p.work.Done()
	}
}

func addrPort(a net.Addr) netip.AddrPort {
	if tcp, ok := a.(*net.TCPAddr); ok {
		return unmapped(tcp.AddrPort())
	}
	return netip.AddrPort{}
}

func unmapped(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

func parsePort(text string) (uint16, error) {
	n, err := strconv.ParseUint(text, 10, 16)
	return uint16(n), err
}
