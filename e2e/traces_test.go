//go:build linux

package e2e

import (
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// hostTUNs are the TUN and TAP links that the host had before the tests.
var hostTUNs []string

func tunLinks() []string {
	links, _ := filepath.Glob("/sys/class/net/*/tun_flags")
	return links
}

// A process is one that bears a world's name: in its arguments, environment or
// cgroup, or in its mounts, which no Machine can shed.
type process struct {
	pid     int
	args    []string
	inside  int    // its number in the innermost PID namespace
	machine string // ID; empty for the supervisor, the launcher and clients
	space   string // network namespace
}

func (p process) String() string {
	return fmt.Sprintf("process %d: %s", p.pid, strings.Join(p.args, " "))
}

// Which of vz's processes it is.
func (p process) supervisor() bool {
	return len(p.args) > 1 && filepath.Base(p.args[0]) == "vz-supervisor" && p.args[1] == "--environment-id"
}
func (p process) launcher() bool { return len(p.args) > 1 && p.args[1] == "launcher" }
func (p process) agent() bool    { return p.machine != "" && p.inside == 1 }

var machineID = regexp.MustCompile(`mch_[0-9a-z]{26}`)

// processes are the world's, clients of the tests included.
func (w *world) processes() []process {
	entries, _ := os.ReadDir("/proc")
	mounts, _ := os.Readlink("/proc/self/ns/mnt")
	mark := filepath.Base(w.dir)
	var all []process
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		read := func(name string) string {
			text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
			return string(text)
		}
		command := read("cmdline")
		if command == "" {
			continue // the kernel's, or dead
		}
		where := read("cgroup")
		if own, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid)); own != mounts {
			where += read("mountinfo")
		}
		if !strings.Contains(command+read("environ")+where, mark) && !w.mentioned(where) {
			continue
		}
		p := process{pid: pid, args: strings.Split(strings.TrimRight(command, "\x00"), "\x00"), machine: machineID.FindString(where)}
		p.space, _ = os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid))
		for line := range strings.Lines(read("status")) {
			if fields := strings.Fields(line); len(fields) > 1 && fields[0] == "NSpid:" {
				p.inside, _ = strconv.Atoi(fields[len(fields)-1])
			}
		}
		all = append(all, p)
	}
	return all
}

func (w *world) mentioned(text string) bool {
	for id := range w.environments {
		if strings.Contains(text, id) {
			return true
		}
	}
	return false
}

// find returns the world's processes that are so.
func (w *world) find(so func(process) bool) []process {
	return slices.DeleteFunc(w.processes(), func(p process) bool { return !so(p) })
}

// observe notes the network namespaces that are in use, to look for them when
// nobody uses them any more, and the Environments that there are.
func (w *world) observe() {
	own, _ := os.Readlink("/proc/self/ns/net")
	for line := range lines("/proc/uptime") {
		fmt.Sscan(line, &w.observed)
	}
	for _, p := range w.processes() {
		if p.space != "" && p.space != own {
			w.spaces[p.space] = true
		}
	}
	entries, _ := os.ReadDir(w.state() + "/vz/environments")
	for _, e := range entries {
		w.environments[strings.TrimPrefix(e.Name(), ".trash-")] = true
	}
}

// awaitNothing waits for the end of what is ending, and returns what does not.
// delete returns when the Environment is gone; its supervisor has a few
// milliseconds of its own life left then.
func (w *world) awaitNothing() []string {
	for end := time.Now().Add(15 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		left := append(w.running(), w.files()...)
		if len(left) == 0 || time.Now().After(end) {
			return left
		}
	}
}

// running is all of the world that is more than a file.
func (w *world) running() []string {
	var left []string
	for _, p := range w.processes() {
		left = append(left, p.String())
	}
	mark := filepath.Base(w.dir)

	// Sockets with a path; those without one end with their processes.
	for line := range lines("/proc/net/unix") {
		if strings.Contains(line, mark) {
			left = append(left, "unix socket "+line)
		}
	}
	for line := range lines("/proc/self/mountinfo") {
		if strings.Contains(line, mark) || w.mentioned(line) {
			left = append(left, "mount "+line)
		}
	}
	// A namespace without processes lives on by a mount or a descriptor.
	links, _ := filepath.Glob("/proc/[0-9]*/fd/*")
	own, _ := filepath.Glob("/proc/[0-9]*/ns/net")
	for _, link := range append(links, own...) {
		// The kernel gives a number that is free to the next namespace; one
		// that a younger process has is such.
		if target, err := os.Readlink(link); err == nil && w.spaces[target] && began(link) <= w.observed {
			left = append(left, "network namespace "+target+" by "+link)
		}
	}
	for space := range w.spaces {
		for line := range lines("/proc/self/mountinfo") {
			if strings.Contains(line, " "+space+" ") {
				left = append(left, "network namespace by mount "+line)
			}
		}
	}
	for _, link := range tunLinks() {
		if !slices.Contains(hostTUNs, link) {
			left = append(left, "TAP "+link)
		}
	}
	filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && w.environments[d.Name()] {
			left = append(left, "cgroup "+path)
		}
		return nil
	})
	return left
}

// began is when the process that a path below /proc leads to began, in seconds
// since this machine booted.
func began(path string) float64 {
	pid, _, _ := strings.Cut(strings.TrimPrefix(path, "/proc/"), "/")
	stat, _ := os.ReadFile("/proc/" + pid + "/stat")
	// proc(5): after the name, which may hold anything, the 20th field.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(fields) < 20 {
		return math.Inf(1) // it has ended
	}
	const ticks = 100 // a second, on every architecture that Go has
	at, _ := strconv.ParseFloat(fields[19], 64)
	return at / ticks
}

// files are what is kept of the world's Environments. The state root and the
// directory for sockets may stay, empty.
func (w *world) files() []string {
	var left []string
	for _, root := range []string{w.state(), w.runtime()} {
		filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
			if err == nil && path != root && path != root+"/vz" {
				left = append(left, "file "+path)
			}
			return nil
		})
	}
	return left
}

func lines(path string) func(func(string) bool) {
	text, _ := os.ReadFile(path)
	return strings.Lines(string(text))
}
