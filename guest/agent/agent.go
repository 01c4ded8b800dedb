//go:build linux

package agent

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/net/http2"

	"vz.test/vz/guest/wire"
	"vz.test/vz/guest/wire/wireconnect"
)

// Options say what the agent is to be.
type Options struct {
	// Init says that this process is PID 1 of a Machine: it reaps orphans, sets
	// the host name, and Shutdown ends every process there is. Otherwise the
	// agent touches nothing that it did not start.
	Init bool
	// Root is where the Machine's files are; empty means /. Tests use another.
	Root string
	// Version is the build, for the supervisor to show.
	Version string
	// Log tells of what goes wrong in the background; nil discards.
	Log *slog.Logger
}

const (
	// killGrace is how long a cancelled command has between the first signal
	// and SIGKILL: time to remove a lock file, not to finish work that nobody
	// waits for any more.
	killGrace = 2 * time.Second
	// stopGrace is the same for a declared process, which may have state to
	// write. Databases stop in under 3 s when idle.
	stopGrace = 5 * time.Second
)

// agent is one run of Serve.
type agent struct {
	options  Options
	log      *slog.Logger
	bootID   string
	root     root
	reaper   *reaper
	table    *table
	network  *network
	server   *http.Server
	ctx      context.Context // ends when the channel has closed
	stopping chan struct{}   // closed when Shutdown begins
	finished chan struct{}   // closed when it has ended everything

	configuring sync.Mutex // one Configure at a time

	mu       sync.Mutex // of all below
	bound    *wire.HelloRequest
	closed   bool // no call may begin
	calls    sync.WaitGroup
	shutting sync.Once
}

// Serve serves the one supervisor at the other end of channel, of which it
// takes ownership. It returns when the channel has closed and everything it
// started has ended: nil after a Shutdown, else why. As init it leaves the
// ending to the kernel, and the caller is to exit.
func Serve(ctx context.Context, channel io.ReadWriteCloser, options Options) error {
	return newAgent(options).serve(ctx, channel)
}

func newAgent(options Options) *agent {
	if options.Log == nil {
		options.Log = slog.New(slog.DiscardHandler)
	}
	if options.Root == "" {
		options.Root = "/"
	}
	a := &agent{
		options:  options,
		log:      options.Log,
		bootID:   rand.Text(),
		root:     root(options.Root),
		stopping: make(chan struct{}),
		finished: make(chan struct{}),
	}
	a.table = newTable(a)
	a.network = newNetwork(a.log, a.resolve)
	return a
}

func (a *agent) serve(ctx context.Context, channel io.ReadWriteCloser) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	a.ctx = ctx
	a.reaper = newReaper(a.options.Init)
	a.server = &http.Server{
		Handler:  a.handler(),
		ErrorLog: log.New(io.Discard, "", 0), // a supervisor that breaks the protocol sees the stream end
	}
	settings := &http2.Server{
		MaxConcurrentStreams:         wire.Streams,
		MaxReadFrameSize:             wire.FrameBytes,
		MaxUploadBufferPerConnection: wire.ChannelWindow,
		MaxUploadBufferPerStream:     wire.StreamWindow,
		// No pings from this end: a supervisor that is stopped in a debugger
		// must find its Machines alive, and one that died closes the stream.
	}
	if err := http2.ConfigureServer(a.server, settings); err != nil { // joins settings to server.Shutdown
		return fmt.Errorf("agent: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { channel.Close() })
	settings.ServeConn(wire.Conn(channel), &http2.ServeConnOpts{Context: ctx, BaseConfig: a.server, Handler: a.server.Handler})
	stop()

	err := errors.New("agent: the supervisor has closed the channel")
	select {
	case <-a.stopping:
		err = nil
	default:
	}
	if a.options.Init {
		return err // at once: with PID 1 the kernel ends every process of the Machine
	}
	// The order of the end: no call may begin; calls under way are cancelled
	// and kill what they run; then declared processes; then the background.
	a.mu.Lock()
	a.closed = true
	a.mu.Unlock()
	cancel()
	a.calls.Wait()
	a.table.stop(0)
	a.network.close()
	a.reaper.close()
	return err
}

type controllerKey struct{}

// handler counts the calls under way, so that the end can wait for them, and
// gives each its response controller, which is how Exec stops reading.
func (a *agent) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle(wireconnect.NewGuestServiceHandler(a,
		connect.WithReadMaxBytes(wire.MessageBytes),
		connect.WithCompression("gzip", nil, nil),
		connect.WithInterceptors(bindingInterceptor{a}),
	))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a.mu.Lock()
		if a.closed {
			a.mu.Unlock()
			return
		}
		a.calls.Add(1)
		a.mu.Unlock()
		defer a.calls.Done()
		mux.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), controllerKey{}, http.NewResponseController(w))))
	})
}

// bindingInterceptor refuses every call before Hello has bound the session.
type bindingInterceptor struct{ *agent }

func (a bindingInterceptor) check(procedure string) error {
	if procedure == wireconnect.GuestServiceHelloProcedure {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.bound == nil {
		return connect.NewError(connect.CodeFailedPrecondition, errors.New("Hello comes first"))
	}
	return nil
}

func (a bindingInterceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, request connect.AnyRequest) (connect.AnyResponse, error) {
		if err := a.check(request.Spec().Procedure); err != nil {
			return nil, err
		}
		return next(ctx, request)
	}
}

func (a bindingInterceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, stream connect.StreamingHandlerConn) error {
		if err := a.check(stream.Spec().Procedure); err != nil {
			return err
		}
		return next(ctx, stream)
	}
}

func (a bindingInterceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// Hello binds the agent to one Machine and one incarnation for all its life.
func (a *agent) Hello(_ context.Context, request *connect.Request[wire.HelloRequest]) (*connect.Response[wire.HelloResponse], error) {
	response := &wire.HelloResponse{
		Protocol:     min(request.Msg.GetProtocol(), wire.Protocol),
		AgentVersion: a.options.Version,
		Capabilities: []string{"posix_exec", "processes", "logs"},
		BootId:       a.bootID,
	}
	if t, failed := openTerminal(&wire.WindowSize{}); failed == nil { // its driver may have mounted no devpts
		t.closeTheirs()
		t.closeOurs()
		response.Capabilities = append(response.Capabilities, "posix_pty")
	}
	if response.Protocol < wire.OldestProtocol {
		response.Protocol = wire.OldestProtocol
		return connect.NewResponse(response), nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if b := a.bound; b != nil && (b.GetMachineId() != request.Msg.GetMachineId() || b.GetIncarnation() != request.Msg.GetIncarnation()) {
		return nil, connect.NewError(connect.CodeFailedPrecondition,
			fmt.Errorf("this agent belongs to Machine %s, incarnation %s", b.GetMachineId(), b.GetIncarnation()))
	}
	a.bound = request.Msg
	return connect.NewResponse(response), nil
}

// Shutdown ends everything and then lets HTTP/2 finish what is being said:
// Serve returns when the last stream has ended.
func (a *agent) Shutdown(_ context.Context, request *connect.Request[wire.ShutdownRequest]) (*connect.Response[wire.ShutdownResponse], error) {
	// Not bounded by the call's context: a Machine half shut down is of no use.
	a.shutting.Do(func() {
		grace := time.Duration(request.Msg.GetGraceMillis()) * time.Millisecond
		close(a.stopping)
		a.table.stop(grace)
		a.reaper.endAll(grace)
		close(a.finished)
		go a.server.Shutdown(context.WithoutCancel(a.ctx))
	})
	return connect.NewResponse(&wire.ShutdownResponse{}), nil
}

// begin refuses new work once Shutdown has begun.
func (a *agent) begin() error {
	select {
	case <-a.stopping:
		return connect.NewError(connect.CodeUnavailable, errors.New("the Machine is shutting down"))
	default:
		return nil
	}
}
