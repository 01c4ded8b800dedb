package packet

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
)

// Sum is the folded ones'-complement sum (RFC 1071) of initial and the 16-bit
// words of data, an odd last byte padded with zero. A checksum field holds its
// complement; over data that includes a right checksum it is 0xffff.
func Sum(data []byte, initial uint16) uint16 {
	// The sum is the same in any byte order but for a final swap (RFC 1071,
	// 2.B), so words are read as the machine has them, eight bytes at a time,
	// and the carry travels along the chain of Add64s.
	var sum, carry uint64
	for len(data) >= 64 {
		d := data[:64]
		sum, carry = bits.Add64(sum, binary.LittleEndian.Uint64(d[0:]), 0)
		sum, carry = bits.Add64(sum, binary.LittleEndian.Uint64(d[8:]), carry)
		sum, carry = bits.Add64(sum, binary.LittleEndian.Uint64(d[16:]), carry)
		sum, carry = bits.Add64(sum, binary.LittleEndian.Uint64(d[24:]), carry)
		sum, carry = bits.Add64(sum, binary.LittleEndian.Uint64(d[32:]), carry)
		sum, carry = bits.Add64(sum, binary.LittleEndian.Uint64(d[40:]), carry)
		sum, carry = bits.Add64(sum, binary.LittleEndian.Uint64(d[48:]), carry)
		sum, carry = bits.Add64(sum, binary.LittleEndian.Uint64(d[56:]), carry)
		sum += carry // can't carry again: after one, sum is at most 2^64-2
		data = data[64:]
	}
	for len(data) >= 8 {
		sum, carry = bits.Add64(sum, binary.LittleEndian.Uint64(data), 0)
		sum += carry
		data = data[8:]
	}
	var tail uint64
	if len(data) >= 4 {
		tail = uint64(binary.LittleEndian.Uint32(data))
		data = data[4:]
	}
	if len(data) >= 2 {
		tail += uint64(binary.LittleEndian.Uint16(data))
		data = data[2:]
	}
	if len(data) == 1 {
		tail += uint64(data[0])
	}
	tail += uint64(bits.ReverseBytes16(initial))
	sum, carry = bits.Add64(sum, tail, 0)
	sum += carry
	return bits.ReverseBytes16(fold(sum))
}

// fold adds the four 16-bit words of sum into one, end-around.
func fold(sum uint64) uint16 {
	sum = sum>>32 + sum&0xffffffff
	sum = sum>>32 + sum&0xffffffff
	sum = sum>>16 + sum&0xffff
	sum = sum>>16 + sum&0xffff
	return uint16(sum)
}

// add is the ones'-complement sum of two words.
func add(a, b uint16) uint16 {
	sum := uint32(a) + uint32(b)
	return uint16(sum>>16 + sum)
}

// PseudoHeader is the sum of the pseudo-header that the checksums of TCP, UDP
// and ICMPv6 cover (RFC 9293, 3.1; RFC 8200, 8.1). length is the transport
// header's and payload's. It is what a partial checksum field holds.
func PseudoHeader(source, destination netip.Addr, protocol uint8, length int) uint16 {
	sum := add(addressSum(source), addressSum(destination))
	sum = add(sum, uint16(protocol))
	return add(add(sum, uint16(length>>16)), uint16(length))
}

func addressSum(addr netip.Addr) uint16 {
	if addr.Is4() {
		b := addr.As4()
		return add(be.Uint16(b[0:]), be.Uint16(b[2:]))
	}
	b := addr.As16()
	return fold(uint64(fold(be.Uint64(b[0:]))) + uint64(fold(be.Uint64(b[8:]))))
}

// updated is checksum after the sum of what it covers went from before to
// after (RFC 1624, equation 3: it never makes the wrong zero).
func updated(checksum, before, after uint16) uint16 {
	return ^add(add(^checksum, ^before), after)
}
