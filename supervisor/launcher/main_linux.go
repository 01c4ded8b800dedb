package launcher

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"vz.test/vz/machines"
	"vz.test/vz/machines/namespace"
)

func initMachine() { namespace.Init() }

// maxInFlight bounds the requests under way; a supervisor has at most one for
// each of its Machines.
const maxInFlight = 256

// run is the launcher: args are what start made them.
func run(args []string) error {
	runtime.LockOSThread() // the parent-death signal is this thread's
	var opts namespace.Options
	flags := flag.NewFlagSet(Arg, flag.ContinueOnError)
	flags.StringVar(&opts.StateDir, "state", "", "the Environment's state directory")
	flags.StringVar(&opts.EnvironmentID, "environment", "", "its ID")
	flags.StringVar(&opts.Agent, "agent", "", "the vz-guest binary")
	flags.BoolVar(&opts.User, "user", false, "in a user namespace of its own")
	flags.StringVar(&opts.UserNote, "note", "", "why Machines have a single ID")
	wait := flags.Bool("wait", false, "wait until the user namespace is mapped")
	flags.Func("hide", "a host path no Machine may see", func(path string) error {
		opts.Hidden = append(opts.Hidden, path)
		return nil
	})
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *wait {
		return becomeRoot(args)
	}
	unix.CloseOnExec(socketFD)
	unix.CloseOnExec(goFD)
	name := []byte("vz-launcher\x00") // ps would say "exe"
	unix.Prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(&name[0])), 0, 0, 0)
	// Becoming root of the user namespace cleared it.
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return err
	}
	file := os.NewFile(socketFD, "supervisor")
	conn, err := unixConn(file)
	file.Close()
	if err != nil {
		return err
	}
	defer conn.Close()
	s := &server{
		conn:    conn,
		opts:    Options{EnvironmentID: opts.EnvironmentID, StateDir: opts.StateDir, Agent: opts.Agent},
		creates: map[uint64]context.CancelFunc{},
	}
	if s.host, err = setUp(opts); err != nil {
		return errors.Join(err, s.send(failed(0, err), nil))
	}
	if err := s.send(reply{Version: version, Hello: &hello{}}, nil); err != nil {
		return err
	}
	return s.serve()
}

// becomeRoot waits until this process's user namespace is mapped and executes
// itself again: exec gives capabilities to root, and root it is only now.
func becomeRoot(args []string) error {
	ready := os.NewFile(goFD, "go")
	if _, err := io.ReadFull(ready, make([]byte, 1)); err != nil {
		return errors.New("the supervisor gave up")
	}
	again := []string{os.Args[0], Arg}
	for _, a := range args {
		if a != "--wait" {
			again = append(again, a)
		}
	}
	return syscall.Exec("/proc/self/exe", again, os.Environ())
}

// setUp makes the launcher's namespaces fit to work in.
func setUp(opts namespace.Options) (*namespace.Host, error) {
	// What the host mounts later is to be seen here; nothing goes back.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return nil, forbidden("mounts in a user namespace", err)
	}
	// The numbers of this pid namespace; the host's /proc has others.
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return nil, forbidden("/proc", err)
	}
	return namespace.NewHost(opts)
}

func forbidden(what string, err error) error {
	if !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EACCES) {
		return fmt.Errorf("%s: %w", what, err)
	}
	return &machines.MissingError{What: what, Why: "mount: " + err.Error(), Remedy: namespace.UserNamespaceRemedy()}
}

// A server answers one supervisor.
type server struct {
	conn *net.UnixConn
	opts Options
	host *namespace.Host

	mu      sync.Mutex
	creates map[uint64]context.CancelFunc // under way, by request
}

// serve returns when the supervisor is gone or broke the protocol, after
// ending the Machines.
func (s *server) serve() error {
	ctx, cancel := context.WithCancel(context.Background())
	var handlers sync.WaitGroup
	slots := make(chan struct{}, maxInFlight)
	err := s.receive(func(r request) {
		if r.Op == opCancel {
			s.cancel(r.Of)
			return
		}
		handle := s.prepare(ctx, r)
		select {
		case slots <- struct{}{}:
			handlers.Go(func() {
				defer func() { <-slots }()
				handle()
			})
		default:
			s.cancel(r.ID)
			s.send(failed(r.ID, errors.New("too many requests at once")), nil)
		}
	})
	cancel()
	last, done := context.WithTimeout(context.Background(), closeTimeout/2)
	defer done()
	err = errors.Join(err, s.host.Close(last))
	handlers.Wait()
	return err
}

// receive hands every request on until the socket ends. Descriptors are not
// asked for; the kernel closes those that come.
func (s *server) receive(handle func(request)) error {
	data := make([]byte, maxMessage+1)
	for {
		n, _, flags, _, err := s.conn.ReadMsgUnix(data, nil)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if n > maxMessage || flags&unix.MSG_TRUNC != 0 {
			return errors.New("protocol: message too large")
		}
		r, err := decode(data[:n], s.opts)
		if err != nil {
			return fmt.Errorf("protocol: %w", err)
		}
		handle(r)
	}
}

// prepare returns what answers r. A create can be cancelled from here on.
func (s *server) prepare(ctx context.Context, r request) func() {
	if r.Op != opCreate {
		return func() { s.answer(ctx, r) }
	}
	ctx, cancel := context.WithCancel(ctx)
	s.mu.Lock()
	s.creates[r.ID] = cancel
	s.mu.Unlock()
	return func() {
		defer s.cancel(r.ID)
		s.create(ctx, r)
	}
}

func (s *server) cancel(id uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if cancel := s.creates[id]; cancel != nil {
		cancel()
		delete(s.creates, id)
	}
}

func (s *server) answer(ctx context.Context, r request) {
	var err error
	switch r.Op {
	case opKill:
		err = s.host.Kill(ctx, r.MachineID)
	case opClean:
		err = s.host.Clean(ctx, r.MachineID)
	case opRemove:
		err = s.host.Remove(ctx, r.MachineID, r.Dir)
	}
	if err != nil {
		s.send(failed(r.ID, err), nil)
		return
	}
	s.send(reply{Version: version, ID: r.ID}, nil)
}

func (s *server) create(ctx context.Context, r request) {
	m, err := s.host.Create(ctx, *r.Spec)
	if err != nil {
		s.send(failed(r.ID, err), nil)
		return
	}
	var fds []int
	for _, f := range append(m.NICs, m.Agent) {
		fds = append(fds, int(f.Fd()))
	}
	for _, fd := range fds {
		unix.SetNonblock(fd, true) // which Fd undoes
	}
	answer := reply{Version: version, ID: r.ID, Created: &created{m.Capabilities, m.Notes}}
	err = s.send(answer, unix.UnixRights(fds...))
	// The supervisor's copies are the only ones from here on: when it closes
	// a TAP, the link is gone.
	m.Close()
	if err != nil {
		s.host.Kill(context.Background(), r.Spec.MachineID)
	}
	go func() {
		<-m.Done()
		s.send(reply{Version: version, Exited: &exited{r.Spec.MachineID, r.Spec.Incarnation, m.Why()}}, nil)
	}()
}

// send sends one message; a packet socket keeps those of many senders apart.
func (s *server) send(r reply, rights []byte) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if len(data) > maxMessage {
		data, _ = json.Marshal(failed(r.ID, fmt.Errorf("an answer of %d bytes is too large", len(data))))
	}
	_, _, err = s.conn.WriteMsgUnix(data, rights, nil)
	return err
}
