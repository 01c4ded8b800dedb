package registry

import (
	"context"
	"errors"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// An Owner is the lock of one Environment, held by its supervisor for life. The
// kernel lets go of it when the process ends, however it ends.
type Owner struct {
	registry    *Registry
	environment string
	file        *os.File
}

// ownPatience is how long Own yields to processes that only look. Each of them
// has the lock for some microseconds.
const ownPatience = 2 * time.Second

// Own takes the Environment's owner lock. A living owner is a *HeldError at
// once; no such Environment is a *MissingError.
//
// Locked looks by taking a shared lock for an instant, which keeps an exclusive
// one out for that instant. So an owner that is refused asks for a shared lock
// itself: had, only lookers are there and it tries again; refused, an owner is.
// (POSIX record locks can be asked for without being taken, but are lost when
// any descriptor of the file is closed; F_OFD_GETLK is Linux only.)
func (r *Registry) Own(ctx context.Context, environment string) (*Owner, error) {
	if err := CheckID(environment, KindEnvironment); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, ownPatience)
	defer cancel()
	path := r.LockPath(environment)
	failed := func(err error) error {
		return &FileError{"cannot lock", path, err, "see that its directory can be written to"}
	}
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, &MissingError{environment}
		}
		if err != nil {
			return nil, failed(err)
		}
		err = lockFile(f, lockExclusive, false)
		switch {
		case err == nil && !current(f, path):
			// A delete took the file away, or renamed its directory, between
			// our opening and locking it. Look again.
			f.Close()
			continue
		case err == nil:
			// For messages only; a failure to write it harms nobody.
			if f.Truncate(0) == nil {
				f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
			}
			return &Owner{r, environment, f}, nil
		case !errors.Is(err, errBusy):
			f.Close()
			return nil, failed(err)
		}
		err = lockFile(f, lockShared, false)
		if errors.Is(err, errBusy) {
			held := &HeldError{environment, lockPID(f)}
			f.Close()
			return nil, held
		}
		f.Close()
		if err != nil {
			return nil, failed(err)
		}
		select {
		case <-ctx.Done():
			return nil, failed(ctx.Err())
		case <-time.After(time.Millisecond + rand.N(4*time.Millisecond)): // not in step with another that starts
		}
	}
}

// current says whether path still leads to the open file.
func current(f *os.File, path string) bool {
	mine, err := f.Stat()
	if err != nil {
		return false
	}
	there, err := os.Lstat(path)
	return err == nil && os.SameFile(mine, there)
}

func lockPID(f *os.File) int {
	text := make([]byte, 16)
	n, _ := f.ReadAt(text, 0)
	pid, _ := strconv.Atoi(strings.TrimSpace(string(text[:n])))
	return pid
}

// Locked says whether a living supervisor owns the Environment. It creates
// nothing, and keeps a supervisor that starts at the same instant waiting for
// microseconds.
func (r *Registry) Locked(environment string) (bool, error) {
	if err := CheckID(environment, KindEnvironment); err != nil {
		return false, err
	}
	path := r.LockPath(environment)
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, &FileError{"cannot look at", path, err, "see that it is yours"}
	}
	defer f.Close()
	err = lockFile(f, lockShared, false)
	if errors.Is(err, errBusy) {
		return true, nil
	}
	if err != nil {
		return false, &FileError{"cannot look at", path, err, "see that its file system has locks (flock)"}
	}
	return false, nil
}

// Environment is the ID of the one that is owned.
func (o *Owner) Environment() string { return o.environment }

// Close lets go of the Environment.
func (o *Owner) Close() error { return o.file.Close() }

// Listen opens the Environment's socket, mode 0600, in a directory that is the
// owner's alone. A socket that an earlier supervisor left is replaced: who
// holds the lock is the only one who may. Closing the listener removes it.
func (o *Owner) Listen() (*net.UnixListener, error) {
	path := o.registry.SocketPath(o.environment)
	failed := func(err error) error {
		return &FileError{"cannot listen on", path, err, "set XDG_RUNTIME_DIR to a directory of your own"}
	}
	if len(path) > maxSocketPath {
		return nil, failed(&PlaceError{filepath.Dir(path), "a socket's path may have " + strconv.Itoa(maxSocketPath) + " bytes", "set XDG_RUNTIME_DIR to a shorter one"})
	}
	// A delete of another Environment takes an empty directory away; then it
	// is made again.
	for attempt := 0; ; attempt++ {
		if err := o.registry.makeRuntimeDir(); err != nil {
			return nil, err
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, failed(err)
		}
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err == nil {
			// Until here the directory kept others out.
			if err = os.Chmod(path, 0o600); err == nil {
				return l, nil
			}
			l.Close()
		}
		if !errors.Is(err, fs.ErrNotExist) || attempt == 100 {
			return nil, failed(err)
		}
	}
}
