package namespace

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"vz.test/vz/machines"
)

// Options are what a Host is made of.
type Options struct {
	EnvironmentID string
	// StateDir is the Environment's directory; every Machine's Dir lies below.
	StateDir string
	// Agent is the vz-guest binary. It is opened once; what the path names
	// later is of no concern.
	Agent string
	// User says that this process is root only in a user namespace of its own.
	User bool
	// UserNote is why an ordinary user's Machines have a single ID, if so.
	UserNote string
	// Hidden are host paths that no Machine may see, besides StateDir.
	Hidden []string
}

// A Host makes Machines. It runs in the launcher, as root or as root of a user
// namespace, and trusts its callers to have validated what they pass. The
// process is PID 1 of a pid namespace: that Machines die with it rests on that.
type Host struct {
	opts        Options
	ids         IDs
	hierarchies []hierarchy
	state       *os.Root
	agent       *os.File
	self        *os.File // this binary, when guests may not run /proc/self/exe

	mu      sync.Mutex
	running map[string]*Machine // by Machine ID
}

// NewHost opens what Machines need. A missing thing of the host is a
// *machines.MissingError.
func NewHost(opts Options) (*Host, error) {
	h := &Host{opts: opts, hierarchies: findHierarchies(!opts.User), running: map[string]*Machine{}}
	if opts.User {
		h.ids = UserIDs()
	} else {
		ids, err := RootIDs(opts.EnvironmentID)
		if err != nil {
			return nil, err
		}
		h.ids = ids
	}
	var err error
	if h.state, err = os.OpenRoot(opts.StateDir); err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	if h.agent, err = os.Open(opts.Agent); err != nil {
		return nil, &machines.MissingError{
			What:   "vz-guest",
			Why:    err.Error(),
			Remedy: "install vz-guest beside vz-supervisor, or build it with make build",
		}
	}
	if h.self, err = runnable(); err != nil {
		return nil, err
	}
	return h, nil
}

// runnable returns a copy of this program in memory if its file can't be run by
// another user (a umask of 077 made it), else nil: /proc/self/exe is reached
// without walking the directories above it.
func runnable() (*os.File, error) {
	info, err := os.Stat("/proc/self/exe")
	if err != nil {
		return nil, err
	}
	if info.Mode()&0o005 == 0o005 {
		return nil, nil
	}
	exe, err := os.Open("/proc/self/exe")
	if err != nil {
		return nil, err
	}
	defer exe.Close()
	fd, err := unix.MemfdCreate("vz", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_EXEC)
	if err == unix.EINVAL { // before Linux 6.3
		fd, err = unix.MemfdCreate("vz", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return nil, fmt.Errorf("memfd: %w", err)
	}
	self := os.NewFile(uintptr(fd), "vz")
	if _, err := io.Copy(self, exe); err != nil {
		return nil, err
	}
	_, err = unix.FcntlInt(self.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE)
	return self, err
}

// A Machine is one that runs. Its files are the caller's to close once they
// are handed on.
type Machine struct {
	NICs         []*os.File
	Agent        *os.File
	Capabilities []string
	Notes        []machines.Note

	cancel  context.CancelCauseFunc // ends a boot under way
	booted  chan struct{}           // closed when boot is over, well or not
	process *os.Process             // nil when boot failed early; valid once booted
	output  tail
	exited  chan struct{} // closed when PID 1 is reaped, and so all are
	gone    chan struct{} // closed when the cgroups are away too
	why     string        // valid once exited
}

// Done is closed when no process and no cgroup of the Machine is left; Why then
// says how its PID 1 ended, and with what last words.
func (m *Machine) Done() <-chan struct{} { return m.gone }

// Why is valid once Done is closed.
func (m *Machine) Why() string { return m.why }

// Close closes the files.
func (m *Machine) Close() {
	closeAll(m.NICs)
	if m.Agent != nil {
		m.Agent.Close()
	}
}

func (h *Host) cgroup(machineID string) cgroup {
	return cgroup{h.opts.EnvironmentID, machineID, h.hierarchies}
}

// relative is dir below the state directory.
func (h *Host) relative(dir string) (string, error) {
	rel, err := filepath.Rel(h.opts.StateDir, dir)
	if err != nil || rel == "." || !filepath.IsLocal(rel) {
		return "", fmt.Errorf("%s is not below %s", dir, h.opts.StateDir)
	}
	return rel, nil
}

// Create boots a Machine: it returns when Init has become the agent. Whatever
// was begun is undone on an error; files in Dir stay.
func (h *Host) Create(ctx context.Context, spec machines.Spec) (*Machine, error) {
	h.mu.Lock()
	if h.running[spec.MachineID] != nil {
		h.mu.Unlock()
		return nil, fmt.Errorf("machine %s (%s) runs already", spec.Name, spec.MachineID)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	m := &Machine{
		cancel: cancel,
		booted: make(chan struct{}),
		exited: make(chan struct{}),
		gone:   make(chan struct{}),
	}
	h.running[spec.MachineID] = m
	h.mu.Unlock()

	err := h.boot(ctx, m, spec)
	close(m.booted)
	if err != nil {
		m.Close()
		if m.process != nil {
			m.process.Kill()
			<-m.exited
			if errors.Is(err, errDied) {
				err = fmt.Errorf("%w (%s)", err, m.why)
			}
		}
		h.forget(spec.MachineID, m)
		return nil, err
	}
	go func() {
		<-m.exited
		h.forget(spec.MachineID, m)
	}()
	return m, nil
}

// forgetTimeout bounds the clearing away after a Machine that has ended: no
// process is left, so only the kernel's own bookkeeping is awaited.
const forgetTimeout = 5 * time.Second

func (h *Host) forget(machineID string, m *Machine) {
	ctx, cancel := context.WithTimeout(context.Background(), forgetTimeout)
	defer cancel()
	// What stays is found by the next Create, Clean or Remove.
	h.cgroup(machineID).remove(ctx)
	h.mu.Lock()
	delete(h.running, machineID)
	h.mu.Unlock()
	close(m.gone)
}

func (h *Host) boot(ctx context.Context, m *Machine, spec machines.Spec) error {
	group := h.cgroup(spec.MachineID)
	if err := group.remove(ctx); err != nil {
		return fmt.Errorf("left from before: %w", err)
	}
	tree, err := h.openTree(spec)
	if err != nil {
		return err
	}
	defer tree.Close()

	agent, agentInside, err := socketpair()
	if err != nil {
		return err
	}
	m.Agent = agent
	defer agentInside.Close()
	control, controlInside, err := socketpair()
	if err != nil {
		return err
	}
	defer control.Close()
	defer controlInside.Close()

	pidfd, err := h.clone(m, agentInside, controlInside, tree)
	if err != nil {
		return err
	}
	defer unix.Close(pidfd)
	controlInside.Close() // so that the child's end is the only one

	m.Capabilities, m.Notes = group.create(limits{spec.CPUs, spec.MemoryBytes, h.ids})
	if err := group.join(m.process.Pid); err != nil {
		m.Capabilities = nil
		m.Notes = []machines.Note{{Capability: "cgroup", Reason: err.Error()}}
	}
	if h.ids.Single() {
		m.Notes = append(m.Notes, machines.Note{Capability: "user_ids", Reason: h.opts.UserNote})
	} else {
		m.Capabilities = append(m.Capabilities, "user_ids")
	}
	if m.NICs, err = openTAPs(pidfd, spec.NICs); err != nil {
		return err
	}
	said, err := converse(ctx, control, order{
		Name:      spec.Name,
		MachineID: spec.MachineID,
		Hidden:    append([]string{h.opts.StateDir}, h.opts.Hidden...),
		Hardened:  spec.Profile == "hardened",
	})
	if err != nil {
		return fmt.Errorf("machine %s: %w", spec.Name, err)
	}
	m.Notes = append(m.Notes, said...)
	return nil
}

// openTree makes the directories that hold a Machine's files, owned by guest
// root, and returns a detached mount of them. The directories above are closed
// to guest root; a mount of its own needs no walk through them.
//
//	Dir/fs/root     the root: what is on no other mount
//	Dir/fs/layers   the overlays' upper and work directories
func (h *Host) openTree(spec machines.Spec) (*os.File, error) {
	rel, err := h.relative(spec.Dir)
	if err != nil {
		return nil, err
	}
	if err := h.state.MkdirAll(rel, 0o700); err != nil {
		return nil, err
	}
	dir, err := h.state.OpenRoot(rel)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	made := false
	switch err := dir.Mkdir("fs", 0o700); {
	case err == nil:
		made = true
	case !errors.Is(err, fs.ErrExist):
		return nil, err
	}
	tree, err := dir.OpenFile("fs", os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer tree.Close()
	if made {
		if err := tree.Chown(h.ids.UID, h.ids.GID); err != nil {
			return nil, err
		}
	} else if info, err := tree.Stat(); err != nil {
		return nil, err
	} else if owner := int(info.Sys().(*syscall.Stat_t).Uid); owner != h.ids.UID {
		return nil, &machines.MissingError{
			What:   "subordinate user IDs",
			Why:    fmt.Sprintf("the files of %s belong to ID %d, guest root is now %d", spec.Name, owner, h.ids.UID),
			Remedy: "restore /etc/subuid and /etc/subgid as they were, or delete the Environment and make it anew",
		}
	}
	fd, err := unix.OpenTree(int(tree.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return nil, fmt.Errorf("open_tree %s: %w", spec.Dir, err)
	}
	return os.NewFile(uintptr(fd), "fs"), nil
}

// Descriptors of Init, in the order of ExtraFiles.
const (
	agentFD   = 3
	controlFD = 4
	treeFD    = 5
	guestFD   = 6
	selfFD    = 7 // only when h.self is set
)

// clone starts Init in its namespaces, held back until it gets its order.
func (h *Host) clone(m *Machine, agent, control, tree *os.File) (pidfd int, err error) {
	pidfd = -1
	cmd := &exec.Cmd{
		Path:       "/proc/self/exe",
		Args:       []string{"vz", InitArg},
		Env:        []string{},
		Dir:        "/",
		ExtraFiles: []*os.File{agent, control, tree, h.agent},
		Stdout:     &m.output,
		Stderr:     &m.output,
		// A process that holds the pipe open after PID 1 is gone can't exist;
		// this is for the case that the kernel disagrees.
		WaitDelay: forgetTimeout,
		SysProcAttr: &syscall.SysProcAttr{
			Setsid: true,
			PidFD:  &pidfd,
			Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWUTS |
				unix.CLONE_NEWIPC | unix.CLONE_NEWNET,
			UidMappings:                h.ids.uidMap(),
			GidMappings:                h.ids.gidMap(),
			GidMappingsEnableSetgroups: !h.ids.Single(),
			Credential:                 &syscall.Credential{Uid: 0, Gid: 0, NoSetGroups: h.ids.Single()},
		},
	}
	if h.self != nil {
		cmd.ExtraFiles = append(cmd.ExtraFiles, h.self)
		cmd.Path = fmt.Sprintf("/proc/self/fd/%d", selfFD)
	}
	if err := cmd.Start(); err != nil {
		return -1, missingNamespaces(err)
	}
	m.process = cmd.Process
	go func() {
		err := cmd.Wait()
		if err == nil {
			m.why = "the agent ended"
		} else {
			m.why = "the agent ended: " + err.Error()
		}
		if last := m.output.String(); last != "" {
			m.why += "; it said: " + last
		}
		close(m.exited)
	}()
	return pidfd, nil
}

func missingNamespaces(err error) error {
	missing := &machines.MissingError{What: "namespaces", Why: err.Error()}
	switch {
	case errors.Is(err, unix.ENOSPC):
		missing.Remedy = "as root: raise the limits in /proc/sys/user/max_*_namespaces"
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		missing.Remedy = UserNamespaceRemedy()
	case errors.Is(err, unix.EINVAL):
		missing.Remedy = "use a kernel with user, mount, pid, uts, ipc, net and cgroup namespaces"
	default:
		return fmt.Errorf("clone: %w", err)
	}
	return missing
}

// UserNamespaceRemedy says which of the host's switches forbids user
// namespaces to this process.
func UserNamespaceRemedy() string {
	for _, s := range []struct{ file, forbids, remedy string }{
		{"/proc/sys/kernel/unprivileged_userns_clone", "0", "as root: sysctl kernel.unprivileged_userns_clone=1"},
		{"/proc/sys/user/max_user_namespaces", "0", "as root: sysctl user.max_user_namespaces=15000"},
		{"/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "as root: sysctl kernel.apparmor_restrict_unprivileged_userns=0, or install vz's AppArmor profile"},
	} {
		text, err := os.ReadFile(s.file)
		if err == nil && strings.TrimSpace(string(text)) == s.forbids {
			return s.remedy
		}
	}
	return "allow this process to make user namespaces (a container's seccomp profile or missing CAP_SYS_ADMIN forbids them)"
}

// converse gives Init its order and hears it out until it closes the socket by
// becoming the agent, or fails.
func converse(ctx context.Context, control *os.File, o order) ([]machines.Note, error) {
	stop := context.AfterFunc(ctx, func() { control.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := json.NewEncoder(control).Encode(o); err != nil {
		return nil, interrupted(ctx, err)
	}
	var notes []machines.Note
	words := json.NewDecoder(control)
	for {
		var w word
		err := words.Decode(&w)
		if err == io.EOF {
			if notes == nil {
				return nil, errDied
			}
			return notes, nil
		}
		if err != nil {
			return nil, interrupted(ctx, err)
		}
		if err := w.err(); err != nil {
			return nil, err
		}
		notes = append([]machines.Note{}, w.Notes...)
	}
}

var errDied = errors.New("it died before it became the agent")

func interrupted(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE) {
		return errDied
	}
	return fmt.Errorf("control socket: %w", err)
}

// Kill ends a Machine of this Host at once and waits until it is gone.
func (h *Host) Kill(ctx context.Context, machineID string) error {
	h.mu.Lock()
	m := h.running[machineID]
	h.mu.Unlock()
	if m == nil {
		return nil
	}
	m.cancel(errKilled)
	<-m.booted
	if m.process != nil {
		if err := m.process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return err
		}
	}
	select {
	case <-m.gone:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("machine %s does not end: %w", machineID, context.Cause(ctx))
	}
}

var errKilled = errors.New("killed while it started")

// Clean ends a Machine, this Host's or one that an earlier Host left, and
// waits until its processes and cgroups are gone. Mounts and namespaces go with
// the processes.
func (h *Host) Clean(ctx context.Context, machineID string) error {
	if err := h.Kill(ctx, machineID); err != nil {
		return err
	}
	return h.cgroup(machineID).remove(ctx)
}

// Remove is Clean and takes dir away.
func (h *Host) Remove(ctx context.Context, machineID, dir string) error {
	rel, err := h.relative(dir)
	if err != nil {
		return err
	}
	if err := h.Clean(ctx, machineID); err != nil {
		return err
	}
	return h.state.RemoveAll(rel)
}

// Close ends all Machines and waits, at most until ctx ends.
func (h *Host) Close(ctx context.Context) error {
	h.mu.Lock()
	var ids []string
	for id := range h.running {
		ids = append(ids, id)
	}
	h.mu.Unlock()
	errs := make([]error, len(ids))
	var all sync.WaitGroup
	for i, id := range ids {
		all.Go(func() { errs[i] = h.Clean(ctx, id) })
	}
	all.Wait()
	h.agent.Close()
	h.state.Close()
	return errors.Join(errs...)
}

// socketpair makes two connected stream sockets, both non-blocking, so that
// Go's poller takes them.
func socketpair() (a, b *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	return os.NewFile(uintptr(fds[0]), "socket"), os.NewFile(uintptr(fds[1]), "socket"), nil
}

// A tail keeps the last of what is written to it, for the message about an
// agent that didn't come up.
type tail struct {
	mu   sync.Mutex
	data []byte
}

const tailSize = 2048

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.data = append(t.data, p[max(0, len(p)-tailSize):]...)
	if over := len(t.data) - tailSize; over > 0 {
		t.data = append(t.data[:0], t.data[over:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(strings.ToValidUTF8(string(t.data), "?"))
}
