package namespace

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"vz.test/vz/machines"
)

// Where the Machine's tree is put while its root is built. /tmp is on every
// host; what lies beneath is not looked at, and the old root goes away whole.
const (
	staging   = "/tmp"
	newRoot   = staging + "/root"
	newLayers = staging + "/layers"
)

// A root is a Machine's root file system in the making. Its files were under
// guest root's hands in earlier boots, so they are only touched through
// os.Root, which follows no link out of them.
type root struct {
	order
	files      *os.Root // newRoot
	layers     *os.Root // newLayers
	mounts     []string // the host's mount points
	notes      []machines.Note
	nixProfile bool
}

func (r *root) build() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return step("make mounts private", err)
	}
	var err error
	if r.mounts, err = mountPoints(); err != nil {
		return err
	}
	if err := unix.MoveMount(treeFD, "", unix.AT_FDCWD, staging, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return step("move_mount", err)
	}
	for _, dir := range []string{newRoot, newLayers} {
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	if err := bind(newRoot, newRoot); err != nil {
		return err
	}
	if err := r.findRoom(); err != nil {
		return err
	}
	if r.files, err = os.OpenRoot(newRoot); err != nil {
		return err
	}
	if r.layers, err = os.OpenRoot(newLayers); err != nil {
		return err
	}
	steps := []struct {
		what string
		do   func() error
	}{
		{"own directories", r.skeleton},
		{"tools", r.tools},
		{"/proc", r.proc},
		{"/sys", r.sys},
		{"/dev", r.dev},
		{"/run", r.run},
		{"files in /etc", r.etc},
	}
	for _, s := range steps {
		if err := s.do(); err != nil {
			return step(s.what, err)
		}
	}
	return nil
}

// findRoom tries whether an overlay can have its upper directory on the file
// system that holds the Machine's files. One that can't (itself an overlay, as
// in many containers, or a network's) is replaced by memory.
func (r *root) findRoom() error {
	probe := newLayers + "/.probe"
	try := func() error {
		defer os.RemoveAll(probe)
		for _, dir := range []string{"lower", "upper", "work", "merged"} {
			if err := os.MkdirAll(filepath.Join(probe, dir), 0o755); err != nil {
				return err
			}
		}
		if err := overlay(probe+"/lower", probe, probe+"/merged"); err != nil {
			return err
		}
		return unix.Unmount(probe+"/merged", unix.MNT_DETACH)
	}
	err := try()
	if err == nil {
		return nil
	}
	if !errors.Is(err, unix.EINVAL) {
		return missingOverlay(err)
	}
	if err := mount("tmpfs", newLayers, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0700"); err != nil {
		return err
	}
	if err := try(); err != nil {
		return missingOverlay(err)
	}
	r.notes = append(r.notes, machines.Note{
		Capability: "persistent_files",
		Reason:     "the state directory's file system can't be beneath an overlay (" + err.Error() + "): what the Machine writes below /usr, /etc and /opt is kept in memory and lost at a stop",
	})
	return nil
}

// overlay mounts dir/upper over lower at target. userxattr is what a user
// namespace may use (trusted.* needs the host's privilege).
func overlay(lower, dir, target string) error {
	escape := strings.NewReplacer(`\`, `\\`, `:`, `\:`, `,`, `\,`)
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s,userxattr",
		escape.Replace(lower), escape.Replace(dir+"/upper"), escape.Replace(dir+"/work"))
	return mount("overlay", target, "overlay", 0, options)
}

// skeleton makes the directories that are the Machine's own, once; what guest
// root does with them later is his affair.
func (r *root) skeleton() error {
	if _, err := r.layers.Lstat("made"); err == nil {
		return nil
	}
	for _, d := range []struct {
		path string
		mode fs.FileMode
	}{
		{"root", 0o700}, {"home", 0o755}, {"srv", 0o755}, {"mnt", 0o755}, {"media", 0o755},
		{"var", 0o755}, {"var/lib", 0o755}, {"var/log", 0o755}, {"var/cache", 0o755},
		{"var/spool", 0o755}, {"var/mail", 0o755}, {"var/local", 0o755}, {"var/opt", 0o755},
		{"var/tmp", 0o777 | fs.ModeSticky},
	} {
		if err := r.directory(d.path); err != nil {
			return err
		}
		if err := r.files.Chmod(d.path, d.mode); err != nil {
			return err
		}
	}
	for name, target := range map[string]string{"var/run": "/run", "var/lock": "/run/lock"} {
		if err := r.files.Symlink(target, name); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return r.layers.WriteFile("made", nil, 0o600)
}

// directory makes sure that every element of name is a real directory, so that
// something can be mounted there: guest root may have left a link.
func (r *root) directory(name string) error {
	at := ""
	for element := range strings.SplitSeq(name, "/") {
		at = path.Join(at, element)
		info, err := r.files.Lstat(at)
		if err == nil && info.IsDir() {
			continue
		}
		if err == nil {
			if err := r.files.Remove(at); err != nil {
				return err
			}
		}
		if err := r.files.Mkdir(at, 0o755); err != nil {
			return err
		}
	}
	return nil
}

func (r *root) tools() error {
	for _, dir := range tools {
		if err := r.show(dir); err != nil {
			return err
		}
	}
	for _, dir := range toolState {
		if err := r.show(dir); err != nil {
			return err
		}
	}
	return nil
}

// show puts the host's name (an absolute path) into the root: a directory by an
// overlay, a link as the same link. What guest root can't reach is left out.
func (r *root) show(name string) error {
	if r.isMasked(name) {
		return nil
	}
	rel := strings.TrimPrefix(name, "/")
	info, err := os.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrPermission):
		return nil
	case err != nil:
		return err
	case info.Mode().Type() == fs.ModeSymlink:
		target, err := os.Readlink(name)
		if err != nil {
			return err
		}
		if have, err := r.files.Readlink(rel); err == nil && have == target {
			return nil
		}
		if err := r.files.RemoveAll(rel); err != nil {
			return err
		}
		return r.files.Symlink(target, rel)
	case info.Mode().IsRegular():
		if _, err := r.files.Lstat(rel); err == nil {
			return nil
		}
		return copyFile(name, info, r.files, rel)
	case !info.IsDir():
		return nil
	}
	if unix.Access(name, unix.R_OK|unix.X_OK) != nil {
		return nil
	}
	if err := r.directory(rel); err != nil {
		return err
	}
	if slices.ContainsFunc(r.mounts, func(point string) bool { return below(point, name) }) {
		return r.split(name)
	}
	l := &layer{root: r, host: name, name: url.PathEscape(rel)}
	if err := l.prepare(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	err = overlay(name, filepath.Join(newLayers, l.name), inside(name))
	if errors.Is(err, unix.EINVAL) && name != "/usr" {
		// A file system that no overlay goes over, such as autofs.
		r.notes = append(r.notes, machines.Note{Capability: "tools:" + name, Reason: err.Error()})
		return nil
	}
	return err
}

// split shows a directory with mounts below it entry by entry: in a user
// namespace those mounts are locked to it, and an overlay over the whole is
// refused.
func (r *root) split(name string) error {
	marker := "split-" + url.PathEscape(strings.TrimPrefix(name, "/"))
	_, err := r.layers.Lstat(marker)
	made := err == nil
	entries, err := os.ReadDir(name)
	if err != nil {
		return err
	}
	for _, e := range entries {
		// Files and links are copied once, and are the guest's from then on.
		if made && !e.IsDir() {
			continue
		}
		if err := r.show(path.Join(name, e.Name())); err != nil {
			return err
		}
	}
	return r.layers.WriteFile(marker, nil, 0o600)
}

// isMasked says whether a host path is not to be seen.
func (r *root) isMasked(name string) bool {
	for _, hidden := range r.Hidden {
		if name == hidden || below(name, hidden) {
			return true
		}
	}
	for _, pattern := range masked {
		if ok, _ := path.Match(pattern, name); ok {
			return true
		}
	}
	return false
}

// A layer is one overlay's directories: layers/NAME/{upper,work}.
type layer struct {
	*root
	host  string // the directory beneath
	name  string
	upper *os.Root
}

// prepare fills the upper directory: once with what guest root is to own, and
// at each boot with whiteouts for what is masked.
func (l *layer) prepare() error {
	for _, dir := range []string{l.name, l.name + "/upper", l.name + "/work"} {
		if err := l.layers.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	var err error
	if l.upper, err = l.layers.OpenRoot(l.name + "/upper"); err != nil {
		return err
	}
	defer l.upper.Close()
	if _, err := l.layers.Lstat(l.name + "/made"); err != nil {
		if err := l.own(); err != nil {
			return err
		}
		if err := l.layers.WriteFile(l.name+"/made", nil, 0o600); err != nil {
			return err
		}
	}
	for _, pattern := range append(slices.Clone(l.Hidden), masked...) {
		if !below(pattern, l.host) {
			continue
		}
		if err := l.mask(pattern); err != nil {
			return fmt.Errorf("mask %s: %w", pattern, err)
		}
	}
	return nil
}

// own makes in the upper directory what owned and ownFiles say.
func (l *layer) own() error {
	info, err := os.Lstat(l.host)
	if err != nil {
		return err
	}
	if err := l.upper.Chmod(".", info.Mode().Perm()|0o700); err != nil {
		return err
	}
	for dir, levels := range owned {
		if dir != l.host && !below(dir, l.host) {
			// A split directory's parts: /etc/ssl of /etc.
			if !below(l.host, dir) || levels < strings.Count(strings.TrimPrefix(l.host, dir), "/") {
				continue
			}
			levels -= strings.Count(strings.TrimPrefix(l.host, dir), "/")
			dir = l.host
		}
		if err := l.ownDir(dir, levels); err != nil {
			return err
		}
	}
	return nil
}

func (l *layer) ownDir(dir string, levels int) error {
	if l.isMasked(dir) {
		return nil
	}
	if err := l.directory(dir); err != nil {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
			return nil
		}
		return err
	}
	if levels == 0 {
		return nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil // closed to guest root
	}
	for _, e := range entries {
		name := path.Join(dir, e.Name())
		if e.IsDir() {
			if err := l.ownDir(name, levels-1); err != nil {
				return err
			}
		}
		if e.Type().IsRegular() && ownFiles[dir] && !l.isMasked(name) {
			info, err := e.Info()
			if err != nil {
				continue
			}
			if err := copyFile(name, info, l.upper, l.relative(name)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (l *layer) relative(name string) string {
	if name == l.host {
		return "."
	}
	return strings.TrimPrefix(name, l.host+"/")
}

// directory makes a host directory, and those above it, in the upper one as
// guest root's own, with the host's permissions.
func (l *layer) directory(name string) error {
	info, err := os.Lstat(name)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return fs.ErrNotExist
	}
	rel := l.relative(name)
	if rel == "." {
		return nil
	}
	if err := l.directory(path.Dir(name)); err != nil {
		return err
	}
	if err := l.upper.Mkdir(rel, 0o755); errors.Is(err, fs.ErrExist) {
		return nil // from an earlier boot, or what guest root put in its place
	} else if err != nil {
		return err
	}
	return l.upper.Chmod(rel, info.Mode().Perm()|0o700)
}

// mask puts a whiteout (overlayfs: a character device 0/0) wherever pattern
// leads. What is not there yet is masked as well, lest it appear later, unless
// its directory is missing.
func (l *layer) mask(pattern string) error {
	names := []string{pattern}
	if strings.ContainsAny(pattern, "*?[") && !slices.Contains(l.Hidden, pattern) {
		names, _ = filepath.Glob(pattern)
	}
	for _, name := range names {
		parent := path.Dir(name)
		// One masked above is enough.
		if l.isMasked(parent) {
			continue
		}
		if err := l.directory(parent); errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
			continue
		} else if err != nil {
			return err
		}
		// Something else than a directory is guest root's doing, and hides
		// the host's directory wholly.
		if info, err := l.upper.Lstat(l.relative(parent)); err != nil || !info.IsDir() {
			continue
		}
		dir, err := l.upper.Open(l.relative(parent))
		if err != nil {
			return err
		}
		err = unix.Mknodat(int(dir.Fd()), path.Base(name), unix.S_IFCHR, 0)
		dir.Close()
		if err != nil && err != unix.EEXIST {
			return err
		}
	}
	return nil
}

// maxOwnFile bounds what is copied of the host's: configuration, not data.
const maxOwnFile = 1 << 20

// copyFile copies a file of the host that guest root may read.
func copyFile(name string, info fs.FileInfo, to *os.Root, rel string) error {
	if info.Size() > maxOwnFile {
		return nil
	}
	from, err := os.OpenFile(name, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil // closed to guest root
	}
	defer from.Close()
	file, err := to.OpenFile(rel, os.O_WRONLY|os.O_CREATE|os.O_EXCL, info.Mode().Perm())
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = io.Copy(file, io.LimitReader(from, maxOwnFile))
	return errors.Join(err, file.Close())
}

func (r *root) proc() error {
	if err := r.directory("proc"); err != nil {
		return err
	}
	err := mount("proc", inside("/proc"), "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	if errors.Is(err, unix.EPERM) {
		return &machines.MissingError{
			What:   "/proc",
			Why:    err.Error() + " (parts of this /proc are masked, as containers do)",
			Remedy: "run the container that vz is in with an unmasked /proc (--security-opt systempaths=unconfined)",
		}
	}
	return err
}

// sys shows the devices of the Machine's own network namespace, read-only, and
// its own cgroup.
func (r *root) sys() error {
	if err := r.directory("sys"); err != nil {
		return err
	}
	flags := uintptr(unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC)
	if err := mount("sysfs", inside("/sys"), "sysfs", flags|unix.MS_RDONLY, ""); err != nil {
		r.notes = append(r.notes, machines.Note{Capability: "sysfs", Reason: err.Error()})
		return nil
	}
	if err := mount("cgroup2", inside("/sys/fs/cgroup"), "cgroup2", flags, ""); err != nil {
		r.notes = append(r.notes, machines.Note{Capability: "cgroup_inside", Reason: err.Error()})
	}
	return nil
}

func (r *root) dev() error {
	if err := r.directory("dev"); err != nil {
		return err
	}
	dev := inside("/dev")
	if err := mount("tmpfs", dev, "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=0755,size=1m"); err != nil {
		return err
	}
	for _, node := range []string{"null", "zero", "full", "random", "urandom", "tty"} {
		if err := os.WriteFile(dev+"/"+node, nil, 0o666); err != nil {
			return err
		}
		if err := bind("/dev/"+node, dev+"/"+node); err != nil {
			return err
		}
	}
	for name, target := range map[string]string{
		"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1",
		"stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx",
	} {
		if err := os.Symlink(target, dev+"/"+name); err != nil {
			return err
		}
	}
	for _, m := range []struct {
		name, kind, data string
	}{
		{"pts", "devpts", "newinstance,ptmxmode=0666,mode=0620"},
		{"shm", "tmpfs", "mode=1777"},
		{"mqueue", "mqueue", ""},
	} {
		if err := os.Mkdir(dev+"/"+m.name, 0o755); err != nil {
			return err
		}
		flags := uintptr(unix.MS_NOSUID | unix.MS_NOEXEC)
		if m.kind != "devpts" {
			flags |= unix.MS_NODEV
		}
		err := mount(m.kind, dev+"/"+m.name, m.kind, flags, m.data)
		if err != nil && m.kind != "mqueue" { // a kernel may lack POSIX queues
			return err
		}
	}
	return nil
}

// run makes what doesn't outlive a boot, and in it the agent's binary.
func (r *root) run() error {
	for name, mode := range map[string]string{"tmp": "1777", "run": "0755"} {
		if err := r.directory(name); err != nil {
			return err
		}
		if err := mount("tmpfs", inside(name), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode="+mode); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(inside("/run/vz"), 0o755); err != nil {
		return err
	}
	if err := os.Mkdir(inside("/run/lock"), 0o755); err != nil {
		return err
	}
	if err := unix.Chmod(inside("/run/lock"), 0o1777); err != nil {
		return err
	}
	// NixOS keeps its tools behind this link.
	if target, err := filepath.EvalSymlinks("/run/current-system"); err == nil && below(target, "/nix") {
		r.nixProfile = os.Symlink(target, inside("/run/current-system")) == nil
	}
	// The descriptor's offset is shared with every other Machine's Init.
	guest := os.NewFile(guestFD, "vz-guest")
	info, err := guest.Stat()
	if err != nil {
		return err
	}
	file, err := os.OpenFile(inside(guestBinary), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(file, io.NewSectionReader(guest, 0, info.Size()))
	return errors.Join(err, file.Close())
}

// etc gives the Machine its own identity, once.
func (r *root) etc() error {
	if _, err := r.layers.Lstat("made-etc"); err == nil {
		return nil
	}
	for name, text := range map[string]string{
		"hostname":   r.Name + "\n",
		"machine-id": machineID(r.MachineID),
		"hosts": "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n" +
			"127.0.1.1 " + r.Name + "\n",
	} {
		name = "etc/" + name
		if err := r.files.RemoveAll(name); err != nil {
			return err
		}
		if err := r.files.WriteFile(name, []byte(text), 0o644); err != nil {
			return err
		}
	}
	return r.layers.WriteFile("made-etc", nil, 0o600)
}
