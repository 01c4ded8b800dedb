package faults

import (
	"container/heap"
	"sync"
	"time"

	"vz.test/vz/netstack/packet"
)

// A line holds the late packets of one direction of one path: a FIFO for each
// flow, and a heap of those by when their first packet is due. That keeps the
// order of a flow by its shape, and costs no more than an append while a flow
// has packets in it already. It belongs to its Conditioner's lock.
type line struct {
	timer     Timer
	releasing bool

	queues map[uint64]*queue // by FlowID.Serial
	due    dueHeap
	idle   *queue // a list to take new ones from
	serial uint64

	packets, bytes       int // held, those that are being delivered included
	maxPackets, maxBytes int
}

// A queue is one flow's. It stays until its last packet is delivered, not
// only taken: a packet that came meanwhile would overtake.
type queue struct {
	flow        uint64
	first, last *parcel
	lastDue     time.Duration
	taken       int // on their way out
	place       int // in the heap, when it has a first
	next        *queue
}

// A parcel is one held packet.
type parcel struct {
	next   *parcel
	queue  *queue
	serial uint64
	wanted time.Duration // arrival + delay
	due    time.Duration // wanted, or later to keep order
	to     packet.Sink
	frame  []byte

	armed []*impairment // when it came
	marks uint64        // those of them that delay it
}

type holding uint8

const (
	kept holding = iota
	full         // delayed, and no room
	free         // not delayed, and nothing to wait for
)

// hold takes a copy of a packet that is delayed, or that has to wait behind
// its flow's earlier ones. Without a delay it is never refused for want of
// room: rather out of order than lost by a fault that is healing.
func (l *line) hold(f *packet.Flight, now, delay time.Duration, armed []*impairment, marks uint64) holding {
	q := l.queues[f.Flow.Serial]
	if q == nil && delay == 0 {
		return free
	}
	if l.packets >= l.maxPackets || l.bytes+len(f.Frame) > l.maxBytes {
		if delay == 0 {
			return free
		}
		return full
	}
	if q == nil {
		if q = l.idle; q != nil {
			l.idle = q.next
		} else {
			q = new(queue)
		}
		*q = queue{flow: f.Flow.Serial}
		l.queues[q.flow] = q
	}
	p := newParcel(f.Frame)
	l.serial++
	p.queue, p.serial, p.to, p.armed, p.marks = q, l.serial, f.To, armed, marks
	p.wanted = now + delay
	p.due = max(q.lastDue, p.wanted)
	q.lastDue = p.due
	l.packets++
	l.bytes += len(p.frame)
	if q.first != nil {
		q.last.next, q.last = p, p
		return kept
	}
	q.first, q.last = p, p
	heap.Push(&l.due, q)
	if q.place == 0 && !l.releasing {
		l.wind(now)
	}
	return kept
}

// take moves what is due into batch and says how many that were.
func (l *line) take(batch []*parcel, now time.Duration) int {
	n := 0
	for n < len(batch) && len(l.due) > 0 && l.due[0].first.due <= now {
		q := l.due[0]
		p := q.first
		q.first = p.next
		q.taken++
		if q.first != nil {
			heap.Fix(&l.due, 0)
		} else {
			heap.Pop(&l.due)
		}
		for i, m := range p.armed {
			if p.marks&(1<<i) != 0 {
				m.late.add(now - p.wanted)
			}
		}
		batch[n] = p
		n++
	}
	return n
}

// settle forgets parcels that were delivered, and takes their memory back.
func (l *line) settle(delivered []*parcel) {
	for i, p := range delivered {
		q := p.queue
		l.packets--
		l.bytes -= len(p.frame)
		if q.taken--; q.taken == 0 && q.first == nil {
			delete(l.queues, q.flow)
			q.next, l.idle = l.idle, q
		}
		p.recycle()
		delivered[i] = nil
	}
}

// release makes all that a fault delays due at once, in order, whoever else
// delays it.
func (l *line) release(m *impairment, now time.Duration) {
	for _, q := range l.due {
		q.lastDue = 0
		for p := q.first; p != nil; p = p.next {
			for i, by := range p.armed {
				if by == m && p.marks&(1<<i) != 0 {
					p.due, p.marks = min(p.due, now), 0
				}
			}
			p.due = max(q.lastDue, p.due)
			q.lastDue = p.due
		}
	}
	heap.Init(&l.due)
	if !l.releasing {
		l.wind(now)
	}
}

// wind sets the timer to the first packet that is due.
func (l *line) wind(now time.Duration) {
	if len(l.due) > 0 {
		l.timer.Reset(l.due[0].first.due - now)
	}
}

// dueHeap implements heap.Interface; all in it have a first.
type dueHeap []*queue

func (h dueHeap) Len() int { return len(h) }

func (h dueHeap) Less(i, j int) bool {
	a, b := h[i].first, h[j].first
	if a.due != b.due {
		return a.due < b.due
	}
	return a.serial < b.serial
}

func (h dueHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].place, h[j].place = i, j
}

func (h *dueHeap) Push(q any) {
	q.(*queue).place = len(*h)
	*h = append(*h, q.(*queue))
}

func (h *dueHeap) Pop() any {
	old := *h
	q := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return q
}

// Frames are mostly pure ACKs or full, so two sizes for MTU 1500 and two above
// waste little. A larger frame than the last is not kept.
var (
	sizes = [...]int{256, 2048, 16384, 65536}
	pools [len(sizes)]sync.Pool
)

func newParcel(frame []byte) *parcel {
	for i, size := range sizes {
		if len(frame) <= size {
			p, _ := pools[i].Get().(*parcel)
			if p == nil {
				p = &parcel{frame: make([]byte, 0, size)}
			}
			p.frame = append(p.frame[:0], frame...)
			return p
		}
	}
	return &parcel{frame: append([]byte(nil), frame...)}
}

func (p *parcel) recycle() {
	*p = parcel{frame: p.frame}
	for i, size := range sizes {
		if cap(p.frame) == size {
			pools[i].Put(p)
		}
	}
}
