//go:build linux

package agent

import (
	"slices"
	"sync"

	"vz.test/vz/guest/wire"
)

const (
	// logBytes is kept of each declared process, in memory: a Machine's root
	// may be small or read-only, and a log must not fill it.
	logBytes = 1 << 20
	// logChunk is how far writes are joined, so that a process that writes
	// single bytes does not cost a header for each.
	logChunk = 16 << 10
)

// book is the log of one declared process: the newest logBytes of what it
// wrote, at positions counted in bytes from its first start.
type book struct {
	mu      sync.Mutex // of all below
	chunks  []chunk
	end     uint64        // position after the last byte
	changed chan struct{} // closed at the next change
	closed  bool          // nothing will be added
}

type chunk struct {
	start  uint64
	data   []byte // grows in place; what is there never changes
	stderr bool
}

func newBook() *book { return &book{changed: make(chan struct{})} }

func (b *book) write(p []byte, stderr bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed || len(p) == 0 {
		return
	}
	if n := len(b.chunks); n > 0 && b.chunks[n-1].stderr == stderr && len(b.chunks[n-1].data)+len(p) <= logChunk {
		b.chunks[n-1].data = append(b.chunks[n-1].data, p...)
	} else {
		b.chunks = append(b.chunks, chunk{start: b.end, data: slices.Clone(p), stderr: stderr})
	}
	b.end += uint64(len(p))
	for len(b.chunks) > 1 && b.end-b.chunks[1].start >= logBytes {
		b.chunks[0].data = nil
		b.chunks = b.chunks[1:]
	}
	b.announce()
}

// close ends the followers once they have read all.
func (b *book) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	b.announce()
}

func (b *book) announce() {
	close(b.changed)
	b.changed = make(chan struct{})
}

// tail is the position of the last n bytes that are kept; 0 means all.
func (b *book) tail(n uint64) uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n == 0 || n > b.end {
		return 0
	}
	return b.end - n
}

// read returns what follows position at, no more than one chunk, and where it
// ends. A reader that fell behind goes on at the oldest byte kept. With nothing
// to read the message is nil, and changed tells when to ask again; it is nil
// when there is nothing to wait for.
func (b *book) read(at uint64) (message *wire.LogChunk, next uint64, changed <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.chunks {
		if end := c.start + uint64(len(c.data)); at < end {
			at = max(at, c.start)
			return &wire.LogChunk{Data: c.data[at-c.start:], Stderr: c.stderr}, end, nil
		}
	}
	if b.closed {
		return nil, at, nil
	}
	return nil, at, b.changed
}
