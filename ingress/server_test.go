package ingress

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// edge is a Server on loopback before one backend.
type edge struct {
	server *Server
	ca     *CA
	clock  *clock
	tls    string // addresses
	plain  string

	mu   sync.Mutex
	dial func(ctx context.Context, endpoint string) (net.Conn, error)
}

var shopEndpoints = []Endpoint{
	{Name: "shop", Host: "shop.test", Kind: KindHTTPS, Machine: "web", Port: 8080, Protocol: "http"},
	{Name: "pay", Host: "pay.test", Kind: KindHTTPS, Machine: "web", Port: 8081, Protocol: "http"},
	{Name: "plain", Host: "plain.test", Kind: KindHTTP, Machine: "web", Port: 8082, Protocol: "http"},
}

func newEdge(t *testing.T, backend http.Handler) *edge {
	t.Helper()
	e := &edge{clock: &clock{now: time.Now()}}
	if backend != nil {
		origin := httptest.NewServer(backend)
		t.Cleanup(origin.Close)
		e.dial = func(ctx context.Context, endpoint string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", origin.Listener.Addr().String())
		}
	}
	var err error
	e.ca, err = loadOrCreateCA(t.TempDir(), "shop", e.clock.Now)
	require.NoError(t, err)
	e.server = NewServer(Config{Environment: "shop-1", Endpoints: shopEndpoints, CA: e.ca, ResponseTimeout: time.Second,
		Dial: func(ctx context.Context, endpoint string) (net.Conn, error) {
			e.mu.Lock()
			dial := e.dial
			e.mu.Unlock()
			return dial(ctx, endpoint)
		}})
	done := make(chan error, 2)
	for _, s := range []struct {
		serve   func(net.Listener) error
		address *string
	}{{e.server.ServeTLS, &e.tls}, {e.server.ServeHTTP, &e.plain}} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		*s.address = l.Addr().String()
		go func() { done <- s.serve(l) }()
	}
	t.Cleanup(func() { // before the origin closes, which waits for its connections
		assert.NoError(t, e.server.Close())
		assert.ErrorIs(t, <-done, net.ErrClosed)
		assert.ErrorIs(t, <-done, net.ErrClosed)
	})
	return e
}

func (e *edge) failWith(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.dial = func(context.Context, string) (net.Conn, error) { return nil, err }
}

func (e *edge) roots() *x509.CertPool {
	roots := x509.NewCertPool()
	roots.AddCert(e.ca.Certificate())
	return roots
}

// client reaches every name at the edge, trusts its CA and follows no redirect.
func (e *edge) client(t *testing.T, h2 bool) *http.Client {
	transport := &http.Transport{
		TLSClientConfig:   &tls.Config{RootCAs: e.roots()},
		ForceAttemptHTTP2: h2,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			to := e.plain
			if strings.HasSuffix(address, ":443") {
				to = e.tls
			}
			return new(net.Dialer).DialContext(ctx, "tcp", to)
		},
	}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

func get(t *testing.T, c *http.Client, url string, headers ...string) (*http.Response, string) {
	t.Helper()
	r, err := http.NewRequest(http.MethodGet, url, nil)
	require.NoError(t, err)
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	response, err := c.Do(r)
	require.NoError(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return response, string(body)
}

func TestBothVersions(t *testing.T) {
	e := newEdge(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s %s", r.Proto, r.Host, r.URL.RequestURI())
	}))
	for _, h2 := range []bool{false, true} {
		response, body := get(t, e.client(t, h2), "https://shop.test/a%2Fb?x=1&y=;")
		assert.Equal(t, 200, response.StatusCode)
		assert.Equal(t, "HTTP/1.1 shop.test /a%2Fb?x=1&y=;", body)
		if h2 {
			assert.Equal(t, 2, response.ProtoMajor)
		} else {
			assert.Equal(t, 1, response.ProtoMajor)
		}
		assert.Equal(t, []string{"shop.test"}, response.TLS.PeerCertificates[0].DNSNames)
	}
	_, body := get(t, e.client(t, false), "http://plain.test/x")
	assert.Equal(t, "HTTP/1.1 plain.test /x", body)
}

func TestForwarded(t *testing.T) {
	e := newEdge(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { json.NewEncoder(w).Encode(r.Header) }))
	lies := []string{"X-Forwarded-For", "6.6.6.6", "X-Forwarded-Proto", "lie", "X-Forwarded-Host", "lie", "X-Forwarded-Port", "1",
		"X-Real-Ip", "6.6.6.6", "Forwarded", "for=6.6.6.6", "X-Mine", "kept"}
	for url, proto := range map[string]string{"https://shop.test/": "https", "http://plain.test/": "http"} {
		_, body := get(t, e.client(t, true), url, lies...)
		var got http.Header
		require.NoError(t, json.Unmarshal([]byte(body), &got))
		host := strings.Trim(strings.TrimPrefix(url, proto+"://"), "/")
		assert.Equal(t, []string{"127.0.0.1"}, got["X-Forwarded-For"])
		assert.Equal(t, []string{proto}, got["X-Forwarded-Proto"])
		assert.Equal(t, []string{host}, got["X-Forwarded-Host"])
		assert.Equal(t, []string{`for=127.0.0.1;host="` + host + `";proto=` + proto}, got["Forwarded"])
		assert.NotContains(t, got, "X-Forwarded-Port")
		assert.NotContains(t, got, "X-Real-Ip")
		assert.Equal(t, []string{"kept"}, got["X-Mine"])
	}
}

func TestForwardedQuotes(t *testing.T) {
	r := httptest.NewRequest("GET", "http://x/", nil)
	r.RemoteAddr, r.Host = "[2001:db8::1]:99", `a"b\c`
	assert.Equal(t, `for="[2001:db8::1]";host="a\"b\\c";proto=http`, forwarded(r))
}

func TestRedirect(t *testing.T) {
	e := newEdge(t, http.NotFoundHandler())
	c := e.client(t, false)
	for _, method := range []string{"GET", "POST"} {
		r, err := http.NewRequest(method, "http://SHOP.test:80/a%20b?c=d", nil)
		require.NoError(t, err)
		response, err := c.Do(r)
		require.NoError(t, err)
		response.Body.Close()
		assert.Equal(t, 308, response.StatusCode)
		assert.Equal(t, "https://shop.test/a%20b?c=d", response.Header.Get("Location"))
	}
}

func TestHandshakesForNoEndpoint(t *testing.T) {
	e := newEdge(t, http.NotFoundHandler())
	for _, name := range []string{"other.test", "", "plain.test", "198.51.100.2", "www.shop.test", "example.com"} {
		_, err := tls.Dial("tcp", e.tls, &tls.Config{ServerName: name, InsecureSkipVerify: true})
		assert.ErrorContains(t, err, "remote error: tls: unrecognized name", name)
	}
	conn, err := tls.Dial("tcp", e.tls, &tls.Config{ServerName: "SHOP.TEST", RootCAs: e.roots()})
	require.NoError(t, err)
	conn.Close()
}

func TestMisdirected(t *testing.T) {
	reached := atomic.Bool{}
	e := newEdge(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached.Store(true) }))
	for _, h2 := range []bool{false, true} {
		r, err := http.NewRequest("GET", "https://shop.test/", nil)
		require.NoError(t, err)
		for _, host := range []string{"pay.test", "other.test", "127.0.0.1"} {
			r.Host = host
			response, err := e.client(t, h2).Do(r)
			require.NoError(t, err)
			body, err := io.ReadAll(response.Body)
			require.NoError(t, err)
			response.Body.Close()
			assert.Equal(t, 421, response.StatusCode)
			assert.Contains(t, string(body), "for shop.test, and the request for "+host)
		}
	}
	response, body := get(t, e.client(t, false), "http://other.test/")
	assert.Equal(t, 404, response.StatusCode)
	assert.Contains(t, body, "pay.test, plain.test, shop.test")
	assert.False(t, reached.Load())
}

// refusal is a net.Error as a stack of its own would have it.
type refusal struct{ timeout bool }

func (refusal) Error() string     { return `<b>"no"</b>` }
func (r refusal) Timeout() bool   { return r.timeout }
func (r refusal) Temporary() bool { return false }

func TestUnreadyBackend(t *testing.T) {
	e := newEdge(t, nil)
	c := e.client(t, true)
	for _, test := range []struct {
		err    error
		status int
		reason string
		detail string
	}{
		{&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, 502, "refused", "Nothing listens on port 8080 of Machine web."},
		{fmt.Errorf("domain: %w", syscall.EACCES), 503, "refused by policy", "The edge may not reach port 8080 of Machine web."},
		{context.DeadlineExceeded, 504, "timeout", "Port 8080 of Machine web did not answer in time."},
		{refusal{timeout: true}, 504, "timeout", "Port 8080 of Machine web did not answer in time."},
		{syscall.EHOSTUNREACH, 503, "unreachable", "There is no way to Machine web."},
		{refusal{}, 503, "unreachable", "There is no way to Machine web."},
	} {
		e.failWith(test.err)
		response, body := get(t, c, "https://shop.test/", "Accept", "application/json")
		assert.Equal(t, test.status, response.StatusCode)
		assert.Equal(t, "application/json", response.Header.Get("Content-Type"))
		assert.Equal(t, "no-store", response.Header.Get("Cache-Control"))
		var p problem
		require.NoError(t, json.Unmarshal([]byte(body), &p))
		assert.NotEmpty(t, p.Next)
		p.Next = ""
		assert.Equal(t, problem{Status: test.status, Environment: "shop-1", Endpoint: "shop", Host: "shop.test", Machine: "web", Port: 8080,
			Reason: test.reason, Detail: test.detail, Cause: test.err.Error()}, p)

		response, body = get(t, c, "https://shop.test/") // as curl
		assert.Equal(t, test.status, response.StatusCode)
		assert.Equal(t, "text/plain; charset=utf-8", response.Header.Get("Content-Type"))
		for _, want := range []string{"shop-1", "shop (shop.test)", "web, port 8080", test.reason, test.detail} {
			assert.Contains(t, body, want)
		}

		response, body = get(t, c, "https://shop.test/", "Accept", "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8")
		assert.Equal(t, "text/html; charset=utf-8", response.Header.Get("Content-Type"))
		assert.Contains(t, body, test.detail)
		assert.Contains(t, response.Header.Get("Content-Security-Policy"), "default-src 'none'")
		assert.NotContains(t, body, "<b>")
	}
}

func TestPreferred(t *testing.T) {
	for accept, want := range map[string]string{
		"":                      "text/plain",
		"*/*":                   "text/plain",
		"text/*":                "text/plain",
		"text/html":             "text/html",
		"text/html, */*":        "text/html",
		"application/json, */*": "application/json",
		"application/*":         "application/json",
		"text/html;q=0.1, */*":  "text/plain",
		"text/html;q=0, */*":    "text/plain",
		"image/png":             "text/plain",
		"text/html;q=x":         "text/plain",
		",;,=":                  "text/plain",
		"text/html;q=0.5, */*;q=0.4, application/json;q=0.6":                         "application/json",
		"text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8": "text/html",
	} {
		assert.Equal(t, want, preferred([]string{accept}), accept)
	}
}

// A backend that takes the connection and speaks something else.
func TestBackendThatIsNoHTTP(t *testing.T) {
	e := newEdge(t, nil)
	e.dial = func(context.Context, string) (net.Conn, error) {
		ours, theirs := net.Pipe()
		go func() {
			theirs.Read(make([]byte, 1000))
			io.WriteString(theirs, "220 mail.test ESMTP\r\n")
			theirs.Close()
		}()
		return ours, nil
	}
	response, body := get(t, e.client(t, true), "https://shop.test/")
	assert.Equal(t, 502, response.StatusCode)
	assert.Contains(t, body, "Port 8080 of Machine web broke off, or did not speak HTTP.")
}

// A backend that takes the connection and says nothing.
func TestSilentBackend(t *testing.T) {
	e := newEdge(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	response, body := get(t, e.client(t, false), "https://shop.test/")
	assert.Equal(t, 504, response.StatusCode)
	assert.Contains(t, body, "timeout")
}

func TestUpdate(t *testing.T) {
	origins := map[string]*httptest.Server{}
	for _, name := range []string{"one", "two"} {
		origins[name] = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, name) }))
		defer origins[name].Close()
	}
	e := newEdge(t, http.NotFoundHandler())
	where := "one"
	e.dial = func(ctx context.Context, endpoint string) (net.Conn, error) {
		return net.Dial("tcp", origins[where].Listener.Addr().String())
	}
	c := e.client(t, true)
	_, body := get(t, c, "https://shop.test/")
	assert.Equal(t, "one", body)

	e.mu.Lock()
	where = "two"
	e.mu.Unlock()
	_, body = get(t, c, "https://shop.test/")
	assert.Equal(t, "one", body, "the connection is kept")

	e.server.Update([]Endpoint{{Name: "shop", Host: "shop.test", Kind: KindHTTPS, Machine: "other", Port: 80, Protocol: "http"}})
	_, body = get(t, c, "https://shop.test/")
	assert.Equal(t, "two", body, "another backend, and no connection of the first")

	_, err := tls.Dial("tcp", e.tls, &tls.Config{ServerName: "pay.test", RootCAs: e.roots()})
	assert.Error(t, err)
	e.server.Update(nil)
	response, _ := get(t, c, "https://shop.test/") // on the connection that is open
	assert.Equal(t, 421, response.StatusCode)
}

// Whatever the clock does, a handshake gets a certificate that is valid then.
func TestClockJumps(t *testing.T) {
	e := newEdge(t, http.NotFoundHandler())
	for _, jump := range []time.Duration{0, 25 * time.Hour, 90 * 24 * time.Hour, -60 * 24 * time.Hour} {
		e.clock.Add(jump)
		conn, err := tls.Dial("tcp", e.tls, &tls.Config{ServerName: "shop.test", RootCAs: e.roots(), Time: e.clock.Now})
		require.NoError(t, err)
		conn.Close()
	}
}

func TestWebSocket(t *testing.T) {
	e := newEdge(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "websocket" {
			http.Error(w, "no upgrade", 400)
			return
		}
		conn, buffered, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		io.Copy(conn, buffered)
	}))
	conn, err := tls.Dial("tcp", e.tls, &tls.Config{ServerName: "shop.test", RootCAs: e.roots()})
	require.NoError(t, err)
	defer conn.Close()
	_, err = io.WriteString(conn, "GET /ws HTTP/1.1\r\nHost: shop.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	require.NoError(t, err)
	reader := bufio.NewReader(conn)
	response, err := http.ReadResponse(reader, nil)
	require.NoError(t, err)
	assert.Equal(t, 101, response.StatusCode)
	for i := range 3 {
		message := fmt.Sprintf("message %d", i)
		_, err = io.WriteString(conn, message)
		require.NoError(t, err)
		got := make([]byte, len(message))
		_, err = io.ReadFull(reader, got)
		require.NoError(t, err)
		assert.Equal(t, message, string(got))
	}
	require.NoError(t, e.server.Close(), "ends what was upgraded too")
	_, err = reader.ReadByte()
	assert.Error(t, err)
}

// Each event arrives before the next is made.
func TestEventStream(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		next := make(chan struct{})
		e := newEdge(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			for i := 0; ; i++ {
				fmt.Fprintf(w, "data: %d\n\n", i)
				w.(http.Flusher).Flush()
				select {
				case <-next:
				case <-r.Context().Done():
					return
				}
			}
		}))
		ctx, cancel := context.WithCancel(context.Background())
		r, err := http.NewRequestWithContext(ctx, "GET", "https://shop.test/events", nil)
		require.NoError(t, err)
		response, err := e.client(t, h2).Do(r)
		require.NoError(t, err)
		lines := bufio.NewScanner(response.Body)
		for i := range 3 {
			require.True(t, lines.Scan())
			assert.Equal(t, fmt.Sprintf("data: %d", i), lines.Text())
			require.True(t, lines.Scan())
			next <- struct{}{}
		}
		cancel()
		response.Body.Close()
	}
}

func TestContinue(t *testing.T) {
	e := newEdge(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/no" {
			http.Error(w, "no", http.StatusForbidden)
			return
		}
		body, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "got %s", body)
	}))
	conn, err := tls.Dial("tcp", e.tls, &tls.Config{ServerName: "shop.test", RootCAs: e.roots()})
	require.NoError(t, err)
	defer conn.Close()
	reader := bufio.NewReader(conn)
	_, err = io.WriteString(conn, "POST / HTTP/1.1\r\nHost: shop.test\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n")
	require.NoError(t, err)
	line, err := reader.ReadString('\n')
	require.NoError(t, err)
	assert.Contains(t, line, "100 Continue")
	_, err = reader.ReadString('\n')
	require.NoError(t, err)
	_, err = io.WriteString(conn, "body")
	require.NoError(t, err)
	response, err := http.ReadResponse(reader, nil)
	require.NoError(t, err)
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	assert.Equal(t, "got body", string(body))

	r, err := http.NewRequest("POST", "https://shop.test/no", io.MultiReader(strings.NewReader("body"))) // of unknown length
	require.NoError(t, err)
	r.Header.Set("Expect", "100-continue")
	refused, err := e.client(t, false).Do(r)
	require.NoError(t, err)
	refused.Body.Close()
	assert.Equal(t, 403, refused.StatusCode)
}

func TestBodiesAreStreamed(t *testing.T) {
	const size = 8 << 20
	e := newEdge(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		hash := sha256.New()
		w.Header().Set("Trailer", "X-Sum")
		http.NewResponseController(w).EnableFullDuplex()
		io.Copy(io.MultiWriter(w, hash), r.Body)
		w.Header().Set("X-Sum", fmt.Sprintf("%x", hash.Sum(nil)))
	}))
	for _, h2 := range []bool{false, true} {
		sent := sha256.New()
		r, err := http.NewRequest("POST", "https://shop.test/", io.TeeReader(io.LimitReader(&pattern{}, size), sent))
		require.NoError(t, err)
		response, err := e.client(t, h2).Do(r)
		require.NoError(t, err)
		got := sha256.New()
		n, err := io.Copy(got, response.Body)
		require.NoError(t, err)
		response.Body.Close()
		assert.EqualValues(t, size, n)
		assert.Equal(t, sent.Sum(nil), got.Sum(nil))
		assert.Equal(t, fmt.Sprintf("%x", got.Sum(nil)), response.Trailer.Get("X-Sum"))
	}
}

// pattern is endless and does not repeat at any power of two.
type pattern struct{ n byte }

func (p *pattern) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = p.n
		p.n = (p.n + 1) % 251
	}
	return len(b), nil
}

func TestHeadersAreBounded(t *testing.T) {
	e := newEdge(t, http.NotFoundHandler())
	response, _ := get(t, e.client(t, false), "http://plain.test/", "X-Long", strings.Repeat("x", 100<<10))
	assert.Equal(t, 431, response.StatusCode)
}

// The ways to say two things about where a request ends.
func TestSmuggling(t *testing.T) {
	var requests atomic.Int32
	e := newEdge(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { requests.Add(1); io.Copy(io.Discard, r.Body) }))
	for _, headers := range []string{
		"Content-Length: 5\r\nContent-Length: 6\r\n",
		"Content-Length: +5\r\n",
		"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
		"Transfer-Encoding: xchunked\r\n",
		"Transfer-Encoding : chunked\r\n",
		"X: a\rContent-Length: 5\r\n",
		"Host: pay.test\r\n",
	} {
		conn, err := net.Dial("tcp", e.plain)
		require.NoError(t, err)
		_, err = io.WriteString(conn, "POST / HTTP/1.1\r\nHost: plain.test\r\n"+headers+"\r\nhello")
		require.NoError(t, err)
		response, err := http.ReadResponse(bufio.NewReader(conn), nil)
		require.NoError(t, err, headers)
		assert.GreaterOrEqual(t, response.StatusCode, 400, headers)
		assert.True(t, response.Close, headers)
		conn.Close()
	}
	assert.Zero(t, requests.Load())
}

func TestClose(t *testing.T) {
	entered := make(chan struct{})
	e := newEdge(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.(http.Flusher).Flush()
		close(entered)
		<-r.Context().Done() // longer than any grace
	}))
	c := e.client(t, true)
	failed := make(chan error)
	go func() {
		response, err := c.Get("https://shop.test/")
		if err == nil {
			_, err = io.ReadAll(response.Body)
			response.Body.Close()
		}
		failed <- err
	}()
	<-entered
	require.NoError(t, e.server.Close())
	assert.Error(t, <-failed)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	assert.ErrorIs(t, e.server.ServeTLS(l), net.ErrClosed)
}

func TestListenersErrorIsPassedOn(t *testing.T) {
	gone := errors.New("gone")
	s := NewServer(Config{Dial: func(context.Context, string) (net.Conn, error) { return nil, gone }})
	defer s.Close()
	assert.ErrorIs(t, s.ServeHTTP(brokenListener{gone}), gone)
}

type brokenListener struct{ err error }

func (l brokenListener) Accept() (net.Conn, error) { return nil, l.err }
func (brokenListener) Close() error                { return nil }
func (brokenListener) Addr() net.Addr              { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)} }

func TestOpenSSL(t *testing.T) {
	if _, err := exec.LookPath("openssl"); err != nil {
		t.Skip("openssl is not installed")
	}
	e := newEdge(t, http.NotFoundHandler())
	for name, want := range map[string]string{"shop.test": "Verify return code: 0 (ok)", "other.test": "unrecognized name"} {
		command := exec.Command("openssl", "s_client", "-connect", e.tls, "-servername", name, "-CAfile", e.ca.Path(), "-verify_hostname", name, "-alpn", "h2")
		command.Stdin = bytes.NewReader(nil)
		out, _ := command.CombinedOutput()
		assert.Contains(t, string(out), want)
	}
}
