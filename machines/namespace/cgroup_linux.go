package namespace

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"vz.test/vz/machines"
)

// maxTasks bounds the processes and threads of one Machine, so that a fork bomb
// costs only itself: half of what one 64-bit pid namespace would allow by
// default (32768), far above what a developer's tools need.
const maxTasks = 16384

// cpuPeriod is the period of a CPU limit in microseconds, the kernel's default.
const cpuPeriod = 100000

// A hierarchy is one mounted cgroup tree in which Machines get a directory:
// the unified one (version 2), or one of version 1 with its controllers.
type hierarchy struct {
	base        string // where vz/ENV/MCH goes
	unified     bool
	controllers []string // of version 1
}

// findHierarchies says where this process may make cgroups. Root uses the root
// of every hierarchy; an ordinary user what was delegated to him: the highest
// ancestor of his own cgroup that is his.
func findHierarchies(root bool) []hierarchy {
	mountinfo, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil
	}
	own, _ := os.ReadFile("/proc/self/cgroup")
	var found []hierarchy
	for _, h := range parseHierarchies(mountinfo) {
		if !root {
			if !h.unified {
				continue
			}
			h.base = delegated(h.base, ownCgroup(own))
		}
		if h.base != "" && unix.Access(h.base, unix.W_OK) == nil {
			found = append(found, h)
		}
	}
	return found
}

// parseHierarchies reads proc_pid_mountinfo(5).
func parseHierarchies(mountinfo []byte) []hierarchy {
	var found []hierarchy
	for line := range strings.Lines(string(mountinfo)) {
		before, after, ok := strings.Cut(line, " - ")
		mount, super := strings.Fields(before), strings.Fields(after)
		if !ok || len(mount) < 6 || len(super) < 3 {
			continue
		}
		switch super[0] {
		case "cgroup2":
			if !slices.ContainsFunc(found, func(h hierarchy) bool { return h.unified }) {
				found = append(found, hierarchy{base: unescape(mount[4]), unified: true})
			}
		case "cgroup":
			h := hierarchy{base: unescape(mount[4])}
			for option := range strings.SplitSeq(super[2], ",") {
				if option == "cpu" || option == "memory" || option == "pids" {
					h.controllers = append(h.controllers, option)
				}
			}
			if h.controllers != nil {
				found = append(found, h)
			}
		}
	}
	return found
}

// unescape undoes the octal escapes of mountinfo (space, tab, newline, backslash).
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// ownCgroup is this process's path in the unified hierarchy.
func ownCgroup(text []byte) string {
	for line := range strings.Lines(string(text)) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			return path
		}
	}
	return ""
}

// delegated walks up from path while the directories are ours and returns the
// last of them, or "".
func delegated(mount, path string) string {
	if path == "" || strings.HasPrefix(path, "/..") {
		return ""
	}
	highest := ""
	for dir := filepath.Join(mount, path); strings.HasPrefix(dir, mount); dir = filepath.Dir(dir) {
		if unix.Access(filepath.Join(dir, "cgroup.procs"), unix.W_OK) != nil || unix.Access(dir, unix.W_OK) != nil {
			break
		}
		highest = dir
		if dir == mount {
			break
		}
	}
	return highest
}

// A cgroup is one Machine's directories, one in each hierarchy. They exist
// while the Machine does; whoever knows the IDs can find and end what is left.
type cgroup struct {
	environment, machine string
	hierarchies          []hierarchy
}

func (c cgroup) dir(h hierarchy) string {
	return filepath.Join(h.base, "vz", c.environment, c.machine)
}

// limits is what a cgroup was asked for and says what it got.
type limits struct {
	cpus   float64
	memory int64
	owner  IDs // guest root, who may make cgroups of his own below
}

// create makes the directories and sets the limits. What can't be had is a
// Note; there is no error, because a Machine works without any.
func (c cgroup) create(want limits) (capabilities []string, notes []machines.Note) {
	why := map[string]string{}
	had := map[string]bool{}
	any := false
	for _, h := range c.hierarchies {
		dir := c.dir(h)
		if err := makeCgroup(h, dir); err != nil {
			why["cgroup"] = err.Error()
			continue
		}
		any = true
		var settings []setting
		if h.unified {
			settings = []setting{
				{"limit_pids", "pids.max", strconv.Itoa(maxTasks)},
				{"limit_memory", "memory.max", strconv.FormatInt(want.memory, 10)},
				{"limit_cpu", "cpu.max", fmt.Sprintf("%d %d", quota(want.cpus), cpuPeriod)},
			}
		} else {
			for _, controller := range h.controllers {
				switch controller {
				case "pids":
					settings = append(settings, setting{"limit_pids", "pids.max", strconv.Itoa(maxTasks)})
				case "memory":
					settings = append(settings, setting{"limit_memory", "memory.limit_in_bytes", strconv.FormatInt(want.memory, 10)})
				case "cpu":
					settings = append(settings, setting{"limit_cpu", "cpu.cfs_quota_us", strconv.Itoa(quota(want.cpus))})
				}
			}
		}
		for _, s := range settings {
			if s.capability == "limit_memory" && want.memory == 0 || s.capability == "limit_cpu" && want.cpus == 0 {
				continue
			}
			if err := writeExisting(filepath.Join(dir, s.file), s.value); err == nil {
				had[s.capability] = true
			} else if !errors.Is(err, fs.ErrNotExist) {
				why[s.capability] = err.Error()
			}
		}
		if h.unified {
			// Delegation as systemd does it: the guest may divide its cgroup,
			// and can't raise its own limits.
			for _, name := range []string{"", "cgroup.procs", "cgroup.threads", "cgroup.subtree_control"} {
				os.Chown(filepath.Join(dir, name), want.owner.UID, want.owner.GID)
			}
		}
	}
	reason := "no cgroup hierarchy is delegated to this user; run vz from a systemd user session, or as root"
	if any {
		reason = "the cgroup delegated here has no such controller"
	} else if why["cgroup"] != "" {
		reason = why["cgroup"]
	}
	for _, asked := range []struct {
		capability string
		wanted     bool
	}{
		{"limit_cpu", want.cpus != 0}, {"limit_memory", want.memory != 0}, {"limit_pids", true},
	} {
		switch {
		case had[asked.capability]:
			capabilities = append(capabilities, asked.capability)
		case asked.wanted:
			if why[asked.capability] != "" {
				reason = why[asked.capability]
			}
			notes = append(notes, machines.Note{Capability: asked.capability, Reason: reason})
		}
	}
	return capabilities, notes
}

type setting struct{ capability, file, value string }

// quota is the CPU time per period, in microseconds; the kernel takes no less
// than 1 ms.
func quota(cpus float64) int { return max(1000, int(cpus*cpuPeriod)) }

// makeCgroup makes dir and its parents below h.base, and hands the controllers
// down. Another Environment's last Machine may be taking the shared parents
// away at the same time, hence the second tries.
func makeCgroup(h hierarchy, dir string) error {
	var err error
	for range 10 {
		if err = os.MkdirAll(dir, 0o755); !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	if err != nil {
		return err
	}
	if h.unified {
		rel, _ := filepath.Rel(h.base, filepath.Dir(dir))
		at := h.base
		for _, element := range append([]string{"."}, strings.Split(rel, "/")...) {
			at = filepath.Join(at, element)
			for _, controller := range []string{"cpu", "memory", "pids"} {
				// One that isn't there shows in the missing limit file.
				writeExisting(filepath.Join(at, "cgroup.subtree_control"), "+"+controller)
			}
		}
	}
	return nil
}

func writeExisting(file, text string) error {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// join moves a process in. A hierarchy that refuses one is a Note's matter, not
// an error: an ordinary user may not move processes between scopes.
func (c cgroup) join(pid int) error {
	var errs []error
	for _, h := range c.hierarchies {
		err := writeExisting(filepath.Join(c.dir(h), "cgroup.procs"), strconv.Itoa(pid))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// pollEvery is how often kill and remove look again: version 1 has no event
// to wait for, and a process takes about this long to die.
const pollEvery = 5 * time.Millisecond

// remove kills what is inside, waits until it is gone, and takes the
// directories away, those of the Environment and of vz too once empty.
func (c cgroup) remove(ctx context.Context) error {
	for _, h := range c.hierarchies {
		dir := c.dir(h)
		for {
			err := removeTree(dir)
			if err == nil {
				break
			}
			kill(dir)
			select {
			case <-ctx.Done():
				return fmt.Errorf("cgroup %s: %w", dir, err)
			case <-time.After(pollEvery):
			}
		}
		// Fails, rightly, while another Machine or Environment is in there.
		if unix.Rmdir(filepath.Dir(dir)) == nil {
			unix.Rmdir(filepath.Dir(filepath.Dir(dir)))
		}
	}
	return nil
}

// removeTree takes away a cgroup and those below it, bottom up; the kernel
// refuses one with processes in it.
func removeTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeTree(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := unix.Rmdir(dir); err != nil && err != unix.ENOENT {
		return err
	}
	return nil
}

// kill sends SIGKILL to every process in a cgroup and below it.
func kill(dir string) {
	if writeExisting(filepath.Join(dir, "cgroup.kill"), "1") == nil {
		return
	}
	filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil
		}
		procs, _ := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		for field := range bytes.FieldsSeq(procs) {
			// 0 is a process of a pid namespace that we can't see; its
			// launcher died and so did it.
			if pid, err := strconv.Atoi(string(field)); err == nil && pid > 1 {
				unix.Kill(pid, unix.SIGKILL)
			}
		}
		return nil
	})
}
