package launcher

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"vz.test/vz/machines"
	"vz.test/vz/machines/namespace"
	"vz.test/vz/netstack/link"
)

func TestMain(m *testing.M) {
	if Dispatch(os.Args[1:]) {
		return
	}
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "agent":
			agentMain()
			return
		case "as-user":
			asUserMain(os.Args[2], os.Args[3:])
			return
		case "supervise":
			superviseMain()
			return
		case "confined":
			confinedMain(os.Args[2:])
			return
		}
	}
	flag.Parse()
	goleak.VerifyTestMain(m)
}

// A command is what the tests' agent runs inside, a result what came of it.
type command struct{ Script string }

type result struct {
	Out  string
	Code int
}

// agentMain is PID 1 in the tests' Machines: it runs scripts until its channel
// ends.
func agentMain() {
	fmt.Fprintln(os.Stderr, "the agent is up")
	channel := os.NewFile(3, "channel")
	in, out := json.NewDecoder(channel), json.NewEncoder(channel)
	for {
		var c command
		if in.Decode(&c) != nil {
			os.Exit(7)
		}
		text, err := exec.Command("/bin/sh", "-c", c.Script).CombinedOutput()
		r := result{Out: string(text)}
		if err != nil {
			r.Code = 255
			if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
				r.Code = exit.ExitCode()
			} else {
				r.Out += err.Error()
			}
		}
		out.Encode(r)
	}
}

// A shell is the tests' end of an agent.
type shell struct {
	t   *testing.T
	in  *json.Encoder
	out *json.Decoder
}

func newShell(t *testing.T, i machines.Instance) *shell {
	return &shell{t, json.NewEncoder(i.Agent()), json.NewDecoder(i.Agent())}
}

func (s *shell) run(script string) result {
	s.t.Helper()
	require.NoError(s.t, s.in.Encode(command{script}))
	var r result
	require.NoError(s.t, s.out.Decode(&r))
	return r
}

// ok runs a script that must succeed and returns what it printed.
func (s *shell) ok(script string) string {
	s.t.Helper()
	r := s.run(script)
	require.Zero(s.t, r.Code, "%s: %s", script, r.Out)
	return strings.TrimSpace(r.Out)
}

// fails runs a script that must not succeed.
func (s *shell) fails(script string) string {
	s.t.Helper()
	r := s.run(script)
	assert.NotZero(s.t, r.Code, "%s succeeded: %s", script, r.Out)
	return r.Out
}

// A bench is a launcher with a driver on it.
type bench struct {
	t      *testing.T
	opts   Options
	client *Client
	driver *namespace.Driver
}

var serial int

func newBench(t *testing.T) *bench {
	t.Helper()
	serial++
	b := &bench{t: t}
	self, err := os.Executable()
	require.NoError(t, err)
	b.opts = Options{
		EnvironmentID: fmt.Sprintf("env_%dx%d", os.Getpid(), serial),
		StateDir:      t.TempDir(),
		Agent:         self,
		Log:           os.Stderr,
	}
	// Only the launcher can take a Machine's files away.
	t.Cleanup(func() {
		left, _ := filepath.Glob(filepath.Join(b.opts.StateDir, "machines", "*"))
		if len(left) == 0 {
			return
		}
		b.opts.Agent = self
		c, err := Start(context.Background(), b.opts)
		require.NoError(t, err)
		for _, dir := range left {
			assert.NoError(t, c.Remove(context.Background(), filepath.Base(dir), dir))
		}
		assert.NoError(t, c.Close())
	})
	b.start()
	return b
}

func (b *bench) start() {
	b.t.Helper()
	var err error
	b.client, err = Start(b.t.Context(), b.opts)
	require.NoError(b.t, err)
	client := b.client
	b.t.Cleanup(func() { client.Close() })
	b.driver = namespace.New(b.client)
}

func (b *bench) spec(name string) machines.Spec {
	id := "mch_" + name
	return machines.Spec{
		EnvironmentID: b.opts.EnvironmentID,
		MachineID:     id,
		Incarnation:   "inc_1",
		Name:          name,
		Image:         "host",
		Profile:       "developer",
		NICs: []machines.NIC{
			{Network: "back", Name: "eth0", MAC: "02:00:5e:00:00:01", MTU: 1500},
			{Network: "edge", Name: "eth1", MAC: "02:00:5e:00:00:02", MTU: 9000},
		},
		Dir:   filepath.Join(b.opts.StateDir, "machines", id),
		Agent: b.opts.Agent,
	}
}

func (b *bench) boot(spec machines.Spec) machines.Instance {
	b.t.Helper()
	i, err := b.driver.Start(b.t.Context(), spec)
	require.NoError(b.t, err)
	b.t.Cleanup(func() { discard(i) })
	return i
}

func discard(i machines.Instance) {
	i.Agent().Close()
	for _, p := range i.Ports() {
		p.Close()
	}
}

// onHost lists the processes of the whole host whose command line holds word.
func onHost(word string) []string {
	var found []string
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		if text, err := os.ReadFile(f); err == nil && bytes.Contains(text, []byte(word)) {
			found = append(found, strings.ReplaceAll(string(text), "\x00", " "))
		}
	}
	return found
}

// there waits until a process of the host has word in its command line: a shell
// that starts one in the background does not wait for it.
func there(word string) {
	for len(onHost(word)) == 0 {
		time.Sleep(time.Millisecond)
	}
}

// gone waits until no process of the host has word in its command line; a hang
// is the test binary's own timeout.
func gone(word string) {
	for len(onHost(word)) > 0 {
		time.Sleep(5 * time.Millisecond)
	}
}

// TestMachines shows everything that a Machine promises, as whoever runs it,
// and again as an ordinary user with and without subordinate IDs.
func TestMachines(t *testing.T) {
	t.Run("here", func(t *testing.T) {
		if os.Getenv("VZ_TEST_SECRETS") == "" {
			if os.Getuid() != 0 {
				t.Skip("needs root, or to be run by root as an ordinary user")
			}
			t.Setenv("VZ_TEST_SECRETS", strings.Join(plantSecrets(t), ":"))
		}
		suite(t)
	})
	for _, mode := range []string{"single", "range"} {
		t.Run("ordinary user, "+mode+" ID", func(t *testing.T) {
			if os.Getuid() != 0 {
				t.Skip("needs root to become an ordinary user")
			}
			t.Setenv("VZ_TEST_SECRETS", strings.Join(plantSecrets(t), ":"))
			asUser(t, mode, "-test.run=^TestMachines$/^here$", "-test.v")
		})
	}
}

func suite(t *testing.T) {
	t.Run("sees tools and nothing secret", testView)
	t.Run("changes nothing of the host's", testWrites)
	t.Run("mounts and descriptors", testMounts)
	t.Run("frames", testFrames)
	t.Run("files persist", testPersistence)
	t.Run("limits", testLimits)
	t.Run("hardened", testHardened)
	t.Run("kill and exit", testKill)
	t.Run("launcher dies", testLauncherDies)
	t.Run("supervisor dies", testSupervisorDies)
	t.Run("cancel", testCancel)
	t.Run("remove", testRemove)
	t.Run("bad agent", testBadAgent)
	t.Run("held to its bounds", testBounds)
	t.Run("many at once", testParallel)
}

// plantSecrets makes, as root, what no Machine may read: files only root may
// read, in every directory that a Machine sees something of, and a home.
func plantSecrets(t *testing.T) []string {
	var paths []string
	for _, dir := range []string{"/etc", "/etc/ssl", "/var", "/var/lib", "/var/lib/dpkg", "/opt", "/srv", "/usr", "/usr/local", "/usr/share"} {
		if _, err := os.Stat(dir); err != nil {
			continue
		}
		path := filepath.Join(dir, fmt.Sprintf("vz-test-secret-%d", os.Getpid()))
		require.NoError(t, os.WriteFile(path, []byte("secret\n"), 0o600))
		t.Cleanup(func() { os.Remove(path) })
		paths = append(paths, path)
	}
	home := fmt.Sprintf("/home/vz-test-%d", os.Getpid())
	require.NoError(t, os.MkdirAll(home, 0o755))
	t.Cleanup(func() { os.RemoveAll(home) })
	path := filepath.Join(home, "secret")
	require.NoError(t, os.WriteFile(path, []byte("secret\n"), 0o644)) // masked, not just closed
	return append(paths, path)
}

func testView(t *testing.T) {
	b := newBench(t)
	i := b.boot(b.spec("web"))
	sh := newShell(t, i)

	assert.Equal(t, "0", sh.ok("id -u"))
	assert.Equal(t, "web", sh.ok("hostname"))
	assert.Equal(t, "web", sh.ok("cat /etc/hostname"))
	assert.Contains(t, sh.ok("tr '\\0' ' ' < /proc/1/cmdline"), "vz-guest agent --fd 3")
	assert.Equal(t, "1", sh.ok("cut -d' ' -f4 /proc/self/stat | head -1 >/dev/null; awk '/^PPid/{print $2}' /proc/$$/status"))
	assert.Contains(t, sh.ok("/bin/ls -d /usr/bin/env"), "/usr/bin/env")
	assert.Contains(t, sh.ok("echo ok | /usr/bin/cat"), "ok")
	assert.Equal(t, "/root", sh.ok("echo $HOME"))
	sh.ok("grep -q ^root: /etc/passwd")
	sh.ok("dpkg-query -W dpkg 2>/dev/null || ! test -e /var/lib/dpkg")

	// Secrets: what root planted, shadow, masked places, other homes.
	for _, path := range strings.Split(os.Getenv("VZ_TEST_SECRETS"), ":") {
		sh.fails("cat " + path)
	}
	for _, path := range []string{"/etc/shadow", "/etc/gshadow", "/etc/ssl/private", "/etc/fstab", "/etc/cron.d", "/etc/ssh/ssh_host_rsa_key.pub"} {
		sh.fails("stat " + path)
	}
	assert.Empty(t, sh.ok("ls -A /home /root /srv /mnt /media /tmp | grep -v : || true"))
	assert.Empty(t, sh.ok("ls -A /var/log /var/spool /var/cache /var/mail | grep -v -e : -e fontconfig || true"))
	sh.fails("stat " + b.opts.StateDir)
	sh.fails("find / -xdev -name 'vz-test-secret-*' -exec cat {} + 2>/dev/null | grep secret")
	sh.fails("grep -r . /etc/shadow*")

	// Only its own processes, and only its own capabilities.
	assert.NotContains(t, sh.ok("cat /proc/[0-9]*/cmdline | tr '\\0' ' '"), "go test")
	sh.fails("mount -t ext4 /dev/vda /mnt")
	sh.fails("mknod /root/disk b 254 0")
	sh.fails("cat /proc/kcore")
	sh.fails("echo 1 > /proc/sys/kernel/sysrq")
	assert.NotEqual(t, hostText(t, "/proc/self/cgroup"), "")
	assert.NotContains(t, sh.ok("cat /proc/self/cgroup | grep ^0:"), "vz")

	// The identity inside.
	assert.Len(t, sh.ok("cat /etc/machine-id"), 32)
	if host, err := os.ReadFile("/etc/machine-id"); err == nil {
		assert.NotEqual(t, strings.TrimSpace(string(host)), sh.ok("cat /etc/machine-id"))
	}
	single := strings.Fields(sh.ok("cat /proc/self/uid_map"))[2] == "1"
	has := slices.ContainsFunc(i.Notes(), func(n machines.Note) bool { return n.Capability == "user_ids" && n.Reason != "" })
	assert.Equal(t, single, has, "notes: %v", i.Notes())
	assert.Equal(t, os.Getenv("VZ_TEST_MODE") == "single", single)
	if !single {
		assert.NotEqual(t, strconv.Itoa(os.Getuid()), strings.Fields(sh.ok("cat /proc/self/uid_map"))[1])
		sh.ok("touch /root/f && chown 1000:1000 /root/f")
		assert.Equal(t, "1000", sh.ok("setpriv --reuid 1000 --regid 1000 --clear-groups id -u"))
	}
	// A terminal can be made.
	sh.ok("script -qec true /dev/null")
	assert.Equal(t, "ok", sh.ok("echo ok > /dev/shm/x && cat /dev/shm/x"))
}

func hostText(t *testing.T, path string) string {
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(text)
}

func testWrites(t *testing.T) {
	b := newBench(t)
	sh := newShell(t, b.boot(b.spec("web")))
	watched := map[string]string{}
	for _, path := range []string{"/etc/hostname", "/etc/passwd", "/etc/hosts", "/usr/bin/env", "/etc/os-release"} {
		if text, err := os.ReadFile(path); err == nil {
			watched[path] = string(text)
		}
	}
	// Guest root owns /etc and its files, and may replace them.
	sh.ok("echo changed > /etc/hostname; echo changed >> /etc/passwd; echo changed > /etc/hosts")
	sh.ok("echo nameserver 10.0.0.1 > /etc/resolv.conf.new && mv /etc/resolv.conf.new /etc/resolv.conf && grep -q 10.0.0.1 /etc/resolv.conf")
	sh.ok("mkdir -p /etc/ssl/certs /usr/local/share/ca-certificates && touch /etc/ssl/certs/vz.pem /usr/local/share/ca-certificates/vz.crt /usr/local/bin/vz-test-tool /opt/vz-test")
	sh.ok("rm -r /etc/ssl/certs && mkdir /etc/ssl/certs && test -z \"$(ls -A /etc/ssl/certs)\"")
	sh.ok("mkdir /srv/data /data /home/dev && touch /var/lib/x /var/log/x /var/tmp/x /tmp/x")
	// The host's own files belong to nobody.
	sh.fails("echo changed >> /usr/bin/env")
	sh.fails("rm /usr/bin/env")
	sh.fails("touch /usr/bin/vz-test")
	sh.fails("chmod 777 /usr/bin")
	// Not by a mount of its own either.
	sh.run("mount -o remount,rw /usr; mount -o remount,rw /; umount -l /usr; umount -l /etc")
	sh.run("echo changed > /usr/bin/env; echo changed > /etc/os-release; echo changed > /etc/hostname; rm -rf /etc /usr")
	for path, want := range watched {
		assert.Equal(t, want, hostText(t, path), path)
	}
	for _, path := range []string{"/usr/local/bin/vz-test-tool", "/opt/vz-test", "/etc/ssl/certs/vz.pem", "/srv/data", "/data", "/usr/bin/vz-test"} {
		assert.NoFileExists(t, path)
		assert.NoDirExists(t, path)
	}
}

// A guest that ruins its root must not get more at the next boot.
func TestHostileRoot(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	t.Setenv("VZ_TEST_SECRETS", strings.Join(plantSecrets(t), ":"))
	b := newBench(t)
	spec := b.spec("web")
	i := b.boot(spec)
	sh := newShell(t, i)
	trap := t.TempDir()
	require.NoError(t, os.Chmod(trap, 0o777))
	require.NoError(t, os.Chmod(filepath.Dir(trap), 0o755))
	sh.ok("umount -l /usr/ ; umount -l /etc; umount -l /opt; umount -l /proc; umount -l /tmp; true")
	i.Kill(time.Minute)

	i = b.boot(spec)
	sh = newShell(t, i)
	sh.ok("for d in usr etc opt var/lib/dpkg proc sys dev run tmp; do umount -l /dev/pts /dev/* /sys/fs/cgroup /$d; rmdir /$d || mv /$d /$d.gone; ln -s " + trap + " /$d; done >/dev/null 2>&1; true")
	i.Kill(time.Minute)

	i = b.boot(spec)
	sh = newShell(t, i)
	sh.ok("test -d /usr/bin -a ! -L /usr -a ! -L /etc -a ! -L /tmp")
	sh.fails("cat /etc/shadow")
	for _, path := range strings.Split(os.Getenv("VZ_TEST_SECRETS"), ":") {
		sh.fails("cat " + path)
	}
	left, err := os.ReadDir(trap)
	require.NoError(t, err)
	assert.Empty(t, left)
}

func testMounts(t *testing.T) {
	before := hostText(t, "/proc/self/mountinfo")
	b := newBench(t)
	sh := newShell(t, b.boot(b.spec("web")))
	assert.Equal(t, before, hostText(t, "/proc/self/mountinfo"))

	// By device, not by kind: the state directory may lie on a tmpfs as well.
	var state unix.Stat_t
	require.NoError(t, unix.Stat(b.opts.StateDir, &state))
	device := fmt.Sprintf("%d:%d", unix.Major(state.Dev), unix.Minor(state.Dev))
	var onState []string
	kinds := map[string][]string{}
	for line := range strings.Lines(sh.ok("cat /proc/self/mountinfo")) {
		head, tail, _ := strings.Cut(line, " - ")
		fields, kind := strings.Fields(head), strings.Fields(tail)[0]
		if fields[2] == device {
			onState = append(onState, fields[4])
			continue
		}
		kinds[kind] = append(kinds[kind], fields[4])
	}
	assert.Equal(t, []string{"/"}, onState, "only the root lies on the state directory's file system")
	for _, point := range kinds["overlay"] {
		assert.Regexp(t, `^/(usr|etc|opt|nix|gnu|bin|sbin|lib\w*|var/lib/[a-z-]+|var/cache/fontconfig)(/|$)`, point)
	}
	delete(kinds, "overlay")
	for _, kind := range []string{"devtmpfs", "tmpfs"} {
		for _, point := range kinds[kind] {
			assert.Contains(t, []string{"/dev", "/dev/shm", "/tmp", "/run", "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"}, point)
		}
		delete(kinds, kind)
	}
	delete(kinds, "sysfs")
	delete(kinds, "cgroup2")
	delete(kinds, "mqueue")
	assert.Equal(t, map[string][]string{"proc": {"/proc"}, "devpts": {"/dev/pts"}}, kinds)

	// The agent has its channel, and of the rest nothing that leads out.
	for line := range strings.Lines(sh.ok("for f in /proc/1/fd/*; do readlink $f; done; true")) {
		assert.Regexp(t, `^(/dev/null|pipe:|socket:|anon_inode:)`, line)
	}
	assert.Equal(t, "/", sh.ok("readlink /proc/1/cwd"))
	assert.Equal(t, "/run/vz/vz-guest", sh.ok("readlink /proc/1/exe"))
	environment := sh.ok("tr '\\0' '\\n' < /proc/1/environ")
	assert.NotContains(t, environment, "VZ_TEST")
	assert.Contains(t, environment, "container=vz")
}

func testFrames(t *testing.T) {
	b := newBench(t)
	i := b.boot(b.spec("web"))
	sh := newShell(t, i)
	require.Len(t, i.Ports(), 2)
	assert.Equal(t, "02:00:5e:00:00:01", sh.ok("cat /sys/class/net/eth0/address"))
	assert.Equal(t, "02:00:5e:00:00:02", sh.ok("cat /sys/class/net/eth1/address"))
	assert.Equal(t, "1500", sh.ok("cat /sys/class/net/eth0/mtu"))
	assert.Equal(t, "9000", sh.ok("cat /sys/class/net/eth1/mtu"))
	assert.Equal(t, 1500, i.Ports()[0].MTU())
	assert.Equal(t, "down", sh.ok("cat /sys/class/net/eth0/operstate"))

	answered := make(chan error, 1)
	go func() { answered <- answerARP(i.Ports()[0]) }()
	sh.ok("ip link set eth0 up && ip address add 10.20.0.2/24 dev eth0")
	sh.run("ping -c 1 -W 1 10.20.0.1")
	for !strings.Contains(sh.ok("ip neighbour show 10.20.0.1"), "02:00:5e:00:00:fe") {
		sh.run("ping -c 1 -W 1 10.20.0.1")
	}
	require.NoError(t, <-answered)
	// A port that is closed takes its link with it.
	require.NoError(t, i.Ports()[1].Close())
	for sh.run("test -e /sys/class/net/eth1").Code == 0 {
		time.Sleep(time.Millisecond)
	}
}

// answerARP answers the first ARP request of a port.
func answerARP(port link.Port) error {
	frames := make([]link.Frame, 8)
	for {
		n, err := port.ReadFrames(frames)
		if err != nil {
			return err
		}
		for _, f := range frames[:n] {
			d := f.Data
			if len(d) < 42 || d[12] != 8 || d[13] != 6 || d[21] != 1 {
				continue
			}
			if netip.AddrFrom4([4]byte(d[38:42])) != netip.MustParseAddr("10.20.0.1") {
				continue
			}
			mac := net.HardwareAddr{2, 0, 0x5e, 0, 0, 0xfe}
			reply := slices.Clone(d[:42])
			copy(reply[0:], d[6:12])
			copy(reply[6:], mac)
			reply[21] = 2
			copy(reply[22:], mac)
			copy(reply[28:], d[38:42])
			copy(reply[32:], d[22:32])
			_, err := port.WriteFrames([]link.Frame{{Data: reply}})
			return err
		}
	}
}

func testPersistence(t *testing.T) {
	b := newBench(t)
	spec := b.spec("web")
	i := b.boot(spec)
	sh := newShell(t, i)
	sh.ok("for d in /etc /root /opt /srv /var/lib /usr/local/bin /home / /tmp /run; do echo kept > $d/vz-kept; done; rm /etc/passwd; rm -r /etc/ssl/certs")
	id := sh.ok("cat /etc/machine-id")
	require.NoError(t, i.Kill(time.Minute))
	discard(i)

	spec.Incarnation = "inc_2"
	sh = newShell(t, b.boot(spec))
	for _, dir := range []string{"/etc", "/root", "/opt", "/srv", "/var/lib", "/usr/local/bin", "/home", ""} {
		assert.Equal(t, "kept", sh.ok("cat "+dir+"/vz-kept"))
	}
	sh.fails("test -e /tmp/vz-kept")
	sh.fails("test -e /run/vz-kept")
	sh.fails("test -e /etc/passwd")
	sh.fails("test -e /etc/ssl/certs")
	sh.fails("cat /etc/shadow")
	assert.Equal(t, id, sh.ok("cat /etc/machine-id"))
}

func testLimits(t *testing.T) {
	b := newBench(t)
	spec := b.spec("web")
	spec.CPUs, spec.MemoryBytes = 0.5, 512<<20
	i := b.boot(spec)
	named := map[string]bool{}
	for _, c := range i.Capabilities() {
		named[c] = true
	}
	for _, n := range i.Notes() {
		assert.False(t, named[n.Capability], "%s is had and is not", n.Capability)
		assert.NotEmpty(t, n.Reason)
		named[n.Capability] = true
	}
	for _, want := range []string{"limit_cpu", "limit_memory", "limit_pids"} {
		assert.True(t, named[want], "%s is neither had nor noted", want)
	}
	if os.Getuid() != 0 {
		return
	}
	paths, _ := filepath.Glob("/sys/fs/cgroup/*/vz/" + spec.EnvironmentID + "/" + spec.MachineID + "/cgroup.procs")
	unified, _ := filepath.Glob("/sys/fs/cgroup/vz/" + spec.EnvironmentID + "/" + spec.MachineID + "/cgroup.procs")
	paths = append(paths, unified...)
	require.NotEmpty(t, paths)
	for _, p := range paths {
		assert.NotEmpty(t, hostText(t, p), p)
	}
	if slices.Contains(i.Capabilities(), "limit_memory") {
		sh := newShell(t, i)
		r := sh.run("head -c 700M /dev/zero | tail -c 600M | wc -c")
		assert.NotEqual(t, "629145600", strings.TrimSpace(r.Out))
	}
}

func testHardened(t *testing.T) {
	b := newBench(t)
	spec := b.spec("web")
	spec.Profile = "hardened"
	sh := newShell(t, b.boot(spec))
	sh.fails("unshare -U true")
	sh.fails("echo 100 > /proc/sys/user/max_user_namespaces && unshare -U true")
	assert.Equal(t, "1", sh.ok("awk '/NoNewPrivs/{print $2}' /proc/self/status"))
	sh.ok("ip link set lo up") // what the agent must do still works
	sh.ok("mount -t tmpfs tmpfs /mnt")
}

func testKill(t *testing.T) {
	b := newBench(t)
	i := b.boot(b.spec("web"))
	word := fmt.Sprintf("31%d.%d", os.Getpid(), serial)
	newShell(t, i).ok("sleep " + word + " >/dev/null 2>&1 & setsid sleep " + word + " >/dev/null 2>&1 &")
	there(word)
	assert.NoError(t, i.Err())
	require.NoError(t, i.Kill(time.Minute))
	<-i.Done()
	assert.ErrorContains(t, i.Err(), "killed")
	assert.Empty(t, onHost(word))
	require.NoError(t, i.Kill(time.Minute))

	// An agent that ends by itself ends the Machine; what it said is kept.
	i = b.boot(b.spec("web"))
	i.Agent().Close()
	<-i.Done()
	assert.ErrorContains(t, i.Err(), "exit status 7")
	assert.ErrorContains(t, i.Err(), "the agent is up")

	// One Machine is not started twice.
	i = b.boot(b.spec("web"))
	_, err := b.driver.Start(t.Context(), b.spec("web"))
	assert.ErrorContains(t, err, "runs already")
	require.NoError(t, b.driver.Clean(t.Context(), b.opts.EnvironmentID, "mch_web"))
	<-i.Done()
}

func testLauncherDies(t *testing.T) {
	for _, how := range []string{"closed", "killed", "stopped, then killed"} {
		t.Run(how, func(t *testing.T) {
			b := newBench(t)
			i := b.boot(b.spec("web"))
			word := fmt.Sprintf("32%d.%d", os.Getpid(), serial)
			newShell(t, i).ok("setsid sleep " + word + " >/dev/null 2>&1 &")
			there(word)
			switch how {
			case "closed":
				require.NoError(t, b.client.Close())
			case "killed":
				b.client.end()
			default:
				for _, pid := range launchers(b.opts.StateDir) {
					require.NoError(t, unix.Kill(pid, unix.SIGSTOP))
				}
				b.client.end()
			}
			<-b.client.Done()
			<-i.Done()
			assert.Error(t, i.Err())
			assert.Empty(t, onHost(word))
			assert.Empty(t, launchers(b.opts.StateDir))
			_, err := b.driver.Start(t.Context(), b.spec("web"))
			assert.ErrorIs(t, err, ErrGone)

			// The next one finds its way on, and Remove leaves nothing.
			b.start()
			newShell(t, b.boot(b.spec("web"))).ok("true")
			require.NoError(t, b.driver.Remove(t.Context(), b.spec("web")))
			assertNothing(t, b)
		})
	}
}

func launchers(stateDir string) []int {
	var pids []int
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil && isLauncher(pid, stateDir) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// superviseMain is a supervisor that boots one Machine and then does nothing
// until it is killed. Its environment holds the bench's options.
func superviseMain() {
	var opts Options
	if err := json.Unmarshal([]byte(os.Getenv("VZ_TEST_OPTIONS")), &opts); err != nil {
		panic(err)
	}
	b := &bench{opts: opts}
	c, err := Start(context.Background(), opts)
	if err != nil {
		panic(err)
	}
	i, err := namespace.New(c).Start(context.Background(), b.spec("web"))
	if err != nil {
		panic(err)
	}
	json.NewEncoder(i.Agent()).Encode(command{"setsid sleep " + os.Getenv("VZ_TEST_WORD") + " >/dev/null 2>&1 &"})
	var r result
	json.NewDecoder(i.Agent()).Decode(&r)
	// The thread that runs main is not the one that the launcher hangs on.
	for range 4 {
		go func() { runtime.LockOSThread(); runtime.Gosched() }()
	}
	fmt.Println("up")
	time.Sleep(time.Hour)
	runtime.KeepAlive(i)
}

func testSupervisorDies(t *testing.T) {
	b := newBench(t)
	require.NoError(t, b.client.Close())
	options := b.opts
	options.Log = nil
	text, err := json.Marshal(options)
	require.NoError(t, err)
	word := fmt.Sprintf("33%d.%d", os.Getpid(), serial)
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self, "supervise")
	cmd.Env = append(os.Environ(), "VZ_TEST_OPTIONS="+string(text), "VZ_TEST_WORD="+word)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { cmd.Process.Kill() })
	line := make([]byte, 3)
	_, err = io.ReadFull(out, line)
	require.NoError(t, err)
	there(word)
	require.NotEmpty(t, launchers(b.opts.StateDir))

	require.NoError(t, cmd.Process.Kill())
	cmd.Wait()
	gone(word)
	for len(launchers(b.opts.StateDir)) > 0 {
		time.Sleep(time.Millisecond)
	}
	b.start()
	require.NoError(t, b.driver.Clean(t.Context(), b.opts.EnvironmentID, "mch_web"))
	newShell(t, b.boot(b.spec("web"))).ok("true")
}

// TestLeftover shows that Start ends the launcher of a supervisor that is
// itself still there (hung, say), and waits until its Machines are gone.
func TestLeftover(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	b := newBench(t)
	i := b.boot(b.spec("web"))
	word := fmt.Sprintf("34%d.%d", os.Getpid(), serial)
	newShell(t, i).ok("setsid sleep " + word + " >/dev/null 2>&1 &")
	there(word)
	b.start()
	assert.Empty(t, onHost(word))
	assert.Len(t, launchers(b.opts.StateDir), 1)
	<-i.Done()
	assert.ErrorIs(t, i.Err(), ErrGone)
	newShell(t, b.boot(b.spec("web"))).ok("true")
}

func testCancel(t *testing.T) {
	b := newBench(t)
	spec := b.spec("web")
	for delay := range 12 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(delay*4)*time.Millisecond)
		i, err := b.driver.Start(ctx, spec)
		cancel()
		if err == nil {
			require.NoError(t, i.Kill(time.Minute))
			discard(i)
		} else {
			require.ErrorIs(t, err, context.DeadlineExceeded)
		}
	}
	// Nothing of them is in the way.
	newShell(t, b.boot(spec)).ok("true")
}

func testRemove(t *testing.T) {
	mounts := hostText(t, "/proc/self/mountinfo")
	b := newBench(t)
	for _, name := range []string{"web", "db"} {
		i := b.boot(b.spec(name))
		newShell(t, i).ok("mkdir -p /sys/fs/cgroup/a/b 2>/dev/null; touch /etc/x /root/y; mkdir -m 000 /srv/closed; chattr +i /root/y 2>/dev/null; sleep 1000 >/dev/null 2>&1 &")
	}
	for _, name := range []string{"web", "db"} {
		require.NoError(t, b.driver.Remove(t.Context(), b.spec(name)))
		require.NoError(t, b.driver.Remove(t.Context(), b.spec(name)), "again")
	}
	assert.NoDirExists(t, b.spec("web").Dir)
	assert.NoDirExists(t, b.spec("db").Dir)
	require.NoError(t, b.client.Close())
	assertNothing(t, b)
	assert.Equal(t, mounts, hostText(t, "/proc/self/mountinfo"))
}

// assertNothing looks for what an Environment could leave on the host. Its
// launcher may still run.
func assertNothing(t *testing.T, b *bench) {
	t.Helper()
	for _, pattern := range []string{"/sys/fs/cgroup/vz/", "/sys/fs/cgroup/*/vz/"} {
		left, err := filepath.Glob(pattern + b.opts.EnvironmentID)
		require.NoError(t, err)
		assert.Empty(t, left)
	}
	left, err := filepath.Glob(b.opts.StateDir + "/machines/*")
	require.NoError(t, err)
	assert.Empty(t, left)
}

func testBadAgent(t *testing.T) {
	b := newBench(t)
	require.NoError(t, b.client.Close())
	b.opts.Agent = filepath.Join(t.TempDir(), "vz-guest")
	_, err := Start(t.Context(), b.opts)
	missing := (*machines.MissingError)(nil)
	require.ErrorAs(t, err, &missing)
	assert.Equal(t, "vz-guest", missing.What)

	require.NoError(t, os.WriteFile(b.opts.Agent, []byte("no program"), 0o755))
	b.start()
	_, err = b.driver.Start(t.Context(), b.spec("web"))
	require.ErrorContains(t, err, "exec format error")
	require.NoError(t, b.driver.Remove(t.Context(), b.spec("web")))
	assertNothing(t, b)
}

func testBounds(t *testing.T) {
	b := newBench(t)
	// A link in the state directory leads nowhere.
	outside := t.TempDir()
	require.NoError(t, os.Symlink(outside, filepath.Join(b.opts.StateDir, "link")))
	spec := b.spec("web")
	spec.Dir = filepath.Join(b.opts.StateDir, "link", "mch_web")
	_, err := b.driver.Start(t.Context(), spec)
	require.Error(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(outside, "file"), nil, 0o600))
	spec.Dir = filepath.Join(b.opts.StateDir, "link", "file")
	require.Error(t, b.driver.Remove(t.Context(), spec))
	assert.FileExists(t, filepath.Join(outside, "file"))

	// What no correct supervisor asks ends the launcher.
	spec = b.spec("web")
	spec.Dir = "/etc/vz"
	_, err = b.driver.Start(t.Context(), spec)
	require.ErrorIs(t, err, ErrGone)
	<-b.client.Done()
	assert.NoDirExists(t, "/etc/vz")
}

func testParallel(t *testing.T) {
	b := newBench(t)
	errs := make(chan error)
	for n := range 6 {
		go func() {
			spec := b.spec(fmt.Sprintf("m%d", n))
			i, err := b.driver.Start(t.Context(), spec)
			if err == nil {
				discard(i)
				err = b.driver.Remove(t.Context(), spec)
			}
			errs <- err
		}()
	}
	for range 6 {
		require.NoError(t, <-errs)
	}
	assertNothing(t, b)
}

const testUID = 12345

// asUser runs this test binary as an ordinary user, in a mount namespace where
// /dev/net/tun is what distributions ship (mode "single"), where he has a
// subordinate range too ("range"), or where it is closed ("closed").
func asUser(t *testing.T, mode string, args ...string) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "vz-user")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	require.NoError(t, os.Chmod(dir, 0o755))
	home := filepath.Join(dir, "home")
	require.NoError(t, os.Mkdir(home, 0o700))
	require.NoError(t, os.Chown(home, testUID, testUID))
	self, err := os.Executable()
	require.NoError(t, err)
	binary := filepath.Join(dir, "test")
	text, err := os.ReadFile(self)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(binary, text, 0o755))

	cmd := exec.Command(binary, append([]string{"as-user", mode}, args...)...)
	cmd.Dir = home
	cmd.Env = append(os.Environ(), "HOME="+home, "TMPDIR="+home, "VZ_TEST_MODE="+mode, "XDG_RUNTIME_DIR=")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	cmd.WaitDelay = 10 * time.Second // what it left behind must not hang this one
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	require.NoError(t, err)
	require.NotContains(t, string(out), "SKIP")
	require.NotContains(t, string(out), "no tests to run")
	return string(out)
}

func asUserMain(mode string, args []string) {
	must := func(err error) {
		if err != nil {
			panic(err)
		}
	}
	must(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	must(unix.Mount("tmpfs", "/mnt", "tmpfs", 0, "mode=0755"))
	if mode != "closed" {
		must(unix.Mknod("/mnt/tun", unix.S_IFCHR, int(unix.Mkdev(10, 200))))
		must(os.Chmod("/mnt/tun", 0o666))
		must(unix.Mount("/mnt/tun", "/dev/net/tun", "", unix.MS_BIND, ""))
	}
	if mode == "range" {
		for file, text := range map[string]string{
			"passwd": fmt.Sprintf("root:x:0:0::/root:/bin/sh\ntester:x:%d:%d::/:/bin/sh\n", testUID, testUID),
			"subuid": "tester:300000:131072\n",
			"subgid": "tester:500000:131072\n",
		} {
			must(os.WriteFile("/mnt/"+file, []byte(text), 0o644))
			must(unix.Mount("/mnt/"+file, "/etc/"+file, "", unix.MS_BIND, ""))
		}
	}
	must(syscall.Setgroups(nil))
	must(syscall.Setgid(testUID))
	must(syscall.Setuid(testUID))
	must(syscall.Exec(os.Args[0], append([]string{os.Args[0]}, args...), os.Environ()))
}

// TestClosedTUN runs by itself as an ordinary user without /dev/net/tun.
func TestClosedTUN(t *testing.T) {
	if os.Getenv("VZ_TEST_MODE") != "closed" {
		if os.Getuid() != 0 {
			t.Skip("needs root to become an ordinary user")
		}
		info, err := os.Stat("/dev/net/tun")
		require.NoError(t, err)
		require.NoError(t, os.Chmod("/dev/net/tun", 0o600))
		t.Cleanup(func() { os.Chmod("/dev/net/tun", info.Mode().Perm()) })
		asUser(t, "closed", "-test.run=^TestClosedTUN$", "-test.v")
		return
	}
	b := newBench(t)
	_, err := b.driver.Start(t.Context(), b.spec("web"))
	missing := (*machines.MissingError)(nil)
	require.ErrorAs(t, err, &missing)
	assert.Equal(t, "/dev/net/tun", missing.What)
	assert.Contains(t, missing.Remedy, "0666")
	require.NoError(t, b.driver.Remove(t.Context(), b.spec("web")))
	assertNothing(t, b)
}
