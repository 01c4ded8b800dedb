package supervisor

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"

	"vz.test/vz/config"
	"vz.test/vz/dns"
	"vz.test/vz/ingress"
	"vz.test/vz/netstack"
	"vz.test/vz/netstack/packet"
	"vz.test/vz/supervisor/registry"
)

// searchDomain is where a Machine's resolver looks for bare names.
const searchDomain = "vz.internal"

var (
	endpointRange = netip.MustParsePrefix("198.51.100.0/24") // RFC 5737, endpoints
	publicRange   = netip.MustParsePrefix("203.0.113.0/24")  // RFC 5737, Machines behind an edge, and the host
	hostAddress   = netip.MustParseAddr("203.0.113.254")
)

// defaultMTU is Ethernet's, in bytes of an IP packet.
const defaultMTU = 1500

// allocate gives everything that the definition declares and the record does
// not know yet its identity and addresses, and forgets what is no longer
// declared. What exists keeps what it has: identity, addresses and MAC outlive
// every up, stop and rebuild. driver is what is to run the Machines. It changes
// record only.
func allocate(definition *config.Definition, driver string, record *registry.Record) error {
	record.ProjectName = definition.Name
	record.DefaultMachine = definition.DefaultMachine
	allocateNetworks(definition, record)
	if err := allocateMachines(definition, driver, record); err != nil {
		return err
	}
	return allocateEndpoints(definition, record)
}

func allocateNetworks(definition *config.Definition, record *registry.Record) {
	prefixes := definition.Prefixes()
	record.Networks = nil
	for _, name := range definition.NetworkNames() {
		n, prefix := definition.Networks[name], prefixes[name]
		record.Networks = append(record.Networks, registry.Network{
			Name: name, Kind: n.Kind, CIDR: prefix.String(), Gateway: prefix.Masked().Addr().Next().String(),
			MTU: cmp.Or(n.MTU, defaultMTU), Refuse: cmp.Or(n.Refuse, "reset"),
		})
	}
}

func allocateMachines(definition *config.Definition, driver string, record *registry.Record) error {
	old := map[string]registry.Machine{}
	for _, m := range record.Machines {
		old[m.Name] = m
	}
	taken := map[string]map[netip.Addr]bool{} // network → addresses
	public := map[netip.Addr]bool{hostAddress: true}
	for _, n := range record.Networks {
		taken[n.Name] = map[netip.Addr]bool{netip.MustParseAddr(n.Gateway): true}
	}
	for _, m := range definition.Machines { // declared addresses come before allocated ones
		for _, a := range m.Networks {
			if a.Address != "" {
				taken[a.Name][netip.MustParseAddr(a.Address)] = true
			}
		}
	}
	names := definition.MachineNames()
	kept := map[string]string{}  // attachment → the address that it keeps
	for _, name := range names { // kept ones come before new ones
		for _, a := range old[name].Attachments {
			if !attached(definition.Machines[name], a.Network) {
				continue
			}
			if address, err := netip.ParseAddr(a.PublicAddress); err == nil {
				public[address] = true
			}
			address, err := netip.ParseAddr(a.Address)
			if err == nil && prefixOf(record, a.Network).Contains(address) && !taken[a.Network][address] {
				taken[a.Network][address] = true
				kept[name+"/"+a.Network] = a.Address
			}
		}
	}
	record.Machines = nil
	for _, name := range names {
		declared := definition.Machines[name]
		m, exists := old[name]
		if !exists {
			m = registry.Machine{MachineID: registry.NewID(registry.KindMachine), Name: name, State: registry.MachineDeclared}
		}
		m.OS, m.Arch, m.Image = declared.Target.OS, declared.Target.Arch, declared.Target.Image
		if m.Arch == "host" {
			m.Arch = config.CurrentHost().Arch
		}
		m.Profile, m.Isolation, m.Driver = declared.Profile, declared.Isolation, driver
		m.Requested = declared.Capabilities
		before := m.Attachments
		m.Attachments = nil
		for i, a := range declared.Networks {
			attachment := registry.Attachment{
				Network: a.Name, Address: cmp.Or(a.Address, kept[name+"/"+a.Name]), Interface: fmt.Sprintf("eth%d", i),
				MAC: mac(record.EnvironmentID, m.MachineID, a.Name),
			}
			if j := slices.IndexFunc(before, func(b registry.Attachment) bool { return b.Network == a.Name }); j >= 0 {
				attachment.PublicAddress = before[j].PublicAddress
			}
			if attachment.Address == "" {
				address, err := free(prefixOf(record, a.Name), taken[a.Name])
				if err != nil {
					return fmt.Errorf("network %s: %w", a.Name, err)
				}
				attachment.Address = address.String()
			}
			if definition.Networks[a.Name].Kind != config.NetworkSimulatedPublic {
				attachment.PublicAddress = ""
			} else if attachment.PublicAddress == "" {
				address, err := free(publicRange, public)
				if err != nil {
					return fmt.Errorf("public addresses of Machines: %w", err)
				}
				attachment.PublicAddress = address.String()
			}
			m.Attachments = append(m.Attachments, attachment)
		}
		record.Machines = append(record.Machines, m)
	}
	return nil
}

func attached(m config.Machine, network string) bool {
	return slices.ContainsFunc(m.Networks, func(a config.Attachment) bool { return a.Name == network })
}

func prefixOf(record *registry.Record, network string) netip.Prefix {
	for _, n := range record.Networks {
		if n.Name == network {
			return netip.MustParsePrefix(n.CIDR)
		}
	}
	return netip.Prefix{}
}

// free takes the lowest host address of prefix that is not taken: never the
// network's, the gateway's (.1) or the broadcast address.
func free(prefix netip.Prefix, taken map[netip.Addr]bool) (netip.Addr, error) {
	for address := prefix.Masked().Addr().Next(); prefix.Contains(address.Next()); address = address.Next() {
		if address != prefix.Masked().Addr().Next() && !taken[address] {
			taken[address] = true
			return address, nil
		}
	}
	return netip.Addr{}, fmt.Errorf("every address of %s is taken", prefix)
}

// mac is a locally administered unicast address (IEEE 802-2014, 8.4), the same
// for every boot of the attachment.
func mac(environment, machine, network string) string {
	sum := sha256.Sum256([]byte(environment + "/" + machine + "/" + network))
	return fmt.Sprintf("02:%02x:%02x:%02x:%02x:%02x", sum[0], sum[1], sum[2], sum[3], sum[4])
}

func allocateEndpoints(definition *config.Definition, record *registry.Record) error {
	taken := map[netip.Addr]bool{}
	old := map[string]registry.Endpoint{}
	for _, e := range record.Endpoints {
		if _, ok := definition.Endpoints[e.Name]; ok {
			old[e.Name] = e
			taken[netip.MustParseAddr(e.Address)] = true
		}
	}
	record.Endpoints = nil
	for _, name := range definition.EndpointNames() {
		declared := definition.Endpoints[name]
		e := old[name]
		e.Name, e.Host, e.Network, e.Kind = name, declared.Host, declared.Network, declared.Kind
		e.BackendMachine, e.BackendPort = declared.Backend.Machine, declared.Backend.Port
		e.URL = declared.Kind + "://" + declared.Host + "/"
		if e.Address == "" {
			address, err := free(endpointRange, taken)
			if err != nil {
				return fmt.Errorf("public addresses of endpoints: %w", err)
			}
			e.Address = address.String()
		}
		record.Endpoints = append(record.Endpoints, e)
	}
	return nil
}

func sorted[T any](m map[string]T) []string {
	return slices.Sorted(maps.Keys(m))
}

// A topology is what the rooms of the network are to do for one definition:
// pure values, derived from the definition and what was allocated for it.
type topology struct {
	domain    netstack.Spec
	views     map[string]*dns.View // Machine → the names it sees
	endpoints []ingress.Endpoint
	doors     []door
}

// A door is a public address and port where ingress answers.
type door struct {
	address netip.AddrPort
	tls     bool // else plain HTTP, be it to redirect
}

// plan derives the topology. definition is admitted and record allocated.
func plan(definition *config.Definition, record *registry.Record) (*topology, error) {
	t := &topology{views: map[string]*dns.View{}}
	t.domain.SearchDomains = []string{searchDomain}
	t.domain.HostAddress = hostAddress
	for _, n := range record.Networks {
		refuse, err := netstack.ParseRefuse(n.Refuse)
		if err != nil {
			return nil, err
		}
		t.domain.Networks = append(t.domain.Networks, netstack.Network{
			Name: n.Name, Kind: n.Kind, Prefix: netip.MustParsePrefix(n.CIDR),
			Gateway: netip.MustParseAddr(n.Gateway), MTU: n.MTU, Refuse: refuse,
		})
	}
	for _, m := range record.Machines {
		for _, a := range m.Attachments {
			hardware, err := net.ParseMAC(a.MAC)
			if err != nil {
				return nil, err
			}
			attachment := netstack.Attachment{Machine: m.Name, Network: a.Network, Address: netip.MustParseAddr(a.Address), MAC: packet.MAC(hardware)}
			if a.PublicAddress != "" {
				attachment.Public = netip.MustParseAddr(a.PublicAddress)
			}
			t.domain.Attachments = append(t.domain.Attachments, attachment)
		}
	}
	for _, e := range record.Endpoints {
		declared := definition.Endpoints[e.Name]
		for i, port := range declared.Ports() {
			address := netip.AddrPortFrom(netip.MustParseAddr(e.Address), port)
			t.doors = append(t.doors, door{address, i == 0 && e.Kind == "https"})
		}
		t.domain.Endpoints = append(t.domain.Endpoints, netstack.Endpoint{
			Name: e.Name, Network: e.Network, Address: netip.MustParseAddr(e.Address),
			Ports: declared.Ports(), Machine: e.BackendMachine, Port: uint16(e.BackendPort),
		})
		t.endpoints = append(t.endpoints, ingress.Endpoint{
			Name: e.Name, Host: e.Host, Kind: e.Kind, Machine: e.BackendMachine, Port: e.BackendPort,
			Protocol: declared.Backend.Protocol,
		})
	}
	t.domain.Paths = paths(definition)
	for _, m := range record.Machines {
		t.views[m.Name] = view(m.Name, record, t.domain.Paths)
	}
	return t, nil
}

// paths are the declared ones and those that the definition grants without
// saying so, so that faults and counters can name them.
func paths(definition *config.Definition) []netstack.Path {
	var all []netstack.Path
	for _, p := range definition.Paths {
		path := netstack.Path{Name: p.Name, Kind: netstack.PathDeclared, From: ends(definition, p.From),
			To: ends(definition, p.To), Network: p.Network, Protocol: p.Protocol}
		for _, port := range p.Ports {
			path.Ports = append(path.Ports, netstack.PortRange{First: port.First, Last: port.Last})
		}
		all = append(all, path)
	}
	for _, name := range definition.MachineNames() {
		all = append(all, netstack.Path{Name: "dns:" + name, Kind: netstack.PathDNS, From: []string{name}, To: []string{"gateway"}})
	}
	for _, name := range definition.EndpointNames() {
		e := definition.Endpoints[name]
		all = append(all,
			netstack.Path{Name: "backend:" + name, Kind: netstack.PathBackend, From: []string{"edge"}, To: []string{e.Backend.Machine},
				Network: e.Network, Protocol: "tcp", Ports: []netstack.PortRange{{First: uint16(e.Backend.Port), Last: uint16(e.Backend.Port)}}},
			netstack.Path{Name: "host:" + name, Kind: netstack.PathHost, From: []string{"host"}, To: []string{"endpoint:" + name},
				Network: e.Network, Protocol: "tcp"})
	}
	return all
}

// ends are what one end of a declared path stands for: Machines, or itself.
func ends(definition *config.Definition, ref string) []string {
	if members := definition.Members(ref); len(members) > 0 {
		return members
	}
	return []string{ref} // host, endpoint:NAME
}

// view is what one Machine's resolver knows: itself, what a path lets it
// reach, and, denied with the reason, what exists but no path reaches.
func view(machine string, record *registry.Record, paths []netstack.Path) *dns.View {
	reach := map[string]map[string]bool{} // Machine or endpoint:NAME → networks
	for _, p := range paths {
		if p.Kind != netstack.PathDeclared || !slices.Contains(p.From, machine) {
			continue
		}
		for _, to := range p.To {
			if reach[to] == nil {
				reach[to] = map[string]bool{}
			}
			reach[to][p.Network] = true
		}
	}
	v := &dns.View{Records: map[string]dns.Record{}}
	for _, m := range record.Machines {
		var all []netip.Addr
		for _, a := range m.Attachments {
			var r dns.Record
			if m.Name == machine || reach[m.Name][a.Network] {
				r.Addrs = []netip.Addr{netip.MustParseAddr(a.Address)}
				all = append(all, r.Addrs...)
			} else {
				r.Denied = fmt.Sprintf("no path lets %s reach %s on network %s", machine, m.Name, a.Network)
			}
			v.Records[m.Name+"."+a.Network] = r
			v.Records[m.Name+"."+a.Network+"."+searchDomain] = r
		}
		r := dns.Record{Addrs: all}
		if len(all) == 0 {
			r.Denied = fmt.Sprintf("no path lets %s reach %s", machine, m.Name)
		}
		v.Records[m.Name] = r
		v.Records[m.Name+"."+searchDomain] = r
	}
	for _, e := range record.Endpoints {
		r := dns.Record{Addrs: []netip.Addr{netip.MustParseAddr(e.Address)}}
		if !reach["endpoint:"+e.Name][e.Network] {
			r = dns.Record{Denied: fmt.Sprintf("no path lets %s reach endpoint:%s", machine, e.Name)}
		}
		v.Records[e.Host] = r
	}
	return v
}
