// Package supervisor is the life of one Environment: it reconciles what the
// definition declares with what is recorded and what is live, and joins the
// rooms that do the work (netstack, dns, ingress, faults, machines, guest),
// none of which knows another.
//
// One process, one Environment. Run serves the API until it is told to stop,
// to delete, or to end; it boots nothing by itself. What must outlive it is in
// supervisor/registry; a supervisor that dies takes its Machines with it, and
// the next one settles what it left.
//
// It reads no definition from disk but the copy that an up gave it, knows no
// command line, and touches no other Environment.
package supervisor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"

	"vz.test/vz/config"
	"vz.test/vz/faults"
	"vz.test/vz/ingress"
	"vz.test/vz/machines"
	"vz.test/vz/netstack"
	"vz.test/vz/supervisor/api"
	"vz.test/vz/supervisor/api/vzv1"
	"vz.test/vz/supervisor/receipt"
	"vz.test/vz/supervisor/registry"
)

// errFellBehind ends the stream of a watcher that did not keep up.
var errFellBehind = api.NewProblem(connect.CodeResourceExhausted, "the event stream was cut off",
	"this watcher fell too far behind", "watch again with replay")

// apiGrace is how long calls under way may take to end when the supervisor
// ends: long enough for the terminal event of the stop that ends it.
const apiGrace = 5 * time.Second

// Options are what a supervisor is told when it starts.
type Options struct {
	Registry *registry.Registry
	// Owner is the lock of the Environment that is to be supervised, held by
	// the caller until Run has returned.
	Owner *registry.Owner
	// Listener is the Environment's socket (Owner.Listen). Run closes it.
	Listener *net.UnixListener
	Driver   machines.Driver
	// DriverGone is closed when the driver can do nothing any more (its
	// launcher died, and every Machine with it). Then the supervisor records
	// that and ends. May be nil.
	DriverGone <-chan struct{}
	Agent      string          // path of the vz-guest binary
	Notes      []machines.Note // what could not be had for the supervisor itself
	Version    string
	Log        *slog.Logger
	// Ready is called once, when the API answers.
	Ready func()
}

// A Supervisor is one running Environment.
type Supervisor struct {
	options  Options
	id       string
	registry *registry.Registry
	driver   machines.Driver
	log      *slog.Logger
	events   *events
	receipts *receipt.Log
	ca       *ingress.CA
	damage   error  // its evidence or its CA can't be read or written: stop and delete alone are served
	end      func() // ends Run

	// work is held by the one operation that may change the Environment now.
	work   chan struct{}
	ending bool // a stop or a delete was carried out; nothing may begin any more

	mu sync.Mutex
	// network, domain and definition are written by the holder of work, under
	// mu, and read by it without.
	network    *network
	domain     *netstack.Domain
	definition *config.Definition // of the network
	record     *registry.Record   // what is on disk, but for a write under way
	live       map[string]*live   // by Machine name
	spent      map[string]string  // incarnation that a positive stop ended, by Machine name
	executions map[string]*execution
	queries    ring[*vzv1.DNSQuery]
}

// Run is a supervisor's life. It returns nil after a stop, a delete or the end
// of ctx, at which every Machine is stopped.
func Run(ctx context.Context, o Options) error {
	id := o.Owner.Environment()
	record, err := o.Registry.Record(id)
	if damage := (*registry.CorruptError)(nil); errors.As(err, &damage) {
		return errors.Join(err, clean(ctx, o)) // for the delete that is to come
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := &Supervisor{
		options: o, id: id, registry: o.Registry, driver: o.Driver, log: o.Log,
		events: newEvents(id), work: make(chan struct{}, 1),
		record: record, live: map[string]*live{}, spent: map[string]string{}, executions: map[string]*execution{},
		queries: ring[*vzv1.DNSQuery]{limit: 256},
	}
	s.end = func() {
		s.events.close() // watchers would keep the API from ending
		cancel()
	}
	context.AfterFunc(ctx, s.end)
	if s.receipts, err = receipt.Open(s.registry.ReceiptsDir(s.id), s.id); err == nil {
		defer s.receipts.Close()
		s.ca, err = ingress.LoadOrCreateCA(s.registry.IngressDir(s.id), record.Name)
	}
	s.damage = err
	died, err := s.settle(ctx)
	if err != nil {
		return err
	}
	socket := s.registry.SocketPath(s.id)
	self, err := registry.Self(socket, o.Version)
	if err != nil {
		return err
	}
	// Where a full disk is the damage, delete must work all the same.
	s.damage = cmp.Or(s.damage, s.account(died), s.update(func(r *registry.Record) { r.Supervisor = self }))
	if s.damage != nil {
		s.log.Error("the Environment is damaged: it can be stopped and deleted, nothing else", "error", s.damage)
	}
	served := make(chan error, 1)
	go func() {
		served <- api.Serve(ctx, api.Private(o.Listener, o.Registry.UID(), func(uid int) {
			s.log.Warn("refused a client of another user", "uid", uid)
		}), s, apiGrace)
		s.end() // had it failed, nobody could tell this supervisor anything any more
	}()
	s.log.Info("serving", "environment", s.id, "socket", socket, "version", o.Version)
	o.Ready()

	select {
	case <-ctx.Done():
	case <-o.DriverGone: // nil: never
		s.log.Error("the launcher ended, and every Machine with it")
		s.lost("the launcher ended")
		s.end()
	}
	err = <-served
	s.leave()
	return err
}

// leave takes down what is still up.
func (s *Supervisor) leave() {
	s.work <- struct{}{} // for good: nothing may begin any more
	op := &operation{name: "end", events: s.events, began: time.Now()}
	if err := s.takeDown(context.Background(), op, stopGrace); err != nil {
		s.log.Error("taking the Environment down", "error", err)
	}
	s.update(func(r *registry.Record) {
		switch r.State {
		case registry.Stopped, registry.Failed, registry.Created, registry.Deleting:
		default:
			r.State, r.Message = registry.Stopped, ""
		}
	})
}

// clean ends what an earlier supervisor left of Machines of which nothing tells
// any more but their directories.
func clean(ctx context.Context, o Options) error {
	id := o.Owner.Environment()
	left, err := os.ReadDir(filepath.Dir(o.Registry.MachineDir(id, "any")))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range left {
		err = errors.Join(err, o.Driver.Clean(ctx, id, e.Name()))
	}
	return err
}

// settle makes the record true again after a supervisor that died: its
// Machines died with it, and what is left of them is ended.
func (s *Supervisor) settle(ctx context.Context) (died bool, err error) {
	record := s.snapshot()
	for _, m := range record.Machines {
		if m.State == registry.MachineDeclared || m.State == registry.MachineStopped {
			continue
		}
		if err := s.driver.Clean(ctx, s.id, m.MachineID); err != nil {
			return false, fmt.Errorf("ending what an earlier supervisor left of machine %s: %w", m.Name, err)
		}
	}
	up := slices.ContainsFunc(record.Machines, func(m registry.Machine) bool {
		return m.State == registry.MachineStarting || m.State == registry.MachineReady || m.State == registry.MachineStopping
	})
	switch record.State {
	case registry.Reconciling, registry.Ready, registry.Degraded, registry.Stopping:
	default:
		if !up {
			return false, nil
		}
	}
	s.lost("the supervisor ended without stopping the Environment")
	return true, nil
}

// account writes the receipts that a supervisor that died did not: of its end,
// and of the faults that were armed.
func (s *Supervisor) account(died bool) error {
	if died {
		if err := s.receipt("lifecycle", lifecycle{Operation: "settle", Result: "the supervisor had died; its Machines ended with it"}); err != nil {
			return err
		}
	}
	return faults.Recover(s.faultJournal(), time.Now(), func(status faults.Status) error {
		return s.receipt("fault", status.Receipt())
	})
}

func (s *Supervisor) faultJournal() string {
	return filepath.Join(s.registry.EnvironmentDir(s.id), "faults.json")
}

// lost records that every Machine that was up is not any more.
func (s *Supervisor) lost(why string) {
	s.update(func(r *registry.Record) {
		if r.State != registry.Deleting {
			r.State, r.Message = registry.Failed, why
		}
		for i := range r.Machines {
			m := &r.Machines[i]
			switch m.State {
			case registry.MachineStarting, registry.MachineReady, registry.MachineStopping:
				m.State, m.Message = registry.MachineStopped, why
			}
		}
	})
}

// snapshot is a copy of the record that the caller may keep.
func (s *Supervisor) snapshot() *registry.Record {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.record.Clone()
}

// update changes the record, on disk first: what the supervisor says of itself
// is never ahead of what it would find after a crash.
func (s *Supervisor) update(change func(*registry.Record)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := s.record.Clone()
	change(next)
	if err := s.registry.Save(next); err != nil {
		s.log.Error("writing the record", "error", err)
		return fmt.Errorf("writing the Environment's record: %w", err)
	}
	s.record = next
	// Under the lock still: the last event is of the last state.
	s.events.publish(&vzv1.Event{Event: &vzv1.Event_Environment{Environment: registry.Project(next, registry.LockSelf)}})
	return nil
}

func (s *Supervisor) recordMachine(name string, change func(*registry.Machine)) error {
	return s.update(func(r *registry.Record) {
		if m := r.Machine(name); m != nil {
			change(m)
		}
	})
}

// lifecycle is the body of a receipt of one operation on the Environment.
type lifecycle struct {
	Operation  string   `json:"operation"`
	Result     string   `json:"result"`
	Definition string   `json:"definition_digest,omitempty"`
	Machines   []string `json:"machines,omitempty"` // name=incarnation
}

// receipt appends evidence and tells the watchers.
func (s *Supervisor) receipt(kind string, body any) error {
	if s.receipts == nil {
		return nil // damaged, and on its way out
	}
	r, err := s.receipts.Append(kind, body)
	if err != nil {
		return fmt.Errorf("writing a receipt: %w", err)
	}
	s.events.publish(&vzv1.Event{Event: &vzv1.Event_Receipt{Receipt: receiptMessage(r)}})
	return nil
}

// begin waits for the right to change the Environment, at most until ctx ends.
func (s *Supervisor) begin(ctx context.Context, name string, send func(*vzv1.Event) error) (*operation, func(), error) {
	select {
	case s.work <- struct{}{}:
	case <-ctx.Done():
		return nil, nil, context.Cause(ctx)
	}
	if s.ending {
		<-s.work
		return nil, nil, api.Ending
	}
	if s.damage != nil && name != "stop" && name != "delete" {
		s.ending = true // the next command's supervisor looks whether it was mended
		s.end()
		<-s.work
		return nil, nil, problem(name, s.damage, s.registry.LogPath(s.id))
	}
	return &operation{name: name, events: s.events, began: time.Now(), send: send}, func() { <-s.work }, nil
}

// ring keeps the last few of something.
type ring[T any] struct {
	limit int
	items []T
}

func (r *ring[T]) add(item T) {
	if len(r.items) == r.limit {
		copy(r.items, r.items[1:])
		r.items = r.items[:r.limit-1]
	}
	r.items = append(r.items, item)
}
