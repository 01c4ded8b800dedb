//go:build linux

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"vz.test/vz/config"
	"vz.test/vz/supervisor/api/vzv1"
)

// bin is the directory of the commands under test.
var bin string

// patience bounds what would otherwise hang for ever. It measures nothing.
const patience = 2 * time.Minute

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(testMain(m))
}

func testMain(m *testing.M) int {
	var err error
	if bin, err = os.MkdirTemp("/tmp", "vz-bin-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(bin)
	commands := [][]string{{"./cmd/vz", "./cmd/vz-supervisor", "./cmd/vz-guest", "./cmd/vz-runtime-probe"}}
	if os.Getenv("VZ_RACE") != "" {
		commands = append(commands, []string{"-race", "./cmd/vz", "./cmd/vz-supervisor"})
	}
	for _, args := range commands {
		build := exec.Command("go", append([]string{"build", "-trimpath", "-o", bin}, args...)...)
		build.Dir = ".."
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if args[0] == "-race" {
			build.Env = append(build.Env, "CGO_ENABLED=1")
		}
		if out, err := build.CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "building the commands: %v\n%s", err, out)
			return 1
		}
	}
	// Another user runs them too, whatever this one's umask is.
	built, _ := filepath.Glob(bin + "/*")
	for _, path := range append(built, bin) {
		os.Chmod(path, 0o755)
	}
	hostTUNs = tunLinks()
	return m.Run()
}

// A world is one user's vz on this machine: a state root, a runtime directory
// and a worktree.
type world struct {
	t       *testing.T
	dir     string   // all of it; the base name occurs nowhere else
	project string   // the worktree in which commands run
	wrap    []string // what every command is started by, to be somebody else

	interrupt *os.Process // the up that reaches started

	environments map[string]bool // IDs that were seen
	spaces       map[string]bool // network namespaces that were seen
	observed     float64         // when, in seconds since this machine booted
}

// newWorld makes a world for the user that runs the tests, with definition in
// its worktree. Its Environments end with the test.
func newWorld(t *testing.T, definition *config.Definition) *world {
	t.Helper()
	return newWorldOf(t, 0, definition)
}

func newWorldOf(t *testing.T, uid int, definition *config.Definition) *world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: Machines are made by root here, and their traces are looked for in every process")
	}
	w := &world{t: t, environments: map[string]bool{}, spaces: map[string]bool{}}
	w.dir = fmt.Sprintf("/tmp/vzw-%08x", rand.Uint32())
	w.project = w.dir + "/project"
	for _, dir := range []string{w.dir, w.state(), w.runtime(), w.dir + "/home", w.project} {
		require.NoError(t, os.Mkdir(dir, 0o700))
		require.NoError(t, os.Chown(dir, uid, uid))
	}
	t.Cleanup(func() { os.RemoveAll(w.dir) })
	if uid != 0 {
		w.becomes(uid)
	}
	w.git("init", "-q", "-b", "main")
	if definition != nil {
		w.define(definition)
	}
	t.Cleanup(w.end)
	return w
}

// sub runs a part of the test, which fails by itself.
func (w *world) sub(name string, part func(t *testing.T)) {
	w.t.Run(name, func(t *testing.T) {
		whole := w.t
		w.t = t
		defer func() { w.t = whole }()
		part(t)
	})
}

func (w *world) state() string   { return w.dir + "/state" }
func (w *world) runtime() string { return w.dir + "/run" }

// definePath is the definition of the worktree.
func (w *world) definePath() string { return w.project + "/" + config.FileName }

// define writes the worktree's definition.
func (w *world) define(definition *config.Definition) {
	w.t.Helper()
	text, err := definition.JSON()
	require.NoError(w.t, err)
	w.write(w.definePath(), string(text))
}

func (w *world) write(path, text string) {
	w.t.Helper()
	require.NoError(w.t, os.WriteFile(path, []byte(text), 0o644))
}

func (w *world) read(path string) string {
	w.t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(w.t, err)
	return string(text)
}

// becomes makes every command run as an ordinary user, in a mount namespace in
// which /dev/net/tun is open to all, as distributions have it.
func (w *world) becomes(uid int) {
	w.t.Helper()
	node := w.dir + "/tun"
	require.NoError(w.t, syscall.Mknod(node, syscall.S_IFCHR|0o666, 10<<8|200))
	require.NoError(w.t, os.Chmod(node, 0o666))
	id := fmt.Sprint(uid)
	w.wrap = []string{"unshare", "--mount", "--propagation", "private", "sh", "-c",
		`mount --bind "$0" /dev/net/tun && exec setpriv --reuid ` + id + ` --regid ` + id + ` --clear-groups -- "$@"`, node}
}

// environ is what commands find: nothing of the tests' own environment.
func (w *world) environ(extra ...string) []string {
	return append([]string{
		"PATH=" + bin + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=" + w.dir + "/home", "XDG_STATE_HOME=" + w.state(), "XDG_RUNTIME_DIR=" + w.runtime(),
		"LANG=C.UTF-8", "TERM=xterm", "GIT_CONFIG_NOSYSTEM=1", "GIT_TERMINAL_PROMPT=0",
	}, extra...)
}

// command is a command in the worktree, not yet started. It is killed when it
// hangs.
func (w *world) command(name string, args ...string) *exec.Cmd {
	argv := append(slices.Clone(w.wrap), append([]string{name}, args...)...)
	if path := filepath.Join(bin, argv[0]); len(w.wrap) == 0 {
		if _, err := os.Stat(path); err == nil {
			argv[0] = path
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	w.t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = w.project
	cmd.Env = w.environ()
	// A supervisor that kept its starter's output open would be found by this.
	cmd.WaitDelay = 10 * time.Second
	return cmd
}

// A result is what became of a command.
type result struct {
	out, err string
	code     int // -1: ended by a signal
}

func (r result) String() string {
	return fmt.Sprintf("exit status %d\nstdout: %s\nstderr: %s", r.code, r.out, r.err)
}

// finish runs a command to its end.
func (w *world) finish(cmd *exec.Cmd) result {
	w.t.Helper()
	var out, errs bytes.Buffer
	if cmd.Stdout == nil {
		cmd.Stdout = &out
	}
	if cmd.Stderr == nil {
		cmd.Stderr = &errs
	}
	return result{code: w.wait(cmd, cmd.Run()), out: out.String(), err: errs.String()}
}

// wait says with which status a command ended, given what Run or Wait said.
func (w *world) wait(cmd *exec.Cmd, err error) int {
	w.t.Helper()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		w.t.Errorf("%s: %v", strings.Join(cmd.Args, " "), err)
		return -2
	}
	return cmd.ProcessState.ExitCode()
}

// run runs a command of the world.
func (w *world) run(name string, args ...string) result {
	w.t.Helper()
	return w.finish(w.command(name, args...))
}

// must runs a command that has to succeed and returns what it printed.
func (w *world) must(name string, args ...string) string {
	w.t.Helper()
	r := w.run(name, args...)
	require.Zerof(w.t, r.code, "%s %s: %s", name, strings.Join(args, " "), r)
	return r.out
}

func (w *world) git(args ...string) string {
	w.t.Helper()
	return w.must("git", append([]string{"-c", "user.name=vz", "-c", "user.email=vz@vz.test"}, args...)...)
}

// vz runs vz, which has to succeed.
func (w *world) vz(args ...string) string {
	w.t.Helper()
	return w.must("vz", args...)
}

// refused runs vz, which has to fail with status 1, and returns what it said.
func (w *world) refused(args ...string) string {
	w.t.Helper()
	r := w.run("vz", args...)
	require.Equalf(w.t, 1, r.code, "vz %s: %s", strings.Join(args, " "), r)
	require.Emptyf(w.t, r.out, "vz %s", strings.Join(args, " "))
	return r.err
}

// exec runs a command in a Machine, which has to succeed.
func (w *world) exec(machine string, argv ...string) string {
	w.t.Helper()
	return w.vz(append([]string{"exec", "--machine", machine, "--"}, argv...)...)
}

// tryExec runs a command in a Machine.
func (w *world) tryExec(machine string, argv ...string) result {
	w.t.Helper()
	return w.run("vz", append([]string{"exec", "--machine", machine, "--"}, argv...)...)
}

// python runs a program in a Machine, which has to succeed.
func (w *world) python(machine, program string, args ...string) string {
	w.t.Helper()
	return strings.TrimSpace(w.exec(machine, append([]string{"python3", "-c", program}, args...)...))
}

// status is the selected Environment as vz status tells it.
func (w *world) status(selection ...string) *vzv1.Environment {
	w.t.Helper()
	e := new(vzv1.Environment)
	decode(w.t, w.vz(append([]string{"status", "--json"}, selection...)...), e)
	w.environments[e.GetEnvironmentId()] = true
	return e
}

// all is every Environment of the world.
func (w *world) all() []*vzv1.Environment {
	w.t.Helper()
	var list struct{ Environments []json.RawMessage }
	require.NoError(w.t, json.Unmarshal([]byte(w.vz("status", "--all", "--json")), &list))
	var all []*vzv1.Environment
	for _, text := range list.Environments {
		e := new(vzv1.Environment)
		decode(w.t, string(text), e)
		w.environments[e.GetEnvironmentId()] = true
		all = append(all, e)
	}
	return all
}

// probe runs vz-runtime-probe, which has to succeed, and returns its lines.
func probe[T any, M interface {
	*T
	proto.Message
}](w *world, args ...string) []M {
	w.t.Helper()
	var all []M
	for line := range strings.Lines(w.must("vz-runtime-probe", args...)) {
		m := M(new(T))
		decode(w.t, line, m)
		all = append(all, m)
	}
	return all
}

func decode(t *testing.T, text string, into proto.Message) {
	t.Helper()
	require.NoError(t, protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal([]byte(text), into), text)
}

// machine finds a Machine of an Environment by name.
func machine(t *testing.T, e *vzv1.Environment, name string) *vzv1.Machine {
	t.Helper()
	for _, m := range e.GetMachines() {
		if m.GetName() == name {
			return m
		}
	}
	require.Failf(t, "no such Machine", "%s in %v", name, e)
	return nil
}

// address is where a Machine is on a network.
func address(t *testing.T, e *vzv1.Environment, name, network string) string {
	t.Helper()
	for _, a := range machine(t, e, name).GetAttachments() {
		if a.GetNetwork() == network {
			return a.GetAddress()
		}
	}
	require.Failf(t, "not attached", "%s to %s", name, network)
	return ""
}

// incarnations are those of an Environment's Machines, by name.
func incarnations(e *vzv1.Environment) map[string]string {
	all := map[string]string{}
	for _, m := range e.GetMachines() {
		all[m.GetName()] = m.GetIncarnation()
	}
	return all
}

// requireReady says that an Environment and all its Machines are up and
// supervised.
func requireReady(t *testing.T, e *vzv1.Environment) {
	t.Helper()
	require.Equal(t, vzv1.EnvironmentState_ENVIRONMENT_STATE_READY, e.GetState(), e.GetMessage())
	for _, m := range e.GetMachines() {
		require.Equal(t, vzv1.MachineState_MACHINE_STATE_READY, m.GetState(), m.GetName()+": "+m.GetMessage())
		require.Equal(t, vzv1.Health_HEALTH_SUPERVISED, m.GetHealth(), m.GetName()+": "+m.GetHealthReason())
	}
}

// eventually waits until ok, which the world is on its way to.
func (w *world) eventually(what string, ok func() bool) {
	w.t.Helper()
	for end := time.Now().Add(patience / 4); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if ok() {
			return
		}
	}
	require.Fail(w.t, "never happened", what)
}

// end deletes what there is and looks for what is left.
func (w *world) end() {
	logs := w.logs()
	w.sound()
	failed := w.t.Failed()
	w.observe()
	w.wrapUp()
	left := w.awaitNothing()
	if len(left) > 0 {
		assert.Emptyf(w.t, left, "after delete these are left")
		for _, p := range w.processes() { // what is to run next needs a clean machine
			syscall.Kill(p.pid, syscall.SIGKILL)
		}
	}
	if failed || w.t.Failed() {
		w.t.Log(logs)
	}
}

func (w *world) wrapUp() {
	r := w.run("vz", "status", "--all", "--json")
	var list struct {
		Environments []struct {
			ID string `json:"environment_id"`
		}
	}
	if !assert.Zero(w.t, r.code, r.String()) || !assert.NoError(w.t, json.Unmarshal([]byte(r.out), &list)) {
		return
	}
	for _, e := range list.Environments {
		w.environments[e.ID] = true
		r := w.run("vz", "delete", "--environment", e.ID)
		assert.Zero(w.t, r.code, "vz delete: "+r.String())
	}
}

// sound says that no supervisor has panicked or raced.
func (w *world) sound() {
	w.t.Helper()
	paths, _ := filepath.Glob(w.state() + "/vz/environments/*/supervisor.log")
	for _, path := range paths {
		text, _ := os.ReadFile(path)
		for _, bad := range []string{"DATA RACE", "panic: ", "fatal error: "} {
			if at := bytes.Index(text, []byte(bad)); at >= 0 {
				w.t.Errorf("%s: %s", path, text[at:min(len(text), at+8<<10)])
			}
		}
	}
}

// logs are what the world's supervisors wrote.
func (w *world) logs() string {
	paths, _ := filepath.Glob(w.state() + "/vz/environments/*/supervisor.log")
	var b strings.Builder
	for _, path := range paths {
		text, _ := os.ReadFile(path)
		const most = 8 << 10
		fmt.Fprintf(&b, "--- %s\n%s\n", path, text[max(0, len(text)-most):])
	}
	return b.String()
}
