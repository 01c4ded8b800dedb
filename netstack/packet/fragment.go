package packet

import (
	"bytes"
	"errors"
	"net/netip"
	"sort"
	"sync"
	"time"
)

// What goes wrong with fragments, besides Decode's ErrFragment.
var (
	ErrMTU          = errors.New("packet: MTU below 68")
	ErrNotIPv4      = errors.New("packet: not an IPv4 fragment")
	ErrPartial      = errors.New("packet: checksum is partial")
	ErrTinyFragment = errors.New("packet: first fragment without its transport header")
	ErrOverlap      = errors.New("packet: overlapping fragments")
	ErrTooMany      = errors.New("packet: too many fragments")
)

// Fragment cuts an IPv4 packet, which may itself be a fragment, into fragments
// of at most mtu bytes and hands each as a frame to emit, which doesn't keep
// it and returns false to stop. buffer has room for EthernetLen+mtu bytes.
//
// The caller has looked at DontFragment: a datagram that reached it in pieces
// may go on in pieces no larger, whatever its DF says, and others may not.
// Errors: ErrNotIPv4 (routers never fragment IPv6), ErrPartial (complete the
// checksum first), ErrMTU, ErrBuffer.
func Fragment(frame []byte, info *Info, mtu int, buffer []byte, emit func(fragment []byte) bool) error {
	if info.EtherType != EtherTypeIPv4 {
		return ErrNotIPv4
	}
	if info.PartialChecksum {
		return ErrPartial
	}
	if mtu < 68 { // RFC 791: every module can forward 68 bytes
		return ErrMTU
	}
	if len(buffer) < EthernetLen+mtu {
		return ErrBuffer
	}
	start := info.L3 + int(frame[info.L3]&15)*4
	copy(buffer, frame[:start])
	header := start - info.L3
	for from := start; from < info.Length; {
		if from != start && header == start-info.L3 {
			header = trimOptions(buffer[info.L3:start])
		}
		to, more := info.Length, info.MoreFragments
		if room := (mtu - header) &^ 7; to-from > mtu-header {
			to, more = from+room, true
		}
		out := buffer[:info.L3+header+to-from]
		copy(out[info.L3+header:], frame[from:to])
		h := out[info.L3 : info.L3+header]
		field := be.Uint16(h[6:])&0xc000 | (info.FragmentOffset+uint16(from-start))/8
		if more {
			field |= 0x2000
		}
		be.PutUint16(h[6:], field)
		setIPv4Length(h, header+to-from)
		if !emit(out) {
			break
		}
		from = to
	}
	return nil
}

// trimOptions takes the options out of header that belong in the first
// fragment only (RFC 791: the copied flag), and returns its new length.
func trimOptions(header []byte) int {
	if len(header) == IPv4Len {
		return IPv4Len
	}
	kept := IPv4Len
	for at := IPv4Len; at < len(header) && header[at] != 0; {
		size := 1
		if header[at] != 1 {
			size = int(header[at+1]) // Decode has walked them before
			if header[at]&0x80 != 0 {
				copy(header[kept:], header[at:at+size])
				kept += size
			}
		}
		at += size
	}
	for kept%4 != 0 {
		header[kept] = 0
		kept++
	}
	header[0] = header[0]&0xf0 | byte(kept/4)
	return kept
}

// Limits bound what a Reassembler holds. Zero fields take the default.
type Limits struct {
	Bytes       int           // all payload held, default 4 MiB
	SourceBytes int           // of one source address, default a quarter of Bytes
	Datagrams   int           // incomplete ones of one source, default 64
	Pieces      int           // of one datagram, default 256 (64 KiB at MTU 296)
	Timeout     time.Duration // from a datagram's first piece, default 30 s as Linux
}

// A Reassembler puts IPv4 datagrams together from their fragments, so that
// policy sees ports and no fragment passes on another's account. A datagram
// with overlapping fragments is dropped whole, with what comes of it later
// (RFC 5722); exact duplicates are ignored. At a limit the oldest datagram of
// the same source makes room: a source starves itself, not others.
//
// Safe for concurrent use. It has no clock and no goroutine: time is what its
// callers say it is.
type Reassembler struct {
	limits Limits

	mu               sync.Mutex
	datagrams        map[datagramKey]*datagram
	sources          map[netip.Addr]*fragmentSource
	oldest, newest   *datagram // all of them by age; Timeout is the same for all
	bytes            int
	expired, evicted uint64
}

type datagramKey struct {
	source, destination netip.Addr
	id                  uint32
	protocol            uint8
}

type datagram struct {
	key      datagramKey
	source   *fragmentSource
	deadline time.Time
	header   []byte  // Ethernet and IP header of the first fragment
	pieces   []piece // by offset, without overlaps
	end      int     // payload length, once the last piece is there; else 0
	have     int     // payload bytes
	largest  int     // largest fragment's IP length
	refused  bool    // overlapped: nothing more is taken until the deadline

	older, newer *datagram
}

type piece struct {
	offset int
	data   []byte
}

type fragmentSource struct {
	datagrams, bytes int
}

// pieceOverhead is what a piece costs beside its payload, so that many tiny
// ones hit the limit as well.
const pieceOverhead = 64

// NewReassembler returns an empty one.
func NewReassembler(limits Limits) *Reassembler {
	if limits.Bytes == 0 {
		limits.Bytes = 4 << 20
	}
	if limits.SourceBytes == 0 {
		limits.SourceBytes = limits.Bytes / 4
	}
	if limits.Datagrams == 0 {
		limits.Datagrams = 64
	}
	if limits.Pieces == 0 {
		limits.Pieces = 256
	}
	if limits.Timeout == 0 {
		limits.Timeout = 30 * time.Second
	}
	return &Reassembler{
		limits:    limits,
		datagrams: make(map[datagramKey]*datagram),
		sources:   make(map[netip.Addr]*fragmentSource),
	}
}

// Add takes one fragment (info is its own, from Decode) and keeps a copy. When
// it was the last one missing, whole is the datagram as a frame with the
// Ethernet and IP header of its first fragment, owned by the caller and still
// to be decoded, and largest is the IP length of the largest fragment: it may
// be fragmented again to no more than that. Until then whole is nil.
//
// Errors: ErrNotIPv4, ErrTinyFragment, ErrOverlap, ErrFragment (pieces
// disagree about the end, or the sum is too long), ErrTooMany. All but
// ErrNotIPv4 cost the datagram.
func (r *Reassembler) Add(now time.Time, frame []byte, info *Info) (whole []byte, largest int, err error) {
	if info.EtherType != EtherTypeIPv4 || !info.Fragment {
		return nil, 0, ErrNotIPv4
	}
	if info.PartialChecksum {
		return nil, 0, ErrPartial
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.expire(now)

	key := datagramKey{info.Source, info.Destination, info.FragmentID, info.Protocol}
	d := r.datagrams[key]
	if d == nil {
		d = r.begin(now, key)
	}
	if d.refused {
		return nil, 0, ErrOverlap
	}
	start := info.L3 + int(frame[info.L3]&15)*4 // Payload is behind the first one's transport header
	data := frame[start:info.Length]
	if err := d.check(data, info, r.limits.Pieces); err != nil {
		if err == errDuplicate {
			return nil, 0, nil
		}
		r.refuse(d)
		return nil, 0, err
	}
	if err := r.room(d, len(data)+pieceOverhead); err != nil {
		r.refuse(d)
		return nil, 0, err
	}
	r.insert(d, data, info)
	if info.FragmentOffset == 0 {
		d.header = bytes.Clone(frame[:start])
	}
	if d.end == 0 || d.have != d.end || d.header == nil {
		return nil, 0, nil
	}
	whole, err = d.join()
	largest = d.largest
	r.remove(d)
	return whole, largest, err
}

// Expire drops the datagrams whose time is over.
func (r *Reassembler) Expire(now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.expire(now)
}

// Dropped counts incomplete datagrams that were dropped because their time was
// over, and because another of their source needed the room.
func (r *Reassembler) Dropped() (expired, evicted uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.expired, r.evicted
}

// Held is the number of incomplete datagrams and the bytes accounted for them.
func (r *Reassembler) Held() (datagrams, bytes int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.datagrams), r.bytes
}

func (r *Reassembler) begin(now time.Time, key datagramKey) *datagram {
	source := r.sources[key.source]
	if source == nil {
		source = &fragmentSource{}
		r.sources[key.source] = source
	}
	if source.datagrams >= r.limits.Datagrams {
		r.evictOldest(source, nil)
	}
	source.datagrams++
	// The source may have lost its last datagram, and its entry, just above.
	r.sources[key.source] = source
	d := &datagram{key: key, source: source, deadline: now.Add(r.limits.Timeout), older: r.newest}
	if r.newest != nil {
		r.newest.newer = d
	} else {
		r.oldest = d
	}
	r.newest = d
	r.datagrams[key] = d
	return d
}

// room makes space for size bytes more of d at the cost of its source.
func (r *Reassembler) room(d *datagram, size int) error {
	for d.source.bytes+size > r.limits.SourceBytes || r.bytes+size > r.limits.Bytes {
		if !r.evictOldest(d.source, d) {
			return ErrTooMany
		}
	}
	return nil
}

// evictOldest drops the oldest datagram of source but keep.
func (r *Reassembler) evictOldest(source *fragmentSource, keep *datagram) bool {
	for d := r.oldest; d != nil; d = d.newer {
		if d.source == source && d != keep {
			if !d.refused {
				r.evicted++
			}
			r.remove(d)
			return true
		}
	}
	return false
}

func (r *Reassembler) expire(now time.Time) {
	for r.oldest != nil && !now.Before(r.oldest.deadline) {
		if !r.oldest.refused { // those were counted when they were refused
			r.expired++
		}
		r.remove(r.oldest)
	}
}

// refuse lets go of what d holds and remembers it until its deadline.
func (r *Reassembler) refuse(d *datagram) {
	r.release(d)
	d.refused = true
	d.pieces, d.header = nil, nil
}

func (r *Reassembler) release(d *datagram) {
	size := d.have + len(d.pieces)*pieceOverhead
	r.bytes -= size
	d.source.bytes -= size
	d.have = 0
}

func (r *Reassembler) remove(d *datagram) {
	r.release(d)
	delete(r.datagrams, d.key)
	if d.source.datagrams--; d.source.datagrams == 0 {
		delete(r.sources, d.key.source)
	}
	if d.older != nil {
		d.older.newer = d.newer
	} else {
		r.oldest = d.newer
	}
	if d.newer != nil {
		d.newer.older = d.older
	} else {
		r.newest = d.older
	}
}

var errDuplicate = errors.New("packet: duplicate fragment")

// check says why a fragment with data can't join d.
func (d *datagram) check(data []byte, info *Info, pieces int) error {
	offset, end := int(info.FragmentOffset), int(info.FragmentOffset)+len(data)
	if offset == 0 && info.L4 == 0 {
		switch info.Protocol {
		case ProtocolTCP, ProtocolUDP, ProtocolICMP:
			return ErrTinyFragment // RFC 1858
		}
	}
	i := sort.Search(len(d.pieces), func(i int) bool { return d.pieces[i].offset >= offset })
	if i < len(d.pieces) && d.pieces[i].offset == offset && bytes.Equal(d.pieces[i].data, data) &&
		info.MoreFragments == (d.end != end) {
		return errDuplicate
	}
	if i > 0 && d.pieces[i-1].offset+len(d.pieces[i-1].data) > offset ||
		i < len(d.pieces) && d.pieces[i].offset < end {
		return ErrOverlap
	}
	last := 0
	if n := len(d.pieces); n > 0 {
		last = d.pieces[n-1].offset + len(d.pieces[n-1].data)
	}
	if d.end != 0 && end > d.end || !info.MoreFragments && (d.end != 0 || last > end) {
		return ErrFragment
	}
	if len(d.pieces) >= pieces {
		return ErrTooMany
	}
	return nil
}

func (r *Reassembler) insert(d *datagram, data []byte, info *Info) {
	data = bytes.Clone(data)
	offset := int(info.FragmentOffset)
	i := sort.Search(len(d.pieces), func(i int) bool { return d.pieces[i].offset >= offset })
	d.pieces = append(d.pieces, piece{})
	copy(d.pieces[i+1:], d.pieces[i:])
	d.pieces[i] = piece{offset, data}
	d.have += len(data)
	d.largest = max(d.largest, info.Length-info.L3)
	if !info.MoreFragments {
		d.end = offset + len(data)
	}
	r.bytes += len(data) + pieceOverhead
	d.source.bytes += len(data) + pieceOverhead
}

func (d *datagram) join() ([]byte, error) {
	total := len(d.header) - EthernetLen + d.end
	if total > 65535 {
		return nil, ErrFragment
	}
	whole := make([]byte, 0, EthernetLen+total)
	whole = append(whole, d.header...)
	for _, p := range d.pieces {
		whole = append(whole, p.data...)
	}
	h := whole[EthernetLen:len(d.header)]
	be.PutUint16(h[6:], be.Uint16(h[6:])&0xc000)
	setIPv4Length(h, total)
	return whole, nil
}
