package packet

import "errors"

// What keeps a packet from being cut.
var (
	ErrSplit  = errors.New("packet: not TCP or UDP that can be segmented")
	ErrBuffer = errors.New("packet: buffer too small")
)

// Segments is how many segments of up to size payload bytes a TCP or UDP
// super-frame makes: at least one. ErrSplit says that it makes none: another
// protocol, a fragment, a UDP datagram shorter than its packet.
func Segments(frame []byte, info *Info, size int) (int, error) {
	if size <= 0 || info.L4 == 0 || info.Fragment {
		return 0, ErrSplit
	}
	switch info.Protocol {
	case ProtocolTCP:
	case ProtocolUDP:
		if int(be.Uint16(frame[info.L4+4:])) != info.Length-info.L4 {
			return 0, ErrSplit
		}
	default:
		return 0, ErrSplit
	}
	return max(1, (info.PayloadLen()+size-1)/size), nil
}

// PutSegment writes segment number index (from 0) of a super-frame into dst,
// which has room for info.Payload+size bytes, and returns that part of it. Its
// checksums are complete. Sequence numbers and IPv4 identifications go up from
// the super-frame's; CWR is the first segment's only, FIN and PSH the last's
// (as hardware does it, and RFC 3168, 6.1.2 wants). size and index fit what
// Segments said of the same frame.
func PutSegment(dst, frame []byte, info *Info, size, index int) []byte {
	from := info.Payload + index*size
	to := min(from+size, info.Length)
	dst = dst[:info.Payload+to-from]
	copy(dst, frame[:info.Payload])
	copy(dst[info.Payload:], frame[from:to])

	h := dst[info.L3:info.L4]
	if info.IPv6() {
		be.PutUint16(h[4:], uint16(len(dst)-info.L3-IPv6Len))
	} else {
		be.PutUint16(h[4:], info.Identification+uint16(index))
		setIPv4Length(h, len(dst)-info.L3)
	}

	t := dst[info.L4:]
	field := 16
	if info.Protocol == ProtocolTCP {
		be.PutUint32(t[4:], info.Sequence+uint32(index*size))
		if index > 0 {
			t[13] &^= CWR
		}
		if to < info.Length {
			t[13] &^= FIN | PSH
		}
	} else {
		field = 6
		be.PutUint16(t[4:], uint16(len(t)))
		if !info.PartialChecksum && be.Uint16(t[6:]) == 0 && !info.IPv6() {
			return dst // its sender wants none
		}
	}
	be.PutUint16(t[field:], PseudoHeader(info.Source, info.Destination, info.Protocol, len(t)))
	_ = CompleteChecksum(t, 0, field)
	return dst
}

// Split cuts a TCP or UDP super-frame into segments of up to size payload
// bytes and hands each to emit, which doesn't keep it and returns false to
// stop. buffer, of at least info.Payload+size bytes, holds the segment; frame
// is left as it was. A frame of one segment comes out with its checksum
// complete. Errors: ErrSplit, ErrBuffer.
func Split(frame []byte, info *Info, size int, buffer []byte, emit func(segment []byte) bool) error {
	n, err := Segments(frame, info, size)
	if err != nil {
		return err
	}
	if len(buffer) < info.Payload+min(size, info.PayloadLen()) {
		return ErrBuffer
	}
	for index := range n {
		if !emit(PutSegment(buffer, frame, info, size, index)) {
			break
		}
	}
	return nil
}
