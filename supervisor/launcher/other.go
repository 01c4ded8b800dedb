//go:build !linux

package launcher

import (
	"context"
	"errors"
	"os"
	"runtime"

	"vz.test/vz/machines"
)

var oobSize = 0

func filesOf([]byte, int) ([]*os.File, error) { return nil, nil }

// Start needs Linux.
func Start(context.Context, Options) (*Client, error) {
	return nil, &machines.MissingError{
		What:   "namespaces",
		Why:    runtime.GOOS + " has none",
		Remedy: `use isolation "vm" here, or run vz on Linux`,
	}
}

func run([]string) error { return errors.New("needs Linux") }

func initMachine() { os.Exit(1) }

// Confine does what the system offers: here, nothing.
func Confine(stateDir, runtimeDir string, readable ...string) ([]machines.Note, error) {
	return []machines.Note{{Capability: "confined_files", Reason: runtime.GOOS + " has no Landlock"}}, nil
}
