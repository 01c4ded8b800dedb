package config

import (
	"net/netip"
	"slices"
	"strings"
)

// MachineNames are sorted.
func (d *Definition) MachineNames() []string { return sortedKeys(d.Machines) }

// NetworkNames are sorted.
func (d *Definition) NetworkNames() []string { return sortedKeys(d.Networks) }

// EndpointNames are sorted.
func (d *Definition) EndpointNames() []string { return sortedKeys(d.Endpoints) }

// Members are the Machines that a path's end means: a Machine's name or
// group:NAME; sorted, each once. host and endpoint:NAME have none.
func (d *Definition) Members(ref string) []string {
	if group, ok := strings.CutPrefix(ref, "group:"); ok {
		members := slices.Clone(d.Groups[group])
		slices.Sort(members)
		return slices.Compact(members)
	}
	if _, ok := d.Machines[ref]; ok {
		return []string{ref}
	}
	return nil
}

// PathNames are the names of all paths: the declared ones in their order, then
// the implicit ones, sorted.
func (d *Definition) PathNames() []string {
	var declared, implicit []string
	for _, p := range d.Paths {
		declared = append(declared, p.Name)
	}
	for name, m := range d.Machines {
		if len(m.Networks) > 0 {
			implicit = append(implicit, "dns:"+name)
		}
		if m.Egress != nil && m.Egress.Mode != "offline" {
			implicit = append(implicit, "egress:"+name)
		}
		for _, imported := range m.HostImports {
			implicit = append(implicit, "import:"+name+"/"+imported.Name)
		}
		for _, exported := range m.HostExports {
			implicit = append(implicit, "export:"+name+"/"+exported.Name)
		}
	}
	for name := range d.Endpoints {
		implicit = append(implicit, "backend:"+name, "host:"+name)
	}
	slices.Sort(implicit)
	return append(declared, implicit...)
}

// Prefixes are the IPv4 ranges of all networks. An edge without a declared one
// takes a /24 of 100.64.0.0/10 (RFC 6598): the first that nothing declared
// overlaps, in the order of the names, so the same definition always has the
// same ranges.
func (d *Definition) Prefixes() map[string]netip.Prefix {
	all := map[string]netip.Prefix{}
	for name, network := range d.Networks {
		if prefix, err := netip.ParsePrefix(network.CIDR); err == nil {
			all[name] = prefix
		}
	}
	for _, name := range d.NetworkNames() {
		if _, declared := all[name]; declared {
			continue
		}
	search:
		for i := range 1 << 14 {
			candidate := netip.PrefixFrom(netip.AddrFrom4([4]byte{100, 64 + byte(i>>8), byte(i), 0}), 24)
			for _, other := range all {
				if other.Overlaps(candidate) {
					continue search
				}
			}
			all[name] = candidate
			break
		}
	}
	return all
}

// attached says whether the Machine is on a network.
func (m Machine) attached(network string) bool {
	return slices.ContainsFunc(m.Networks, func(a Attachment) bool { return a.Name == network })
}

// WantsDocker says whether the Machine asks for an engine, as a Linux developer
// Machine does unless it says "docker": false.
func (m Machine) WantsDocker() bool {
	if m.Docker != nil {
		return *m.Docker
	}
	return m.Profile == "developer" && m.Target.OS == "linux"
}

// Ports are the public ports that an endpoint answers on, the main one first:
// 443 for https and tls_passthrough, 80 for http, and 80 beside https for the
// redirect.
func (e Endpoint) Ports() []uint16 {
	main := uint16(e.Port)
	if main == 0 {
		switch e.Kind {
		case "https", "tls_passthrough":
			main = 443
		case "http":
			main = 80
		default:
			return nil
		}
	}
	if e.Redirects() && main != 80 {
		return []uint16{main, 80}
	}
	return []uint16{main}
}

// Redirects says whether port 80 answers with a redirect to https.
func (e Endpoint) Redirects() bool {
	return e.Kind == "https" && (e.RedirectHTTP == nil || *e.RedirectHTTP)
}

// Kind is the fault's one kind: latency, loss and so on; empty when there is
// none.
func (f Fault) Kind() string {
	for _, kind := range []struct {
		name string
		said bool
	}{
		{"latency", f.Latency != nil}, {"jitter", f.Jitter != nil}, {"loss", f.Loss != nil},
		{"duplication", f.Duplication != nil}, {"corruption", f.Corruption != nil},
		{"reordering", f.Reordering != nil}, {"bandwidth", f.Bandwidth != nil},
		{"reset", f.Reset != nil}, {"partition", f.Partition != nil}, {"path_mtu", f.PathMTU != nil},
		{"dns", f.DNS != nil}, {"tls", f.TLS != nil}, {"http", f.HTTP != nil}, {"preset", f.Preset != ""},
	} {
		if kind.said {
			return kind.name
		}
	}
	return ""
}
