//go:build linux

package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"vz.test/vz/guest"
	"vz.test/vz/guest/wire"
)

func declared(name, script string, restart wire.RestartPolicy) *wire.ProcessSpec {
	return &wire.ProcessSpec{Name: name, Command: []string{"/bin/sh", "-c", script}, Restart: restart}
}

const (
	never     = wire.RestartPolicy_RESTART_POLICY_NEVER
	onFailure = wire.RestartPolicy_RESTART_POLICY_ON_FAILURE
	always    = wire.RestartPolicy_RESTART_POLICY_ALWAYS
)

var errEnough = errors.New("enough")

// watch waits until a process is in a state that f accepts.
func watch(t *testing.T, s *guest.Session, name string, f func(*wire.ProcessStatus) bool) (found *wire.ProcessStatus) {
	t.Helper()
	var seen []string
	err := s.WatchProcesses(t.Context(), func(p *wire.ProcessStatus) error {
		if p.GetName() == name {
			seen = append(seen, p.String())
			if f(p) {
				found = p
				return errEnough
			}
		}
		return nil
	})
	require.ErrorIs(t, err, errEnough, "saw %v", seen)
	return found
}

func in(states ...wire.ProcessStatus_State) func(*wire.ProcessStatus) bool {
	return func(p *wire.ProcessStatus) bool {
		for _, s := range states {
			if p.GetState() == s {
				return true
			}
		}
		return false
	}
}

func logs(t *testing.T, s *guest.Session, request *wire.LogsRequest) (out, errs string) {
	t.Helper()
	require.NoError(t, s.Logs(t.Context(), request, func(c *wire.LogChunk) error {
		if c.GetStderr() {
			errs += string(c.GetData())
		} else {
			out += string(c.GetData())
		}
		return nil
	}))
	return out, errs
}

func TestProcessEnds(t *testing.T) {
	s := session(t, Options{})
	require.NoError(t, s.SetProcesses(t.Context(), []*wire.ProcessSpec{
		declared("good", "echo out; echo err >&2", onFailure),
		declared("bad", "exit 9", never),
		declared("killed", "kill -KILL $$", never),
		{Name: "missing", Command: []string{"no-such-command"}},
	}))
	good := watch(t, s, "good", in(wire.ProcessStatus_STATE_EXITED))
	assert.Zero(t, good.GetPid())
	bad := watch(t, s, "bad", in(wire.ProcessStatus_STATE_FAILED))
	assert.EqualValues(t, 9, bad.GetExitCode())
	assert.Equal(t, "exited with status 9", bad.GetMessage())
	assert.EqualValues(t, 9, watch(t, s, "killed", in(wire.ProcessStatus_STATE_FAILED)).GetSignal())
	missing := watch(t, s, "missing", in(wire.ProcessStatus_STATE_FAILED))
	assert.EqualValues(t, 127, missing.GetExitCode())
	assert.Equal(t, "no-such-command: command not found", missing.GetMessage())

	out, errs := logs(t, s, &wire.LogsRequest{Process: "good"})
	assert.Equal(t, "out\n", out)
	assert.Equal(t, "err\n", errs)
	assert.ErrorContains(t, s.Logs(t.Context(), &wire.LogsRequest{Process: "other"}, nil), `no process "other"`)
}

func TestProcessRestarts(t *testing.T) {
	s := session(t, Options{})
	count := filepath.Join(t.TempDir(), "count")
	script := fmt.Sprintf(`echo x >>%s; n=$(wc -l <%[1]s); echo run $n; test $n -ge 3 && exit 0; exit 1`, count)
	require.NoError(t, s.SetProcesses(t.Context(), []*wire.ProcessSpec{declared("p", script, onFailure)}))
	p := watch(t, s, "p", in(wire.ProcessStatus_STATE_EXITED))
	assert.EqualValues(t, 2, p.GetRestarts())
	out, _ := logs(t, s, &wire.LogsRequest{Process: "p"})
	assert.Equal(t, "run 1\nrun 2\nrun 3\n", out, "the log goes on across restarts")

	require.NoError(t, s.SetProcesses(t.Context(), []*wire.ProcessSpec{declared("p", "exit 0", always)}))
	p = watch(t, s, "p", func(p *wire.ProcessStatus) bool { return p.GetRestarts() >= 2 })
	p = watch(t, s, "p", in(wire.ProcessStatus_STATE_BACKOFF))
	assert.Contains(t, p.GetMessage(), "starting again in ")
}

func TestBackoff(t *testing.T) {
	var pause time.Duration
	var all []time.Duration
	for range 9 {
		pause = backoff(pause, 0)
		all = append(all, pause/time.Millisecond)
	}
	assert.Equal(t, []time.Duration{100, 200, 400, 800, 1600, 3200, 6400, 10000, 10000}, all)
	assert.Equal(t, backoffFirst, backoff(pause, steady), "it has shown that it can")
	assert.Equal(t, backoffLast, backoff(pause, steady-1))
}

func TestSetProcesses(t *testing.T) {
	s := session(t, Options{})
	keep := declared("keep", "sleep 1000", always)
	change := declared("change", "trap 'echo bye; exit 0' TERM; echo one; sleep 1000 & wait", always)
	remove := declared("remove", "sh -c 'trap \"\" TERM; sleep 1000' & echo $!; wait", always)
	require.NoError(t, s.SetProcesses(t.Context(), []*wire.ProcessSpec{keep, change, remove}))
	running := in(wire.ProcessStatus_STATE_RUNNING)
	kept := watch(t, s, "keep", running).GetPid()
	changed := watch(t, s, "change", running).GetPid()
	watch(t, s, "remove", running)
	await(1<<62, func() bool {
		a, _ := logs(t, s, &wire.LogsRequest{Process: "change"})
		b, _ := logs(t, s, &wire.LogsRequest{Process: "remove"})
		return a == "one\n" && strings.HasSuffix(b, "\n")
	})
	out, _ := logs(t, s, &wire.LogsRequest{Process: "remove"})
	background := numbers(t, out)[0]

	// A watcher sees the removed one stop, and a follower of its log the end.
	stopped := make(chan *wire.ProcessStatus, 1)
	watching := make(chan struct{}, 16)
	go s.WatchProcesses(t.Context(), func(p *wire.ProcessStatus) error {
		watching <- struct{}{}
		if p.GetName() == "remove" && p.GetState() == wire.ProcessStatus_STATE_STOPPED {
			stopped <- p
			return errEnough
		}
		return nil
	})
	<-watching
	followed := make(chan error, 1)
	following := make(chan struct{}, 16)
	go func() {
		followed <- s.Logs(context.Background(), &wire.LogsRequest{Process: "remove", Follow: true}, func(*wire.LogChunk) error {
			following <- struct{}{}
			return nil
		})
	}()
	<-following

	change = declared("change", "echo two; sleep 1000", always)
	require.NoError(t, s.SetProcesses(t.Context(), []*wire.ProcessSpec{keep, change}))
	<-stopped
	assert.NoError(t, <-followed)
	await(1<<62, func() bool { return ended(background) })
	assert.Equal(t, kept, watch(t, s, "keep", running).GetPid(), "the unchanged one is left alone")
	assert.NotEqual(t, changed, watch(t, s, "change", running).GetPid())
	await(1<<62, func() bool {
		out, _ := logs(t, s, &wire.LogsRequest{Process: "change"})
		return out == "one\nbye\ntwo\n"
	})

	for name, specs := range map[string][]*wire.ProcessSpec{
		"no name":    {{Command: []string{"true"}}},
		"no command": {{Name: "a"}},
		"twice":      {keep, keep},
		"port":       {{Name: "a", Command: []string{"true"}, ReadyTcpPort: 65536}},
	} {
		assert.Error(t, s.SetProcesses(t.Context(), specs), name)
	}
	assert.Equal(t, kept, watch(t, s, "keep", running).GetPid(), "a refused request changes nothing")
}

func TestProcessReady(t *testing.T) {
	s := session(t, Options{})
	// A port that is free now, to be listened on later by this test.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := l.Addr().String()
	_, text, _ := net.SplitHostPort(address)
	port, err := strconv.ParseUint(text, 10, 16)
	require.NoError(t, err)
	assert.True(t, listening(uint32(port)))
	l.Close()
	assert.False(t, listening(uint32(port)))

	p := declared("p", "sleep 1000", never)
	p.ReadyTcpPort = uint32(port)
	require.NoError(t, s.SetProcesses(t.Context(), []*wire.ProcessSpec{p}))
	starting := watch(t, s, "p", in(wire.ProcessStatus_STATE_STARTING))
	assert.NotZero(t, starting.GetPid())
	l, err = net.Listen("tcp", address)
	require.NoError(t, err)
	defer l.Close()
	assert.Equal(t, starting.GetPid(), watch(t, s, "p", in(wire.ProcessStatus_STATE_RUNNING)).GetPid())
}

func TestLogsFollow(t *testing.T) {
	s := session(t, Options{})
	gate := filepath.Join(t.TempDir(), "gate")
	require.NoError(t, s.SetProcesses(t.Context(), []*wire.ProcessSpec{
		declared("p", "echo first; while ! test -e "+gate+"; do sleep 0.01; done; echo second", never)}))
	var got string
	err := s.Logs(t.Context(), &wire.LogsRequest{Process: "p", Follow: true}, func(c *wire.LogChunk) error {
		got += string(c.GetData())
		if got == "first\n" {
			execute(s, sh("touch "+gate), nil)
		}
		if got == "first\nsecond\n" {
			return errEnough
		}
		return nil
	})
	assert.ErrorIs(t, err, errEnough)
	out, _ := logs(t, s, &wire.LogsRequest{Process: "p", TailBytes: 4})
	assert.Equal(t, "ond\n", out)
}

func TestBook(t *testing.T) {
	b := newBook()
	read := func(at uint64) (all []byte) {
		for {
			m, next, _ := b.read(at)
			if m == nil {
				return all
			}
			all, at = append(all, m.GetData()...), next
		}
	}
	var want []byte
	for i := range 3 * logBytes / 1000 {
		p := bytes.Repeat([]byte{byte(i)}, 1000)
		b.write(p, i%7 == 0)
		want = append(want, p...)
	}
	got := read(0)
	assert.GreaterOrEqual(t, len(got), logBytes)
	assert.LessOrEqual(t, len(got), logBytes+logChunk)
	assert.True(t, bytes.HasSuffix(want, got))
	assert.Equal(t, want[len(want)-5000:], read(b.tail(5000)))
	assert.Len(t, read(b.tail(1<<40)), len(got))

	m, next, _ := b.read(b.end - 10)
	b.write([]byte("more"), false)
	assert.Len(t, m.GetData(), 10, "what was handed out stays as it was")
	assert.Equal(t, "more", string(read(next)))
	for i := range 100000 {
		b.write([]byte{byte(i)}, false)
	}
	assert.LessOrEqual(t, len(b.chunks), 2*logBytes/logChunk+2*logBytes/1000)

	_, _, changed := b.read(b.end)
	b.close()
	<-changed
	_, _, changed = b.read(b.end)
	assert.Nil(t, changed)
}
