//go:build !unix

package registry

import (
	"errors"
	"io/fs"
	"os"
)

// modesCount is false: access lists say who may enter, and the profile's
// directories have those of their user.
const modesCount = false

func ownedBy(fs.FileInfo, int) bool { return true }

var errBusy = errors.New("locked")

type lockMode int

const (
	lockShared lockMode = iota
	lockExclusive
)

// lockFile can't be had here yet; Environments live on Linux and macOS hosts.
func lockFile(*os.File, lockMode, bool) error { return errors.ErrUnsupported }
