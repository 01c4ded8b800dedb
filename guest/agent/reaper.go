//go:build linux

package agent

import (
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// reaper starts every child and owns every wait of this process, so that no
// two waits compete for one status. As init it collects orphans as well; else
// it waits for its own children only and leaves those of others alone.
type reaper struct {
	init    bool
	signals chan os.Signal
	stopped sync.WaitGroup

	// mu is held over fork and registration, so that a child that ends at once
	// is not yet collected as an orphan, and over each round of waits.
	mu       sync.Mutex
	children map[int]*child
}

// child leads a session and process group of its own; both have its pid as
// their number.
type child struct {
	pid    int
	done   chan struct{}
	status unix.WaitStatus // valid once done is closed
	ended  time.Time       // likewise
}

func newReaper(init bool) *reaper {
	r := &reaper{init: init, signals: make(chan os.Signal, 1), children: map[int]*child{}}
	signal.Notify(r.signals, unix.SIGCHLD)
	r.stopped.Go(func() {
		for range r.signals {
			r.reap()
		}
	})
	return r
}

// close ends the waiting; children must have ended.
func (r *reaper) close() {
	signal.Stop(r.signals)
	close(r.signals)
	r.stopped.Wait()
}

func (r *reaper) start(path string, argv []string, attr *syscall.ProcAttr) (*child, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	pid, err := syscall.ForkExec(path, argv, attr)
	if err != nil {
		return nil, err
	}
	c := &child{pid: pid, done: make(chan struct{})}
	r.children[pid] = c
	return c, nil
}

func (r *reaper) reap() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.init {
		for pid := range r.children {
			r.wait(pid)
		}
		return
	}
	for r.wait(-1) {
	}
}

// wait collects one ended child and says whether there was one.
func (r *reaper) wait(pid int) bool {
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(pid, &status, unix.WNOHANG, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil || pid <= 0 {
			return false
		}
		if c := r.children[pid]; c != nil {
			delete(r.children, pid)
			c.status, c.ended = status, time.Now()
			close(c.done)
		}
		return true
	}
}

// endAll ends every child with its session and, as init, every process.
func (r *reaper) endAll(grace time.Duration) {
	r.mu.Lock()
	var all sync.WaitGroup
	for _, c := range r.children {
		all.Go(func() { c.end(unix.SIGTERM, grace) })
	}
	r.mu.Unlock()
	if r.init {
		// As PID 1 these reach all but itself, and ESRCH says that none is left.
		unix.Kill(-1, unix.SIGTERM)
		unix.Kill(-1, unix.SIGCONT)
		alone := func() bool { return unix.Kill(-1, 0) == unix.ESRCH }
		await(grace, alone)
		unix.Kill(-1, unix.SIGKILL)
		await(time.Second, alone) // but for what sleeps in the kernel, which ends with the namespace
	}
	all.Wait()
}

// end sends first to the child's session, then SIGKILL to what is left of it
// after grace, and returns when all of it is gone.
func (c *child) end(first unix.Signal, grace time.Duration) {
	if grace > 0 {
		c.signalSession(first)
		c.signalSession(unix.SIGCONT) // a stopped process could not obey
		await(grace, c.gone)
	}
	for !c.gone() {
		c.signalSession(unix.SIGKILL)
		await(100*time.Millisecond, c.gone)
	}
}

func (c *child) exited() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

func (c *child) gone() bool { return c.exited() && len(c.session()) == 0 }

// signalGroup reaches the process group that the child began with. Once the
// child is reaped its number can in principle become another's, though not
// while the group has a member, and not before the kernel has gone once round
// all process numbers.
func (c *child) signalGroup(s unix.Signal) { unix.Kill(-c.pid, s) }

// signalSession reaches the jobs of an interactive shell too, which have groups
// of their own.
func (c *child) signalSession(s unix.Signal) {
	c.signalGroup(s)
	for _, pid := range c.session() {
		unix.Kill(pid, s)
	}
}

// session lists the living processes of the child's session.
func (c *child) session() []int {
	proc, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer proc.Close()
	names, _ := proc.Readdirnames(-1)
	var members []int
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		stat, err := os.ReadFile("/proc/" + name + "/stat")
		if err != nil {
			continue // it has ended
		}
		// proc(5): pid (comm) state ppid pgrp session ...; comm may hold anything.
		fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		if len(fields) < 4 || fields[0] == "Z" || fields[0] == "X" {
			continue
		}
		if session, _ := strconv.Atoi(fields[3]); session == c.pid {
			members = append(members, pid)
		}
	}
	return members
}

// await polls until met or limit has passed. The kernel tells of the end of
// children only, not of a group's or session's.
func await(limit time.Duration, met func() bool) {
	for end := time.Now().Add(limit); !met() && time.Now().Before(end); {
		time.Sleep(min(10*time.Millisecond, time.Until(end)))
	}
}
