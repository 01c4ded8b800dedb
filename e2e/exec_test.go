//go:build linux

package e2e

import (
	"bufio"
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"vz.test/vz/config"
	"vz.test/vz/supervisor/api/vzv1"
)

// waits is a shell program that says ready and then waits for a signal.
const waits = `trap 'echo caught; exit 7' INT; trap 'stty size' WINCH; echo ready; while :; do sleep 0.05; done`

func TestExec(t *testing.T) {
	t.Parallel()
	w := newWorld(t, sole())
	w.vz("up", "--environment", "blue")

	w.sub("exit statuses", func(t *testing.T) {
		w.exec("one", "sh", "-c", "printf text > /tmp/text; mkdir -p /tmp/dir")
		for _, c := range []struct {
			status int
			argv   []string
		}{
			{0, []string{"true"}},
			{1, []string{"false"}},
			{42, []string{"sh", "-c", "exit 42"}},
			{255, []string{"sh", "-c", "exit 255"}},
			{126, []string{"/tmp/text"}},
			{126, []string{"/tmp/dir"}},
			{127, []string{"no-such-command"}},
			{127, []string{"/no/such/command"}},
			{128 + 15, []string{"sh", "-c", "kill -TERM $$"}},
			{128 + 9, []string{"sh", "-c", "kill -KILL $$"}},
			{128 + 6, []string{"sh", "-c", "kill -ABRT $$"}},
		} {
			r := w.tryExec("one", c.argv...)
			assert.Equal(t, c.status, r.code, "%v: %s", c.argv, r)
			assert.Empty(t, r.out)
			if c.status == 126 || c.status == 127 {
				assert.NotEmpty(t, r.err, "%v", c.argv)
			}
		}
		assert.Equal(t, 125, w.tryExec("two", "true").code, "no such Machine")
		assert.Equal(t, 125, w.run("vz", "exec", "--environment", "green", "--", "true").code, "no such Environment")
		assert.Equal(t, 125, w.run("vz", "exec").code, "usage")
		assert.Equal(t, 125, w.run("vz", "exec", "--no-such-flag", "--", "true").code, "usage")
		assert.Zero(t, w.run("vz", "exec", "--", "true").code, "the sole Machine")
	})

	w.sub("streams are separate and binary-clean", func(t *testing.T) {
		r := w.tryExec("one", "sh", "-c", "echo out; echo err >&2")
		assert.Equal(t, result{out: "out\n", err: "err\n"}, r)

		data := make([]byte, 3<<20)
		rand.Read(data)
		for i := range 256 {
			data[i] = byte(i)
		}
		cmd := w.command("vz", "exec", "-i", "--", "sh", "-c", "tee /dev/stderr")
		var out, errs bytes.Buffer
		cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(data), &out, &errs
		require.NoError(t, cmd.Run())
		assert.True(t, bytes.Equal(data, out.Bytes()), "stdout")
		assert.True(t, bytes.Equal(data, errs.Bytes()), "stderr")
	})

	w.sub("stdin half-closes", func(t *testing.T) {
		cmd := w.command("vz", "exec", "-i", "--", "sh", "-c", "cat; echo and more")
		cmd.Stdin = strings.NewReader("said\n")
		assert.Equal(t, "said\nand more\n", w.finish(cmd).out)

		cmd = w.command("vz", "exec", "--", "cat")
		cmd.Stdin = strings.NewReader("not passed on without -i")
		assert.Equal(t, result{}, w.finish(cmd))
	})

	w.sub("a command that does not read does not block", func(t *testing.T) {
		cmd := w.command("vz", "exec", "-i", "--", "sh", "-c", "exec 0<&-; echo done")
		cmd.Stdin = bytes.NewReader(make([]byte, 8<<20))
		assert.Equal(t, result{out: "done\n"}, w.finish(cmd))
	})

	w.sub("arguments arrive as they are", func(t *testing.T) {
		argv := []string{"--", "-c", "", "a b", "$HOME", "*", "\"'\\", "ü\x01"}
		assert.Equal(t, strings.Join(argv, "\n")+"\n", w.exec("one", append([]string{"printf", `%s\n`}, argv...)...))
	})

	w.sub("the first size of a terminal is right, and resizing arrives", func(t *testing.T) {
		for _, size := range []pty.Winsize{{Rows: 33, Cols: 101}, {Rows: 7, Cols: 250}} {
			cmd := w.command("vz", "exec", "-it", "--", "stty", "size")
			terminal, err := pty.StartWithSize(cmd, &size)
			require.NoError(t, err)
			text, _ := io.ReadAll(terminal) // EIO at the end
			terminal.Close()
			require.NoError(t, cmd.Wait(), string(text))
			assert.Equal(t, fmt.Sprintf("%d %d", size.Rows, size.Cols), strings.TrimSpace(string(text)))
		}

		cmd := w.command("vz", "exec", "-it", "--", "sh", "-c", waits)
		terminal, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 33, Cols: 101})
		require.NoError(t, err)
		defer terminal.Close()
		out := bufio.NewReader(terminal)
		expect(t, out, "ready")
		require.NoError(t, pty.Setsize(terminal, &pty.Winsize{Rows: 44, Cols: 120}))
		expect(t, out, "44 120")
		_, err = terminal.Write([]byte{3}) // Ctrl-C is a byte like others
		require.NoError(t, err)
		expect(t, out, "caught")
		assert.Equal(t, 7, w.wait(cmd, cmd.Wait()))
	})

	w.sub("signals reach the remote process", func(t *testing.T) {
		cmd := w.command("vz", "exec", "--", "sh", "-c", waits)
		stdout, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		out := bufio.NewReader(stdout)
		expect(t, out, "ready")
		require.NoError(t, cmd.Process.Signal(os.Interrupt))
		expect(t, out, "caught")
		assert.Equal(t, 7, w.wait(cmd, cmd.Wait()))

		for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT} {
			cmd := w.command("vz", "exec", "--", "sh", "-c", "echo ready; exec sleep 1000")
			stdout, err := cmd.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())
			expect(t, bufio.NewReader(stdout), "ready")
			require.NoError(t, cmd.Process.Signal(s))
			assert.Equal(t, 128+int(s), w.wait(cmd, cmd.Wait()), s.String())
		}
	})

	w.sub("killing the client kills the remote process group", func(t *testing.T) {
		cmd := w.command("vz", "exec", "--", "sh", "-c", "sleep 4321 & echo ready; exec sleep 4321")
		stdout, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		expect(t, bufio.NewReader(stdout), "ready")
		sleepers := func() int {
			return len(w.find(func(p process) bool { return strings.Join(p.args, " ") == "sleep 4321" }))
		}
		w.eventually("both sleep", func() bool { return sleepers() == 2 })
		require.NoError(t, cmd.Process.Kill())
		cmd.Wait()
		w.eventually("both are gone", func() bool { return sleepers() == 0 })
		requireReady(t, w.status())
	})

	w.sub("signals overtake what the command does not read", func(t *testing.T) {
		cmd := w.command("vz", "exec", "-i", "--", "sh", "-c", waits)
		zero, err := os.Open("/dev/zero")
		require.NoError(t, err)
		defer zero.Close()
		cmd.Stdin = zero
		stdout, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		out := bufio.NewReader(stdout)
		expect(t, out, "ready")
		time.Sleep(time.Second) // until every buffer on the way is full
		require.NoError(t, cmd.Process.Signal(os.Interrupt))
		expect(t, out, "caught")
		assert.Equal(t, 7, w.wait(cmd, cmd.Wait()))
	})

	w.sub("who stops reading ends the command", func(t *testing.T) {
		assert.Equal(t, "y\n", w.must("sh", "-c", "vz exec -- yes | head -n 1"))
		w.eventually("yes is gone", func() bool {
			return len(w.find(func(p process) bool { return p.args[0] == "yes" })) == 0
		})
	})

	w.sub("64 at once", func(t *testing.T) {
		results := make([]result, 64)
		var all sync.WaitGroup
		for i := range results {
			all.Go(func() {
				results[i] = w.tryExec("one", "sh", "-c", fmt.Sprintf("sleep 0.2; echo out %d; echo err %d >&2; exit %d", i, i, i))
			})
		}
		all.Wait()
		for i, r := range results {
			assert.Equal(t, result{fmt.Sprintf("out %d\n", i), fmt.Sprintf("err %d\n", i), i}, r)
		}
	})

	w.sub("1 GiB through stdout does not grow memory", func(t *testing.T) {
		const size = 1 << 30
		watched := w.find(func(p process) bool { return p.supervisor() || p.agent() })
		require.Len(t, watched, 2)
		before := map[int]int{}
		for _, p := range watched {
			before[p.pid] = residentPeak(t, p.pid, true)
		}
		zero := strings.Repeat("0", 32)
		cmd := w.command("vz", "exec", "--", "sh", "-c",
			fmt.Sprintf("head -c %d /dev/zero | openssl enc -aes-128-ctr -bufsize 1048576 -nosalt -K %s -iv %s", size, zero, zero))
		hash := sha256.New()
		counted := &counter{w: hash}
		cmd.Stdout = counted
		require.NoError(t, cmd.Run())
		assert.Equal(t, size, counted.n)
		assert.Equal(t, keystream(t, size), hash.Sum(nil), "no byte is lost, changed or moved")
		for _, p := range watched {
			grown := residentPeak(t, p.pid, false) - before[p.pid]
			t.Logf("%s grew by %d KiB", p.args[0], grown)
			assert.Less(t, grown, 64<<10, "KiB of %s", p.args[0])
		}
	})
}

// expect reads lines until one ends in text; a terminal echoes what is typed.
func expect(t *testing.T, out *bufio.Reader, text string) {
	t.Helper()
	var seen []string
	for {
		line, err := out.ReadString('\n')
		if strings.HasSuffix(strings.TrimSpace(line), text) {
			return
		}
		seen = append(seen, line)
		require.NoError(t, err, "waiting for %q, saw %q", text, seen)
	}
}

type counter struct {
	w io.Writer
	n int
}

func (c *counter) Write(p []byte) (int, error) {
	c.n += len(p)
	return c.w.Write(p)
}

// keystream is the hash of AES-128-CTR of zeros with a key of zeros.
func keystream(t *testing.T, size int64) []byte {
	t.Helper()
	block, err := aes.NewCipher(make([]byte, 16))
	require.NoError(t, err)
	hash := sha256.New()
	stream := cipher.StreamReader{S: cipher.NewCTR(block, make([]byte, 16)), R: zeros{}}
	_, err = io.CopyN(hash, stream, size)
	require.NoError(t, err)
	return hash.Sum(nil)
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// residentPeak is the most memory that a process has had resident, in KiB;
// anew forgets what it was so far.
func residentPeak(t *testing.T, pid int, anew bool) int {
	t.Helper()
	if anew {
		require.NoError(t, os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0))
	}
	for line := range lines(fmt.Sprintf("/proc/%d/status", pid)) {
		if fields := strings.Fields(line); fields[0] == "VmHWM:" {
			n, err := strconv.Atoi(fields[1])
			require.NoError(t, err)
			return n
		}
	}
	require.Fail(t, "no VmHWM", "process %d", pid)
	return 0
}

// exec on a stopped Environment brings up the Machine it needs, and no other.
func TestExecBringsUpOneMachine(t *testing.T) {
	t.Parallel()
	w := newWorld(t, project(map[string]config.Machine{"a": host("net"), "b": host("net")}))
	w.vz("up", "--environment", "blue")
	w.vz("stop")
	require.Equal(t, "here\n", w.exec("b", "echo", "here"))
	e := w.status()
	assert.Equal(t, vzv1.EnvironmentState_ENVIRONMENT_STATE_DEGRADED, e.GetState())
	a, b := machine(t, e, "a"), machine(t, e, "b")
	assert.Equal(t, vzv1.MachineState_MACHINE_STATE_STOPPED, a.GetState())
	assert.Equal(t, vzv1.Health_HEALTH_INACTIVE, a.GetHealth())
	assert.Equal(t, vzv1.Health_HEALTH_SUPERVISED, b.GetHealth())
	incarnation := b.GetIncarnation()
	w.vz("up")
	e = w.status()
	requireReady(t, e)
	assert.Equal(t, incarnation, machine(t, e, "b").GetIncarnation(), "up leaves it as it is")

	r := w.run("vz", "exec", "--", "true")
	assert.Equal(t, 125, r.code)
	assert.Contains(t, r.err, "several", "two Machines and no default")
	cmd := w.command("vz", "exec", "--", "uname", "-n")
	cmd.Env = append(cmd.Env, "VZ_MACHINE_ID="+a.GetMachineId())
	assert.Equal(t, "a\n", w.finish(cmd).out)
	cmd = w.command("vz", "exec", "--", "uname", "-n")
	cmd.Env = append(cmd.Env, "VZ_MACHINE_ID=a")
	assert.Equal(t, 125, w.finish(cmd).code, "an ID is required there")
}
