package registry

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"vz.test/vz/internal/durable"
	"vz.test/vz/supervisor/api/vzv1"
)

// TestMain is also the other process of tests that need one.
func TestMain(m *testing.M) {
	switch os.Getenv("VZ_TEST_ROLE") {
	case "up":
		otherUp()
	case "own":
		otherOwner()
	case "save":
		otherWriter()
	default:
		goleak.VerifyTestMain(m)
	}
}

// other starts this test binary in a role; what it prints is out.
func other(t *testing.T, role string, args ...string) (cmd *exec.Cmd, out *os.File) {
	t.Helper()
	out, w, err := os.Pipe()
	require.NoError(t, err)
	cmd = exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), "VZ_TEST_ROLE="+role)
	cmd.Stdout, cmd.Stderr = w, os.Stderr
	require.NoError(t, cmd.Start())
	w.Close()
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait(); out.Close() })
	return cmd, out
}

// A home is a state directory of a test's own.
type home struct {
	t        *testing.T
	dir      string
	mu       sync.Mutex
	warnings []error
	*Registry
}

func newHome(t *testing.T) *home {
	t.Helper()
	h := &home{t: t, dir: t.TempDir()}
	h.Registry = h.another()
	return h
}

func environ(dir string) func(string) string {
	return func(key string) string {
		return map[string]string{"XDG_STATE_HOME": filepath.Join(dir, "state"), "HOME": dir}[key]
	}
}

// another is a Registry of the same directory, as another process has.
func (h *home) another() *Registry {
	h.t.Helper()
	r, err := open(Options{Getenv: environ(h.dir), Warn: func(err error) {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.warnings = append(h.warnings, err)
	}}, h.dir, os.Geteuid())
	require.NoError(h.t, err)
	return r
}

// up makes or selects an Environment by name.
func (h *home) up(project, name string, w Worktree) *Selection {
	h.t.Helper()
	s, _, err := h.PrepareUp(UpRequest{Request: Request{Flag: &name, ProjectID: project, Worktree: w}, ProjectName: "shop"})
	require.NoError(h.t, err)
	return s
}

func (h *home) bound(project, name string, w Worktree) *Selection {
	h.t.Helper()
	s := h.up(project, name, w)
	require.NoError(h.t, h.Bind(project, w, s.EnvironmentID))
	return s
}

// files are all that a directory has, relative to it.
func files(t *testing.T, dir string) []string {
	t.Helper()
	var all []string
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if path != dir {
			rel, _ := filepath.Rel(dir, path)
			all = append(all, rel)
		}
		return err
	})
	if !errors.Is(err, fs.ErrNotExist) {
		require.NoError(t, err)
	}
	return all
}

func git(t *testing.T, dir string, args ...string) {
	t.Helper()
	cmd := exec.Command("git", append([]string{"-c", "protocol.file.allow=always", "-c", "user.name=t", "-c", "user.email=t@t.test"}, args...)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "git %v: %s", args, out)
}

// repository is a new one with one commit.
func repository(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "repo")
	require.NoError(t, os.Mkdir(dir, 0o755))
	git(t, dir, "init", "-q")
	git(t, dir, "commit", "-q", "--allow-empty", "-m", "first")
	return dir
}

func worktree(t *testing.T, dir string) Worktree {
	t.Helper()
	w, err := FindWorktree(dir, func(string) string { return "" })
	require.NoError(t, err)
	return w
}

func mustToken(t *testing.T, dir string) string {
	t.Helper()
	key, err := worktree(t, dir).EnsureToken()
	require.NoError(t, err)
	require.NotEmpty(t, key)
	return key
}

func explained(t *testing.T, err error) {
	t.Helper()
	var e Explained
	require.ErrorAs(t, err, &e, "%v", err)
	what, why, _ := e.Explain()
	assert.NotEmpty(t, what)
	assert.NotEmpty(t, why)
}

func TestIDs(t *testing.T) {
	made := make([]string, 1000)
	for i := range made {
		made[i] = NewID(KindEnvironment)
		require.NoError(t, CheckID(made[i], KindEnvironment))
	}
	assert.True(t, slices.IsSorted(made), "in the order in which they were made")
	assert.Len(t, slices.Compact(slices.Clone(made)), len(made))

	for value, want := range map[string]bool{
		"prj_01kbcdefghjkmnpqrstvwxyz01":  true,
		"mch_7zzzzzzzzzzzzzzzzzzzzzzzzz":  true,
		"mch_8zzzzzzzzzzzzzzzzzzzzzzzzz":  false, // more than 128 bits
		"prj_01KBCDEFGHJKMNPQRSTVWXYZ01":  false,
		"prj_01kbcdefghjkmnpqrstvwxyz0":   false,
		"prj_01kbcdefghjkmnpqrstvwxyz011": false,
		"prj_01kbcdefghjkmnpqrstvwxyzil":  false, // no i, l, o, u
		"vol_01kbcdefghjkmnpqrstvwxyz01":  false,
		"prj":                             false,
		"":                                false,
		"_":                               false,
		"prj_":                            false,
		"../../etc/passwd":                false,
	} {
		_, err := ParseID(value)
		assert.Equal(t, want, err == nil, "%q: %v", value, err)
		if err != nil {
			explained(t, err)
		}
	}
	assert.ErrorContains(t, CheckID("mch_01kbcdefghjkmnpqrstvwxyz01", KindEnvironment), "the ID of a Machine")
}

// The order holds when the clock is set back and when one ms has no room left.
func TestIDsOrder(t *testing.T) {
	moment := time.UnixMilli(1_700_000_000_000)
	g := generator{now: func() time.Time { return moment }, entropy: &full{}}
	first := g.next()
	moment = moment.Add(-time.Hour)
	last := first
	for range 10 {
		next := g.next()
		assert.Greater(t, next, last)
		last = next
	}
}

// full gives the greatest number first, so that the next in that ms overflows.
type full struct{ given bool }

func (f *full) Read(p []byte) (int, error) {
	if f.given {
		return rand.Read(p)
	}
	f.given = true
	for i := range p {
		p[i] = 0xff
	}
	return len(p), nil
}

func TestNames(t *testing.T) {
	for name, want := range map[string]bool{
		"default": true, "a": true, "a-1": true, strings.Repeat("a", 63): true,
		"": false, "-a": false, "a-": false, "A": false, "a_b": false, "a.b": false, "a/b": false, "..": false,
		strings.Repeat("a", 64): false, "a\n": false, "env_01kbcdefghjkmnpqrstvwxyz01": false,
	} {
		assert.Equal(t, want, CheckName(name) == nil, "%q", name)
	}
}

func TestOpen(t *testing.T) {
	tmp := t.TempDir()
	own := filepath.Join(tmp, "run")
	require.NoError(t, os.Mkdir(own, 0o700))
	long := filepath.Join(tmp, strings.Repeat("l", 90))
	require.NoError(t, os.Mkdir(long, 0o700))
	uid := os.Geteuid()
	env := NewID(KindEnvironment)
	for name, c := range map[string]struct {
		env              map[string]string
		uid              int
		root, runtimeDir string
	}{
		"XDG":                 {map[string]string{"XDG_STATE_HOME": "/s", "XDG_RUNTIME_DIR": own, "HOME": "/h"}, uid, "/s/vz", own + "/vz"},
		"home":                {map[string]string{"HOME": "/h"}, uid, "/h/.local/state/vz", fmt.Sprintf("%s/vz-%d", tmp, uid)},
		"runtime is missing":  {map[string]string{"HOME": "/h", "XDG_RUNTIME_DIR": tmp + "/none"}, uid, "/h/.local/state/vz", fmt.Sprintf("%s/vz-%d", tmp, uid)},
		"runtime is relative": {map[string]string{"HOME": "/h", "XDG_RUNTIME_DIR": "run"}, uid, "/h/.local/state/vz", fmt.Sprintf("%s/vz-%d", tmp, uid)},
		"runtime is another user's": {map[string]string{"HOME": "/h", "XDG_RUNTIME_DIR": own}, uid + 1, "/h/.local/state/vz",
			fmt.Sprintf("%s/vz-%d", tmp, uid+1)},
		"state is relative": {map[string]string{"XDG_STATE_HOME": "s", "HOME": "/h"}, uid, "", ""},
		"nothing":           {nil, uid, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := open(Options{Getenv: func(k string) string { return c.env[k] }}, tmp, c.uid)
			if c.root == "" {
				explained(t, err)
				return
			}
			require.NoError(t, err)
			assert.Equal(t, c.root, r.Root())
			assert.Equal(t, c.runtimeDir, r.RuntimeDir())
		})
	}
	t.Run("too long", func(t *testing.T) {
		var dirs []string
		for _, dir := range []string{long, filepath.Join(long, "x")} {
			require.NoError(t, os.MkdirAll(dir, 0o700))
			r, err := open(Options{Getenv: func(k string) string { return map[string]string{"HOME": "/h", "XDG_RUNTIME_DIR": dir}[k] }}, "/tmp", uid)
			require.NoError(t, err)
			assert.Regexp(t, `^/tmp/vz-[0-9]+-[0-9a-f]{8}$`, r.RuntimeDir())
			assert.Less(t, len(r.SocketPath(env)), 104)
			dirs = append(dirs, r.RuntimeDir())
		}
		assert.NotEqual(t, dirs[0], dirs[1])
	})
	// The longest directory that is taken as it is, and one byte more.
	for extra := range 2 {
		dir := filepath.Join("/tmp", fmt.Sprintf("vz-test-%d-", os.Getpid()))
		dir += strings.Repeat("m", maxSocketPath-len("/vz/")-socketName-len(dir)+extra)
		require.NoError(t, os.Mkdir(dir, 0o700))
		t.Cleanup(func() { os.RemoveAll(dir) })
		r, err := open(Options{Getenv: func(k string) string { return map[string]string{"HOME": "/h", "XDG_RUNTIME_DIR": dir}[k] }}, "/tmp", uid)
		require.NoError(t, err)
		assert.Equal(t, extra == 0, strings.HasPrefix(r.RuntimeDir(), dir))
		assert.LessOrEqual(t, len(r.SocketPath(env)), maxSocketPath)
	}
	assert.Empty(t, files(t, own), "nothing is made")
}

// State in a directory that others can enter, or that is another user's, is
// neither read nor written.
func TestDirectoriesAreOurs(t *testing.T) {
	h := newHome(t)
	project := NewID(KindProject)
	s := h.up(project, "a", Worktree{})
	for _, dir := range []string{h.Root(), h.EnvironmentDir(s.EnvironmentID), h.ProjectDir(project)} {
		info, err := os.Stat(dir)
		require.NoError(t, err)
		assert.Equal(t, fs.FileMode(0o700), info.Mode().Perm(), dir)
	}
	for _, path := range []string{h.RecordPath(s.EnvironmentID), h.indexPath(project)} {
		info, err := os.Stat(path)
		require.NoError(t, err)
		assert.Equal(t, fs.FileMode(0o600), info.Mode().Perm(), path)
	}
	require.NoError(t, os.Chmod(h.Root(), 0o755))
	var place *PlaceError
	_, err := h.Record(s.EnvironmentID)
	require.ErrorAs(t, err, &place)
	assert.Contains(t, err.Error(), "chmod 700")
	_, err = h.List("")
	require.ErrorAs(t, err, &place)
	name := "b"
	_, _, err = h.PrepareUp(UpRequest{Request: Request{Flag: &name, ProjectID: project}})
	require.ErrorAs(t, err, &place)
	require.NoError(t, os.Chmod(h.Root(), 0o700))
	if os.Geteuid() == 0 {
		foreign, err := open(Options{Getenv: environ(h.dir)}, h.dir, 12345)
		require.NoError(t, err)
		_, err = foreign.Record(s.EnvironmentID)
		require.ErrorAs(t, err, &place)
	}
	require.NoError(t, os.Symlink("/etc", h.RuntimeDir()))
	owner, err := h.Own(context.Background(), s.EnvironmentID)
	require.NoError(t, err)
	defer owner.Close()
	_, err = owner.Listen()
	require.ErrorAs(t, err, &place, "a link in /tmp is somebody's trap")
}

func TestDocuments(t *testing.T) {
	h := newHome(t)
	s := h.up(NewID(KindProject), "a", Worktree{})
	path := h.RecordPath(s.EnvironmentID)
	record := s.Record
	for i := range 3 {
		record.Revision = uint64(i + 1)
		require.NoError(t, h.Save(record))
	}
	good, err := os.ReadFile(path)
	require.NoError(t, err)
	read := func() (*Record, error) {
		h.warnings = nil
		return h.Record(s.EnvironmentID)
	}
	got, err := read()
	require.NoError(t, err)
	assert.Equal(t, record, got)
	assert.NotContains(t, files(t, h.EnvironmentDir(s.EnvironmentID)), "record.json"+durable.Suffix)

	for name, text := range map[string]string{
		"torn":                 string(good[:len(good)/2]),
		"empty":                "",
		"zeros":                strings.Repeat("\x00", len(good)),
		"no version":           "{}",
		"version 0":            strings.Replace(string(good), `"version": 1`, `"version": 0`, 1),
		"version is text":      strings.Replace(string(good), `"version": 1`, `"version": "1"`, 1),
		"not an ID":            strings.ReplaceAll(string(good), record.ProjectID, "prj_x"),
		"an unknown state":     strings.ReplaceAll(string(good), `"created"`, `"great"`),
		"something else after": string(good) + "{}",
	} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
			got, err := read()
			require.NoError(t, err)
			assert.Equal(t, uint64(2), got.Revision, "the copy before")
			require.Len(t, h.warnings, 1)
			var restored *RestoredError
			require.ErrorAs(t, h.warnings[0], &restored)
			explained(t, h.warnings[0])

			// What is written next does not take the damaged one for a good one.
			require.NoError(t, h.Save(record.Clone()))
			got, err = read()
			require.NoError(t, err)
			assert.Empty(t, h.warnings)
			assert.Equal(t, uint64(3), got.Revision)
			require.NoError(t, os.WriteFile(path, []byte("{"), 0o600))
			got, err = read()
			require.NoError(t, err)
			assert.Equal(t, uint64(2), got.Revision)
			require.NoError(t, os.WriteFile(path, good, 0o600))
		})
	}
	t.Run("newer", func(t *testing.T) {
		newer := strings.Replace(string(good), `"version": 1`, `"version": 2`, 1)
		require.NoError(t, os.WriteFile(path, []byte(newer), 0o600))
		_, err := read()
		var v *NewerVersionError
		require.ErrorAs(t, err, &v)
		assert.Equal(t, 2, v.Found)
		require.ErrorAs(t, h.Save(record.Clone()), &v, "nor is it replaced")
		require.ErrorAs(t, h.Remove("", s.EnvironmentID, nil), &v, "nor removed")
		_, err = h.SelectEnvironment(Request{Env: s.EnvironmentID})
		require.ErrorAs(t, err, &v)
		_, err = h.SelectEnvironment(Request{Flag: ptr("a"), ProjectID: record.ProjectID})
		require.ErrorAs(t, err, &v)
		kept, err := os.ReadFile(path)
		require.NoError(t, err)
		assert.Equal(t, newer, string(kept))
		require.NoError(t, os.WriteFile(path, good, 0o600))
	})
	t.Run("both damaged", func(t *testing.T) {
		require.NoError(t, os.WriteFile(path, []byte("{"), 0o600))
		require.NoError(t, os.WriteFile(path+previousSuffix, []byte("{"), 0o600))
		_, err := read()
		var corrupt *CorruptError
		require.ErrorAs(t, err, &corrupt)
		explained(t, err)
		// It can still be selected, and then deleted.
		for _, q := range []Request{{Flag: ptr("a"), ProjectID: record.ProjectID}, {Flag: &s.EnvironmentID}, {Env: s.EnvironmentID}} {
			found, err := h.SelectEnvironment(q)
			require.NoError(t, err)
			assert.Equal(t, record.ProjectID, found.ProjectID)
			require.ErrorAs(t, found.Err, &corrupt)
		}
		_, _, err = h.PrepareUp(UpRequest{Request: Request{Flag: ptr("a"), ProjectID: record.ProjectID}})
		require.ErrorAs(t, err, &corrupt, "nor is it overwritten")
		require.NoError(t, h.Remove(record.ProjectID, s.EnvironmentID, nil))
		assert.Empty(t, files(t, h.Root()))
	})
}

func ptr(s string) *string { return &s }

// A crash between any two steps of a write leaves a whole file.
func TestDocumentsAfterACrash(t *testing.T) {
	h := newHome(t)
	s := h.up(NewID(KindProject), "a", Worktree{})
	path := h.RecordPath(s.EnvironmentID)
	s.Record.Revision = 1
	require.NoError(t, h.Save(s.Record))
	// The previous copy was made, the new one only staged, half of it.
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, keepPrevious(path, text))
	require.NoError(t, os.WriteFile(path+durable.Suffix, []byte(`{"ver`), 0o600))
	require.NoError(t, os.Link(path, path+previousSuffix+durable.Suffix))
	for i := range 3 {
		s.Record.Revision = uint64(2 + i)
		require.NoError(t, h.Save(s.Record))
		got, err := h.Record(s.EnvironmentID)
		require.NoError(t, err)
		assert.Equal(t, s.Record.Revision, got.Revision)
	}
	assert.ElementsMatch(t, []string{"record.json", "record.json.prev"}, files(t, h.EnvironmentDir(s.EnvironmentID)))
	assert.Empty(t, h.warnings)
}

// A writer that is killed at any instant leaves a whole file, and the next one
// goes on from it.
func TestDocumentsAfterKills(t *testing.T) {
	h := newHome(t)
	id := h.up(NewID(KindProject), "a", Worktree{}).EnvironmentID
	last := uint64(0)
	for i := range 10 {
		cmd, out := other(t, "save", h.dir, id)
		_, err := out.Read(make([]byte, 1)) // it has begun
		require.NoError(t, err)
		time.Sleep(time.Duration(i) * time.Millisecond)
		require.NoError(t, cmd.Process.Kill())
		cmd.Wait()
		r, err := h.Record(id)
		require.NoError(t, err)
		assert.Greater(t, r.Revision, last)
		last = r.Revision
	}
	assert.Empty(t, h.warnings)
	assert.Subset(t, []string{"record.json", "record.json.new", "record.json.prev", "record.json.prev.new"}, files(t, h.EnvironmentDir(id)))
}

func otherWriter() {
	r, err := open(Options{Getenv: environ(os.Args[1])}, os.Args[1], os.Geteuid())
	if err != nil {
		os.Exit(1)
	}
	for {
		record, err := r.Record(os.Args[2])
		if err == nil {
			record.Revision++
			err = r.Save(record)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(record.Revision)
	}
}

func TestDefinitions(t *testing.T) {
	h := newHome(t)
	s := h.up(NewID(KindProject), "a", Worktree{})
	record := s.Record
	_, err := h.Definition(record)
	require.ErrorIs(t, err, fs.ErrNotExist)
	for _, text := range []string{"one", "two"} {
		require.NoError(t, h.SaveDefinition(record, []byte(text)))
		require.NoError(t, h.Save(record))
	}
	got, err := h.Definition(record)
	require.NoError(t, err)
	assert.Equal(t, "two", string(got))
	// Crashes before the record named them: the one that it names is read.
	for _, text := range []string{"three", "four"} {
		again, err := h.Record(s.EnvironmentID)
		require.NoError(t, err)
		require.NoError(t, h.SaveDefinition(again, []byte(text)))
		h.warnings = nil
		got, err = h.Definition(record)
		require.NoError(t, err)
		assert.Equal(t, "two", string(got), text)
		require.Len(t, h.warnings, 1)
	}
	require.NoError(t, os.Remove(h.DefinitionPath(s.EnvironmentID)+previousSuffix))
	var corrupt *CorruptError
	_, err = h.Definition(record)
	require.ErrorAs(t, err, &corrupt)
}

func TestOwner(t *testing.T) {
	h := newHome(t)
	s := h.up(NewID(KindProject), "a", Worktree{})
	id := s.EnvironmentID
	locked := func() bool {
		yes, err := h.another().Locked(id)
		require.NoError(t, err)
		return yes
	}
	assert.False(t, locked(), "never up")
	assert.NotContains(t, files(t, h.EnvironmentDir(id)), "lock", "looking makes nothing")
	owner, err := h.Own(context.Background(), id)
	require.NoError(t, err)
	assert.True(t, locked())
	_, err = h.another().Own(context.Background(), id)
	var held *HeldError
	require.ErrorAs(t, err, &held)
	assert.Equal(t, os.Getpid(), held.PID)
	require.ErrorAs(t, h.Remove("", id, nil), &held)

	// A program that is started does not keep the lock.
	sleep := exec.Command("sleep", "60")
	require.NoError(t, sleep.Start())
	t.Cleanup(func() { sleep.Process.Kill(); sleep.Wait() })
	require.NoError(t, owner.Close())
	assert.False(t, locked())

	_, err = h.Own(context.Background(), NewID(KindEnvironment))
	var missing *MissingError
	require.ErrorAs(t, err, &missing)

	// An owner that is killed lets go.
	cmd, out := other(t, "own", h.dir, id)
	line := make([]byte, 3)
	_, err = out.Read(line)
	require.NoError(t, err)
	assert.True(t, locked())
	_, err = h.Own(context.Background(), id)
	require.ErrorAs(t, err, &held)
	assert.Equal(t, cmd.Process.Pid, held.PID)
	require.NoError(t, cmd.Process.Kill())
	cmd.Wait()
	assert.False(t, locked())
}

func otherOwner() {
	r, err := open(Options{Getenv: environ(os.Args[1])}, os.Args[1], os.Geteuid())
	if err == nil {
		_, err = r.Own(context.Background(), os.Args[2])
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("ok")
	select {} // until killed
}

// Looking never makes a supervisor that starts fail, however often one looks.
func TestOwnYieldsToLookers(t *testing.T) {
	h := newHome(t)
	id := h.up(NewID(KindProject), "a", Worktree{}).EnvironmentID
	stop := make(chan struct{})
	var lookers sync.WaitGroup
	for range 4 {
		r := h.another()
		lookers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					_, err := r.Locked(id)
					assert.NoError(t, err)
					time.Sleep(100 * time.Microsecond)
				}
			}
		})
	}
	for range 50 {
		owner, err := h.Own(context.Background(), id)
		require.NoError(t, err)
		require.NoError(t, owner.Close())
	}
	close(stop)
	lookers.Wait()
}

func TestListen(t *testing.T) {
	h := newHome(t)
	s := h.up(NewID(KindProject), "a", Worktree{})
	owner, err := h.Own(context.Background(), s.EnvironmentID)
	require.NoError(t, err)
	l, err := owner.Listen()
	require.NoError(t, err)
	path := h.SocketPath(s.EnvironmentID)
	info, err := os.Stat(path)
	require.NoError(t, err)
	assert.Equal(t, fs.FileMode(0o600), info.Mode().Perm())
	conn, err := net.Dial("unix", path)
	require.NoError(t, err)
	conn.Close()
	// As after kill -9: the socket stays, and the next one replaces it.
	l.SetUnlinkOnClose(false)
	require.NoError(t, l.Close())
	l, err = owner.Listen()
	require.NoError(t, err)
	l.SetUnlinkOnClose(false)
	require.NoError(t, l.Close())

	s.Record.Supervisor, err = Self(path, "test")
	require.NoError(t, err)
	assert.True(t, s.Record.Supervisor.Alive())
	require.NoError(t, h.Save(s.Record))
	require.NoError(t, h.Remove("", s.EnvironmentID, owner))
	assert.Empty(t, files(t, h.Root()))
	assert.NoDirExists(t, h.RuntimeDir(), "with the last socket")
}

func TestAlive(t *testing.T) {
	me, err := Self("", "")
	require.NoError(t, err)
	assert.True(t, me.Alive())
	reused := *me
	reused.Process = "another/1"
	assert.False(t, reused.Alive(), "the PID was used again")
	assert.False(t, (*Supervisor)(nil).Alive())
	child := exec.Command("true")
	require.NoError(t, child.Start())
	t.Cleanup(func() { child.Wait() })
	zombie := Supervisor{PID: child.Process.Pid}
	require.Eventually(t, func() bool {
		_, err := processIdentity(zombie.PID)
		return errors.Is(err, os.ErrProcessDone)
	}, time.Minute, time.Millisecond, "a zombie does not live")
}

func TestHealth(t *testing.T) {
	const inc, otherInc = "inc_1", "inc_2"
	live := SessionView{Live: true, Incarnation: inc}
	foreign := SessionView{Live: true, Incarnation: otherInc}
	spent := SessionView{Spent: true, Incarnation: inc}
	none := SessionView{}
	const (
		supervised   = vzv1.Health_HEALTH_SUPERVISED
		unsupervised = vzv1.Health_HEALTH_UNSUPERVISED
		diverged     = vzv1.Health_HEALTH_DIVERGED
		inactive     = vzv1.Health_HEALTH_INACTIVE
	)
	for state, want := range map[MachineState][4]vzv1.Health{
		MachineReady:    {supervised, diverged, diverged, unsupervised},
		MachineStarting: {supervised, diverged, inactive, inactive},
		MachineStopping: {supervised, diverged, inactive, inactive},
		MachineDeclared: {diverged, diverged, inactive, inactive},
		MachineStopped:  {diverged, diverged, inactive, inactive},
		MachineFailed:   {diverged, diverged, inactive, inactive},
	} {
		for i, session := range []SessionView{live, foreign, spent, none} {
			got, why := Health(&Machine{State: state, Incarnation: inc}, session)
			assert.Equal(t, want[i], got, "%s, %+v", state, session)
			assert.Equal(t, got == supervised || got == inactive, why == "", "%s, %+v: %q", state, session, why)
		}
	}
	got, _ := Health(nil, live)
	assert.Equal(t, vzv1.Health_HEALTH_UNOBSERVABLE, got)
}

func TestProject(t *testing.T) {
	at := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	r := &Record{
		ProjectID: NewID(KindProject), ProjectName: "shop", EnvironmentID: NewID(KindEnvironment), Name: "a",
		State: Ready, CreatedAt: at, UpdatedAt: at, Worktree: "/w", DefinitionDigest: "sha256:0", DefaultMachine: "web",
		Machines: []Machine{
			{MachineID: NewID(KindMachine), Name: "web", State: MachineReady, Incarnation: NewID(KindIncarnation), OS: "linux",
				Requested: []string{"a"}, Negotiated: []string{"b"}, Notes: []Note{{"c", "d"}}, ReadyAt: at,
				Attachments: []Attachment{{Network: "front", Address: "10.0.0.2", MAC: "02:00:00:00:00:01", Interface: "eth0"}}},
			{MachineID: NewID(KindMachine), Name: "db", State: MachineStopped},
		},
		Networks:   []Network{{Name: "front", Kind: "private", CIDR: "10.0.0.0/24", Gateway: "10.0.0.1", MTU: 1500, Refuse: "reset"}},
		Endpoints:  []Endpoint{{Name: "shop", Host: "shop.test", Network: "edge", Kind: "https", Address: "198.51.100.2", BackendMachine: "web", BackendPort: 8080, URL: "https://shop.test/"}},
		Proxy:      Proxy{Port: 1, URL: "http://127.0.0.1:1", CAPath: "/ca.pem"},
		Supervisor: &Supervisor{PID: 7, Socket: "/s", StartedAt: at},
	}
	require.NoError(t, r.validate())
	free := Project(r, LockFree)
	assert.Nil(t, free.GetSupervisor())
	assert.Equal(t, vzv1.EnvironmentState_ENVIRONMENT_STATE_READY, free.GetState())
	assert.Contains(t, free.GetMessage(), "supervisor is gone")
	assert.Equal(t, vzv1.Health_HEALTH_UNSUPERVISED, free.GetMachines()[0].GetHealth())
	assert.Equal(t, vzv1.Health_HEALTH_INACTIVE, free.GetMachines()[1].GetHealth())
	assert.Equal(t, "10.0.0.2", free.GetMachines()[0].GetAttachments()[0].GetAddress())
	assert.Equal(t, "d", free.GetMachines()[0].GetCapabilities().GetNotes()[0].GetReason())
	assert.Empty(t, free.GetProxy().GetUrl(), "nobody listens")
	assert.Equal(t, "/ca.pem", free.GetProxy().GetCaPath())

	silent := Project(r, LockSilent)
	assert.Equal(t, int32(7), silent.GetSupervisor().GetPid())
	for _, m := range silent.GetMachines() {
		assert.Equal(t, vzv1.Health_HEALTH_UNOBSERVABLE, m.GetHealth())
		assert.NotEmpty(t, m.GetHealthReason())
	}
	self := Project(r, LockSelf)
	assert.Equal(t, vzv1.Health_HEALTH_UNSPECIFIED, self.GetMachines()[0].GetHealth())
	assert.Empty(t, self.GetMessage())
	assert.Equal(t, "http://127.0.0.1:1", self.GetProxy().GetUrl())

	for _, s := range []State{Created, Reconciling, Ready, Degraded, Failed, Stopping, Stopped, Deleting} {
		assert.NotEqual(t, vzv1.EnvironmentState_ENVIRONMENT_STATE_UNSPECIFIED, s.message(), s)
	}
	for _, s := range []MachineState{MachineDeclared, MachineStarting, MachineReady, MachineStopping, MachineStopped, MachineFailed} {
		assert.NotEqual(t, vzv1.MachineState_MACHINE_STATE_UNSPECIFIED, s.message(), s)
	}
	clone := r.Clone()
	assert.Equal(t, r, clone)
	clone.Machine("web").Attachments[0].Address = "changed"
	clone.Supervisor.PID = 8
	clone.Networks[0].MTU = 9
	assert.Equal(t, "10.0.0.2", r.Machine("web").Attachments[0].Address)
	assert.True(t, proto.Equal(self, Project(r, LockSelf)))
}

func FuzzRecord(f *testing.F) {
	good, err := json.Marshal(&Record{Version: 1, ProjectID: NewID(KindProject), EnvironmentID: NewID(KindEnvironment), Name: "a", State: Ready,
		Machines: []Machine{{MachineID: NewID(KindMachine), Name: "web", State: MachineReady}}})
	require.NoError(f, err)
	f.Add(good)
	f.Add([]byte(`{"version":2}`))
	f.Add([]byte(`{"version":1,"machines":[null]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		r := new(Record)
		if decode("record.json", text, r) != nil {
			return
		}
		// What is good can be shown, selected from, and written and read again.
		Project(r, LockFree)
		SelectMachine(r, nil, "")
		again, err := json.Marshal(r)
		if err != nil {
			return // a year beyond RFC 3339
		}
		require.NoError(t, decode("record.json", again, new(Record)))
	})
}

func FuzzIndex(f *testing.F) {
	f.Add([]byte(`{"version":1,"project_id":"prj_01kbcdefghjkmnpqrstvwxyz01","environments":{"a":{"id":"env_01kbcdefghjkmnpqrstvwxyz01"}},"bindings":{"ABCDEFGHIJKLMNOPQRSTUVWXYZ":{"env_01kbcdefghjkmnpqrstvwxyz01":"2026-07-01T12:00:00Z"}}}`))
	f.Add([]byte(`{"version":1,"project_id":"prj_01kbcdefghjkmnpqrstvwxyz01"}`))
	f.Add([]byte(`{"version":1,"bindings":null}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		x := new(index)
		if decode("index.json", text, x) != nil {
			return
		}
		v := view{index: *x}
		for _, c := range v.candidates() {
			require.NoError(t, CheckID(c.ID, KindEnvironment))
			require.NoError(t, CheckName(c.Name))
		}
		for key := range x.Bindings {
			for _, id := range x.bound(key) {
				x.remove(id)
			}
		}
		assert.Empty(t, x.Bindings[""])
	})
}
