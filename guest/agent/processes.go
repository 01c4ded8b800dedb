//go:build linux

package agent

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"vz.test/vz/guest/wire"
)

const (
	// A process that ends is started again after backoffFirst, then twice as
	// long each time up to backoffLast, so that one that can't run costs
	// nothing. One that ran for steady has shown that it can.
	backoffFirst = 100 * time.Millisecond
	backoffLast  = 10 * time.Second
	steady       = 10 * time.Second
	// readyEvery is how often a port is looked for while a process starts.
	readyEvery = 50 * time.Millisecond
	// maxProcesses bounds what a definition may declare for one Machine: each
	// has up to logBytes of memory.
	maxProcesses = 256
)

// backoff is the pause before the next start, given the last pause and how long
// the process ran.
func backoff(last, ran time.Duration) time.Duration {
	if last == 0 || ran >= steady {
		return backoffFirst
	}
	return min(2*last, backoffLast)
}

// table holds the declared processes and their states.
type table struct {
	agent   *agent
	setting sync.Mutex // one SetProcesses at a time

	mu        sync.Mutex // of all below
	processes map[string]*process
	states    map[string]*state // of those that are gone too, by name
	version   uint64            // of the newest state; 0 is before all of them
	changed   chan struct{}     // closed at the next change
}

type state struct {
	status  *wire.ProcessStatus // never changed in place
	version uint64
}

// process is one declared process.
//
//	STARTING ──ready──► RUNNING ──ends──► EXITED (0) or FAILED
//	    ▲  └───────ends────┘ │
//	    └────── BACKOFF ◄────┘ when its restart policy says so
//	any of them ──no longer declared, or Shutdown──► STOPPED
type process struct {
	spec   *wire.ProcessSpec
	book   *book
	cancel context.CancelFunc
	grace  time.Duration // set before cancel
	done   chan struct{}
}

func newTable(a *agent) *table {
	return &table{agent: a, processes: map[string]*process{}, states: map[string]*state{}, version: 1, changed: make(chan struct{})}
}

// SetProcesses makes the declared processes those of the request. One that has
// failed for good is begun again: whoever asks has mended the cause.
func (a *agent) SetProcesses(_ context.Context, request *connect.Request[wire.SetProcessesRequest]) (*connect.Response[wire.SetProcessesResponse], error) {
	if err := a.begin(); err != nil {
		return nil, err
	}
	specs := map[string]*wire.ProcessSpec{}
	for _, spec := range request.Msg.GetProcesses() {
		switch {
		case spec.GetName() == "":
			return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("a process without a name"))
		case specs[spec.GetName()] != nil:
			return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("two processes are called %q", spec.GetName()))
		case len(spec.GetCommand()) == 0:
			return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("process %q has no command", spec.GetName()))
		case spec.GetReadyTcpPort() > 65535:
			return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("process %q: %d is no TCP port", spec.GetName(), spec.GetReadyTcpPort()))
		}
		specs[spec.GetName()] = spec
	}
	if len(specs) > maxProcesses {
		return nil, connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("%d processes; a Machine has at most %d", len(specs), maxProcesses))
	}
	a.table.set(specs)
	return connect.NewResponse(&wire.SetProcessesResponse{}), nil
}

func (t *table) set(specs map[string]*wire.ProcessSpec) {
	t.setting.Lock()
	defer t.setting.Unlock()
	// A changed process keeps its log and starts when its old self has ended;
	// so does the whole set, because one may hold a port that another wants.
	books := map[string]*book{}
	var ended sync.WaitGroup
	t.mu.Lock()
	for name, p := range t.processes {
		spec := specs[name]
		if spec != nil && proto.Equal(spec, p.spec) && !t.failed(name) {
			continue
		}
		delete(t.processes, name)
		if spec != nil {
			books[name] = p.book
		}
		ended.Go(func() {
			p.stop(stopGrace)
			if spec == nil {
				p.book.close()
			}
		})
	}
	t.mu.Unlock()
	ended.Wait()
	for name, spec := range specs {
		t.mu.Lock()
		if t.processes[name] == nil {
			p := &process{spec: spec, book: books[name], done: make(chan struct{})}
			if p.book == nil {
				p.book = newBook()
			}
			var ctx context.Context
			ctx, p.cancel = context.WithCancel(context.Background()) // stop ends it, and says with what grace
			t.processes[name] = p
			delete(t.states, name) // its old self's
			go func() {
				defer close(p.done)
				t.run(ctx, p)
			}()
		}
		t.mu.Unlock()
	}
}

// failed says whether a process has ended badly and is not begun again. The
// caller holds mu.
func (t *table) failed(name string) bool {
	s := t.states[name]
	return s != nil && s.status.GetState() == wire.ProcessStatus_STATE_FAILED
}

// stop ends all of them and their logs; a grace of 0 is SIGKILL at once.
func (t *table) stop(grace time.Duration) {
	t.setting.Lock()
	defer t.setting.Unlock()
	t.mu.Lock()
	var ended sync.WaitGroup
	for name, p := range t.processes {
		delete(t.processes, name)
		ended.Go(func() {
			p.stop(grace)
			p.book.close()
		})
	}
	t.mu.Unlock()
	ended.Wait()
}

func (p *process) stop(grace time.Duration) {
	p.grace = grace
	p.cancel()
	<-p.done
}

// run keeps one process going until ctx ends.
func (t *table) run(ctx context.Context, p *process) {
	status := &wire.ProcessStatus{Name: p.spec.GetName()}
	publish := func(state wire.ProcessStatus_State, message string) {
		status.State, status.Message = state, message
		t.publish(proto.Clone(status).(*wire.ProcessStatus))
	}
	defer func() {
		status.Pid = 0
		publish(wire.ProcessStatus_STATE_STOPPED, "")
	}()
	for pause := time.Duration(0); ; {
		began := time.Now()
		message := t.once(ctx, p, status, publish)
		if ctx.Err() != nil {
			return
		}
		status.Pid = 0
		failed := status.ExitCode != 0 || status.Signal != 0
		again := p.spec.GetRestart() == wire.RestartPolicy_RESTART_POLICY_ALWAYS ||
			p.spec.GetRestart() == wire.RestartPolicy_RESTART_POLICY_ON_FAILURE && failed
		if !again {
			if failed {
				publish(wire.ProcessStatus_STATE_FAILED, message)
			} else {
				publish(wire.ProcessStatus_STATE_EXITED, message)
			}
			<-ctx.Done()
			return
		}
		pause = backoff(pause, time.Since(began))
		publish(wire.ProcessStatus_STATE_BACKOFF, fmt.Sprintf("%s; starting again in %v", message, pause))
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		status.Restarts++
	}
}

// once runs the process to its end, puts how it ended into status and says it
// in words.
func (t *table) once(ctx context.Context, p *process, status *wire.ProcessStatus, publish func(wire.ProcessStatus_State, string)) string {
	c, drained, failed := t.start(p)
	if failed != nil {
		status.Signal = 0
		switch failed.GetReason() {
		case wire.ExecFailed_REASON_NOT_FOUND:
			status.ExitCode = 127
		case wire.ExecFailed_REASON_NOT_EXECUTABLE:
			status.ExitCode = 126
		default:
			status.ExitCode = 125
		}
		return failed.GetMessage()
	}
	status.Pid, status.ExitCode, status.Signal = int32(c.pid), 0, 0
	if port := p.spec.GetReadyTcpPort(); port != 0 {
		publish(wire.ProcessStatus_STATE_STARTING, fmt.Sprintf("waiting for TCP port %d", port))
		tick := time.NewTicker(readyEvery)
		defer tick.Stop()
		for !listening(port) {
			select {
			case <-ctx.Done():
			case <-c.done:
			case <-tick.C:
				continue
			}
			break
		}
	}
	if ctx.Err() == nil && !c.exited() {
		publish(wire.ProcessStatus_STATE_RUNNING, "")
	}
	select {
	case <-ctx.Done():
		c.end(unix.SIGTERM, p.grace)
	case <-c.done:
		// What it left behind would hold its ports against its next self.
		c.end(unix.SIGKILL, 0)
	}
	select {
	case <-drained:
	case <-time.After(quiet): // a daemon that left the session writes on
	}
	how := exited(c.status)
	status.ExitCode, status.Signal = how.GetCode(), how.GetSignal()
	if how.GetSignal() != 0 {
		return fmt.Sprintf("ended by signal %d (%v)", how.GetSignal(), unix.Signal(how.GetSignal()))
	}
	return fmt.Sprintf("exited with status %d", how.GetCode())
}

// start returns with the child a channel that closes when its output has been
// read to the end.
func (t *table) start(p *process) (*child, <-chan struct{}, *wire.ExecFailed) {
	c, failed := find(p.spec.GetCommand(), p.spec.GetEnv(), p.spec.GetCwd(), false)
	if failed != nil {
		return nil, nil, failed
	}
	s, failed := openStreams(false)
	if failed != nil {
		return nil, nil, failed
	}
	defer s.closeTheirs()
	child, failed := c.start(t.agent.reaper, s.theirs, false)
	if failed != nil {
		s.closeOurs()
		return nil, nil, failed
	}
	drained := make(chan struct{})
	var keepers sync.WaitGroup
	keepers.Go(func() { keep(t.agent.ctx, s.stdout, p.book, false) })
	keepers.Go(func() { keep(t.agent.ctx, s.stderr, p.book, true) })
	go func() {
		defer close(drained)
		keepers.Wait()
	}()
	return child, drained, nil
}

// keep reads source to its end, or to the agent's, into the book.
func keep(ctx context.Context, source io.ReadCloser, b *book, stderr bool) {
	stop := context.AfterFunc(ctx, func() { source.Close() })
	defer stop()
	defer source.Close()
	buffer := make([]byte, 32<<10)
	for {
		n, err := source.Read(buffer)
		b.write(buffer[:n], stderr)
		if err != nil {
			return
		}
	}
}

func (t *table) publish(s *wire.ProcessStatus) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.version++
	t.states[s.GetName()] = &state{status: s, version: t.version}
	close(t.changed)
	t.changed = make(chan struct{})
}

// since returns the states newer than version, and the next version to ask
// with. From 0, only those of processes that are declared.
func (t *table) since(version uint64) (states []*wire.ProcessStatus, now uint64, changed <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for name, s := range t.states {
		if s.version > version && (version > 0 || t.processes[name] != nil) {
			states = append(states, s.status)
		}
	}
	return states, t.version, t.changed
}

// WatchProcesses sends states until the supervisor or the Machine has enough.
func (a *agent) WatchProcesses(ctx context.Context, _ *connect.Request[wire.WatchProcessesRequest], stream *connect.ServerStream[wire.ProcessStatus]) error {
	for version := uint64(0); ; {
		states, now, changed := a.table.since(version)
		version = now
		for _, s := range states {
			if err := stream.Send(s); err != nil {
				return err
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		case <-a.finished:
			return nil
		}
	}
}

// Logs sends what a declared process wrote.
func (a *agent) Logs(ctx context.Context, request *connect.Request[wire.LogsRequest], stream *connect.ServerStream[wire.LogChunk]) error {
	a.table.mu.Lock()
	p := a.table.processes[request.Msg.GetProcess()]
	a.table.mu.Unlock()
	if p == nil {
		return connect.NewError(connect.CodeNotFound, fmt.Errorf("no process %q is declared in this Machine; vz status lists them", request.Msg.GetProcess()))
	}
	for at := p.book.tail(request.Msg.GetTailBytes()); ; {
		message, next, changed := p.book.read(at)
		at = next
		if message != nil {
			if err := stream.Send(message); err != nil {
				return err
			}
			continue
		}
		if changed == nil || !request.Msg.GetFollow() {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// listening says whether something listens on a TCP port, on whatever address.
// The kernel's table is read: a connection made only to try would show up in
// the server's log, and some servers count it as a failed login.
func listening(port uint32) bool {
	return listens("/proc/self/net/tcp", port) || listens("/proc/self/net/tcp6", port)
}

func listens(table string, port uint32) bool {
	f, err := os.Open(table)
	if err != nil {
		return false
	}
	defer f.Close()
	// proc_net_tcp: "sl local_address rem_address st ...", address:port in
	// hexadecimal; state 0A is LISTEN.
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) < 4 || fields[3] != "0A" {
			continue
		}
		_, hex, _ := strings.Cut(fields[1], ":")
		if p, err := strconv.ParseUint(hex, 16, 16); err == nil && uint32(p) == port {
			return true
		}
	}
	return false
}
