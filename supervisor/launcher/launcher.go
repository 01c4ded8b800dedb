// Package launcher is the privileged child of a supervisor, and the client by
// which the supervisor asks it: to create, kill, clean and remove Machines of
// one Environment, and nothing else.
//
//	supervisor ── SOCK_SEQPACKET, JSON, descriptors by SCM_RIGHTS ──► launcher
//	  Client                                                   namespace.Host
//
// [Start] re-executes the supervisor's own binary with "launcher" as its first
// argument; main of that binary calls [Dispatch] before anything else. The
// launcher lives in a pid and a mount namespace of its own, as PID 1: when it
// ends, by whatever signal, the kernel ends every Machine with it, and it ends
// when the supervisor's thread that started it does (parent-death signal) or
// the socket closes. So a dead supervisor leaves no process, mount, namespace
// or TAP; what remains are files and empty cgroups, which Clean and Remove find
// by the IDs.
//
// Started by root it is root. Started by an ordinary user it lives in a user
// namespace too, is root in there, and runs the same code. newuidmap and
// newgidmap map the user's subordinate range, when there is one.
//
// The supervisor parses what guests send and may be taken over. Therefore all
// that the launcher works with is fixed when it starts (Environment, state
// directory, agent's binary), and every request is held to that: IDs have their
// form, paths lie in the state directory and are walked without leaving it,
// sizes are bounded, unknown keys refused. A message that breaks the protocol
// ends the launcher.
//
// [Confine] takes from the supervisor what it does not need once its launcher
// runs.
//
// It does not supervise: what to run and when to run it again is the
// supervisor's business.
package launcher

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"vz.test/vz/machines/namespace"
)

// Arg is the first argument of a re-executed binary that is to be a launcher.
const Arg = "launcher"

// Options say for what a launcher is started. They can't be changed later.
type Options struct {
	EnvironmentID string
	// StateDir is the Environment's directory, absolute, existing, owned by
	// the caller. Machines' Dirs lie below it.
	StateDir string
	// Agent is the path of the vz-guest binary.
	Agent string
	// Hidden are host paths that no Machine may see, besides StateDir and the
	// caller's home.
	Hidden []string
	// Log takes what the launcher has to say; nil discards it.
	Log *os.File
}

func (o Options) check() error {
	if !environmentID.MatchString(o.EnvironmentID) {
		return fmt.Errorf("launcher: %q is no Environment ID", o.EnvironmentID)
	}
	for _, path := range append([]string{o.StateDir, o.Agent}, o.Hidden...) {
		if !filepath.IsAbs(path) || filepath.Clean(path) != path {
			return fmt.Errorf("launcher: %q is no clean absolute path", path)
		}
	}
	return nil
}

// ErrGone says that the launcher has ended, and all Machines with it.
var ErrGone = errors.New("the launcher is gone")

// Dispatch runs what a re-executed binary is asked to be by args (without the
// program's name): a launcher, or a Machine's first process. It returns false
// at once when it is neither; else it returns or exits once that is over.
func Dispatch(args []string) bool {
	if len(args) == 0 {
		return false
	}
	switch args[0] {
	case Arg:
		if err := run(args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, "launcher:", err)
			os.Exit(1)
		}
	case namespace.InitArg:
		initMachine()
	default:
		return false
	}
	return true
}
