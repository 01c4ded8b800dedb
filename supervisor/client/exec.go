package client

import (
	"context"
	"errors"
	"fmt"
	"io"

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

	Resize  <-chan *wire.WindowSize // may be nil
	Signals <-chan int32            // Linux signal numbers for the process group; may be nil
	// Progress is told what is done to bring the Machine up first; may be nil.
	Progress func(*vzv1.Event)
}

// Exit statuses as CONTRACT §2 has them.
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
	go send(ctx, e, func(input *wire.ExecRequest) error {
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

// send is the only sender on the stream: stdin in chunks, window sizes and
// signals, until ctx ends. A failed send ends it; the receiver has the reason.
func send(ctx context.Context, e Exec, send func(*wire.ExecRequest) error) {
	chunks := make(chan []byte)
	taken := make(chan struct{}) // the chunk was sent; the buffer is free again
	if e.Stdin != nil {
		// Reading stdin can't be interrupted; this goroutine may outlive the
		// exec by one read, holding nothing but its buffer.
		go func() {
			defer close(chunks)
			buffer := make([]byte, 64<<10)
			for {
				n, err := e.Stdin.Read(buffer)
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
		}()
	}
	input := chunks
	if e.Stdin == nil {
		input = nil
	}
	for {
		var err error
		select {
		case <-ctx.Done():
			return
		case chunk, ok := <-input:
			if !ok {
				input = nil
				err = send(&wire.ExecRequest{Input: &wire.ExecRequest_StdinEof{StdinEof: &wire.StdinEOF{}}})
				break
			}
			err = send(&wire.ExecRequest{Input: &wire.ExecRequest_Stdin{Stdin: chunk}})
			select {
			case taken <- struct{}{}:
			case <-ctx.Done():
			}
		case size := <-e.Resize:
			err = send(&wire.ExecRequest{Input: &wire.ExecRequest_Resize{Resize: size}})
		case signal := <-e.Signals:
			err = send(&wire.ExecRequest{Input: &wire.ExecRequest_Signal{Signal: signal}})
		}
		if err != nil {
			return
		}
	}
}
