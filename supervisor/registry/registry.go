// Package registry is the state directory: which projects and Environments a
// user has, what is recorded of each, which worktree is bound to which, and how
// one of them is selected.
//
// It works without a supervisor: the command line creates, lists, selects and
// reads Environments through it, stopped and crashed ones included. A living
// supervisor holds the Environment's owner lock (Own) and is then the only
// writer of its record.
//
//	$XDG_STATE_HOME/vz                      or ~/.local/state/vz
//	├── projects/PRJ/index.json             names and bindings; written under projects/PRJ/lock
//	└── environments/ENV/
//	    ├── lock                            owner lock
//	    ├── record.json, definition.json
//	    ├── supervisor.log, receipts/, ingress/
//	    └── machines/MCH/
//	$XDG_RUNTIME_DIR/vz/ENV.sock            or /tmp/vz-UID/ENV.sock
//
// Directories have mode 0700, files 0600. Every JSON file says its version, is
// replaced atomically, and leaves its previous good copy beside it with the
// suffix .prev, which is used, with a warning, when the current one is damaged.
//
// It is no database and no daemon: there is no lock over two projects, no
// global current Environment, and nothing watches. It knows neither what a
// Machine is made of nor how one is run. Errors are Explained.
package registry

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Options say where a Registry is. The zero value is the user's own.
type Options struct {
	// Getenv reads the process environment; nil is os.Getenv. Asked for are
	// XDG_STATE_HOME, XDG_RUNTIME_DIR and HOME.
	Getenv func(string) string
	// Warn is told what was found damaged and worked around; errors are
	// Explained. It may be nil, and is called by whoever calls the Registry.
	Warn func(error)
}

// A Registry is one user's state. It holds no open files and no state in
// memory, so that any number of them, in any processes, work on one directory.
// Its methods may be called from any goroutine.
type Registry struct {
	Paths
	uid  int
	now  func() time.Time
	warn func(error)
}

// Open finds the state directory. It neither reads nor creates anything.
func Open(o Options) (*Registry, error) {
	return open(o, "/tmp", os.Geteuid())
}

func open(o Options, tmp string, uid int) (*Registry, error) {
	if o.Getenv == nil {
		o.Getenv = os.Getenv
	}
	if o.Warn == nil {
		o.Warn = func(error) {}
	}
	r := &Registry{uid: uid, now: time.Now, warn: o.Warn}
	state := o.Getenv("XDG_STATE_HOME")
	if state == "" {
		home := o.Getenv("HOME")
		if home == "" {
			return nil, &PlaceError{"$XDG_STATE_HOME", "neither XDG_STATE_HOME nor HOME is set", "set one of them"}
		}
		state = filepath.Join(home, ".local", "state")
	}
	if !filepath.IsAbs(state) {
		// The XDG specification lets a program ignore a relative path. That
		// would show other Environments than those asked for.
		return nil, &PlaceError{state, "XDG_STATE_HOME and HOME must be absolute paths", "set it to an absolute path"}
	}
	r.root = filepath.Join(state, "vz")
	r.runtime = runtimeDir(o.Getenv("XDG_RUNTIME_DIR"), tmp, uid)
	return r, nil
}

// UID is the user whose state this is.
func (r *Registry) UID() int { return r.uid }

// maxSocketPath is the longest path of a unix socket in bytes: sun_path has 104
// on macOS (108 on Linux) and the final NUL is one of them.
const maxSocketPath = 103

// runtimeDir is where sockets go. Without a XDG_RUNTIME_DIR of this user's own
// (unset, as under cron and in containers; or another user's, as after su) it
// is TMP/vz-UID. One that is so long that a socket's path would exceed the
// limit is replaced by TMP/vz-UID-HASH, its hash, so that different ones stay
// apart. Whoever connects takes the path that the record has, so that it does
// not matter whether both sides see the same environment variables.
func runtimeDir(xdg, tmp string, uid int) string {
	fallback := filepath.Join(tmp, fmt.Sprintf("vz-%d", uid))
	if !filepath.IsAbs(xdg) {
		return fallback
	}
	if info, err := os.Stat(xdg); err != nil || !info.IsDir() || !ownedBy(info, uid) {
		return fallback
	}
	dir := filepath.Join(xdg, "vz")
	if len(dir)+1+socketName > maxSocketPath {
		sum := sha256.Sum256([]byte(dir))
		return fallback + "-" + hex.EncodeToString(sum[:4])
	}
	return dir
}

// Paths are where things are. They are only computed; nothing need exist.
type Paths struct {
	root, runtime string
}

// Root is the state directory; when the last Environment is gone it is empty.
func (p Paths) Root() string { return p.root }

// RuntimeDir is the directory of the sockets.
func (p Paths) RuntimeDir() string { return p.runtime }

func (p Paths) projects() string     { return filepath.Join(p.root, "projects") }
func (p Paths) environments() string { return filepath.Join(p.root, "environments") }

func (p Paths) ProjectDir(project string) string { return filepath.Join(p.projects(), project) }
func (p Paths) indexPath(project string) string {
	return filepath.Join(p.ProjectDir(project), "index.json")
}

// EnvironmentDir is the Environment's own directory. All that is kept of it is
// below, but for its entry in the index and its socket.
func (p Paths) EnvironmentDir(environment string) string {
	return filepath.Join(p.environments(), environment)
}
func (p Paths) RecordPath(environment string) string {
	return filepath.Join(p.EnvironmentDir(environment), "record.json")
}

// DefinitionPath is the text of vz.json that the Environment was last
// reconciled to. Read it with Definition.
func (p Paths) DefinitionPath(environment string) string {
	return filepath.Join(p.EnvironmentDir(environment), "definition.json")
}
func (p Paths) LockPath(environment string) string {
	return filepath.Join(p.EnvironmentDir(environment), "lock")
}
func (p Paths) LogPath(environment string) string {
	return filepath.Join(p.EnvironmentDir(environment), "supervisor.log")
}

// ReceiptsDir is the directory of supervisor/receipt.
func (p Paths) ReceiptsDir(environment string) string {
	return filepath.Join(p.EnvironmentDir(environment), "receipts")
}

// IngressDir is the directory of the Environment's CA.
func (p Paths) IngressDir(environment string) string {
	return filepath.Join(p.EnvironmentDir(environment), "ingress")
}

// MachineDir is a Machine's own directory; its driver makes it.
func (p Paths) MachineDir(environment, machine string) string {
	return filepath.Join(p.EnvironmentDir(environment), "machines", machine)
}

// trash is what an Environment's directory is called while it is removed. No
// ID begins with a dot.
func (p Paths) trash(environment string) string {
	return filepath.Join(p.environments(), trashPrefix+environment)
}

const trashPrefix = ".trash-"

// socketName is the length of a socket's file name in bytes: the random part of
// an environment ID, 16 characters, is as unique as the whole.
const socketName = 16 + len(".sock")

// SocketPath is where the Environment's next supervisor listens, at most 103
// bytes. Where a living one does, its record says (Record.Supervisor).
func (p Paths) SocketPath(environment string) string {
	return filepath.Join(p.runtime, environment[max(0, len(environment)-16):]+".sock")
}

// makeDir makes a private directory and those above it. Another process that
// takes an empty one away at the same instant (Remove does) is outlived.
func (r *Registry) makeDir(dir string) error {
	if err := r.check(r.root); err != nil {
		return err
	}
	var err error
	for range 100 {
		if err = os.MkdirAll(dir, 0o700); !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	if err != nil {
		return &FileError{"cannot make the directory", dir, err, "see that " + r.root + " can be written to and the disk is not full"}
	}
	return r.check(r.root)
}

// check refuses a directory that is not ours alone. One that does not exist is
// fine.
func (r *Registry) check(dir string) error {
	info, err := os.Lstat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return &FileError{"cannot look at", dir, err, "see that the directories above it can be searched"}
	}
	if info.Mode()&fs.ModeSymlink != 0 && dir == r.root {
		// A user may keep the state elsewhere; what counts is where it leads.
		if info, err = os.Stat(dir); err != nil {
			return &FileError{"cannot look at", dir, err, "mend or remove the link"}
		}
	}
	switch {
	case !info.IsDir():
		return &PlaceError{dir, "it is not a directory", "move it out of the way"}
	case !ownedBy(info, r.uid):
		return &PlaceError{dir, fmt.Sprintf("it does not belong to user ID %d", r.uid),
			"run vz as its owner, or point XDG_STATE_HOME and XDG_RUNTIME_DIR to directories of your own"}
	case info.Mode().Perm()&0o077 != 0 && modesCount:
		return &PlaceError{dir, fmt.Sprintf("other users may enter it (mode %04o)", info.Mode().Perm()), "chmod 700 " + dir}
	}
	return nil
}

// makeRuntimeDir makes the directory of the sockets. In /tmp anybody could have
// made it first, so it is trusted only when it is ours alone.
func (r *Registry) makeRuntimeDir() error {
	if err := os.Mkdir(r.runtime, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return &FileError{"cannot make the directory", r.runtime, err, "set XDG_RUNTIME_DIR to a directory of your own"}
	}
	return r.check(r.runtime)
}

// environmentIDs are the directories of environments/, sorted.
func (r *Registry) environmentIDs() ([]string, error) {
	return r.ids(r.environments(), KindEnvironment)
}

func (r *Registry) projectIDs() ([]string, error) { return r.ids(r.projects(), KindProject) }

func (r *Registry) ids(dir string, kind Kind) ([]string, error) {
	if err := r.check(r.root); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, &FileError{"cannot list", dir, err, "see that it can be read"}
	}
	var found []string
	for _, e := range entries {
		if e.IsDir() && CheckID(e.Name(), kind) == nil {
			found = append(found, e.Name())
		}
	}
	return found, nil
}

// exists says whether the Environment has a directory.
func (r *Registry) exists(environment string) bool {
	info, err := os.Lstat(r.EnvironmentDir(environment))
	return err == nil && info.IsDir()
}

func compareCandidates(a, b Candidate) int {
	return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.ID, b.ID))
}
