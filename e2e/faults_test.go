//go:build linux

package e2e

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"vz.test/vz/config"
	"vz.test/vz/supervisor/api/vzv1"
)

func TestFaults(t *testing.T) {
	t.Parallel()
	definition := shop(t)
	w := newWorld(t, definition)
	w.vz("up", "--environment", "blue")
	e := w.status()

	start := func(t *testing.T, args ...string) *vzv1.Fault {
		t.Helper()
		faults := probe[vzv1.Fault](w, append([]string{"fault", "start"}, args...)...)
		require.Len(t, faults, 1)
		require.Equal(t, "armed", faults[0].GetState())
		require.Equal(t, "api", faults[0].GetOrigin())
		return faults[0]
	}
	// healed waits for a fault's receipt.
	healed := func(name string) (found faultReceipt) {
		w.eventually(name+" has healed", func() bool {
			for _, r := range w.faultReceipts() {
				if r.Name == name {
					found = r
				}
			}
			return found.State == "healed"
		})
		return found
	}

	w.sub("latency delays each way, and heals by its TTL", func(t *testing.T) {
		start(t, "slow-db", "--path", "web-db", "--latency", "100ms", "--seed", "42", "--ttl", "5s")
		assert.GreaterOrEqual(t, w.millis("web", "db", "5432"), 200.0)
		r := healed("slow-db")
		assert.Equal(t, "ttl", r.HealedWhy)
		assert.Equal(t, "42", r.Spec.Seed)
		assert.NotEmpty(t, r.Digest)
		assert.False(t, r.Vacuous)
		require.NotNil(t, r.Effect)
		assert.GreaterOrEqual(t, r.Effect.Applied, uint64(2))
		assert.Empty(t, armed(w.status()))
	})

	w.sub("one direction only", func(t *testing.T) {
		start(t, "slow-answers", "--path", "web-db", "--direction", "response", "--latency", "150ms", "--ttl", "1m")
		took := w.millis("web", "db", "5432")
		assert.GreaterOrEqual(t, took, 150.0)
		faults := probe[vzv1.Fault](w, "fault", "heal", "slow-answers")
		require.Len(t, faults, 1)
		assert.Equal(t, "healed", faults[0].GetState())
		assert.Equal(t, "api", faults[0].GetHealedWhy())
		assert.Equal(t, "api", healed("slow-answers").HealedWhy)
	})

	w.sub("loss loses, and what is repeated after it arrives", func(t *testing.T) {
		start(t, "lossy", "--path", "client-shop", "--loss", "1", "--ttl", "3s")
		var took float64
		require.NoError(t, json.Unmarshal([]byte(w.exec("client", "curl", "-sS", "--fail", "--max-time", "60", "-o", "/dev/null", "-w", "%{time_connect}", "https://shop.test/")), &took))
		assert.GreaterOrEqual(t, took, 0.9, "a SYN was lost; the next comes after a second (RFC 6298)")
		r := healed("lossy")
		assert.Equal(t, "ttl", r.HealedWhy)
		assert.GreaterOrEqual(t, r.Effect.Applied, uint64(1))
		assert.Equal(t, r.Effect.Matched, r.Effect.Applied)
		require.NotNil(t, r.Achieved.Loss)
		assert.Equal(t, 1.0, r.Achieved.Loss.Rate)
		drops := probe[vzv1.DropCount](w, "refusals")
		lost := uint64(0)
		for _, d := range drops {
			if d.GetReason() == "fault_lost" {
				lost += d.GetPackets()
			}
		}
		assert.GreaterOrEqual(t, lost, r.Effect.Applied)
	})

	w.sub("the host's port, DNS and the backend have paths of their own", func(t *testing.T) {
		for _, c := range []struct {
			path  string
			least float64 // s
			argv  []string
		}{
			{"host:shop", 0.3, []string{"curl", "-sS", "--fail", "--proxy", e.GetProxy().GetUrl(), "--cacert", e.GetProxy().GetCaPath(), "-o", "/dev/null", "-w", "%{time_total}", "https://shop.test/"}},
			{"backend:shop", 0.3, []string{"vz", "exec", "--machine", "client", "--", "curl", "-sS", "--fail", "-o", "/dev/null", "-w", "%{time_total}", "https://shop.test/"}},
			{"dns:client", 0.3, []string{"vz", "exec", "--machine", "client", "--", "python3", "-c", `
import socket, time
began = time.monotonic()
socket.getaddrinfo("shop.test", 443, socket.AF_INET)
print(time.monotonic() - began)`}},
		} {
			name := strings.ReplaceAll(c.path, ":", "-")
			start(t, name, "--path", c.path, "--latency", "150ms", "--ttl", "1m")
			var took float64
			require.NoError(t, json.Unmarshal([]byte(w.must(c.argv[0], c.argv[1:]...)), &took))
			assert.GreaterOrEqual(t, took, c.least, c.path)
			probe[vzv1.Fault](w, "fault", "heal", name)
			r := healed(name)
			assert.False(t, r.Vacuous, c.path)
			assert.GreaterOrEqual(t, r.Effect.Applied, uint64(2), c.path)
		}
	})

	w.sub("a fault that matched nothing says so", func(t *testing.T) {
		start(t, "idle", "--path", "web-db", "--loss", "0.5", "--ttl", "100ms")
		assert.True(t, healed("idle").Vacuous)
	})

	w.sub("what can't be is refused", func(t *testing.T) {
		for _, args := range [][]string{
			{"x", "--path", "no-such-path", "--loss", "1", "--ttl", "1s"},
			{"x", "--path", "web-db", "--loss", "2", "--ttl", "1s"},
			{"x", "--path", "web-db", "--ttl", "1s"},
			{"x", "--path", "web-db", "--loss", "1", "--latency", "1ms", "--ttl", "1s"},
			{"x", "--path", "web-db", "--loss", "1", "--ttl", "10000h"},
			{"x", "--path", "web-db", "--loss", "1"},
		} {
			r := w.run("vz-runtime-probe", append([]string{"fault", "start"}, args...)...)
			assert.NotZero(t, r.code, "%v", args)
			assert.NotEmpty(t, r.err, "%v", args)
		}
	})

	w.sub("the evidence verifies, and a flipped byte or a cut tail is found", func(t *testing.T) {
		assert.Regexp(t, `verified: [0-9]+ receipts of `+e.GetEnvironmentId(), w.must("vz-runtime-probe", "receipts", "--verify"))
		dir := w.state() + "/vz/environments/" + e.GetEnvironmentId() + "/receipts"
		logs, err := filepath.Glob(dir + "/*")
		require.NoError(t, err)
		largest := ""
		for _, path := range logs {
			if largest == "" || len(w.read(path)) > len(w.read(largest)) {
				largest = path
			}
		}
		good := w.read(largest)
		lines := strings.SplitAfter(good, "\n")
		for what, bad := range map[string]string{
			"a changed word": strings.Replace(good, `"ready"`, `"reedy"`, 1),
			"a flipped byte": good[:len(good)/2] + string(good[len(good)/2]^1) + good[len(good)/2+1:],
			"a cut tail":     strings.Join(lines[:len(lines)-2], ""),
			"a missing line": strings.Join(append(append([]string{}, lines[:1]...), lines[2:]...), ""),
		} {
			require.NotEqual(t, good, bad, what)
			require.NoError(t, os.WriteFile(largest, []byte(bad), 0o600))
			r := w.run("vz-runtime-probe", "receipts", "--verify")
			assert.Equal(t, 1, r.code, "%s: %s", what, r)
		}
		require.NoError(t, os.WriteFile(largest, []byte(good), 0o600))
		w.must("vz-runtime-probe", "receipts", "--verify")
	})

	w.sub("a supervisor's death ends a fault, and the next one says so", func(t *testing.T) {
		start(t, "orphan", "--path", "web-db", "--latency", "50ms", "--ttl", "1h")
		require.NoError(t, syscall.Kill(w.one("supervisor", process.supervisor).pid, syscall.SIGKILL))
		w.eventually("nothing of it runs", func() bool { return len(w.processes()) == 0 })
		w.vz("up")
		assert.Equal(t, "restart", healed("orphan").HealedWhy)
		assert.Empty(t, armed(w.status()))
		w.must("vz-runtime-probe", "receipts", "--verify")
	})

	w.sub("the declared timeline starts anew at every up, and only there", func(t *testing.T) {
		definition.Faults = []config.Fault{
			{Name: "now", Path: "web-db", Seed: 1, TTLMillis: 3600_000, Latency: &config.LatencyFault{DelayMillis: 60}},
			{Name: "later", Path: "client-shop", Seed: 1, AtMillis: 3000_000, TTLMillis: 1000, Loss: &config.LossFault{Probability: 0.5}},
		}
		w.define(definition)
		w.vz("up")
		states := func() map[string]string {
			all := map[string]string{}
			for _, f := range probe[vzv1.Fault](w, "fault", "list") {
				if f.GetState() != "healed" {
					all[f.GetName()] = f.GetState()
					assert.Equal(t, "definition", f.GetOrigin())
				}
			}
			return all
		}
		require.Equal(t, map[string]string{"now": "armed", "later": "pending"}, states())
		assert.GreaterOrEqual(t, w.millis("web", "db", "5432"), 120.0)
		assert.Contains(t, w.vz("status"), "now")
		w.vz("up")
		require.Equal(t, map[string]string{"now": "armed", "later": "pending"}, states())
		assert.Equal(t, "reconcile", healed("now").HealedWhy)

		// Whoever only needs a Machine does not start a timeline.
		w.vz("stop")
		w.exec("web", "true")
		assert.Empty(t, states())
	})
}
