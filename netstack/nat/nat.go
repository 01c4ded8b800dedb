// Package nat maps inside addresses and ports to public ones, as RFC 4787
// (UDP), RFC 5382 (TCP) and RFC 5508 (ICMP echo, by identifier) want it of a
// well-behaved home router: endpoint-independent mapping (REQ-1), address-
// dependent filtering (REQ-8), ports preserved where they are free, parity
// where they are not (REQ-4).
//
// A mapping lives as long as a flow holds it; timers are the flows'. It
// rewrites no packets and knows nothing of policy.
package nat

import (
	"errors"
	"net/netip"
	"sync"
)

// ErrFull says that the public address has no free port.
var ErrFull = errors.New("nat: no free public port")

// A Mapping is one inside address and port, and the public one that stands for
// it. It doesn't change.
type Mapping struct {
	Protocol       uint8          // IANA number
	Inside, Public netip.AddrPort // port: for ICMP the echo identifier

	// Under the Table's lock: the flows that hold it, by whom they speak to.
	peers []peer
}

type peer struct {
	addr  netip.Addr
	flows int
}

// A Table is safe for concurrent use; its lock is held for a few map accesses,
// and only when flows begin and end.
type Table struct {
	mu     sync.Mutex
	inside map[side]*Mapping // by public address too: an inside address may have several
	public map[side]*Mapping
}

type side struct {
	protocol uint8
	at       netip.AddrPort
	public   netip.Addr // in Table.inside only
}

// New returns an empty Table.
func New() *Table {
	return &Table{inside: make(map[side]*Mapping), public: make(map[side]*Mapping)}
}

// Acquire returns the mapping of inside on the address public, which it makes
// when there is none, for one flow that speaks to peer. The flow gives it back
// by Release. Errors: ErrFull.
func (t *Table) Acquire(protocol uint8, inside netip.AddrPort, public, peer netip.Addr) (*Mapping, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	key := side{protocol, inside, public}
	m := t.inside[key]
	if m == nil {
		port, ok := t.free(protocol, public, inside.Port())
		if !ok {
			return nil, ErrFull
		}
		m = &Mapping{Protocol: protocol, Inside: inside, Public: netip.AddrPortFrom(public, port)}
		t.inside[key] = m
		t.public[side{protocol: protocol, at: m.Public}] = m
	}
	m.hold(peer)
	return m, nil
}

// Enter returns the mapping that a packet from the public address peer, which
// belongs to no flow, may use to get inside, and holds it for the flow that
// will be. It is nil when there is none, or when nothing inside has spoken to
// that address through it.
func (t *Table) Enter(protocol uint8, public netip.AddrPort, peer netip.Addr) *Mapping {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.public[side{protocol: protocol, at: public}]
	if m == nil {
		return nil
	}
	for i := range m.peers {
		if m.peers[i].addr == peer {
			m.peers[i].flows++
			return m
		}
	}
	return nil
}

// Release undoes one Acquire or Enter with the same peer.
func (t *Table) Release(m *Mapping, peer netip.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range m.peers {
		p := &m.peers[i]
		if p.addr != peer {
			continue
		}
		if p.flows--; p.flows == 0 {
			m.peers[i] = m.peers[len(m.peers)-1]
			m.peers = m.peers[:len(m.peers)-1]
		}
		break
	}
	if len(m.peers) == 0 {
		delete(t.inside, side{m.Protocol, m.Inside, m.Public.Addr()})
		delete(t.public, side{protocol: m.Protocol, at: m.Public})
	}
}

// Len is how many mappings there are.
func (t *Table) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.inside)
}

func (m *Mapping) hold(addr netip.Addr) {
	for i := range m.peers {
		if m.peers[i].addr == addr {
			m.peers[i].flows++
			return
		}
	}
	m.peers = append(m.peers, peer{addr, 1})
}

// free finds a public port: the same, or the next free one of the same parity
// and of the same side of 1024 (RFC 4787, REQ-3 and REQ-4).
func (t *Table) free(protocol uint8, public netip.Addr, want uint16) (uint16, bool) {
	first, last := 1024, 65535
	if want < 1024 {
		first, last = 2, 1023 // port 0 is nobody's
	}
	port := int(want)
	for range (last - first + 1) / 2 {
		if t.public[side{protocol: protocol, at: netip.AddrPortFrom(public, uint16(port))}] == nil {
			return uint16(port), true
		}
		if port += 2; port > last {
			port = first + port&1
		}
	}
	return 0, false
}
