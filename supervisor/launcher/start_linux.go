package launcher

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"vz.test/vz/machines"
	"vz.test/vz/machines/namespace"
)

// Descriptors of a launcher.
const (
	socketFD = 3
	goFD     = 4 // a byte comes when the user namespace is mapped
)

// Start starts a launcher as a child of this process and returns when it is
// ready. A launcher that an earlier supervisor left for the same state
// directory is ended first; the caller therefore holds the Environment's owner
// lock. A missing thing of the host is a *machines.MissingError.
//
// A supervisor that calls Confine starts its launcher before.
func Start(ctx context.Context, opts Options) (*Client, error) {
	if err := opts.check(); err != nil {
		return nil, err
	}
	if err := endLeftover(ctx, opts.StateDir); err != nil {
		return nil, err
	}
	if os.Geteuid() == 0 {
		return start(ctx, opts, nil, "")
	}
	if home, err := os.UserHomeDir(); err == nil && filepath.IsAbs(home) && ours(home) {
		opts.Hidden = append(slices.Clone(opts.Hidden), filepath.Clean(home))
	}
	names := []string{strconv.Itoa(os.Getuid())}
	if u, err := user.Current(); err == nil {
		names = append(names, u.Username)
	}
	why := "only root exists inside: "
	ids, err := namespace.Subordinate(opts.EnvironmentID, names...)
	if err == nil {
		c, err := start(ctx, opts, &ids, "")
		if mapping := (*mappingError)(nil); !errors.As(err, &mapping) {
			return c, err
		}
		why += err.Error()
	} else {
		why += err.Error()
	}
	return start(ctx, opts, nil, why)
}

// ours says whether a directory belongs to this user; service accounts have
// homes such as / or /usr/sbin, which hold the host's tools.
func ours(dir string) bool {
	var st unix.Stat_t
	return unix.Stat(dir, &st) == nil && int(st.Uid) == os.Getuid()
}

// start starts one launcher: as root, or for an ordinary user with ids, or with
// his single ID if nil.
func start(ctx context.Context, opts Options, ids *namespace.IDs, note string) (*Client, error) {
	ordinary := os.Geteuid() != 0
	conn, inside, err := socketpair()
	if err != nil {
		return nil, err
	}
	defer inside.Close()
	goRead, goWrite, err := os.Pipe()
	if err != nil {
		conn.Close()
		return nil, err
	}
	defer goRead.Close()
	defer goWrite.Close()

	args := []string{os.Args[0], Arg, "--state", opts.StateDir, "--environment", opts.EnvironmentID, "--agent", opts.Agent}
	for _, h := range opts.Hidden {
		args = append(args, "--hide", h)
	}
	if ordinary {
		args = append(args, "--user", "--wait", "--note", note)
	}
	cmd := &exec.Cmd{
		Path:       "/proc/self/exe", // whatever was installed in the meantime
		Args:       args,
		Env:        []string{"PATH=" + os.Getenv("PATH")},
		Dir:        "/",
		Stderr:     opts.Log,
		ExtraFiles: []*os.File{inside, goRead},
		SysProcAttr: &syscall.SysProcAttr{
			Setsid:     true,
			Pdeathsig:  unix.SIGKILL,
			Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID,
		},
	}
	if opts.Log == nil {
		cmd.Stderr = nil // not a nil *os.File in an io.Writer
	}
	if ordinary {
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
	}
	dead := make(chan struct{})
	if err := startForLife(cmd, dead); err != nil {
		conn.Close()
		return nil, missingPrivilege(err)
	}
	end := func() { cmd.Process.Kill() }
	if ordinary {
		err := mapIDs(cmd.Process.Pid, ids)
		if err == nil {
			_, err = goWrite.Write([]byte{1})
		}
		if err != nil {
			conn.Close()
			end()
			<-dead
			return nil, err
		}
	}
	// Only the launcher's own copies keep these open from here on.
	inside.Close()
	return newClient(ctx, conn, end, dead)
}

// startForLife starts cmd and closes dead when it has been reaped. The
// parent-death signal comes when the parent's thread ends, not the process; so
// one thread is kept for as long as the child lives.
func startForLife(cmd *exec.Cmd, dead chan struct{}) error {
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked
		err := cmd.Start()
		started <- err
		if err == nil {
			cmd.Wait()
			close(dead)
		}
	}()
	return <-started
}

func missingPrivilege(err error) error {
	if !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.ENOSPC) {
		return fmt.Errorf("start the launcher: %w", err)
	}
	missing := &machines.MissingError{What: "user namespaces", Why: err.Error(), Remedy: namespace.UserNamespaceRemedy()}
	if errors.Is(err, unix.ENOSPC) {
		missing.Remedy = "as root: raise the limits in /proc/sys/user/max_*_namespaces"
	}
	if os.Geteuid() == 0 {
		missing.What = "namespaces"
	}
	return missing
}

// A mappingError says that a subordinate range could not be mapped; a single
// ID may still be.
type mappingError struct{ error }

// mapIDs maps the launcher's user namespace: its 0 is this user, and its IDs
// from 1 on are ids.
func mapIDs(pid int, ids *namespace.IDs) error {
	proc := fmt.Sprintf("/proc/%d/", pid)
	if ids == nil {
		for _, m := range []struct{ file, text string }{
			{"setgroups", "deny"}, // user_namespaces(7): or the kernel refuses gid_map
			{"uid_map", fmt.Sprintf("0 %d 1", os.Geteuid())},
			{"gid_map", fmt.Sprintf("0 %d 1", os.Getegid())},
		} {
			if err := os.WriteFile(proc+m.file, []byte(m.text), 0); err != nil {
				return missingPrivilege(err)
			}
		}
		return nil
	}
	for _, m := range []struct {
		tool       string
		own, first int
	}{
		{"newuidmap", os.Geteuid(), ids.UID},
		{"newgidmap", os.Getegid(), ids.GID},
	} {
		args := []string{strconv.Itoa(pid), "0", strconv.Itoa(m.own), "1", "1", strconv.Itoa(m.first), strconv.Itoa(ids.Count)}
		if out, err := exec.Command(m.tool, args...).CombinedOutput(); err != nil {
			return &mappingError{fmt.Errorf("%s (package uidmap): %w: %s", m.tool, err, bytes.TrimSpace(out))}
		}
	}
	return nil
}

// socketpair makes the supervisor's connection and the launcher's descriptor.
func socketpair() (*net.UnixConn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	inside := os.NewFile(uintptr(fds[1]), "launcher")
	outside := os.NewFile(uintptr(fds[0]), "launcher")
	defer outside.Close()
	conn, err := unixConn(outside)
	if err != nil {
		inside.Close()
		return nil, nil, err
	}
	return conn, inside, nil
}

func unixConn(f *os.File) (*net.UnixConn, error) {
	conn, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	u, ok := conn.(*net.UnixConn)
	if !ok {
		conn.Close()
		return nil, fmt.Errorf("%T is no unix socket", conn)
	}
	return u, nil
}

// oobSize holds the descriptors of the largest Machine.
var oobSize = unix.CmsgSpace((namespace.MaxNICs + 1) * 4)

// filesOf takes the descriptors out of a control message. They come
// close-on-exec; Go's poller wants them non-blocking, which the launcher set.
func filesOf(oob []byte, flags int) ([]*os.File, error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	var files []*os.File
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			continue
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "from launcher"))
		}
	}
	if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		closeFiles(files)
		return nil, errors.New("launcher: message cut off")
	}
	return files, nil
}

// leftoverTimeout bounds the wait for a killed launcher and its Machines.
const leftoverTimeout = 10 * time.Second

// endLeftover kills this user's launchers for the same state directory. One can
// only be there because its supervisor died a moment ago: when the launcher's
// descriptor tells its end, its pid namespace is empty.
func endLeftover(ctx context.Context, stateDir string) error {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() || !isLauncher(pid, stateDir) {
			continue
		}
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue
		}
		// Looked at again: the number may have been given to another process
		// before the descriptor was.
		if isLauncher(pid, stateDir) {
			err = endProcess(ctx, fd)
		}
		unix.Close(fd)
		if err != nil {
			return fmt.Errorf("a launcher of an earlier supervisor (pid %d): %w", pid, err)
		}
	}
	return nil
}

func isLauncher(pid int, stateDir string) bool {
	cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return false
	}
	args := strings.Split(string(cmdline), "\x00")
	if len(args) < 4 || args[1] != Arg || args[2] != "--state" || args[3] != stateDir {
		return false
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(status)) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == "Uid:" {
			return fields[1] == strconv.Itoa(os.Getuid())
		}
	}
	return false
}

func endProcess(ctx context.Context, pidfd int) error {
	if err := unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0); err != nil {
		if err == unix.ESRCH {
			return nil
		}
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, leftoverTimeout)
	defer cancel()
	for {
		// Short turns, so that ctx is heard.
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 50)
		if n > 0 {
			return nil
		}
		if err != nil && err != unix.EINTR {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}
