package namespace

import (
	"context"
	"errors"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"vz.test/vz/machines"
)

// What needs a real Machine is tested in supervisor/launcher, which can make
// one.

func TestParseSubordinate(t *testing.T) {
	const text = `
# comment
alice:100000:65536
bob:165536:1000
bob:300000:131072
root:0:65536
eve:999:65536
mallory:4294967000:65536
short:1
1000:500000:65536
`
	for _, c := range []struct {
		names        []string
		first, count int
	}{
		{[]string{"alice"}, 100000, 65536},
		{[]string{"bob"}, 300000, 131072},
		{[]string{"root"}, 0, 0},
		{[]string{"eve"}, 0, 0},
		{[]string{"mallory"}, 0, 0},
		{[]string{"short"}, 0, 0},
		{[]string{"nobody", "1000"}, 500000, 65536},
		{nil, 0, 0},
	} {
		first, count := parseSubordinate([]byte(text), c.names)
		assert.Equal(t, c.first, first, c.names)
		assert.Equal(t, c.count, count, c.names)
	}
}

func TestDefaultRange(t *testing.T) {
	seen := map[int]bool{}
	for _, env := range []string{"env_a", "env_b", "env_c", "env_d"} {
		n := slot(env, defaultSlots)
		assert.Equal(t, n, slot(env, defaultSlots), "stable")
		first := defaultFirst + n*idCount
		assert.GreaterOrEqual(t, first, defaultFirst)
		assert.LessOrEqual(t, first+idCount, 0x60000000)
		seen[n] = true
	}
	assert.Greater(t, len(seen), 1)
}

func TestParseHierarchies(t *testing.T) {
	const hybrid = `31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
35 31 0:32 / /sys/fs/cgroup/my\040memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
42 31 0:38 / /other rw,relatime - cgroup2 cgroup2 rw
bad line
`
	assert.Equal(t, []hierarchy{
		{base: "/sys/fs/cgroup/cpu,cpuacct", controllers: []string{"cpu"}},
		{base: "/sys/fs/cgroup/my memory", controllers: []string{"memory"}},
		{base: "/sys/fs/cgroup/unified", unified: true},
	}, parseHierarchies([]byte(hybrid)))
	assert.Equal(t, "/user.slice/x", ownCgroup([]byte("5:devices:/\n0::/user.slice/x\n")))
	assert.Empty(t, ownCgroup([]byte("5:devices:/\n")))
}

func TestDelegated(t *testing.T) {
	if os.Getuid() == 0 {
		// Root may write anywhere, so all of it is his.
		mount := t.TempDir()
		require.NoError(t, os.MkdirAll(mount+"/a/b", 0o755))
		for _, d := range []string{"", "/a", "/a/b"} {
			require.NoError(t, os.WriteFile(mount+d+"/cgroup.procs", nil, 0o644))
		}
		assert.Equal(t, mount, delegated(mount, "/a/b"))
		require.NoError(t, os.Remove(mount+"/cgroup.procs"))
		assert.Equal(t, mount+"/a", delegated(mount, "/a/b"))
	}
	assert.Empty(t, delegated("/sys/fs/cgroup", ""))
	assert.Empty(t, delegated("/sys/fs/cgroup", "/../x"))
}

func TestQuota(t *testing.T) {
	assert.Equal(t, 50000, quota(0.5))
	assert.Equal(t, 200000, quota(2))
	assert.Equal(t, 1000, quota(0.0001))
}

// Limits that nobody can set are Notes, one for each that was asked for.
func TestNoCgroups(t *testing.T) {
	caps, notes := cgroup{}.create(limits{cpus: 1})
	assert.Empty(t, caps)
	require.Len(t, notes, 2)
	assert.Equal(t, "limit_cpu", notes[0].Capability)
	assert.Equal(t, "limit_pids", notes[1].Capability)
	assert.Contains(t, notes[0].Reason, "delegated")
	assert.NoError(t, cgroup{}.remove(t.Context()))
}

func TestMasksAreClean(t *testing.T) {
	seen := map[string]bool{}
	for _, m := range masked {
		assert.False(t, seen[m], "%s twice", m)
		seen[m] = true
		assert.Equal(t, path.Clean(m), m)
		_, err := path.Match(m, "")
		assert.NoError(t, err)
		shown := false
		for _, top := range append(append([]string{}, tools...), toolState...) {
			shown = shown || below(m, top)
		}
		assert.True(t, shown, "%s is below nothing that is shown", m)
		// A mask may not hide a top directory, nor what a resolver needs.
		assert.Greater(t, strings.Count(m, "/"), 1)
	}
	r := &root{order: order{Hidden: []string{"/opt/state"}}}
	for name, want := range map[string]bool{
		"/etc/shadow": true, "/etc/ssh/ssh_host_rsa_key": true, "/etc/ssh/ssh_config": false,
		"/opt/state": true, "/opt/state/x": true, "/opt/statement": false, "/etc/passwd": false,
	} {
		assert.Equal(t, want, r.isMasked(name), name)
	}
}

func TestMachineID(t *testing.T) {
	assert.Regexp(t, "^[0-9a-f]{32}\n$", machineID("mch_1"))
	assert.NotEqual(t, machineID("mch_1"), machineID("mch_2"))
}

func TestTail(t *testing.T) {
	var out tail
	for range 1000 {
		out.Write([]byte("some words "))
	}
	out.Write([]byte("the last\xff"))
	assert.LessOrEqual(t, len(out.String()), tailSize+2)
	assert.True(t, strings.HasSuffix(out.String(), "the last?"))
	out.Write(make([]byte, 3*tailSize))
	assert.LessOrEqual(t, len(out.data), tailSize)
}

func TestWords(t *testing.T) {
	missing := &machines.MissingError{What: "a", Why: "b", Remedy: "c"}
	assert.Equal(t, missing, failure(missing).err())
	got := (*machines.MissingError)(nil)
	require.ErrorAs(t, failure(step("x", missing)).err(), &got)
	assert.EqualError(t, failure(errors.New("x")).err(), "inside: x")
	assert.NoError(t, word{}.err())
}

func TestCopyFileStaysInside(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	source := filepath.Join(outside, "source")
	require.NoError(t, os.WriteFile(source, []byte("text"), 0o644))
	info, err := os.Lstat(source)
	require.NoError(t, err)
	require.NoError(t, os.Symlink(outside, filepath.Join(dir, "link")))
	root, err := os.OpenRoot(dir)
	require.NoError(t, err)
	defer root.Close()
	require.Error(t, copyFile(source, info, root, "link/copy"))
	assert.NoFileExists(t, filepath.Join(outside, "copy"))
	require.NoError(t, copyFile(source, info, root, "copy"))
	require.NoError(t, copyFile(source, info, root, "copy"), "what is there stays")
	// A link in the host's place is not followed.
	link := filepath.Join(outside, "to-source")
	require.NoError(t, os.Symlink(source, link))
	require.NoError(t, copyFile(link, info, root, "other"))
	assert.NoFileExists(t, filepath.Join(dir, "other"))
}

// fakeLauncher hands out what a test gives it.
type fakeLauncher struct {
	created *Created
	killed  []string
}

func (f *fakeLauncher) Create(context.Context, machines.Spec) (*Created, error) {
	return f.created, nil
}
func (f *fakeLauncher) Kill(_ context.Context, id string) error {
	f.killed = append(f.killed, id)
	return nil
}
func (f *fakeLauncher) Clean(context.Context, string) error          { return nil }
func (f *fakeLauncher) Remove(context.Context, string, string) error { return nil }

// A start that fails on the supervisor's side leaves no Machine and no file.
func TestDriverUndoes(t *testing.T) {
	a, b, err := socketpair()
	require.NoError(t, err)
	defer b.Close()
	null, err := os.Open("/dev/null") // no TAP
	require.NoError(t, err)
	l := &fakeLauncher{created: &Created{NICs: []*os.File{null}, Agent: a}}
	_, err = New(l).Start(t.Context(), machines.Spec{MachineID: "mch_1", Image: "host", NICs: []machines.NIC{{Name: "eth0", MTU: 1500}}})
	require.Error(t, err)
	assert.Equal(t, []string{"mch_1"}, l.killed)
	assert.ErrorIs(t, null.Close(), os.ErrClosed)
	require.NoError(t, b.SetReadDeadline(time.Now().Add(time.Minute)))
	_, err = b.Read(make([]byte, 1))
	assert.ErrorContains(t, err, "EOF", "the channel was closed")

	_, err = New(l).Start(t.Context(), machines.Spec{Image: "debian"})
	assert.ErrorContains(t, err, "image")
}

func TestMissingTUN(t *testing.T) {
	for _, e := range []error{unix.EACCES, unix.EPERM, unix.ENOENT, unix.ENODEV} {
		got := (*machines.MissingError)(nil)
		require.ErrorAs(t, missingTUN(&os.PathError{Op: "open", Path: tunDevice, Err: e}), &got)
		assert.Contains(t, got.Remedy, "as root")
	}
	assert.Equal(t, unix.EIO, missingTUN(unix.EIO))
	for _, e := range []error{unix.ENOSPC, unix.EPERM, unix.EINVAL} {
		got := (*machines.MissingError)(nil)
		require.ErrorAs(t, missingNamespaces(e), &got)
		assert.NotEmpty(t, got.Remedy)
	}
}

// FuzzMountinfo feeds the parsers of what an odd host may have mounted.
func FuzzMountinfo(f *testing.F) {
	f.Add([]byte("41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"))
	f.Add([]byte(" - \n - cgroup cgroup cpu"))
	f.Fuzz(func(t *testing.T, data []byte) {
		parseHierarchies(data)
		parseSubordinate(data, []string{"root"})
		ownCgroup(data)
	})
}
