// Package packettest makes frames for tests, written byte by byte and summed
// the slow way, so that nothing of package packet vouches for itself.
//
// It makes well-formed Ethernet frames around TCP, UDP and ICMP over IPv4 and
// IPv6; tests spoil them as they need. It parses nothing.
package packettest

import (
	"encoding/binary"
	"net/netip"
)

// The MAC addresses of every frame made here: from A to B.
var (
	A = [6]byte{0x02, 0, 0, 0, 0, 0x0a}
	B = [6]byte{0x02, 0, 0, 0, 0, 0x0b}
)

// Sum is the Internet checksum's ones'-complement sum, word by word.
func Sum(parts ...[]byte) uint16 {
	var all []byte
	for _, part := range parts {
		all = append(all, part...)
	}
	if len(all)%2 == 1 {
		all = append(all, 0)
	}
	sum := 0
	for i := 0; i < len(all); i += 2 {
		sum += int(all[i])<<8 | int(all[i+1])
		if sum > 0xffff {
			sum -= 0xffff
		}
	}
	return uint16(sum)
}

// IP wraps payload (a transport header and what follows) into IPv4 or IPv6, as
// the addresses say, and Ethernet.
func IP(source, destination netip.Addr, protocol uint8, payload []byte) []byte {
	frame := append(append([]byte{}, B[:]...), A[:]...)
	if source.Is6() {
		frame = append(frame, 0x86, 0xdd, 0x60, 0, 0, 0)
		frame = binary.BigEndian.AppendUint16(frame, uint16(len(payload)))
		frame = append(frame, protocol, 64)
		frame = append(frame, source.AsSlice()...)
		frame = append(frame, destination.AsSlice()...)
		return append(frame, payload...)
	}
	header := []byte{0x45, 0, 0, 0, 0x12, 0x34, 0, 0, 64, protocol, 0, 0}
	binary.BigEndian.PutUint16(header[2:], uint16(20+len(payload)))
	header = append(header, source.AsSlice()...)
	header = append(header, destination.AsSlice()...)
	binary.BigEndian.PutUint16(header[10:], ^Sum(header))
	frame = append(frame, 0x08, 0x00)
	frame = append(frame, header...)
	return append(frame, payload...)
}

func pseudo(source, destination netip.Addr, protocol uint8, length int) []byte {
	b := append(source.AsSlice(), destination.AsSlice()...)
	b = binary.BigEndian.AppendUint32(b, uint32(length))
	return append(b, 0, 0, 0, protocol)
}

// TCP is a segment with 12 bytes of options (two NOPs and a timestamp).
func TCP(source, destination netip.AddrPort, sequence, acknowledgement uint32, flags uint8, payload []byte) []byte {
	t := binary.BigEndian.AppendUint16(nil, source.Port())
	t = binary.BigEndian.AppendUint16(t, destination.Port())
	t = binary.BigEndian.AppendUint32(t, sequence)
	t = binary.BigEndian.AppendUint32(t, acknowledgement)
	t = append(t, 8<<4, flags, 0x20, 0, 0, 0, 0, 0)
	t = append(t, 1, 1, 8, 10, 1, 2, 3, 4, 5, 6, 7, 8)
	t = append(t, payload...)
	binary.BigEndian.PutUint16(t[16:], ^Sum(pseudo(source.Addr(), destination.Addr(), 6, len(t)), t))
	return IP(source.Addr(), destination.Addr(), 6, t)
}

// UDP is a datagram.
func UDP(source, destination netip.AddrPort, payload []byte) []byte {
	u := binary.BigEndian.AppendUint16(nil, source.Port())
	u = binary.BigEndian.AppendUint16(u, destination.Port())
	u = binary.BigEndian.AppendUint16(u, uint16(8+len(payload)))
	u = append(u, 0, 0)
	u = append(u, payload...)
	checksum := ^Sum(pseudo(source.Addr(), destination.Addr(), 17, len(u)), u)
	if checksum == 0 {
		checksum = 0xffff
	}
	binary.BigEndian.PutUint16(u[6:], checksum)
	return IP(source.Addr(), destination.Addr(), 17, u)
}

// ICMP is a message of typ and code; rest are the four bytes behind the
// checksum.
func ICMP(source, destination netip.Addr, typ, code uint8, rest uint32, payload []byte) []byte {
	m := []byte{typ, code, 0, 0}
	m = binary.BigEndian.AppendUint32(m, rest)
	m = append(m, payload...)
	if source.Is6() {
		binary.BigEndian.PutUint16(m[2:], ^Sum(pseudo(source, destination, 58, len(m)), m))
		return IP(source, destination, 58, m)
	}
	binary.BigEndian.PutUint16(m[2:], ^Sum(m))
	return IP(source, destination, 1, m)
}

// Pattern is n bytes that repeat in no power of two, so that a piece that is
// missing or in the wrong place shows.
func Pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i/251)
	}
	return b
}
