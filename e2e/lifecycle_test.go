//go:build linux

package e2e

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"vz.test/vz/supervisor/api/vzv1"
)

func itoa(n int) string { return strconv.Itoa(n) }

// agents are the host's process IDs of the Machines' first processes.
func (w *world) agents() []int {
	var pids []int
	for _, p := range w.find(process.agent) {
		pids = append(pids, p.pid)
	}
	slices.Sort(pids)
	return pids
}

func TestLifecycle(t *testing.T) {
	t.Parallel()
	w := newWorld(t, shop(t))

	said := w.vz("up", "--environment", "blue")
	require.Regexp(t, `blue \(env_[0-9a-z]{26}\) is ready`, said)
	require.Contains(t, said, "https://shop.test/ → web:8080")
	require.Contains(t, said, "curl --proxy http://127.0.0.1:")

	up := w.status()
	requireReady(t, up)
	assert.Equal(t, "blue", up.GetName())
	assert.Equal(t, "shop", up.GetProjectName())
	assert.Equal(t, "prj_01kbn3k8v7q2w5x9y4z6c1d0ef", up.GetProjectId())
	require.Len(t, up.GetMachines(), 3)
	for _, m := range up.GetMachines() {
		assert.Subset(t, m.GetCapabilities().GetNegotiated(), []string{"posix_exec", "posix_pty"}, m.GetName())
		assert.NotEqual(t, "host", m.GetArch(), "arch is resolved at creation")
		for _, a := range m.GetAttachments() {
			assert.True(t, a.GetConnected(), "%s on %s", m.GetName(), a.GetNetwork())
		}
	}
	connected := map[string][]string{}
	for _, n := range up.GetNetworks() {
		connected[n.GetName()] = n.GetMachines()
	}
	assert.Equal(t, map[string][]string{"front": {"client", "web"}, "back": {"db", "web"}, "edge": {"client", "web"}}, connected)
	assert.Equal(t, "10.20.0.20", address(t, up, "db", "back"))
	require.Len(t, up.GetEndpoints(), 1)
	assert.Regexp(t, `^198\.51\.100\.`, up.GetEndpoints()[0].GetAddress())
	assert.FileExists(t, up.GetProxy().GetCaPath())
	authority := w.read(up.GetProxy().GetCaPath())

	w.sub("status for people", func(t *testing.T) {
		text := w.vz("status")
		for _, want := range []string{"blue (env_", "MACHINE", "web", "supervised", "10.20.0.20", "NETWORK", "ENDPOINT", "https://shop.test/", "from the host: proxy http://127.0.0.1:"} {
			assert.Contains(t, text, want)
		}
		assert.Contains(t, w.vz("status", "--machine", "db"), "process server: running")
		assert.Contains(t, w.vz("status", "--all"), "3/3 supervised")
	})

	w.sub("what is looked for after delete is there before", func(t *testing.T) {
		running := strings.Join(w.running(), "\n")
		for _, want := range []string{"vz-supervisor", "launcher", "vz-guest", "unix socket", "cgroup /sys/fs/cgroup/"} {
			assert.Contains(t, running, want)
		}
		w.observe()
		assert.Len(t, w.spaces, 3, "a network namespace for each Machine")
		assert.Contains(t, strings.Join(w.running(), "\n"), "network namespace net:[")
		assert.Len(t, w.agents(), 3)
	})

	w.sub("a second up changes nothing", func(t *testing.T) {
		agents := w.agents()
		w.vz("up")
		again := w.status()
		requireReady(t, again)
		assert.Equal(t, incarnations(up), incarnations(again))
		assert.Equal(t, up.GetSupervisor().GetPid(), again.GetSupervisor().GetPid())
		assert.Equal(t, agents, w.agents())
		for i, m := range again.GetMachines() {
			assert.Equal(t, up.GetMachines()[i].GetProcesses(), m.GetProcesses(), m.GetName())
		}
	})

	w.sub("stop keeps identity and ends what runs", func(t *testing.T) {
		require.Contains(t, w.vz("stop"), "blue ("+up.GetEnvironmentId()+") is stopped")
		stopped := w.status()
		assert.Equal(t, vzv1.EnvironmentState_ENVIRONMENT_STATE_STOPPED, stopped.GetState())
		assert.Nil(t, stopped.GetSupervisor())
		sameIdentity(t, up, stopped)
		for _, m := range stopped.GetMachines() {
			assert.Equal(t, vzv1.MachineState_MACHINE_STATE_STOPPED, m.GetState(), m.GetName())
			assert.Equal(t, vzv1.Health_HEALTH_INACTIVE, m.GetHealth(), m.GetName())
		}
		w.eventually("nothing runs", func() bool { return len(w.running()) == 0 })
		require.Contains(t, w.vz("stop"), "is stopped", "stop is idempotent")
	})

	w.sub("up again boots the same Machines anew", func(t *testing.T) {
		w.vz("up")
		again := w.status()
		requireReady(t, again)
		sameIdentity(t, up, again)
		for name, incarnation := range incarnations(again) {
			assert.NotEqual(t, incarnations(up)[name], incarnation, name)
		}
		assert.Equal(t, authority, w.read(again.GetProxy().GetCaPath()), "who trusts the Environment's authority goes on doing so")
		assert.Equal(t, up.GetProxy().GetUrl(), again.GetProxy().GetUrl())
	})

	w.sub("delete says the receipts' head and leaves nothing", func(t *testing.T) {
		w.observe()
		said := w.vz("delete")
		require.Contains(t, said, "blue ("+up.GetEnvironmentId()+") is deleted")
		require.Regexp(t, regexp.MustCompile(`receipts: [1-9][0-9]*, head [0-9a-z:]+, key \S+`), said)
		require.Empty(t, w.awaitNothing())
		entries, err := os.ReadDir(w.state() + "/vz")
		require.NoError(t, err)
		require.Empty(t, entries, "the state root is empty")
		require.Contains(t, w.refused("delete", "--environment", "blue"), "blue")
	})

	w.sub("delete as JSON", func(t *testing.T) {
		w.vz("up", "--environment", "blue")
		w.observe()
		var deleted struct {
			ID   string `json:"environment_id"`
			Head struct {
				Count     int
				Hash      string
				Signature string
				PublicKey string `json:"public_key"`
			} `json:"receipt_head"`
		}
		require.NoError(t, json.Unmarshal([]byte(w.vz("delete", "--json")), &deleted))
		assert.NotEqual(t, up.GetEnvironmentId(), deleted.ID, "an ID is never used again")
		assert.GreaterOrEqual(t, deleted.Head.Count, 2)
		assert.NotEmpty(t, deleted.Head.Hash)
		assert.NotEmpty(t, deleted.Head.Signature)
		assert.NotEmpty(t, deleted.Head.PublicKey)
	})
}

// sameIdentity says that two looks at an Environment show the same IDs and
// addresses.
func sameIdentity(t *testing.T, a, b *vzv1.Environment) {
	t.Helper()
	require.Equal(t, a.GetEnvironmentId(), b.GetEnvironmentId())
	require.Len(t, b.GetMachines(), len(a.GetMachines()))
	for _, m := range a.GetMachines() {
		other := machine(t, b, m.GetName())
		require.Equal(t, m.GetMachineId(), other.GetMachineId(), m.GetName())
		require.Len(t, other.GetAttachments(), len(m.GetAttachments()), m.GetName())
		for i, x := range m.GetAttachments() {
			y := other.GetAttachments()[i]
			require.Equal(t, []string{x.GetNetwork(), x.GetAddress(), x.GetPublicAddress(), x.GetMac()},
				[]string{y.GetNetwork(), y.GetAddress(), y.GetPublicAddress(), y.GetMac()}, m.GetName())
		}
	}
	for i, e := range a.GetEndpoints() {
		require.Equal(t, e.GetAddress(), b.GetEndpoints()[i].GetAddress())
	}
}
