//go:build !linux

package namespace

import (
	"os"
	"runtime"

	"vz.test/vz/machines"
	"vz.test/vz/netstack/link"
)

// errNotHere is what this package says on hosts other than Linux.
var errNotHere = &machines.MissingError{
	What:   "namespaces",
	Why:    runtime.GOOS + " has none",
	Remedy: `use isolation "vm" here, or run vz on Linux`,
}

func openPort(*os.File, int) (link.Port, error) { return nil, errNotHere }
