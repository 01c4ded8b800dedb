package packet

import "net/netip"

// RewriteSource puts addr and port in the place of the packet's source, in
// frame and info, and updates the checksums incrementally (RFC 1624), so that
// a wrong one stays wrong. addr is of the packet's family; port is the TCP or
// UDP port, or an echo request's identifier, and without effect where the
// packet has none (fragments behind the first, echo replies, other protocols).
//
// A partial checksum stays partial and an absent UDP checksum stays absent.
func RewriteSource(frame []byte, info *Info, addr netip.Addr, port uint16) {
	rewrite(frame, info, addr, port, true)
}

// RewriteDestination is RewriteSource for the destination; port is an echo
// reply's identifier, and without effect on an echo request.
func RewriteDestination(frame []byte, info *Info, addr netip.Addr, port uint16) {
	rewrite(frame, info, addr, port, false)
}

// RewriteEmbeddedSource is RewriteSource for the packet that an ICMP error
// quotes (RFC 5508, 4.2). info is the error's own, embedded what
// DecodeEmbedded made of it. Checksums in the quote are updated as far as the
// quote reaches, and the error's own with them.
func RewriteEmbeddedSource(frame []byte, info, embedded *Info, addr netip.Addr, port uint16) {
	rewriteEmbedded(frame, info, embedded, addr, port, true)
}

// RewriteEmbeddedDestination is RewriteEmbeddedSource for the destination.
func RewriteEmbeddedDestination(frame []byte, info, embedded *Info, addr netip.Addr, port uint16) {
	rewriteEmbedded(frame, info, embedded, addr, port, false)
}

func rewriteEmbedded(frame []byte, info, embedded *Info, addr netip.Addr, port uint16, source bool) {
	// All that can change lies between the quoted IP header and the end of the
	// longest fixed transport header behind it.
	end := embedded.Length
	if embedded.L4 != 0 {
		end = min(end, embedded.L4+TCPLen)
	}
	quote := frame[embedded.L3:end]
	before := Sum(quote, 0)
	rewrite(frame, embedded, addr, port, source)
	field := frame[info.L4+2:]
	be.PutUint16(field, updated(be.Uint16(field), before, Sum(quote, 0)))
}

func rewrite(frame []byte, info *Info, addr netip.Addr, port uint16, source bool) {
	if addr.Is6() != info.IPv6() {
		panic("packet: address of another family")
	}
	h := frame[info.L3:]
	old := info.Destination
	if source {
		old = info.Source
	}
	before, after := addressSum(old), addressSum(addr)
	if info.IPv6() {
		at := 24
		if source {
			at = 8
		}
		b := addr.As16()
		copy(h[at:], b[:])
	} else {
		at := 16
		if source {
			at = 12
		}
		b := addr.As4()
		copy(h[at:], b[:])
		be.PutUint16(h[10:], updated(be.Uint16(h[10:]), before, after))
	}
	if source {
		info.Source = addr
	} else {
		info.Destination = addr
	}
	if info.L4 == 0 {
		return
	}
	t := frame[info.L4:info.Length]
	switch info.Protocol {
	case ProtocolTCP, ProtocolUDP:
		at, number := 2, &info.DestinationPort
		if source {
			at, number = 0, &info.SourcePort
		}
		field := 16
		if info.Protocol == ProtocolUDP {
			field = 6
		}
		be.PutUint16(t[at:], port)
		was := *number
		*number = port
		if field+2 > len(t) { // a short quote
			return
		}
		checksum := be.Uint16(t[field:])
		switch {
		case info.PartialChecksum: // not a complement, and covers no ports
			checksum = add(add(checksum, ^before), after)
		case info.Protocol == ProtocolUDP && checksum == 0: // none was made
		default:
			checksum = updated(checksum, add(before, was), add(after, port))
			if info.Protocol == ProtocolUDP && checksum == 0 {
				checksum = 0xffff
			}
		}
		be.PutUint16(t[field:], checksum)
	case ProtocolICMP, ProtocolICMPv6:
		if !info.IPv6() { // no pseudo-header
			before, after = 0, 0
		}
		if info.ICMPEcho() {
			request := info.ICMPType == ICMPEcho || info.ICMPType == ICMPv6Echo
			if request == source {
				before, after = add(before, info.ICMPIdentifier), add(after, port)
				be.PutUint16(t[4:], port)
				info.ICMPIdentifier = port
			}
		}
		be.PutUint16(t[2:], updated(be.Uint16(t[2:]), before, after))
	}
}

// DecrementTTL takes one from the TTL or hop limit, in frame and info. It does
// nothing and reports false when none is left to travel on, and the packet is
// then to be answered by a Time Exceeded.
func DecrementTTL(frame []byte, info *Info) bool {
	if info.TTL <= 1 {
		return false
	}
	info.TTL--
	h := frame[info.L3:]
	if info.IPv6() {
		h[7] = info.TTL
		return true
	}
	before := be.Uint16(h[8:])
	h[8] = info.TTL
	be.PutUint16(h[10:], updated(be.Uint16(h[10:]), before, be.Uint16(h[8:])))
	return true
}

// CompleteChecksum finishes a partial checksum: the field at start+offset
// holds the pseudo-header's sum, and what is summed reaches from start to the
// end of data, which is the frame without its padding (frame[:info.Length]).
// ErrLength means that the field isn't in data.
func CompleteChecksum(data []byte, start, offset int) error {
	if start < 0 || offset < 0 || start+offset+2 > len(data) {
		return ErrLength
	}
	checksum := ^Sum(data[start:], 0)
	if checksum == 0 {
		// Zero means "none" to UDP; to everybody else the two are equal.
		checksum = 0xffff
	}
	be.PutUint16(data[start+offset:], checksum)
	return nil
}

// checksumOffset is where in its header a protocol's checksum is, and whether
// it covers a pseudo-header. ok is false for protocols without one.
func checksumOffset(protocol uint8) (offset int, pseudo, ok bool) {
	switch protocol {
	case ProtocolTCP:
		return 16, true, true
	case ProtocolUDP:
		return 6, true, true
	case ProtocolICMP:
		return 2, false, true
	case ProtocolICMPv6:
		return 2, true, true
	}
	return 0, false, false
}

// transport is the part of frame that the transport checksum covers. A UDP
// datagram may be shorter than its IP packet.
func transport(frame []byte, info *Info) []byte {
	t := frame[info.L4:info.Length]
	if info.Protocol == ProtocolUDP {
		t = t[:min(len(t), int(be.Uint16(t[4:])))]
	}
	return t
}

// VerifyTransport reports whether the transport checksum is right; a partial
// one when it is the pseudo-header's sum. It is true where there is nothing
// that could be verified: fragments, UDP over IPv4 without a checksum, other
// protocols.
func VerifyTransport(frame []byte, info *Info) bool {
	offset, pseudo, ok := checksumOffset(info.Protocol)
	if !ok || info.L4 == 0 || info.Fragment {
		return true
	}
	t := transport(frame, info)
	if len(t) < offset+2 { // a short quote
		return true
	}
	field := be.Uint16(t[offset:])
	if info.Protocol == ProtocolUDP && field == 0 && !info.PartialChecksum {
		return !info.IPv6()
	}
	var sum uint16
	if pseudo {
		sum = PseudoHeader(info.Source, info.Destination, info.Protocol, len(t))
	}
	if info.PartialChecksum {
		return field == sum || field^sum == 0xffff && (field == 0 || sum == 0)
	}
	return Sum(t, sum) == 0xffff
}

// SetTransportChecksum computes the transport checksum anew, whatever stood in
// its field, and makes info say that it is complete. It does nothing to
// fragments and to protocols without a checksum.
func SetTransportChecksum(frame []byte, info *Info) {
	offset, pseudo, ok := checksumOffset(info.Protocol)
	if !ok || info.L4 == 0 || info.Fragment {
		return
	}
	t := transport(frame, info)
	if len(t) < offset+2 { // a short quote
		return
	}
	var sum uint16
	if pseudo {
		sum = PseudoHeader(info.Source, info.Destination, info.Protocol, len(t))
	}
	be.PutUint16(t[offset:], sum)
	_ = CompleteChecksum(t, 0, offset) // Decode has seen that it is there
	info.PartialChecksum = false
}

// SetPartialChecksum puts the pseudo-header's sum where the transport checksum
// goes, and makes info say so: a virtio device, or CompleteChecksum, does the
// rest. TCP and UDP only; it does nothing to others.
func SetPartialChecksum(frame []byte, info *Info) {
	if info.L4 == 0 || info.Fragment || info.Protocol != ProtocolTCP && info.Protocol != ProtocolUDP {
		return
	}
	offset, _, _ := checksumOffset(info.Protocol)
	t := transport(frame, info)
	be.PutUint16(t[offset:], PseudoHeader(info.Source, info.Destination, info.Protocol, len(t)))
	info.PartialChecksum = true
}

// setIPv4Length writes the total length and the header's checksum.
func setIPv4Length(header []byte, total int) {
	be.PutUint16(header[2:], uint16(total))
	be.PutUint16(header[10:], 0)
	be.PutUint16(header[10:], ^Sum(header, 0))
}
