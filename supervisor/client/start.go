package client

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"connectrpc.com/connect"

	"vz.test/vz/supervisor/api"
	"vz.test/vz/supervisor/api/vzv1"
	"vz.test/vz/supervisor/registry"
)

const (
	// startPatience bounds how long a supervisor may take to answer after it
	// was started; it takes 50 ms on an idle machine.
	startPatience = 30 * time.Second
	// answerPatience is how long a supervisor that holds its Environment may
	// take to answer before it counts as silent.
	answerPatience = 2 * time.Second
)

// A SilentError says that a supervisor holds the Environment and does not
// answer.
type SilentError struct {
	Environment string
	PID         int // 0: not known
	Err         error
}

func (e *SilentError) Error() string {
	who := "the supervisor"
	if e.PID != 0 {
		who = fmt.Sprintf("the supervisor (process %d)", e.PID)
	}
	return fmt.Sprintf("%s of %s holds it and does not answer: %v; wait, or end that process and run the command again", who, e.Environment, e.Err)
}

func (e *SilentError) Unwrap() error { return e.Err }

// ErrNotRunning says that no supervisor of the Environment lives.
var ErrNotRunning = errors.New("no supervisor is running for this Environment; vz up starts one")

// Connect speaks to an Environment's living supervisor and never starts one.
// It returns the aggregate, the proof that it answers. Errors are
// ErrNotRunning, *SilentError and the registry's.
func Connect(ctx context.Context, r *registry.Registry, environment string) (*Client, *vzv1.Environment, error) {
	record, unreadable := r.Record(environment)
	if damage := (*registry.CorruptError)(nil); errors.As(unreadable, &damage) {
		record = new(registry.Record) // a living supervisor answers all the same
	} else if unreadable != nil {
		return nil, nil, unreadable
	}
	socket := r.SocketPath(environment)
	pid := 0
	if record.Supervisor != nil {
		// The supervisor may have been started with another XDG_RUNTIME_DIR.
		socket = record.Supervisor.Socket
	}
	if record.Supervisor.Alive() { // else the PID may be somebody else's by now
		pid = record.Supervisor.PID
	}
	c := New(socket)
	patience, cancel := context.WithTimeout(ctx, answerPatience)
	defer cancel()
	aggregate, err := c.Environment.Get(patience, connect.NewRequest(&vzv1.GetEnvironmentRequest{}))
	if err == nil {
		return c, aggregate.Msg, nil
	}
	c.Close()
	if ctx.Err() != nil {
		return nil, nil, context.Cause(ctx)
	}
	locked, lockErr := r.Locked(environment)
	if lockErr != nil {
		return nil, nil, lockErr
	}
	if !locked && unreadable != nil {
		return nil, nil, unreadable
	}
	if !locked {
		return nil, nil, ErrNotRunning
	}
	return nil, nil, &SilentError{Environment: environment, PID: pid, Err: err}
}

// Ensure is Connect, and starts the supervisor if none lives. Two that start
// one at the same instant both get the same.
func Ensure(ctx context.Context, r *registry.Registry, environment string) (*Client, error) {
	ctx, cancel := context.WithTimeout(ctx, startPatience)
	defer cancel()
	var silent *SilentError
	for {
		c, _, err := Connect(ctx, r, environment)
		if err == nil {
			return c, nil
		}
		if errors.Is(err, ErrNotRunning) {
			held, startErr := start(ctx, r, environment)
			if startErr != nil {
				if _, err := r.Record(environment); errors.Is(err, fs.ErrNotExist) {
					return nil, err // deleted meanwhile
				}
				return nil, startErr
			}
			if !held {
				continue // it answers now
			}
		} else if silent != nil && errors.Is(err, context.DeadlineExceeded) {
			return nil, silent // our patience ended in the middle of a try
		} else if !errors.As(err, &silent) {
			return nil, err
		}
		// Somebody else's is starting, or ending. Look again.
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// start runs a supervisor, detached from this process and its terminal, and
// waits until its API answers. held says that another one has the Environment.
func start(ctx context.Context, r *registry.Registry, environment string) (held bool, err error) {
	binary, err := supervisorBinary()
	if err != nil {
		return false, err
	}
	logPath := r.LogPath(environment)
	failed := func(why, next string) error {
		p := api.NewProblem(connect.CodeUnavailable, "the supervisor did not start", why, next)
		p.LogPath = logPath
		return p
	}
	log, err := os.OpenFile(logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return false, failed(err.Error(), "see that the state directory can be written to")
	}
	defer log.Close()
	ready, readyChild, err := os.Pipe()
	if err != nil {
		return false, failed(err.Error(), "")
	}
	defer ready.Close()
	cmd := exec.Command(binary, "--environment-id", environment, "--ready-fd", "3")
	cmd.Dir = "/" // it must not keep a worktree's file system busy
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{readyChild}
	cmd.SysProcAttr = detached()
	err = cmd.Start()
	readyChild.Close()
	if err != nil {
		return false, failed(err.Error(), "install vz-supervisor beside vz")
	}
	go cmd.Wait() // no zombie while this process lives
	stop := context.AfterFunc(ctx, func() { ready.Close() })
	defer stop()
	line, readErr := bufio.NewReader(ready).ReadBytes('\n')
	var m struct {
		Ready, Held     bool
		What, Why, Next string
	}
	if readErr != nil || json.Unmarshal(line, &m) != nil {
		if ctx.Err() != nil {
			cmd.Process.Kill()
			return false, failed("it took too long", "run the command again")
		}
		return false, failed("it ended without a word", "")
	}
	if m.Ready || m.Held {
		return m.Held, nil
	}
	return false, failed(strings.TrimPrefix(m.What+": "+m.Why, ": "), m.Next)
}

// supervisorBinary is the vz-supervisor beside the running program, or else
// the one in PATH.
func supervisorBinary() (string, error) {
	if self, err := os.Executable(); err == nil {
		if self, err = filepath.EvalSymlinks(self); err == nil {
			beside := filepath.Join(filepath.Dir(self), "vz-supervisor")
			if _, err := os.Stat(beside); err == nil {
				return beside, nil
			}
		}
	}
	binary, err := exec.LookPath("vz-supervisor")
	if err != nil {
		return "", api.NewProblem(connect.CodeNotFound, "vz-supervisor was not found", "it is neither beside this program nor in PATH", "install it beside vz")
	}
	return binary, nil
}

// ended waits until the supervisor that was told to end has ended: whoever
// comes next finds nothing of it.
func ended(ctx context.Context, r *registry.Registry, environment string) error {
	ctx, cancel := context.WithTimeout(ctx, startPatience)
	defer cancel()
	for {
		locked, err := r.Locked(environment)
		if err != nil || !locked {
			return err
		}
		select {
		case <-ctx.Done():
			return api.NewProblem(connect.CodeDeadlineExceeded, "the supervisor was told to end and still runs", context.Cause(ctx).Error(), "end its process (vz status names it)")
		case <-time.After(5 * time.Millisecond):
		}
	}
}
