package namespace

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"vz.test/vz/machines"
)

// guestBinary is where the agent's binary lies inside. It is a copy: a bound
// file of an ordinary user could be written to by his own guest root.
const guestBinary = "/run/vz/vz-guest"

// Init is the body of the re-executed child in a Machine's new namespaces. It
// waits for its order, builds the root, leaves the host's and becomes the
// agent. It does not return.
func Init() {
	// The cgroup namespace, the session keyring and the bounding set belong to
	// a thread; exec keeps those of the thread that calls it.
	runtime.LockOSThread()
	unix.Umask(0o022)
	control := os.NewFile(controlFD, "control")
	if err := become(control); err != nil {
		json.NewEncoder(control).Encode(failure(err))
	}
	os.Exit(1)
}

func become(control *os.File) error {
	// Everything but the agent's channel ends with exec; the control socket's
	// end tells the launcher that exec succeeded.
	if err := unix.CloseRange(controlFD, ^uint(0)>>1, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return &machines.MissingError{What: "close_range", Why: err.Error(), Remedy: "use Linux 5.11 or later"}
	}
	// No parent-death signal: it would come when the thread that cloned us
	// ends. The launcher is PID 1 of the pid namespace around ours; when it
	// dies, the kernel ends us with it.
	var o order
	if err := json.NewDecoder(control).Decode(&o); err != nil {
		os.Exit(1) // the launcher is gone; there is nobody to tell
	}
	// Only now is this process in its own cgroup.
	notes := []machines.Note{}
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return step("cgroup namespace", err)
	}
	unix.KeyctlJoinSessionKeyring("") // not the launcher's; without keyrings there is nothing to leave
	if err := unix.Sethostname([]byte(o.Name)); err != nil {
		return step("host name", err)
	}

	r := &root{order: o}
	if err := r.build(); err != nil {
		return err
	}
	notes = append(notes, r.notes...)
	if err := enter(newRoot); err != nil {
		return err
	}
	if err := stdio(); err != nil {
		return step("standard input", err)
	}
	if o.Hardened {
		if err := harden(); err != nil {
			return step("harden", err)
		}
	}
	if err := json.NewEncoder(control).Encode(word{Notes: notes}); err != nil {
		return err
	}
	environment := []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=/root",
		"USER=root",
		"LANG=C.UTF-8",
		"container=vz",
	}
	if r.nixProfile {
		environment[0] += ":/run/current-system/sw/bin"
	}
	err := syscall.Exec(guestBinary, []string{"vz-guest", "agent", "--fd", fmt.Sprint(agentFD)}, environment)
	return step("run "+guestBinary, err)
}

func step(what string, err error) error { return fmt.Errorf("%s: %w", what, err) }

// enter makes dir the root and lets go of the old one, with all its mounts.
func enter(dir string) error {
	if err := unix.Chdir(dir); err != nil {
		return step("chdir", err)
	}
	// pivot_root(2), "pivot_root(".", ".")": the old root lands on top of the
	// new one and is unmounted from there.
	if err := unix.PivotRoot(".", "."); err != nil {
		return step("pivot_root", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return step("unmount the old root", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return step("chdir /", err)
	}
	return nil
}

// stdio points standard input at the Machine's own /dev/null; the one inherited
// lies on a mount of the host.
func stdio() error {
	fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return unix.Dup3(fd, 0, 0)
}

// hardenedDrops are taken from a hardened Machine's bounding set: they open
// parts of the kernel that its agent does not need. CAP_SYS_RESOURCE goes so
// that the limit on user namespaces can't be raised again.
var hardenedDrops = []uintptr{
	unix.CAP_SYS_RESOURCE, unix.CAP_SYS_MODULE, unix.CAP_SYS_RAWIO, unix.CAP_SYS_BOOT,
	unix.CAP_SYS_TIME, unix.CAP_SYS_PTRACE, unix.CAP_SYS_PACCT, unix.CAP_SYSLOG,
	unix.CAP_MKNOD, unix.CAP_LINUX_IMMUTABLE, unix.CAP_MAC_ADMIN, unix.CAP_MAC_OVERRIDE,
	unix.CAP_AUDIT_CONTROL, unix.CAP_AUDIT_READ, unix.CAP_AUDIT_WRITE, unix.CAP_WAKE_ALARM,
	unix.CAP_BLOCK_SUSPEND, unix.CAP_PERFMON, unix.CAP_BPF, unix.CAP_CHECKPOINT_RESTORE,
}

func harden() error {
	// The limit is this user namespace's own.
	if err := os.WriteFile("/proc/sys/user/max_user_namespaces", []byte("0"), 0); err != nil {
		return err
	}
	for _, c := range hardenedDrops {
		// EINVAL: an older kernel that doesn't have it.
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil && err != unix.EINVAL {
			return err
		}
	}
	return unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
}

// machineID is a Machine's /etc/machine-id, machine-id(5): always the same for
// the same Machine, and not to be guessed from the outside of another.
func machineID(id string) string {
	sum := sha256.Sum256([]byte("vz machine-id " + id))
	return hex.EncodeToString(sum[:16]) + "\n"
}

// mount is mount(2) with what was mounted where in its error.
func mount(source, target, kind string, flags uintptr, data string) error {
	if err := unix.Mount(source, target, kind, flags, data); err != nil {
		return fmt.Errorf("mount %s on %s: %w", kind, strings.TrimPrefix(target, newRoot), err)
	}
	return nil
}

// bind shows source at target; both exist.
func bind(source, target string) error {
	if err := unix.Mount(source, target, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s: %w", source, err)
	}
	return nil
}

// mountPoints lists the mount points of this mount namespace.
func mountPoints() ([]string, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var points []string
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) > 4 {
			points = append(points, unescape(fields[4]))
		}
	}
	return points, nil
}

func below(path, dir string) bool {
	return strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}

// missingOverlay explains why the kernel did not mount an overlay.
func missingOverlay(err error) error {
	missing := &machines.MissingError{What: "overlayfs in a user namespace", Why: err.Error()}
	switch {
	case errors.Is(err, unix.EPERM):
		missing.Remedy = "use Linux 5.11 or later, and let AppArmor or SELinux allow mounts in user namespaces"
	case errors.Is(err, unix.ENODEV):
		missing.Remedy = "as root: modprobe overlay"
	default:
		return err
	}
	return missing
}

// inside is where path, as the Machine will know it, is now.
func inside(path string) string { return filepath.Join(newRoot, path) }
