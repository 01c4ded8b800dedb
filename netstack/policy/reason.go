package policy

import "fmt"

// Reason says why a frame went no further. The list is closed: whatever the
// route domain drops or refuses is counted under exactly one of these.
type Reason uint8

const (
	// Allowed is no reason: the frame went on.
	Allowed Reason = iota

	// What the firewall refuses, and tells the sender as its network says.

	NoPath              // no declared path joins the two
	OtherNetwork        // a path joins them, on another network
	ProtocolNotDeclared // a path joins them, for other protocols
	PortNotDeclared     // a path joins them, for other ports
	NoRoute             // nobody in the Environment has the destination address
	EgressOffline       // a destination outside the Environment
	UnreachableMachine  // a path allows it, and the Machine isn't connected
	NATFiltered         // to a public port that hasn't spoken to the sender
	NoFlow              // what only belongs to a known flow, and there is none

	// What never gets as far as the firewall, or can't go on behind it.

	SpoofedMAC       // another's Ethernet source address, in the header or in ARP
	SpoofedAddress   // another's IP source address, in the header or in ARP
	ForeignMAC       // an Ethernet destination that isn't the gateway
	Malformed        // no frame that a sound stack makes
	SourceRouted     // an IP source route
	UnknownProtocol  // neither IPv4 nor ARP
	Multicast        // multicast and broadcast have no path
	TTLExceeded      // its time to live ended at the gateway
	TooBig           // must not be fragmented, and exceeds the next link's MTU
	FragmentRefused  // overlapping, tiny or too many fragments
	UnrelatedError   // an ICMP error about no known flow
	FlowTableFull    // too many flows, of this Machine or of all
	NATPortsFull     // no public port is free
	PortOverflow     // the destination doesn't read fast enough
	FaultLost        // lost by a fault; that is its purpose
	AnswerLimited    // an ICMP error or RST that was not sent, to bound their rate
	NotFromTheDomain // the gateway's own stack sent what no path asked for

	reasons // how many there are
)

// Reasons is how many there are; every Reason is below it.
const Reasons = int(reasons)

var words = [reasons]struct{ name, explanation string }{
	Allowed: {"allowed", "a path allows it"},
	NoPath: {"no_path",
		"no path joins the two; declare one in paths, with from, to, network, protocol and ports"},
	OtherNetwork: {"other_network",
		"a path joins the two, but on another network; use that network's address, or declare a path on this one"},
	ProtocolNotDeclared: {"protocol_not_declared",
		"a path joins the two, but not for this protocol; declare a path with it"},
	PortNotDeclared: {"port_not_declared",
		"a path joins the two, but not for this port; add the port to the path's ports"},
	NoRoute: {"no_route",
		"nobody in the Environment has this address; use a Machine's or an endpoint's name"},
	EgressOffline: {"egress_offline",
		"the address lies outside the Environment, and this Machine's egress is offline; declare its egress"},
	UnreachableMachine: {"unreachable_machine",
		"a path allows it, but the Machine is not connected to the network: it is stopped, booting or broken"},
	NATFiltered: {"nat_filtered",
		"nothing behind this public port has spoken to the sender, whose address NAT filters by"},
	NoFlow: {"no_flow",
		"a TCP segment of no known connection, or an echo reply nobody waits for: the flow was opened before a restart or an update, or has been idle for too long; connect again"},
	SpoofedMAC:      {"spoofed_mac", "the Ethernet source address is not the one that this attachment has"},
	SpoofedAddress:  {"spoofed_address", "the IP source address is not the one that this attachment has; use DHCP"},
	ForeignMAC:      {"foreign_mac", "the Ethernet destination is not the gateway; there is nobody else on the segment"},
	Malformed:       {"malformed", "the frame contradicts itself, or a checksum of its headers is wrong"},
	SourceRouted:    {"source_routed", "IP source routes are not followed"},
	UnknownProtocol: {"unknown_protocol", "the network carries IPv4 and ARP"},
	Multicast:       {"multicast", "multicast and broadcast reach nobody; every path is from one to one"},
	TTLExceeded:     {"ttl_exceeded", "the packet's time to live ended at the gateway"},
	TooBig:          {"too_big", "the packet exceeds the next link's MTU and must not be fragmented"},
	FragmentRefused: {"fragment_refused", "the fragments overlap, are too small or too many"},
	UnrelatedError:  {"unrelated_error", "the ICMP error is about no known flow"},
	FlowTableFull:   {"flow_table_full", "the Machine has too many open flows; it gets new ones when old ones end"},
	NATPortsFull:    {"nat_ports_full", "every public port of the Machine is in use"},
	PortOverflow:    {"port_overflow", "the destination does not take frames as fast as they come"},
	FaultLost:       {"fault_lost", "a declared fault lost it"},
	AnswerLimited:   {"answer_limited", "an ICMP error or TCP reset was due and not sent, because there were too many"},
	NotFromTheDomain: {"not_from_the_domain",
		"the gateway's stack sent a packet that belongs to no path"},
}

// String is the reason's name as it stands in counters and in the API.
func (r Reason) String() string {
	if int(r) < len(words) {
		return words[r].name
	}
	return fmt.Sprintf("reason(%d)", uint8(r))
}

// Explain is a sentence for people: what is wrong and, where something can be
// done about it, what to declare or use instead.
func (r Reason) Explain() string {
	if int(r) < len(words) {
		return words[r].explanation
	}
	return r.String()
}

// Refusal reports whether the sender is told, as its network says: the
// firewall understood what it wanted, and said no.
func (r Reason) Refusal() bool { return r >= NoPath && r <= NoFlow }
