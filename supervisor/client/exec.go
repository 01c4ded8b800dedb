package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"vz.test/vz/guest/wire"
	"vz.test/vz/supervisor/api/vzv1"
)

// Exec says what to run and where its streams go.
type Exec struct {
	Machine string // ID or name
	Argv    []string
	Env     map[string]string
	Cwd     string

	Stdin  io.Reader // nil: /dev/null
	Stdout io.Writer
	Stderr io.Writer
	TTY    *wire.WindowSize // nil: no PTY

	Resize <-chan *wire.WindowSize // may be nil
	// Signals are Linux signal numbers for the process group; may be nil. One
	// that comes before the command has started ends Run instead.
	Signals <-chan int32
	// Started is called when the command runs; may be nil.
	Started func()
	// Progress is told what is done to bring the Machine up first; may be nil.
	Progress func(*vzv1.Event)
}

// Exit statuses of vz itself.
const (
	StatusFailed        = 125 // vz could not do it
	StatusNotExecutable = 126
	StatusNotFound      = 127
	statusSignal        = 128 // plus the signal's number
)

// Run runs a command in a Machine, which is brought up first if it is down,
// and returns the exit status. An error goes with StatusFailed,
// StatusNotExecutable or StatusNotFound. Ending ctx kills the remote process
// group.
func (c *Client) Run(ctx context.Context, e Exec) (int, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream := c.Machines.Exec(ctx)
	start := &wire.ExecStart{Argv: e.Argv, Env: e.Env, Cwd: e.Cwd, Tty: e.TTY, Stdin: e.Stdin != nil}
	err := stream.Send(&vzv1.ExecRequest{
		Machine:   e.Machine,
		Reconcile: true,
		Input:     &wire.ExecRequest{Input: &wire.ExecRequest_Start{Start: start}},
	})
	if err != nil && !errors.Is(err, io.EOF) { // EOF: Receive has the reason
		return StatusFailed, Problem(err)
	}
	// The end of ctx alone does not wake a transport that waits for more of the
	// request's body.
	stop := context.AfterFunc(ctx, func() { stream.CloseRequest() })
	defer stop()
	window := newStdinWindow()
	go send(ctx, cancel, e, window, func(input *wire.ExecRequest) error {
		return stream.Send(&vzv1.ExecRequest{Input: input})
	})
	defer stream.CloseResponse()
	for {
		response, err := stream.Receive()
		if errors.Is(err, io.EOF) {
			return StatusFailed, errors.New("the supervisor ended the stream without an exit status")
		}
		if err != nil {
			return StatusFailed, Problem(err)
		}
		if event := response.GetProgress(); event != nil && e.Progress != nil {
			e.Progress(event)
		}
		switch output := response.GetOutput().GetOutput().(type) {
		case *wire.ExecResponse_Started:
			window.open(output.Started.GetStdinWindow())
			if e.Started != nil {
				e.Started()
			}
		case *wire.ExecResponse_StdinTaken:
			window.take(output.StdinTaken)
		case *wire.ExecResponse_Stdout:
			if _, err := e.Stdout.Write(output.Stdout); err != nil {
				return StatusFailed, fmt.Errorf("writing the command's output: %w", err)
			}
		case *wire.ExecResponse_Stderr:
			if _, err := e.Stderr.Write(output.Stderr); err != nil {
				return StatusFailed, fmt.Errorf("writing the command's errors: %w", err)
			}
		case *wire.ExecResponse_Exited:
			if s := output.Exited.GetSignal(); s != 0 {
				return statusSignal + int(s), nil
			}
			return int(output.Exited.GetCode()), nil
		case *wire.ExecResponse_Failed:
			err := errors.New(output.Failed.GetMessage())
			switch output.Failed.GetReason() {
			case wire.ExecFailed_REASON_NOT_FOUND:
				return StatusNotFound, err
			case wire.ExecFailed_REASON_NOT_EXECUTABLE:
				return StatusNotExecutable, err
			}
			return StatusFailed, err
		}
	}
}

// A stdinWindow says how much stdin may be under way that the command has not
// taken. Beyond it signals and window sizes would queue behind stdin.
type stdinWindow struct {
	mu    sync.Mutex
	size  uint64 // 0: the command has not started
	taken uint64
	moved chan struct{} // has a token when size or taken grew
}

func newStdinWindow() *stdinWindow { return &stdinWindow{moved: make(chan struct{}, 1)} }

func (w *stdinWindow) open(size uint64)  { w.change(&w.size, size) }
func (w *stdinWindow) take(total uint64) { w.change(&w.taken, total) }

func (w *stdinWindow) change(field *uint64, to uint64) {
	w.mu.Lock()
	*field = max(*field, to)
	w.mu.Unlock()
	select {
	case w.moved <- struct{}{}:
	default:
	}
}

// isOpen says whether the command has started.
func (w *stdinWindow) isOpen() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.size > 0
}

// admits says whether a chunk may follow what was sent before it.
func (w *stdinWindow) admits(sent, chunk uint64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return sent+chunk <= w.taken+w.size
}

// send is the only sender on the stream: stdin in chunks as the window admits
// them, window sizes and signals, until ctx ends. A failed send ends it; the
// receiver has the reason. A signal to a command that has not started cancels.
func send(ctx context.Context, cancel context.CancelFunc, e Exec, window *stdinWindow, send func(*wire.ExecRequest) error) {
	chunks := make(chan []byte)
	taken := make(chan struct{}) // the chunk was sent; the buffer is free again
	var input <-chan []byte      // nil: no stdin, or no more
	if e.Stdin != nil {
		input = chunks
		// Reading stdin can't be interrupted; this goroutine may outlive the
		// exec by one read, holding nothing but its buffer.
		go read(ctx, e.Stdin, chunks, taken)
	}
	var pending []byte // a chunk that waits for the window
	var sent uint64
	for {
		if pending != nil && window.admits(sent, uint64(len(pending))) {
			if send(&wire.ExecRequest{Input: &wire.ExecRequest_Stdin{Stdin: pending}}) != nil {
				return
			}
			sent += uint64(len(pending))
			pending = nil
			select {
			case taken <- struct{}{}:
			case <-ctx.Done():
				return
			}
		}
		next := input
		if pending != nil {
			next = nil
		}
		var err error
		select {
		case <-ctx.Done():
			return
		case <-window.moved:
		case chunk, ok := <-next:
			if ok {
				pending = chunk
				break
			}
			input = nil
			err = send(&wire.ExecRequest{Input: &wire.ExecRequest_StdinEof{StdinEof: &wire.StdinEOF{}}})
		case size := <-e.Resize:
			err = send(&wire.ExecRequest{Input: &wire.ExecRequest_Resize{Resize: size}})
		case signal := <-e.Signals:
			if !window.isOpen() {
				cancel() // there is nobody to send it to yet
				return
			}
			err = send(&wire.ExecRequest{Input: &wire.ExecRequest_Signal{Signal: signal}})
		}
		if err != nil {
			return
		}
	}
}

// read passes stdin on, one chunk at a time, and closes chunks at its end.
func read(ctx context.Context, stdin io.Reader, chunks chan<- []byte, taken <-chan struct{}) {
	defer close(chunks)
	buffer := make([]byte, 64<<10)
	for {
		n, err := stdin.Read(buffer)
		if n > 0 {
			select {
			case chunks <- buffer[:n]:
			case <-ctx.Done():
				return
			}
			select {
			case <-taken:
			case <-ctx.Done():
				return
			}
		}
		if err != nil {
			return
		}
	}
}
