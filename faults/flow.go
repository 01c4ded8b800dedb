package faults

import (
	"crypto/cipher"
	"slices"

	"vz.test/vz/netstack/packet"
)

const (
	maxFlows    = 32768 // per fault; about 10 MB
	maxServices = 4096  // per fault
	maxResent   = 64    // retransmissions remembered per flow and direction
)

// flows is what one fault that draws knows of the flows on its path: enough to
// give each packet its point. It belongs to the Conditioner's lock.
type flows struct {
	known    map[uint64]*flow // by FlowID.Serial
	services map[service]*serviceCount
	spill    *flow // of all flows beyond the bounds
	because  because
}

// A service is what a flow's ordinal counts within.
type service struct {
	source, destination string
	protocol            uint8
	port                uint16
}

type serviceCount struct {
	next uint64 // ordinal
	open int    // flows that would make the next one's ordinal a race
}

type flow struct {
	service *serviceCount // nil: the spill
	open    bool
	dialled bool        // the originator's SYN was seen,
	isn     uint32      // with this sequence number
	mid     [2][16]byte // by direction
	counts  [2]counts
}

// because says why a fault's decisions may not be the same in another run.
type because uint8

const (
	segmentation because = 1 << iota // TCP data, whose segments are the guest's choice
	concurrency                      // a flow began while another of its service was open
	older                            // a flow was older than the fault
	crowded                          // there were more flows than the bounds allow
)

// words are because's in the order of its bits.
var words = [...]string{"tcp-segmentation", "concurrent-flows", "older-flows", "too-many-flows"}

// find returns the packet's flow, which it adds when it is new. It has to see
// both directions, so that ordinals follow the originators.
func (fs *flows) find(f *packet.Flight, block cipher.Block) *flow {
	fl, dials := fs.known[f.Flow.Serial], dials(f)
	if fl != nil && dials && fl.dialled && fl.isn != f.Info.Sequence {
		fs.forget(f.Flow.Serial)
		fl = nil
	}
	if fl == nil {
		fl = fs.add(f, block)
		if f.Info.Protocol == protocolTCP && !dials {
			fs.because |= older
		}
	}
	if dials {
		fl.dialled, fl.isn = true, f.Info.Sequence
	}
	fl.setOpen(fl.openAfter(f))
	return fl
}

func (fs *flows) add(f *packet.Flight, block cipher.Block) *flow {
	s := service{f.Flow.Source, f.Flow.Destination, f.Flow.Protocol, f.Flow.DestinationPort}
	count := fs.services[s]
	if len(fs.known) >= maxFlows || count == nil && len(fs.services) >= maxServices {
		fs.because |= crowded
		if fs.spill == nil {
			fs.spill = new(flow)
			fs.spill.key(&FlowKey{}, block)
		}
		return fs.spill
	}
	if count == nil {
		count = new(serviceCount)
		fs.services[s] = count
	}
	if count.open > 0 {
		fs.because |= concurrency
	}
	fl := &flow{service: count}
	fl.key(&FlowKey{s.source, s.destination, s.protocol, s.port, count.next}, block)
	count.next++
	fs.known[f.Flow.Serial] = fl
	return fl
}

func (fs *flows) forget(serial uint64) {
	if fl := fs.known[serial]; fl != nil {
		fl.setOpen(false)
		delete(fs.known, serial)
	}
}

func (fl *flow) key(k *FlowKey, block cipher.Block) {
	for d := range fl.mid {
		fl.mid[d] = k.mid(block, packet.Direction(d))
	}
}

// dials says that this is an originator's SYN. One with another sequence
// number than the one before is another connection on the same addresses and
// ports; a SYN that is sent again keeps its number.
func dials(f *packet.Flight) bool {
	return f.Direction == packet.Request && f.Flow.Protocol == protocolTCP &&
		f.Info.Protocol == protocolTCP && f.Info.TCPFlags&(tcpSYN|tcpACK) == tcpSYN
}

// openAfter says whether a flow that begins after this packet would race with
// this one for its ordinal. That can't be known from outside; it is taken as:
// TCP until either side ends it, others until they are answered.
func (fl *flow) openAfter(f *packet.Flight) bool {
	if f.Info.Protocol != f.Flow.Protocol {
		return fl.open
	}
	if f.Flow.Protocol != protocolTCP {
		return f.Direction == packet.Request
	}
	if f.Info.TCPFlags&tcpSYN != 0 {
		return true
	}
	return fl.open && f.Info.TCPFlags&(tcpFIN|tcpRST) == 0
}

func (fl *flow) setOpen(open bool) {
	if fl.service == nil || fl.open == open {
		return
	}
	fl.open = open
	if open {
		fl.service.open++
	} else {
		fl.service.open--
	}
}

// point counts a packet of this flow and names it.
func (fl *flow) point(f *packet.Flight) Point {
	c := &fl.counts[f.Direction]
	if fl.service == nil {
		return c.next(Other, &c.other)
	}
	return c.point(f)
}

// counts is where one direction of one flow stands. A packet's point depends
// on nothing but the packets that came before it here.
type counts struct {
	syns, fins, rsts uint32
	datagrams, other uint64

	based bool   // base is known
	base  uint32 // sequence number of the stream's first byte
	sent  series // offsets of data

	acked   bool
	ackBase uint32 // the first acknowledgement
	ack     int64  // the newest, from there
	acks    uint32 // how many had it before this one

	echoed bool
	echoes series
}

func (c *counts) point(f *packet.Flight) Point {
	i := f.Info
	if i.L4 == 0 || i.FragmentOffset != 0 || i.Protocol != f.Flow.Protocol {
		return c.next(Other, &c.other)
	}
	switch i.Protocol {
	case protocolTCP:
		return c.tcp(i)
	case protocolUDP:
		return c.next(UDP, &c.datagrams)
	case protocolICMP:
		if i.ICMPType == 8 || i.ICMPType == 0 {
			return c.echo(i)
		}
	case protocolICMPv6:
		if i.ICMPType == 128 || i.ICMPType == 129 {
			return c.echo(i)
		}
	}
	return c.next(Other, &c.other)
}

func (c *counts) tcp(i *packet.Info) Point {
	switch {
	case i.TCPFlags&tcpSYN != 0:
		if !c.based || c.base != i.Sequence+1 {
			c.based, c.base, c.sent = true, i.Sequence+1, series{}
		}
		return attempt(SYN, &c.syns)
	case i.TCPFlags&tcpRST != 0:
		return attempt(RST, &c.rsts)
	case i.PayloadLen() > 0:
		if !c.based {
			c.based, c.base = true, i.Sequence
		}
		// The nearest offset with these 32 bits: streams are longer than that.
		offset := c.sent.end + int64(int32(i.Sequence-c.base-uint32(c.sent.end)))
		return Point{Data, uint64(offset), c.sent.attempt(offset, int64(i.PayloadLen()))}
	case i.TCPFlags&tcpFIN != 0:
		return attempt(FIN, &c.fins)
	}
	if !c.acked {
		c.acked, c.ackBase = true, i.Acknowledgement
		return Point{Class: ACK}
	}
	ack := c.ack + int64(int32(i.Acknowledgement-c.ackBase-uint32(c.ack)))
	if ack == c.ack {
		c.acks++
	} else {
		c.ack, c.acks = ack, 0
	}
	return Point{ACK, uint64(ack), c.acks}
}

func (c *counts) echo(i *packet.Info) Point {
	if !c.echoed {
		c.echoed, c.echoes.end = true, int64(i.ICMPSequence)
	}
	n := c.echoes.end + int64(int16(i.ICMPSequence-uint16(c.echoes.end)))
	return Point{Echo, uint64(n), c.echoes.attempt(n, 1)}
}

func (c *counts) next(class Class, n *uint64) Point {
	*n++
	return Point{Class: class, Index: *n - 1}
}

func attempt(class Class, n *uint32) Point {
	*n++
	return Point{Class: class, Attempt: *n - 1}
}

// A series tells the first transmission of a range from later ones.
type series struct {
	end    int64 // of what was sent at all
	resent *resent
}

type resent struct {
	starts   [maxResent]int64
	attempts [maxResent]uint32
	len      int
	oldest   int
	floor    uint32 // the most attempts of any start that had to make room
}

// attempt returns how often the range that begins at start was sent before,
// and notes that it is sent now. What begins at or after the end is new and
// needs no memory; of what is sent again, the last maxResent starts are kept.
// Any other is taken to have been sent as often as the most often sent one
// that is no longer kept: never less often than it was, so that a range can't
// meet the decision that lost it for ever.
func (s *series) attempt(start, length int64) uint32 {
	if start >= s.end {
		s.end = start + length
		return 0
	}
	s.end = max(s.end, start+length)
	if s.resent == nil {
		s.resent = new(resent)
	}
	r := s.resent
	if i := slices.Index(r.starts[:r.len], start); i >= 0 {
		r.attempts[i]++
		return r.attempts[i]
	}
	i := r.len
	if r.len < maxResent {
		r.len++
	} else {
		i = r.oldest
		r.oldest = (r.oldest + 1) % maxResent
		r.floor = max(r.floor, r.attempts[i])
	}
	r.starts[i], r.attempts[i] = start, r.floor+1
	return r.floor + 1
}

const (
	protocolICMP   = 1
	protocolTCP    = 6
	protocolUDP    = 17
	protocolICMPv6 = 58

	tcpFIN = 0x01
	tcpSYN = 0x02
	tcpRST = 0x04
	tcpACK = 0x10
)
