package netstack

import (
	"bytes"
	"net/netip"
	"sync/atomic"
	"time"

	"vz.test/vz/netstack/link"
	"vz.test/vz/netstack/packet"
	"vz.test/vz/netstack/policy"
)

// answerRoom is enough for every answer that is made here: an ICMP error, a
// DHCP reply.
const answerRoom = 2048

// An attachment gets at most this many ICMP errors and RSTs a second, after a
// burst: as many as Linux's icmp_msgs_per_sec.
const (
	answersPerSecond = 1000
	answersBurst     = 250
)

// drop counts a frame that goes no further, and says nothing.
func (w *worker) drop(at *station, why policy.Reason) {
	at.tally.drops[why].Add(1)
}

// reasonFor is the Reason of a frame that can't be decoded.
func reasonFor(err error) policy.Reason {
	switch err {
	case packet.ErrVLAN, packet.ErrEtherType:
		return policy.UnknownProtocol
	case packet.ErrFragment:
		return policy.FragmentRefused
	}
	return policy.Malformed
}

// group reports whether an IPv4 address is more than one host's, or nobody's.
func group(addr netip.Addr) bool {
	first := addr.As4()[0]
	return first >= 224 || first == 127 || first == 0
}

// refuse counts a packet that goes no further, notes it where it is the
// firewall's doing, and tells its sender as its network says.
func (w *worker) refuse(from *station, f *link.Frame, why policy.Reason) {
	info := &w.info
	w.drop(from, why)
	if why.Refusal() {
		w.d.note(w.now, from, info, why)
	}
	refuse := from.network.Refuse
	switch why {
	case policy.TTLExceeded:
		w.icmp(from, f, packet.ICMPTimeExceeded, packet.ICMPTTLExceeded, 0)
	case policy.TooBig:
		w.icmp(from, f, packet.ICMPUnreachable, packet.ICMPFragmentNeeded, w.mtuOf(info.Destination))
	case policy.UnreachableMachine:
		w.icmp(from, f, packet.ICMPUnreachable, packet.ICMPHostUnreachable, 0)
	case policy.NoFlow, policy.NotFromTheDomain:
		if refuse != Drop {
			w.reset(from, f)
		}
	case policy.Multicast, policy.NATPortsFull, policy.FlowTableFull:
	default:
		switch {
		case refuse == Drop:
		case refuse == Reset && info.Protocol == packet.ProtocolTCP:
			w.reset(from, f)
		case refuse == Reset && info.Protocol == packet.ProtocolUDP:
			w.icmp(from, f, packet.ICMPUnreachable, packet.ICMPPortUnreachable, 0)
		default:
			w.icmp(from, f, packet.ICMPUnreachable, packet.ICMPAdminProhibited, 0)
		}
	}
}

// mtuOf is the MTU of the link to an address's owner.
func (w *worker) mtuOf(addr netip.Addr) int {
	w.d.mu.RLock()
	defer w.d.mu.RUnlock()
	if o := w.d.world.owners[addr]; o.station != nil {
		return o.station.mtu()
	}
	return hostNetwork.MTU
}

// icmp answers a packet with an ICMP error from the gateway that its sender
// sees.
func (w *worker) icmp(to *station, f *link.Frame, typ, code uint8, mtu int) {
	w.tell(to, packet.BuildICMPError(w.answer[:], f.Data, &w.info, to.network.Gateway, typ, code, mtu))
}

// reset answers a TCP segment as a closed port would.
func (w *worker) reset(to *station, f *link.Frame) {
	w.tell(to, packet.BuildReset(w.answer[:], f.Data, &w.info))
}

// tell sends an answer about a frame back where it came from, if the rate
// allows. The answer is nil where none may be made.
func (w *worker) tell(to *station, answer []byte) {
	if answer == nil {
		return
	}
	if !to.tally.answers.allow(w.now, answersPerSecond, answersBurst) {
		w.drop(to, policy.AnswerLimited)
		return
	}
	if to.stack != nil {
		// Not from here: the stack may be within a connection's lock.
		answer = bytes.Clone(answer)
		w.d.loops.Go(func() {
			var info packet.Info
			if packet.Decode(answer, &info) == nil {
				to.stack(answer, &info)
			}
		})
		return
	}
	w.say(to, answer)
}

// say puts one frame of the gateway's own out to a port.
func (w *worker) say(to *station, frame []byte) {
	p := to.port.Load()
	if p == nil {
		return
	}
	to.tally.sent.frames.Add(1)
	to.tally.sent.bytes.Add(uint64(len(frame) - packet.EthernetLen))
	w.queue(p, &link.Frame{Data: frame})
	w.flush() // the frame is scratch memory
}

// arp answers for every address of the network but the asker's own, so that
// all goes by the gateway. Its duplicate-address probes (RFC 5227), which ask
// for its own address, meet silence; probes for another's find it taken.
func (w *worker) arp(from *station, f *link.Frame) {
	m, err := packet.DecodeARP(f.Data)
	switch {
	case err != nil:
		w.drop(from, policy.Malformed)
	case m.SenderMAC != from.MAC:
		w.drop(from, policy.SpoofedMAC)
	case m.SenderAddress != from.Address && !m.SenderAddress.IsUnspecified():
		w.drop(from, policy.SpoofedAddress)
	case m.Operation != packet.ARPRequest || m.TargetAddress == from.Address:
	case from.network.Prefix.Contains(m.TargetAddress):
		w.say(from, packet.PutARP(w.answer[:], from.MAC, w.d.options.GatewayMAC, m.Reply(w.d.options.GatewayMAC)))
	default:
		w.drop(from, policy.NoRoute)
	}
}

// A limiter allows so many a second on average, after a burst, by GCRA: next
// is when it would be allowed again if it had never been allowed early.
type limiter struct{ next atomic.Int64 }

func (l *limiter) allow(now time.Duration, perSecond, burst int) bool {
	interval := int64(time.Second) / int64(perSecond)
	for {
		next := l.next.Load()
		at := max(next, int64(now))
		if at-int64(now) > interval*int64(burst-1) {
			return false
		}
		if l.next.CompareAndSwap(next, at+interval) {
			return true
		}
	}
}
