package netstack

import (
	"sync/atomic"
	"time"

	"vz.test/vz/netstack/link"
	"vz.test/vz/netstack/packet"
	"vz.test/vz/netstack/policy"
)

// A port is a connected link.Port and the goroutine that reads it.
//
//	connect ──► reading ──the link fails──► let go ──► done
//	               └──────── close ────────────────────► done
//
// Who takes a port out of its station's pointer closes it.
type port struct {
	link    link.Port
	station atomic.Pointer[station]
	done    chan struct{}
}

// connect puts l in the place of s's port. Domain.change is held.
func (d *Domain) connect(s *station, l link.Port) {
	p := &port{link: l, done: make(chan struct{})}
	p.station.Store(s)
	if before := s.port.Swap(p); before != nil {
		before.close()
	}
	go d.read(p)
}

// close waits until nothing more comes from p.
func (p *port) close() {
	_ = p.link.Close()
	<-p.done
}

// batch is how many frames are taken at a time: enough to make one write of
// many small ones, few enough that the first doesn't wait for long.
const batch = 64

// read carries frames from p until its link fails.
func (d *Domain) read(p *port) {
	defer close(p.done)
	w := &worker{d: d}
	for {
		n, err := p.link.ReadFrames(w.frames[:])
		if err != nil {
			break
		}
		w.now = d.now()
		s := p.station.Load()
		for i := range w.frames[:n] {
			w.enter(s, &w.frames[i])
		}
		w.flush()
	}
	d.mu.Lock() // against Update, and as in Detach
	s := p.station.Load()
	ours := s.port.CompareAndSwap(p, nil)
	d.mu.Unlock()
	if ours { // else somebody has taken it, who closes it
		_ = p.link.Close()
		d.endFlows(s)
	}
}

// A worker is what one goroutine needs to carry frames: scratch memory, so
// that a frame costs no allocation.
type worker struct {
	d      *Domain
	now    time.Duration
	frames [batch]link.Frame

	info, quoted, segment packet.Info
	fitter, splitter      link.Fitter
	flight                packet.Flight
	answer                [answerRoom]byte

	out   [batch]link.Frame // for outTo; they stay where they are until flush
	outN  int
	outTo *port
}

// queue adds f to what goes to p in one write. f.Data stays valid until flush.
func (w *worker) queue(p *port, f *link.Frame) {
	if w.outN == batch || w.outTo != p {
		w.flush()
		w.outTo = p
	}
	w.out[w.outN] = *f
	w.outN++
}

// flush writes what was queued. What the port doesn't take is counted.
func (w *worker) flush() {
	if w.outN == 0 {
		return
	}
	n, err := w.outTo.link.WriteFrames(w.out[:w.outN])
	if lost := w.outN - n; lost > 0 {
		why := policy.PortOverflow
		if err != nil {
			why = policy.UnreachableMachine
		}
		w.outTo.station.Load().tally.drops[why].Add(uint64(lost))
	}
	w.outN = 0
}
