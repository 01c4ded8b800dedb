package link

import (
	"sync"
	"sync/atomic"

	"vz.test/vz/netstack/packet"
)

// A pipe's queue holds up to pipeFrames frames and pipeBytes bytes one way:
// a few round trips' worth of one TCP window, and no more than that for a
// reader that has stopped.
const (
	pipeFrames = 512
	pipeBytes  = 4 << 20
)

// Pipe returns the two ends of a cable in memory: what is written to one end
// is read from the other, in order. Frames that don't fit mtu and offload are
// malformed to the end that would have read them; those that meet a full queue
// are dropped and counted where they were written. Closing either end closes
// both.
func Pipe(mtu int, offload Offload) (a, b Port) {
	there, back := newQueue(), newQueue()
	shared := &pipe{mtu: mtu, offload: offload, there: there, back: back}
	return &pipeEnd{pipe: shared, in: back, out: there}, &pipeEnd{pipe: shared, in: there, out: back}
}

type pipe struct {
	mtu         int
	offload     Offload
	there, back *queue
}

type pipeEnd struct {
	*pipe
	in, out *queue
	lent    [][]byte // what the last ReadFrames handed out; its reader's own
}

// A queue is one direction. Its fields are under mu; counters are read by the
// ends without it.
type queue struct {
	mu     sync.Mutex
	more   sync.Cond
	frames [pipeFrames]Frame // ring
	first  int
	count  int
	bytes  int
	closed bool

	small, large [][]byte // free buffers

	malformed, overflowed atomic.Uint64
}

func newQueue() *queue {
	q := &queue{}
	q.more.L = &q.mu
	return q
}

func (e *pipeEnd) ReadFrames(frames []Frame) (int, error) {
	q := e.in
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, buffer := range e.lent {
		q.giveBack(buffer)
	}
	clear(e.lent)
	e.lent = e.lent[:0]
	for q.count == 0 && !q.closed {
		q.more.Wait()
	}
	if q.closed {
		return 0, ErrClosed
	}
	n := min(len(frames), q.count)
	for i := range n {
		slot := &q.frames[q.first]
		frames[i] = *slot
		*slot = Frame{}
		q.first = (q.first + 1) % pipeFrames
		q.bytes -= len(frames[i].Data)
		e.lent = append(e.lent, frames[i].Data)
	}
	q.count -= n
	return n, nil
}

func (e *pipeEnd) WriteFrames(frames []Frame) (int, error) {
	q := e.out
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return 0, ErrClosed
	}
	taken := 0
	for i := range frames {
		f := &frames[i]
		if !e.fits(f) {
			q.malformed.Add(1)
			continue
		}
		if q.count == pipeFrames || q.bytes+len(f.Data) > pipeBytes {
			q.overflowed.Add(1)
			continue
		}
		slot := &q.frames[(q.first+q.count)%pipeFrames]
		*slot = *f
		slot.Data = q.borrow(len(f.Data))
		copy(slot.Data, f.Data)
		q.count++
		q.bytes += len(f.Data)
		taken++
	}
	if taken > 0 {
		q.more.Signal()
	}
	return taken, nil
}

// fits reports whether f is what the ends agreed on.
func (p *pipe) fits(f *Frame) bool {
	if len(f.Data) < packet.EthernetLen || len(f.Data) > MaxFrame {
		return false
	}
	if f.NeedsChecksum && !p.offload.Checksum || !p.offload.takes(f.Segmentation) {
		return false
	}
	if f.Segmentation == GSONone {
		return len(f.Data)-packet.EthernetLen <= p.mtu
	}
	return int(f.HeaderLen)+int(f.GSOSize)-packet.EthernetLen <= p.mtu
}

// takes reports whether a super-frame of kind passes whole.
func (o Offload) takes(kind GSO) bool {
	switch kind {
	case GSONone:
		return true
	case GSOTCP4:
		return o.TSO4 && o.Checksum
	case GSOTCP6:
		return o.TSO6 && o.Checksum
	case GSOUDP:
		return o.USO && o.Checksum
	}
	return false
}

func (e *pipeEnd) MTU() int         { return e.mtu }
func (e *pipeEnd) Offload() Offload { return e.offload }

func (e *pipeEnd) Drops() (malformed, overflowed uint64) {
	return e.in.malformed.Load(), e.out.overflowed.Load()
}

// Close closes both ends. Frames still queued are gone.
func (e *pipeEnd) Close() error {
	e.there.close()
	e.back.close()
	return nil
}

func (q *queue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return
	}
	q.closed = true
	clear(q.frames[:])
	q.small, q.large = nil, nil
	q.count, q.bytes = 0, 0
	q.more.Broadcast()
}

// Buffers of queued frames come in two sizes, an MTU's and a super-frame's, so
// that small frames don't each pin 64 KiB, and a queue keeps a few of each that
// are free: what a steady stream needs, not what the fullest moment needed.
const (
	smallBuffer = 2048
	keepSmall   = 128
	keepLarge   = 8
)

func (q *queue) borrow(size int) []byte {
	free, capacity := &q.small, smallBuffer
	if size > smallBuffer {
		free, capacity = &q.large, MaxFrame
	}
	if n := len(*free); n > 0 {
		buffer := (*free)[n-1]
		*free = (*free)[:n-1]
		return buffer[:size]
	}
	return make([]byte, size, capacity)
}

func (q *queue) giveBack(buffer []byte) {
	switch {
	case cap(buffer) == smallBuffer && len(q.small) < keepSmall:
		q.small = append(q.small, buffer)
	case cap(buffer) == MaxFrame && len(q.large) < keepLarge:
		q.large = append(q.large, buffer)
	}
}
