package launcher

import (
	"fmt"
	"os"
	"slices"

	"github.com/landlock-lsm/go-landlock/landlock"
	ll "github.com/landlock-lsm/go-landlock/landlock/syscall"
	"golang.org/x/sys/unix"
	"kernel.org/pub/linux/libs/security/libcap/cap"

	"vz.test/vz/machines"
)

const (
	mayRead = ll.AccessFSReadFile | ll.AccessFSReadDir
	// Everything below a directory but running programs and device nodes.
	mayWrite = mayRead | ll.AccessFSWriteFile | ll.AccessFSTruncate | ll.AccessFSRefer |
		ll.AccessFSRemoveDir | ll.AccessFSRemoveFile |
		ll.AccessFSMakeDir | ll.AccessFSMakeReg | ll.AccessFSMakeSock | ll.AccessFSMakeFifo | ll.AccessFSMakeSym
)

// systemFiles are what a Go program, a resolver and a certificate verifier
// read.
var systemFiles = []string{
	"/etc/hosts", "/etc/resolv.conf", "/etc/nsswitch.conf", "/etc/services", "/etc/protocols",
	"/etc/localtime", "/etc/passwd", "/etc/group", "/etc/mime.types",
	"/etc/ssl/certs", "/etc/pki/tls/certs", "/etc/pki/ca-trust/extracted", "/etc/ca-certificates",
	"/usr/share/ca-certificates", "/usr/local/share/ca-certificates", "/usr/share/zoneinfo",
	"/run/systemd/resolve", "/run/resolvconf",
	"/proc", "/sys/kernel/mm/transparent_hugepage", "/dev/urandom",
}

// Confine takes from this process, on all its threads and for good, what a
// supervisor does not need once its launcher runs: capabilities, gains by exec
// (no_new_privs), every file but those below stateDir and runtimeDir
// (writable), readable and a short list of the system's, and running any
// program. Sockets of every kind still work, those on paths below the two
// directories.
//
// A directory can only be removed by somebody who may write to the one it lies
// in: a supervisor that is to delete stateDir itself leaves that to its client.
//
// Files are Landlock's part. Where the kernel has none, or too old a one, the
// rest holds and a Note says so: a supervisor run by root then still owns
// root's files.
func Confine(stateDir, runtimeDir string, readable ...string) ([]machines.Note, error) {
	rules := []landlock.Rule{
		landlock.PathAccess(mayWrite, stateDir, runtimeDir),
		landlock.PathAccess(ll.AccessFSReadFile|ll.AccessFSWriteFile, "/dev/null"),
	}
	for _, path := range append(slices.Clone(systemFiles), readable...) {
		info, err := os.Stat(path)
		switch {
		case err != nil: // what isn't there needs no rule
		case info.IsDir():
			rules = append(rules, landlock.PathAccess(mayRead, path).IgnoreIfMissing())
		default: // the kernel refuses a directory's rights on a file
			rules = append(rules, landlock.PathAccess(ll.AccessFSReadFile, path).IgnoreIfMissing())
		}
	}
	if err := landlock.V5.BestEffort().RestrictPaths(rules...); err != nil {
		return nil, fmt.Errorf("confine: landlock: %w", err)
	}
	if err := dropCapabilities(); err != nil {
		return nil, fmt.Errorf("confine: capabilities: %w", err)
	}
	if v, err := ll.LandlockGetABIVersion(); err != nil || v < 3 {
		return []machines.Note{{
			Capability: "confined_files",
			Reason:     fmt.Sprintf("the kernel's Landlock is version %d (CONFIG_SECURITY_LANDLOCK, lsm=landlock); 3 (Linux 6.2) is needed", v),
		}}, nil
	}
	return nil, nil
}

// dropCapabilities empties every set. An ordinary user has none, and can't
// lock the door behind him, which no_new_privs does as well.
func dropCapabilities() error {
	if has, err := cap.GetProc().GetFlag(cap.Permitted, cap.SETPCAP); err == nil && has {
		return cap.ModeNoPriv.Set()
	}
	if err := cap.NewSet().SetProc(); err != nil {
		return err
	}
	return ll.AllThreadsPrctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
}
