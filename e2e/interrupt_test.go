//go:build linux

package e2e

import (
	"bufio"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"vz.test/vz/config"
	"vz.test/vz/supervisor/api/vzv1"
)

// never is a process that runs and is never ready.
func never() config.Process {
	return config.Process{Command: []string{"sleep", "1000000"}, Ready: &config.Ready{TCPPort: 7001}}
}

// reaches starts a verb on blue and returns when its progress says that a step
// has STARTED or is DONE.
func (w *world) reaches(verb, step, status string) (wait func() result) {
	w.t.Helper()
	cmd := w.command("vz", verb, "--environment", "blue", "--progress", "json")
	errs, err := cmd.StderrPipe()
	require.NoError(w.t, err)
	require.NoError(w.t, cmd.Start())
	var seen strings.Builder
	scanner := bufio.NewScanner(errs)
	for scanner.Scan() {
		seen.WriteString(scanner.Text() + "\n")
		e := new(vzv1.Event)
		if strings.HasPrefix(scanner.Text(), "{") {
			decode(w.t, scanner.Text(), e)
		}
		if p := e.GetProgress(); p.GetStep() == step && p.GetStatus().String() == "STATUS_"+status {
			w.interrupt = cmd.Process
			return func() result {
				for scanner.Scan() {
					seen.WriteString(scanner.Text() + "\n")
				}
				return result{code: w.wait(cmd, cmd.Wait()), err: seen.String()}
			}
		}
	}
	cmd.Wait()
	require.Failf(w.t, "the step was never reached", "%s %s in\n%s", step, status, seen.String())
	return nil
}

// Ctrl-C during an up ends the up, not what was begun; delete takes that away.
func TestInterruptedUp(t *testing.T) {
	t.Parallel()
	one := host("net")
	one.Processes["never"] = never()
	w := newWorld(t, project(map[string]config.Machine{"one": one, "two": host("net")}))
	wait := w.reaches("up", "machine.ready", "STARTED")
	e := w.status("--environment", "blue")
	assert.Equal(t, vzv1.EnvironmentState_ENVIRONMENT_STATE_RECONCILING, e.GetState())
	assert.Equal(t, "one\n", w.vz("exec", "--environment", "blue", "--machine", "one", "--", "uname", "-n"), "what is up can be used already")
	require.NoError(t, w.interrupt.Signal(os.Interrupt))
	r := wait()
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.err, "cancelled")
	assert.Contains(t, r.err, "vz delete")
	w.eventually("the up is over", func() bool {
		e = w.status("--environment", "blue")
		return e.GetState() == vzv1.EnvironmentState_ENVIRONMENT_STATE_FAILED
	})
	assert.Contains(t, e.GetMessage(), "cancelled")
	assert.Contains(t, w.refused("status"), "binding", "an up that failed binds nothing")

	// The next one goes on from there.
	booted := incarnations(e)
	delete(one.Processes, "never")
	w.define(project(map[string]config.Machine{"one": one, "two": host("net")}))
	w.vz("up", "--environment", "blue")
	requireReady(t, w.status())
	assert.Equal(t, booted["one"], incarnations(w.status())["one"], "what was up already stays up")

	// And delete takes away what an interrupted one began.
	w.vz("delete")
	one.Processes["never"] = never()
	w.define(project(map[string]config.Machine{"one": one, "two": host("net")}))
	wait = w.reaches("up", "machine.boot", "STARTED")
	require.NoError(t, w.interrupt.Signal(os.Interrupt))
	require.Equal(t, 1, wait().code)
	w.observe()
	w.vz("delete", "--environment", "blue")
	require.Empty(t, w.awaitNothing())
}

// A process that fails fails the up, which says step, cause and log.
func TestFailedUp(t *testing.T) {
	t.Parallel()
	one := host("net")
	one.Processes["broken"] = config.Process{Command: []string{"sh", "-c", "exit 3"}, Ready: &config.Ready{TCPPort: 7000}}
	w := newWorld(t, project(map[string]config.Machine{"one": one}))
	r := w.run("vz", "up", "--environment", "blue")
	assert.Equal(t, 1, r.code)
	assert.Empty(t, r.out)
	assert.Contains(t, r.err, "✗ machine.ready one")
	assert.Contains(t, r.err, "process broken of machine one failed: exited with status 3")
	assert.Contains(t, r.err, "next:")
	assert.Contains(t, r.err, "supervisor.log")
	e := w.status("--environment", "blue")
	assert.Equal(t, vzv1.EnvironmentState_ENVIRONMENT_STATE_FAILED, e.GetState())
	assert.Contains(t, e.GetMessage(), "broken")

	// The same up again tries again; here what was wrong lay outside of vz.
	before := incarnations(e)
	mended := echo("mended", 7000)
	mended.Restart = "never"
	mended.Command = append([]string{"sh", "-c", `[ -e /root/mended ] || exit 4; exec "$0" "$@"`}, mended.Command...)
	one.Processes["broken"] = mended
	w.define(project(map[string]config.Machine{"one": one}))
	assert.Contains(t, w.refused("up", "--environment", "blue"), "exited with status 4")
	w.vz("exec", "--environment", "blue", "--", "touch", "/root/mended")
	w.vz("up", "--environment", "blue")
	e = w.status()
	requireReady(t, e)
	assert.Equal(t, before, incarnations(e))

	one.Processes["broken"] = config.Process{Command: []string{"no-such-program"}, Ready: &config.Ready{TCPPort: 7000}}
	w.define(project(map[string]config.Machine{"one": one}))
	assert.Contains(t, w.refused("up"), "no-such-program")
}

// A supervisor that is killed at any step of an up leaves what the next up
// makes whole.
func TestSupervisorKilledAtEveryStep(t *testing.T) {
	t.Parallel()
	one := host("net")
	one.Processes["greeter"] = echo("hello", 7000)
	definition := project(map[string]config.Machine{"one": one, "two": host("net")})
	definition.Paths = []config.Path{path("two-one", "two", "one", 7000)}
	definition.Faults = []config.Fault{{Name: "slow", Path: "two-one", Seed: 1, TTLMillis: 3600_000, Latency: &config.LatencyFault{DelayMillis: 1}}}
	w := newWorld(t, definition)
	for _, step := range []string{"environment.plan", "network", "machine.boot", "machine.configure", "machine.ready", "faults.declare"} {
		for _, status := range []string{"STARTED", "DONE"} {
			w.sub(step+" "+status, func(t *testing.T) {
				wait := w.reaches("up", step, status)
				for _, p := range w.find(process.supervisor) {
					require.NoError(t, syscall.Kill(p.pid, syscall.SIGKILL))
				}
				r := wait()
				if r.code != 0 || !strings.Contains(r.err, `"terminal":true`) { // else it was over by then
					assert.Equal(t, 1, r.code, r.String())
					assert.Contains(t, r.err, "vz:")
				}
				w.eventually("nothing of it runs", func() bool { return len(w.processes()) == 0 })
				for _, m := range w.status("--environment", "blue").GetMachines() {
					assert.Contains(t, []vzv1.Health{vzv1.Health_HEALTH_INACTIVE, vzv1.Health_HEALTH_UNSUPERVISED}, m.GetHealth(), m.GetName())
				}
				w.vz("up", "--environment", "blue")
				requireReady(t, w.status())
				assert.Equal(t, "hello", w.python("two", hear, "one", "7000"))
				w.must("vz-runtime-probe", "receipts", "--verify")
				if status == "STARTED" {
					w.vz("stop")
				} else {
					w.vz("delete")
				}
			})
		}
	}
}

// A stop or a delete whose supervisor is killed is finished by the next one; an
// up after it makes whole what is left, or anew what is not.
func TestSupervisorKilledGoingDown(t *testing.T) {
	t.Parallel()
	w := newWorld(t, project(map[string]config.Machine{"one": host("net"), "two": host("net")}))
	for _, c := range []struct{ verb, step, status, next string }{
		{"stop", "machine.stop", "STARTED", "up"},
		{"stop", "network.close", "DONE", "stop"},
		{"stop", "machine.stop", "DONE", "delete"},
		{"delete", "machine.stop", "STARTED", "up"},
		{"delete", "machine.remove", "STARTED", "delete"},
		{"delete", "machine.remove", "DONE", "up"},
		{"delete", "network.close", "DONE", "stop"},
	} {
		w.sub(c.verb+" "+c.step+" "+c.status+" then "+c.next, func(t *testing.T) {
			w.vz("up", "--environment", "blue")
			before := w.status("--environment", "blue")
			requireReady(t, before)
			w.observe()
			wait := w.reaches(c.verb, c.step, c.status)
			for _, p := range w.find(process.supervisor) {
				if err := syscall.Kill(p.pid, syscall.SIGKILL); err != syscall.ESRCH { // it may have ended
					require.NoError(t, err)
				}
			}
			if r := wait(); c.verb == "delete" && r.code == 0 { // it was over by then
				require.Empty(t, w.awaitNothing())
				return
			}
			w.eventually("nothing of it runs", func() bool { return len(w.processes()) == 0 })
			for _, e := range w.all() {
				for _, m := range e.GetMachines() {
					assert.Contains(t, []vzv1.Health{vzv1.Health_HEALTH_INACTIVE, vzv1.Health_HEALTH_UNSUPERVISED}, m.GetHealth(), m.GetName())
				}
			}
			w.vz(c.next, "--environment", "blue")
			switch c.next {
			case "up":
				after := w.status("--environment", "blue")
				requireReady(t, after)
				if c.verb == "stop" {
					sameIdentity(t, before, after)
				} else {
					assert.NotEqual(t, before.GetEnvironmentId(), after.GetEnvironmentId())
				}
			case "delete":
				require.Empty(t, w.awaitNothing())
			case "stop":
				if c.verb == "delete" {
					assert.Equal(t, vzv1.EnvironmentState_ENVIRONMENT_STATE_DELETING, w.status("--environment", "blue").GetState(), "a delete that has begun stays one")
				}
			}
		})
	}
}
