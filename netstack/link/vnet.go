package link

import (
	"encoding/binary"
	"errors"

	"vz.test/vz/netstack/packet"
)

// headerLen is the length of struct virtio_net_hdr_v1 (virtio 1.2, 5.1.6):
//
//	flags u8 | gso_type u8 | hdr_len u16 | gso_size u16 |
//	csum_start u16 | csum_offset u16 | num_buffers u16
//
// all little-endian.
const headerLen = 12

const (
	flagNeedsChecksum = 1
	flagDataValid     = 2

	gsoNone  = 0
	gsoTCP4  = 1
	gsoTCP6  = 4
	gsoUDPL4 = 5
	gsoECN   = 0x80
)

// Bounds on what a super-frame may be cut into, so that one frame can't cost
// thousands of segments: Linux sends no smaller TCP segments (TCP_MIN_GSO_SIZE)
// and no more datagrams at once (UDP_MAX_SEGMENTS).
const (
	minTCPSegment  = 8
	maxUDPSegments = 128
)

var errHeader = errors.New("link: malformed virtio_net_hdr")

// parseHeader sets f from a far side's header and frame, which f.Data becomes.
// Nothing in the header is believed that the frame doesn't bear out: a kernel
// doesn't check what it is told to complete or to cut. info is scratch space.
func parseHeader(header *[headerLen]byte, data []byte, f *Frame, info *packet.Info) error {
	*f = Frame{Data: data}
	flags, kind := header[0], header[1]
	if len(data) < packet.EthernetLen || len(data) > MaxFrame || flags&^(flagNeedsChecksum|flagDataValid) != 0 {
		return errHeader
	}
	if flags&flagNeedsChecksum == 0 {
		if kind != gsoNone { // virtio 1.2, 5.1.6.2: segmentation needs it
			return errHeader
		}
		return nil
	}
	if packet.Decode(data, info) != nil || info.L4 == 0 || info.Fragment {
		return errHeader
	}
	f.NeedsChecksum = true
	f.ChecksumStart = binary.LittleEndian.Uint16(header[6:])
	f.ChecksumOffset = binary.LittleEndian.Uint16(header[8:])
	offset, ok := checksumOffset(info.Protocol)
	if !ok || int(f.ChecksumStart) != info.L4 || f.ChecksumOffset != offset {
		return errHeader
	}
	if kind == gsoNone {
		return nil
	}
	// hdr_len is a hint, and what Linux gives is the length of its first
	// buffer; the headers themselves say it right.
	f.GSOSize = binary.LittleEndian.Uint16(header[4:])
	if int(binary.LittleEndian.Uint16(header[2:])) > len(data) {
		return errHeader
	}
	if _, err := packet.Segments(data, info, int(f.GSOSize)); err != nil { // a size of 0 as well
		return errHeader
	}
	switch size := int(f.GSOSize); {
	case kind&^gsoECN == gsoTCP4 && info.Protocol == packet.ProtocolTCP && !info.IPv6() && size >= minTCPSegment:
		f.Segmentation = GSOTCP4
	case kind&^gsoECN == gsoTCP6 && info.Protocol == packet.ProtocolTCP && info.IPv6() && size >= minTCPSegment:
		f.Segmentation = GSOTCP6
	case kind == gsoUDPL4 && info.Protocol == packet.ProtocolUDP && info.PayloadLen() <= size*maxUDPSegments:
		f.Segmentation = GSOUDP
	default:
		return errHeader
	}
	if info.PayloadLen() <= int(f.GSOSize) { // one segment: an ordinary frame
		f.Segmentation, f.GSOSize = GSONone, 0
		return nil
	}
	f.HeaderLen = uint16(info.Payload)
	return nil
}

// putHeader writes what virtio-net is told of f. A frame whose checksum is
// complete gets no flag: nobody here has verified it, so its reader does.
func putHeader(header *[headerLen]byte, f *Frame) {
	*header = [headerLen]byte{}
	if !f.NeedsChecksum {
		return
	}
	header[0] = flagNeedsChecksum
	binary.LittleEndian.PutUint16(header[6:], f.ChecksumStart)
	binary.LittleEndian.PutUint16(header[8:], f.ChecksumOffset)
	switch f.Segmentation {
	case GSONone:
		return
	case GSOTCP4:
		header[1] = gsoTCP4
	case GSOTCP6:
		header[1] = gsoTCP6
	case GSOUDP:
		header[1] = gsoUDPL4
	}
	binary.LittleEndian.PutUint16(header[2:], f.HeaderLen)
	binary.LittleEndian.PutUint16(header[4:], f.GSOSize)
	if flags := int(f.ChecksumStart) + 13; f.Segmentation != GSOUDP && flags < len(f.Data) && f.Data[flags]&packet.CWR != 0 {
		header[1] |= gsoECN // CWR belongs to the first segment only
	}
}

// checksumOffset is where in its header a protocol has its checksum; ok is
// false for protocols whose checksum is never left to be completed.
func checksumOffset(protocol uint8) (offset uint16, ok bool) {
	switch protocol {
	case packet.ProtocolTCP:
		return 16, true
	case packet.ProtocolUDP:
		return 6, true
	}
	return 0, false
}
