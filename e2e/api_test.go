//go:build linux

package e2e

import (
	"bufio"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"vz.test/vz/config"
	"vz.test/vz/supervisor/api/vzv1"
)

// The API is as good by curl as by the Go client, for its owner alone.
func TestAPI(t *testing.T) {
	t.Parallel()
	one := host("net")
	one.Processes["talker"] = config.Process{Command: []string{"sh", "-c", "echo to stdout; echo to stderr >&2; exec sleep 1000000"}}
	w := newWorld(t, project(map[string]config.Machine{"one": one}))
	w.vz("up", "--environment", "blue")
	socket := w.status().GetSupervisor().GetSocket()
	curl := func(path string, more ...string) string {
		return w.must("curl", append([]string{"-sS", "--max-time", "60", "--unix-socket", socket, "http://vz/" + path}, more...)...)
	}
	call := func(method, body string) map[string]any {
		var answer map[string]any
		text := curl("vz.v1."+method, "-H", "Content-Type: application/json", "-d", body)
		require.NoError(t, json.Unmarshal([]byte(text), &answer), text)
		return answer
	}

	w.sub("unary calls are JSON", func(t *testing.T) {
		e := call("EnvironmentService/Get", "{}")
		assert.Equal(t, "ENVIRONMENT_STATE_READY", e["state"])
		assert.Equal(t, "blue", e["name"])
		assert.Equal(t, "HEALTH_SUPERVISED", call("MachineService/Get", `{"machine": "one"}`)["health"])
		assert.Len(t, call("MachineService/List", "{}")["machines"], 1)
		assert.Contains(t, call("MachineService/GetCapabilities", `{"machine": "one"}`)["negotiated"], "posix_exec")
		assert.Len(t, call("NetworkService/ListNetworks", "{}")["networks"], 1)
		assert.Len(t, call("ProcessService/List", "{}")["processes"], 1)
		assert.NotEmpty(t, call("ReceiptService/Head", "{}")["public_key"])
		fault := call("FaultService/Start", `{"name": "by-curl", "spec": {"path": "dns:one", "loss": {"probability": 1}, "ttlMillis": "60000"}}`)
		assert.Equal(t, "armed", fault["state"])
		assert.Equal(t, "healed", call("FaultService/Heal", `{"faultId": "by-curl"}`)["state"])
		missing := call("MachineService/Get", `{"machine": "two"}`)
		assert.Equal(t, "not_found", missing["code"])
		assert.NotEmpty(t, missing["message"])
	})

	w.sub("events are a plain stream of lines", func(t *testing.T) {
		cmd := w.command("curl", "-sSN", "--max-time", "60", "--unix-socket", socket, "http://vz/v1/events?replay=true")
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		defer func() { cmd.Process.Kill(); cmd.Wait() }()
		events := bufio.NewReader(out)
		last := uint64(0)
		next := func() *vzv1.Event {
			line, err := events.ReadString('\n')
			require.NoError(t, err)
			e := new(vzv1.Event)
			decode(t, line, e)
			assert.Greater(t, e.GetSequence(), last)
			last = e.GetSequence()
			return e
		}
		for { // replayed: the up
			p := next().GetProgress()
			if p.GetTerminal() && p.GetOperation() == "up" {
				break
			}
		}
		w.tryExec("one", "sh", "-c", "python3 -c '"+`
import socket
socket.create_connection(("203.0.113.77", 9), timeout=20)`+"'")
		for { // live: what was just refused
			if r := next().GetRefusal(); r != nil {
				assert.Equal(t, "203.0.113.77:9", r.GetDestination())
				break
			}
		}
	})

	w.sub("the probe shows the aggregate, then events", func(t *testing.T) {
		cmd := w.command("vz-runtime-probe", "--no-replay")
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		lines := bufio.NewReader(out)
		line, err := lines.ReadString('\n')
		require.NoError(t, err)
		e := new(vzv1.Environment)
		decode(t, line, e)
		requireReady(t, e)
		w.eventually("an event", func() bool { // it may not listen yet
			w.vz("up")
			return lines.Buffered() > 0 || func() bool { _, err := lines.Peek(1); return err == nil }()
		})
		require.NoError(t, cmd.Process.Signal(os.Interrupt))
		cmd.Wait()
	})

	w.sub("logs", func(t *testing.T) {
		r := w.run("vz-runtime-probe", "logs", "one", "talker")
		assert.Equal(t, result{out: "to stdout\n", err: "to stderr\n"}, r)
		assert.Len(t, strings.Split(strings.TrimSpace(curl("v1/logs?machine=one&process=talker")), "\n"), 2)
		assert.Equal(t, 1, w.run("vz-runtime-probe", "logs", "one", "nobody").code)
	})

	w.sub("the socket is its owner's alone", func(t *testing.T) {
		info, err := os.Stat(socket)
		require.NoError(t, err)
		assert.Equal(t, os.FileMode(0o600), info.Mode().Perm())
		info, err = os.Stat(filepath.Dir(socket))
		require.NoError(t, err)
		assert.Equal(t, os.FileMode(0o700), info.Mode().Perm())

		// Another user is refused even where a careless hand opened the way.
		for path := range map[string]bool{w.dir: true, w.runtime(): true, filepath.Dir(socket): true} {
			info, err := os.Stat(path)
			require.NoError(t, err)
			require.NoError(t, os.Chmod(path, 0o755))
			defer os.Chmod(path, info.Mode())
		}
		require.NoError(t, os.Chmod(socket, 0o666))
		defer os.Chmod(socket, 0o600)
		asks := []string{"curl", "-sS", "--max-time", "60", "--unix-socket", socket, "-H", "Content-Type: application/json", "-d", "{}", "http://vz/vz.v1.EnvironmentService/Get"}
		as := func(uid int) ([]byte, error) {
			cmd := exec.Command(asks[0], asks[1:]...)
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
			cmd.Dir = "/"
			return cmd.Output()
		}
		out, err := as(12345)
		assert.Error(t, err)
		assert.Empty(t, out)
		assert.Contains(t, w.logs(), "uid=12345")
		_, err = as(0)
		assert.NoError(t, err)
	})

	w.sub("the probe never starts a supervisor", func(t *testing.T) {
		w.vz("stop")
		w.eventually("nothing runs", func() bool { return len(w.running()) == 0 })
		for _, args := range [][]string{{"--once"}, {"refusals"}, {"queries"}, {"flows"}, {"paths"}, {"receipts"}, {"fault", "list"}} {
			r := w.run("vz-runtime-probe", args...)
			assert.Equal(t, 1, r.code, "%v", args)
			assert.Contains(t, r.err, "no supervisor is running", "%v", args)
		}
		w.must("vz-runtime-probe", "receipts", "--verify")
		assert.Empty(t, w.running())
	})
}
