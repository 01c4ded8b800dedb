package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"vz.test/vz/dns"
	"vz.test/vz/faults"
	"vz.test/vz/guest/wire"
	"vz.test/vz/netstack"
	"vz.test/vz/supervisor/api"
	"vz.test/vz/supervisor/api/vzv1"
	"vz.test/vz/supervisor/registry"
)

// A Supervisor is what the API serves.
var _ api.Backend = (*Supervisor)(nil)

// Environment is the whole aggregate: what is persisted, read anew from disk,
// with each Machine's health from the live sessions, and live counters.
func (s *Supervisor) Environment(context.Context) (*vzv1.Environment, error) {
	persisted, err := s.registry.Record(s.id)
	s.mu.Lock()
	unreadable := err
	if err != nil {
		persisted = s.record.Clone()
	}
	environment := registry.Project(persisted, registry.LockSelf)
	for _, m := range environment.GetMachines() {
		m.Health, m.HealthReason = vzv1.Health_HEALTH_UNOBSERVABLE, ""
		if unreadable != nil {
			m.HealthReason = unreadable.Error()
			continue
		}
		l := s.live[m.GetName()]
		m.Health, m.HealthReason = registry.Health(persisted.Machine(m.GetName()), sessionView(l, s.spent[m.GetName()]))
		if l != nil {
			m.Processes = l.processMessages()
		}
	}
	network, domain := s.network, s.domain
	s.mu.Unlock()
	environment.Paths = pathMessages(s.declaredPaths())
	if network != nil {
		s.liveCounters(environment, domain)
		for _, f := range network.faults.List() {
			environment.Faults = append(environment.Faults, faultMessage(f))
		}
	}
	return environment, nil
}

// sessionView is what there is of a session with a Machine: the live one, or
// the last that a positive stop ended.
func sessionView(l *live, spent string) registry.SessionView {
	switch {
	case l != nil && l.session.Err() == nil:
		return registry.SessionView{Live: true, Incarnation: l.incarnation}
	case l == nil && spent != "":
		return registry.SessionView{Spent: true, Incarnation: spent}
	}
	return registry.SessionView{}
}

// declaredPaths are those of the definition that is up, or else was last.
func (s *Supervisor) declaredPaths() []netstack.Path {
	s.mu.Lock()
	definition := s.definition
	s.mu.Unlock()
	if definition == nil {
		var err error
		if definition, err = s.recorded(); err != nil {
			return nil
		}
	}
	return paths(definition)
}

// liveCounters fills in what only the route domain knows.
func (s *Supervisor) liveCounters(e *vzv1.Environment, domain *netstack.Domain) {
	ports := domain.Ports()
	for _, m := range e.GetMachines() {
		for _, a := range m.GetAttachments() {
			i := slices.IndexFunc(ports, func(p netstack.PortInfo) bool { return p.Machine == m.GetName() && p.Network == a.GetNetwork() })
			if i < 0 {
				continue
			}
			p := ports[i]
			a.Connected = p.Connected
			a.Counters = &vzv1.PortCounters{RxPackets: p.ReceivedFrames, RxBytes: p.ReceivedBytes, TxPackets: p.SentFrames,
				TxBytes: p.SentBytes, Dropped: p.Malformed + p.Overflowed}
		}
	}
	for _, n := range e.GetNetworks() {
		n.Machines = nil
		for _, p := range ports {
			if p.Network == n.GetName() && p.Connected {
				n.Machines = append(n.Machines, p.Machine)
			}
		}
		slices.Sort(n.Machines)
	}
	stats := map[string]netstack.PathInfo{}
	for _, p := range domain.PathStats() {
		stats[p.Name] = p
	}
	for _, m := range e.GetPaths() {
		p := stats[m.GetName()]
		m.Flows, m.OpenFlows = p.Opened, uint64(p.Open)
		m.Packets = p.Request.Packets + p.Response.Packets
		m.Bytes = p.Request.Bytes + p.Response.Bytes
		m.Lost, m.Impaired = p.LostRequest+p.LostResponse, p.Impaired
	}
}

// Watch is the event stream.
func (s *Supervisor) Watch(ctx context.Context, replay bool, send func(*vzv1.Event) error) error {
	return s.events.watch(ctx, replay, send)
}

// Machine is one of the aggregate, by ID or name.
func (s *Supervisor) Machine(ctx context.Context, selector string) (*vzv1.Machine, error) {
	environment, err := s.Environment(ctx)
	if err != nil {
		return nil, err
	}
	m, err := s.selectMachine(selector)
	if err != nil {
		return nil, err
	}
	for _, one := range environment.GetMachines() {
		if one.GetMachineId() == m.MachineID {
			return one, nil
		}
	}
	return nil, api.NewProblem(connect.CodeNotFound, "no such Machine", selector, "")
}

func (s *Supervisor) selectMachine(selector string) (registry.Machine, error) {
	m, err := registry.SelectMachine(s.snapshot(), &selector, "")
	if err != nil {
		return registry.Machine{}, api.NewProblem(connect.CodeNotFound, "selecting the Machine", err.Error(), "")
	}
	return *m, nil
}

// StartMachine brings one Machine up, and what it depends on.
func (s *Supervisor) StartMachine(ctx context.Context, selector string, send func(*vzv1.Event) error) error {
	m, err := s.selectMachine(selector)
	if err != nil {
		return err
	}
	op, done, err := s.begin(ctx, "start", send)
	if err != nil {
		return err
	}
	defer done()
	s.finish(op, s.bringUp(ctx, op, m), &vzv1.Progress{})
	return nil
}

// bringUp makes one Machine run, from the definition of the last up: it needs
// the network and nothing else.
func (s *Supervisor) bringUp(ctx context.Context, op *operation, m registry.Machine) error {
	definition, err := s.recorded()
	if errors.Is(err, fs.ErrNotExist) {
		return api.NewProblem(connect.CodeFailedPrecondition, "machine "+m.Name+" can't be started", err.Error(), "run vz up first")
	}
	if err != nil {
		return err
	}
	record := s.snapshot()
	// A Machine that a failed up was to remove is on record and not declared.
	if _, declared := definition.Machines[m.Name]; !declared {
		return api.NewProblem(connect.CodeFailedPrecondition, "machine "+m.Name+" can't be started", "it is no longer declared", "run vz up")
	}
	record.Machines = slices.DeleteFunc(record.Machines, func(other registry.Machine) bool {
		_, declared := definition.Machines[other.Name]
		return !declared
	})
	if s.network != nil && s.network.definition != record.DefinitionDigest {
		// It would boot with an address that is not the one on record.
		return api.NewProblem(connect.CodeFailedPrecondition, "machine "+m.Name+" can't be started",
			"the last up failed before the network was as it says", "run vz up")
	}
	if s.network == nil {
		t, err := plan(definition, record)
		if err != nil {
			return err
		}
		if err := s.ensureNetwork(op, definition, t); err != nil {
			return err
		}
	}
	if err := s.ensureMachine(ctx, op, definition, m); err != nil {
		return err
	}
	return s.update(conclude)
}

// StopMachine stops one Machine and leaves the others.
func (s *Supervisor) StopMachine(ctx context.Context, selector string, send func(*vzv1.Event) error) error {
	m, err := s.selectMachine(selector)
	if err != nil {
		return err
	}
	op, done, err := s.begin(ctx, "stop", send)
	if err != nil {
		return err
	}
	defer done()
	err = s.shutdown(context.WithoutCancel(ctx), op, m.Name, stopGrace)
	if err == nil {
		err = s.update(func(r *registry.Record) {
			if r.State == registry.Ready {
				r.State, r.Message = registry.Degraded, "machine "+m.Name+" was stopped"
			}
		})
	}
	s.finish(op, err, &vzv1.Progress{})
	return nil
}

// An execution is one exec under way.
type execution struct {
	message *vzv1.Execution
	cancel  context.CancelCauseFunc
}

// Exec runs a command in a Machine by its agent, bringing the Machine up first
// where the client asked for that.
func (s *Supervisor) Exec(ctx context.Context, first *vzv1.ExecRequest, receive func() (*wire.ExecRequest, error), send func(*vzv1.ExecResponse) error) error {
	m, err := s.selectMachine(first.GetMachine())
	if err != nil {
		return err
	}
	start := first.GetInput().GetStart()
	if start == nil || len(start.GetArgv()) == 0 {
		return api.NewProblem(connect.CodeInvalidArgument, "exec", "no command was given", "name one: vz exec -- COMMAND")
	}
	l, err := s.session(ctx, m, first.GetReconcile(), send)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	e := &execution{cancel: cancel, message: &vzv1.Execution{ExecutionId: registry.NewID(registry.KindExecution), Machine: m.Name,
		Argv: start.GetArgv(), StartedAt: timestamppb.Now(), Tty: start.GetTty() != nil}}
	s.mu.Lock()
	s.executions[e.message.GetExecutionId()] = e
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.executions, e.message.GetExecutionId())
		s.mu.Unlock()
	}()
	err = l.session.Exec(ctx, receive, func(output *wire.ExecResponse) error {
		return send(&vzv1.ExecResponse{Reply: &vzv1.ExecResponse_Output{Output: output}})
	})
	if err != nil && l.session.Err() != nil {
		return api.NewProblem(connect.CodeUnavailable, "the command was lost", fmt.Sprintf("machine %s ended: %v", m.Name, l.session.Err()), "vz up boots it again")
	}
	return err
}

// session is the live session of a Machine.
func (s *Supervisor) session(ctx context.Context, m registry.Machine, reconcile bool, send func(*vzv1.ExecResponse) error) (*live, error) {
	find := func() *live {
		if l := s.liveMachine(m.Name); l != nil && l.session.Err() == nil {
			return l
		}
		return nil
	}
	if l := find(); l != nil {
		return l, nil
	}
	if !reconcile {
		return nil, api.NewProblem(connect.CodeFailedPrecondition, "machine "+m.Name+" is not up", string(m.State), "run vz up")
	}
	op, done, err := s.begin(ctx, "exec", func(e *vzv1.Event) error {
		return send(&vzv1.ExecResponse{Reply: &vzv1.ExecResponse_Progress{Progress: e}})
	})
	if err != nil {
		return nil, err
	}
	defer done()
	if find() == nil {
		if err := s.bringUp(ctx, op, m); err != nil {
			return nil, problem("exec", err, s.registry.LogPath(s.id))
		}
	}
	if l := find(); l != nil {
		return l, nil
	}
	return nil, api.NewProblem(connect.CodeUnavailable, "machine "+m.Name+" ended as soon as it was up", "", "")
}

// Executions are the commands under way.
func (s *Supervisor) Executions(context.Context) ([]*vzv1.Execution, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []*vzv1.Execution
	for _, id := range sorted(s.executions) {
		all = append(all, s.executions[id].message)
	}
	return all, nil
}

// CancelExecution kills the process group of a command.
func (s *Supervisor) CancelExecution(_ context.Context, id string) error {
	s.mu.Lock()
	e := s.executions[id]
	s.mu.Unlock()
	if e == nil {
		return api.NewProblem(connect.CodeNotFound, "no such execution", id, "")
	}
	e.cancel(api.NewProblem(connect.CodeCanceled, "the execution was cancelled", "by the API", ""))
	return nil
}

// Logs are what a declared process wrote.
func (s *Supervisor) Logs(ctx context.Context, r *vzv1.ProcessLogsRequest, send func(*wire.LogChunk) error) error {
	m, err := s.selectMachine(r.GetMachine())
	if err != nil {
		return err
	}
	l, err := s.session(ctx, m, false, nil)
	if err != nil {
		return err
	}
	return l.session.Logs(ctx, &wire.LogsRequest{Process: r.GetProcess(), Follow: r.GetFollow(), TailBytes: r.GetTailBytes()}, send)
}

var errDown = api.NewProblem(connect.CodeFailedPrecondition, "the Environment's network is down", "it was not brought up since its supervisor started", "run vz up")

// openedNetwork is the live one, or an error that says that there is none.
func (s *Supervisor) openedNetwork() (*network, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.network == nil {
		return nil, errDown
	}
	return s.network, nil
}

// Flows are those that are tracked now.
func (s *Supervisor) Flows(context.Context) ([]*vzv1.Flow, error) {
	n, err := s.openedNetwork()
	if err != nil {
		return nil, err
	}
	var all []*vzv1.Flow
	for _, f := range n.domain.Flows() {
		all = append(all, flowMessage(f))
	}
	return all, nil
}

// Refusals are the drop counters and the most recent refusals.
func (s *Supervisor) Refusals(context.Context) (*vzv1.ListRefusalsResponse, error) {
	n, err := s.openedNetwork()
	if err != nil {
		return nil, err
	}
	response := new(vzv1.ListRefusalsResponse)
	for _, d := range n.domain.Drops() {
		response.Drops = append(response.Drops, &vzv1.DropCount{Machine: d.Machine, Network: d.Network, Reason: d.Reason.String(), Packets: d.Count})
	}
	for _, r := range n.domain.Refusals() {
		response.Refusals = append(response.Refusals, refusalMessage(r))
	}
	return response, nil
}

// Queries are the most recent DNS questions.
func (s *Supervisor) Queries(context.Context) ([]*vzv1.DNSQuery, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.queries.items), nil
}

func (s *Supervisor) queried(q dns.Query) {
	m := &vzv1.DNSQuery{At: timestamppb.New(q.At), Machine: q.Machine, Name: q.Name, Type: q.Type, Rcode: q.Rcode,
		Answers: q.Answers, Reason: q.Reason, Transport: q.Transport}
	s.mu.Lock()
	s.queries.add(m)
	s.mu.Unlock()
	if q.Reason != "" {
		s.events.publish(&vzv1.Event{Event: &vzv1.Event_Query{Query: m}})
	}
}

func (s *Supervisor) refused(r netstack.Refusal) {
	s.events.publish(&vzv1.Event{Event: &vzv1.Event_Refusal{Refusal: refusalMessage(r)}})
}

// StartFault arms a fault now; its TTL is required.
func (s *Supervisor) StartFault(_ context.Context, r *vzv1.StartFaultRequest) (*vzv1.Fault, error) {
	n, err := s.openedNetwork()
	if err != nil {
		return nil, err
	}
	status, err := n.faults.Start(faultSpec(r))
	if err != nil {
		next := ""
		if _, ok := errors.AsType[*netstack.UnknownError](err); ok {
			next = "vz-runtime-probe paths lists those that there are"
		}
		return nil, api.NewProblem(connect.CodeInvalidArgument, "the fault is refused", err.Error(), next)
	}
	return faultMessage(status), nil
}

// Fault is one fault, by ID or name.
func (s *Supervisor) Fault(_ context.Context, selector string) (*vzv1.Fault, error) {
	n, err := s.openedNetwork()
	if err != nil {
		return nil, err
	}
	for _, status := range n.faults.List() {
		if status.ID == selector || status.Name == selector {
			return faultMessage(status), nil
		}
	}
	return nil, api.NewProblem(connect.CodeNotFound, "no such fault", selector, "")
}

// HealFault ends a fault before its time.
func (s *Supervisor) HealFault(_ context.Context, selector string) (*vzv1.Fault, error) {
	n, err := s.openedNetwork()
	if err != nil {
		return nil, err
	}
	status, err := n.faults.Heal(selector, faults.WhyAPI)
	if err != nil {
		return nil, api.NewProblem(connect.CodeNotFound, "the fault can't be healed", err.Error(), "vz-runtime-probe fault list has those that there are")
	}
	return faultMessage(status), nil
}

// faultChanged turns what the engine says into events, and the end of a fault
// into a receipt.
func (s *Supervisor) faultChanged(status faults.Status) error {
	s.events.publish(&vzv1.Event{Event: &vzv1.Event_Fault{Fault: faultMessage(status)}})
	if status.State != faults.Healed {
		return nil
	}
	err := s.receipt("fault", status.Receipt())
	if err != nil {
		s.log.Error("a fault's receipt", "fault", status.Name, "error", err)
	}
	return err
}

// Receipts are the evidence after a sequence number, with the signed head.
func (s *Supervisor) Receipts(_ context.Context, after uint64) (*vzv1.ListReceiptsResponse, error) {
	if s.receipts == nil {
		return nil, problem("reading the receipts", s.damage, s.registry.LogPath(s.id))
	}
	list, head, err := s.receipts.List(after)
	if err != nil {
		return nil, err
	}
	response := &vzv1.ListReceiptsResponse{Head: headMessage(head)}
	for _, r := range list {
		response.Receipts = append(response.Receipts, receiptMessage(r))
	}
	return response, nil
}
