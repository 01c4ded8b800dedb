//go:build linux

package e2e

import (
	"encoding/json"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"vz.test/vz/config"
	"vz.test/vz/supervisor/api/vzv1"
)

// health says that every Machine's is so, and returns the reasons.
func requireHealth(t *testing.T, e *vzv1.Environment, want vzv1.Health) (reasons []string) {
	t.Helper()
	require.NotEmpty(t, e.GetMachines())
	for _, m := range e.GetMachines() {
		require.Equal(t, want, m.GetHealth(), "%s: %s", m.GetName(), m.GetHealthReason())
		reasons = append(reasons, m.GetHealthReason())
	}
	return reasons
}

// sole returns the one process that is so.
func (w *world) one(what string, so func(process) bool) process {
	w.t.Helper()
	var found []process
	w.eventually("one "+what, func() bool {
		found = w.find(so)
		return len(found) == 1
	})
	return found[0]
}

// recordPath is the record of the only Environment.
func (w *world) recordPath(e *vzv1.Environment) string {
	return w.state() + "/vz/environments/" + e.GetEnvironmentId() + "/record.json"
}

// Every health value is reached by really killing, stopping or spoiling
// something, and every one is healed again.
func TestHealth(t *testing.T) {
	t.Parallel()
	w := newWorld(t, project(map[string]config.Machine{"a": host("net"), "b": host("net")}))
	w.vz("up", "--environment", "blue")
	e := w.status()

	w.sub("supervised: the supervisor holds the sessions that it registered", func(t *testing.T) {
		requireHealth(t, e, vzv1.Health_HEALTH_SUPERVISED)
		assert.NotNil(t, e.GetSupervisor())
	})

	w.sub("unobservable: a supervisor that holds its Environment and does not answer", func(t *testing.T) {
		supervisor := w.one("supervisor", process.supervisor)
		require.NoError(t, syscall.Kill(supervisor.pid, syscall.SIGSTOP))
		defer syscall.Kill(supervisor.pid, syscall.SIGCONT)
		for _, reason := range requireHealth(t, w.status(), vzv1.Health_HEALTH_UNOBSERVABLE) {
			assert.Contains(t, reason, "does not answer")
		}
		r := w.run("vz-runtime-probe", "--once")
		assert.Equal(t, 1, r.code)
		assert.Contains(t, r.err, "does not answer")
		require.NoError(t, syscall.Kill(supervisor.pid, syscall.SIGCONT))
		requireReady(t, w.status())
	})

	w.sub("unobservable: a supervisor that can't read its own registry", func(t *testing.T) {
		path := w.recordPath(e)
		good, previous := w.read(path), w.read(path+".prev")
		w.write(path, "{")
		w.write(path+".prev", "{")
		answer := new(vzv1.Environment)
		decode(t, w.must("curl", "-sS", "--fail", "--unix-socket", e.GetSupervisor().GetSocket(),
			"-H", "Content-Type: application/json", "-d", "{}", "http://vz/vz.v1.EnvironmentService/Get"), answer)
		for _, reason := range requireHealth(t, answer, vzv1.Health_HEALTH_UNOBSERVABLE) {
			assert.Contains(t, reason, "damaged")
		}
		requireHealth(t, w.status(), vzv1.Health_HEALTH_UNOBSERVABLE) // the command line asks it too
		w.write(path, good)
		w.write(path+".prev", previous)
		requireReady(t, w.status())
	})

	w.sub("diverged: the record and the session name different incarnations", func(t *testing.T) {
		path := w.recordPath(e)
		good := w.read(path)
		a := machine(t, e, "a").GetIncarnation()
		w.write(path, strings.ReplaceAll(good, a, "inc_01kbn3k8v7q2w5x9y4z6c1d0aa"))
		now := w.status()
		assert.Equal(t, vzv1.Health_HEALTH_DIVERGED, machine(t, now, "a").GetHealth())
		assert.Contains(t, machine(t, now, "a").GetHealthReason(), a)
		assert.Equal(t, vzv1.Health_HEALTH_SUPERVISED, machine(t, now, "b").GetHealth())
		assert.Contains(t, w.vz("status"), "diverged")
		w.vz("up")
		requireReady(t, w.status())
	})

	w.sub("inactive: a Machine that died is not up, and up boots it anew", func(t *testing.T) {
		before := incarnations(w.status())
		b := machine(t, e, "b").GetMachineId()
		agent := w.one("agent of b", func(p process) bool { return p.agent() && p.machine == b })
		require.NoError(t, syscall.Kill(agent.pid, syscall.SIGKILL))
		var now *vzv1.Environment
		w.eventually("b has failed", func() bool {
			now = w.status()
			return machine(t, now, "b").GetState() == vzv1.MachineState_MACHINE_STATE_FAILED
		})
		assert.Equal(t, vzv1.Health_HEALTH_INACTIVE, machine(t, now, "b").GetHealth())
		assert.Contains(t, machine(t, now, "b").GetMessage(), "killed")
		assert.Equal(t, vzv1.Health_HEALTH_SUPERVISED, machine(t, now, "a").GetHealth())
		assert.Equal(t, vzv1.EnvironmentState_ENVIRONMENT_STATE_DEGRADED, now.GetState())
		assert.Contains(t, now.GetMessage(), "b")

		w.vz("up")
		now = w.status()
		requireReady(t, now)
		assert.Equal(t, before["a"], machine(t, now, "a").GetIncarnation())
		assert.NotEqual(t, before["b"], machine(t, now, "b").GetIncarnation())
	})

	w.sub("unsupervised: the supervisor was killed, and its Machines went with it", func(t *testing.T) {
		before := incarnations(w.status())
		require.NoError(t, syscall.Kill(w.one("supervisor", process.supervisor).pid, syscall.SIGKILL))
		w.eventually("nothing of it runs", func() bool { return len(w.processes()) == 0 })
		now := w.status()
		requireHealth(t, now, vzv1.Health_HEALTH_UNSUPERVISED)
		assert.Nil(t, now.GetSupervisor())
		assert.Contains(t, now.GetMessage(), "vz up")
		assert.Equal(t, before, incarnations(now), "the record is the last that was true")
		assert.Contains(t, w.vz("status"), "unsupervised")

		w.vz("up")
		now = w.status()
		requireReady(t, now)
		for name, incarnation := range incarnations(now) {
			assert.NotEqual(t, before[name], incarnation, name)
		}
		sameIdentity(t, e, now)
	})

	w.sub("the launcher was killed: every Machine ends, the supervisor says so, up heals", func(t *testing.T) {
		require.NoError(t, syscall.Kill(w.one("launcher", process.launcher).pid, syscall.SIGKILL))
		w.eventually("nothing of it runs", func() bool { return len(w.processes()) == 0 })
		now := w.status()
		requireHealth(t, now, vzv1.Health_HEALTH_INACTIVE)
		assert.Equal(t, vzv1.EnvironmentState_ENVIRONMENT_STATE_FAILED, now.GetState())
		w.vz("up")
		requireReady(t, w.status())
	})

	w.sub("inactive: after a stop nothing live is expected", func(t *testing.T) {
		w.vz("stop")
		requireHealth(t, w.status(), vzv1.Health_HEALTH_INACTIVE)
	})

	w.sub("a damaged record is read from its previous copy, with a warning", func(t *testing.T) {
		path := w.recordPath(e)
		w.write(path, w.read(path)[:100])
		r := w.run("vz", "status", "--json")
		require.Zero(t, r.code, r.String())
		assert.Contains(t, r.err, "warning: used the previous copy of "+path)
		now := new(vzv1.Environment)
		decode(t, r.out, now)
		sameIdentity(t, e, now)
		w.vz("up")
		r = w.run("vz", "status", "--json")
		assert.Empty(t, r.err, "up has written a good one")
		now = new(vzv1.Environment)
		decode(t, r.out, now)
		requireReady(t, now)
		sameIdentity(t, e, now)
	})

	w.sub("a newer version's record is neither read nor replaced", func(t *testing.T) {
		w.vz("stop")
		path := w.recordPath(e)
		good := w.read(path)
		var record map[string]any
		require.NoError(t, json.Unmarshal([]byte(good), &record))
		record["version"] = 1000
		text, err := json.Marshal(record)
		require.NoError(t, err)
		w.write(path, string(text))
		for _, verb := range []string{"status", "up", "stop", "delete"} {
			assert.Contains(t, w.refused(verb), "version 1000", verb)
			assert.Equal(t, string(text), w.read(path), verb)
		}
		w.write(path, good)
	})

	w.sub("delete clears away what nobody can read any more", func(t *testing.T) {
		w.vz("up")
		w.observe()
		require.NoError(t, syscall.Kill(w.one("supervisor", process.supervisor).pid, syscall.SIGKILL))
		path := w.recordPath(e)
		w.write(path, "{")
		w.write(path+".prev", "{")
		assert.Contains(t, w.refused("status"), "damaged")
		assert.Contains(t, w.refused("up"), "damaged")
		w.vz("delete", "--environment", e.GetEnvironmentId())
		require.Empty(t, w.awaitNothing())
	})
}
