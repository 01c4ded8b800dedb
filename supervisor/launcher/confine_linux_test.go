package launcher

import (
	"context"
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"vz.test/vz/machines/namespace"
)

// TestConfine runs a supervisor that confines itself once its launcher is up,
// as root and as an ordinary user.
func TestConfine(t *testing.T) {
	if mode := os.Getenv("VZ_TEST_MODE"); mode == "" {
		if os.Getuid() != 0 {
			t.Skip("needs root")
		}
		t.Run("ordinary user", func(t *testing.T) {
			asUser(t, "single", "-test.run=^TestConfine$", "-test.v")
		})
	}
	b := newBench(t)
	require.NoError(t, b.client.Close())
	options := b.opts
	options.Log = nil
	text, err := json.Marshal(options)
	require.NoError(t, err)
	runtimeDir := t.TempDir()
	readable := filepath.Join(t.TempDir(), "readable")
	require.NoError(t, os.WriteFile(readable, []byte("text"), 0o644))
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self, "confined", runtimeDir, readable)
	cmd.Env = append(os.Environ(), "VZ_TEST_OPTIONS="+string(text))
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	var got map[string]string
	require.NoError(t, json.Unmarshal(out, &got), "%s", out)
	for what, saw := range got {
		if strings.HasPrefix(what, "not ") {
			assert.NotEmpty(t, saw, what)
		} else {
			assert.Empty(t, saw, what)
		}
	}
	assert.Greater(t, len(got), 15)
}

// confinedMain prints what it could do as JSON: "" is success.
func confinedMain(args []string) {
	runtimeDir, readable := args[0], args[1]
	said := map[string]string{}
	note := func(what string, err error) {
		said[what] = ""
		if err != nil {
			said[what] = err.Error()
		}
	}
	defer func() { json.NewEncoder(os.Stdout).Encode(said) }()

	var b bench
	note("options", json.Unmarshal([]byte(os.Getenv("VZ_TEST_OPTIONS")), &b.opts))
	c, err := Start(context.Background(), b.opts)
	note("start", err)
	if err != nil {
		return
	}
	notes, err := Confine(b.opts.StateDir, runtimeDir, readable)
	note("confine", err)
	if len(notes) > 0 {
		said["landlock"] = notes[0].Reason
	}

	// Machines come and go as before.
	d := namespace.New(c)
	i, err := d.Start(context.Background(), b.spec("web"))
	note("create", err)
	if err == nil {
		note("command", json.NewEncoder(i.Agent()).Encode(command{"exit 3"}))
		var r result
		note("result", json.NewDecoder(i.Agent()).Decode(&r))
		discard(i)
	}
	note("remove", d.Remove(context.Background(), b.spec("web")))

	// Files.
	dir := b.opts.StateDir
	note("write state", os.WriteFile(dir+"/f", nil, 0o600))
	note("make directory", os.Mkdir(dir+"/d", 0o700))
	note("rename across directories", os.Rename(dir+"/f", dir+"/d/f"))
	note("remove state", os.RemoveAll(dir+"/d"))
	_, err = os.ReadFile(readable)
	note("read readable", err)
	note("not write readable", os.WriteFile(readable, nil, 0o600))
	_, err = os.ReadFile("/etc/hosts")
	note("read hosts", err)
	_, err = os.ReadFile("/proc/net/tcp")
	note("read /proc", err)
	_, err = os.ReadFile("/etc/os-release")
	note("not read /etc/os-release", err)
	note("not write /tmp", os.WriteFile("/tmp/vz-confined", nil, 0o600))
	note("not write a sysctl", os.WriteFile("/proc/sys/kernel/core_pattern", []byte("core"), 0))
	note("not run a program", exec.Command("/bin/true").Run())

	// Sockets.
	for network, address := range map[string]string{"tcp": "127.0.0.1:0", "unix": runtimeDir + "/s"} {
		l, err := net.Listen(network, address)
		note("listen "+network, err)
		if err != nil {
			continue
		}
		go func() {
			conn, err := l.Accept()
			if err == nil {
				conn.Close()
			}
		}()
		conn, err := net.Dial(network, l.Addr().String())
		note("dial "+network, err)
		if err == nil {
			conn.Close()
		}
		note("close "+network, l.Close())
	}

	// Every thread.
	tasks, err := filepath.Glob("/proc/self/task/*/status")
	note("threads", err)
	for _, task := range tasks {
		text, _ := os.ReadFile(task)
		for line := range strings.Lines(string(text)) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
			value = strings.TrimSpace(value)
			switch name {
			case "CapEff", "CapPrm", "CapInh", "CapAmb":
				if strings.Trim(value, "0") != "" {
					said["capabilities"] = task + " " + line
				}
			case "NoNewPrivs":
				if value != "1" {
					said["no new privileges"] = task
				}
			}
		}
	}
	note("close", c.Close())
}
