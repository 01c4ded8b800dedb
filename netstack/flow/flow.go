// Package flow keeps the one table of flows that policy, NAT, faults and
// accounting share: each direction's 5-tuple leads to the same Flow, with
// whatever its owner decided about it.
//
// Use: Lookup for each packet (no allocation, a read lock on one of 64
// shards); on a miss decide, then Insert; call Expire now and then. Flows end
// by Expire or Remove, and each is handed to the table's ended function once.
//
// It decides nothing and has no clock: times are durations since an epoch of
// the caller's choice.
package flow

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"vz.test/vz/netstack/packet"
)

// Idle times after which flows end.
const (
	// RFC 5382, REQ-5: not less than 2 h 4 min, and 4 min while a connection
	// opens or closes.
	tcpEstablished = 2*time.Hour + 4*time.Minute
	tcpTransitory  = 4 * time.Minute
	// A closed connection only waits for copies of its last segments: as long
	// as an RTO of 200 ms takes to double six times.
	tcpClosed = 20 * time.Second
	// RFC 4787, REQ-5: not less than 2 min, 5 min recommended, and less for
	// well-known ports that need less.
	udp   = 5 * time.Minute
	dns   = 20 * time.Second
	other = 5 * time.Minute
	icmp  = time.Minute // RFC 5508, REQ-1
)

const (
	shardBits = 6
	shards    = 1 << shardBits
)

var (
	// ErrFull says that the table, or its owner's part of it, is full.
	ErrFull = errors.New("flow: table full")
	// ErrTaken says that another flow's packets have one of the keys.
	ErrTaken = errors.New("flow: key taken")
)

// A Flow is one conversation. Its keys and Value are set before Insert; what
// in Value changes later is for its owner to guard.
type Flow[T any] struct {
	Serial uint64 // unique in its table, from 1; set by Insert
	Ways   [2]Way[T]
	Value  T

	owner *Owner
	last  atomic.Int64 // when its last packet came
	tcp   tracker
	gone  bool // under its Request way's shard
}

// A Way is one direction of a Flow. Packets and bytes count the IP packets
// that came along; a super-frame is one.
type Way[T any] struct {
	Key            Key
	flow           *Flow[T]
	packets, bytes atomic.Uint64
}

// Flow is the flow that w is one direction of.
func (w *Way[T]) Flow() *Flow[T] { return w.flow }

// Direction is w's own.
func (w *Way[T]) Direction() packet.Direction {
	if w == &w.flow.Ways[packet.Request] {
		return packet.Request
	}
	return packet.Response
}

// Count is what came along.
func (w *Way[T]) Count() (packets, bytes uint64) { return w.packets.Load(), w.bytes.Load() }

// Add counts one packet that came along w without being one of the
// conversation's own: an ICMP error about it, which must not keep it alive
// (RFC 5508, REQ-6).
func (w *Way[T]) Add(info *packet.Info) {
	w.packets.Add(1)
	w.bytes.Add(uint64(info.Length - info.L3))
}

// See counts one packet that came along w, and follows its connection.
func (w *Way[T]) See(now time.Duration, info *packet.Info) {
	w.Add(info)
	w.flow.last.Store(int64(now))
	if info.Protocol == packet.ProtocolTCP {
		w.flow.tcp.see(w.Direction(), info)
	}
}

// State is where the connection stands.
func (f *Flow[T]) State() State {
	if f.Ways[0].Key.Protocol == packet.ProtocolTCP {
		return f.tcp.state()
	}
	return Open
}

// Idle is how long ago the last packet came.
func (f *Flow[T]) Idle(now time.Duration) time.Duration {
	return max(0, now-time.Duration(f.last.Load()))
}

// timeout is how long f may be idle.
func (f *Flow[T]) timeout() time.Duration {
	switch key := &f.Ways[0].Key; key.Protocol {
	case packet.ProtocolTCP:
		switch f.tcp.state() {
		case Open:
			return tcpEstablished
		case Closed:
			return tcpClosed
		}
		return tcpTransitory
	case packet.ProtocolUDP:
		if key.DestinationPort == 53 {
			return dns
		}
		return udp
	case packet.ProtocolICMP, packet.ProtocolICMPv6:
		return icmp
	}
	return other
}

// An Owner is who a flow is accounted to: whoever opened it. The zero value
// has none.
type Owner struct{ open atomic.Int64 }

// Open is how many flows it has.
func (o *Owner) Open() int { return int(o.open.Load()) }

// A Table is safe for concurrent use.
type Table[T any] struct {
	limit, ownerLimit int64
	ended             func(*Flow[T])
	serial            atomic.Uint64
	all               Owner
	shards            [shards]shard[T]
}

type shard[T any] struct {
	mu   sync.RWMutex
	ways map[Key]*Way[T]
}

// New returns an empty Table for limit flows, no more than ownerLimit of one
// owner. ended is called once for each flow that ends, without a lock held.
func New[T any](limit, ownerLimit int, ended func(*Flow[T])) *Table[T] {
	t := &Table[T]{limit: int64(limit), ownerLimit: int64(ownerLimit), ended: ended}
	for i := range t.shards {
		t.shards[i].ways = make(map[Key]*Way[T])
	}
	return t
}

// Lookup returns the direction that packets with key k are of, or nil.
func (t *Table[T]) Lookup(k *Key) *Way[T] {
	s := &t.shards[k.shard()]
	s.mu.RLock()
	w := s.ways[*k]
	s.mu.RUnlock()
	return w
}

// Insert adds f, whose keys and Value are set, on owner's account. Errors:
// ErrFull, ErrTaken; f is then not in the table and ended isn't called.
func (t *Table[T]) Insert(now time.Duration, owner *Owner, f *Flow[T]) error {
	if owner.open.Add(1) > t.ownerLimit {
		owner.open.Add(-1)
		return ErrFull
	}
	if t.all.open.Add(1) > t.limit {
		owner.open.Add(-1)
		t.all.open.Add(-1)
		return ErrFull
	}
	f.Serial = t.serial.Add(1)
	f.owner = owner
	f.last.Store(int64(now))
	request, response := &f.Ways[packet.Request], &f.Ways[packet.Response]
	request.flow, response.flow = f, f
	unlock := t.lock(f)
	a, b := &t.shards[request.Key.shard()], &t.shards[response.Key.shard()]
	taken := a.ways[request.Key] != nil || b.ways[response.Key] != nil
	if !taken {
		a.ways[request.Key], b.ways[response.Key] = request, response
	}
	unlock()
	if taken {
		owner.open.Add(-1)
		t.all.open.Add(-1)
		return ErrTaken
	}
	return nil
}

// lock locks the shards of both of f's keys, the lower one first.
func (t *Table[T]) lock(f *Flow[T]) (unlock func()) {
	a, b := f.Ways[0].Key.shard(), f.Ways[1].Key.shard()
	if a > b {
		a, b = b, a
	}
	first, second := &t.shards[a].mu, &t.shards[b].mu
	first.Lock()
	if a == b {
		return first.Unlock
	}
	second.Lock()
	return func() { second.Unlock(); first.Unlock() }
}

// Remove ends f. It does nothing when f has ended.
func (t *Table[T]) Remove(f *Flow[T]) {
	unlock := t.lock(f)
	gone := f.gone
	if !gone {
		f.gone = true
		for i := range f.Ways {
			key := &f.Ways[i].Key
			delete(t.shards[key.shard()].ways, *key)
		}
	}
	unlock()
	if gone {
		return
	}
	f.owner.open.Add(-1)
	t.all.open.Add(-1)
	t.ended(f)
}

// Expire ends the flows that have been idle for too long.
func (t *Table[T]) Expire(now time.Duration) {
	t.each(func(f *Flow[T]) bool { return f.Idle(now) >= f.timeout() }, t.Remove)
}

// Each calls do for every flow, without a lock held. Flows that begin or end
// meanwhile may be left out.
func (t *Table[T]) Each(do func(*Flow[T])) {
	t.each(func(*Flow[T]) bool { return true }, do)
}

func (t *Table[T]) each(pick func(*Flow[T]) bool, do func(*Flow[T])) {
	var picked []*Flow[T]
	for i := range t.shards {
		s := &t.shards[i]
		picked = picked[:0]
		s.mu.RLock()
		for _, w := range s.ways {
			if w.Direction() == packet.Request && pick(w.flow) {
				picked = append(picked, w.flow)
			}
		}
		s.mu.RUnlock()
		for _, f := range picked {
			do(f)
		}
	}
}

// Len is how many flows there are.
func (t *Table[T]) Len() int { return t.all.Open() }
