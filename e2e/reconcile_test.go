//go:build linux

package e2e

import (
	"bufio"
	"encoding/json"
	"maps"
	"os"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"vz.test/vz/config"
	"vz.test/vz/supervisor/api/vzv1"
)

// An up does what changed, and nothing else.
func TestReconcile(t *testing.T) {
	t.Parallel()
	a, b, c := host("net"), host("net"), host("net")
	b.Processes["greeter"] = echo("first", 7000)
	definition := project(map[string]config.Machine{"a": a, "b": b, "c": c})
	definition.Paths = []config.Path{path("a-b", "a", "b", 7000)}
	w := newWorld(t, definition)
	w.vz("up", "--environment", "blue")
	before := w.status()
	requireReady(t, before)
	require.Equal(t, "first", w.python("a", hear, "b", "7000"))

	// up reconciles to the changed definition, and says which Machines were
	// booted anew.
	up := func(t *testing.T) (booted []string, now *vzv1.Environment) {
		t.Helper()
		w.define(definition)
		w.vz("up")
		now = w.status()
		requireReady(t, now)
		was := incarnations(before)
		for name, incarnation := range incarnations(now) {
			if was[name] != incarnation {
				booted = append(booted, name)
			}
		}
		slices.Sort(booted)
		before = now
		return booted, now
	}

	w.sub("a changed process is given to the agent", func(t *testing.T) {
		pid := machine(t, before, "b").GetProcesses()[0].GetPid()
		b.Processes = map[string]config.Process{"greeter": echo("second", 7000), "more": {Command: []string{"sleep", "1000000"}}}
		definition.Machines["b"] = b
		booted, now := up(t)
		assert.Empty(t, booted)
		processes := machine(t, now, "b").GetProcesses()
		require.Len(t, processes, 2)
		assert.NotEqual(t, pid, processes[0].GetPid())
		assert.Equal(t, "second", w.python("a", hear, "b", "7000"))

		pid = processes[0].GetPid()
		b.Processes = map[string]config.Process{"greeter": echo("second", 7000)}
		definition.Machines["b"] = b
		booted, now = up(t)
		assert.Empty(t, booted)
		processes = machine(t, now, "b").GetProcesses()
		assert.Equal(t, pid, processes[0].GetPid(), "the one that stays is left alone")
	})

	w.sub("a changed resource boots that Machine anew", func(t *testing.T) {
		c.Resources.MemoryBytes = 256 << 20
		definition.Machines["c"] = c
		booted, _ := up(t)
		assert.Equal(t, []string{"c"}, booted)
	})

	w.sub("a changed attachment boots that Machine anew", func(t *testing.T) {
		definition.Networks = maps.Clone(definition.Networks)
		definition.Networks["side"] = config.Network{Kind: config.NetworkPrivate, CIDR: "10.78.0.0/24"}
		a.Networks = []config.Attachment{{Name: "net"}, {Name: "side"}}
		definition.Machines["a"] = a
		was := address(t, before, "a", "net")
		booted, now := up(t)
		assert.Equal(t, []string{"a"}, booted)
		assert.Equal(t, was, address(t, now, "a", "net"))
		assert.Contains(t, w.exec("a", "ip", "-brief", "address"), address(t, now, "a", "side"))
		assert.Equal(t, "second", w.python("a", hear, "b", "7000"))

		a.Networks = []config.Attachment{{Name: "net", Address: "10.77.0.99"}}
		definition.Machines["a"] = a
		delete(definition.Networks, "side")
		booted, now = up(t)
		assert.Equal(t, []string{"a"}, booted)
		assert.Equal(t, "10.77.0.99", address(t, now, "a", "net"))
		assert.Equal(t, "second", w.python("a", hear, "b", "7000"))
	})

	w.sub("an added path allows traffic, a removed one cuts it", func(t *testing.T) {
		assert.Equal(t, "Connection refused", w.python("c", hear, address(t, before, "b", "net"), "7000"))
		definition.Paths = append(definition.Paths, path("c-b", "c", "b", 7000))
		booted, _ := up(t)
		assert.Empty(t, booted)
		assert.Equal(t, "second", w.python("c", hear, "b", "7000"))

		// Two flows are open, of which one is to be cut.
		const talk = `
import socket, sys, time
s = socket.create_connection(("b", 7000), timeout=20)
f = s.makefile("rw")
f.readline()
try:
    while True:
        f.write("x\n")
        f.flush()
        f.readline()
        print("alive", flush=True)
        time.sleep(0.05)
except OSError as e:
    print(e.strerror or e, flush=True)
`
		open := func(from string) *bufio.Reader {
			cmd := w.command("vz", "exec", "--machine", from, "--", "python3", "-u", "-c", talk)
			out, err := cmd.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())
			t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
			return bufio.NewReader(out)
		}
		kept, cut := open("a"), open("c")
		expect(t, kept, "alive")
		expect(t, cut, "alive")
		definition.Paths = definition.Paths[:1]
		booted, _ = up(t)
		assert.Empty(t, booted)
		expect(t, cut, "Connection reset by peer")
		for range 50 {
			line, err := kept.ReadString('\n')
			require.NoError(t, err)
			require.Equal(t, "alive\n", line)
		}
		assert.Equal(t, "Connection refused", w.python("c", hear, address(t, before, "b", "net"), "7000"))
	})

	w.sub("the declared faults are those of the last up", func(t *testing.T) {
		slow := func(millis int64) []config.Fault {
			return []config.Fault{{Name: "slow", Path: "a-b", Seed: 1, TTLMillis: 3600_000, Latency: &config.LatencyFault{DelayMillis: millis}}}
		}
		definition.Faults = slow(50)
		booted, now := up(t)
		assert.Empty(t, booted)
		assert.Equal(t, map[string]uint64{"slow": 50}, armed(now))
		assert.GreaterOrEqual(t, w.millis("a", "b", "7000"), 100.0)

		definition.Faults = slow(80)
		_, now = up(t)
		assert.Equal(t, map[string]uint64{"slow": 80}, armed(now))
		assert.GreaterOrEqual(t, w.millis("a", "b", "7000"), 160.0)

		definition.Faults = nil
		_, now = up(t)
		assert.Empty(t, armed(now))
		why := map[string]int{}
		for _, r := range w.faultReceipts() {
			why[r.HealedWhy]++
		}
		assert.Equal(t, map[string]int{"reconcile": 2}, why)
	})

	w.sub("a Machine that is no longer declared is gone, and no other", func(t *testing.T) {
		gone := machine(t, before, "c").GetMachineId()
		delete(definition.Machines, "c")
		booted, now := up(t)
		assert.Empty(t, booted)
		require.Len(t, now.GetMachines(), 2)
		assert.Empty(t, w.find(func(p process) bool { return p.machine == gone }))
		assert.NoDirExists(t, w.state()+"/vz/environments/"+now.GetEnvironmentId()+"/machines/"+gone)
		assert.Equal(t, "second", w.python("a", hear, "b", "7000"))

		// One of the same name later is another Machine.
		definition.Machines["c"] = host("net")
		booted, now = up(t)
		assert.Equal(t, []string{"c"}, booted)
		assert.NotEqual(t, gone, machine(t, now, "c").GetMachineId())
	})

	w.sub("a refused definition changes nothing", func(t *testing.T) {
		record := w.state() + "/vz/environments/" + before.GetEnvironmentId() + "/record.json"
		was := w.read(record)
		w.write(w.definePath(), `{"schema_version": 1, "nmae": "e2e"}`)
		assert.Contains(t, w.refused("up"), "nothing was changed")
		definition.Machines["c"] = config.Machine{Target: host().Target, Profile: "developer", Docker: host().Docker, Isolation: "vm"}
		w.define(definition)
		assert.Contains(t, w.refused("up"), "isolation.vm@linux/linux")
		assert.Equal(t, was, w.read(record))
		requireReady(t, w.status())
	})

	w.sub("another project's definition is refused", func(t *testing.T) {
		delete(definition.Machines, "c")
		definition.ProjectID = "prj_01kbn3k8v7q2w5x9y4z6c1d0bb"
		w.define(definition)
		said := w.refused("up", "--environment", before.GetEnvironmentId())
		assert.Contains(t, said, "project")
		assert.Len(t, w.all(), 1)
	})
	require.NoError(t, os.Remove(w.definePath()))
}

// armed are the delays in ms of an Environment's armed faults, by name.
func armed(e *vzv1.Environment) map[string]uint64 {
	all := map[string]uint64{}
	for _, f := range e.GetFaults() {
		if f.GetState() == "armed" {
			all[f.GetName()] = f.GetSpec().GetLatency().GetDelayMillis()
		}
	}
	return all
}

// millis is how long a connect took, in ms.
func (w *world) millis(from, to, port string) float64 {
	w.t.Helper()
	var took float64
	require.NoError(w.t, json.Unmarshal([]byte(w.python(from, roundTrip, to, port)), &took))
	return took
}

// A faultReceipt is what the evidence says of a fault that is over.
type faultReceipt struct {
	Name      string `json:"name"`
	State     string `json:"state"`
	HealedWhy string `json:"healed_why"`
	Vacuous   bool   `json:"vacuous"`
	Digest    string `json:"spec_digest"`
	Spec      struct {
		Seed string `json:"seed"` // 64 bits, as JavaScript can't count
	} `json:"spec"`
	Effect *struct {
		Matched, Decided, Applied, Overflowed uint64
	} `json:"effect"`
	Achieved *struct {
		Loss *struct {
			Rate float64 `json:"rate"`
		} `json:"loss"`
	} `json:"achieved"`
}

func (w *world) faultReceipts() []faultReceipt {
	w.t.Helper()
	var all []faultReceipt
	for _, r := range probe[vzv1.Receipt](w, "receipts", "--kind", "fault") {
		var body faultReceipt
		require.NoError(w.t, json.Unmarshal([]byte(r.GetBodyJson()), &body))
		all = append(all, body)
	}
	return all
}
