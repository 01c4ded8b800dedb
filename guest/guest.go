// Package guest is the host's side of the agent inside a Machine: one Session
// over one byte stream, whatever driver made that stream.
//
//	session, err := guest.Connect(ctx, instance.Agent(), guest.Hello{MachineID: id, Incarnation: inc})
//	notes, err := session.Configure(ctx, request)
//	err = session.Exec(ctx, in, out)
//
// The agent is the HTTP/2 server on the stream and the supervisor its only
// client; the messages are guest/wire's. What an agent says is an outsider's
// word: messages, headers and windows are bounded, and exit statuses are cut
// to their range.
//
// It does not boot Machines, know the definition or decide what to run, and it
// never makes a second stream: when the channel ends, so does the Machine's
// incarnation.
package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/net/http2"

	"vz.test/vz/guest/wire"
	"vz.test/vz/guest/wire/wireconnect"
)

// Why a Session ended; see Session.Err.
var (
	// ErrClosed is the end that Close makes.
	ErrClosed = errors.New("guest: session closed")
	// ErrUnresponsive says that the agent answered no ping: the Machine is
	// frozen or starved.
	ErrUnresponsive = errors.New("guest: the agent does not answer")
	// ErrGone says that the agent closed the channel: the Machine has ended.
	ErrGone = errors.New("guest: the agent has closed its channel")
)

// VersionError says that supervisor and agent have no protocol in common.
type VersionError struct {
	AgentVersion string // the build that the agent says it is
	Agent        uint32 // the nearest protocol that it speaks
	Oldest       uint32 // those that this build speaks
	Newest       uint32
}

func (e *VersionError) Error() string {
	return fmt.Sprintf("guest: agent %s speaks protocol %d and this supervisor %d to %d; use a vz-guest of the same release",
		e.AgentVersion, e.Agent, e.Oldest, e.Newest)
}

// Hello says whom a Session is with. An agent belongs to one Machine and one
// incarnation all its life and refuses any other.
type Hello struct {
	MachineID   string
	Incarnation string
}

// keepalive is how a frozen agent is noticed.
type keepalive struct {
	// idle is how long the channel is silent before it is asked. Longer than
	// the longest pause of a healthy Machine that was measured (a VM under TCG
	// on a loaded host answered within 3 s), and short beside a human's
	// patience with a hung command.
	idle time.Duration
	// answer is how long the agent then has.
	answer time.Duration
}

var defaultKeepalive = keepalive{idle: 10 * time.Second, answer: 20 * time.Second}

// A Session is the conversation with one agent. Its methods may be called at
// once from several goroutines. Errors of calls are *connect.Error; once the
// Session is over they are of code Unavailable and Err has the reason.
type Session struct {
	client  wireconnect.GuestServiceClient
	http    *http2.ClientConn
	channel *channel
	hello   *wire.HelloResponse
}

// Connect takes ownership of conn and shakes hands with the agent at its other
// end; ctx bounds only that. It returns a *VersionError when the two have no
// protocol in common. On any error conn is closed.
func Connect(ctx context.Context, conn io.ReadWriteCloser, hello Hello) (*Session, error) {
	return dial(ctx, conn, hello, defaultKeepalive)
}

func dial(ctx context.Context, conn io.ReadWriteCloser, hello Hello, alive keepalive) (*Session, error) {
	c := &channel{ReadWriteCloser: conn, done: make(chan struct{})}
	transport, err := http2.ConfigureTransports(&http.Transport{
		DisableCompression:     true,
		MaxResponseHeaderBytes: 64 << 10,
		HTTP2: &http.HTTP2Config{
			MaxReceiveBufferPerConnection: wire.ChannelWindow,
			MaxReceiveBufferPerStream:     wire.StreamWindow,
			MaxReadFrameSize:              wire.FrameBytes,
			SendPingTimeout:               alive.idle,
			PingTimeout:                   alive.answer,
		},
	})
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("guest: %w", err)
	}
	transport.CountError = func(kind string) {
		if kind == "conn_close_lost_ping" {
			c.end(ErrUnresponsive)
		}
		if strings.HasPrefix(kind, "read_frame_") { // others are about one stream
			c.fault.Store(&kind)
		}
	}
	// The preface is written here; an agent that never reads must not hold
	// Connect beyond ctx.
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	client, err := transport.NewClientConn(wire.Conn(c))
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("guest: %w", errors.Join(err, ctx.Err()))
	}
	s := &Session{http: client, channel: c}
	s.client = wireconnect.NewGuestServiceClient(&http.Client{Transport: client}, "http://guest",
		connect.WithReadMaxBytes(wire.MessageBytes),
		connect.WithAcceptCompression("gzip", nil, nil), // the channel is memory: compressing would only cost
	)
	response, err := s.client.Hello(ctx, connect.NewRequest(&wire.HelloRequest{
		Protocol:    wire.Protocol,
		MachineId:   hello.MachineID,
		Incarnation: hello.Incarnation,
	}))
	if err != nil {
		s.Close()
		return nil, fmt.Errorf("guest: hello: %w", err)
	}
	s.hello = response.Msg
	if v := s.hello.GetProtocol(); v < wire.OldestProtocol || v > wire.Protocol {
		s.Close()
		return nil, &VersionError{AgentVersion: s.hello.GetAgentVersion(), Agent: v, Oldest: wire.OldestProtocol, Newest: wire.Protocol}
	}
	return s, nil
}

// Capabilities are what the agent negotiated, such as posix_exec.
func (s *Session) Capabilities() []string { return slices.Clone(s.hello.GetCapabilities()) }

// BootID was made by the agent when it started.
func (s *Session) BootID() string { return s.hello.GetBootId() }

// AgentVersion is the build that the agent says it is.
func (s *Session) AgentVersion() string { return s.hello.GetAgentVersion() }

// Configure makes the Machine what the request says. It is idempotent and may
// be called again with another request.
func (s *Session) Configure(ctx context.Context, request *wire.ConfigureRequest) (*wire.ConfigureResponse, error) {
	response, err := s.client.Configure(ctx, connect.NewRequest(request))
	if err != nil {
		return nil, err
	}
	return response.Msg, nil
}

// Exec relays one command: what in returns goes to the agent, the first of it
// ExecStart, and what the agent sends goes to out, the last of it ExecExited or
// ExecFailed, after which Exec returns nil. An error of out, or the end of ctx,
// ends the stream, and the agent then kills the command's session.
//
// in is called from another goroutine. Its io.EOF means that there is no more
// input: stdin ends and the command goes on. Any other error of in ends the
// stream. A call of in that is under way when Exec returns is left to return
// by itself; its result is dropped and no other call follows.
func (s *Session) Exec(ctx context.Context, in func() (*wire.ExecRequest, error), out func(*wire.ExecResponse) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	stream := s.client.Exec(ctx)
	// HTTP/2's transport does not see the end of ctx while it waits for more of
	// the request, so the request has to end as well.
	stop := context.AfterFunc(ctx, func() { stream.CloseRequest() })
	defer func() {
		cancel(nil) // first: closing a stream that has not ended reads what is left of it
		stop()
		stream.CloseResponse()
	}()
	go func() {
		for {
			request, err := in()
			if errors.Is(err, io.EOF) {
				stream.CloseRequest()
				return
			}
			if err != nil {
				cancel(err)
				return
			}
			if stream.Send(request) != nil {
				return // the receiver has the reason
			}
		}
	}()
	for {
		response, err := stream.Receive()
		if errors.Is(err, io.EOF) {
			return connect.NewError(connect.CodeInternal, errors.New("the agent ended the stream without an exit status"))
		}
		if err != nil {
			if cause := context.Cause(ctx); cause != nil {
				return cause
			}
			return err
		}
		var last bool
		switch output := response.GetOutput().(type) {
		case nil:
			continue // a later agent's message
		case *wire.ExecResponse_Exited:
			last = true
			output.Exited.Code &= 0xff
			output.Exited.Signal &= 0x7f
		case *wire.ExecResponse_Failed:
			last = true
		}
		if err := out(response); err != nil {
			return err
		}
		if last {
			return nil
		}
	}
}

// SetProcesses makes the set of declared processes what the request says; it
// returns when those no longer declared are gone and new ones have been begun.
func (s *Session) SetProcesses(ctx context.Context, processes []*wire.ProcessSpec) error {
	_, err := s.client.SetProcesses(ctx, connect.NewRequest(&wire.SetProcessesRequest{Processes: processes}))
	return err
}

// WatchProcesses calls f with the state of every declared process, and again
// whenever one changes, until ctx ends, f returns an error, or the Machine
// shuts down, for which it returns nil. A slow f sees the latest state of each
// process, not every one between.
func (s *Session) WatchProcesses(ctx context.Context, f func(*wire.ProcessStatus) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := s.client.WatchProcesses(ctx, connect.NewRequest(&wire.WatchProcessesRequest{}))
	if err != nil {
		return err
	}
	return each(stream, f)
}

// Logs calls f with what a declared process wrote, oldest first.
func (s *Session) Logs(ctx context.Context, request *wire.LogsRequest, f func(*wire.LogChunk) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := s.client.Logs(ctx, connect.NewRequest(request))
	if err != nil {
		return err
	}
	return each(stream, f)
}

// each needs the stream's context to be ended afterwards: closing a stream
// otherwise reads all that is left of it, and these have no end.
func each[T any](stream *connect.ServerStreamForClient[T], f func(*T) error) error {
	for stream.Receive() {
		if err := f(stream.Msg()); err != nil {
			return err
		}
	}
	return stream.Err()
}

// Shutdown stops the declared processes and then everything else, with grace
// between SIGTERM and SIGKILL, and returns once all of it is gone. The agent
// then exits, which is the end of the Machine and of the Session.
func (s *Session) Shutdown(ctx context.Context, grace time.Duration) error {
	_, err := s.client.Shutdown(ctx, connect.NewRequest(&wire.ShutdownRequest{GraceMillis: uint32(min(max(grace.Milliseconds(), 0), 1<<31))}))
	return err
}

// Done is closed when the channel has ended.
func (s *Session) Done() <-chan struct{} { return s.channel.done }

// Err says why the Session is over: ErrClosed, ErrGone, ErrUnresponsive or what
// went wrong on the channel. Nil before Done.
func (s *Session) Err() error {
	select {
	case <-s.channel.done:
		return s.channel.err
	default:
		return nil
	}
}

// Close ends the Session and closes the channel. An agent that is PID 1 takes
// its Machine with it.
func (s *Session) Close() error {
	s.channel.end(ErrClosed)
	return s.http.Close()
}

// channel watches the byte stream for its end.
type channel struct {
	io.ReadWriteCloser
	once sync.Once
	done chan struct{}
	err  error // set before done is closed
	// fault is the agent's last offence against HTTP/2.
	fault atomic.Pointer[string]
}

func (c *channel) Read(p []byte) (int, error) {
	n, err := c.ReadWriteCloser.Read(p)
	if err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) { // reset: it left something unread
			c.end(ErrGone)
		} else {
			c.end(fmt.Errorf("guest: channel: %w", err))
		}
	}
	return n, err
}

func (c *channel) Close() error {
	// HTTP/2 closes the stream by itself when the agent has said goodbye, as it
	// does after Shutdown, or has broken the rules.
	if fault := c.fault.Load(); fault != nil {
		c.end(fmt.Errorf("guest: the agent broke the protocol: %s", *fault))
	} else {
		c.end(ErrGone)
	}
	return c.ReadWriteCloser.Close()
}

func (c *channel) end(err error) {
	c.once.Do(func() {
		c.err = err
		close(c.done)
	})
}
