package netstack

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"vz.test/vz/netstack/flow"
	"vz.test/vz/netstack/ipstack"
	"vz.test/vz/netstack/link"
	"vz.test/vz/netstack/nat"
	"vz.test/vz/netstack/packet"
	"vz.test/vz/netstack/policy"
)

// ErrClosed is returned by calls on a closed Domain.
var ErrClosed = errors.New("netstack: domain closed")

// Clock is where all time comes from but TCP's own in the gateway's stack. Now
// never goes back.
type Clock interface{ Now() time.Time }

type systemClock struct{}

func (systemClock) Now() time.Time { return time.Now() }

// Options are what a Domain takes from outside. The zero value is ready.
type Options struct {
	Clock Clock // nil: the host's
	// GatewayMAC is what every Machine sees for every address.
	GatewayMAC packet.MAC
	// OnRefusal is told of refusals, new kinds first and no more than about
	// ten a second. It is called by one goroutine, which Close waits for, and
	// may be nil.
	OnRefusal func(Refusal)
	// MaxFlows bounds the flow table, MaxMachineFlows what one attachment opens
	// of it, so that one Machine's flood costs only itself. Zero: the defaults,
	// 262144 and 65536; a flow costs about 400 bytes.
	MaxFlows, MaxMachineFlows int
}

var (
	// "vz" in a locally administered address (IEEE 802-2014, 8.4).
	gatewayMAC = packet.MAC{0x02, 'v', 'z', 0, 0, 0x01}
	hostMAC    = packet.MAC{0x02, 'v', 'z', 0, 0, 0x02}
)

// sweep is how often flows are expired: often enough for the shortest of their
// timeouts, 20 s, and too seldom to be seen in an idle process.
const sweep = time.Second

// Domain is the route domain. Its methods are for any goroutine.
type Domain struct {
	options Options
	epoch   time.Time

	// mu guards world, dials and closed; see the package comment.
	mu     sync.RWMutex
	world  *world
	dials  map[netip.AddrPort]string // local side of a dial to a backend → path
	closed bool

	// change is held by Update, Attach, Detach and Close, one at a time.
	change sync.Mutex

	flows     *flow.Table[route]
	nat       *nat.Table
	fragments *packet.Reassembler
	refusals  refusals
	workers   sync.Pool // for what enters by no port's loop

	gateway   *station
	stack     *ipstack.Stack
	listeners listeners
	host      atomic.Pointer[ipstack.Host]

	loops sync.WaitGroup
	stop  chan struct{}
}

// New makes a route domain without any port. Errors say what is wrong with
// spec. Close ends it.
func New(spec Spec, options Options) (*Domain, error) {
	if options.Clock == nil {
		options.Clock = systemClock{}
	}
	if options.GatewayMAC == (packet.MAC{}) {
		options.GatewayMAC = gatewayMAC
	}
	if options.MaxFlows == 0 {
		options.MaxFlows = 1 << 18
	}
	if options.MaxMachineFlows == 0 {
		options.MaxMachineFlows = 1 << 16
	}
	d := &Domain{
		options: options, epoch: options.Clock.Now(), dials: map[netip.AddrPort]string{},
		nat: nat.New(), fragments: packet.NewReassembler(packet.Limits{}), stop: make(chan struct{}),
	}
	d.refusals.start(options.OnRefusal != nil)
	d.flows = flow.New(options.MaxFlows, options.MaxMachineFlows, d.ended)
	d.workers.New = func() any { return &worker{d: d} }
	// The stack's own MTU is the largest there is: a peer's MSS and the
	// fragmentation on the way out do the rest.
	stack, err := ipstack.New(ipstack.Config{MAC: options.GatewayMAC, Neighbour: options.GatewayMAC,
		MTU: hostNetwork.MTU, Output: d.fromStack})
	if err != nil {
		return nil, err
	}
	d.stack = stack
	d.gateway = &station{Attachment: Attachment{Machine: edgeName, MAC: options.GatewayMAC}, domain: d,
		network: &hostNetwork, stack: stack.Input, tally: &tally{}}
	if err := d.Update(spec); err != nil {
		stack.Close()
		return nil, err
	}
	d.loops.Go(d.keep)
	return d, nil
}

// now is the time since the Domain was made.
func (d *Domain) now() time.Duration { return d.options.Clock.Now().Sub(d.epoch) }

// current is the world as it is.
func (d *Domain) current() *world {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.world
}

// alive is current, or ErrClosed.
func (d *Domain) alive() (*world, error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.closed {
		return nil, ErrClosed
	}
	return d.world, nil
}

// keep expires what is idle and reports refusals until the Domain closes.
func (d *Domain) keep() {
	tick := time.NewTicker(sweep)
	defer tick.Stop()
	for {
		select {
		case <-d.stop:
			return
		case <-tick.C:
			d.flows.Expire(d.now())
			d.fragments.Expire(d.options.Clock.Now())
		case r := <-d.refusals.news:
			d.options.OnRefusal(r)
		}
	}
}

// Update replaces the desired state. Ports stay connected where their
// attachment and its MTU stay, flows go on where a path still allows them,
// whatever its name; others end, and their next packet is refused. Listeners on
// addresses that are gone are closed. On an error nothing has changed, unless it
// is that the host can't get its new port.
func (d *Domain) Update(spec Spec) error {
	if err := spec.validate(); err != nil {
		return err
	}
	d.change.Lock()
	defer d.change.Unlock()
	old, err := d.alive()
	if err != nil {
		return err
	}
	next, err := d.compile(spec, old)
	if err != nil {
		return err
	}
	if err := d.addAddresses(next, old); err != nil {
		return err
	}
	d.mu.Lock()
	d.world = next
	var gone []*port
	if old != nil {
		gone = moveports(old, next)
	}
	d.mu.Unlock()
	for _, p := range gone {
		p.close()
	}
	d.flows.Each(func(f *flow.Flow[route]) { d.revise(next, f) })
	d.removeAddresses(next, old)
	return d.connectHost(next)
}

// moveports connects the ports of stations that were replaced to the new ones,
// and returns those that have none. Domain.mu is held.
func moveports(old, next *world) (gone []*port) {
	for at, before := range old.stations {
		after := next.stations[at]
		if before == after {
			continue
		}
		p := before.port.Swap(nil)
		switch {
		case p == nil:
		case after == nil || after.network.MTU != before.network.MTU || at.machine == hostName: // see connectHost
			gone = append(gone, p)
		default:
			p.station.Store(after)
			after.port.Store(p)
		}
	}
	return gone
}

// revise ends a flow that next doesn't allow, and gives it to the path that
// allows it now.
func (d *Domain) revise(next *world, f *flow.Flow[route]) {
	r := &f.Value
	for _, end := range r.ends {
		if end != d.gateway && next.stations[place{end.Machine, end.Network}] != end {
			d.flows.Remove(f)
			return
		}
	}
	destination := f.Ways[packet.Response].Key.From()
	p := r.path.Load()
	if p.kind == PathBackend {
		if e := next.backend(p.name); e == nil || next.paths[p.name] == nil || e.Port != destination.Port() ||
			e.Machine != r.ends[packet.Response].Machine {
			d.flows.Remove(f)
		}
		return
	}
	from := r.ends[packet.Request]
	if from == d.gateway { // see open
		from, destination = r.ends[packet.Response], f.Ways[packet.Request].Key.From()
	}
	to, allowed, why := next.verdict(from, destination, f.Ways[packet.Request].Key.Protocol)
	if why != policy.Allowed || from == r.ends[packet.Request] && to.name != r.to {
		d.flows.Remove(f)
		return
	}
	r.path.Store(allowed)
}

// backend is the endpoint whose backend path has this name.
func (w *world) backend(path string) *Endpoint {
	for i := range w.spec.Endpoints {
		if e := &w.spec.Endpoints[i]; backendPath(e.Name) == path {
			return e
		}
	}
	return nil
}

func backendPath(endpoint string) string { return "backend:" + endpoint }

// addAddresses gives the stack the addresses that next has and old hasn't, and
// takes them away again when one can't be had.
func (d *Domain) addAddresses(next, old *world) error {
	var had map[netip.Addr]bool
	if old != nil {
		had = old.edges
	}
	var added []netip.Addr
	for addr := range next.edges {
		if had[addr] {
			continue
		}
		if err := d.stack.AddAddress(addr); err != nil {
			for _, addr := range added {
				_ = d.stack.RemoveAddress(addr)
			}
			return err
		}
		added = append(added, addr)
	}
	return nil
}

func (d *Domain) removeAddresses(next, old *world) {
	if old == nil {
		return
	}
	for addr := range old.edges {
		if !next.edges[addr] {
			d.listeners.closeAt(addr)
			_ = d.stack.RemoveAddress(addr)
		}
	}
}

// UnknownError says that a name is not in the Spec.
type UnknownError struct {
	What string // "path", "endpoint", "attachment"
	Name string
}

func (e *UnknownError) Error() string { return fmt.Sprintf("netstack: unknown %s %q", e.What, e.Name) }

// Attach connects port to a Machine's attachment and reads it until it fails
// or is detached. It takes ownership of port, and closes the one that was
// there before. Errors: UnknownError, ErrClosed; port is then the caller's.
func (d *Domain) Attach(machine, network string, port link.Port) error {
	d.change.Lock()
	defer d.change.Unlock()
	w, err := d.alive()
	if err != nil {
		return err
	}
	s := w.stations[place{machine, network}]
	if s == nil || machine == hostName {
		return &UnknownError{"attachment", machine + " on " + network}
	}
	d.connect(s, port)
	return nil
}

// Detach closes the port of a Machine's attachment, if there is one, and ends
// its flows. It returns when the port's goroutine has ended.
func (d *Domain) Detach(machine, network string) {
	d.change.Lock()
	defer d.change.Unlock()
	s := d.current().stations[place{machine, network}]
	if s == nil {
		return
	}
	d.mu.Lock() // who opens a flow to it has it in the table by now, or finds no port
	p := s.port.Swap(nil)
	d.mu.Unlock()
	if p != nil {
		p.close()
	}
	d.endFlows(s)
}

// endFlows ends the flows of a station.
func (d *Domain) endFlows(s *station) {
	d.flows.Each(func(f *flow.Flow[route]) {
		if f.Value.ends[0] == s || f.Value.ends[1] == s {
			d.flows.Remove(f)
		}
	})
}

// A Conditioner impairs the packets of one path.
type Conditioner interface {
	// Condition decides about one packet, before it leaves by the port it goes
	// to. It is called once for each packet in each direction, by any
	// goroutine.
	Condition(f *packet.Flight) packet.Verdict
	// Forget says that a flow has ended, by its FlowID.Serial. Packets of it
	// that are held may still be delivered.
	Forget(flow uint64)
}

// Impair gives the path's packets to c from now on; nil heals it. It does not
// wait for packets that are with the former Conditioner. Errors: UnknownError.
func (d *Domain) Impair(path string, c Conditioner) error {
	p := d.current().paths[path]
	if p == nil {
		return &UnknownError{"path", path}
	}
	if c == nil {
		p.conditioner.Store(nil)
	} else {
		p.conditioner.Store(&c)
	}
	return nil
}

// Machine is who has an address, inside or public.
func (d *Domain) Machine(addr netip.Addr) (name string, ok bool) {
	o, ok := d.current().owners[addr.Unmap()]
	if !ok || o.station == d.gateway || o.name == hostName {
		return "", false
	}
	return o.name, true
}

// Close closes every port and listener, ends every flow and connection, and
// waits for the Domain's goroutines. It may be called more than once.
func (d *Domain) Close() error {
	d.change.Lock()
	defer d.change.Unlock()
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil
	}
	d.closed = true
	stations := maps.Clone(d.world.stations)
	d.mu.Unlock()
	// The host's connections first, so that those in the stack see them end;
	// then the ports; the stack last, because ports call into it.
	d.listeners.closeAll()
	if h := d.host.Load(); h != nil {
		_ = h.Close()
	}
	for _, s := range stations {
		if p := s.port.Swap(nil); p != nil {
			p.close()
		}
	}
	d.flows.Each(d.flows.Remove)
	d.stack.Close()
	close(d.stop)
	d.loops.Wait()
	return nil
}
