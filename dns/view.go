package dns

import (
	"net/netip"
	"strings"
	"sync"

	wire "github.com/miekg/dns"
)

// A View is what one Machine may know of names. Immutable once a Server has
// seen it: whoever owns it makes another one and swaps.
type View struct {
	// Records by name: lower case, fully qualified, without the final dot
	// ("db", "db.back.vz.internal", "shop.test").
	Records map[string]Record

	once  sync.Once
	names map[string]name
}

// A Record is what a name says. One with neither Addrs nor Denied exists and
// has no data.
type Record struct {
	Addrs  []netip.Addr
	Denied string // not empty: the name is denied, for this reason, in words for people
}

// name is a Record as it is looked up. PTR is of reverse names only.
type name struct {
	addrs  []netip.Addr
	ptr    string
	denied string
}

// lookup finds a folded name; false says that it does not exist.
func (v *View) lookup(folded string) (name, bool) {
	v.once.Do(v.index)
	n, ok := v.names[folded]
	return n, ok
}

// index adds to the records what follows from them: the reverse name of each
// address, which points to the most specific name that has it, and the names
// above, which exist without data (RFC 8020). Nothing follows from a denied
// name; a Machine must not learn of it by what lies around it.
func (v *View) index() {
	v.names = make(map[string]name, 2*len(v.Records))
	reverse := map[string]string{}
	for key, r := range v.Records {
		key = fold(key)
		if r.Denied != "" {
			v.names[key] = name{denied: r.Denied}
			continue
		}
		v.names[key] = name{addrs: r.Addrs}
		for _, a := range r.Addrs {
			arpa, err := wire.ReverseAddr(a.String())
			if err != nil {
				continue
			}
			arpa = fold(arpa)
			if old, ok := reverse[arpa]; !ok || moreSpecific(key, old) {
				reverse[arpa] = key
			}
		}
	}
	for arpa, target := range reverse {
		v.names[arpa] = name{ptr: target}
	}
	var above []string
	for key, n := range v.names {
		if n.denied == "" {
			above = append(above, key)
		}
	}
	for _, key := range above {
		for _, parent, more := strings.Cut(key, "."); more; _, parent, more = strings.Cut(parent, ".") {
			if _, ok := v.names[parent]; ok {
				continue
			}
			v.names[parent] = name{}
		}
	}
	v.names[""] = name{} // the root
}

// moreSpecific orders names by labels, then by the alphabet, so that every
// answer for an address is the same.
func moreSpecific(a, b string) bool {
	if x, y := strings.Count(a, "."), strings.Count(b, "."); x != y {
		return x > y
	}
	return a < b
}

// fold makes the key of a name: ASCII lower case (RFC 4343), no final dot.
func fold(name string) string {
	return strings.TrimSuffix(wire.CanonicalName(name), ".")
}
