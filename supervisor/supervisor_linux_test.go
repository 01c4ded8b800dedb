package supervisor

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"vz.test/vz/config"
	"vz.test/vz/guest/agent"
	"vz.test/vz/machines"
	"vz.test/vz/netstack/link"
	"vz.test/vz/supervisor/api/vzv1"
	"vz.test/vz/supervisor/client"
	"vz.test/vz/supervisor/registry"
)

// inProcess runs Machines as agents in this process, without networks: enough
// of a driver for what the supervisor does, and all of it under the race
// detector.
type inProcess struct {
	root string

	mu      sync.Mutex
	running map[string]*agentInstance // by Machine ID
	refuse  error                     // what Start fails with
}

type agentInstance struct {
	ours, theirs net.Conn
	done         chan struct{}
	err          error
}

func (d *inProcess) Name() string { return "in-process" }

func (d *inProcess) Start(ctx context.Context, spec machines.Spec) (machines.Instance, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.refuse != nil {
		return nil, d.refuse
	}
	root := filepath.Join(d.root, spec.MachineID)
	for _, dir := range []string{"etc", "run", "tmp"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			return nil, err
		}
	}
	i := &agentInstance{done: make(chan struct{})}
	i.ours, i.theirs = net.Pipe()
	go func() {
		defer close(i.done)
		i.err = agent.Serve(context.Background(), i.theirs, agent.Options{Root: root})
	}()
	d.running[spec.MachineID] = i
	return i, nil
}

func (d *inProcess) Clean(context.Context, string, string) error { return nil }
func (d *inProcess) Remove(_ context.Context, spec machines.Spec) error {
	return os.RemoveAll(filepath.Join(d.root, spec.MachineID))
}

// crash ends a Machine as a kill would.
func (d *inProcess) crash(id string) {
	d.mu.Lock()
	i := d.running[id]
	d.mu.Unlock()
	i.theirs.Close()
	<-i.done
}

func (i *agentInstance) Ports() []link.Port        { return nil }
func (i *agentInstance) Agent() io.ReadWriteCloser { return i.ours }
func (i *agentInstance) Capabilities() []string    { return []string{"test"} }
func (i *agentInstance) Notes() []machines.Note    { return nil }
func (i *agentInstance) Done() <-chan struct{}     { return i.done }
func (i *agentInstance) Err() error                { return i.err }
func (i *agentInstance) Kill(time.Duration) error {
	i.theirs.Close()
	<-i.done
	return nil
}

// A home is one Environment with its supervisor in this process.
type home struct {
	t           *testing.T
	registry    *registry.Registry
	driver      *inProcess
	environment string
	gone        chan struct{} // closed: the driver's launcher is dead
	stop        context.CancelFunc
	ended       chan error
	*client.Client
}

func newHome(t *testing.T) *home {
	dir, err := os.MkdirTemp("", "vz")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	require.NoError(t, os.Mkdir(filepath.Join(dir, "run"), 0o700))
	environment := map[string]string{"XDG_STATE_HOME": dir, "XDG_RUNTIME_DIR": filepath.Join(dir, "run")}
	r, err := registry.Open(registry.Options{Getenv: func(key string) string { return environment[key] }})
	require.NoError(t, err)
	name := "test"
	selected, _, err := r.PrepareUp(registry.UpRequest{ProjectName: "test", Request: registry.Request{Flag: &name, ProjectID: project}})
	require.NoError(t, err)
	h := &home{t: t, registry: r, environment: selected.EnvironmentID,
		driver: &inProcess{root: filepath.Join(dir, "machines"), running: map[string]*agentInstance{}}}
	t.Cleanup(func() { goleak.VerifyNone(t) })
	h.start()
	return h
}

// start runs a supervisor, as vz-supervisor does.
func (h *home) start() {
	ctx, stop := context.WithCancel(context.Background())
	owner, err := h.registry.Own(ctx, h.environment)
	require.NoError(h.t, err)
	listener, err := owner.Listen()
	require.NoError(h.t, err)
	ready := make(chan struct{})
	gone, ended := make(chan struct{}), make(chan error, 1)
	h.gone, h.stop, h.ended = gone, stop, ended
	go func() {
		defer owner.Close()
		ended <- Run(ctx, Options{Registry: h.registry, Owner: owner, Listener: listener, Driver: h.driver, DriverGone: gone,
			Log: slog.New(slog.DiscardHandler), Ready: func() { close(ready) }})
	}()
	<-ready
	h.Client = client.New(h.registry.SocketPath(h.environment))
	h.t.Cleanup(func() { h.end() })
}

// end ends the supervisor as SIGTERM does and waits for it.
func (h *home) end() {
	h.Close()
	h.stop()
	if err, ok := <-h.ended; ok {
		require.NoError(h.t, err)
		close(h.ended)
	}
}

const project = "prj_01kbcdefghjkmnpqrstvwxyz01"

// definition has Machines of these names, each with one process.
func definition(t *testing.T, command string, names ...string) []byte {
	no := false
	d := &config.Definition{SchemaVersion: 1, ProjectID: project, Name: "test", Machines: map[string]config.Machine{}}
	for _, name := range names {
		d.Machines[name] = config.Machine{
			Target:  config.Target{OS: "linux", Arch: "host", Image: "host"},
			Profile: "developer", Docker: &no, Isolation: "namespace",
			Processes: map[string]config.Process{"server": {Command: []string{"sh", "-c", command}, Restart: "never"}},
		}
	}
	text, err := d.JSON()
	require.NoError(t, err)
	return text
}

func (h *home) up(text []byte) error {
	stream, err := h.Environment.Reconcile(context.Background(), connect.NewRequest(&vzv1.ReconcileRequest{Definition: text}))
	if err != nil {
		return client.Problem(err)
	}
	_, err = client.Follow(stream, func(*vzv1.Event) {})
	return err
}

func (h *home) get() *vzv1.Environment {
	r, err := h.Environment.Get(context.Background(), connect.NewRequest(&vzv1.GetEnvironmentRequest{}))
	require.NoError(h.t, err)
	return r.Msg
}

func (h *home) machine(name string) *vzv1.Machine {
	for _, m := range h.get().GetMachines() {
		if m.GetName() == name {
			return m
		}
	}
	return nil
}

// eventually waits for what comes by itself soon.
func (h *home) eventually(what func() bool) {
	h.t.Helper()
	for range 1000 {
		if what() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	h.t.Fatal("it never came")
}

func TestLife(t *testing.T) {
	h := newHome(t)
	require.NoError(t, h.up(definition(t, "sleep 1000", "a", "b")))
	e := h.get()
	require.Equal(t, vzv1.EnvironmentState_ENVIRONMENT_STATE_READY, e.GetState())
	first := map[string]string{}
	for _, m := range e.GetMachines() {
		require.Equal(t, vzv1.Health_HEALTH_SUPERVISED, m.GetHealth(), m.GetHealthReason())
		require.Equal(t, "in-process", m.GetDriver())
		require.Equal(t, "running", m.GetProcesses()[0].GetState())
		first[m.GetName()] = m.GetIncarnation()
	}

	// The same again touches nothing; another process is no reason to boot.
	require.NoError(t, h.up(definition(t, "sleep 1000", "a", "b")))
	require.NoError(t, h.up(definition(t, "sleep 2000", "a", "b")))
	require.Equal(t, first["a"], h.machine("a").GetIncarnation())

	// A Machine that is no longer declared goes, its neighbour stays.
	require.NoError(t, h.up(definition(t, "sleep 2000", "b")))
	require.Nil(t, h.machine("a"))
	require.Equal(t, first["b"], h.machine("b").GetIncarnation())

	stream, err := h.Environment.Stop(context.Background(), connect.NewRequest(&vzv1.StopEnvironmentRequest{}))
	require.NoError(t, err)
	_, err = client.Follow(stream, func(*vzv1.Event) {})
	require.NoError(t, err)
	require.NoError(t, <-h.ended)
	close(h.ended)
	h.Close()
	record, err := h.registry.Record(h.environment)
	require.NoError(t, err)
	require.Equal(t, registry.Stopped, record.State)
	require.Equal(t, registry.MachineStopped, record.Machine("b").State)

	h.start()
	require.NoError(t, h.up(definition(t, "sleep 2000", "b")))
	require.NotEqual(t, first["b"], h.machine("b").GetIncarnation(), "every boot has an incarnation of its own")
}

func TestHealth(t *testing.T) {
	h := newHome(t)
	require.NoError(t, h.up(definition(t, "sleep 1000", "a")))
	record, err := h.registry.Record(h.environment)
	require.NoError(t, err)
	require.Equal(t, vzv1.Health_HEALTH_SUPERVISED, h.machine("a").GetHealth())

	// Somebody writes another incarnation into the record.
	forged := record.Clone()
	forged.Machines[0].Incarnation = registry.NewID(registry.KindIncarnation)
	require.NoError(t, h.registry.Save(forged))
	require.Equal(t, vzv1.Health_HEALTH_DIVERGED, h.machine("a").GetHealth())

	// The supervisor can't read its own registry.
	path := h.registry.RecordPath(h.environment)
	require.NoError(t, os.Rename(path, path+".away"))
	require.NoError(t, os.Rename(path+".prev", path+".prev.away"))
	require.Equal(t, vzv1.Health_HEALTH_UNOBSERVABLE, h.machine("a").GetHealth())
	require.NotEmpty(t, h.machine("a").GetHealthReason())
	require.NoError(t, os.Rename(path+".away", path))
	require.NoError(t, h.registry.Save(record))
	require.Equal(t, vzv1.Health_HEALTH_SUPERVISED, h.machine("a").GetHealth())
}

func TestAMachineThatDiesIsSeenAndBootedAnew(t *testing.T) {
	h := newHome(t)
	text := definition(t, "sleep 1000", "a", "b")
	require.NoError(t, h.up(text))
	before := h.machine("a")
	h.driver.crash(before.GetMachineId())
	h.eventually(func() bool { return h.machine("a").GetState() == vzv1.MachineState_MACHINE_STATE_FAILED })
	require.Equal(t, vzv1.Health_HEALTH_INACTIVE, h.machine("a").GetHealth())
	require.Equal(t, vzv1.EnvironmentState_ENVIRONMENT_STATE_DEGRADED, h.get().GetState())
	require.Contains(t, h.machine("a").GetMessage(), "ended unexpectedly")
	require.Equal(t, vzv1.Health_HEALTH_SUPERVISED, h.machine("b").GetHealth())

	require.NoError(t, h.up(text))
	after := h.machine("a")
	require.Equal(t, vzv1.Health_HEALTH_SUPERVISED, after.GetHealth())
	require.Equal(t, before.GetMachineId(), after.GetMachineId())
	require.NotEqual(t, before.GetIncarnation(), after.GetIncarnation())
	require.Equal(t, vzv1.EnvironmentState_ENVIRONMENT_STATE_READY, h.get().GetState())
}

func TestAFailedUpSaysWhyAndTheNextConverges(t *testing.T) {
	h := newHome(t)
	h.driver.refuse = &machines.MissingError{What: "/dev/net/tun", Why: "it is not there", Remedy: "load the module tun"}
	err := h.up(definition(t, "sleep 1000", "a"))
	require.ErrorContains(t, err, "/dev/net/tun")
	require.ErrorContains(t, err, "load the module tun")
	require.Equal(t, vzv1.MachineState_MACHINE_STATE_FAILED, h.machine("a").GetState())
	require.Equal(t, vzv1.EnvironmentState_ENVIRONMENT_STATE_FAILED, h.get().GetState())

	h.driver.refuse = nil
	// Without a ready condition it counts as up while it runs; whether the up
	// sees that it ended is a matter of time.
	if err := h.up(definition(t, "exit 3", "a")); err != nil {
		require.ErrorContains(t, err, "process server of machine a failed")
	}
	h.eventually(func() bool { return h.machine("a").GetProcesses()[0].GetState() == "failed" })
	require.EqualValues(t, 3, h.machine("a").GetProcesses()[0].GetExitCode())
}

func TestTheEndOfTheLauncherIsRecorded(t *testing.T) {
	h := newHome(t)
	require.NoError(t, h.up(definition(t, "sleep 1000", "a")))
	h.driver.crash(h.machine("a").GetMachineId())
	close(h.gone)
	require.NoError(t, <-h.ended)
	close(h.ended)
	record, err := h.registry.Record(h.environment)
	require.NoError(t, err)
	require.Equal(t, registry.Failed, record.State)
	require.NotEqual(t, registry.MachineReady, record.Machine("a").State)
}

func TestDelete(t *testing.T) {
	h := newHome(t)
	require.NoError(t, h.up(definition(t, "sleep 1000", "a", "b")))
	selected := &registry.Selection{ProjectID: project, EnvironmentID: h.environment}
	head, err := client.Delete(context.Background(), h.registry, selected, func(*vzv1.Event) {})
	require.NoError(t, err)
	require.Equal(t, uint64(2), head.GetCount(), "one of up, one of delete")
	_, err = h.registry.Record(h.environment)
	require.ErrorIs(t, err, os.ErrNotExist)
	left, err := os.ReadDir(h.registry.Root())
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestWatchersSeeStepsAndEndWithTheSupervisor(t *testing.T) {
	h := newHome(t)
	steps := make(chan string, 1000)
	ended := make(chan error, 1)
	stream, err := h.Environment.Watch(context.Background(), connect.NewRequest(&vzv1.WatchEnvironmentRequest{Replay: true}))
	require.NoError(t, err)
	go func() {
		for stream.Receive() {
			if p := stream.Msg().GetProgress(); p != nil {
				steps <- p.GetStep()
			}
		}
		ended <- stream.Err()
	}()
	require.NoError(t, h.up(definition(t, "sleep 1000", "a")))
	seen := map[string]bool{}
	h.eventually(func() bool {
		for {
			select {
			case step := <-steps:
				seen[step] = true
			default:
				return seen["machine.boot"] && seen["machine.configure"] && seen["machine.ready"] && seen["up"]
			}
		}
	})
	h.end()
	require.NoError(t, <-ended, "the stream ends, it is not cut off")
}

// Everything at once, for the race detector: whatever comes of each call, the
// supervisor answers and ends cleanly.
func TestManyClients(t *testing.T) {
	h := newHome(t)
	text := definition(t, "sleep 1000", "a", "b", "c")
	require.NoError(t, h.up(text))
	var clients sync.WaitGroup
	for i := range 4 {
		clients.Go(func() {
			for n := range 5 {
				h.get()
				status, err := h.Run(context.Background(), client.Exec{Machine: "a", Argv: []string{"sh", "-c", fmt.Sprintf("exit %d", n)}, Stdout: io.Discard, Stderr: io.Discard})
				if err == nil && status != n {
					t.Errorf("exit status %d, want %d", status, n)
				}
				switch i {
				case 0:
					h.up(text)
				case 1:
					h.driver.crash(h.machine("b").GetMachineId())
				}
			}
		})
	}
	clients.Wait()
	require.NoError(t, h.up(text))
	for _, m := range h.get().GetMachines() {
		require.Equal(t, vzv1.Health_HEALTH_SUPERVISED, m.GetHealth(), m.GetHealthReason())
	}
}

func TestCancelledUpEndsAtOnceAndKeepsWhatCameUp(t *testing.T) {
	h := newHome(t)
	ctx, cancel := context.WithCancel(context.Background())
	stream, err := h.Environment.Reconcile(ctx, connect.NewRequest(&vzv1.ReconcileRequest{Definition: definition(t, "sleep 1000", "a")}))
	require.NoError(t, err)
	_, err = client.Follow(stream, func(e *vzv1.Event) {
		if e.GetProgress().GetStep() == "machine.boot" {
			cancel()
		}
	})
	require.Error(t, err)
	h.eventually(func() bool {
		s := h.get().GetState()
		return s == vzv1.EnvironmentState_ENVIRONMENT_STATE_FAILED || s == vzv1.EnvironmentState_ENVIRONMENT_STATE_READY
	})
	require.NoError(t, h.up(definition(t, "sleep 1000", "a")))
	require.Equal(t, vzv1.Health_HEALTH_SUPERVISED, h.machine("a").GetHealth())
}
