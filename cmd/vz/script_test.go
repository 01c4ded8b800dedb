package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// TestScripts runs testdata/script/*.txtar on the built commands. Each script
// has a state root, a runtime directory and a home of its own; those that bring
// something up need root on Linux, and end with nothing left.
func TestScripts(t *testing.T) {
	bin := t.TempDir()
	build := exec.Command("go", "build", "-trimpath", "-o", bin+"/", ".", "../vz-supervisor", "../vz-guest", "../vz-runtime-probe")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("building the commands: %v\n%s", err, out)
	}
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(env *testscript.Env) error {
			// A socket's path has 104 bytes at most; $WORK may have more.
			dir, err := os.MkdirTemp("/tmp", "vzs-")
			if err != nil {
				return err
			}
			env.Defer(func() { os.RemoveAll(dir) })
			for _, name := range []string{"state", "run", "home"} {
				if err := os.Mkdir(dir+"/"+name, 0o700); err != nil {
					return err
				}
			}
			env.Setenv("XDG_STATE_HOME", dir+"/state")
			env.Setenv("XDG_RUNTIME_DIR", dir+"/run")
			env.Setenv("HOME", dir+"/home")
			env.Setenv("STATE", dir+"/state")
			env.Setenv("GIT_CONFIG_NOSYSTEM", "1")
			env.Setenv("PATH", bin+string(os.PathListSeparator)+os.Getenv("PATH"))
			vars := slices.Clone(env.Vars)
			env.Defer(func() { takeDown(t, bin, dir+"/state", vars) })
			return nil
		},
		Condition: func(condition string) (bool, error) {
			if condition == "root" {
				return os.Geteuid() == 0, nil
			}
			return false, fmt.Errorf("unknown condition %q", condition)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"exits": exits, "untouched": untouched},
	})
}

// takeDown deletes what a script that failed has left up.
func takeDown(t *testing.T, bin, state string, env []string) {
	left, _ := filepath.Glob(state + "/vz/environments/env_*")
	for _, dir := range left {
		cmd := exec.Command(bin+"/vz", "delete", "--environment", filepath.Base(dir))
		cmd.Env = env
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("vz delete: %v\n%s", err, out)
		}
	}
}

// exits runs a command that has to end with a status:
//
//	exits STATUS COMMAND...
func exits(ts *testscript.TestScript, not bool, args []string) {
	if not || len(args) < 2 {
		ts.Fatalf("usage: exits STATUS COMMAND...")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	status := 0
	if err := ts.Exec(args[1], args[2:]...); err != nil {
		var exit *exec.ExitError
		if !errors.As(err, &exit) {
			ts.Fatalf("%v", err)
		}
		status = exit.ExitCode()
	}
	if status != want {
		ts.Fatalf("%v: exit status %d, want %d", args[1:], status, want)
	}
}

// untouched says that no state was made, or that all of it is gone.
func untouched(ts *testscript.TestScript, not bool, _ []string) {
	found := false
	for _, root := range []string{ts.Getenv("XDG_STATE_HOME"), ts.Getenv("XDG_RUNTIME_DIR")} {
		filepath.WalkDir(root, func(path string, _ os.DirEntry, err error) error {
			if err == nil && path != root && path != filepath.Join(root, "vz") {
				if !not {
					ts.Logf("%s is there", path)
				}
				found = true
			}
			return nil
		})
	}
	if found != not {
		ts.Fatalf("the state root is touched: %v", found)
	}
}
