package faults

import (
	"crypto/cipher"
	"slices"
	"sync"
	"time"

	"vz.test/vz/netstack/packet"
)

const maxPerPath = 64 // faults; the bits of a held packet's marks

// A Conditioner impairs the packets of one path by all faults that are armed
// on it. The engine makes and changes it; netstack calls it for each packet
// of the path, from any goroutine.
//
// Its one lock is held for well under a microsecond a packet, never while a
// frame is delivered, so that arming and healing are atomic over the path's
// flows and wait for no traffic.
type Conditioner struct {
	path  string
	now   func() time.Duration // since the engine was made
	spent func(*Conditioner)   // when the last held packet is gone; without the lock

	mu    sync.Mutex
	armed []*impairment // in the order of composition; replaced, never changed
	lines [2]line       // by direction
	rest  sync.Cond     // on mu: a line has stopped releasing

	// Of the packet at hand; here because they would escape to the heap.
	draw    draw
	outcome outcome
}

// An impairment is an armed fault as its Conditioner sees it. All that changes
// belongs to the Conditioner's lock.
type impairment struct {
	name    string
	kind    int // in kinds
	decider decider
	impairs [2]bool // by direction
	block   cipher.Block
	since   time.Duration // when it was armed
	touched func()        // at the first effect, with the lock

	flows *flows // nil when it doesn't draw
	late  *lateness
	tally tally
}

// tally is the counting half of Effect.
type tally struct {
	matched, decided, applied, overflowed uint64
	first, last                           time.Duration // after since
}

func newImpairment(s *Spec, since time.Duration) *impairment {
	k, params := s.kind()
	m := &impairment{name: s.Name, kind: k, decider: params.decider(), impairs: s.impairs(), since: since,
		late: new(lateness)}
	if kinds[k].draws {
		m.block = newKey(s.Seed, s.Name, s.Revision)
		m.flows = &flows{known: map[uint64]*flow{}, services: map[service]*serviceCount{}}
	}
	return m
}

func newConditioner(path string, clock Clock, now func() time.Duration, packets, bytes int, spent func(*Conditioner)) *Conditioner {
	c := &Conditioner{path: path, now: now, spent: spent}
	c.rest.L = &c.mu
	for d := range c.lines {
		c.lines[d] = line{queues: map[uint64]*queue{}, maxPackets: packets, maxBytes: bytes}
		c.lines[d].timer = clock.AfterFunc(time.Hour, func() { c.release(packet.Direction(d)) })
		c.lines[d].timer.Stop()
	}
	return c
}

// Condition decides on one packet. After Held, f.To gets a copy later.
func (c *Conditioner) Condition(f *packet.Flight) packet.Verdict {
	c.mu.Lock()
	defer c.mu.Unlock()
	var loser *impairment // the first that lost it
	var marks uint64      // those that delay it, by their place in armed
	o := &c.outcome
	*o = outcome{}
	for i, m := range c.armed {
		if m.flows != nil {
			// Each fault counts by itself, in both directions and also what
			// another one loses: faults must not shift one another.
			fl := m.flows.find(f, m.block)
			if m.impairs[f.Direction] {
				c.draw.block, c.draw.mid, c.draw.point = m.block, &fl.mid[f.Direction], fl.point(f)
				if c.draw.point.Class == Data {
					m.flows.because |= segmentation
				}
			}
		}
		if !m.impairs[f.Direction] {
			continue
		}
		m.tally.matched++
		if !m.decider.decide(&c.draw, o) {
			continue
		}
		m.tally.decided++
		switch {
		case loser != nil:
		case o.lost:
			loser = m
		default:
			marks |= 1 << i
		}
	}

	if loser != nil {
		loser.apply(c.now())
		return packet.Lost
	}
	l := &c.lines[f.Direction]
	if marks == 0 && o.delay == 0 && l.packets == 0 {
		return packet.Pass
	}
	now := c.now()
	hold := l.hold(f, now, o.delay, c.armed, marks)
	for i, m := range c.armed {
		switch {
		case marks&(1<<i) == 0:
		case hold == full:
			m.tally.overflowed++
		default:
			m.apply(now)
		}
	}
	switch hold {
	case full:
		return packet.Lost
	case free:
		return packet.Pass
	}
	return packet.Held
}

func (m *impairment) apply(now time.Duration) {
	t := &m.tally
	t.applied++
	t.last = now - m.since
	if t.applied == 1 {
		t.first = t.last
		m.touched()
	}
}

// Forget drops what is known of a flow that has ended. Packets of its that
// are held are delivered all the same.
func (c *Conditioner) Forget(serial uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, m := range c.armed {
		if m.flows != nil {
			m.flows.forget(serial)
		}
	}
}

// arm adds a fault from now on.
func (c *Conditioner) arm(m *impairment) {
	c.mu.Lock()
	defer c.mu.Unlock()
	armed := append(slices.Clone(c.armed), m)
	slices.SortStableFunc(armed, func(a, b *impairment) int { return a.kind - b.kind })
	c.armed = armed
}

// heal takes a fault away and releases what it holds. Nothing is counted for
// it afterwards.
func (c *Conditioner) heal(m *impairment) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.armed = slices.DeleteFunc(slices.Clone(c.armed), func(other *impairment) bool { return other == m })
	now := c.now()
	for d := range c.lines {
		c.lines[d].release(m, now)
	}
}

// empty says that it has nothing to do: no fault and no packet.
func (c *Conditioner) empty() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.armed) == 0 && c.lines[0].packets == 0 && c.lines[1].packets == 0
}

// release delivers what is due in one direction. One goroutine at a time does
// so; another one's call returns at once, since the first looks again before
// it stops.
func (c *Conditioner) release(d packet.Direction) {
	c.mu.Lock()
	l := &c.lines[d]
	if l.releasing {
		c.mu.Unlock()
		return
	}
	l.releasing = true
	var batch [64]*parcel
	for {
		due := batch[:l.take(batch[:], c.now())]
		if len(due) == 0 {
			break
		}
		c.mu.Unlock()
		for _, p := range due {
			p.to.Deliver(p.frame)
		}
		c.mu.Lock()
		l.settle(due)
	}
	l.releasing = false
	l.wind(c.now())
	c.rest.Broadcast()
	spent := len(c.armed) == 0 && c.lines[0].packets == 0 && c.lines[1].packets == 0
	c.mu.Unlock()
	if spent {
		c.spent(c)
	}
}

// drain delivers all that is due and returns when it is delivered.
func (c *Conditioner) drain() {
	for d := range c.lines {
		c.release(packet.Direction(d))
		c.mu.Lock()
		for c.lines[d].releasing {
			c.rest.Wait()
		}
		c.lines[d].timer.Stop()
		c.mu.Unlock()
	}
}
