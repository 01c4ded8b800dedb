package packet

import "net/netip"

// originTTL is the TTL of what the route domain itself originates, as Linux's.
const originTTL = 64

// MaxICMPError is the room in bytes that BuildICMPError needs: an IPv6 error
// fills the minimum MTU (RFC 4443, 2.4c), an IPv4 one stays within 576 bytes
// (RFC 1812, 4.3.2.3).
const MaxICMPError = EthernetLen + 1280

const maxICMPv4Error = 576

// BuildICMPError writes the ICMP or ICMPv6 error of typ and code about the
// packet in frame, from the router's address from to the packet's source, back
// the way it came (the frame's MAC addresses swapped), and returns that part
// of dst, which has room for MaxICMPError bytes. mtu is the next hop's, in
// bytes, for "fragmentation needed" and "packet too big"; else 0 (in an IPv6
// parameter problem it is the pointer).
//
// It returns nil where no error may be sent: about ICMP errors, fragments
// behind the first, what was sent to or from more than one host (RFC 1812,
// 4.3.2.7; RFC 4443, 2.4e). frame is quoted as it is, but with its transport
// checksum completed. Limiting the rate is the caller's.
func BuildICMPError(dst, frame []byte, info *Info, from netip.Addr, typ, code uint8, mtu int) []byte {
	tooBig := info.IPv6() && typ == ICMPv6PacketTooBig
	if info.ICMPError() || info.FragmentOffset != 0 || !singleHost(info.Source) || SourceMAC(frame).Multicast() {
		return nil
	}
	if !tooBig && (DestinationMAC(frame).Multicast() || groupAddress(info.Destination)) {
		return nil
	}
	header, limit, protocol := IPv4Len, maxICMPv4Error, uint8(ProtocolICMP)
	if info.IPv6() {
		header, limit, protocol = IPv6Len, MaxICMPError-EthernetLen, ProtocolICMPv6
	}
	quote := frame[info.L3:info.Length]
	quote = quote[:min(len(quote), limit-header-ICMPLen)]
	dst = dst[:EthernetLen+header+ICMPLen+len(quote)]
	putIP(dst, frame, from, info.Source, protocol)
	if !info.IPv6() {
		dst[EthernetLen+1] = 0xc0 // precedence "internetwork control" (RFC 1812, 4.3.2.5)
		setIPv4Length(dst[EthernetLen:EthernetLen+IPv4Len], len(dst)-EthernetLen)
	}
	icmp := dst[EthernetLen+header:]
	icmp[0], icmp[1] = typ, code
	be.PutUint32(icmp[4:], uint32(mtu)) // IPv4: 16 bits unused, 16 bits of MTU (RFC 1191)
	copy(icmp[ICMPLen:], quote)
	if info.PartialChecksum && info.L4 != 0 {
		offset, _, _ := checksumOffset(info.Protocol)
		if at := info.L4 - info.L3 + offset; at+2 <= len(quote) {
			be.PutUint16(icmp[ICMPLen+at:], ^Sum(frame[info.L4:info.Length], 0))
		}
	}
	be.PutUint16(icmp[2:], 0)
	var sum uint16
	if info.IPv6() {
		sum = PseudoHeader(from, info.Source, protocol, len(icmp))
	}
	be.PutUint16(icmp[2:], ^Sum(icmp, sum))
	return dst
}

// BuildReset writes the TCP RST that refuses the segment in frame as a closed
// port would (RFC 9293, 3.10.7.1), back the way it came, and returns that part
// of dst, which has room for EthernetLen+IPv6Len+TCPLen bytes. It returns nil
// for what gets no RST: other protocols, fragments, RSTs, what was sent to or
// from more than one host.
func BuildReset(dst, frame []byte, info *Info) []byte {
	if info.Protocol != ProtocolTCP || info.L4 == 0 || info.Fragment || info.TCPFlags&RST != 0 ||
		!singleHost(info.Source) || !singleHost(info.Destination) ||
		SourceMAC(frame).Multicast() || DestinationMAC(frame).Multicast() {
		return nil
	}
	header := IPv4Len
	if info.IPv6() {
		header = IPv6Len
	}
	dst = dst[:EthernetLen+header+TCPLen]
	putIP(dst, frame, info.Destination, info.Source, ProtocolTCP)
	t := dst[EthernetLen+header:]
	clear(t)
	be.PutUint16(t[0:], info.DestinationPort)
	be.PutUint16(t[2:], info.SourcePort)
	t[12] = TCPLen / 4 << 4
	if info.TCPFlags&ACK != 0 {
		be.PutUint32(t[4:], info.Acknowledgement)
		t[13] = RST
	} else {
		length := uint32(info.PayloadLen())
		if info.TCPFlags&SYN != 0 {
			length++
		}
		if info.TCPFlags&FIN != 0 {
			length++
		}
		be.PutUint32(t[8:], info.Sequence+length)
		t[13] = RST | ACK
	}
	be.PutUint16(t[16:], ^Sum(t, PseudoHeader(info.Destination, info.Source, ProtocolTCP, TCPLen)))
	return dst
}

// BuildUDP writes a frame with one UDP datagram into dst, which has room for
// its headers and payload (EthernetLen+IPv6Len+UDPLen and the payload always
// do), and returns that part of it. Both addresses are of one family.
func BuildUDP(dst []byte, destinationMAC, sourceMAC MAC, source, destination netip.AddrPort, payload []byte) []byte {
	header := IPv4Len
	if source.Addr().Is6() {
		header = IPv6Len
	}
	dst = dst[:EthernetLen+header+UDPLen+len(payload)]
	u := dst[EthernetLen+header:]
	copy(u[UDPLen:], payload) // first: payload may lie in dst
	SetMACs(dst, destinationMAC, sourceMAC)
	putHeader(dst, source.Addr(), destination.Addr(), ProtocolUDP)
	be.PutUint16(u[0:], source.Port())
	be.PutUint16(u[2:], destination.Port())
	be.PutUint16(u[4:], uint16(len(u)))
	be.PutUint16(u[6:], PseudoHeader(source.Addr(), destination.Addr(), ProtocolUDP, len(u)))
	_ = CompleteChecksum(u, 0, 6)
	return dst
}

// putIP writes the Ethernet and IP headers of an answer to frame; dst has its
// final length.
func putIP(dst, frame []byte, source, destination netip.Addr, protocol uint8) {
	SetMACs(dst, SourceMAC(frame), DestinationMAC(frame))
	putHeader(dst, source, destination, protocol)
}

// putHeader writes EtherType and IP header; dst has its final length.
func putHeader(dst []byte, source, destination netip.Addr, protocol uint8) {
	h := dst[EthernetLen:]
	if source.Is6() {
		be.PutUint16(dst[12:], EtherTypeIPv6)
		be.PutUint32(h[0:], 6<<28)
		be.PutUint16(h[4:], uint16(len(h)-IPv6Len))
		h[6], h[7] = protocol, originTTL
		from, to := source.As16(), destination.As16()
		copy(h[8:], from[:])
		copy(h[24:], to[:])
		return
	}
	be.PutUint16(dst[12:], EtherTypeIPv4)
	h[0], h[1] = 0x45, 0
	be.PutUint32(h[4:], 0x4000) // identification 0, DF: atomic (RFC 6864)
	h[8], h[9] = originTTL, protocol
	from, to := source.As4(), destination.As4()
	copy(h[12:], from[:])
	copy(h[16:], to[:])
	setIPv4Length(h[:IPv4Len], len(h))
}

// singleHost reports whether addr can be one host's source address.
func singleHost(addr netip.Addr) bool {
	return !addr.IsUnspecified() && !addr.IsLoopback() && !groupAddress(addr)
}

// groupAddress reports whether addr names many hosts or none: multicast,
// broadcast, class E.
func groupAddress(addr netip.Addr) bool {
	return addr.IsMulticast() || addr.Is4() && addr.As4()[0] >= 240
}
