// Package policy compiles declared paths into a table and asks it whether a
// flow may begin: Evaluate is a pure function of its key, and costs the same
// for two paths and for a thousand.
//
// It knows names, not addresses. It keeps no flows (an answer needs no rule,
// since it belongs to a flow), counts nothing and answers nobody.
package policy

import (
	"cmp"
	"fmt"
	"slices"
)

// Protocol numbers (IANA) that rules distinguish. Any is every protocol.
const (
	Any  = 0
	ICMP = 1
	TCP  = 6
	UDP  = 17
)

// A Range is an inclusive range of ports.
type Range struct {
	First, Last uint16
}

// A Rule lets From open flows to To.
type Rule struct {
	Path     string
	From, To string  // names as in Key
	Network  string  // empty: any
	Protocol uint8   // Any, or an IANA number
	Ports    []Range // of To; none: all. Without effect on protocols without ports
}

// A Key is what decides about a flow.
type Key struct {
	From     string // a Machine's name, or "host"
	To       string // a Machine's name, "gateway" or "endpoint:NAME"
	Network  string
	Protocol uint8
	Port     uint16 // destination's; 0 where the protocol has none
}

// A Table is immutable, and safe for concurrent use.
type Table struct {
	rules map[pair]*ports
	known map[pair]bool // without network: some rule joins the two
}

type pair struct{ from, to, network string }

// ports is what one pair may use. Spans are sorted and don't overlap.
type ports struct {
	tcp, udp []span
	icmp     string // path, or empty
	other    string
}

type span struct {
	first, last uint16
	path        string
}

// Compile makes a Table. Where rules overlap, the earlier one has the flow.
func Compile(rules []Rule) (*Table, error) {
	t := &Table{rules: map[pair]*ports{}, known: map[pair]bool{}}
	for _, r := range rules {
		if r.Path == "" || r.From == "" || r.To == "" {
			return nil, fmt.Errorf("policy: rule of path %q from %q to %q: a name is missing", r.Path, r.From, r.To)
		}
		key := pair{r.From, r.To, r.Network}
		t.known[pair{from: r.From, to: r.To}] = true
		p := t.rules[key]
		if p == nil {
			p = &ports{}
			t.rules[key] = p
		}
		ranges := r.Ports
		if len(ranges) == 0 {
			ranges = []Range{{0, 65535}}
		}
		for _, g := range ranges {
			if g.First > g.Last {
				return nil, fmt.Errorf("policy: path %s: ports %d-%d are the wrong way round", r.Path, g.First, g.Last)
			}
			if r.Protocol == TCP || r.Protocol == Any {
				p.tcp = add(p.tcp, span{g.First, g.Last, r.Path})
			}
			if r.Protocol == UDP || r.Protocol == Any {
				p.udp = add(p.udp, span{g.First, g.Last, r.Path})
			}
		}
		if r.Protocol == ICMP || r.Protocol == Any {
			p.icmp = cmp.Or(p.icmp, r.Path)
		}
		if r.Protocol == Any {
			p.other = cmp.Or(p.other, r.Path)
		}
	}
	for _, p := range t.rules {
		p.tcp, p.udp = sorted(p.tcp), sorted(p.udp)
	}
	return t, nil
}

// add appends what of s no span has yet.
func add(spans []span, s span) []span {
	first, last := int(s.first), int(s.last)
	slices.SortFunc(spans, func(a, b span) int { return cmp.Compare(a.first, b.first) })
	have := len(spans)
	for i := 0; i < have && first <= last; i++ {
		o := spans[i]
		if int(o.last) < first {
			continue
		}
		if int(o.first) > last {
			break
		}
		if int(o.first) > first {
			spans = append(spans, span{uint16(first), o.first - 1, s.path})
		}
		first = int(o.last) + 1
	}
	if first <= last {
		spans = append(spans, span{uint16(first), uint16(last), s.path})
	}
	return spans
}

func sorted(spans []span) []span {
	slices.SortFunc(spans, func(a, b span) int { return cmp.Compare(a.first, b.first) })
	return slices.Clip(spans)
}

// Evaluate returns the path that a flow belongs to, or why there is none. It
// does not allocate.
func (t *Table) Evaluate(k Key) (path string, why Reason) {
	on := t.rules[pair{k.From, k.To, k.Network}]
	anywhere := t.rules[pair{k.From, k.To, ""}]
	if path, why = on.find(k); why == Allowed {
		return path, why
	}
	path, other := anywhere.find(k)
	if other == Allowed {
		return path, other
	}
	if why = max(why, other); why == NoPath && t.known[pair{from: k.From, to: k.To}] {
		why = OtherNetwork
	}
	return "", why
}

// find looks among one pair's ports; p may be nil. Of two reasons the greater
// one says more.
func (p *ports) find(k Key) (string, Reason) {
	if p == nil {
		return "", NoPath
	}
	var spans []span
	switch k.Protocol {
	case TCP:
		spans = p.tcp
	case UDP:
		spans = p.udp
	default:
		path := p.other
		if k.Protocol == ICMP {
			path = p.icmp
		}
		if path == "" {
			return "", ProtocolNotDeclared
		}
		return path, Allowed
	}
	if len(spans) == 0 {
		return "", ProtocolNotDeclared
	}
	i, found := slices.BinarySearchFunc(spans, k.Port, func(s span, port uint16) int {
		switch {
		case s.last < port:
			return -1
		case s.first > port:
			return 1
		}
		return 0
	})
	if !found {
		return "", PortNotDeclared
	}
	return spans[i].path, Allowed
}
