// Package ingress is an Environment's front door, on both sides of it: the
// Server at the simulated-public edge, which ends TLS with certificates of the
// Environment's own CA and routes by name to Machines, and the Proxy on the
// host's loopback, by which a browser gets there.
//
//	browser ──CONNECT, SOCKS5──► Proxy ──ProxyConfig.Dial──┐
//	                                                       ▼
//	Machine ─────────────► endpoint's address ──► Server: SNI, Host ──Config.Dial──► Machine
//
// Use: LoadOrCreateCA, NewServer and a ServeTLS or ServeHTTP for each address;
// NewProxy and Serve on one loopback listener. Both take what they listen on
// and how they dial, and know nothing of networks.
//
// Non-goals: no policy but names (the route domain decides who reaches an
// endpoint, and whether an endpoint reaches its backend), no caching, no
// compression, no authentication of users.
package ingress

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Kinds of endpoints.
const (
	KindHTTPS = "https" // TLS ends here; plain HTTP is redirected
	KindHTTP  = "http"  // no TLS
)

const (
	// dialTimeout of a backend. A Machine is milliseconds away; what has not
	// answered by then was dropped on the way.
	dialTimeout = 10 * time.Second
	// responseTimeout is nginx's proxy_read_timeout: what people are used to.
	responseTimeout = 60 * time.Second
	// headerTimeout and maxHeaderBytes are what a client may take and send
	// before it is known whether it asks for anything.
	headerTimeout  = 10 * time.Second
	maxHeaderBytes = 64 << 10
	clientIdle     = 2 * time.Minute
	// backendIdle and maxBackendIdle bound each endpoint's pool. Below 5 s:
	// Node closes a connection that was idle for so long, and a request that
	// crosses with that fails.
	backendIdle    = 4 * time.Second
	maxBackendIdle = 32
	// grace is what requests under way get at Close.
	grace = time.Second
)

// An Endpoint is a public name and the backend that answers for it.
type Endpoint struct {
	Name     string // what Config.Dial is asked for
	Host     string // DNS name, lower case
	Kind     string // KindHTTPS or KindHTTP
	Machine  string // the backend's; Machine and Port are for people's eyes
	Port     int
	Protocol string // what the backend speaks: "http"
}

// Config of a Server. CA (for https endpoints) and Dial are required.
type Config struct {
	Environment string // name, for people's eyes
	Endpoints   []Endpoint
	CA          *CA

	// Dial connects to an endpoint's backend. Its errors are told apart by
	// errors.Is: ECONNREFUSED is nobody listening, fs.ErrPermission (EACCES,
	// EPERM) policy, EHOSTUNREACH and ENETUNREACH no way; Timeout() is none
	// answering.
	Dial func(ctx context.Context, endpoint string) (net.Conn, error)

	Log             *slog.Logger  // nil: none
	ResponseTimeout time.Duration // until a response's header; 0: 60 s
}

// A Server answers for the endpoints' names.
type Server struct {
	config Config
	http   http.Server
	routes atomic.Pointer[routes]
	ctx    context.Context // of every request
	cancel context.CancelFunc

	mu      sync.Mutex // of Update, and of closed
	closed  bool
	serving sync.WaitGroup // requests under way
}

// routes by host; immutable.
type routes map[string]*route

// route carries requests to one endpoint. Its connections are its own, so that
// none outlives a change of backend.
type route struct {
	endpoint  Endpoint
	transport *http.Transport
	proxy     *httputil.ReverseProxy
}

// NewServer makes a server that listens nowhere yet.
func NewServer(config Config) *Server {
	if config.Log == nil {
		config.Log = slog.New(slog.DiscardHandler)
	}
	if config.ResponseTimeout == 0 {
		config.ResponseTimeout = responseTimeout
	}
	s := &Server{config: config}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	errorLog := slog.NewLogLogger(config.Log.Handler(), slog.LevelDebug) // handshakes that fail, mostly
	s.http = http.Server{
		Handler: http.HandlerFunc(s.handle),
		// h2 must stand here: where Serve comes before ServeTLS, net/http sets
		// up HTTP/2 only for a configuration that has it, once and for all, and
		// would then offer it to TLS clients without serving it.
		TLSConfig:         &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: s.certificate, NextProtos: []string{"h2", "http/1.1"}},
		ReadHeaderTimeout: headerTimeout, IdleTimeout: clientIdle, MaxHeaderBytes: maxHeaderBytes,
		BaseContext: func(net.Listener) context.Context { return s.ctx },
		ErrorLog:    errorLog,
	}
	s.routes.Store(&routes{})
	s.Update(config.Endpoints)
	return s
}

// Update puts endpoints in the place of all before. Requests under way end
// where they began.
func (s *Server) Update(endpoints []Endpoint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	old, next := *s.routes.Load(), routes{}
	for _, e := range endpoints {
		if r := old[e.Host]; r != nil && r.endpoint == e {
			next[e.Host] = r
		} else {
			next[e.Host] = s.route(e)
		}
	}
	s.routes.Store(&next)
	for host, r := range old {
		if next[host] != r {
			r.transport.CloseIdleConnections()
		}
	}
	if s.config.CA != nil {
		s.config.CA.forget(func(host string) bool { return next[host] != nil })
	}
}

func (s *Server) route(e Endpoint) *route {
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, dialTimeout)
			defer cancel()
			conn, err := s.config.Dial(ctx, e.Name)
			if err != nil {
				return nil, &dialError{err}
			}
			return conn, nil
		},
		DisableCompression:    true, // the client's and the backend's to agree on
		MaxIdleConnsPerHost:   maxBackendIdle,
		IdleConnTimeout:       backendIdle,
		ResponseHeaderTimeout: s.config.ResponseTimeout,
		ExpectContinueTimeout: time.Second,
	}
	return &route{endpoint: e, transport: transport, proxy: &httputil.ReverseProxy{
		Transport:     transport,
		Rewrite:       func(p *httputil.ProxyRequest) { rewrite(p, e.Host) },
		FlushInterval: -1, // events are sent when they happen
		ErrorLog:      s.http.ErrorLog,
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if r.Context().Err() != nil {
				panic(http.ErrAbortHandler) // nobody is there to be told
			}
			s.config.Log.Info("backend failed", "endpoint", e.Name, "machine", e.Machine, "port", e.Port, "error", err)
			backendProblem(s.config.Environment, e, err).write(w, r)
		},
	}}
}

// rewrite makes a client's request the backend's. What the client says of how
// it was forwarded is dropped: at the edge there is nobody in front of us.
func rewrite(p *httputil.ProxyRequest, host string) {
	p.Out.URL.Scheme, p.Out.URL.Host = "http", host // the pool's key
	p.Out.Host = p.In.Host
	p.Out.URL.RawQuery = p.In.URL.RawQuery // what Go can't parse too: it is the backend's to read
	for name := range p.Out.Header {
		if name == "Forwarded" || name == "X-Real-Ip" || strings.HasPrefix(name, "X-Forwarded-") {
			delete(p.Out.Header, name)
		}
	}
	p.SetXForwarded()
	p.Out.Header.Set("Forwarded", forwarded(p.In))
}

// forwarded is the header of RFC 7239. What is no token is quoted.
func forwarded(r *http.Request) string {
	client := "unknown"
	if a, err := netip.ParseAddrPort(r.RemoteAddr); err == nil {
		client = a.Addr().Unmap().String()
		if a.Addr().Unmap().Is6() {
			client = `"[` + client + `]"`
		}
	}
	proto := "http"
	if r.TLS != nil {
		proto = "https"
	}
	quote := strings.NewReplacer(`\`, `\\`, `"`, `\"`)
	return fmt.Sprintf(`for=%s;host="%s";proto=%s`, client, quote.Replace(r.Host), proto)
}

// certificate finds the leaf for a handshake. Neither a certificate nor an
// error makes crypto/tls send unrecognized_name.
func (s *Server) certificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	host := fold(hello.ServerName)
	r := (*s.routes.Load())[host]
	if r == nil || r.endpoint.Kind != KindHTTPS || s.config.CA == nil {
		s.config.Log.Info("handshake for no endpoint", "name", hello.ServerName, "client", hello.Conn.RemoteAddr().String())
		return nil, nil
	}
	return s.config.CA.leaf(host)
}

func (s *Server) handle(w http.ResponseWriter, r *http.Request) {
	if !s.begin() {
		panic(http.ErrAbortHandler)
	}
	defer s.serving.Done()
	all := *s.routes.Load()
	host := fold(hostname(r.Host))
	route := all[host]
	switch {
	case r.TLS != nil && (host != fold(r.TLS.ServerName) || route == nil || route.endpoint.Kind != KindHTTPS):
		// RFC 9110, 15.5.20: the certificate was another name's.
		s.unknown(http.StatusMisdirectedRequest, fmt.Sprintf("This connection is for %s, and the request for %s.", r.TLS.ServerName, r.Host), all).write(w, r)
	case route == nil:
		s.unknown(http.StatusNotFound, fmt.Sprintf("No endpoint has the name %s.", r.Host), all).write(w, r)
	case r.Method == http.MethodConnect:
		s.unknown(http.StatusMethodNotAllowed, "This is no proxy.", all).write(w, r)
	case r.TLS == nil && route.endpoint.Kind == KindHTTPS:
		http.Redirect(w, r, "https://"+host+r.URL.RequestURI(), http.StatusPermanentRedirect)
	default:
		// A backend may answer while the body comes. Without this, HTTP/1.1
		// drops what is left of the body when the answer begins; HTTP/2 has no
		// need of it, and says that it can't.
		http.NewResponseController(w).EnableFullDuplex()
		route.proxy.ServeHTTP(w, r)
	}
}

func (s *Server) unknown(status int, detail string, all routes) *problem {
	return &problem{Status: status, Environment: s.config.Environment, Reason: "no such name", Detail: detail,
		Names: slices.Sorted(maps.Keys(all))}
}

// begin counts a request, unless the server is closed.
func (s *Server) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.serving.Add(1)
	}
	return !s.closed
}

// ServeTLS answers TLS connections of l, which it owns, by HTTP/1.1 and HTTP/2,
// until Close or an error of l. The error is never nil; after Close it is
// net.ErrClosed.
func (s *Server) ServeTLS(l net.Listener) error { return ended(s.http.ServeTLS(l, "", "")) }

// ServeHTTP is ServeTLS for plain HTTP/1.1.
func (s *Server) ServeHTTP(l net.Listener) error { return ended(s.http.Serve(l)) }

func ended(err error) error {
	if errors.Is(err, http.ErrServerClosed) {
		return net.ErrClosed
	}
	return err
}

// Close ends every ServeTLS and ServeHTTP at once, gives requests under way a
// second, cuts those that are left, and returns when none is.
func (s *Server) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	s.http.Shutdown(ctx)
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cancel() // what was upgraded, the http.Server does not know any more
	err := s.http.Close()
	s.serving.Wait()
	for _, r := range *s.routes.Load() {
		r.transport.CloseIdleConnections()
	}
	return err
}

// fold makes a name one that can be compared: lower case, no final dot.
func fold(host string) string {
	return strings.TrimSuffix(strings.ToLower(host), ".")
}

// hostname is a Host header without its port.
func hostname(hostport string) string {
	if host, _, err := net.SplitHostPort(hostport); err == nil {
		return host
	}
	return hostport
}
