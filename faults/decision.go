package faults

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"math"
	"time"

	"vz.test/vz/netstack/packet"
)

// A Class is a sort of packet with an index of its own. The numbers are part
// of the decision; they are frozen.
type Class uint8

const (
	// SYN, FIN without payload, RST: index 0; attempt counts the earlier ones.
	SYN Class = 1
	FIN Class = 2
	RST Class = 3
	// Data is TCP with payload: index is the offset of its first byte from the
	// first byte of the stream (initial sequence number + 1); attempt counts
	// the earlier transmissions that began there. For flows older than the
	// fault, offsets are from the first sequence number that the fault saw.
	Data Class = 4
	// ACK is TCP with neither: index is the acknowledgement less the first one
	// of this direction; attempt counts the duplicates in a row.
	ACK Class = 5
	// UDP: index counts the datagrams.
	UDP Class = 6
	// Echo is ICMP echo, request and reply: index is the sequence number, over
	// its wraps; attempt counts the earlier ones of that number.
	Echo Class = 7
	// Other is everything else, later fragments and ICMP errors about the flow
	// included: index counts them.
	Other Class = 8
)

// FlowKey names a flow by what is the same in each run of the same traffic.
type FlowKey struct {
	Source, Destination string // as in packet.FlowID
	Protocol            uint8  // IANA number
	DestinationPort     uint16
	Ordinal             uint64 // of the flows with these four, since arming, from 0
}

// A Point is one packet of one direction of a flow.
type Point struct {
	Class   Class
	Index   uint64
	Attempt uint32
}

// A Decision is what one fault does to one packet.
type Decision struct {
	Lost  bool
	Delay time.Duration
}

// Decide says what the fault of this spec does to a packet. It is the function
// by which the engine decides, for those who check it from captures. Path, At
// and TTL don't matter.
func Decide(spec Spec, direction packet.Direction, flow FlowKey, point Point) (Decision, error) {
	if err := spec.check(); err != nil {
		return Decision{}, err
	}
	spec = spec.normal()
	if !spec.impairs()[direction] {
		return Decision{}, nil
	}
	block := newKey(spec.Seed, spec.Name, spec.Revision)
	mid := flow.mid(block, direction)
	var o outcome
	_, params := spec.kind()
	params.decider().decide(&draw{block: block, mid: &mid, point: point}, &o)
	return Decision{Lost: o.lost, Delay: o.delay}, nil
}

// A lane is a kind's own 64 bits of a packet's block. Their numbers are frozen;
// a new kind takes the next.
type lane uint8

const laneLoss lane = 0

// newKey derives a fault's key. Its name stands for the fault, since that is
// the same in each run and an ID is not.
func newKey(seed uint64, name string, revision uint64) cipher.Block {
	var secret [8]byte
	binary.BigEndian.PutUint64(secret[:], seed)
	info := binary.BigEndian.AppendUint32(nil, uint32(len(name)))
	info = append(info, name...)
	info = binary.BigEndian.AppendUint64(info, revision)
	key, err := hkdf.Key(sha256.New, secret[:], []byte("vz/faults/1"), string(info), 16)
	if err != nil {
		panic(err) // only for a length beyond HKDF's
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		panic(err) // only for a length that AES has not
	}
	return block
}

// mid is the first of the two encryptions: the same for all packets of one
// direction of a flow.
func (k *FlowKey) mid(block cipher.Block, d packet.Direction) [16]byte {
	b := make([]byte, 0, 128)
	b = append(b, byte(d))
	for _, s := range []string{k.Source, k.Destination} {
		b = binary.BigEndian.AppendUint32(b, uint32(len(s))) // so that no two keys look alike
		b = append(b, s...)
	}
	b = append(b, k.Protocol)
	b = binary.BigEndian.AppendUint16(b, k.DestinationPort)
	b = binary.BigEndian.AppendUint64(b, k.Ordinal)
	sum := sha256.Sum256(b)
	mid := [16]byte(sum[:16])
	block.Encrypt(mid[:], mid[:])
	return mid
}

// A draw is the randomness of one packet for one fault.
type draw struct {
	block cipher.Block
	mid   *[16]byte
	point Point
	buf   [16]byte
}

// word returns the packet's 64 bits in a lane.
func (d *draw) word(l lane) uint64 {
	binary.BigEndian.PutUint64(d.buf[:8], uint64(d.point.Class)<<56|uint64(l/2)<<48|uint64(d.point.Attempt))
	binary.BigEndian.PutUint64(d.buf[8:], d.point.Index)
	subtle.XORBytes(d.buf[:], d.buf[:], d.mid[:])
	d.block.Encrypt(d.buf[:], d.buf[:])
	return binary.BigEndian.Uint64(d.buf[l%2*8:])
}

// A threshold is a probability in integers: round(p × 2⁶³), half to even, so
// that 0 is never, 2⁶³ is always, and no compiler's floating point is between
// two runs. Rounding moves a probability by at most 2⁻⁶⁴; one above zero stays
// above zero.
type threshold uint64

func newThreshold(p float64) threshold {
	t := threshold(math.RoundToEven(p * (1 << 63)))
	if t == 0 && p > 0 {
		return 1
	}
	return t
}

// hit says whether the upper 63 bits of word are below the threshold.
func (t threshold) hit(word uint64) bool { return word>>1 < uint64(t) }
