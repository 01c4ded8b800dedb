package netstack

import (
	"net/netip"
	"sync/atomic"

	"vz.test/vz/netstack/flow"
	"vz.test/vz/netstack/packet"
	"vz.test/vz/netstack/policy"
)

// Names that are no Machine's.
const (
	hostName    = "host"
	edgeName    = "edge"    // what the gateway's stack is called as an originator
	gatewayName = "gateway" // and as a destination
)

// A world is a Spec made ready to be asked. It doesn't change; an Update makes
// a new one, which shares the stations, paths and tallies that stay.
type world struct {
	spec     Spec
	policy   *policy.Table
	paths    map[string]*path
	stations map[place]*station
	tallies  map[place]*tally
	owners   map[netip.Addr]owner
	edges    map[netip.Addr]bool // addresses of the gateway's stack
}

type place struct{ machine, network string }

// An owner is who has an address.
type owner struct {
	name    string // a Machine's, "host", "gateway" or "endpoint:NAME"
	network string // empty: any
	station *station
	public  bool // the address is the station's public one
}

// endpoint reports whether the owner is one.
func (o *owner) endpoint() bool { return o.station.stack != nil && o.name != gatewayName }

// A station is where frames enter and leave the domain: one Machine's
// attachment to one network, the host's port, or the gateway's stack. What is
// configured of it doesn't change.
type station struct {
	Attachment
	domain  *Domain
	network *Network
	router  bool                              // DHCP makes the gateway this Machine's default router
	stack   func(f []byte, info *packet.Info) // the gateway's; else nil
	tally   *tally

	port atomic.Pointer[port] // what is connected now; nil: nothing
}

// A tally outlives the station it counts for.
type tally struct {
	owner          flow.Owner
	received, sent counter
	drops          [policy.Reasons]atomic.Uint64
	answers        limiter // ICMP errors and RSTs
}

// A counter counts frames and their bytes of IP.
type counter struct{ frames, bytes atomic.Uint64 }

func (c *counter) add(info *packet.Info) {
	c.frames.Add(1)
	c.bytes.Add(uint64(info.Length - packet.EthernetLen))
}

// mtu is the largest IP packet in bytes that it takes.
func (s *station) mtu() int {
	if p := s.port.Load(); p != nil {
		return min(p.link.MTU(), s.network.MTU)
	}
	return s.network.MTU
}

// A path is the live side of a Path; it stays while its name does.
type path struct {
	name        string
	kind        PathKind
	conditioner atomic.Pointer[Conditioner] // nil: not impaired

	opened atomic.Uint64
	lost   [2]atomic.Uint64                          // by faults, by direction
	past   [2]struct{ packets, bytes atomic.Uint64 } // of flows that have ended
}

// compile makes the world of a validated spec, with what of old it keeps.
func (d *Domain) compile(spec Spec, old *world) (*world, error) {
	table, err := policy.Compile(spec.rules())
	if err != nil {
		return nil, err
	}
	w := &world{
		spec: spec, policy: table, paths: map[string]*path{}, stations: map[place]*station{},
		tallies: map[place]*tally{}, owners: map[netip.Addr]owner{}, edges: map[netip.Addr]bool{},
	}
	for _, p := range spec.Paths {
		w.paths[p.Name] = &path{name: p.Name, kind: p.Kind}
		if o := old.path(p.Name); o != nil && o.kind == p.Kind {
			w.paths[p.Name] = o
		}
	}
	networks := map[string]*Network{}
	for i := range spec.Networks {
		n := &spec.Networks[i]
		networks[n.Name] = n
		w.owners[n.Gateway] = owner{name: gatewayName, station: d.gateway}
		w.edges[n.Gateway] = true
	}
	for i := range spec.Endpoints {
		e := &spec.Endpoints[i]
		w.owners[e.Address] = owner{name: e.name(), network: e.Network, station: d.gateway}
		w.edges[e.Address] = true
	}
	routers := routers(&spec, networks)
	for _, a := range spec.Attachments {
		s := w.add(old, &station{Attachment: a, domain: d, network: networks[a.Network], router: routers[a.Machine] == a.Network})
		w.owners[a.Address] = owner{name: a.Machine, network: a.Network, station: s}
		if a.Public.IsValid() {
			w.owners[a.Public] = owner{name: a.Machine, network: a.Network, station: s, public: true}
		}
	}
	if spec.HostAddress.IsValid() {
		s := w.add(old, &station{Attachment: Attachment{Machine: hostName, MAC: hostMAC, Address: spec.HostAddress},
			domain: d, network: &hostNetwork})
		w.owners[spec.HostAddress] = owner{name: hostName, station: s}
	}
	return w, nil
}

// add puts s, or the equal station that was there before, into the world.
func (w *world) add(old *world, s *station) *station {
	at := place{s.Machine, s.Network}
	s.tally = &tally{}
	if old != nil {
		if o := old.stations[at]; o != nil && o.Attachment == s.Attachment && *o.network == *s.network && o.router == s.router {
			s = o
		} else if t := old.tallies[at]; t != nil {
			s.tally = t
		}
	}
	w.stations[at], w.tallies[at] = s, s.tally
	return s
}

// routers says for each Machine which network its default route goes to: the
// first edge, or else the first network. One only, or the two would compete.
func routers(spec *Spec, networks map[string]*Network) map[string]string {
	chosen := map[string]string{}
	for _, a := range spec.Attachments {
		current, ok := chosen[a.Machine]
		if !ok || networks[a.Network].Kind == SimulatedPublic && networks[current].Kind != SimulatedPublic {
			chosen[a.Machine] = a.Network
		}
	}
	return chosen
}

func (w *world) path(name string) *path {
	if w == nil {
		return nil
	}
	return w.paths[name]
}

// verdict says along which path a flow from a station may reach destination,
// an address as it is behind NAT, and who that is; or why it may not.
func (w *world) verdict(from *station, destination netip.AddrPort, protocol uint8) (owner, *path, policy.Reason) {
	to, known := w.owners[destination.Addr()]
	if !known || to.name == hostName {
		return to, nil, w.unknown(destination.Addr())
	}
	key := policy.Key{From: from.Machine, To: to.name, Network: from.Network, Protocol: protocol}
	if protocol == policy.TCP || protocol == policy.UDP {
		key.Port = destination.Port()
	}
	if from.Machine == hostName {
		key.Network = to.network
	}
	name, why := w.policy.Evaluate(key)
	if why == policy.Allowed && to.network != "" && to.network != key.Network {
		why = policy.OtherNetwork
	}
	if why != policy.Allowed {
		return to, nil, why
	}
	return to, w.paths[name], policy.Allowed
}

// unknown is why nothing goes to an address that nobody has.
func (w *world) unknown(addr netip.Addr) policy.Reason {
	for _, n := range w.spec.Networks {
		switch {
		case !n.Prefix.Contains(addr):
		case n.Prefix.Bits() < 31 && (addr == n.Prefix.Masked().Addr() || !n.Prefix.Contains(addr.Next())):
			return policy.Multicast // the network's broadcast addresses
		default:
			return policy.NoRoute
		}
	}
	for _, p := range edgeRanges {
		if p.Contains(addr) {
			return policy.NoRoute
		}
	}
	return policy.EgressOffline
}

// edgeRanges are reserved for edges (RFC 5737).
var edgeRanges = []netip.Prefix{
	netip.MustParsePrefix("198.51.100.0/24"),
	netip.MustParsePrefix("203.0.113.0/24"),
}

// hostNetwork is the segment that the host's port is alone on. Its gateway's
// address is the one for routers that have none (RFC 7600).
var hostNetwork = Network{Name: "", Prefix: netip.MustParsePrefix("192.0.0.8/32"), Gateway: dummyAddress, MTU: 65520}

var dummyAddress = netip.MustParseAddr("192.0.0.8")
