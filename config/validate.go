package config

import (
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
)

// reserved for the edge's public addresses: RFC 5737, RFC 3849.
var documentation = prefixes("198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32")

// unusable ranges mean something else to every IP stack.
var unusable = prefixes("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4",
	"::/128", "::1/128", "::ffff:0:0/96", "fe80::/10", "ff00::/8")

func prefixes(texts ...string) []netip.Prefix {
	var all []netip.Prefix
	for _, text := range texts {
		all = append(all, netip.MustParsePrefix(text))
	}
	return all
}

// Names that would mean something else than the Machine or network that took
// them: in paths, or beside the names that DNS already has.
var (
	reservedMachines = []string{"edge", "gateway", "host", "localhost"}
	reservedNetworks = []string{"internal", "local", "localhost", "test"}
)

// maxEdgeAttachments keeps each Machine's public address inside one of the two
// documentation ranges, with room for the edge's own.
const maxEdgeAttachments = 240

// validation is the part of validity that a schema can't say. A zero value is
// a field that is missing or that the schema refused; it was reported, so
// nothing is said about it here.
type validation struct {
	*problems
	def    *Definition
	broken map[string]bool // sections that nothing can be looked up in
}

func validate(p *problems, def *Definition, broken map[string]bool) {
	v := &validation{problems: p, def: def, broken: broken}
	v.top()
	v.networks()
	v.groups()
	machines := sortedKeys(def.Machines)
	for _, name := range machines {
		v.machine(name, def.Machines[name])
	}
	v.addresses()
	v.storage(machines)
	v.exports(machines)
	v.paths()
	v.endpoints()
	v.zones()
	v.volumes()
	v.faults()
}

// at makes the tokens of a place.
func at(tokens ...any) []string {
	all := make([]string, len(tokens))
	for i, token := range tokens {
		switch token := token.(type) {
		case string:
			all[i] = token
		case int:
			all[i] = strconv.Itoa(token)
		}
	}
	return all
}

func under(tokens []string, more ...any) []string {
	return append(slices.Clone(tokens), at(more...)...)
}

// refer looks name up in a section and says so when it isn't there.
func refer[V any](v *validation, place []string, what, section, name string, known map[string]V) bool {
	if name == "" || v.broken[section] {
		return false
	}
	if _, found := known[name]; found {
		return true
	}
	names := sortedKeys(known)
	want := what + "s are declared under /" + section
	if len(names) > 0 {
		want = list(names)
	}
	v.add(place, fmt.Sprintf("no %s %s is declared", what, quote(name)), want, nearest(name, names))
	return false
}

func (v *validation) top() {
	refer(v, at("default_machine"), "Machine", "machines", v.def.DefaultMachine, v.def.Machines)
}

func (v *validation) networks() {
	type taken struct {
		prefix netip.Prefix
		name   string
	}
	var all []taken
	for _, name := range sortedKeys(v.def.Networks) {
		network, place := v.def.Networks[name], at("networks", name)
		if slices.Contains(reservedNetworks, name) {
			v.addKey(place, quote(name)+" is a reserved name", "another name; "+strings.Join(reservedNetworks, ", ")+" are names of DNS already", "")
		}
		if network.Kind == NetworkPrivate {
			if _, said := v.doc.find(under(place, "cidr")); !said {
				v.add(place, `"cidr" is missing`, "a range such as 10.10.0.0/24; only an edge takes one by itself", "")
			}
			if network.NAT != nil {
				v.add(under(place, "nat"), "a private network has no NAT", "nat on simulated_public networks only", "")
			}
		}
		if network.IPv6 != nil && !*network.IPv6 && network.CIDR6 != "" {
			v.add(under(place, "cidr6"), "the network says \"ipv6\": false", "one of the two", "")
		}
		if network.IPv6 != nil && *network.IPv6 && network.MTU != 0 && network.MTU < 1280 {
			v.add(under(place, "mtu"), "IPv6 needs an MTU of 1280 (RFC 8200)", "at least 1280, or \"ipv6\": false", "")
		}
		for field, text := range map[string]string{"cidr": network.CIDR, "cidr6": network.CIDR6} {
			prefix, ok := v.cidr(under(place, field), text, field == "cidr6")
			if !ok {
				continue
			}
			for _, other := range all {
				if other.prefix.Overlaps(prefix) {
					v.add(under(place, field), fmt.Sprintf("%s overlaps %s of network %s", prefix, other.prefix, quote(other.name)),
						"ranges that don't overlap inside one definition", "")
				}
			}
			all = append(all, taken{prefix, name})
		}
	}
}

// cidr reads a network's range.
func (v *validation) cidr(place []string, text string, v6 bool) (netip.Prefix, bool) {
	if text == "" {
		return netip.Prefix{}, false
	}
	prefix, err := netip.ParsePrefix(text)
	if err != nil || prefix.Addr().Is6() != v6 {
		want := "an IPv4 range, such as 10.20.0.0/24"
		if v6 {
			want = "an IPv6 range, such as fd00:1::/64"
		}
		v.add(place, quote(text)+" is not a range", want, "")
		return netip.Prefix{}, false
	}
	if masked := prefix.Masked(); masked != prefix {
		v.add(place, quote(text)+" has bits beyond its length", "", masked.String())
		return netip.Prefix{}, false
	}
	least, most := 8, 30
	if v6 {
		least, most = 32, 126
	}
	if prefix.Bits() < least || prefix.Bits() > most {
		v.add(place, fmt.Sprintf("a length of %d is out of range", prefix.Bits()), fmt.Sprintf("/%d to /%d", least, most), "")
		return netip.Prefix{}, false
	}
	for _, reserved := range documentation {
		if reserved.Overlaps(prefix) {
			v.add(place, fmt.Sprintf("%s is reserved for the edges' public addresses (%s)", prefix, reserved), "another range, such as 10.20.0.0/24", "")
			return netip.Prefix{}, false
		}
	}
	for _, bad := range unusable {
		if bad.Overlaps(prefix) {
			v.add(place, fmt.Sprintf("%s lies in %s, which no network can have", prefix, bad), "a private range, such as 10.20.0.0/24", "")
			return netip.Prefix{}, false
		}
	}
	return prefix, true
}

func (v *validation) groups() {
	for _, name := range sortedKeys(v.def.Groups) {
		for i, member := range v.def.Groups[name] {
			refer(v, at("groups", name, i), "Machine", "machines", member, v.def.Machines)
		}
	}
}

func (v *validation) machine(name string, m Machine) {
	place := at("machines", name)
	if slices.Contains(reservedMachines, name) {
		v.addKey(place, quote(name)+" is a reserved name", "another name; "+strings.Join(reservedMachines, ", ")+" mean something else in paths and DNS", "")
	}
	v.target(place, m)

	hardened := m.Profile == "hardened"
	refused := func(field string, said bool) {
		if hardened && said {
			v.add(under(place, field), "a hardened Machine has no "+field, "it left out, or profile developer", "")
		}
	}
	refused("docker", m.Docker != nil && *m.Docker)
	refused("projections", len(m.Projections) > 0)
	refused("volumes", len(m.Volumes) > 0)

	attached := map[string]bool{}
	for i, attachment := range m.Networks {
		here := under(place, "networks", i)
		if attachment.Name != "" && attached[attachment.Name] {
			v.add(under(here, "name"), "attached to "+quote(attachment.Name)+" twice", "one attachment to a network", "")
		}
		attached[attachment.Name] = true
		refer(v, under(here, "name"), "network", "networks", attachment.Name, v.def.Networks)
	}

	v.mounts(place, m)
	for i, projection := range m.Projections {
		source := path.Clean(projection.SourcePath)
		if path.IsAbs(source) || source == ".." || strings.HasPrefix(source, "../") {
			v.add(under(place, "projections", i, "source_path"), quote(projection.SourcePath)+" leaves the worktree",
				"a path relative to the worktree's root and inside it", "")
		}
	}
	mounted := map[string]bool{}
	for i, mount := range m.Volumes {
		here := under(place, "volumes", i, "name")
		refer(v, here, "volume", "volumes", mount.Name, v.def.Volumes)
		if mount.Name != "" && mounted[mount.Name] {
			v.add(here, "volume "+quote(mount.Name)+" is mounted twice", "one mount in a Machine", "")
		}
		mounted[mount.Name] = true
	}
	variables := map[string]bool{}
	for i, secret := range m.Secrets {
		here := under(place, "secrets", i)
		refer(v, under(here, "name"), "secret", "secrets", secret.Name, v.def.Secrets)
		if secret.Env != "" && variables[secret.Env] {
			v.add(under(here, "env"), "variable "+secret.Env+" is given twice", "one secret for a variable", "")
		}
		variables[secret.Env] = true
	}

	if m.Egress != nil {
		v.egress(under(place, "egress"), m.Egress)
	}
	names := map[string]bool{}
	for i, imported := range m.HostImports {
		v.once(under(place, "host_imports", i, "name"), "import", imported.Name, names)
	}
	names = map[string]bool{}
	for i, exported := range m.HostExports {
		v.once(under(place, "host_exports", i, "name"), "export", exported.Name, names)
	}
}

// once says that a name is taken.
func (v *validation) once(place []string, what, name string, taken map[string]bool) {
	if name == "" {
		return
	}
	if taken[name] {
		v.add(place, fmt.Sprintf("another %s is called %s", what, quote(name)), "names that are unique", "")
	}
	taken[name] = true
}

// target checks what goes together in target, isolation and driver.
func (v *validation) target(place []string, m Machine) {
	image := under(place, "target", "image")
	channel := m.Target.Image == "clean" || m.Target.Image == "xcode"
	if m.Driver != "" && m.Target.Image != "" && (m.Target.Image == "external") != (m.Driver == "external") {
		v.add(image, fmt.Sprintf("image %s with driver %s", quote(m.Target.Image), quote(m.Driver)),
			"image external with driver external, and only there", "")
	} else if m.Driver == "" && m.Target.Image == "external" {
		v.add(image, "image external without its driver", `"driver": "external"`, "")
	}
	switch m.Target.OS {
	case "linux":
		if channel {
			v.add(image, quote(m.Target.Image)+" is a macOS template", "an image of Linux, such as host", "")
		}
	case "macos":
		if !channel && m.Target.Image != "" && m.Target.Image != "external" {
			v.add(image, quote(m.Target.Image)+" is no macOS template", "clean or xcode", "")
		}
		if m.Docker != nil && *m.Docker {
			v.add(under(place, "docker"), "a macOS Machine has no Docker", "it left out", "")
		}
		if m.Isolation == "namespace" {
			v.add(under(place, "isolation"), "namespaces are Linux's", "vm", "")
		}
	}
	if m.Driver != "" && m.Isolation != "" && (m.Driver == "namespace") != (m.Isolation == "namespace") {
		v.add(under(place, "driver"), fmt.Sprintf("driver %s with isolation %s", quote(m.Driver), quote(m.Isolation)),
			"driver namespace for isolation namespace, another for vm", "")
	}
}

// mounts checks the places inside a Machine that something is mounted on.
func (v *validation) mounts(place []string, m Machine) {
	type taken struct{ path, what string }
	var all []taken
	mount := func(here []string, text, what string) {
		if text == "" {
			return
		}
		clean := path.Clean(text)
		if clean != text {
			v.add(here, quote(text)+" is not in its shortest form", "", clean)
			return
		}
		for _, own := range []string{"/", "/proc", "/sys", "/dev", "/run"} {
			if clean == own || own != "/" && strings.HasPrefix(clean, own+"/") {
				v.add(here, quote(text)+" belongs to the Machine itself", "another place, such as /srv/data", "")
				return
			}
		}
		for _, other := range all {
			if other.path == clean || what == "secret" && inside(clean, other.path) && other.what == "secret" {
				v.add(here, fmt.Sprintf("%s is taken by a %s", quote(text), other.what), "a place of its own", "")
			}
		}
		all = append(all, taken{clean, what})
	}
	for i, projection := range m.Projections {
		mount(under(place, "projections", i, "mount_path"), projection.MountPath, "projection")
	}
	for i, volume := range m.Volumes {
		mount(under(place, "volumes", i, "mount_path"), volume.MountPath, "volume")
	}
	for i, secret := range m.Secrets {
		if strings.HasPrefix(secret.File, "/run/") && path.Clean(secret.File) == secret.File {
			continue // where secrets usually are
		}
		mount(under(place, "secrets", i, "file"), secret.File, "secret")
	}
}

// inside says whether the clean path a is b or below it.
func inside(a, b string) bool {
	return a == b || b == "." || strings.HasPrefix(a, strings.TrimSuffix(b, "/")+"/")
}

func (v *validation) egress(place []string, e *Egress) {
	if e.Mode == "offline" {
		if len(e.Allow) > 0 {
			v.add(under(place, "allow"), "offline allows nothing", "mode allowlist", "")
		}
		if e.HostProxy {
			v.add(under(place, "host_proxy"), "offline goes through no proxy", "mode allowed or allowlist", "")
		}
	}
	for i, rule := range e.Allow {
		here := under(place, "allow", i)
		if rule.CIDR != "" {
			if prefix, err := netip.ParsePrefix(rule.CIDR); err != nil {
				v.add(under(here, "cidr"), quote(rule.CIDR)+" is not a range", "such as 192.0.2.0/24", "")
			} else if masked := prefix.Masked(); masked != prefix {
				v.add(under(here, "cidr"), quote(rule.CIDR)+" has bits beyond its length", "", masked.String())
			}
		}
		protocol := rule.Protocol
		if protocol == "" {
			protocol = "tcp"
		}
		v.ports(here, protocol, rule.Ports, false)
	}
}

// ports checks the list of ports that stands at place.
func (v *validation) ports(place []string, protocol string, ports []Port, needed bool) {
	carries := protocol == "tcp" || protocol == "udp"
	_, said := v.doc.find(under(place, "ports"))
	switch {
	case said && (protocol == "icmp" || protocol == "any"):
		v.add(under(place, "ports"), "protocol "+protocol+" has no ports here", "ports with tcp or udp only", "")
	case !said && needed && carries:
		v.add(place, `"ports" is missing`, `a list of ports; [ "1-65535" ] for every one`, "")
	}
	for i, port := range ports {
		if port.First == 0 {
			continue
		}
		if port.First > port.Last {
			v.add(under(place, "ports", i), quote(port.String())+" runs backwards", "", Port{port.Last, port.First}.String())
			continue
		}
		for j, other := range ports[:i] {
			if port.First <= other.Last && other.First <= port.Last {
				v.add(under(place, "ports", i), fmt.Sprintf("%s is in entry %d already", port, j), "each port once", "")
				break
			}
		}
	}
}

// addresses checks what the attachments ask for, network by network.
func (v *validation) addresses() {
	owners := map[string]map[netip.Addr]string{}
	count := map[string]int{}
	edges := 0
	for _, machine := range sortedKeys(v.def.Machines) {
		for i, attachment := range v.def.Machines[machine].Networks {
			network, known := v.def.Networks[attachment.Name]
			if !known {
				continue
			}
			here := at("machines", machine, "networks", i)
			count[attachment.Name]++
			if network.Kind == NetworkSimulatedPublic {
				if edges++; edges == maxEdgeAttachments+1 {
					v.add(here, fmt.Sprintf("more than %d attachments to simulated_public networks", maxEdgeAttachments),
						"fewer; each takes a public address", "")
				}
			}
			for _, asked := range []struct{ field, address, cidr string }{
				{"address", attachment.Address, network.CIDR}, {"address6", attachment.Address6, network.CIDR6},
			} {
				place := under(here, asked.field)
				address, ok := v.address(place, asked.address, asked.cidr, attachment.Name)
				if !ok {
					continue
				}
				if owners[attachment.Name] == nil {
					owners[attachment.Name] = map[netip.Addr]string{}
				}
				if owner, taken := owners[attachment.Name][address]; taken {
					v.add(place, fmt.Sprintf("%s is Machine %s's address", address, quote(owner)), "an address of its own", "")
					continue
				}
				owners[attachment.Name][address] = machine
			}
		}
	}
	for _, name := range sortedKeys(count) {
		prefix, err := netip.ParsePrefix(v.def.Networks[name].CIDR)
		if err != nil || !prefix.Addr().Is4() {
			continue
		}
		// Network, gateway and broadcast are not to be had.
		if room := 1<<(32-prefix.Bits()) - 3; room > 0 && count[name] > room {
			v.add(at("networks", name, "cidr"), fmt.Sprintf("%s has room for %d and %d Machines are attached", prefix, room, count[name]), "a larger range", "")
		}
	}
}

func (v *validation) address(place []string, text, cidr, network string) (netip.Addr, bool) {
	if text == "" {
		return netip.Addr{}, false
	}
	address, err := netip.ParseAddr(text)
	if err != nil || address.Is4() != (place[len(place)-1] == "address") {
		v.add(place, quote(text)+" is not an address", "", "")
		return netip.Addr{}, false
	}
	if cidr == "" {
		v.add(place, "network "+quote(network)+" declares no range to take it from", "a range on the network, or no address here", "")
		return netip.Addr{}, false
	}
	prefix, err := netip.ParsePrefix(cidr)
	if err != nil || prefix != prefix.Masked() {
		return netip.Addr{}, false // reported at the network
	}
	what := ""
	switch {
	case !prefix.Contains(address):
		v.add(place, fmt.Sprintf("%s is not in %s, the range of network %s", address, prefix, quote(network)), "an address in it", "")
		return netip.Addr{}, false
	case address == prefix.Addr():
		what = "network's own address"
	case address == prefix.Addr().Next():
		what = "gateway's address"
	case address.Is4() && !prefix.Contains(address.Next()):
		what = "broadcast address"
	}
	if what != "" {
		v.add(place, fmt.Sprintf("%s is the %s of %s", address, what, prefix), "another address in it", "")
		return netip.Addr{}, false
	}
	return address, true
}

// storage checks projections and volumes across Machines.
func (v *validation) storage(machines []string) {
	type use struct {
		machine, source string
		place           []string
		writable        bool
	}
	var projections []use
	volumes := map[string][]use{}
	for _, name := range machines {
		for i, p := range v.def.Machines[name].Projections {
			if p.SourcePath != "" {
				projections = append(projections, use{name, path.Clean(p.SourcePath),
					at("machines", name, "projections", i, "source_path"), p.Mode == "read_write"})
			}
		}
		for i, m := range v.def.Machines[name].Volumes {
			volumes[m.Name] = append(volumes[m.Name], use{name, m.Name, at("machines", name, "volumes", i, "name"), !m.ReadOnly})
		}
	}
	for i, one := range projections {
		for _, other := range projections[:i] {
			if one.machine == other.machine || !one.writable && !other.writable ||
				!inside(one.source, other.source) && !inside(other.source, one.source) {
				continue
			}
			writer := one
			if other.writable {
				writer = other
			}
			v.add(one.place, fmt.Sprintf("Machines %s and %s share it, and %s may write", quote(other.machine), quote(one.machine), quote(writer.machine)),
				"a source that is projected writable in no other Machine", "")
			break
		}
	}
	for _, name := range sortedKeys(volumes) {
		if v.def.Volumes[name].Kind != "block" {
			continue
		}
		// Two kernels on one ext4 file system, one of them writing, corrupt it.
		for i, one := range volumes[name] {
			for _, other := range volumes[name][:i] {
				if one.machine != other.machine && (one.writable || other.writable) {
					v.add(one.place, fmt.Sprintf("block volume %s is mounted in Machine %s as well, and not read-only in both", quote(name), quote(other.machine)),
						"one Machine that may write, or \"read_only\": true in all, or a shared_cache", "")
					break
				}
			}
		}
	}
}

// exports checks the fixed ports of the host.
func (v *validation) exports(machines []string) {
	type key struct {
		protocol string
		port     int
	}
	taken := map[key]string{}
	for _, name := range machines {
		for i, exported := range v.def.Machines[name].HostExports {
			if exported.HostPort == 0 {
				continue
			}
			k := key{exported.Protocol, exported.HostPort}
			if owner, twice := taken[k]; twice {
				v.add(at("machines", name, "host_exports", i, "host_port"), fmt.Sprintf("%s port %d of the host is Machine %s's already", k.protocol, k.port, quote(owner)),
					"another port, or 0 for any", "")
				continue
			}
			taken[k] = name
		}
	}
}

func (v *validation) paths() {
	names := map[string]bool{}
	for i, p := range v.def.Paths {
		place := at("paths", i)
		v.once(under(place, "name"), "path", p.Name, names)
		v.ports(place, p.Protocol, p.Ports, true)
		known := refer(v, under(place, "network"), "network", "networks", p.Network, v.def.Networks)
		v.end(under(place, "from"), p.From, p.Network, known)
		endpoint, toEndpoint := strings.CutPrefix(p.To, "endpoint:")
		if !toEndpoint {
			v.end(under(place, "to"), p.To, p.Network, known)
			if p.From == p.To && p.From != "" && !strings.HasPrefix(p.From, "group:") {
				v.add(under(place, "to"), "the path leads from "+quote(p.From)+" to itself", "another Machine", "")
			}
			if p.From == "host" && v.def.Networks[p.Network].Kind == NetworkPrivate {
				v.add(under(place, "from"), "the host is on no private network", "a path to an endpoint on a simulated_public network", "")
			}
			continue
		}
		if !refer(v, under(place, "to"), "endpoint", "endpoints", endpoint, v.def.Endpoints) {
			continue
		}
		e := v.def.Endpoints[endpoint]
		if known && e.Network != "" && e.Network != p.Network {
			v.add(under(place, "network"), fmt.Sprintf("endpoint %s is on network %s", quote(endpoint), quote(e.Network)), "", e.Network)
		}
		v.listens(place, p, endpoint, e)
	}
}

// end checks one end of a path that is a Machine, a group or the host.
func (v *validation) end(place []string, ref, network string, known bool) {
	if ref == "" || ref == "host" {
		return
	}
	members := []string{ref}
	if group, ok := strings.CutPrefix(ref, "group:"); ok {
		if !refer(v, place, "group", "groups", group, v.def.Groups) {
			return
		}
		members = v.def.Groups[group]
	} else if !refer(v, place, "Machine", "machines", ref, v.def.Machines) {
		return
	}
	for _, member := range members {
		m, declared := v.def.Machines[member]
		if known && declared && !m.attached(network) {
			v.add(place, fmt.Sprintf("Machine %s is not attached to network %s", quote(member), quote(network)),
				fmt.Sprintf("an attachment in /machines/%s/networks", member), "")
		}
	}
}

// listens says when a path leads to ports of an endpoint that nothing answers.
func (v *validation) listens(place []string, p Path, name string, e Endpoint) {
	transport := "tcp"
	if e.Kind == "udp" {
		transport = "udp"
	}
	if p.Protocol == "udp" && e.HTTP3 {
		transport = "udp"
	}
	if p.Protocol != "tcp" && p.Protocol != "udp" || e.Kind == "" {
		return
	}
	if p.Protocol != transport {
		v.add(under(place, "protocol"), fmt.Sprintf("endpoint %s (%s) answers %s", quote(name), e.Kind, transport), "", transport)
		return
	}
	listening := e.Ports()
	for _, port := range listening {
		for _, allowed := range p.Ports {
			if allowed.Contains(port) {
				return
			}
		}
	}
	if len(listening) > 0 && len(p.Ports) > 0 {
		var words []string
		for _, port := range listening {
			words = append(words, strconv.Itoa(int(port)))
		}
		v.add(under(place, "ports"), fmt.Sprintf("endpoint %s answers on none of these ports", quote(name)), list(words), "")
	}
}

func (v *validation) endpoints() {
	type key struct {
		host string
		udp  bool
		port uint16
	}
	taken := map[key]string{}
	for _, name := range sortedKeys(v.def.Endpoints) {
		e, place := v.def.Endpoints[name], at("endpoints", name)
		if refer(v, under(place, "network"), "network", "networks", e.Network, v.def.Networks) &&
			v.def.Networks[e.Network].Kind == NetworkPrivate {
			v.add(under(place, "network"), "network "+quote(e.Network)+" is private", "a simulated_public network", "")
		}
		web := e.Kind == "https" || e.Kind == "http"
		if (e.Kind == "tcp" || e.Kind == "udp") && e.Port == 0 {
			v.add(place, `"port" is missing`, "a port; only https, http and tls_passthrough have one of their own", "")
		}
		if e.RedirectHTTP != nil && e.Kind != "https" {
			v.add(under(place, "redirect_http"), "kind "+e.Kind+" redirects nothing", "it with https only", "")
		}
		if e.HTTP3 && e.Kind != "https" {
			v.add(under(place, "http3"), "kind "+e.Kind+" has no HTTP/3", "it with https only", "")
		}
		if len(e.Routes) > 0 && !web {
			v.add(under(place, "routes"), "kind "+e.Kind+" has no routes", "them with https and http only", "")
		}
		if e.Host != "" {
			for _, port := range e.Ports() {
				k := key{e.Host, e.Kind == "udp", port}
				if owner, twice := taken[k]; twice {
					v.add(under(place, "host"), fmt.Sprintf("endpoint %s answers %s port %d already", quote(owner), e.Host, port), "another host or port", "")
					break
				}
				taken[k] = name
			}
		}
		v.backend(under(place, "backend"), e, e.Backend)
		prefixes := map[string]bool{}
		for i, route := range e.Routes {
			v.once(under(place, "routes", i, "path_prefix"), "route", route.PathPrefix, prefixes)
			for j, backend := range route.Backends {
				v.backend(under(place, "routes", i, "backends", j), e, backend.Backend)
			}
		}
	}
}

func (v *validation) backend(place []string, e Endpoint, b Backend) {
	if refer(v, under(place, "machine"), "Machine", "machines", b.Machine, v.def.Machines) {
		if _, known := v.def.Networks[e.Network]; known && !v.def.Machines[b.Machine].attached(e.Network) {
			v.add(under(place, "machine"), fmt.Sprintf("Machine %s is not attached to the endpoint's network %s", quote(b.Machine), quote(e.Network)),
				fmt.Sprintf("an attachment in /machines/%s/networks", b.Machine), "")
		}
	}
	if b.Protocol != "" && e.Kind != "" && e.Kind != "https" && e.Kind != "http" {
		v.add(under(place, "protocol"), "kind "+e.Kind+" forwards bytes as they are", "it left out", "")
	}
	if b.TLS != nil && b.Protocol != "https" {
		v.add(under(place, "tls"), "the backend speaks no TLS", `"protocol": "https"`, "")
	}
	if b.TLS != nil {
		if file := path.Clean(b.TLS.CAFile); path.IsAbs(file) || file == ".." || strings.HasPrefix(file, "../") {
			v.add(under(place, "tls", "ca_file"), quote(b.TLS.CAFile)+" leaves the worktree", "a path inside it", "")
		}
	}
}

func (v *validation) zones() {
	hosts := map[string]string{}
	for name, e := range v.def.Endpoints {
		hosts[e.Host] = name
	}
	for _, name := range sortedKeys(v.def.Zones) {
		type key struct{ name, kind string }
		taken := map[key]bool{}
		if name == "vz.internal" || strings.HasSuffix(name, ".vz.internal") || name == "docker.internal" {
			v.addKey(at("zones", name), quote(name)+" is vz's own zone", "another name", "")
		}
		for i, record := range v.def.Zones[name].Records {
			here := at("zones", name, "records", i)
			k := key{record.Name, record.Type}
			switch {
			case record.Name == "" || record.Type == "":
			case taken[k]:
				v.add(here, fmt.Sprintf("%s has its %s record already", record.Name, record.Type), "one with all values", "")
			case record.Type == "CNAME" && record.Name == "@":
				v.add(under(here, "type"), "a zone itself can't be a CNAME", "A or AAAA", "")
			}
			taken[k] = true
			full := strings.TrimPrefix(record.Name+"."+name, "@.")
			if endpoint, twice := hosts[full]; twice {
				v.add(under(here, "name"), fmt.Sprintf("%s is the host of endpoint %s", full, quote(endpoint)), "another name", "")
			}
			for _, kind := range []string{"A", "AAAA", "TXT", "SRV"} {
				if record.Type == "CNAME" && taken[key{record.Name, kind}] || record.Type == kind && taken[key{record.Name, "CNAME"}] {
					v.add(here, quote(record.Name)+" is a CNAME and something else", "a CNAME alone (RFC 1034)", "")
					break
				}
			}
			if record.Type == "CNAME" && len(record.Values) > 1 {
				v.add(under(here, "values"), "a CNAME has one value", "one", "")
			}
			for j, value := range record.Values {
				if want := recordValue(record.Type, value); value != "" && want != "" {
					v.add(under(here, "values", j), quote(value)+" is no "+record.Type, want, "")
				}
			}
		}
	}
}

// recordValue says what would be right, or nothing.
func recordValue(kind, value string) string {
	switch kind {
	case "A", "AAAA":
		address, err := netip.ParseAddr(value)
		if err != nil || address.Zone() != "" || address.Is4() != (kind == "A") || address.Is4In6() {
			return map[string]string{"A": "an IPv4 address", "AAAA": "an IPv6 address"}[kind]
		}
	case "CNAME":
		if !isDNSName(value) {
			return "a lower-case DNS name without a final dot"
		}
	case "SRV":
		fields := strings.Fields(value)
		ok := len(fields) == 4 && isDNSName(fields[3])
		for i := 0; ok && i < 3; i++ {
			_, err := strconv.ParseUint(fields[i], 10, 16)
			ok = err == nil
		}
		if !ok {
			return "PRIORITY WEIGHT PORT TARGET"
		}
	}
	return ""
}

func isDNSName(name string) bool {
	part := compiled().root.Properties["zones"].PropertyNames
	return part.Validate(name) == nil
}

func (v *validation) volumes() {
	for _, name := range sortedKeys(v.def.Volumes) {
		volume, place := v.def.Volumes[name], at("volumes", name)
		_, sized := v.doc.find(under(place, "size_bytes"))
		_, consistent := v.doc.find(under(place, "consistency"))
		switch volume.Kind {
		case "block":
			if !sized {
				v.add(place, `"size_bytes" is missing`, "a block volume's size", "")
			}
			if consistent {
				v.add(under(place, "consistency"), "a block volume is on one Machine and always consistent", "it with shared_cache only", "")
			}
		case "shared_cache":
			if !consistent {
				v.add(place, `"consistency" is missing`, `{ "model": "bounded_staleness", "staleness_bound_millis": … }`, "")
			}
			if sized {
				v.add(under(place, "size_bytes"), "a shared_cache has no size", "it with block only", "")
			}
		}
	}
}

func (v *validation) faults() {
	unnamed := func(path string) bool { return path == "" } // reported already
	paths, names := slices.DeleteFunc(v.def.PathNames(), unnamed), map[string]bool{}
	lookup := v.broken["paths"] || v.broken["machines"] || v.broken["endpoints"]
	for i, fault := range v.def.Faults {
		place := at("faults", i)
		v.once(under(place, "name"), "fault", fault.Name, names)
		if fault.Path != "" && !lookup && !slices.Contains(paths, fault.Path) {
			v.add(under(place, "path"), "no path "+quote(fault.Path)+" is declared or implied", list(paths), nearest(fault.Path, paths))
		}
		v.fault(place, fault)
	}
}

func (v *validation) fault(place []string, f Fault) {
	if f.Repeat != nil && f.Repeat.EveryMillis > 0 && f.Repeat.EveryMillis < f.TTLMillis {
		v.add(under(place, "repeat", "every_millis"), "it begins again before it ends", fmt.Sprintf("at least ttl_millis, %d", f.TTLMillis), "")
	}
	if f.Ramp != nil && f.TTLMillis > 0 && f.Ramp.UpMillis+f.Ramp.DownMillis > f.TTLMillis {
		v.add(under(place, "ramp"), "the ramps are longer than the fault", fmt.Sprintf("at most ttl_millis, %d", f.TTLMillis), "")
	}
	if f.Match != nil {
		v.ports(under(place, "match"), "tcp", f.Match.Ports, false)
	}
	if j := f.Jitter; j != nil {
		switch {
		case j.Distribution == "table" && len(j.TableMillis) == 0:
			v.add(under(place, "jitter"), `"table_millis" is missing`, "the delays to draw from", "")
		case j.Distribution != "table" && j.Distribution != "" && j.SpreadMillis == 0:
			v.add(under(place, "jitter"), `"spread_millis" is missing`, "the width of the distribution", "")
		case j.Distribution == "uniform" && j.SpreadMillis > j.MeanMillis:
			v.add(under(place, "jitter", "spread_millis"), "some delays would be negative", fmt.Sprintf("at most mean_millis, %d", j.MeanMillis), "")
		}
	}
	if b := f.Bandwidth; b != nil && b.QueueBytes > 0 && b.QueueMillis > 0 {
		v.add(under(place, "bandwidth"), "the queue is bounded twice", "queue_bytes or queue_millis", "")
	}
	if p := f.Partition; p != nil {
		here := under(place, "partition")
		refer(v, under(here, "group"), "group", "groups", p.Group, v.def.Groups)
		refer(v, under(here, "machine"), "Machine", "machines", p.Machine, v.def.Machines)
		if p.Shape != "" && p.Shape != "all" && p.Group == "" {
			v.add(here, `"group" is missing`, "the group that "+p.Shape+" divides", "")
		}
		if (p.Shape == "isolate_one" || p.Shape == "bridge") && p.Machine == "" {
			v.add(here, `"machine" is missing`, "the Machine that "+p.Shape+" means", "")
		}
	}
	if d := f.DNS; d != nil {
		if d.Failure == "delay" && d.DelayMillis == 0 {
			v.add(under(place, "dns"), `"delay_millis" is missing`, "how long answers are held back", "")
		}
		if _, err := netip.ParseAddr(d.Address); d.Address != "" && err != nil {
			v.add(under(place, "dns", "address"), quote(d.Address)+" is not an address", "", "")
		} else if d.Failure == "wrong_address" && d.Address == "" {
			v.add(under(place, "dns"), `"address" is missing`, "the address to answer with", "")
		}
	}
	if h := f.HTTP; h != nil && h.DelayMillis == 0 && h.Status == 0 && h.Abort == "" {
		v.add(under(place, "http"), "nothing is to happen", "delay_millis, status or abort", "")
	}
}
