package ingress

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/proxy"
)

// newProxy serves config on loopback, for this process's user.
func newProxy(t *testing.T, config ProxyConfig) (p *Proxy, address string) {
	t.Helper()
	hosts := map[string]string{"shop.test": "shop", "pay.test": "pay", "plain.test": "plain"}
	config.Environment = "shop-1"
	config.Resolve = func(host string) (string, bool) { e, ok := hosts[host]; return e, ok }
	config.Hosts = func() []string { return []string{"shop.test", "plain.test", "pay.test"} }
	config.OwnerUID = os.Getuid()
	p = NewProxy(config)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() { done <- p.Serve(l) }()
	t.Cleanup(func() {
		assert.NoError(t, p.Close())
		assert.ErrorIs(t, <-done, net.ErrClosed)
	})
	return p, l.Addr().String()
}

// toEdge dials what newEdge listens on.
func toEdge(e *edge) func(context.Context, string, uint16) (net.Conn, error) {
	return func(ctx context.Context, endpoint string, port uint16) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", map[uint16]string{443: e.tls, 80: e.plain}[port])
	}
}

// to dials always the same.
func to(address string) func(context.Context, string, uint16) (net.Conn, error) {
	return func(ctx context.Context, _ string, _ uint16) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", address)
	}
}

func hello(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "hello from %s", r.Host) }

func TestProxyWithRealClients(t *testing.T) {
	e := newEdge(t, http.HandlerFunc(hello))
	_, address := newProxy(t, ProxyConfig{Dial: toEdge(e)})
	for _, scheme := range []string{"http", "socks5h"} {
		via, err := url.Parse(scheme + "://" + address)
		require.NoError(t, err)
		for _, h2 := range []bool{false, true} {
			transport := &http.Transport{Proxy: http.ProxyURL(via), TLSClientConfig: &tls.Config{RootCAs: e.roots()}, ForceAttemptHTTP2: h2}
			c := &http.Client{Transport: transport}
			for u, want := range map[string]string{
				"https://shop.test/":    "hello from shop.test",
				"http://plain.test/":    "hello from plain.test",
				"http://pay.test/x":     "hello from pay.test", // redirected
				"http://PLAIN.test./":   "hello from PLAIN.test.",
				"https://shop.test:443": "hello from shop.test:443",
			} {
				response, body := get(t, c, u)
				assert.Equal(t, 200, response.StatusCode, u)
				assert.Contains(t, []string{want, strings.TrimSuffix(want, ":443")}, body)
			}
			transport.CloseIdleConnections()
		}
	}
}

func TestCurl(t *testing.T) {
	if _, err := exec.LookPath("curl"); err != nil {
		t.Skip("curl is not installed")
	}
	e := newEdge(t, http.HandlerFunc(hello))
	_, address := newProxy(t, ProxyConfig{Dial: toEdge(e)})
	for _, test := range []struct {
		args []string
		want string
		exit int
	}{
		{[]string{"--proxy", "http://" + address, "https://shop.test/"}, "hello from shop.test", 0},
		{[]string{"--proxy", "http://" + address, "-L", "http://shop.test/"}, "hello from shop.test", 0},
		{[]string{"--proxy", "http://" + address, "http://plain.test/"}, "hello from plain.test", 0},
		{[]string{"--socks5-hostname", address, "https://shop.test/"}, "hello from shop.test", 0},
		{[]string{"--socks5-hostname", address, "https://example.com/"}, "", 97}, // CURLE_PROXY
		{[]string{"--socks5", address, "https://127.0.0.1/"}, "", 97},
		{[]string{"--socks4a", address, "https://shop.test/"}, "", 97},             // at once
		{[]string{"--proxy", "http://" + address, "https://example.com/"}, "", 56}, // 403 to CONNECT
		{[]string{"--proxy", "http://" + address, "http://example.com/"}, "example.com is no name of this Environment", 0},
		{[]string{"http://" + address + "/"}, "shop.test", 0},
	} {
		out, err := exec.Command("curl", append([]string{"-sS", "--max-time", "20", "--cacert", e.ca.Path(), "--noproxy", ""}, test.args...)...).CombinedOutput()
		exit := 0
		var failed *exec.ExitError
		if errors.As(err, &failed) {
			exit = failed.ExitCode()
		}
		assert.Equal(t, test.exit, exit, "%s: %s", test.args, out)
		assert.Contains(t, string(out), test.want, test.args)
	}
}

// connect asks for a tunnel by HTTP.
func connect(t *testing.T, address, target string) (*http.Response, net.Conn, *bufio.Reader) {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: %s\r\nAccept: application/json\r\n\r\n", target, target)
	reader := bufio.NewReader(conn)
	response, err := http.ReadResponse(reader, &http.Request{Method: http.MethodConnect})
	require.NoError(t, err)
	return response, conn, reader
}

func TestNoOpenRelay(t *testing.T) {
	var dials atomic.Int32
	_, address := newProxy(t, ProxyConfig{Dial: func(context.Context, string, uint16) (net.Conn, error) {
		dials.Add(1)
		return nil, errors.New("dialled")
	}})
	for target, want := range map[string]struct {
		status int
		reason string
	}{
		"example.com:443":        {403, "no such name"},
		"localhost:443":          {403, "no such name"},
		"shop.test.example:443":  {403, "no such name"},
		"0x7f000001:443":         {403, "no such name"},
		"127.0.0.1:443":          {403, "an address"},
		"198.51.100.2:443":       {403, "an address"},
		"[::1]:443":              {403, "an address"},
		"[::ffff:127.0.0.1]:443": {403, "an address"},
		"shop.test:22":           {403, "port not served"},
		"shop.test:0":            {403, "port not served"},
		"shop.test:65536":        {400, "malformed"},
		"shop.test":              {400, "malformed"},
	} {
		response, _, _ := connect(t, address, target)
		assert.Equal(t, want.status, response.StatusCode, target)
		if want.status == 403 {
			var p problem
			require.NoError(t, json.NewDecoder(io.LimitReader(response.Body, response.ContentLength)).Decode(&p), target)
			assert.Equal(t, want.reason, p.Reason, target)
			assert.Equal(t, "shop-1", p.Environment)
			assert.Equal(t, []string{"pay.test", "plain.test", "shop.test"}, p.Names)
		}
	}
	for _, u := range []string{"http://example.com/", "http://127.0.0.1/", "http://[::1]:80/", "http://shop.test:22/", "http://shop.test:443/", "ftp://shop.test/", "https://shop.test/"} {
		conn, err := net.Dial("tcp", address)
		require.NoError(t, err)
		fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: shop.test\r\n\r\n", u)
		response, err := http.ReadResponse(bufio.NewReader(conn), nil)
		require.NoError(t, err)
		assert.Equal(t, 403, response.StatusCode, u)
		conn.Close()
	}
	dialer, err := proxy.SOCKS5("tcp", address, nil, nil)
	require.NoError(t, err)
	for _, target := range []string{"example.com:443", "127.0.0.1:443", "[::1]:443", "shop.test:22"} {
		_, err := dialer.Dial("tcp", target)
		assert.ErrorContains(t, err, "not allowed", target)
	}
	assert.Zero(t, dials.Load())
}

func TestDialsThatFail(t *testing.T) {
	var failure error
	_, address := newProxy(t, ProxyConfig{Dial: func(context.Context, string, uint16) (net.Conn, error) { return nil, failure }})
	for _, test := range []struct {
		err    error
		status int
		socks  byte
	}{
		{syscall.ECONNREFUSED, 502, socksRefused},
		{syscall.EACCES, 503, socksNotAllowed},
		{context.DeadlineExceeded, 504, socksExpired},
		{syscall.ENETUNREACH, 503, socksHostUnreachable},
		{errors.New("no"), 503, socksHostUnreachable},
	} {
		failure = test.err
		response, _, _ := connect(t, address, "shop.test:443")
		assert.Equal(t, test.status, response.StatusCode)
		conn, err := net.Dial("tcp", address)
		require.NoError(t, err)
		_, err = conn.Write([]byte("\x05\x01\x00\x05\x01\x00\x03\x09shop.test\x01\xbb"))
		require.NoError(t, err)
		got, err := io.ReadAll(conn)
		require.NoError(t, err)
		assert.Equal(t, append([]byte{5, 0}, socksReply(test.socks)...), got)
		conn.Close()

		via := &url.URL{Scheme: "http", Host: address}
		transport := &http.Transport{Proxy: http.ProxyURL(via)}
		response, body := get(t, &http.Client{Transport: transport}, "http://plain.test/")
		transport.CloseIdleConnections()
		assert.Equal(t, test.status, response.StatusCode)
		assert.Contains(t, body, "plain (plain.test)")
		assert.Contains(t, body, "shop-1")
	}
}

func TestSocksThatIsRefused(t *testing.T) {
	_, address := newProxy(t, ProxyConfig{Dial: to("127.0.0.1:1")})
	for name, test := range map[string]struct{ send, want string }{
		"only passwords":  {"\x05\x01\x02", "\x05\xff"},
		"no methods":      {"\x05\x00", "\x05\xff"},
		"BIND":            {"\x05\x01\x00\x05\x02\x00\x03\x09shop.test\x01\xbb", "\x05\x00" + string(socksReply(socksNoCommand))},
		"UDP ASSOCIATE":   {"\x05\x01\x00\x05\x03\x00\x01\x00\x00\x00\x00\x00\x00", "\x05\x00" + string(socksReply(socksNoCommand))},
		"address type 9":  {"\x05\x01\x00\x05\x01\x00\x09", "\x05\x00" + string(socksReply(socksNoAddressType))},
		"another version": {"\x05\x01\x00\x04\x01\x00\x01", "\x05\x00"},
		"an empty name":   {"\x05\x01\x00\x05\x01\x00\x03\x00\x01\xbb", "\x05\x00" + string(socksReply(socksNotAllowed))},
	} {
		conn, err := net.Dial("tcp", address)
		require.NoError(t, err)
		_, err = io.WriteString(conn, test.send)
		require.NoError(t, err)
		got := make([]byte, len(test.want))
		_, err = io.ReadFull(conn, got)
		require.NoError(t, err, name)
		assert.Equal(t, test.want, string(got), name)
		_, err = conn.Read(got)
		assert.Error(t, err, name)
		conn.Close()
	}
}

func TestPAC(t *testing.T) {
	_, address := newProxy(t, ProxyConfig{Dial: to("127.0.0.1:1")})
	response, body := get(t, http.DefaultClient, "http://"+address+"/proxy.pac")
	http.DefaultClient.CloseIdleConnections()
	assert.Equal(t, 200, response.StatusCode)
	assert.Equal(t, "application/x-ns-proxy-autoconfig", response.Header.Get("Content-Type"))
	assert.Contains(t, body, `var hosts = {"pay.test":true,"plain.test":true,"shop.test":true};`)
	assert.Contains(t, body, `? "PROXY `+address+`" : "DIRECT"`)

	if _, err := exec.LookPath("node"); err != nil {
		return // the text above is the test; a real engine is better where there is one
	}
	for host, want := range map[string]string{"shop.test": "PROXY " + address, "Shop.Test.": "PROXY " + address,
		"example.com": "DIRECT", "www.shop.test": "DIRECT", "toString": "DIRECT", "hasOwnProperty": "DIRECT", "__proto__": "DIRECT"} {
		out, err := exec.Command("node", "-e", body+fmt.Sprintf("\nprocess.stdout.write(FindProxyForURL('', %q))", host)).CombinedOutput()
		require.NoError(t, err, string(out))
		assert.Equal(t, want, string(out), host)
	}
}

func TestProxysOwnPages(t *testing.T) {
	_, address := newProxy(t, ProxyConfig{Dial: to("127.0.0.1:1")})
	_, port, err := net.SplitHostPort(address)
	require.NoError(t, err)
	for _, test := range []struct {
		method, path, host string
		status             int
		want               string
	}{
		{"GET", "/", address, 200, "Environment shop-1"},
		{"GET", "/", "localhost:" + port, 200, "plain.test"},
		{"GET", "/", "LOCALHOST:" + port, 200, "plain.test"},
		{"GET", "/proxy.pac", "[::1]:" + port, 200, "FindProxyForURL"},
		{"HEAD", "/proxy.pac", address, 200, ""},
		{"GET", "/proxy.pac", "evil.example:" + port, 403, "must be the proxy's"},
		{"GET", "/", "shop.test", 403, "must be the proxy's"},
		{"GET", "/", "127.0.0.1", 403, "must be the proxy's"},
		{"GET", "/", "127.0.0.1:1", 403, "must be the proxy's"},
		{"GET", "/other", address, 404, ""},
		{"POST", "/", address, 405, ""},
	} {
		conn, err := net.Dial("tcp", address)
		require.NoError(t, err)
		fmt.Fprintf(conn, "%s %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", test.method, test.path, test.host)
		response, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: test.method})
		require.NoError(t, err)
		body, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		assert.Equal(t, test.status, response.StatusCode, test)
		assert.Contains(t, string(body), test.want)
		assert.Empty(t, response.Header.Get("Access-Control-Allow-Origin"))
		conn.Close()
	}
}

func TestOnlyTheOwnerIsServed(t *testing.T) {
	type answer struct {
		uid int
		err error
	}
	var next atomic.Value
	ends := make(chan [2]netip.AddrPort, 1)
	_, address := newProxy(t, ProxyConfig{Dial: to("127.0.0.1:1"), Owner: func(local, remote netip.AddrPort) (int, error) {
		ends <- [2]netip.AddrPort{local, remote}
		a := next.Load().(answer)
		return a.uid, a.err
	}})
	for _, test := range []struct {
		answer answer
		served bool
	}{
		{answer{os.Getuid(), nil}, true},
		{answer{os.Getuid() + 1, nil}, false},
		{answer{os.Getuid(), ErrNoOwner}, false},
	} {
		next.Store(test.answer)
		conn, err := net.Dial("tcp", address)
		require.NoError(t, err)
		fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: %s\r\n\r\n", address)
		_, err = http.ReadResponse(bufio.NewReader(conn), nil)
		assert.Equal(t, test.served, err == nil, "%+v", test)
		got := <-ends
		assert.Equal(t, address, got[0].String())
		assert.Equal(t, conn.LocalAddr().String(), got[1].String())
		conn.Close()
	}
}

// As root, a real process of another user is turned away.
func TestAnotherUserIsTurnedAway(t *testing.T) {
	if runtime.GOOS != "linux" || os.Getuid() != 0 {
		t.Skip("needs root on Linux to be somebody else")
	}
	curl, err := exec.LookPath("curl")
	if err != nil {
		t.Skip("curl is not installed")
	}
	_, address := newProxy(t, ProxyConfig{Dial: to("127.0.0.1:1")})
	ask := func(uid uint32) error {
		command := exec.Command(curl, "-sS", "--max-time", "20", "--noproxy", "*", "http://"+address+"/")
		command.SysProcAttr = asUser(uid)
		command.Dir = "/"
		return command.Run()
	}
	assert.NoError(t, ask(0))
	assert.Error(t, ask(65534))
}

func TestLoopbackOnly(t *testing.T) {
	p := NewProxy(ProxyConfig{})
	defer p.Close()
	assert.ErrorContains(t, p.Serve(anywhere{}), "loopback only")
}

type anywhere struct{ brokenListener }

func (anywhere) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4zero, Port: 1} }

// target takes one connection.
func target(t *testing.T, serve func(*net.TCPConn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		serve(conn.(*net.TCPConn))
	}()
	t.Cleanup(func() { l.Close(); <-done })
	return l.Addr().String()
}

// tunnels opens a tunnel in each way there is.
var tunnels = map[string]func(t *testing.T, address string) (*net.TCPConn, io.Reader){
	"CONNECT": func(t *testing.T, address string) (*net.TCPConn, io.Reader) {
		response, conn, reader := connect(t, address, "shop.test:443")
		require.Equal(t, 200, response.StatusCode)
		return conn.(*net.TCPConn), reader
	},
	"SOCKS5": func(t *testing.T, address string) (*net.TCPConn, io.Reader) {
		dialer, err := proxy.SOCKS5("tcp", address, nil, nil)
		require.NoError(t, err)
		conn, err := dialer.Dial("tcp", "shop.test:443")
		require.NoError(t, err)
		t.Cleanup(func() { conn.Close() })
		return conn.(*net.TCPConn), conn
	},
}

func TestHalfClose(t *testing.T) {
	for name, open := range tunnels {
		t.Run(name+" client ends first", func(t *testing.T) {
			_, address := newProxy(t, ProxyConfig{Dial: to(target(t, func(c *net.TCPConn) {
				asked, _ := io.ReadAll(c)
				fmt.Fprintf(c, "you said %s", asked)
			}))})
			conn, reader := open(t, address)
			io.WriteString(conn, "this")
			require.NoError(t, conn.CloseWrite())
			got, err := io.ReadAll(reader)
			require.NoError(t, err)
			assert.Equal(t, "you said this", string(got))
		})
		t.Run(name+" server ends first", func(t *testing.T) {
			heard := make(chan string, 1)
			_, address := newProxy(t, ProxyConfig{Dial: to(target(t, func(c *net.TCPConn) {
				io.WriteString(c, "all I have")
				c.CloseWrite()
				said, _ := io.ReadAll(c)
				heard <- string(said)
			}))})
			conn, reader := open(t, address)
			got, err := io.ReadAll(reader)
			require.NoError(t, err)
			assert.Equal(t, "all I have", string(got))
			io.WriteString(conn, "and I")
			require.NoError(t, conn.CloseWrite())
			assert.Equal(t, "and I", <-heard)
		})
		t.Run(name+" reset", func(t *testing.T) {
			_, address := newProxy(t, ProxyConfig{Dial: to(target(t, func(c *net.TCPConn) {
				c.Read(make([]byte, 1))
				c.SetLinger(0)
			}))})
			conn, reader := open(t, address)
			io.WriteString(conn, "x")
			_, err := io.ReadAll(reader)
			assert.ErrorIs(t, err, syscall.ECONNRESET)
		})
	}
}

// What comes right behind the request for a tunnel is part of the tunnel.
func TestEarlyData(t *testing.T) {
	for name, request := range map[string]string{
		"CONNECT": "CONNECT shop.test:443 HTTP/1.1\r\nHost: shop.test:443\r\n\r\n",
		"SOCKS5":  "\x05\x01\x00\x05\x01\x00\x03\x09shop.test\x01\xbb",
	} {
		_, address := newProxy(t, ProxyConfig{Dial: to(target(t, func(c *net.TCPConn) { io.Copy(c, c) }))})
		conn, err := net.Dial("tcp", address)
		require.NoError(t, err)
		_, err = io.WriteString(conn, request+"early")
		require.NoError(t, err)
		require.NoError(t, conn.(*net.TCPConn).CloseWrite())
		got, err := io.ReadAll(conn)
		require.NoError(t, err)
		assert.True(t, strings.HasSuffix(string(got), "early"), "%s: %q", name, got)
		conn.Close()
	}
}

// 64 MiB both ways at once, and what is held does not grow with it.
func TestTunnelStreams(t *testing.T) {
	const size = 64 << 20
	_, address := newProxy(t, ProxyConfig{Dial: to(target(t, func(c *net.TCPConn) { io.Copy(struct{ io.Writer }{c}, c); c.CloseWrite() }))})
	conn, reader := tunnels["CONNECT"](t, address)
	runtime.GC()
	var before, peak runtime.MemStats
	runtime.ReadMemStats(&before)
	sent := sha256.New()
	go func() {
		io.Copy(io.MultiWriter(conn, sent), io.LimitReader(&pattern{}, size))
		conn.CloseWrite()
	}()
	got, n := sha256.New(), int64(0)
	for {
		more, err := io.CopyN(got, reader, 8<<20)
		n += more
		var now runtime.MemStats
		runtime.ReadMemStats(&now)
		if now.HeapInuse > peak.HeapInuse {
			peak = now
		}
		if err != nil {
			require.Equal(t, io.EOF, err)
			break
		}
	}
	assert.EqualValues(t, size, n)
	assert.Equal(t, sent.Sum(nil), got.Sum(nil))
	assert.Less(t, int64(peak.HeapInuse)-int64(before.HeapInuse), int64(16<<20))
}

func TestCloseCutsTunnels(t *testing.T) {
	for name, open := range tunnels {
		p, address := newProxy(t, ProxyConfig{Dial: to(target(t, func(c *net.TCPConn) { io.Copy(io.Discard, c) }))})
		_, reader := open(t, address)
		require.NoError(t, p.Close(), name)
		_, err := io.ReadAll(reader)
		_ = err // an end or a reset: it is over
	}
}

// Callers that say nothing hold nobody up.
func TestCloseWithSilentClients(t *testing.T) {
	p, address := newProxy(t, ProxyConfig{Dial: to("127.0.0.1:1")})
	for _, said := range []string{"", "\x05", "\x05\x01\x00\x05", "GET /", "CONNECT"} {
		conn, err := net.Dial("tcp", address)
		require.NoError(t, err)
		defer conn.Close()
		io.WriteString(conn, said)
	}
	require.NoError(t, p.Close())
}

func TestIdleOfAHalfClosedTunnel(t *testing.T) {
	// The deadline itself is the kernel's to keep; that it is set where the
	// other direction has ended, and only there, is what is shown.
	a, b := &deadlines{closed: make(chan struct{})}, &deadlines{closed: make(chan struct{})}
	done := make(chan struct{})
	before := time.Now()
	go func() { tunnel(a, strings.NewReader("x"), b); close(done) }()
	for !b.set.Load() {
		runtime.Gosched()
	}
	assert.False(t, a.set.Load())
	assert.False(t, b.until().Before(before.Add(halfIdle)))
	b.Close()
	<-done
}

// deadlines is a connection that is silent until it is closed.
type deadlines struct {
	net.Conn
	closed chan struct{}
	once   atomic.Bool
	set    atomic.Bool
	at     atomic.Pointer[time.Time]
}

func (d *deadlines) Read([]byte) (int, error)    { <-d.closed; return 0, net.ErrClosed }
func (d *deadlines) Write(b []byte) (int, error) { return len(b), nil }
func (d *deadlines) SetReadDeadline(t time.Time) error {
	d.at.Store(&t)
	d.set.Store(true)
	return nil
}
func (d *deadlines) until() time.Time { return *d.at.Load() }
func (d *deadlines) Close() error {
	if !d.once.Swap(true) {
		close(d.closed)
	}
	return nil
}

func FuzzSocks(f *testing.F) {
	for _, s := range []string{"\x05\x01\x00\x05\x01\x00\x03\x09shop.test\x01\xbb", "\x05\x01\x00\x05\x01\x00\x01\x7f\x00\x00\x01\x00\x50",
		"\x05\x02\x02\x00\x05\x01\x00\x04" + strings.Repeat("\x00", 18), "\x05\xff", "\x04", "", "\x05\x01\x00\x05\x01\x00\x03\xff"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, input []byte) {
		r := bytes.NewReader(input)
		method, err := readSocksMethods(r)
		if err != nil || method != socksNoAuthentication {
			return
		}
		before := r.Len()
		q, err := readSocksRequest(r)
		if err != nil {
			return
		}
		assert.LessOrEqual(t, before-r.Len(), 4+1+255+2, "no more is read than is the request's")
		assert.LessOrEqual(t, len(q.host), 255)
	})
}

var pacShape = regexp.MustCompile(`(?s)\A// [^\n]*\nvar hosts = (\{[^\n]*\});\nfunction FindProxyForURL\(url, host\) \{\n[^\n]*\n[^\n]*\n\}\n\z`)

// No host gets out of its string.
func FuzzPAC(f *testing.F) {
	for _, host := range []string{"shop.test", `";alert(1)//`, "</script>", "a\u2028b", "\\", "\xff", "\n"} {
		f.Add(host)
	}
	f.Fuzz(func(t *testing.T, host string) {
		text := pac([]string{host}, netip.MustParseAddrPort("127.0.0.1:1080"))
		match := pacShape.FindSubmatch(text)
		require.NotNil(t, match, string(text))
		var hosts map[string]bool
		require.NoError(t, json.Unmarshal(match[1], &hosts))
		assert.Len(t, hosts, 1)
		assert.NotContains(t, string(match[1]), "\u2028")
		assert.NotContains(t, string(match[1]), "<")
	})
}
