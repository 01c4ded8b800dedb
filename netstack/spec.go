package netstack

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"vz.test/vz/netstack/packet"
	"vz.test/vz/netstack/policy"
)

// Spec is the desired state of a route domain. It is immutable once given.
type Spec struct {
	Networks      []Network
	Attachments   []Attachment // a Machine's in the order of the definition
	Paths         []Path       // where they overlap, the earlier one has the flow
	Endpoints     []Endpoint
	SearchDomains []string   // for DHCP; the first is the domain name as well
	HostAddress   netip.Addr // the host's port; none when not valid
}

// Kinds of Network.
const (
	Private         = "private"
	SimulatedPublic = "simulated_public"
)

// Network is a named L3 network.
type Network struct {
	Name    string
	Kind    string // Private or SimulatedPublic
	Prefix  netip.Prefix
	Gateway netip.Addr // within Prefix
	MTU     int        // bytes of IP, 576 to 65520
	Refuse  Refuse
}

// Refuse is what a network answers to what no path allows.
type Refuse uint8

const (
	Reset      Refuse = iota // TCP RST; port unreachable for UDP; else as Prohibited
	Prohibited               // ICMP communication administratively prohibited
	Drop                     // nothing
)

var refuses = []string{Reset: "reset", Prohibited: "prohibited", Drop: "drop"}

// ParseRefuse reads a Refuse's name in the definition.
func ParseRefuse(name string) (Refuse, error) {
	i := slices.Index(refuses, name)
	if i < 0 {
		return 0, fmt.Errorf("netstack: refuse %q is none of %q", name, refuses)
	}
	return Refuse(i), nil
}

func (r Refuse) String() string {
	if int(r) < len(refuses) {
		return refuses[r]
	}
	return fmt.Sprintf("refuse(%d)", uint8(r))
}

// Attachment is one Machine's place on one network.
type Attachment struct {
	Machine string
	Network string
	MAC     packet.MAC
	Address netip.Addr // within the network's prefix
	Public  netip.Addr // what the edge sees of it; not valid on private networks
}

// PathKind is where a path comes from.
type PathKind uint8

const (
	PathDeclared PathKind = iota
	PathDNS               // From one Machine to "gateway": DNS and echo; no protocol or ports
	PathBackend           // From "edge" to a Machine; Name is backend:ENDPOINT
	PathHost              // From "host" to "endpoint:NAME", on the endpoint's ports
)

func (k PathKind) String() string {
	return [...]string{"declared", "dns", "backend", "host"}[k&3]
}

// Path lets flows begin: from each of From to each of To, by Machines' names,
// "host", "edge", "gateway" or "endpoint:NAME". Both ends are on Network.
type Path struct {
	Name     string // unique
	Kind     PathKind
	From, To []string
	Network  string
	Protocol string      // tcp, udp, icmp, any
	Ports    []PortRange // none: all
}

// PortRange is an inclusive range of ports.
type PortRange = policy.Range

// Endpoint is a public address that the edge answers.
type Endpoint struct {
	Name    string
	Network string // a SimulatedPublic one
	Address netip.Addr
	Ports   []uint16 // TCP ports that the host may dial
	Machine string   // backend
	Port    uint16   // backend's, TCP
}

func (e *Endpoint) name() string { return "endpoint:" + e.Name }

// validate reports all that is wrong with a Spec by itself. It is a check on
// the caller: what people write is validated by package config.
func (s *Spec) validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf("netstack: "+format, args...)) }
	networks := map[string]*Network{}
	addresses := map[netip.Addr]string{}
	claim := func(addr netip.Addr, whose string) {
		switch other, taken := addresses[addr]; {
		case !addr.Is4():
			bad("%s: address %s is not an IPv4 address", whose, addr)
		case taken:
			bad("%s and %s both have address %s", other, whose, addr)
		}
		addresses[addr] = whose
	}
	for i := range s.Networks {
		n := &s.Networks[i]
		switch {
		case n.Name == "" || networks[n.Name] != nil:
			bad("network %q is named twice or not at all", n.Name)
		case n.Kind != Private && n.Kind != SimulatedPublic:
			bad("network %s: kind %q", n.Name, n.Kind)
		case !n.Prefix.IsValid() || !n.Prefix.Contains(n.Gateway):
			bad("network %s: gateway %s is not in prefix %s", n.Name, n.Gateway, n.Prefix)
		case n.MTU < 576 || n.MTU > 65520:
			bad("network %s: MTU %d is not within 576 to 65520", n.Name, n.MTU)
		}
		networks[n.Name] = n
		claim(n.Gateway, "gateway of "+n.Name)
	}
	type place struct{ machine, network string }
	places := map[place]bool{}
	for _, a := range s.Attachments {
		n := networks[a.Network]
		switch {
		case n == nil:
			bad("machine %s is attached to unknown network %q", a.Machine, a.Network)
			continue
		case places[place{a.Machine, a.Network}]:
			bad("machine %s is attached to %s twice", a.Machine, a.Network)
		case !n.Prefix.Contains(a.Address):
			bad("machine %s: address %s is not in %s's prefix %s", a.Machine, a.Address, n.Name, n.Prefix)
		case a.MAC.Multicast() || a.MAC == packet.MAC{}:
			bad("machine %s: MAC %s is no Machine's", a.Machine, a.MAC)
		case a.Machine == "" || a.Machine == hostName || a.Machine == edgeName || a.Machine == gatewayName:
			bad("machine %q: the name has another meaning", a.Machine)
		}
		places[place{a.Machine, a.Network}] = true
		claim(a.Address, a.Machine)
		if a.Public.IsValid() {
			claim(a.Public, a.Machine+"'s public side")
		}
	}
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		if networks[e.Network] == nil {
			bad("endpoint %s: unknown network %q", e.Name, e.Network)
		}
		claim(e.Address, e.name())
	}
	if s.HostAddress.IsValid() {
		claim(s.HostAddress, hostName)
	}
	names := map[string]bool{}
	for _, p := range s.Paths {
		if p.Name == "" || names[p.Name] {
			bad("path %q is named twice or not at all", p.Name)
		}
		names[p.Name] = true
		if _, err := protocolNumber(p.Protocol); err != nil && p.Kind != PathDNS {
			bad("path %s: %w", p.Name, err)
		}
	}
	return errors.Join(errs...)
}

// rules are what the paths mean to package policy. Backend paths make none:
// their flows are known by who dials them.
func (s *Spec) rules() []policy.Rule {
	var all []policy.Rule
	for _, p := range s.Paths {
		for _, from := range p.From {
			for _, to := range p.To {
				rule := policy.Rule{Path: p.Name, From: from, To: to, Network: p.Network}
				switch p.Kind {
				case PathDeclared:
					rule.Protocol, _ = protocolNumber(p.Protocol)
					rule.Ports = p.Ports
					all = append(all, rule)
				case PathHost:
					rule.Protocol = policy.TCP
					for _, e := range s.Endpoints {
						for _, port := range e.Ports {
							if e.name() == to {
								rule.Ports = append(rule.Ports, PortRange{First: port, Last: port})
							}
						}
					}
					if len(rule.Ports) > 0 {
						all = append(all, rule)
					}
				case PathDNS:
					rule.Ports = []PortRange{{First: 53, Last: 53}}
					for _, rule.Protocol = range []uint8{policy.UDP, policy.TCP, policy.ICMP} {
						all = append(all, rule)
					}
				}
			}
		}
	}
	return all
}

func protocolNumber(name string) (uint8, error) {
	switch name {
	case "tcp":
		return policy.TCP, nil
	case "udp":
		return policy.UDP, nil
	case "icmp":
		return policy.ICMP, nil
	case "any":
		return policy.Any, nil
	}
	return 0, fmt.Errorf("protocol %q", name)
}
