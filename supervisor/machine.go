package supervisor

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"vz.test/vz/config"
	"vz.test/vz/guest"
	"vz.test/vz/guest/wire"
	"vz.test/vz/machines"
	"vz.test/vz/supervisor/registry"
)

const (
	// agentPatience bounds how long a booted Machine's agent may take to say
	// hello and to be configured. A namespace takes 50 ms, a VM under TCG 3 s.
	agentPatience = 60 * time.Second
	// readyPatience bounds how long declared processes may take to be ready.
	readyPatience = 60 * time.Second
	// stopGrace is between SIGTERM and SIGKILL when a Machine is stopped.
	stopGrace = 5 * time.Second
	// lastWords is how long after its channel a Machine may take to end and say
	// why; it takes some milliseconds.
	lastWords = time.Second
	// killPatience bounds how long the kernel may take to end a killed Machine.
	killPatience = 10 * time.Second
)

// A live Machine is one incarnation that this supervisor started. What is
// recorded of it is the registry's; this is what goes with the supervisor.
//
//	             boot                 agent said hello, configured,
//	declared ─────────► starting ───────── processes begun ─────────► ready
//	   ▲  stopped, failed  │                                            │
//	   └───────────────────┴── any step fails, instance or session ends ─┤
//	                                    failed ◄────────────────────────┤
//	                                                    stop            │
//	                                    stopped ◄─── stopping ◄─────────┘
//
// Every boot has a new incarnation; identity, addresses and disk stay.
type live struct {
	name        string
	incarnation string
	made        string // digest of what it was booted from; another one means boot anew
	instance    machines.Instance
	attached    []string // networks
	session     *guest.Session

	end      context.CancelFunc // ends the watchers
	watchers sync.WaitGroup
	leaving  chan struct{} // closed when the end is wanted
	leave    sync.Once
	released sync.Once

	mu        sync.Mutex
	declared  map[string]*wire.ProcessSpec
	processes map[string]*wire.ProcessStatus // of declared ones, as the agent told last
	changed   chan struct{}                  // closed and replaced when a process's state changes
}

// liveMachine is the live one of that name; nil when there is none.
func (s *Supervisor) liveMachine(name string) *live {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.live[name]
}

// bootDigest names everything of a Machine that only a new boot can change.
// Processes are not part of it: the agent takes them as they come.
func bootDigest(declared config.Machine, m registry.Machine, networks map[string]registry.Network) string {
	declared.Processes = nil
	type leased struct { // by DHCP, at boot
		CIDR, Gateway string
		MTU           int
	}
	var own []leased // other networks are other Machines' concern
	for _, a := range m.Attachments {
		n := networks[a.Network]
		own = append(own, leased{n.CIDR, n.Gateway, n.MTU})
	}
	text, err := json.Marshal(struct {
		Declared    config.Machine
		Attachments []registry.Attachment
		Networks    []leased
	}{declared, m.Attachments, own})
	if err != nil {
		panic(err) // plain data
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// boot starts a Machine and returns when its agent is configured and its
// processes have begun. On failure nothing of it is left running and the
// record says why.
func (s *Supervisor) boot(ctx context.Context, op *operation, definition *config.Definition, m registry.Machine) (err error) {
	declared := definition.Machines[m.Name]
	incarnation := registry.NewID(registry.KindIncarnation)
	if err := s.recordMachine(m.Name, func(r *registry.Machine) {
		r.State, r.Incarnation, r.Message, r.ReadyAt = registry.MachineStarting, incarnation, "", time.Time{}
	}); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("machine %s: %w", m.Name, err)
			s.recordMachine(m.Name, func(r *registry.Machine) {
				r.State, r.Message = registry.MachineFailed, err.Error()
			})
		}
	}()

	done := op.step("machine.boot", m.Name)
	spec := s.machineSpec(declared, m, incarnation)
	instance, err := s.driver.Start(ctx, spec)
	if err != nil {
		return done("", err)
	}
	l := &live{
		name: m.Name, incarnation: incarnation, made: bootDigest(declared, m, s.networks()),
		instance: instance, leaving: make(chan struct{}), changed: make(chan struct{}),
		processes: map[string]*wire.ProcessStatus{},
	}
	background, end := context.WithCancel(context.WithoutCancel(ctx))
	l.end = end
	defer func() {
		if err != nil {
			s.release(l)
		}
	}()
	for i, port := range instance.Ports() {
		if err := s.domain.Attach(m.Name, spec.NICs[i].Network, port); err != nil {
			instance.Agent().Close()
			for _, port := range instance.Ports()[i:] {
				port.Close()
			}
			return done("", fmt.Errorf("attaching to network %s: %w", spec.NICs[i].Network, err))
		}
		l.attached = append(l.attached, spec.NICs[i].Network)
	}
	done("", nil)

	done = op.step("machine.configure", m.Name)
	patience, cancel := context.WithTimeout(ctx, agentPatience)
	defer cancel()
	go func() { // a Machine that ends while it is waited for
		select {
		case <-instance.Done():
			cancel()
		case <-patience.Done():
		}
	}()
	l.session, err = guest.Connect(patience, instance.Agent(), guest.Hello{MachineID: m.MachineID, Incarnation: incarnation})
	if err != nil {
		return done("", ended(ctx, instance, err))
	}
	configured, err := l.session.Configure(patience, s.configuration(m))
	if err != nil {
		return done("", ended(ctx, instance, err))
	}
	if err := l.setProcesses(patience, processSpecs(declared)); err != nil {
		return done("", ended(ctx, instance, err))
	}
	done("", nil)

	notes := slices.Concat(s.options.Notes, instance.Notes())
	for _, n := range configured.GetNotes() {
		notes = append(notes, machines.Note{Capability: n.GetCapability(), Reason: n.GetReason()})
	}
	l.watchers.Go(func() { s.watchProcesses(background, l) })
	s.mu.Lock()
	s.live[m.Name] = l
	s.mu.Unlock()
	err = s.recordMachine(m.Name, func(r *registry.Machine) {
		r.State, r.ReadyAt = registry.MachineReady, time.Now()
		r.Negotiated = append(instance.Capabilities(), l.session.Capabilities()...)
		slices.Sort(r.Negotiated)
		r.Negotiated = slices.Compact(r.Negotiated)
		r.Notes = nil
		for _, n := range notes {
			r.Notes = append(r.Notes, registry.Note{Capability: n.Capability, Reason: n.Reason})
		}
	})
	if err != nil {
		return err
	}
	go s.watchMachine(l) // from here on: an end before would be recorded over by ready
	return nil
}

// ended prefers the reason why the Machine is gone to what its loss did to a
// call.
func ended(ctx context.Context, instance machines.Instance, err error) error {
	select {
	case <-instance.Done():
		return fmt.Errorf("the Machine ended while it was started: %w", errors.Join(instance.Err(), err))
	case <-ctx.Done():
	case <-time.After(lastWords):
	}
	return err
}

func (s *Supervisor) detach(l *live) {
	s.mu.Lock()
	domain := s.domain
	s.mu.Unlock()
	for _, network := range l.attached {
		domain.Detach(l.name, network)
	}
}

// machineSpec is what the driver is told.
func (s *Supervisor) machineSpec(declared config.Machine, m registry.Machine, incarnation string) machines.Spec {
	spec := machines.Spec{
		EnvironmentID: s.id, MachineID: m.MachineID, Incarnation: incarnation, Name: m.Name,
		Image: declared.Target.Image, Profile: declared.Profile,
		CPUs: declared.Resources.CPUs, MemoryBytes: declared.Resources.MemoryBytes,
		Dir: s.registry.MachineDir(s.id, m.MachineID), Agent: s.options.Agent,
	}
	networks := s.networks()
	for _, a := range m.Attachments {
		spec.NICs = append(spec.NICs, machines.NIC{Network: a.Network, Name: a.Interface, MAC: a.MAC, MTU: networks[a.Network].MTU})
	}
	return spec
}

// configuration is what the agent is told.
func (s *Supervisor) configuration(m registry.Machine) *wire.ConfigureRequest {
	request := &wire.ConfigureRequest{Hostname: m.Name, SearchDomains: []string{searchDomain}, CaPem: s.ca.PEM()}
	for _, a := range m.Attachments {
		request.Interfaces = append(request.Interfaces, &wire.Interface{Name: a.Interface, Mac: a.MAC})
	}
	return request
}

var restartPolicies = map[string]wire.RestartPolicy{
	"":           wire.RestartPolicy_RESTART_POLICY_NEVER,
	"never":      wire.RestartPolicy_RESTART_POLICY_NEVER,
	"on_failure": wire.RestartPolicy_RESTART_POLICY_ON_FAILURE,
	"always":     wire.RestartPolicy_RESTART_POLICY_ALWAYS,
}

func processSpecs(declared config.Machine) []*wire.ProcessSpec {
	var specs []*wire.ProcessSpec
	for _, name := range sorted(declared.Processes) {
		p := declared.Processes[name]
		spec := &wire.ProcessSpec{Name: name, Command: p.Command, Env: p.Env, Cwd: p.Cwd, Restart: restartPolicies[p.Restart]}
		if p.Ready != nil {
			spec.ReadyTcpPort = uint32(p.Ready.TCPPort)
		}
		specs = append(specs, spec)
	}
	return specs
}

// setProcesses makes a Machine's declared processes these. What is known of one
// that is declared otherwise now, or that failed and is begun again, is of the
// past and forgotten first.
func (l *live) setProcesses(ctx context.Context, specs []*wire.ProcessSpec) error {
	l.mu.Lock()
	before := l.declared
	l.declared = map[string]*wire.ProcessSpec{}
	for _, spec := range specs {
		l.declared[spec.GetName()] = spec
	}
	for name, status := range l.processes {
		if !proto.Equal(before[name], l.declared[name]) || status.GetState() == wire.ProcessStatus_STATE_FAILED {
			delete(l.processes, name)
		}
	}
	l.mu.Unlock()
	return l.session.SetProcesses(ctx, specs)
}

// watchProcesses keeps the states of a Machine's declared processes.
func (s *Supervisor) watchProcesses(ctx context.Context, l *live) {
	err := l.session.WatchProcesses(ctx, func(p *wire.ProcessStatus) error {
		l.mu.Lock()
		if l.declared[p.GetName()] == nil {
			l.mu.Unlock()
			return nil // it ended because it is declared no longer
		}
		l.processes[p.GetName()] = p
		close(l.changed)
		l.changed = make(chan struct{})
		l.mu.Unlock()
		s.events.publish(processEvent(l.name, p))
		return nil
	})
	if err != nil && ctx.Err() == nil && l.session.Err() == nil {
		s.log.Warn("watching processes", "machine", l.name, "error", err)
	}
}

// awaitReady waits until every declared process of a Machine is ready or has
// ended well. One that failed, or is not ready in time, is an error that says
// which and why.
func (s *Supervisor) awaitReady(ctx context.Context, l *live, specs []*wire.ProcessSpec) error {
	patience, cancel := context.WithTimeout(ctx, readyPatience)
	defer cancel()
	for {
		l.mu.Lock()
		changed := l.changed
		var waiting []string
		var failed error
		for _, spec := range specs {
			p := l.processes[spec.GetName()]
			switch p.GetState() {
			case wire.ProcessStatus_STATE_RUNNING, wire.ProcessStatus_STATE_EXITED:
			case wire.ProcessStatus_STATE_FAILED:
				failed = fmt.Errorf("process %s of machine %s failed: %s", spec.GetName(), l.name, processEnd(p))
			default:
				waiting = append(waiting, spec.GetName())
			}
		}
		l.mu.Unlock()
		if failed != nil || len(waiting) == 0 {
			return failed
		}
		select {
		case <-changed:
		case <-l.session.Done():
			return fmt.Errorf("machine %s ended: %w", l.name, l.session.Err())
		case <-patience.Done():
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return fmt.Errorf("machine %s: process %s is not ready after %s; `vz-runtime-probe logs %s %s` shows what it wrote",
				l.name, strings.Join(waiting, ", "), readyPatience, l.name, waiting[0])
		}
	}
}

func processEnd(p *wire.ProcessStatus) string {
	switch {
	case p.GetMessage() != "":
		return p.GetMessage()
	case p.GetSignal() != 0:
		return fmt.Sprintf("killed by signal %d", p.GetSignal())
	}
	return fmt.Sprintf("exit status %d", p.GetExitCode())
}

// watchMachine notes an end that nobody asked for: the Machine is dead, or its
// agent no longer answers, which is the same to everybody who uses it.
func (s *Supervisor) watchMachine(l *live) {
	var why error
	select {
	case <-l.leaving:
		return
	case <-l.instance.Done():
		why = l.instance.Err()
	case <-l.session.Done():
		select {
		case <-l.instance.Done():
			why = l.instance.Err()
		case <-time.After(lastWords):
			why = l.session.Err()
		}
	}
	l.leave.Do(func() { close(l.leaving) })
	if why == nil {
		why = errors.New("it ended by itself")
	}
	s.log.Error("a Machine ended unexpectedly", "machine", l.name, "incarnation", l.incarnation, "error", why)
	s.release(l)
	message := fmt.Sprintf("ended unexpectedly: %v", why)
	s.update(func(r *registry.Record) {
		m := r.Machine(l.name)
		if m == nil || m.Incarnation != l.incarnation || m.State != registry.MachineReady {
			return
		}
		m.State, m.Message = registry.MachineFailed, message
		if r.State == registry.Ready {
			r.State, r.Message = registry.Degraded, fmt.Sprintf("machine %s %s", l.name, message)
		}
	})
}

// release lets go of an incarnation that has ended or is to end now. Whoever
// comes second waits for the first: killing and detaching go by the Machine,
// and would hit the next incarnation, which boots once this one is let go.
func (s *Supervisor) release(l *live) {
	l.released.Do(func() {
		l.end()
		if l.session != nil {
			l.session.Close()
		}
		if err := l.instance.Kill(killPatience); err != nil {
			s.log.Error("killing a Machine", "machine", l.name, "error", err)
		}
		s.detach(l)
		l.watchers.Wait()
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.live[l.name] == l {
			delete(s.live, l.name)
		}
	})
}

// shutdown stops a Machine: its processes get grace to end by themselves. The
// record says stopped afterwards, whatever it took.
func (s *Supervisor) shutdown(ctx context.Context, op *operation, name string, grace time.Duration) error {
	l := s.liveMachine(name)
	if l == nil {
		return s.recordMachine(name, func(m *registry.Machine) {
			if m.State != registry.MachineDeclared {
				m.State, m.Message = registry.MachineStopped, ""
			}
		})
	}
	done := op.step("machine.stop", name)
	l.leave.Do(func() { close(l.leaving) })
	s.mu.Lock()
	s.spent[name] = l.incarnation
	s.mu.Unlock()
	if err := s.recordMachine(name, func(m *registry.Machine) { m.State = registry.MachineStopping }); err != nil {
		s.log.Error("recording a stop", "machine", name, "error", err)
	}
	if grace > 0 {
		patience, cancel := context.WithTimeout(ctx, grace+time.Second)
		if err := l.session.Shutdown(patience, grace); err != nil && l.session.Err() == nil {
			s.log.Warn("a Machine did not shut down by itself; it is killed", "machine", name, "error", err)
		}
		cancel()
	}
	s.release(l)
	return done("", s.recordMachine(name, func(m *registry.Machine) {
		m.State, m.Message = registry.MachineStopped, ""
	}))
}
