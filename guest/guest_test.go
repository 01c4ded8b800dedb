package guest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/net/http2"

	"vz.test/vz/guest/wire"
	"vz.test/vz/guest/wire/wireconnect"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// agent is one that the test makes up.
type agent struct {
	wireconnect.UnimplementedGuestServiceHandler
	hello wire.HelloResponse
	exec  func(context.Context, *connect.BidiStream[wire.ExecRequest, wire.ExecResponse]) error
}

func (a *agent) Hello(context.Context, *connect.Request[wire.HelloRequest]) (*connect.Response[wire.HelloResponse], error) {
	return connect.NewResponse(&a.hello), nil
}

func (a *agent) Exec(ctx context.Context, stream *connect.BidiStream[wire.ExecRequest, wire.ExecResponse]) error {
	return a.exec(ctx, stream)
}

// serve runs it until its channel closes.
func (a *agent) serve(t testing.TB) (host, inside net.Conn) {
	host, inside = net.Pipe()
	_, handler := wireconnect.NewGuestServiceHandler(a)
	done := make(chan struct{})
	go func() {
		defer close(done)
		(&http2.Server{}).ServeConn(inside, &http2.ServeConnOpts{Handler: handler})
	}()
	t.Cleanup(func() {
		inside.Close()
		<-done
	})
	return host, inside
}

func TestVersion(t *testing.T) {
	for _, protocol := range []uint32{0, wire.Protocol + 1} {
		host, _ := (&agent{hello: wire.HelloResponse{Protocol: protocol, AgentVersion: "v9"}}).serve(t)
		_, err := Connect(t.Context(), host, Hello{})
		var version *VersionError
		require.ErrorAs(t, err, &version)
		assert.Equal(t, protocol, version.Agent)
		assert.ErrorContains(t, err, "v9")
		_, err = host.Write(nil)
		assert.ErrorIs(t, err, io.ErrClosedPipe)
	}
}

func TestConnectGivesUp(t *testing.T) {
	t.Run("nobody reads", func(t *testing.T) {
		host, inside := net.Pipe()
		defer inside.Close()
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(10*time.Millisecond, cancel)
		_, err := Connect(ctx, host, Hello{})
		assert.ErrorIs(t, err, context.Canceled)
	})
	t.Run("nobody answers", func(t *testing.T) {
		host, inside := net.Pipe()
		go io.Copy(io.Discard, inside)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(10*time.Millisecond, cancel)
		_, err := Connect(ctx, host, Hello{})
		assert.ErrorContains(t, err, "canceled")
		_, err = host.Write(nil)
		assert.ErrorIs(t, err, io.ErrClosedPipe)
	})
	t.Run("gone", func(t *testing.T) {
		host, inside := net.Pipe()
		inside.Close()
		_, err := Connect(t.Context(), host, Hello{})
		assert.Error(t, err)
	})
}

func TestSessionEnds(t *testing.T) {
	a := &agent{hello: wire.HelloResponse{Protocol: 1, BootId: "b", Capabilities: []string{"posix_exec"}}}
	t.Run("agent gone", func(t *testing.T) {
		host, inside := a.serve(t)
		s, err := Connect(t.Context(), host, Hello{})
		require.NoError(t, err)
		assert.NoError(t, s.Err())
		assert.Equal(t, "b", s.BootID())
		inside.Close()
		<-s.Done()
		assert.ErrorIs(t, s.Err(), ErrGone)
		assert.Equal(t, connect.CodeUnavailable, connect.CodeOf(s.SetProcesses(t.Context(), nil)))
	})
	t.Run("closed", func(t *testing.T) {
		host, _ := a.serve(t)
		s, err := Connect(t.Context(), host, Hello{})
		require.NoError(t, err)
		s.Close()
		<-s.Done()
		assert.ErrorIs(t, s.Err(), ErrClosed)
	})
	t.Run("frozen", func(t *testing.T) {
		host, _ := a.serve(t)
		f := &freezer{ReadWriteCloser: host, frozen: make(chan struct{})}
		s, err := dial(t.Context(), f, Hello{}, keepalive{idle: 20 * time.Millisecond, answer: 20 * time.Millisecond})
		require.NoError(t, err)
		close(f.frozen)
		<-s.Done()
		assert.ErrorIs(t, s.Err(), ErrUnresponsive)
	})
	t.Run("broken protocol", func(t *testing.T) {
		host, inside := a.serve(t)
		s, err := Connect(t.Context(), host, Hello{})
		require.NoError(t, err)
		inside.Write([]byte("\x00\x00\x01\x00\x00\x00\x00\x00\x00x")) // DATA on stream 0
		<-s.Done()
		assert.ErrorContains(t, s.Err(), "broke the protocol")
	})
}

// freezer swallows what is written once frozen.
type freezer struct {
	io.ReadWriteCloser
	frozen chan struct{}
}

func (f *freezer) Write(p []byte) (int, error) {
	select {
	case <-f.frozen:
		return len(p), nil
	default:
		return f.ReadWriteCloser.Write(p)
	}
}

func TestExecRelay(t *testing.T) {
	type stream = connect.BidiStream[wire.ExecRequest, wire.ExecResponse]
	exit := func(code, signal int32) *wire.ExecResponse {
		return &wire.ExecResponse{Output: &wire.ExecResponse_Exited{Exited: &wire.ExecExited{Code: code, Signal: signal}}}
	}
	connected := func(t *testing.T, exec func(context.Context, *stream) error) *Session {
		host, _ := (&agent{hello: wire.HelloResponse{Protocol: 1}, exec: exec}).serve(t)
		s, err := Connect(t.Context(), host, Hello{})
		require.NoError(t, err)
		t.Cleanup(func() { s.Close() })
		return s
	}
	once := func() func() (*wire.ExecRequest, error) {
		sent := false
		return func() (*wire.ExecRequest, error) {
			if sent {
				return nil, io.EOF
			}
			sent = true
			return &wire.ExecRequest{Input: &wire.ExecRequest_Start{Start: &wire.ExecStart{}}}, nil
		}
	}
	t.Run("exit statuses in range, and the last word is the last", func(t *testing.T) {
		s := connected(t, func(_ context.Context, st *stream) error {
			st.Receive()
			st.Send(&wire.ExecResponse{})
			st.Send(exit(256+7, 1<<20+9))
			st.Send(exit(1, 1))
			return errors.New("and more")
		})
		var got []*wire.ExecResponse
		require.NoError(t, s.Exec(t.Context(), once(), func(r *wire.ExecResponse) error {
			got = append(got, r)
			return nil
		}))
		require.Len(t, got, 1)
		assert.EqualValues(t, 7, got[0].GetExited().GetCode())
		assert.EqualValues(t, 9, got[0].GetExited().GetSignal())
	})
	t.Run("no last word", func(t *testing.T) {
		s := connected(t, func(context.Context, *stream) error { return nil })
		assert.ErrorContains(t, s.Exec(t.Context(), once(), nil), "without an exit status")
	})
	cancelled := make(chan struct{}, 1)
	forever := func(ctx context.Context, st *stream) error {
		st.Receive()
		st.Send(&wire.ExecResponse{Output: &wire.ExecResponse_Stdout{Stdout: []byte("x")}})
		<-ctx.Done()
		cancelled <- struct{}{}
		return ctx.Err()
	}
	enough := errors.New("enough")
	t.Run("out fails", func(t *testing.T) {
		s := connected(t, forever)
		assert.ErrorIs(t, s.Exec(t.Context(), once(), func(*wire.ExecResponse) error { return enough }), enough)
		<-cancelled
	})
	t.Run("in fails", func(t *testing.T) {
		s := connected(t, forever)
		next, first := once(), true
		assert.ErrorIs(t, s.Exec(t.Context(), func() (*wire.ExecRequest, error) {
			if first {
				first = false
				return next()
			}
			return nil, enough
		}, func(*wire.ExecResponse) error { return nil }), enough)
		<-cancelled
	})
	t.Run("cancelled while in waits", func(t *testing.T) {
		s := connected(t, forever)
		ctx, cancel := context.WithCancel(t.Context())
		next, first := once(), true
		block := make(chan struct{})
		defer close(block)
		assert.ErrorIs(t, s.Exec(ctx, func() (*wire.ExecRequest, error) {
			if first {
				first = false
				return next()
			}
			<-block
			return nil, io.EOF
		}, func(*wire.ExecResponse) error { cancel(); return nil }), context.Canceled)
		<-cancelled
	})
}

// FuzzAgent gives a Session any bytes for an agent's.
func FuzzAgent(f *testing.F) {
	f.Add([]byte("\x00\x00\x00\x04\x00\x00\x00\x00\x00"))
	f.Add([]byte("\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x04\x01\x00\x00\x00\x00\x00\x00\x01\x01\x05\x00\x00\x00\x01\x88"))
	f.Add([]byte("HTTP/1.1 200 OK\r\n\r\n"))
	f.Fuzz(func(t *testing.T, p []byte) {
		s, err := Connect(t.Context(), tape{bytes.NewReader(p)}, Hello{})
		if err == nil {
			s.Close()
		}
	})
}

// tape is a channel that brings these bytes and then ends.
type tape struct{ io.Reader }

func (tape) Write(p []byte) (int, error) { return len(p), nil }
func (tape) Close() error                { return nil }
