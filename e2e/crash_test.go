//go:build linux

package e2e

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"vz.test/vz/config"
	"vz.test/vz/supervisor/api/vzv1"
)

var seed = flag.Uint64("seed", 0, "the seed of the crashes; 0 picks one and says so")

// crashes is how many there are: all the hundred unless told otherwise.
func crashes(t *testing.T) int {
	t.Helper()
	text := os.Getenv("VZ_CRASHES")
	if text == "" {
		return 100
	}
	n, err := strconv.Atoi(text)
	require.NoError(t, err, "VZ_CRASHES")
	return n
}

// Whatever is killed at whatever moment: what status says afterwards is true,
// up makes it whole, and delete leaves nothing.
func TestCrashes(t *testing.T) {
	n := crashes(t)
	if *seed == 0 {
		*seed = rand.Uint64()
	}
	t.Logf("%d crashes; again by -seed %d", n, *seed)
	var mu sync.Mutex
	hits := map[string]int{}
	slowest := time.Duration(0)
	// Two worlds at a time: one crashes while the other waits for the kernel.
	const lanes = 2
	for lane := range lanes {
		t.Run(fmt.Sprint("lane ", lane), func(t *testing.T) {
			t.Parallel()
			c := &chaos{random: rand.New(rand.NewPCG(*seed, uint64(lane))), took: map[string]time.Duration{}}
			one := host("net")
			one.Processes["idle"] = config.Process{Command: []string{"sleep", "1000000"}, Restart: "always"}
			c.w = newWorld(t, project(map[string]config.Machine{"one": one, "two": host("net")}))
			for i := lane; i < n && !t.Failed(); {
				if hit := c.once(i); hit != "" {
					i += lanes
					mu.Lock()
					hits[hit]++
					slowest = max(slowest, c.slowest)
					mu.Unlock()
				}
			}
		})
	}
	t.Cleanup(func() { // after the lanes
		var said []string
		for hit, n := range hits {
			said = append(said, fmt.Sprintf("%4d %s", n, hit))
		}
		slices.Sort(said)
		t.Logf("status and the kernel agreed within %v; killed, during:\n%s", slowest.Round(time.Millisecond), strings.Join(said, "\n"))
	})
}

// chaos kills one thing after another in one world.
type chaos struct {
	w      *world
	random *rand.Rand
	took   map[string]time.Duration // the least that each operation took
	up     bool
	// slowest is the longest time until status said what the kernel has,
	// looking included.
	slowest time.Duration
}

var victims = map[string]func(process) bool{
	"supervisor": process.supervisor,
	"launcher":   process.launcher,
	"agent":      process.agent,
	"client":     nil, // the vz that runs the operation
}

// once does one operation, kills one process during it, and looks. It says what
// was hit; nothing when the operation was over too soon.
func (c *chaos) once(i int) (hit string) {
	w := c.w
	operation := []string{"up", "exec", "stop", "delete"}[c.random.IntN(4)]
	victim := []string{"supervisor", "launcher", "agent", "client"}[c.random.IntN(4)]
	w.sub(fmt.Sprintf("%d %s of %s", i, victim, operation), func(t *testing.T) {
		// Where it begins: an up of nothing, of what is stopped or of what is
		// up; everything else of what is up.
		if operation != "up" || c.random.IntN(3) > 0 {
			c.ensure()
			if operation == "up" && c.random.IntN(2) == 0 {
				w.vz("stop", "--environment", "x")
			}
		}
		argv := map[string][]string{
			"up":     {"up", "--environment", "x"},
			"exec":   {"exec", "--environment", "x", "--machine", "one", "--", "sh", "-c", "sleep 0.2; echo done"},
			"stop":   {"stop", "--environment", "x"},
			"delete": {"delete", "--environment", "x"},
		}[operation]
		cmd := w.command("vz", argv...)
		began := time.Now()
		require.NoError(t, cmd.Start())
		ended := make(chan int, 1)
		go func() { ended <- w.wait(cmd, cmd.Wait()) }()

		// A moment of the time that this takes, or the first after it at which
		// there is somebody to kill.
		time.Sleep(time.Duration(c.random.Int64N(int64(c.usual(operation)))))
		killed := false
		for over := false; !killed && !over; {
			select {
			case code := <-ended:
				ended <- code
				over = true
				continue
			default:
			}
			if victim == "client" {
				killed = cmd.Process.Kill() == nil
			} else if found := w.find(victims[victim]); len(found) > 0 {
				killed = syscall.Kill(found[c.random.IntN(len(found))].pid, syscall.SIGKILL) == nil
			}
		}
		code := <-ended
		if killed {
			hit = fmt.Sprintf("%-10s %s", operation, victim)
		} else {
			c.took[operation] = min(c.usual(operation), time.Since(began))
		}

		c.truthful(t)
		if !killed {
			require.Zero(t, code)
		}
		w.vz("up", "--environment", "x")
		requireReady(t, w.status("--environment", "x"))
		require.Equal(t, "whole\n", w.vz("exec", "--environment", "x", "--machine", "two", "--", "echo", "whole"))
		w.must("vz-runtime-probe", "receipts", "--verify", "--environment", "x")
		w.sound()
		w.observe()
		w.vz("delete", "--environment", "x")
		require.Empty(t, w.awaitNothing())
		c.up = false
		clear(w.environments)
		clear(w.spaces)
	})
	return hit
}

// usual is about how long an operation takes when nobody is killed.
func (c *chaos) usual(operation string) time.Duration {
	if took := c.took[operation]; took != 0 {
		return took
	}
	return 300 * time.Millisecond
}

func (c *chaos) ensure() {
	if !c.up {
		c.w.vz("up", "--environment", "x")
		c.up = true
	}
}

// truthful compares what status says with what the kernel has. What was killed
// needs a moment to die and be noticed, so both are looked at until they agree.
func (c *chaos) truthful(t *testing.T) {
	t.Helper()
	var lies []string
	began := time.Now()
	for time.Since(began) < 20*time.Second {
		if lies = c.lies(); len(lies) == 0 {
			c.slowest = max(c.slowest, time.Since(began))
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	assert.Empty(t, lies, "what status says is not so")
}

func (c *chaos) lies() (lies []string) {
	lie := func(format string, args ...any) { lies = append(lies, fmt.Sprintf(format, args...)) }
	for _, e := range c.w.all() {
		processes := c.w.processes()
		supervised := slices.ContainsFunc(processes, process.supervisor)
		if supervised != (e.GetSupervisor() != nil) {
			lie("a supervisor lives: %v, status says %v", supervised, e.GetSupervisor())
		}
		for _, m := range e.GetMachines() {
			lives := slices.ContainsFunc(processes, func(p process) bool { return p.machine == m.GetMachineId() && p.agent() })
			switch m.GetHealth() {
			case vzv1.Health_HEALTH_SUPERVISED:
				if !lives || !supervised {
					lie("%s is said to be supervised; its agent lives: %v, the supervisor: %v", m.GetName(), lives, supervised)
				}
			case vzv1.Health_HEALTH_UNSUPERVISED:
				if lives || supervised {
					lie("%s is said to be unsupervised; its agent lives: %v, the supervisor: %v", m.GetName(), lives, supervised)
				}
			case vzv1.Health_HEALTH_INACTIVE:
				if lives {
					lie("%s is said to be inactive and lives", m.GetName())
				}
			default:
				lie("%s is %v: %s", m.GetName(), m.GetHealth(), m.GetHealthReason())
			}
		}
	}
	return lies
}
