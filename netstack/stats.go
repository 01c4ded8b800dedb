package netstack

import (
	"cmp"
	"container/list"
	"net/netip"
	"slices"
	"sync"
	"time"

	"vz.test/vz/netstack/flow"
	"vz.test/vz/netstack/packet"
	"vz.test/vz/netstack/policy"
)

// Reason is why a frame went no further; see package policy for the list.
type Reason = policy.Reason

// A Refusal is what the firewall said no to: one kind of attempt, and how
// often it was made.
type Refusal struct {
	Machine, Network string // who tried, from where
	Reason           Reason
	Destination      netip.AddrPort // port: 0 where the protocol has none
	Name             string         // who that is: a Machine, "endpoint:NAME", "gateway", or empty
	Protocol         uint8          // IANA number
	Count            uint64
	First, Last      time.Time
}

// maxRefusals is how many kinds are remembered, the most recent ones.
const maxRefusals = 256

// refusals remembers them. Its lock is held for a map access.
type refusals struct {
	mu    sync.Mutex
	known map[refusalKey]*list.Element // of *noted
	order *list.List                   // of the same, the most recent last
	news  chan Refusal                 // nil: nobody wants to know
	pace  limiter
}

type refusalKey struct {
	from        *tally
	reason      Reason
	destination netip.AddrPort
	protocol    uint8
}

func (r *refusals) start(tell bool) {
	r.known, r.order = map[refusalKey]*list.Element{}, list.New()
	if tell {
		r.news = make(chan Refusal, 16)
	}
}

// repeat is how long a kind of refusal that goes on isn't news.
const repeat = 10 * time.Second

// note remembers one refused packet.
func (d *Domain) note(now time.Duration, from *station, info *packet.Info, why Reason) {
	key := refusalKey{from.tally, why, netip.AddrPortFrom(info.Destination, info.DestinationPort), info.Protocol}
	at := d.epoch.Add(now)
	r := &d.refusals
	r.mu.Lock()
	defer r.mu.Unlock()
	e, isNews := r.known[key], false
	if e == nil {
		isNews = true
		if r.order.Len() == maxRefusals {
			oldest := r.order.Front()
			delete(r.known, oldest.Value.(*noted).key)
			r.order.Remove(oldest)
		}
		e = r.order.PushBack(&noted{key: key, Refusal: Refusal{
			Machine: from.Machine, Network: from.Network, Reason: why, Destination: key.destination,
			Name: d.nameOf(info.Destination), Protocol: info.Protocol, First: at,
		}})
		r.known[key] = e
	}
	n := e.Value.(*noted)
	n.Count++
	isNews = isNews || at.Sub(n.told) >= repeat
	n.Last = at
	r.order.MoveToBack(e)
	if !isNews || r.news == nil || !r.pace.allow(now, 10, 20) {
		return
	}
	select {
	case r.news <- n.Refusal:
		n.told = at
	default:
	}
}

type noted struct {
	Refusal
	key  refusalKey
	told time.Time
}

func (d *Domain) nameOf(addr netip.Addr) string {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.world.owners[addr].name
}

// Refusals are the most recent kinds, the latest last.
func (d *Domain) Refusals() []Refusal {
	d.refusals.mu.Lock()
	defer d.refusals.mu.Unlock()
	all := make([]Refusal, 0, d.refusals.order.Len())
	for e := d.refusals.order.Front(); e != nil; e = e.Next() {
		all = append(all, e.Value.(*noted).Refusal)
	}
	return all
}

// DropCount is how many frames went no further for one reason: those from an
// attachment, or to it where the reason is the destination's.
type DropCount struct {
	Machine, Network string
	Reason           Reason
	Count            uint64
}

// Drops are all counts above zero.
func (d *Domain) Drops() []DropCount {
	var all []DropCount
	add := func(at place, t *tally) {
		for reason := range t.drops {
			if n := t.drops[reason].Load(); n > 0 {
				all = append(all, DropCount{at.machine, at.network, Reason(reason), n})
			}
		}
	}
	for at, t := range d.current().tallies {
		add(at, t)
	}
	add(place{machine: edgeName}, d.gateway.tally)
	slices.SortFunc(all, func(a, b DropCount) int {
		return cmp.Or(cmp.Compare(a.Machine, b.Machine), cmp.Compare(a.Network, b.Network), cmp.Compare(a.Reason, b.Reason))
	})
	return all
}

// PortInfo is an attachment, the host's port ("host") or the gateway ("edge").
// Frames and bytes of IP are counted as the domain gets and gives them; a
// super-frame is one.
type PortInfo struct {
	Machine, Network              string
	Address                       netip.Addr
	Connected                     bool
	ReceivedFrames, ReceivedBytes uint64 // from the Machine
	SentFrames, SentBytes         uint64 // to it
	Malformed, Overflowed         uint64 // the link's own drops, of the port that is connected now
	OpenFlows                     int    // those that it has opened
}

// Ports are all attachments, in the Spec's order, then the host's and the
// gateway.
func (d *Domain) Ports() []PortInfo {
	w := d.current()
	var all []PortInfo
	add := func(s *station) {
		i := PortInfo{
			Machine: s.Machine, Network: s.Network, Address: s.Address, Connected: s.stack != nil,
			ReceivedFrames: s.tally.received.frames.Load(), ReceivedBytes: s.tally.received.bytes.Load(),
			SentFrames: s.tally.sent.frames.Load(), SentBytes: s.tally.sent.bytes.Load(),
			OpenFlows: s.tally.owner.Open(),
		}
		if p := s.port.Load(); p != nil {
			i.Connected = true
			i.Malformed, i.Overflowed = p.link.Drops()
		}
		all = append(all, i)
	}
	for _, a := range w.spec.Attachments {
		add(w.stations[place{a.Machine, a.Network}])
	}
	if s := w.stations[place{machine: hostName}]; s != nil {
		add(s)
	}
	add(d.gateway)
	return all
}

// Count is packets and bytes of IP; a super-frame is one packet.
type Count struct{ Packets, Bytes uint64 }

// FlowInfo is one flow as it stands.
type FlowInfo struct {
	Serial              uint64
	Path                string
	Source, Destination string // as in packet.FlowID
	Protocol            uint8  // IANA number
	From, To            netip.AddrPort
	Public              netip.AddrPort // the Machine's side of NAT; not valid without
	State               string         // opening, open, closing, closed
	Idle                time.Duration
	Request, Response   Count
}

// Flows are all flows that there are.
func (d *Domain) Flows() []FlowInfo {
	now := d.now()
	var all []FlowInfo
	d.flows.Each(func(f *flow.Flow[route]) {
		key := &f.Ways[packet.Request].Key
		i := FlowInfo{
			Serial: f.Serial, Path: f.Value.path.Load().name,
			Source: f.Value.ends[packet.Request].Machine, Destination: f.Value.to,
			Protocol: key.Protocol, From: key.From(), To: key.To(),
			State: f.State().String(), Idle: f.Idle(now),
		}
		i.Request.add(&f.Ways[packet.Request])
		i.Response.add(&f.Ways[packet.Response])
		if f.Value.nat != nil {
			i.Public = f.Value.nat.Public
		}
		all = append(all, i)
	})
	slices.SortFunc(all, func(a, b FlowInfo) int { return cmp.Compare(a.Serial, b.Serial) })
	return all
}

func (c *Count) add(w *flow.Way[route]) {
	packets, bytes := w.Count()
	c.Packets += packets
	c.Bytes += bytes
}

// PathInfo is what a path has carried since it is there.
type PathInfo struct {
	Name                      string
	Kind                      PathKind
	Opened                    uint64 // flows
	Open                      int    // now
	Request, Response         Count  // lost ones included
	LostRequest, LostResponse uint64 // by faults, segments counted one by one
	Impaired                  bool
}

// PathStats are all paths, in the Spec's order.
func (d *Domain) PathStats() []PathInfo {
	w := d.current()
	all := make([]PathInfo, len(w.spec.Paths))
	at := map[*path]*PathInfo{}
	for i, declared := range w.spec.Paths {
		p := w.paths[declared.Name]
		all[i] = PathInfo{
			Name: p.name, Kind: p.kind, Opened: p.opened.Load(), Impaired: p.conditioner.Load() != nil,
			Request:     Count{p.past[0].packets.Load(), p.past[0].bytes.Load()},
			Response:    Count{p.past[1].packets.Load(), p.past[1].bytes.Load()},
			LostRequest: p.lost[0].Load(), LostResponse: p.lost[1].Load(),
		}
		at[p] = &all[i]
	}
	d.flows.Each(func(f *flow.Flow[route]) {
		i := at[f.Value.path.Load()]
		if i == nil {
			return
		}
		i.Open++
		i.Request.add(&f.Ways[packet.Request])
		i.Response.add(&f.Ways[packet.Response])
	})
	return all
}
