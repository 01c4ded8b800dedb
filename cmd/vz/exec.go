package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/term"

	"vz.test/vz/guest/wire"
	"vz.test/vz/supervisor/client"
	"vz.test/vz/supervisor/registry"
)

type execCommand struct {
	selection
	Machine     *string  `short:"m" placeholder:"M" help:"The Machine, by ID or name; else VZ_MACHINE_ID, the declared default, or the sole one."`
	Interactive bool     `short:"i" help:"Pass stdin on."`
	TTY         bool     `short:"t" name:"tty" help:"Give the command a terminal."`
	Command     []string `arg:"" passthrough:"partial" help:"The command and its arguments, after --."`
}

// Run exits with the command's own status: 128+n for a signal, 125 when vz
// could not do it, 126 and 127 for what can't be executed or isn't there.
func (c *execCommand) Run(line *commandLine) error {
	if len(c.Command) > 0 && c.Command[0] == "--" {
		c.Command = c.Command[1:]
	}
	if len(c.Command) == 0 {
		return exitStatus{client.StatusFailed, errors.New("a command is missing after --; see vz exec --help")}
	}
	status, err := c.exec(line)
	return exitStatus{status, err}
}

func (c *execCommand) exec(line *commandLine) (int, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	r, record, err := c.selectRecord()
	if err != nil {
		return client.StatusFailed, err
	}
	machine, err := registry.SelectMachine(record, c.Machine, os.Getenv("VZ_MACHINE_ID"))
	if err != nil {
		return client.StatusFailed, err
	}
	session, err := client.Ensure(ctx, r, record.EnvironmentID)
	if err != nil {
		return client.StatusFailed, err
	}
	defer session.Close()

	show := newProgress(line.Progress, os.Stderr)
	e := client.Exec{Machine: machine.MachineID, Argv: c.Command, Stdout: os.Stdout, Stderr: os.Stderr, Progress: show.event}
	if c.Interactive {
		e.Stdin = os.Stdin
	}
	signals := make(chan int32, 16)
	e.Signals = signals
	forward(ctx, signals)
	if c.TTY {
		defer c.terminal(ctx, &e)()
	}
	status, err := session.Run(ctx, e)
	show.close()
	if name := c.Command[0]; status == client.StatusNotFound && record.Machine(name) != nil {
		err = fmt.Errorf("%w; the Machine of that name is meant by --machine %s", err, name)
	}
	return status, err
}

// terminal gives the command a PTY of this terminal's size, and makes this
// terminal pass every key on.
func (c *execCommand) terminal(ctx context.Context, e *client.Exec) (restore func()) {
	out := int(os.Stdout.Fd())
	e.TTY = windowSize(out)
	e.Env = map[string]string{"TERM": os.Getenv("TERM")}
	resize := make(chan *wire.WindowSize, 1)
	e.Resize = resize
	changed := make(chan os.Signal, 1)
	notifyResize(changed)
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-changed:
				select {
				case resize <- windowSize(out):
				case <-ctx.Done():
					return
				}
			}
		}
	}()
	in := int(os.Stdin.Fd())
	if !c.Interactive || !term.IsTerminal(in) {
		return func() { signal.Stop(changed) }
	}
	// Only when the command runs: until then Ctrl-C is for vz, and progress
	// wants a terminal that ends lines properly.
	var before *term.State
	e.Started = func() { before, _ = term.MakeRaw(in) }
	return func() {
		signal.Stop(changed)
		if before != nil {
			term.Restore(in, before)
		}
	}
}

// windowSize is a terminal's, or the traditional one where there is none.
func windowSize(fd int) *wire.WindowSize {
	columns, rows, err := term.GetSize(fd)
	if err != nil || columns == 0 || rows == 0 {
		columns, rows = 80, 24
	}
	return &wire.WindowSize{Rows: uint32(rows), Columns: uint32(columns)}
}

// forward passes on what would end this process to the remote process group,
// whose end then ends this one. In a raw terminal Ctrl-C is a byte like others
// and comes by stdin.
func forward(ctx context.Context, to chan<- int32) {
	caught := make(chan os.Signal, 16)
	signal.Notify(caught, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	go func() {
		defer signal.Stop(caught)
		for {
			select {
			case <-ctx.Done():
				return
			case s := <-caught:
				if number, ok := s.(syscall.Signal); ok {
					select {
					case to <- int32(number):
					case <-ctx.Done():
						return
					}
				}
			}
		}
	}()
}
