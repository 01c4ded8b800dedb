//go:build unix

package registry

import (
	"errors"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// modesCount says whether a file's mode keeps other users out.
const modesCount = true

// ownedBy says whether a file belongs to a user.
func ownedBy(info fs.FileInfo, uid int) bool {
	stat, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(stat.Uid) == uid
}

// errBusy says that the lock is taken.
var errBusy = errors.New("locked")

type lockMode int

const (
	lockShared    lockMode = unix.LOCK_SH
	lockExclusive lockMode = unix.LOCK_EX
)

// lockFile takes an flock(2) on an open file. Without wait it returns errBusy
// when it can't be had. The lock goes with the last descriptor of this open
// file; Go opens files so that programs that are started do not inherit them.
func lockFile(f *os.File, mode lockMode, wait bool) error {
	how := int(mode)
	if !wait {
		how |= unix.LOCK_NB
	}
	for {
		err := unix.Flock(int(f.Fd()), how)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EWOULDBLOCK):
			return errBusy
		default:
			return err
		}
	}
}
