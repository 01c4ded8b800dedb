//go:build linux

package agent

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"

	connectrpc "connectrpc.com/connect"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/sys/unix"

	"vz.test/vz/guest/wire"
	"vz.test/vz/guest/wire/wireconnect"
)

func call[T any](m *T) *connectrpc.Request[T] { return connectrpc.NewRequest(m) }

// rawClient speaks the messages without a Session.
func rawClient(t testing.TB, conn net.Conn) (client wireconnect.GuestServiceClient, close func()) {
	h, err := (&http2.Transport{AllowHTTP: true}).NewClientConn(conn)
	require.NoError(t, err)
	return wireconnect.NewGuestServiceClient(&http.Client{Transport: h}, "http://guest"), func() { h.Close() }
}

func numbers(t testing.TB, s string) (n []int) {
	for _, f := range regexp.MustCompile(`\d+`).FindAllString(s, -1) {
		i, err := strconv.Atoi(f)
		require.NoError(t, err)
		n = append(n, i)
	}
	return n
}

func TestExecStatus(t *testing.T) {
	s := session(t, Options{})
	dir := t.TempDir()
	file := func(name, content string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(content), mode))
		return path
	}
	plain := file("plain", "echo no\n", 0o644)
	noInterpreter := file("nointerpreter", "#!/nonexistent/sh\n", 0o755)
	garbage := file("garbage", "\x00\x01\x02", 0o755)
	file("tool", "#!/bin/sh\necho tool $0 $1\n", 0o755)

	for name, c := range map[string]struct {
		start  *wire.ExecStart
		code   int32
		signal unix.Signal
		failed wire.ExecFailed_Reason
		stdout string
	}{
		"zero":              {start: sh("exit 0")},
		"code":              {start: sh("exit 7"), code: 7},
		"code 255":          {start: sh("exit 255"), code: 255},
		"signal":            {start: sh("kill -TERM $$"), signal: unix.SIGTERM},
		"core signal":       {start: sh("ulimit -c 0; kill -SEGV $$"), signal: unix.SIGSEGV},
		"not found":         {start: &wire.ExecStart{Argv: []string{"no-such-command"}}, failed: wire.ExecFailed_REASON_NOT_FOUND},
		"path not found":    {start: &wire.ExecStart{Argv: []string{"/no/such"}}, failed: wire.ExecFailed_REASON_NOT_FOUND},
		"below a file":      {start: &wire.ExecStart{Argv: []string{plain + "/x"}}, failed: wire.ExecFailed_REASON_NOT_FOUND},
		"not executable":    {start: &wire.ExecStart{Argv: []string{plain}}, failed: wire.ExecFailed_REASON_NOT_EXECUTABLE},
		"directory":         {start: &wire.ExecStart{Argv: []string{dir}}, failed: wire.ExecFailed_REASON_NOT_EXECUTABLE},
		"no interpreter":    {start: &wire.ExecStart{Argv: []string{noInterpreter}}, failed: wire.ExecFailed_REASON_NOT_EXECUTABLE},
		"not a program":     {start: &wire.ExecStart{Argv: []string{garbage}}, failed: wire.ExecFailed_REASON_NOT_EXECUTABLE},
		"nothing":           {start: &wire.ExecStart{}, failed: wire.ExecFailed_REASON_OTHER},
		"NUL":               {start: &wire.ExecStart{Argv: []string{"/bin/echo", "a\x00b"}}, failed: wire.ExecFailed_REASON_OTHER},
		"bad variable":      {start: &wire.ExecStart{Argv: []string{"true"}, Env: map[string]string{"A=B": "c"}}, failed: wire.ExecFailed_REASON_OTHER},
		"no directory":      {start: &wire.ExecStart{Argv: []string{"true"}, Cwd: "/no/such"}, failed: wire.ExecFailed_REASON_OTHER},
		"directory is file": {start: &wire.ExecStart{Argv: []string{"true"}, Cwd: plain}, failed: wire.ExecFailed_REASON_OTHER},
		"PATH inside": {start: &wire.ExecStart{Argv: []string{"tool", "x"}, Env: map[string]string{"PATH": "/nonexistent:" + dir}},
			stdout: "tool " + dir + "/tool x\n"},
		"PATH past what is not executable": {start: &wire.ExecStart{Argv: []string{"plain"}, Env: map[string]string{"PATH": dir}}, failed: wire.ExecFailed_REASON_NOT_EXECUTABLE},
		"relative to cwd":                  {start: &wire.ExecStart{Argv: []string{"./tool", "y"}, Cwd: dir}, stdout: "tool " + dir + "/tool y\n"},
		"cwd":                              {start: &wire.ExecStart{Argv: []string{"pwd"}, Cwd: "/usr"}, stdout: "/usr\n"},
		"environment": {start: &wire.ExecStart{Argv: []string{"/bin/sh", "-c", "echo $HOME $LANG $X ${TERM-no}"}, Env: map[string]string{"X": "y z"}},
			stdout: "/root C.UTF-8 y z no\n"},
		"no environment of the agent's": {start: sh("echo ${VZ_TEST_SECRET-none}"), stdout: "none\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("VZ_TEST_SECRET", "seen")
			r := execute(s, c.start, nil)
			require.NoError(t, r.err)
			assert.Equal(t, c.stdout, string(r.stdout))
			if c.failed != 0 {
				require.Nil(t, r.exited)
				assert.Equal(t, c.failed, r.failed.GetReason(), "%s", r.failed)
				assert.NotEmpty(t, r.failed.GetMessage())
				return
			}
			require.NotNil(t, r.exited, "%s", r.failed)
			assert.Equal(t, c.code, r.exited.GetCode(), "%s", r.stderr)
			assert.EqualValues(t, c.signal, r.exited.GetSignal())
		})
	}
}

func TestExecStreams(t *testing.T) {
	s := session(t, Options{})
	t.Run("apart", func(t *testing.T) {
		r := execute(s, sh("echo out; echo err >&2"), nil)
		assert.Equal(t, "out\n", string(r.stdout))
		assert.Equal(t, "err\n", string(r.stderr))
	})
	t.Run("no stdin", func(t *testing.T) {
		assert.Equal(t, "0\n", string(execute(s, sh("wc -c"), nil).stdout))
	})
	t.Run("half-close", func(t *testing.T) {
		c := converse(t, s, &wire.ExecStart{Argv: []string{"sh", "-c", "cat; echo after"}, Stdin: true})
		c.requests <- input([]byte("one\n"))
		c.until(t, func(o string) bool { return o == "one\n" })
		c.requests <- input([]byte("two\n"))
		c.until(t, func(o string) bool { return o == "one\ntwo\n" })
		c.requests <- &wire.ExecRequest{Input: &wire.ExecRequest_StdinEof{StdinEof: &wire.StdinEOF{}}}
		<-c.done
		assert.NoError(t, c.err)
		assert.Equal(t, "one\ntwo\nafter\n", string(c.stdout))
	})
	t.Run("stdin that nobody reads", func(t *testing.T) {
		r := execute(s, sh("exec <&-; echo done"), make([]byte, 8<<20))
		assert.NoError(t, r.err)
		assert.Equal(t, "done\n", string(r.stdout))
	})
	t.Run("binary", func(t *testing.T) {
		// Both ways at once, and more than all windows and pipes together.
		data := make([]byte, 64<<20)
		rand.NewChaCha8([32]byte{1}).Read(data)
		r := execute(s, &wire.ExecStart{Argv: []string{"cat"}}, data)
		require.NoError(t, r.err)
		assert.Equal(t, sha256.Sum256(data), sha256.Sum256(r.stdout))
	})
	t.Run("last words of the background", func(t *testing.T) {
		r := execute(s, sh("(head -c 1000000 /dev/zero) & exit 0"), nil)
		assert.Len(t, r.stdout, 1000000)
	})
	t.Run("a process left behind holds nothing up", func(t *testing.T) {
		r := execute(s, sh("sleep 1000 & echo $!"), nil)
		require.NoError(t, r.err)
		require.Zero(t, r.exited.GetCode())
		pid := numbers(t, string(r.stdout))[0]
		assert.NoError(t, unix.Kill(pid, 0), "it lives on")
		unix.Kill(pid, unix.SIGKILL)
	})
	t.Run("a process left behind is not killed by its output", func(t *testing.T) {
		done := filepath.Join(t.TempDir(), "done")
		r := execute(s, sh(fmt.Sprintf("(sleep 1; head -c 200000 /dev/zero && echo ok >%s.new && mv %[1]s.new %[1]s) & exit 0", done)), nil)
		require.NoError(t, r.err)
		assert.Empty(t, r.stdout)
		require.Zero(t, execute(s, sh("while ! test -e "+done+"; do sleep 0.02; done"), nil).exited.GetCode())
	})
}

// TestExecGigabyte is the promise: 1 GiB through stdout, bit by bit, without
// growth in memory on either side.
func TestExecGigabyte(t *testing.T) {
	if testing.Short() {
		t.Skip("short")
	}
	s := session(t, Options{})
	const size = 1 << 30
	requests := []*wire.ExecRequest{begin(sh("yes 0123456789abcde | head -c " + strconv.Itoa(size)))}
	line := []byte("0123456789abcde\n")
	pattern := bytes.Repeat(line, wire.ChunkBytes/len(line)+1)
	var total int
	var peak uint64
	runtime.GC() // what other tests left
	var exit *wire.ExecExited
	err := s.Exec(t.Context(), func() (*wire.ExecRequest, error) {
		if len(requests) == 0 {
			return nil, io.EOF
		}
		r := requests[0]
		requests = nil
		return r, nil
	}, func(m *wire.ExecResponse) error {
		p := m.GetStdout()
		if at := total % len(line); !bytes.Equal(p, pattern[at:at+len(p)]) {
			return fmt.Errorf("differs after byte %d", total)
		}
		if total>>26 != (total+len(p))>>26 { // every 64 MiB
			var stats runtime.MemStats
			runtime.ReadMemStats(&stats)
			peak = max(peak, stats.HeapInuse+stats.StackInuse)
		}
		total += len(p)
		if m.GetExited() != nil {
			exit = m.GetExited()
		}
		return nil
	})
	require.NoError(t, err)
	assert.Equal(t, size, total)
	assert.Zero(t, exit.GetCode())
	assert.Less(t, peak, uint64(64<<20), "of both sides, which are this process")
}

func TestExecSlowReader(t *testing.T) {
	s := session(t, Options{})
	// Nobody takes this one's output; its neighbours are not held up, and it
	// ends when cancelled.
	ctx, cancel := context.WithCancel(t.Context())
	stalled := make(chan error, 1)
	first := make(chan struct{})
	go func() {
		sent := false
		var once sync.Once
		stalled <- s.Exec(ctx, func() (*wire.ExecRequest, error) {
			if sent {
				return nil, io.EOF
			}
			sent = true
			return begin(&wire.ExecStart{Argv: []string{"yes"}}), nil
		}, func(m *wire.ExecResponse) error {
			if m.GetStdout() != nil {
				once.Do(func() { close(first) })
				<-ctx.Done()
			}
			return nil
		})
	}()
	<-first
	r := execute(s, sh("head -c 16777216 /dev/zero"), nil)
	assert.Len(t, r.stdout, 16<<20)
	cancel()
	assert.ErrorIs(t, <-stalled, context.Canceled)
}

func TestExecParallel(t *testing.T) {
	s := session(t, Options{})
	var all sync.WaitGroup
	for i := range 64 {
		all.Go(func() {
			data := bytes.Repeat([]byte{byte(i)}, 256<<10)
			r := execute(s, &wire.ExecStart{Argv: []string{"sh", "-c", "cat; echo " + strconv.Itoa(i) + " >&2; exit " + strconv.Itoa(i)}}, data)
			assert.NoError(t, r.err)
			assert.True(t, bytes.Equal(data, r.stdout))
			assert.Equal(t, strconv.Itoa(i)+"\n", string(r.stderr))
			assert.EqualValues(t, i, r.exited.GetCode())
		})
	}
	all.Wait()
}

func TestExecSignal(t *testing.T) {
	s := session(t, Options{})
	signal := func(n unix.Signal) *wire.ExecRequest {
		return &wire.ExecRequest{Input: &wire.ExecRequest_Signal{Signal: int32(n)}}
	}
	t.Run("reaches the whole group", func(t *testing.T) {
		c := converse(t, s, sh(`trap 'wait; echo parent; exit 3' USR1; (trap 'echo child; exit' USR1; echo up; while :; do sleep 0.01; done) & wait`))
		c.until(t, func(o string) bool { return o == "up\n" })
		c.requests <- signal(unix.SIGUSR1)
		<-c.done
		require.NoError(t, c.err)
		assert.Contains(t, string(c.stdout), "child\nparent\n")
		assert.EqualValues(t, 3, c.exited.GetCode())
	})
	t.Run("past stdin that nobody reads", func(t *testing.T) {
		c := converse(t, s, &wire.ExecStart{Argv: []string{"sh", "-c", "echo up; exec sleep 1000"}, Stdin: true})
		c.until(t, func(o string) bool { return o == "up\n" })
		for range wire.StdinWindow / wire.ChunkBytes {
			c.requests <- input(make([]byte, wire.ChunkBytes))
		}
		c.requests <- signal(unix.SIGTERM)
		<-c.done
		assert.EqualValues(t, unix.SIGTERM, c.exited.GetSignal())
	})
	t.Run("no such signal", func(t *testing.T) {
		c := converse(t, s, sh("echo up; read x; exit 4"))
		for _, n := range []int32{0, -9, 65, 1 << 30} {
			c.requests <- signal(unix.Signal(n))
		}
		<-c.done
		assert.EqualValues(t, 4, c.exited.GetCode())
	})
}

func TestExecStdinTaken(t *testing.T) {
	s := session(t, Options{})
	c := converse(t, s, &wire.ExecStart{Argv: []string{"sh", "-c", "wc -c"}, Stdin: true})
	const size = 4 * wire.StdinWindow
	for range size / wire.ChunkBytes {
		c.requests <- input(make([]byte, wire.ChunkBytes))
	}
	c.mu.Lock()
	for c.taken < size {
		c.seen.Wait()
	}
	c.mu.Unlock()
	close(c.requests)
	<-c.done
	assert.Equal(t, fmt.Sprintln(size), string(c.stdout))
}

func TestExecTerminal(t *testing.T) {
	s := session(t, Options{})
	size := func(rows, columns uint32) *wire.WindowSize { return &wire.WindowSize{Rows: rows, Columns: columns} }
	t.Run("size at once", func(t *testing.T) {
		r := execute(s, &wire.ExecStart{Argv: []string{"stty", "size"}, Tty: size(51, 173)}, nil)
		assert.Equal(t, "51 173\r\n", string(r.stdout))
		assert.Empty(t, r.stderr)
	})
	t.Run("controlling terminal", func(t *testing.T) {
		r := execute(s, &wire.ExecStart{Argv: []string{"sh", "-c", "tty >/dev/null && echo hello >/dev/tty; echo $TERM >&2"}, Tty: size(24, 80)}, nil)
		assert.Equal(t, "hello\r\nxterm-256color\r\n", string(r.stdout))
	})
	t.Run("resize", func(t *testing.T) {
		c := converse(t, s, &wire.ExecStart{Argv: []string{"bash", "-c", `trap 'stty size; exit' WINCH; stty size; while :; do sleep 0.01; done`}, Tty: size(24, 80)})
		c.until(t, func(o string) bool { return o == "24 80\r\n" })
		c.requests <- &wire.ExecRequest{Input: &wire.ExecRequest_Resize{Resize: size(30, 100)}}
		<-c.done
		assert.Equal(t, "24 80\r\n30 100\r\n", string(c.stdout))
	})
	t.Run("control characters", func(t *testing.T) {
		c := converse(t, s, &wire.ExecStart{Argv: []string{"sh", "-c", "echo up; exec cat"}, Tty: size(24, 80)})
		c.until(t, func(o string) bool { return strings.HasSuffix(o, "up\r\n") })
		c.requests <- input([]byte{3})
		<-c.done
		assert.EqualValues(t, unix.SIGINT, c.exited.GetSignal())
	})
	for _, typed := range []string{"", "whole\n", "part"} {
		t.Run("end of input after "+strconv.Quote(typed), func(t *testing.T) {
			r := execute(s, &wire.ExecStart{Argv: []string{"sh", "-c", "stty -echo; cat; echo end"}, Tty: size(24, 80)}, []byte(typed))
			require.NoError(t, r.err)
			assert.Zero(t, r.exited.GetCode())
			assert.Contains(t, string(r.stdout), strings.ReplaceAll(typed, "\n", "\r\n"))
			assert.True(t, strings.HasSuffix(string(r.stdout), "end\r\n"), "%q", r.stdout)
		})
	}
	t.Run("all of a long output", func(t *testing.T) {
		r := execute(s, &wire.ExecStart{Argv: []string{"sh", "-c", "stty -opost; head -c 4000000 /dev/zero"}, Tty: size(24, 80)}, nil)
		assert.Len(t, r.stdout, 4000000)
	})
	t.Run("leaves and comes back", func(t *testing.T) {
		r := execute(s, &wire.ExecStart{Argv: []string{"sh", "-c", "exec <&- >&- 2>&-; sleep 0.1; echo back >/dev/tty"}, Tty: size(24, 80)}, nil)
		assert.EqualValues(t, 0, r.exited.GetCode())
	})
}

func TestExecCancel(t *testing.T) {
	s := session(t, Options{})
	for name, c := range map[string]*wire.ExecStart{
		"grandchildren":      sh(`sh -c 'sh -c "echo \$\$; exec sleep 1000" & echo $$; wait' & echo $$; wait`),
		"that mind no TERM":  sh(`trap "" TERM HUP; sh -c 'echo $$; while :; do sleep 0.1; done' & echo $$; sh -c 'echo $$; while :; do sleep 0.1; done'`),
		"jobs of a terminal": {Argv: []string{"bash", "-c", "set -m; sh -c 'echo $$; exec sleep 1000' & sh -c 'echo $$; exec sleep 1000' & echo $$; wait"}, Tty: &wire.WindowSize{Rows: 1, Columns: 1}},
		"stopped":            sh(`sh -c 'echo $$; kill -STOP $$' & echo $$; sh -c 'echo $$; exec sleep 1000'`),
		"full pipe":          {Argv: []string{"sh", "-c", "echo $$; (echo 1; echo 2) | cat >/dev/null; echo $$; echo $$; sleep 1000"}, Stdin: true},
	} {
		t.Run(name, func(t *testing.T) {
			c := converse(t, s, c)
			c.until(t, func(o string) bool { return strings.Count(o, "\n") == 3 })
			pids := numbers(t, string(c.output))
			c.cancel()
			<-c.done
			assert.ErrorIs(t, c.err, context.Canceled)
			for _, pid := range pids {
				await(1<<62, func() bool { return ended(pid) })
			}
		})
	}
}

func ended(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(stat), ") Z ")
}

func BenchmarkExecStdout(b *testing.B) {
	s := session(b, Options{})
	const size = 256 << 20
	b.SetBytes(size)
	for b.Loop() {
		n := 0
		sent := false
		err := s.Exec(b.Context(), func() (*wire.ExecRequest, error) {
			if sent {
				return nil, io.EOF
			}
			sent = true
			return begin(sh("head -c " + strconv.Itoa(size) + " /dev/zero")), nil
		}, func(m *wire.ExecResponse) error {
			n += len(m.GetStdout())
			return nil
		})
		require.NoError(b, err)
		require.Equal(b, size, n)
	}
}
