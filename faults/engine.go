package faults

import (
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	maxLive    = 1024 // pending and armed
	maxHistory = 1024 // healed ones that are listed
)

// Options are an Engine's surroundings. Impair is required.
type Options struct {
	Clock Clock // nil: System

	// Impair puts a Conditioner on a path, or takes it off, by nil. It answers
	// an error for a path that doesn't exist, also with nil. It is called with
	// the engine's lock: it must not call the engine.
	Impair func(path string, c *Conditioner) error

	// OnChange hears of each arming, first effect and healing (with the final
	// counts), in order, one at a time. It may call the engine, except Close.
	// An error about a healing keeps the fault in the journal, so that Recover
	// writes what could not be written now.
	OnChange func(Status) error

	Journal string        // file that is kept of the armed faults; empty: none. See Recover
	NewID   func() string // nil: random, sorted by time
	MaxTTL  time.Duration // for Start: at + TTL; 0: one hour

	// What the late packets of one path and direction may come to. The
	// defaults, 65,536 and 64 MiB, are 50 ms at 10 Gbit/s.
	QueuePackets, QueueBytes int
}

// An Engine keeps the faults of one Environment.
//
//	Declare, Start ──► pending ──its time──► armed ──TTL, Heal, Declare, Close──► healed
//	                      └──────────Heal, Declare, Close, failure───────────────►
//
// One timer runs the timeline, in order of time, healing before arming.
type Engine struct {
	options Options
	epoch   time.Time

	// mu guards all below. It may be held when a Conditioner's lock is taken,
	// never the other way round; OnChange is called without it.
	mu      sync.Mutex
	closed  bool
	timer   Timer
	faults  []*fault // in order of coming
	paths   map[string]*Conditioner
	journal journal
	events  []Status
	telling bool
	told    sync.Cond
	failure error // the newest of the journal's that nobody was told
}

// A fault is what the engine knows of one. Its status is kept but for what its
// impairment counts.
type fault struct {
	status Status
	at     time.Duration // when it is to be armed, on the engine's clock
	until  time.Duration // when it heals by itself
	armed  *impairment   // while it is
	first  bool          // its first effect was told
}

// New makes an engine without faults. It holds no goroutine.
func New(options Options) *Engine {
	if options.Clock == nil {
		options.Clock = System{}
	}
	if options.NewID == nil {
		clock := options.Clock
		options.NewID = func() string {
			return fmt.Sprintf("flt_%012x%s", clock.Now().UnixMilli(), strings.ToLower(rand.Text()[:16]))
		}
	}
	if options.MaxTTL == 0 {
		options.MaxTTL = time.Hour
	}
	if options.QueuePackets == 0 {
		options.QueuePackets = 65536
	}
	if options.QueueBytes == 0 {
		options.QueueBytes = 64 << 20
	}
	e := &Engine{options: options, epoch: options.Clock.Now(), paths: map[string]*Conditioner{},
		journal: journal{file: options.Journal}}
	e.told.L = &e.mu
	e.timer = options.Clock.AfterFunc(time.Hour, e.tick)
	e.timer.Stop()
	return e
}

func (e *Engine) now() time.Duration { return e.options.Clock.Now().Sub(e.epoch) }

// Declare replaces the definition's faults: those of an earlier call heal
// (WhyReconcile), and these start a timeline whose zero is now. Faults of the
// API stay. It changes nothing when any spec is refused, and says all that is
// wrong.
func (e *Engine) Declare(specs []Spec) error {
	e.mu.Lock()
	defer e.tell()
	defer e.mu.Unlock()
	if e.closed {
		return ErrClosed
	}
	now := e.now()
	e.advance(now)

	var errs []error
	var live []*fault // what these may not overlap
	for _, f := range e.faults {
		if f.status.State != Healed && f.status.Origin == FromAPI {
			live = append(live, f)
		}
	}
	added := make([]*fault, 0, len(specs))
	for _, spec := range specs {
		f, err := e.admit(spec, FromDefinition, now, append(live, added...))
		if err == nil {
			err = e.probe(f)
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		added = append(added, f)
	}
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	for _, f := range e.faults {
		if f.status.Origin == FromDefinition {
			e.heal(f, WhyReconcile)
		}
	}
	e.faults = append(e.faults, added...)
	e.advance(now)
	for _, f := range added {
		if f.status.HealedWhy == WhyFailed {
			errs = append(errs, errors.New(f.status.Error))
		}
	}
	return errors.Join(errs...)
}

// Start arms a fault at run time, now or at spec.At from now. It needs a TTL,
// and At and TTL together are within the cap ([TTLError]).
func (e *Engine) Start(spec Spec) (Status, error) {
	e.mu.Lock()
	defer e.tell()
	defer e.mu.Unlock()
	if e.closed {
		return Status{}, ErrClosed
	}
	now := e.now()
	e.advance(now)
	var live []*fault
	for _, f := range e.faults {
		if f.status.State != Healed {
			live = append(live, f)
		}
	}
	f, err := e.admit(spec, FromAPI, now, live)
	if err != nil {
		return Status{}, err
	}
	if f.at <= now {
		if err := e.arm(f, now); err != nil {
			return Status{}, err
		}
	} else if err := e.probe(f); err != nil {
		return Status{}, err
	}
	e.faults = append(e.faults, f)
	e.advance(now)
	return e.status(f, now), nil
}

// Heal ends a fault now, given by its ID or, pending or armed, its name. A
// fault that has healed already is no error: its Status says why it had.
func (e *Engine) Heal(idOrName, why string) (Status, error) {
	e.mu.Lock()
	defer e.tell()
	defer e.mu.Unlock()
	now := e.now()
	e.advance(now)
	var found *fault
	for _, f := range e.faults {
		if f.status.ID == idOrName || f.status.Name == idOrName {
			found = f
			if f.status.ID == idOrName || f.status.State != Healed {
				break
			}
		}
	}
	if found == nil {
		return Status{}, &NotFoundError{idOrName}
	}
	e.heal(found, why)
	e.wind(now)
	return e.status(found, now), nil
}

// List returns all that is pending and armed, and the newest healed ones, in
// order of coming.
func (e *Engine) List() []Status {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := e.now()
	list := make([]Status, len(e.faults))
	for i, f := range e.faults {
		list[i] = e.status(f, now)
	}
	return list
}

// Close heals all faults and returns when every held packet is delivered and
// OnChange has heard of it all. Its error is the journal's. Close the engine
// before the route domain.
func (e *Engine) Close(why string) error {
	e.mu.Lock()
	e.closed = true
	e.timer.Stop()
	for _, f := range e.faults {
		e.heal(f, why)
	}
	var left []*Conditioner
	for _, c := range e.paths {
		left = append(left, c)
	}
	e.mu.Unlock()
	for _, c := range left {
		c.drain()
		e.retire(c)
	}
	e.tell()
	e.mu.Lock()
	defer e.mu.Unlock()
	for e.telling {
		e.told.Wait()
	}
	return e.failure
}

// admit makes a fault of a spec that is valid by itself, within the limits,
// and in nobody's way.
func (e *Engine) admit(spec Spec, origin string, now time.Duration, live []*fault) (*fault, error) {
	if err := spec.check(); err != nil {
		if spec.Name != "" {
			err = fmt.Errorf("fault %q: %w", spec.Name, err)
		}
		return nil, err
	}
	spec = spec.normal()
	if spec.TTL == 0 {
		return nil, &TTLError{Name: spec.Name, Cap: e.options.MaxTTL}
	}
	if end := spec.At + spec.TTL; origin == FromAPI && end > e.options.MaxTTL {
		return nil, &TTLError{Name: spec.Name, Ends: end, Cap: e.options.MaxTTL}
	}
	if len(live) >= maxLive {
		return nil, &LimitError{"faults pending and armed", maxLive}
	}
	if spec.ID == "" {
		spec.ID = e.options.NewID()
	}
	f := &fault{
		status: Status{ID: spec.ID, Name: spec.Name, Spec: spec, SpecDigest: spec.Digest(),
			State: Pending, Origin: origin, Determinism: Exact},
		at: now + spec.At, until: now + spec.At + spec.TTL,
	}
	for _, known := range e.faults {
		if known.status.ID == spec.ID {
			return nil, &NameError{spec.ID}
		}
	}
	kind, _ := spec.kind()
	onPath := 0
	for _, other := range live {
		s := &other.status.Spec
		if s.Name == spec.Name || s.ID == spec.ID {
			return nil, &NameError{spec.Name}
		}
		if s.Path != spec.Path || other.until <= f.at || f.until <= other.at {
			continue
		}
		if onPath++; onPath >= maxPerPath {
			return nil, &LimitError{"faults on one path at a time", maxPerPath}
		}
		a, b := s.impairs(), spec.impairs()
		if k, _ := s.kind(); k == kind && (a[0] && b[0] || a[1] && b[1]) {
			return nil, &OverlapError{spec.Name, s.Name, kinds[kind].name, spec.Path}
		}
	}
	return f, nil
}

// probe finds out whether a fault's path exists, without touching it.
func (e *Engine) probe(f *fault) error {
	path := f.status.Spec.Path
	if e.paths[path] != nil {
		return nil
	}
	if err := e.options.Impair(path, nil); err != nil {
		return &PathError{f.status.Name, path, err}
	}
	return nil
}

// advance does what the timeline has up to now, in order of time, healing
// before arming, and sets the timer for what comes next.
func (e *Engine) advance(now time.Duration) {
	for {
		var next *fault
		var when time.Duration
		for _, f := range e.faults {
			at := f.next()
			if f.status.State == Healed || next != nil && (at > when ||
				at == when && (next.status.State == Armed || f.status.State == Pending)) {
				continue
			}
			next, when = f, at
		}
		if next == nil || when > now {
			break
		}
		if next.status.State == Armed {
			e.heal(next, WhyTTL)
		} else if err := e.arm(next, now); err != nil {
			next.status.Error = err.Error()
			e.heal(next, WhyFailed)
		}
	}
	e.wind(now)
}

// next is when something is due to happen to a fault that has not healed.
func (f *fault) next() time.Duration {
	if f.status.State == Armed {
		return f.until
	}
	return f.at
}

// wind sets the timer for the next that is due, and forgets old history.
func (e *Engine) wind(now time.Duration) {
	e.timer.Stop()
	next, healed := time.Duration(-1), 0
	for _, f := range e.faults {
		if f.status.State == Healed {
			healed++
		} else if at := f.next(); next < 0 || at < next {
			next = at
		}
	}
	if healed > maxHistory {
		e.faults = slices.DeleteFunc(e.faults, func(f *fault) bool {
			drop := f.status.State == Healed && healed > maxHistory
			if drop {
				healed--
			}
			return drop
		})
	}
	if next >= 0 && !e.closed {
		e.timer.Reset(max(next-now, 0))
	}
}

func (e *Engine) tick() {
	e.mu.Lock()
	if !e.closed {
		e.advance(e.now())
	}
	e.mu.Unlock()
	e.tell()
}

// arm puts a pending fault on its path. First into the journal: a fault that
// could vanish without a receipt is not armed.
func (e *Engine) arm(f *fault, now time.Duration) error {
	path := f.status.Spec.Path
	f.status.ArmedAt = e.epoch.Add(now)
	fail := func(err error) error {
		f.status.ArmedAt = time.Time{}
		return &PathError{f.status.Name, path, err}
	}
	if err := e.journal.add(&f.status); err != nil {
		return fail(err)
	}
	c := e.paths[path]
	if c == nil {
		c = newConditioner(path, e.options.Clock, e.now, e.options.QueuePackets, e.options.QueueBytes, e.retire)
		if err := e.options.Impair(path, c); err != nil {
			return fail(errors.Join(err, e.journal.remove(f.status.ID)))
		}
		e.paths[path] = c
	}
	m := newImpairment(&f.status.Spec, now)
	m.touched = func() {
		e.options.Clock.AfterFunc(0, func() { e.firstEffect(f) })
	}
	f.armed, f.status.State = m, Armed
	e.events = append(e.events, e.status(f, now))
	c.arm(m)
	return nil
}

// heal ends a fault, whatever state it is in.
func (e *Engine) heal(f *fault, why string) {
	if f.status.State == Healed {
		return
	}
	if f.armed != nil {
		c := e.paths[f.status.Spec.Path]
		c.heal(f.armed)
		f.status.observe(f.armed)
		f.armed = nil
		e.takeOff(c)
	}
	f.status.State, f.status.HealedAt, f.status.HealedWhy = Healed, e.options.Clock.Now(), why
	f.status.Vacuous = f.status.Effect.Matched == 0
	e.events = append(e.events, f.status)
}

// takeOff takes a Conditioner off its path when it has nothing more to do.
func (e *Engine) takeOff(c *Conditioner) {
	if e.paths[c.path] != c || !c.empty() {
		return
	}
	delete(e.paths, c.path)
	// An error says that the path is gone, and so the Conditioner with it.
	_ = e.options.Impair(c.path, nil)
}

// retire is what a Conditioner calls when it has nothing more to do.
func (e *Engine) retire(c *Conditioner) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.takeOff(c)
}

func (e *Engine) firstEffect(f *fault) {
	e.mu.Lock()
	if f.armed != nil && !f.first {
		f.first = true
		e.events = append(e.events, e.status(f, e.now()))
	}
	e.mu.Unlock()
	e.tell()
}

// status is a fault's, now.
func (e *Engine) status(f *fault, now time.Duration) Status {
	s := f.status
	switch s.State {
	case Pending:
		s.Remaining = s.Spec.TTL
	case Armed:
		s.Remaining = max(f.until-now, 0)
		c := e.paths[s.Spec.Path]
		c.mu.Lock()
		s.observe(f.armed)
		c.mu.Unlock()
	}
	return s
}

// tell calls OnChange for what has happened, unless somebody is doing so
// already, who will do it for this too. A healed fault leaves the journal when
// OnChange is back without an error.
func (e *Engine) tell() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.telling {
		return
	}
	e.telling = true
	for len(e.events) > 0 {
		s := e.events[0]
		e.events = e.events[1:]
		var err error
		if e.options.OnChange != nil {
			e.mu.Unlock()
			err = e.options.OnChange(s)
			e.mu.Lock()
		}
		if s.State == Healed && err == nil {
			err = e.journal.remove(s.ID)
		}
		if err != nil {
			e.failure = err
		}
	}
	e.telling = false
	e.told.Broadcast()
}
