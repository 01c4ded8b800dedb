package netstack

import (
	"net/netip"
	"sync/atomic"
	"time"

	"vz.test/vz/netstack/flow"
	"vz.test/vz/netstack/link"
	"vz.test/vz/netstack/nat"
	"vz.test/vz/netstack/packet"
	"vz.test/vz/netstack/policy"
)

// A route is what the domain knows of a flow: its Value.
type route struct {
	path atomic.Pointer[path]
	ends [2]*station  // who sends, by direction
	to   string       // destination's name, as in policy.Key
	nat  *nat.Mapping // of the Machine's end, or nil
}

// This is a frame's way, top to bottom:
//
//	enter    what the segment is for: spoofed, ARP, DHCP, not for the gateway
//	pass     time to live, fragments, ICMP errors, the flow it is of
//	open     on a miss: policy, NAT, a new flow
//	along    path MTU, accounting, NAT, addresses
//	leave    the path's conditioner, once
//	send     the gateway's stack, or a port: made to fit, queued

// enter takes one frame that came from a port. It is carried in place.
func (w *worker) enter(from *station, f *link.Frame) {
	info := &w.info
	if err := f.Decode(info); err != nil {
		w.drop(from, reasonFor(err))
		return
	}
	from.tally.received.add(info)
	if packet.SourceMAC(f.Data) != from.MAC {
		w.drop(from, policy.SpoofedMAC)
		return
	}
	switch {
	case info.EtherType == packet.EtherTypeARP:
		w.arp(from, f)
		return
	case info.EtherType != packet.EtherTypeIPv4:
		w.drop(from, policy.UnknownProtocol)
		return
	case isDHCP(from, info):
		w.dhcp(from, f)
		return
	case info.Source != from.Address:
		w.drop(from, policy.SpoofedAddress)
		return
	case group(info.Destination):
		w.drop(from, policy.Multicast)
		return
	case packet.DestinationMAC(f.Data) != w.d.options.GatewayMAC:
		w.drop(from, policy.ForeignMAC)
		return
	}
	w.pass(from, f)
}

// pass takes one IPv4 packet whose sender is who it says it is; from may be
// the gateway.
func (w *worker) pass(from *station, f *link.Frame) {
	info := &w.info
	f.Data = f.Data[:info.Length] // padding ends here
	if info.SourceRoute {
		w.drop(from, policy.SourceRouted)
		return
	}
	if info.TTL <= 1 && w.transit(from, info) {
		w.refuse(from, f, policy.TTLExceeded)
		return
	}
	whole, pieces := f, 0
	if info.Fragment {
		// Reassembled, so that policy sees ports and the path's conditioner one
		// packet; whatever needs it is fragmented again on the way out.
		data, largest, err := w.d.fragments.Add(w.d.epoch.Add(w.now), f.Data, info)
		if err != nil {
			w.drop(from, policy.FragmentRefused)
			return
		}
		if data == nil {
			return
		}
		whole, pieces = &link.Frame{Data: data}, largest
		if err := whole.Decode(info); err != nil {
			w.drop(from, reasonFor(err))
			return
		}
	}
	if info.ICMPError() {
		w.report(from, whole)
		return
	}
	key := flow.KeyOf(info)
	way := w.d.flows.Lookup(&key)
	if way != nil && over(from, way, info) {
		w.d.flows.Remove(way.Flow())
		way = nil
	}
	if way == nil {
		var reason policy.Reason
		if way, reason = w.d.open(w.now, from, &key, info); way == nil {
			w.refuse(from, whole, reason)
			return
		}
	}
	w.along(way, whole, pieces)
}

// transit reports whether a packet only comes by: it is neither from nor to
// the gateway that its sender sees.
func (w *worker) transit(from *station, info *packet.Info) bool {
	return from != w.d.gateway && info.Destination != from.network.Gateway
}

// over reports whether way's flow has ended and info begins another with the
// same key, or somebody else has the sender's address now.
func over(from *station, way *flow.Way[route], info *packet.Info) bool {
	return way.Flow().Value.ends[way.Direction()] != from ||
		dials(info) && way.Flow().State() >= flow.Closing
}

// dials reports whether info is the segment that opens a TCP connection.
func dials(info *packet.Info) bool {
	const mask = packet.SYN | packet.ACK | packet.RST | packet.FIN
	return info.Protocol == packet.ProtocolTCP && info.TCPFlags&mask == packet.SYN
}

// answers reports whether info can only belong to a flow that exists: a TCP
// segment that opens no connection, an echo reply.
func answers(info *packet.Info) bool {
	if info.Protocol == packet.ProtocolTCP {
		return !dials(info)
	}
	return info.ICMPEcho() && (info.ICMPType == packet.ICMPEchoReply || info.ICMPType == packet.ICMPv6EchoReply)
}

// open decides about the first packet of a flow: way is its direction, or nil
// and reason says why.
func (d *Domain) open(now time.Duration, from *station, key *flow.Key, info *packet.Info) (way *flow.Way[route], reason policy.Reason) {
	d.mu.RLock() // until the flow is in the table, where Update finds it
	defer d.mu.RUnlock()

	source, destination := key.From(), key.To()
	to := d.world.owners[destination.Addr()]
	var p *path
	switch {
	case from == d.gateway && to.public:
		// The edge speaks first: along the path that would let it be answered.
		_, p, reason = d.world.verdict(to.station, source, key.Protocol)
	case from == d.gateway:
		if p = d.world.path(d.dials[source]); p == nil || to.station == nil || to.station == d.gateway {
			reason = policy.NotFromTheDomain
		}
	case to.public:
		// From outside, where only the edge is.
		_, _, reason = d.world.verdict(from, netip.AddrPortFrom(to.station.Address, destination.Port()), key.Protocol)
		if reason == policy.Allowed {
			reason = policy.NATFiltered
		}
	default:
		to, p, reason = d.world.verdict(from, destination, key.Protocol)
	}
	switch {
	case reason != policy.Allowed:
		return nil, reason
	case answers(info):
		return nil, policy.NoFlow
	case to.station.stack == nil && to.station.port.Load() == nil:
		return nil, policy.UnreachableMachine
	}

	var mapping *nat.Mapping
	switch {
	case to.public:
		if mapping = d.nat.Enter(key.Protocol, destination, source.Addr()); mapping == nil {
			return nil, policy.NATFiltered
		}
		destination = mapping.Inside
	case to.endpoint() && from.Public.IsValid():
		var err error
		if mapping, err = d.nat.Acquire(key.Protocol, source, from.Public, destination.Addr()); err != nil {
			return nil, policy.NATPortsFull
		}
		source = mapping.Public
	}

	f := &flow.Flow[route]{}
	r := &f.Value
	r.path.Store(p)
	r.ends, r.to, r.nat = [2]*station{from, to.station}, to.name, mapping
	f.Ways[packet.Request].Key = *key
	f.Ways[packet.Response].Key = flow.NewKey(key.Protocol, destination, source)
	if err := d.flows.Insert(now, &from.tally.owner, f); err != nil {
		d.release(f)
		return nil, policy.FlowTableFull
	}
	p.opened.Add(1)
	return &f.Ways[packet.Request], policy.Allowed
}

// release gives back what a flow that ended, or never began, held of NAT.
func (d *Domain) release(f *flow.Flow[route]) {
	r, key := &f.Value, &f.Ways[packet.Request].Key
	switch {
	case r.nat == nil:
	case r.ends[packet.Request] == d.gateway:
		d.nat.Release(r.nat, key.From().Addr())
	default:
		d.nat.Release(r.nat, key.To().Addr())
	}
}

// ended is what is due when a flow has ended.
func (d *Domain) ended(f *flow.Flow[route]) {
	d.release(f)
	p := f.Value.path.Load()
	for i := range f.Ways {
		packets, bytes := f.Ways[i].Count()
		p.past[i].packets.Add(packets)
		p.past[i].bytes.Add(bytes)
	}
	if c := p.conditioner.Load(); c != nil {
		(*c).Forget(f.Serial)
	}
}

// along takes one packet of a flow. pieces is the size of the largest fragment
// that it came in, or 0.
func (w *worker) along(way *flow.Way[route], f *link.Frame, pieces int) {
	info := &w.info
	direction := way.Direction()
	r := &way.Flow().Value
	from, to := r.ends[direction], r.ends[direction^1]
	if to.stack == nil && to.port.Load() == nil {
		w.refuse(from, f, policy.UnreachableMachine)
		return
	}
	if from != w.d.gateway && tooBig(f, info, pieces, to.mtu()) {
		w.refuse(from, f, policy.TooBig)
		return
	}
	way.See(w.now, info)
	transit := w.transit(from, info)
	if r.nat != nil {
		// Behind NAT it is what the other direction's packets answer to.
		out := way.Flow().Ways[direction^1].Key.Reverse()
		if out.Source != way.Key.Source || out.SourcePort != way.Key.SourcePort {
			source := out.From()
			packet.RewriteSource(f.Data, info, source.Addr(), source.Port())
		}
		if out.Destination != way.Key.Destination || out.DestinationPort != way.Key.DestinationPort {
			destination := out.To()
			packet.RewriteDestination(f.Data, info, destination.Addr(), destination.Port())
		}
	}
	w.leave(way, f, transit)
}

// tooBig reports whether a packet may not go on over a link with this MTU. A
// super-frame of TCP never is: its segments are made smaller instead, as they
// would have been had their sender known.
func tooBig(f *link.Frame, info *packet.Info, pieces, mtu int) bool {
	switch {
	case f.Segmentation == link.GSOUDP:
		return info.Payload-packet.EthernetLen+int(f.GSOSize) > mtu
	case f.Segmentation != link.GSONone:
		return false
	case pieces != 0:
		return info.DontFragment && pieces > mtu
	}
	return info.DontFragment && info.Length-packet.EthernetLen > mtu
}

// ICMP errors that go nowhere.
const (
	icmpSourceQuench = 4
	icmpRedirect     = 5
)

// report takes one ICMP error. It goes along the way of the flow that it is
// about, with the packet that it quotes translated (RFC 5508, 4.2).
func (w *worker) report(from *station, f *link.Frame) {
	info := &w.info
	if info.ICMPType == icmpSourceQuench || info.ICMPType == icmpRedirect { // RFC 6633; not a router's
		w.drop(from, policy.UnrelatedError)
		return
	}
	if err := packet.DecodeEmbedded(f.Data, info, &w.quoted); err != nil {
		w.drop(from, policy.Malformed)
		return
	}
	// The quoted packet reached from, so its answers enter by from.
	key := flow.KeyOf(&w.quoted)
	key = key.Reverse()
	way := w.d.flows.Lookup(&key)
	if way == nil || info.Destination != w.quoted.Source {
		w.drop(from, policy.UnrelatedError)
		return
	}
	direction := way.Direction()
	r := &way.Flow().Value
	to := r.ends[direction^1]
	if r.ends[direction] != from || to.stack == nil && to.port.Load() == nil {
		w.drop(from, policy.UnrelatedError)
		return
	}
	way.Add(info)
	transit := w.transit(from, info)
	out := way.Flow().Ways[direction^1].Key.Reverse()
	if out.Source != way.Key.Source || out.SourcePort != way.Key.SourcePort {
		source := out.From()
		packet.RewriteEmbeddedDestination(f.Data, info, &w.quoted, source.Addr(), source.Port())
		packet.RewriteSource(f.Data, info, source.Addr(), 0)
	}
	if out.Destination != way.Key.Destination || out.DestinationPort != way.Key.DestinationPort {
		destination := out.To()
		packet.RewriteEmbeddedSource(f.Data, info, &w.quoted, destination.Addr(), destination.Port())
		packet.RewriteDestination(f.Data, info, destination.Addr(), 0)
	}
	w.leave(way, f, transit)
}

// leave sends a packet on its last stretch, past the path's conditioner.
func (w *worker) leave(way *flow.Way[route], f *link.Frame, transit bool) {
	r := &way.Flow().Value
	to := r.ends[way.Direction()^1]
	if transit {
		packet.DecrementTTL(f.Data, &w.info)
	}
	packet.SetMACs(f.Data, to.MAC, w.d.options.GatewayMAC)
	p := r.path.Load()
	if c := p.conditioner.Load(); c != nil {
		w.impair(*c, p, way, to, f)
		return
	}
	w.send(to, f, &w.info)
}

// impair gives a packet to a conditioner: each segment of a super-frame by
// itself, with its checksum complete.
func (w *worker) impair(c Conditioner, p *path, way *flow.Way[route], to *station, f *link.Frame) {
	mtu := link.MaxFrame // what is larger than the port's is fragmented behind the conditioner
	if f.Segmentation != link.GSONone {
		mtu = to.mtu()
	}
	segments, err := w.splitter.Fit(f, &w.info, link.Offload{}, mtu)
	if err != nil {
		w.drop(way.Flow().Value.ends[way.Direction()], policy.Malformed)
		return
	}
	key := &way.Flow().Ways[packet.Request].Key
	from := way.Flow().Value.ends[packet.Request]
	for i := range segments {
		info := &w.info
		if len(segments) > 1 {
			info = &w.segment
			_ = segments[i].Decode(info) // we have made it
		}
		w.flight = packet.Flight{
			Direction: way.Direction(),
			Flow: packet.FlowID{Serial: way.Flow().Serial, Source: from.Machine, Destination: way.Flow().Value.to,
				Protocol: key.Protocol, DestinationPort: key.DestinationPort},
			Info: info, Frame: segments[i].Data[:info.Length], To: to,
		}
		switch c.Condition(&w.flight) {
		case packet.Pass:
			w.send(to, &segments[i], info)
		case packet.Lost:
			p.lost[way.Direction()].Add(1)
			w.drop(way.Flow().Value.ends[way.Direction()], policy.FaultLost)
		}
	}
	w.flush() // segments are the splitter's
}

// send puts a packet out: into the gateway's stack, or onto the port's queue
// in the shape that the port takes.
func (w *worker) send(to *station, f *link.Frame, info *packet.Info) {
	to.tally.sent.add(info)
	if to.stack != nil {
		w.sendToStack(to, f, info)
		return
	}
	p := to.port.Load()
	if p == nil {
		w.drop(to, policy.UnreachableMachine)
		return
	}
	offload, mtu := p.link.Offload(), min(p.link.MTU(), to.network.MTU)
	fitting, err := w.fitter.Fit(f, info, offload, mtu)
	switch {
	case err == nil && len(fitting) == 1:
		w.queue(p, &fitting[0])
		return
	case err == nil:
	case err == link.ErrTooBig && f.Segmentation == link.GSONone:
		w.sendFragments(to, p, f, info, mtu)
		return
	default:
		w.drop(to, policy.Malformed)
		return
	}
	for i := range fitting { // in the fitter's memory, until it is used again
		w.queue(p, &fitting[i])
	}
	w.flush()
}

// sendFragments cuts a packet that is larger than the port's MTU.
func (w *worker) sendFragments(to *station, p *port, f *link.Frame, info *packet.Info, mtu int) {
	if f.NeedsChecksum {
		if packet.CompleteChecksum(f.Data[:info.Length], int(f.ChecksumStart), int(f.ChecksumOffset)) != nil {
			w.drop(to, policy.Malformed)
			return
		}
		f.NeedsChecksum, info.PartialChecksum = false, false
	}
	w.flush() // keeps order, and each fragment is written before the next is made
	err := packet.Fragment(f.Data, info, mtu, make([]byte, packet.EthernetLen+mtu), func(piece []byte) bool {
		w.queue(p, &link.Frame{Data: piece})
		w.flush()
		return true
	})
	if err != nil {
		w.drop(to, policy.Malformed)
	}
}

// sendToStack hands a packet to the gateway's stack, which takes super-frames
// of TCP but datagrams one by one.
func (w *worker) sendToStack(to *station, f *link.Frame, info *packet.Info) {
	if f.Segmentation != link.GSOUDP {
		to.stack(f.Data, info)
		return
	}
	datagrams, err := w.fitter.Fit(f, info, link.Offload{}, link.MaxFrame)
	if err != nil {
		w.drop(to, policy.Malformed)
		return
	}
	for i := range datagrams {
		if datagrams[i].Decode(&w.segment) == nil {
			to.stack(datagrams[i].Data, &w.segment)
		}
	}
}

// fromStack takes what the gateway's stack sends.
func (d *Domain) fromStack(frames []link.Frame) {
	w := d.workers.Get().(*worker)
	w.now = d.now()
	for i := range frames {
		if frames[i].Decode(&w.info) != nil {
			w.drop(d.gateway, policy.Malformed)
			continue
		}
		d.gateway.tally.received.add(&w.info)
		w.pass(d.gateway, &frames[i])
	}
	w.flush()
	d.workers.Put(w)
}

// Deliver sends a packet that a conditioner has held; s is a packet.Sink.
func (s *station) Deliver(frame []byte) {
	w := s.domain.workers.Get().(*worker)
	f := link.Frame{Data: frame}
	if f.Decode(&w.info) == nil {
		w.send(s, &f, &w.info)
	}
	w.flush()
	s.domain.workers.Put(w)
}
