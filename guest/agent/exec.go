//go:build linux

package agent

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"vz.test/vz/guest/wire"
)

// A command has ended when its first process has, but what it left in the pipes
// is still to be read, and a process that it left behind may hold them open for
// ever. What was written before the end is at most a pipe's capacity, so it is
// always read; beyond that, output is awaited as ssh does while it keeps
// coming:
const (
	// quiet is the silence after which nothing more is expected. A child of
	// the command that is about to write its last words, such as the tee of a
	// process substitution, needs a few milliseconds, and on a host with a load
	// of five for each processor was seen to need more than 200.
	quiet = 500 * time.Millisecond
	// linger bounds the wait for a process left behind that never falls silent.
	linger = 10 * time.Second
	// pipeCapacity is pipe(7)'s default, which is not changed here.
	pipeCapacity = 64 << 10
)

// Exec runs one command.
//
//	             stdin ─► input ─► queue ─► feed ─► pipe or terminal
//	supervisor ◄─ send ◄─ pump ◄─ stdout     exited comes after all of them
//	           ◄─ send ◄─ pump ◄─ stderr
func (a *agent) Exec(ctx context.Context, stream *connect.BidiStream[wire.ExecRequest, wire.ExecResponse]) error {
	if err := a.begin(); err != nil {
		return err
	}
	first, err := stream.Receive()
	if err != nil {
		return err
	}
	start := first.GetStart()
	if start == nil {
		return connect.NewError(connect.CodeInvalidArgument, errors.New("the first message of an execution is start"))
	}
	e := &execution{agent: a, stream: stream, queue: newQueue(), terminal: start.GetTty() != nil}
	if failed := e.start(start); failed != nil {
		return e.send(&wire.ExecResponse{Output: &wire.ExecResponse_Failed{Failed: failed}})
	}
	e.send(&wire.ExecResponse{Output: &wire.ExecResponse_Started{Started: &wire.ExecStarted{
		Pid: int32(e.child.pid), StdinWindow: wire.StdinWindow,
	}}})

	var output, input sync.WaitGroup
	output.Go(func() { e.pump(e.stdout, stdout) })
	if !e.terminal {
		output.Go(func() { e.pump(e.stderr, stderr) })
	}
	fed := make(chan struct{})
	go func() {
		defer close(fed)
		e.feed()
	}()
	input.Go(e.input)

	select {
	case <-e.child.done:
	case <-ctx.Done():
		e.end()
	}
	// The first process has ended: its stdin is closed, its output drained.
	e.queue.close()
	e.closeInput()
	<-fed
	e.deadline()
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		output.Wait()
	}()
	select {
	case <-drained:
	case <-ctx.Done(): // cancelled while a process left behind still wrote
		e.end()
		e.interrupt()
		<-drained
	}
	if ctx.Err() == nil {
		err = e.send(&wire.ExecResponse{Output: &wire.ExecResponse_Exited{Exited: exited(e.child.status)}})
	} else {
		err = ctx.Err()
	}
	// A call must not read its stream once it has returned, and only this wakes
	// a read that waits for the supervisor.
	if controller, ok := ctx.Value(controllerKey{}).(*http.ResponseController); ok {
		controller.SetReadDeadline(time.Unix(1, 0))
	}
	input.Wait()
	return err
}

func exited(status unix.WaitStatus) *wire.ExecExited {
	if status.Signaled() {
		return &wire.ExecExited{Signal: int32(status.Signal())}
	}
	return &wire.ExecExited{Code: int32(status.ExitStatus())}
}

// execution is one call of Exec.
type execution struct {
	agent    *agent
	stream   *connect.BidiStream[wire.ExecRequest, wire.ExecResponse]
	sending  sync.Mutex
	terminal bool
	child    *child
	queue    *queue
	*streams
}

func stdout(p []byte) *wire.ExecResponse {
	return &wire.ExecResponse{Output: &wire.ExecResponse_Stdout{Stdout: p}}
}

func stderr(p []byte) *wire.ExecResponse {
	return &wire.ExecResponse{Output: &wire.ExecResponse_Stderr{Stderr: p}}
}

// send returns once the message is copied out, so that its bytes can be used
// again. It blocks while the supervisor does not read.
func (e *execution) send(response *wire.ExecResponse) error {
	e.sending.Lock()
	defer e.sending.Unlock()
	return e.stream.Send(response)
}

func (e *execution) start(start *wire.ExecStart) (failed *wire.ExecFailed) {
	c, failed := find(start.GetArgv(), start.GetEnv(), start.GetCwd(), e.terminal)
	if failed != nil {
		return failed
	}
	if e.terminal {
		e.streams, failed = openTerminal(start.GetTty())
	} else {
		e.streams, failed = openStreams(start.GetStdin())
	}
	if failed != nil {
		return failed
	}
	defer e.closeTheirs()
	e.child, failed = c.start(e.agent.reaper, e.theirs, e.terminal)
	if failed != nil {
		e.closeOurs()
	}
	return failed
}

// end ends the command's whole session: what a hang-up is to a terminal, and a
// request to finish elsewhere; then SIGKILL.
func (e *execution) end() {
	first := unix.SIGTERM
	if e.terminal {
		first = unix.SIGHUP
	}
	e.child.end(first, killGrace)
}

// pump sends what the command writes. When nobody is to have it any more it
// reads on all the same, so that a process left behind in the background, or
// one that is being ended, is neither stopped by a full pipe nor killed by a
// broken one.
func (e *execution) pump(source *os.File, message func([]byte) *wire.ExecResponse) {
	buffer := make([]byte, wire.ChunkBytes)
	for since := 0; ; {
		if e.child.exited() {
			if since > pipeCapacity && time.Since(e.child.ended) > linger {
				break
			}
			source.SetReadDeadline(time.Now().Add(quiet))
		}
		after := e.child.exited()
		n, err := source.Read(buffer)
		if after {
			since += n
		}
		if n > 0 && e.send(message(buffer[:n])) != nil {
			break
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if err != nil { // EOF; EIO when nobody has the terminal open
			if e.terminal {
				<-e.child.done // may open it anew, and closing our end would hang it up
			}
			source.Close()
			return
		}
	}
	go discard(e.agent.ctx, source)
}

// discard reads source to its end, or to the agent's.
func discard(ctx context.Context, source *os.File) {
	stop := context.AfterFunc(ctx, func() { source.Close() })
	defer stop()
	defer source.Close()
	source.SetReadDeadline(time.Time{})
	io.Copy(io.Discard, source)
}

// deadline makes the reads under way give up after quiet.
func (e *execution) deadline() {
	for _, f := range []*os.File{e.stdout, e.stderr} {
		if f != nil {
			f.SetReadDeadline(time.Now().Add(quiet))
		}
	}
}

// interrupt makes them give up at once.
func (e *execution) interrupt() {
	for _, f := range []*os.File{e.stdout, e.stderr} {
		if f != nil {
			f.SetReadDeadline(time.Unix(1, 0))
		}
	}
}

// input takes the supervisor's messages. It never waits for the command unless
// the supervisor has sent more stdin than the window.
func (e *execution) input() {
	for {
		request, err := e.stream.Receive()
		if err != nil { // EOF: there is no more input; else the stream is over
			e.queue.end()
			return
		}
		e.handle(request)
	}
}

func (e *execution) handle(request *wire.ExecRequest) {
	switch input := request.GetInput().(type) {
	case *wire.ExecRequest_Stdin:
		if e.stdin != nil {
			e.queue.put(input.Stdin)
		}
	case *wire.ExecRequest_StdinEof:
		e.queue.end()
	case *wire.ExecRequest_Resize:
		if e.terminal {
			resize(e.stdout, input.Resize) // closed already: it no longer matters
		}
	case *wire.ExecRequest_Signal:
		if s := unix.Signal(input.Signal); s > 0 && s <= 64 && !e.child.exited() {
			e.child.signalGroup(s)
		}
	}
}

// feed writes the queue into the command's stdin and tells how much it has
// taken.
func (e *execution) feed() {
	if e.stdin == nil {
		return
	}
	var taken, told uint64
	broken, last := false, byte('\n')
	for {
		chunk, ok := e.queue.take()
		if !ok {
			break
		}
		for len(chunk) > 0 {
			n := min(len(chunk), wire.ChunkBytes)
			if !broken {
				_, err := e.stdin.Write(chunk[:n])
				broken = err != nil // the command has closed its end; drop what comes
			}
			last = chunk[n-1]
			chunk = chunk[n:]
			taken += uint64(n)
			e.queue.release(n)
			if taken-told >= wire.StdinWindow/4 {
				told = taken
				e.send(&wire.ExecResponse{Output: &wire.ExecResponse_StdinTaken{StdinTaken: taken}})
			}
		}
	}
	if !e.terminal {
		e.stdin.Close()
		return
	}
	// On a terminal the end of input is a character. It ends a read that has
	// nothing to return; within a line the first one only hands over the line.
	if eof, ok := endOfFile(e.stdin); ok && !broken && !e.child.exited() {
		if last != '\n' {
			e.stdin.Write([]byte{eof})
		}
		e.stdin.Write([]byte{eof})
	}
}

// closeInput wakes a write into a command that has ended.
func (e *execution) closeInput() {
	switch {
	case e.stdin == nil:
	case e.terminal:
		e.stdin.SetWriteDeadline(time.Unix(1, 0)) // its other direction is still read
	default:
		e.stdin.Close()
	}
}

// queue holds stdin that the command has not yet taken, StdinWindow bytes at
// the most.
type queue struct {
	mu      sync.Mutex
	changed sync.Cond
	pending []byte
	held    int  // pending and what take gave out
	ended   bool // no more comes
	closed  bool // no more is wanted
}

func newQueue() *queue {
	q := &queue{}
	q.changed.L = &q.mu
	return q
}

// put waits for room.
func (q *queue) put(p []byte) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.held > 0 && q.held+len(p) > wire.StdinWindow && !q.closed {
		q.changed.Wait()
	}
	if q.closed || q.ended || len(p) == 0 {
		return
	}
	q.pending = append(q.pending, p...)
	q.held += len(p)
	q.changed.Broadcast()
}

// take returns all there is, waiting for some; false at the end.
func (q *queue) take() ([]byte, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.pending) == 0 && !q.ended && !q.closed {
		q.changed.Wait()
	}
	if q.closed || len(q.pending) == 0 {
		return nil, false
	}
	p := q.pending
	q.pending = nil
	return p, true
}

// release says that n bytes of what take gave out are done with.
func (q *queue) release(n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.held -= n
	q.changed.Broadcast()
}

func (q *queue) end() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.ended = true
	q.changed.Broadcast()
}

func (q *queue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.changed.Broadcast()
}
