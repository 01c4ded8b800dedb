//go:build linux

package agent

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"vz.test/vz/guest"
	"vz.test/vz/guest/wire"
)

func TestMain(m *testing.M) {
	if os.Getenv("VZ_TEST_INIT") != "" {
		runInit()
	}
	goleak.VerifyTestMain(m)
}

// pair is the channel as the namespace driver makes it.
func pair(t testing.TB) (host, guest net.Conn) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	var ends [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "channel")
		ends[i], err = net.FileConn(f)
		require.NoError(t, err)
		f.Close()
	}
	return ends[0], ends[1]
}

var hello = guest.Hello{MachineID: "mch_test", Incarnation: "inc_test"}

// session runs an agent in this process, which is not PID 1.
func session(t testing.TB, options Options) *guest.Session {
	host, inside := pair(t)
	served := make(chan error, 1)
	go func() { served <- Serve(context.Background(), inside, options) }()
	s, err := guest.Connect(t.Context(), host, hello)
	require.NoError(t, err)
	t.Cleanup(func() {
		s.Close()
		<-served
	})
	return s
}

// run is one execution with all its output.
type run struct {
	stdout, stderr []byte
	exited         *wire.ExecExited
	failed         *wire.ExecFailed
	err            error
}

// execute runs a command with this as its whole stdin; nil is /dev/null.
func execute(s *guest.Session, start *wire.ExecStart, stdin []byte) (r run) {
	start.Stdin = stdin != nil
	requests := []*wire.ExecRequest{begin(start)}
	for len(stdin) > 0 {
		n := min(len(stdin), wire.ChunkBytes)
		requests = append(requests, input(stdin[:n]))
		stdin = stdin[n:]
	}
	next := func() (*wire.ExecRequest, error) {
		if len(requests) == 0 {
			return nil, io.EOF
		}
		q := requests[0]
		requests = requests[1:]
		return q, nil
	}
	r.err = s.Exec(context.Background(), next, r.take)
	return r
}

func (r *run) take(m *wire.ExecResponse) error {
	r.stdout = append(r.stdout, m.GetStdout()...)
	r.stderr = append(r.stderr, m.GetStderr()...)
	if e := m.GetExited(); e != nil {
		r.exited = e
	}
	if f := m.GetFailed(); f != nil {
		r.failed = f
	}
	return nil
}

func begin(start *wire.ExecStart) *wire.ExecRequest {
	return &wire.ExecRequest{Input: &wire.ExecRequest_Start{Start: start}}
}

func input(p []byte) *wire.ExecRequest {
	return &wire.ExecRequest{Input: &wire.ExecRequest_Stdin{Stdin: p}}
}

func sh(script string) *wire.ExecStart {
	return &wire.ExecStart{Argv: []string{"/bin/sh", "-c", script}}
}

// conversation is an execution that the test talks with.
type conversation struct {
	requests chan *wire.ExecRequest // close it to half-close
	cancel   context.CancelFunc
	done     chan struct{} // the fields below are valid

	mu     sync.Mutex
	output []byte // stdout so far
	seen   *sync.Cond
	taken  uint64
	run
}

func converse(t testing.TB, s *guest.Session, start *wire.ExecStart) *conversation {
	ctx, cancel := context.WithCancel(context.Background())
	c := &conversation{requests: make(chan *wire.ExecRequest, 1<<10), cancel: cancel, done: make(chan struct{})}
	c.seen = sync.NewCond(&c.mu)
	c.requests <- begin(start)
	go func() {
		defer close(c.done)
		err := s.Exec(ctx, func() (*wire.ExecRequest, error) {
			select {
			case r, ok := <-c.requests:
				if !ok {
					return nil, io.EOF
				}
				return r, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}, func(m *wire.ExecResponse) error {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.output = append(c.output, m.GetStdout()...)
			c.taken = max(c.taken, m.GetStdinTaken())
			c.seen.Broadcast()
			return c.run.take(m)
		})
		c.mu.Lock()
		defer c.mu.Unlock()
		c.err = err
		c.seen.Broadcast()
	}()
	t.Cleanup(func() {
		cancel()
		<-c.done
	})
	return c
}

// until waits for the output to satisfy f.
func (c *conversation) until(t testing.TB, f func(output string) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for !f(string(c.output)) {
		require.NoError(t, c.err, "ended with %q", c.output)
		require.Nil(t, c.exited, "ended with %q", c.output)
		c.seen.Wait()
	}
}

func TestHello(t *testing.T) {
	s := session(t, Options{Version: "v1"})
	assert.Equal(t, "v1", s.AgentVersion())
	assert.Contains(t, s.Capabilities(), "posix_pty")
	assert.NotEmpty(t, s.BootID())
}

func TestEveryCallNeedsHello(t *testing.T) {
	host, inside := pair(t)
	served := make(chan error, 1)
	go func() { served <- Serve(context.Background(), inside, Options{}) }()
	client, close := rawClient(t, host)
	_, err := client.SetProcesses(t.Context(), call(&wire.SetProcessesRequest{}))
	assert.ErrorContains(t, err, "Hello comes first")
	stream := client.Exec(t.Context())
	stream.Send(begin(sh("true")))
	_, err = stream.Receive()
	assert.ErrorContains(t, err, "Hello comes first")

	answer, err := client.Hello(t.Context(), call(&wire.HelloRequest{Protocol: 0}))
	require.NoError(t, err)
	assert.EqualValues(t, wire.OldestProtocol, answer.Msg.GetProtocol(), "what it could speak")
	_, err = client.SetProcesses(t.Context(), call(&wire.SetProcessesRequest{}))
	assert.ErrorContains(t, err, "Hello comes first", "no version in common binds nothing")

	answer, err = client.Hello(t.Context(), call(&wire.HelloRequest{Protocol: 99, MachineId: "mch_1", Incarnation: "inc_1"}))
	require.NoError(t, err)
	assert.EqualValues(t, wire.Protocol, answer.Msg.GetProtocol())
	_, err = client.Hello(t.Context(), call(&wire.HelloRequest{Protocol: 1, MachineId: "mch_1", Incarnation: "inc_2"}))
	assert.ErrorContains(t, err, "incarnation inc_1")
	close()
	assert.Error(t, <-served)
}

func TestShutdownEndsAgent(t *testing.T) {
	host, inside := pair(t)
	served := make(chan error, 1)
	go func() { served <- Serve(context.Background(), inside, Options{}) }()
	s, err := guest.Connect(t.Context(), host, hello)
	require.NoError(t, err)
	c := converse(t, s, sh("echo up; exec sleep 1000"))
	c.until(t, func(o string) bool { return o == "up\n" })
	require.NoError(t, s.Shutdown(t.Context(), 0))
	require.NoError(t, <-served)
	<-c.done
	assert.NoError(t, c.err)
	assert.EqualValues(t, unix.SIGKILL, c.exited.GetSignal())
	<-s.Done()
	assert.ErrorIs(t, s.Err(), guest.ErrGone)
	s.Close()
}

func TestClosedChannelEndsEverything(t *testing.T) {
	host, inside := pair(t)
	served := make(chan error, 1)
	go func() { served <- Serve(context.Background(), inside, Options{}) }()
	s, err := guest.Connect(t.Context(), host, hello)
	require.NoError(t, err)
	c := converse(t, s, sh("sleep 1000 & echo $! $$; wait"))
	c.until(t, func(o string) bool { return len(o) > 0 && o[len(o)-1] == '\n' })
	pids := numbers(t, string(c.output))
	s.Close()
	assert.ErrorIs(t, s.Err(), guest.ErrClosed)
	assert.Error(t, <-served)
	for _, pid := range pids {
		await(1<<62, func() bool { return ended(pid) })
	}
}

// runInit is the agent as PID 1 of namespaces of its own, at descriptor 3.
func runInit() {
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		os.Stderr.WriteString(err.Error())
		os.Exit(3)
	}
	unix.CloseOnExec(3)
	channel, err := net.FileConn(os.NewFile(3, "channel"))
	if err == nil {
		unix.Close(3)
		err = Serve(context.Background(), channel, Options{Init: true, Root: os.Getenv("VZ_TEST_INIT")})
	}
	if err != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

// boot starts an agent as PID 1.
func boot(t *testing.T) (*guest.Session, *exec.Cmd) {
	if os.Getuid() != 0 {
		t.Skip("needs root for namespaces")
	}
	host, inside := pair(t)
	file, err := inside.(*net.UnixConn).File()
	require.NoError(t, err)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "VZ_TEST_INIT="+t.TempDir())
	cmd.ExtraFiles = []*os.File{file}
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWNET | unix.CLONE_NEWIPC,
		// Private first, so that the new /proc is seen inside only.
		Unshareflags: unix.CLONE_NEWNS,
	}
	require.NoError(t, cmd.Start())
	file.Close()
	inside.Close()
	s, err := guest.Connect(t.Context(), host, hello)
	require.NoError(t, err)
	t.Cleanup(func() {
		s.Close()
		cmd.Wait()
	})
	return s, cmd
}

func TestInit(t *testing.T) {
	s, _ := boot(t)
	t.Run("reaps orphans", func(t *testing.T) {
		// The inner shell's child is orphaned, ends, and must not stay a zombie;
		// statuses of executions at the same time are their own.
		var all sync.WaitGroup
		for i := range 16 {
			all.Go(func() {
				r := execute(s, sh("sh -c 'true & true &' ; exit "+string(rune('0'+i%10))), nil)
				assert.NoError(t, r.err)
				assert.EqualValues(t, i%10, r.exited.GetCode())
			})
		}
		all.Wait()
		r := execute(s, sh(`for i in $(seq 100); do grep -sl '^State:.Z' /proc/[0-9]*/status || exit 0; sleep 0.05; done; exit 1`), nil)
		assert.Zero(t, r.exited.GetCode(), "zombies: %s", r.stdout)
	})
	t.Run("host name", func(t *testing.T) {
		_, err := s.Configure(t.Context(), &wire.ConfigureRequest{Hostname: "web"})
		require.NoError(t, err)
		assert.Equal(t, "web\n", string(execute(s, sh("uname -n"), nil).stdout))
	})
	t.Run("children inherit no channel", func(t *testing.T) {
		r := execute(s, sh("ls -l /proc/self/fd"), nil)
		assert.NotContains(t, string(r.stdout), "socket")
		assert.NotContains(t, string(r.stdout), "anon_inode")
	})
	t.Run("PID 1 minds no signal of the guest's", func(t *testing.T) {
		execute(s, sh("kill -9 1; kill -USR1 1"), nil)
		assert.Zero(t, execute(s, sh("true"), nil).exited.GetCode())
	})
}

func TestInitShutdown(t *testing.T) {
	s, cmd := boot(t)
	// One that leaves its session and minds no SIGTERM.
	r := execute(s, sh("setsid sh -c 'trap \"\" TERM; while :; do sleep 1; done' >/dev/null 2>&1 &"), nil)
	require.NoError(t, r.err)
	require.NoError(t, s.Shutdown(t.Context(), 50*1e6))
	require.NoError(t, cmd.Wait())
	<-s.Done()
}

func TestInitDiesWithItsChannel(t *testing.T) {
	s, cmd := boot(t)
	c := converse(t, s, sh("trap '' TERM; echo up; while :; do sleep 1; done"))
	c.until(t, func(o string) bool { return o == "up\n" })
	s.Close()
	var exit *exec.ExitError
	require.True(t, errors.As(cmd.Wait(), &exit))
	assert.Equal(t, 1, exit.ExitCode())
}
