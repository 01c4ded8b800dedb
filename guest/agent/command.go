//go:build linux

package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"vz.test/vz/guest/wire"
)

const home = "/root"

// environment is the Machine's: what every command gets beneath its own.
func environment(terminal bool) map[string]string {
	env := map[string]string{
		"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME": home,
		"USER": "root",
		"LANG": "C.UTF-8",
	}
	if terminal {
		env["TERM"] = "xterm-256color"
	}
	if _, err := os.Stat(authorityPath); err == nil {
		// Node has a store of its own and reads no system one. Others find the
		// authority in the bundle; SSL_CERT_FILE would hide the directory.
		env["NODE_EXTRA_CA_CERTS"] = authorityPath
	}
	return env
}

// command is what to start, found and checked.
type command struct {
	path string
	argv []string
	env  []string
	dir  string
}

// find resolves a command as a shell would: PATH is the command's own, and what
// exists but cannot be executed differs from what does not exist.
func find(argv []string, env map[string]string, dir string, terminal bool) (*command, *wire.ExecFailed) {
	if len(argv) == 0 || argv[0] == "" {
		return nil, failure(wire.ExecFailed_REASON_OTHER, "no command given")
	}
	merged := environment(terminal)
	for k, v := range env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.Contains(v, "\x00") {
			return nil, failure(wire.ExecFailed_REASON_OTHER, "environment variable %q cannot be set", k)
		}
		merged[k] = v
	}
	c := &command{argv: argv, dir: dir}
	for _, k := range slices.Sorted(maps.Keys(merged)) {
		c.env = append(c.env, k+"="+merged[k])
	}
	if c.dir == "" {
		c.dir = merged["HOME"]
		if info, err := os.Stat(c.dir); err != nil || !info.IsDir() {
			c.dir = "/"
		}
	}
	if info, err := os.Stat(c.dir); err != nil {
		return nil, failure(wire.ExecFailed_REASON_OTHER, "working directory: %v", err)
	} else if !info.IsDir() {
		return nil, failure(wire.ExecFailed_REASON_OTHER, "working directory: %s is not a directory", c.dir)
	}
	var failed *wire.ExecFailed
	c.path, failed = lookup(argv[0], merged["PATH"], c.dir)
	if failed != nil {
		return nil, failed
	}
	return c, nil
}

func lookup(name, path, dir string) (string, *wire.ExecFailed) {
	candidates := []string{name}
	if !strings.Contains(name, "/") {
		candidates = nil
		for _, d := range filepath.SplitList(path) {
			candidates = append(candidates, filepath.Join(d, name)) // an empty entry is the working directory
		}
	}
	var denied *wire.ExecFailed
	for _, candidate := range candidates {
		if !filepath.IsAbs(candidate) {
			candidate = filepath.Join(dir, candidate)
		}
		info, err := os.Stat(candidate)
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
			continue
		case err != nil:
			denied = failure(wire.ExecFailed_REASON_NOT_EXECUTABLE, "%v", err)
		case info.IsDir():
			denied = failure(wire.ExecFailed_REASON_NOT_EXECUTABLE, "%s is a directory", candidate)
		case unix.Access(candidate, unix.X_OK) != nil:
			denied = failure(wire.ExecFailed_REASON_NOT_EXECUTABLE, "%s: permission denied", candidate)
		default:
			return candidate, nil
		}
	}
	if denied != nil {
		return "", denied
	}
	return "", failure(wire.ExecFailed_REASON_NOT_FOUND, "%s: command not found", name)
}

func failure(reason wire.ExecFailed_Reason, format string, arguments ...any) *wire.ExecFailed {
	return &wire.ExecFailed{Reason: reason, Message: fmt.Sprintf(format, arguments...)}
}

// start runs the command in a session of its own with these as its standard
// streams; a terminal becomes the controlling one. The descriptors stay the
// caller's.
func (c *command) start(r *reaper, files [3]int, terminal bool) (*child, *wire.ExecFailed) {
	sys := &syscall.SysProcAttr{Setsid: true, Setctty: terminal, Ctty: 0}
	descriptors := make([]uintptr, len(files))
	for i, fd := range files {
		descriptors[i] = uintptr(fd)
	}
	child, err := r.start(c.path, c.argv, &syscall.ProcAttr{Dir: c.dir, Env: c.env, Files: descriptors, Sys: sys})
	switch {
	case err == nil:
		return child, nil
	case errors.Is(err, unix.ENOEXEC):
		return nil, failure(wire.ExecFailed_REASON_NOT_EXECUTABLE, "%s: not a program for this Machine, and no #! line", c.path)
	case errors.Is(err, unix.ENOENT): // it was there a moment ago
		return nil, failure(wire.ExecFailed_REASON_NOT_EXECUTABLE, "%s: its interpreter does not exist", c.path)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM), errors.Is(err, unix.ETXTBSY), errors.Is(err, unix.ELIBBAD):
		return nil, failure(wire.ExecFailed_REASON_NOT_EXECUTABLE, "%s: %v", c.path, err)
	}
	return nil, failure(wire.ExecFailed_REASON_OTHER, "starting %s: %v", c.path, err)
}

// streams are a command's standard streams. Each has two ends: theirs is a
// blocking descriptor, as programs expect, ours a non-blocking file that can be
// closed, or given a deadline, under a read or write.
type streams struct {
	theirs [3]int
	stdin  *os.File // nil: /dev/null; with a terminal the same as stdout
	stdout *os.File
	stderr *os.File // nil with a terminal
}

// openStreams makes pipes; without stdin it is /dev/null.
func openStreams(stdin bool) (s *streams, failed *wire.ExecFailed) {
	s = &streams{theirs: [3]int{-1, -1, -1}}
	err := func() (err error) {
		if !stdin {
			s.theirs[0], err = unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		} else {
			s.theirs[0], s.stdin, err = pipe(0)
		}
		if err == nil {
			s.theirs[1], s.stdout, err = pipe(1)
		}
		if err == nil {
			s.theirs[2], s.stderr, err = pipe(1)
		}
		return err
	}()
	if err != nil {
		s.closeTheirs()
		s.closeOurs()
		return nil, failure(wire.ExecFailed_REASON_OTHER, "streams: %v", err)
	}
	return s, nil
}

func (s *streams) closeTheirs() {
	for i, fd := range s.theirs {
		if fd >= 0 && (i == 0 || fd != s.theirs[0]) { // a terminal is all three
			unix.Close(fd)
		}
	}
}

func (s *streams) closeOurs() {
	for _, f := range []*os.File{s.stdin, s.stdout, s.stderr} {
		if f != nil {
			f.Close()
		}
	}
}

// pipe gives the child the reading end (0) or the writing end (1).
func pipe(end int) (theirs int, ours *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return -1, nil, os.NewSyscallError("pipe2", err)
	}
	return fds[end], ourEnd(fds[1-end]), nil
}

func ourEnd(fd int) *os.File {
	unix.SetNonblock(fd, true) // what makes os.NewFile poll
	return os.NewFile(uintptr(fd), "stream")
}

// openTerminal makes a pseudo-terminal that has its size before anybody can ask
// for it. The slave comes by ioctl, so that no path under /dev/pts is trusted.
func openTerminal(size *wire.WindowSize) (*streams, *wire.ExecFailed) {
	master, slave, err := terminal(size)
	if err != nil {
		return nil, failure(wire.ExecFailed_REASON_OTHER, "terminal: %v", err)
	}
	return &streams{theirs: [3]int{slave, slave, slave}, stdin: master, stdout: master}, nil
}

func terminal(size *wire.WindowSize) (master *os.File, slave int, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, -1, &fs.PathError{Op: "open", Path: "/dev/ptmx", Err: err}
	}
	master = ourEnd(fd)
	var locked int32
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCSPTLCK, uintptr(unsafe.Pointer(&locked))); errno != 0 {
		master.Close()
		return nil, -1, os.NewSyscallError("TIOCSPTLCK", errno)
	}
	s, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		master.Close()
		return nil, -1, os.NewSyscallError("TIOCGPTPEER", errno)
	}
	if err := resize(master, size); err != nil {
		unix.Close(int(s))
		master.Close()
		return nil, -1, err
	}
	return master, int(s), nil
}

func resize(master *os.File, size *wire.WindowSize) error {
	return control(master, func(fd int) error {
		return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{
			Row: uint16(min(size.GetRows(), 1<<16-1)),
			Col: uint16(min(size.GetColumns(), 1<<16-1)),
		})
	})
}

// endOfFile is the character that ends input on this terminal, if it has one.
func endOfFile(master *os.File) (eof byte, ok bool) {
	err := control(master, func(fd int) error {
		t, err := unix.IoctlGetTermios(fd, unix.TCGETS)
		if err == nil {
			eof, ok = t.Cc[unix.VEOF], t.Lflag&unix.ICANON != 0 && t.Cc[unix.VEOF] != 0
		}
		return err
	})
	return eof, ok && err == nil
}

// control runs f with the descriptor without taking it off the poller.
func control(file *os.File, f func(fd int) error) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := raw.Control(func(fd uintptr) { inner = f(int(fd)) }); err != nil {
		return err
	}
	return inner
}
