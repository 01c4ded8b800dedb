//go:build linux

package e2e

import (
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// ordinary is a user ID that this machine knows nothing about.
const ordinary = 61873

// secrets are files that only root, or only another user, may read, in places
// that Machines see something of. They bear the world's name.
func (w *world) secrets(text string) []string {
	w.t.Helper()
	name := filepath.Base(w.dir)
	var all []string
	for _, place := range []struct {
		dir  string
		uid  int
		mode os.FileMode
	}{
		{"/etc", 0, 0o600}, {"/etc/ssl", 0, 0o600}, {"/usr/local/bin", 0, 0o700}, {"/usr/local/share", 0, 0o640}, {"/usr/lib", 0, 0o600},
		{"/opt", 0, 0o600}, {"/srv", 0, 0o644}, {"/var/lib", 0, 0o644}, {"/var/log", 0, 0o644}, {"/var/tmp", 0, 0o644},
		{"/tmp", 0, 0o644}, {"/root", 0, 0o644}, {"/run", 0, 0o644}, {"/home/" + name, 4242, 0o644}, {"/dev/shm", 0, 0o644},
	} {
		if place.dir == "/home/"+name {
			require.NoError(w.t, os.Mkdir(place.dir, 0o755))
			w.t.Cleanup(func() { os.RemoveAll(place.dir) })
		} else if _, err := os.Stat(place.dir); err != nil {
			continue
		}
		path := place.dir + "/" + name + "-secret"
		require.NoError(w.t, os.WriteFile(path, []byte(text), place.mode))
		require.NoError(w.t, os.Chmod(path, place.mode))
		require.NoError(w.t, os.Chown(path, place.uid, place.uid))
		w.t.Cleanup(func() { os.Remove(path) })
		all = append(all, path)
	}
	return all
}

// sealed says that what guest root does in a Machine neither tells nor changes
// anything of the host's. argv runs a shell program in the Machine.
func (w *world) sealed(t *testing.T, machine string) {
	t.Helper()
	text := fmt.Sprintf("kept from Machines %016x", rand.Uint64())
	secrets := w.secrets(text)
	sh := func(program string, args ...string) result {
		return w.tryExec(machine, append([]string{"sh", "-c", program, "sh"}, args...)...)
	}
	require.Equal(t, "0\n", sh("id -u").out, "this is about guest root")

	// Read, as it is and after guest root did what root can to get around. Each
	// time in a mount namespace of its own, and by the shell alone: it may have
	// taken its own tools away.
	targets := append([]string{"/etc/shadow", "/etc/gshadow", "/etc/sudoers", w.state() + "/vz/.", w.dir + "/home/.", w.definePath()}, secrets...)
	for _, around := range []string{
		":",
		"umount -l /etc",
		"umount -l /usr",
		"umount -l /opt /home /root /tmp /run /sys /dev; umount -l /proc",
		"mkdir -p /mnt/etc; mount --bind / /mnt; mount --rbind / /mnt; cd /mnt",
		"mount -o remount,rw /; mount -o remount,rw /etc; mount -t tmpfs none /mnt; mount -t proc proc /proc; cd /proc/1/root",
		"mkdir -p /mnt/new/old; mount -t tmpfs none /mnt/new; mkdir /mnt/new/old; pivot_root /mnt/new /mnt/new/old; cd /old",
		"chmod -R a+rwX /etc /opt /usr/local /srv /var/lib /root /home",
		"rm -rf /etc/*; mv /usr/local/bin /usr/local/bin.moved; rmdir /opt; mkdir /opt",
	} {
		r := sh(`exec unshare --mount --propagation private sh -c '
exec 3>&1 >/dev/null 2>&1
`+around+`
for f in "$@"; do
	for path in "$f" ".$f"; do
		{ IFS= read -r line < "$path"; } && echo "READ $path: $line" >&3
		[ -d "$path" ] && echo "SAW $path" >&3
	done
done
echo tried >&3' sh "$@"`, targets...)
		assert.Equal(t, "tried\n", r.out, "after %s: %s", around, r.err)
	}
	found := sh(`echo "kept from Machines" > /root/own; grep -rlsI "kept from Machines" /etc /opt /usr/local /srv /var /root /home /tmp /run /mnt /dev/shm`)
	assert.Equal(t, "/root/own\n", found.out, "what it finds is its own")
	// What guest root tore down is its own, and an up makes it work again.
	w.vz("stop")
	w.vz("up")

	// The host's processes, devices and knobs are not there.
	assert.Equal(t, "vz-guest\n", sh("cat /proc/1/comm").out)
	inside := strings.TrimSpace(sh("ls -d /proc/[0-9]* | wc -l").out)
	assert.Regexp(t, `^[0-9]{1,2}$`, inside, "processes that it sees")
	forbidden := []string{
		"mknod /tmp/disk b 8 0 && head -c1 /tmp/disk",
		"mknod /tmp/kmsg c 1 11 && head -c1 /tmp/kmsg",
		"head -c1 /dev/kmsg", "head -c1 /dev/mem", "ls /dev/sd* /dev/vd* /dev/nvme*",
		"echo 1 > /proc/sysrq-trigger", "echo 1 > /proc/sys/vm/drop_caches", "echo x > /proc/sys/kernel/core_pattern",
		"echo 60 > /proc/sys/vm/swappiness", "echo 1 > /sys/kernel/mm/ksm/run", "mount -o remount,rw /sys && echo 1 > /sys/kernel/mm/ksm/run",
		"mount -t ext4 /dev/vda /mnt", "mount -t debugfs none /mnt", "mount -t securityfs none /mnt",
		"insmod /dev/null", "dmesg | grep .", "date -s 2001-01-01", "swapoff -a && false",
	}
	succeeded := sh(`for f in "$@" true; do sh -c "$f" >/dev/null 2>&1 && printf '%s\n' "$f"; done`, forbidden...)
	assert.Equal(t, "true\n", succeeded.out)

	// Write: whatever it changes, it changes for itself.
	before := map[string]string{}
	watched := append([]string{"/etc/passwd", "/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/usr/bin/env", "/bin/sh", "/etc/ld.so.cache", bin + "/vz-guest"}, secrets...)
	for _, path := range watched {
		before[path] = fingerprint(t, path)
	}
	name := filepath.Base(w.dir)
	sh(`exec >/dev/null 2>&1
for f in "$@"; do echo changed > "$f"; echo more >> "$f"; mv -f "$f" "$f.moved"; rm -f "$f"; ln -sf /nowhere "$f"; done
for d in / /etc /usr /usr/bin /usr/local /usr/local/bin /opt /srv /var /var/lib /var/tmp /tmp /root /home /run /dev /dev/shm /mnt; do echo mine > $d/`+name+`-mine; mkdir -p $d/`+name+`-dir; done
chown -R 1000:1000 /etc /opt; chmod 777 /etc /usr /; touch -d 2001-01-01 /usr/bin/env; echo changed > /proc/sys/kernel/hostname`, watched...)
	host, err := os.Hostname()
	require.NoError(t, err)
	assert.NotEqual(t, "changed", host)
	for _, path := range watched {
		assert.Equal(t, before[path], fingerprint(t, path), path)
	}
	for _, dir := range []string{"/", "/etc", "/usr", "/usr/bin", "/usr/local", "/usr/local/bin", "/opt", "/srv", "/var", "/var/lib", "/var/tmp", "/tmp", "/root", "/home", "/run", "/dev", "/dev/shm", "/mnt"} {
		assert.NoFileExists(t, dir+"/"+name+"-mine")
		assert.NoDirExists(t, dir+"/"+name+"-dir")
	}
}

// fingerprint is a file's content, owner, mode and time.
func fingerprint(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if os.IsNotExist(err) {
		return "absent"
	}
	require.NoError(t, err)
	info, err := os.Lstat(path)
	require.NoError(t, err)
	owner := info.Sys().(*syscall.Stat_t)
	return fmt.Sprintf("%x %v %d:%d %v", sha256.Sum256(text), info.Mode(), owner.Uid, owner.Gid, info.ModTime())
}

func TestHostIsSealed(t *testing.T) {
	t.Parallel()
	hardened := host("net")
	hardened.Profile, hardened.Docker = "hardened", nil
	definition := sole()
	definition.Machines["two"] = hardened
	w := newWorld(t, definition)
	w.vz("up", "--environment", "blue")
	one := machine(t, w.status(), "one").GetMachineId()

	w.sub("guest root is not host root", func(t *testing.T) {
		agent := w.one("agent of one", func(p process) bool { return p.agent() && p.machine == one })
		info, err := os.Stat(fmt.Sprintf("/proc/%d", agent.pid))
		require.NoError(t, err)
		assert.Greater(t, info.Sys().(*syscall.Stat_t).Uid, uint32(1000))
		for _, kind := range []string{"user", "mnt", "pid", "uts", "ipc", "net", "cgroup"} {
			ours, err := os.Readlink("/proc/self/ns/" + kind)
			require.NoError(t, err)
			theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", agent.pid, kind))
			require.NoError(t, err)
			assert.NotEqual(t, ours, theirs, kind)
		}
	})
	w.sub("developer", func(t *testing.T) { w.sealed(t, "one") })
	w.sub("hardened", func(t *testing.T) {
		w.sealed(t, "two")
		assert.NotZero(t, w.tryExec("two", "unshare", "--user", "true").code, "no user namespace of its own")
		assert.Equal(t, "NoNewPrivs:\t1\n", w.exec("two", "grep", "NoNewPrivs", "/proc/self/status"))
	})

	w.sub("the supervisor gave its privileges up", func(t *testing.T) {
		supervisor := w.one("supervisor", process.supervisor)
		for line := range lines(fmt.Sprintf("/proc/%d/status", supervisor.pid)) {
			fields := strings.Fields(line)
			switch fields[0] {
			case "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:", "CapInh:":
				assert.Equal(t, "0000000000000000", fields[1], fields[0])
			case "NoNewPrivs:":
				assert.Equal(t, "1", fields[1])
			}
		}
	})
}

// forbidden says whether this kernel keeps user namespaces from ordinary users.
func (w *world) forbidden() bool {
	for path, no := range map[string]string{
		"/proc/sys/kernel/unprivileged_userns_clone":             "0",
		"/proc/sys/user/max_user_namespaces":                     "0",
		"/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1",
	} {
		if text, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(text)) == no {
			return true
		}
	}
	return false
}

// An ordinary user, whom the machine gives /dev/net/tun as distributions do,
// has the whole way too, and neither he nor his Machine learns more.
func TestOrdinaryUser(t *testing.T) {
	t.Parallel()
	definition := site()
	w := newWorldOf(t, ordinary, definition)
	require.Equal(t, itoa(ordinary)+"\n", w.must("id", "-u"))
	if w.forbidden() {
		assert.Contains(t, w.refused("up", "--environment", "blue"), "sysctl", "the remedy is named")
		return
	}
	w.vz("up", "--environment", "blue")
	e := w.status()
	requireReady(t, e)
	for _, p := range w.processes() {
		info, err := os.Stat(fmt.Sprintf("/proc/%d", p.pid))
		if err == nil {
			assert.NotZero(t, info.Sys().(*syscall.Stat_t).Uid, "%s runs as root", p)
		}
	}
	for _, m := range e.GetMachines() {
		noted := map[string]bool{}
		for _, n := range m.GetCapabilities().GetNotes() {
			noted[n.GetCapability()] = true
			assert.NotEmpty(t, n.GetReason())
		}
		assert.True(t, noted["user_ids"], "without a subordinate range there is one ID, and that is said: %v", m.GetCapabilities())
		assert.True(t, noted["limit_pids"], "no cgroup is delegated, and that is said: %v", m.GetCapabilities())
	}

	const page = "an ordinary page\n"
	w.exec("web", "sh", "-c", "printf '"+page+"' > /tmp/www/index.html")
	assert.Equal(t, page, w.exec("client", "curl", "-sS", "--fail", "https://shop.test/"))
	proxy := e.GetProxy()
	r := w.run("curl", "-sS", "--fail", "--proxy", proxy.GetUrl(), "--cacert", proxy.GetCaPath(), "https://shop.test/")
	assert.Equal(t, page, r.out, r.String())

	// Not even root's processes are served by what is this user's.
	out, err := exec.Command("curl", "-sS", "--max-time", "60", "--proxy", proxy.GetUrl(), "--cacert", proxy.GetCaPath(), "https://shop.test/").CombinedOutput()
	assert.Error(t, err, "%s", out)
	w.sealed(t, "client")

	w.vz("stop")
	w.eventually("nothing runs", func() bool { return len(w.running()) == 0 })
	w.vz("up")
	sameIdentity(t, e, w.status())
}
