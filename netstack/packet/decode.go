package packet

import (
	"encoding/binary"
	"errors"
	"net/netip"
)

// What is wrong with a frame. They are values, so that refusing one costs no
// allocation, and each is a counted reason further up.
var (
	ErrTruncated    = errors.New("packet: shorter than its headers say")
	ErrVLAN         = errors.New("packet: VLAN tag")
	ErrEtherType    = errors.New("packet: unknown EtherType")
	ErrVersion      = errors.New("packet: IP version differs from the EtherType's")
	ErrHeaderLength = errors.New("packet: bad header length")
	ErrLength       = errors.New("packet: bad length field")
	ErrChecksum     = errors.New("packet: bad IPv4 header checksum")
	ErrOptions      = errors.New("packet: bad options")
	ErrExtensions   = errors.New("packet: bad or too many extension headers")
	ErrFragment     = errors.New("packet: impossible fragment")
	ErrARP          = errors.New("packet: not ARP for IPv4 over Ethernet")
	ErrNotQuoted    = errors.New("packet: no quoted packet")
)

var be = binary.BigEndian

// Decode reads the headers of one Ethernet II frame into info, whose former
// content is gone. The IPv4 header checksum is verified, transport checksums
// are not (see VerifyTransport). A frame may be padded, or be a super-frame of
// up to 65535 bytes of IP. Of ARP only EtherType, L3 and Length are set; see
// DecodeARP. Errors are this package's; info is then of no use.
func Decode(frame []byte, info *Info) error {
	*info = Info{}
	if len(frame) < EthernetLen {
		return ErrTruncated
	}
	info.EtherType = be.Uint16(frame[12:])
	info.L3 = EthernetLen
	switch info.EtherType {
	case EtherTypeIPv4:
		return decodeIPv4(frame, info, false)
	case EtherTypeIPv6:
		return decodeIPv6(frame, info, false)
	case EtherTypeARP:
		if len(frame) < EthernetLen+ARPLen {
			return ErrTruncated
		}
		info.Length = EthernetLen + ARPLen
		return nil
	case 0x8100, 0x88a8, 0x9100:
		return ErrVLAN
	}
	return ErrEtherType
}

// DecodeEmbedded reads the packet that the ICMP error in frame quotes (info is
// the error's own). Offsets in embedded are from the frame's first byte, and
// its Length ends where the quote ends. The quote may stop 8 bytes into the
// transport header (RFC 792); fields behind that are zero. A quoted IPv4
// header with a bad checksum is ErrChecksum (RFC 5508, REQ-3a).
func DecodeEmbedded(frame []byte, info, embedded *Info) error {
	if !info.ICMPError() {
		return ErrNotQuoted
	}
	*embedded = Info{EtherType: info.EtherType, L3: info.Payload}
	frame = frame[:info.Length]
	if info.IPv6() {
		return decodeIPv6(frame, embedded, true)
	}
	return decodeIPv4(frame, embedded, true)
}

// decodeIPv4 reads the header at info.L3. A quoted packet may end before its
// length says.
func decodeIPv4(frame []byte, info *Info, quoted bool) error {
	h := frame[info.L3:]
	if len(h) < IPv4Len {
		return ErrTruncated
	}
	if h[0]>>4 != 4 {
		return ErrVersion
	}
	header := int(h[0]&15) * 4
	if header < IPv4Len {
		return ErrHeaderLength
	}
	total := int(be.Uint16(h[2:]))
	if total < header {
		return ErrLength
	}
	if len(h) < header || len(h) < total && !quoted {
		return ErrTruncated
	}
	if Sum(h[:header], 0) != 0xffff {
		return ErrChecksum
	}
	info.Length = info.L3 + min(total, len(h))
	info.TTL = h[8]
	info.Protocol = h[9]
	info.Source = netip.AddrFrom4([4]byte(h[12:16]))
	info.Destination = netip.AddrFrom4([4]byte(h[16:20]))
	info.Identification = be.Uint16(h[4:])
	info.FragmentID = uint32(info.Identification)
	flags := be.Uint16(h[6:])
	info.DontFragment = flags&0x4000 != 0
	info.MoreFragments = flags&0x2000 != 0
	info.FragmentOffset = flags & 0x1fff * 8
	info.Fragment = flags&0x3fff != 0
	if header > IPv4Len {
		info.HasOptions = true
		if err := scanOptions(h[IPv4Len:header], info); err != nil {
			return err
		}
	}
	if info.Fragment && !quoted {
		if err := checkFragment(info, header, total-header); err != nil {
			return err
		}
	}
	return decodeTransport(frame, info, info.L3+header, quoted)
}

// scanOptions walks IPv4 options (RFC 791, 3.1).
func scanOptions(options []byte, info *Info) error {
	for len(options) > 0 {
		switch options[0] {
		case 0: // end
			return nil
		case 1: // no operation
			options = options[1:]
			continue
		case 131, 137: // loose and strict source route
			info.SourceRoute = true
		}
		if len(options) < 2 || options[1] < 2 || int(options[1]) > len(options) {
			return ErrOptions
		}
		options = options[options[1]:]
	}
	return nil
}

// checkFragment refuses what no sender makes: a middle piece of an odd size,
// an empty one, and one that ends behind the largest packet ("ping of death").
func checkFragment(info *Info, header, payload int) error {
	if payload == 0 || info.MoreFragments && payload%8 != 0 ||
		header+int(info.FragmentOffset)+payload > 65535 {
		return ErrFragment
	}
	return nil
}

// maxExtensions bounds the walk along IPv6 extension headers. Each kind is
// allowed once, Destination Options twice (RFC 8200, 4.1).
const maxExtensions = 6

func decodeIPv6(frame []byte, info *Info, quoted bool) error {
	h := frame[info.L3:]
	if len(h) < IPv6Len {
		return ErrTruncated
	}
	if h[0]>>4 != 6 {
		return ErrVersion
	}
	payload := int(be.Uint16(h[4:]))
	if len(h) < IPv6Len+payload && !quoted {
		return ErrTruncated
	}
	end := info.L3 + min(IPv6Len+payload, len(h))
	info.Length = end
	info.TTL = h[7]
	info.Source = netip.AddrFrom16([16]byte(h[8:24]))
	info.Destination = netip.AddrFrom16([16]byte(h[24:40]))
	info.DontFragment = true // routers never fragment (RFC 8200, 5)

	next, at := h[6], info.L3+IPv6Len
	for range maxExtensions {
		var size int
		switch next {
		case 0, 43, 60: // hop-by-hop, routing, destination options
			if at+8 > end {
				return ErrTruncated
			}
			if next == 0 && at != info.L3+IPv6Len {
				return ErrExtensions // only right behind the base header
			}
			size = 8 + int(frame[at+1])*8
			info.HasOptions = true
			if next == 43 && frame[at+2] == 0 {
				info.SourceRoute = true
			}
		case 44: // fragment
			if at+8 > end {
				return ErrTruncated
			}
			if info.FragmentID != 0 || info.Fragment {
				return ErrExtensions
			}
			size = 8
			field := be.Uint16(frame[at+2:])
			info.FragmentID = be.Uint32(frame[at+4:])
			info.FragmentOffset = field &^ 7
			info.MoreFragments = field&1 != 0
			info.Fragment = field&^6 != 0 // an atomic fragment is whole (RFC 6946)
			if info.Fragment && !quoted {
				if err := checkFragment(info, at-info.L3-IPv6Len, end-at-8); err != nil {
					return err
				}
			}
		default:
			info.Protocol = next
			return decodeTransport(frame, info, at, quoted)
		}
		if at+size > end {
			return ErrTruncated
		}
		next = frame[at]
		at += size
		if info.FragmentOffset != 0 {
			info.Protocol = next
			return decodeTransport(frame, info, at, quoted)
		}
	}
	return ErrExtensions
}

// decodeTransport reads the transport header at offset at. A fragment that
// doesn't hold all of it has L4 zero: no ports are invented for it.
func decodeTransport(frame []byte, info *Info, at int, quoted bool) error {
	info.Payload = at
	if info.FragmentOffset != 0 {
		return nil
	}
	h := frame[at:info.Length]
	need := 0
	switch info.Protocol {
	case ProtocolTCP:
		need = TCPLen
	case ProtocolUDP:
		need = UDPLen
	case ProtocolICMP, ProtocolICMPv6:
		if (info.Protocol == ProtocolICMPv6) != info.IPv6() {
			return nil
		}
		need = ICMPLen
	default:
		return nil
	}
	if quoted {
		need = 8
	}
	if len(h) < need {
		if info.Fragment {
			return nil
		}
		return ErrTruncated
	}
	switch info.Protocol {
	case ProtocolTCP:
		header := TCPLen
		info.Sequence = be.Uint32(h[4:])
		if len(h) >= TCPLen {
			header = int(h[12]>>4) * 4
			info.Acknowledgement = be.Uint32(h[8:])
			info.TCPFlags = h[13]
		}
		if header < TCPLen {
			return ErrHeaderLength
		}
		if header > len(h) {
			switch {
			case quoted:
				header = len(h)
			case info.Fragment:
				return nil
			default:
				return ErrHeaderLength
			}
		}
		info.SourcePort = be.Uint16(h)
		info.DestinationPort = be.Uint16(h[2:])
		info.Payload = at + header
	case ProtocolUDP:
		length := int(be.Uint16(h[4:]))
		if length < UDPLen || length > len(h) && !quoted && !info.Fragment {
			return ErrLength
		}
		info.SourcePort = be.Uint16(h)
		info.DestinationPort = be.Uint16(h[2:])
		info.Payload = at + UDPLen
	default:
		info.ICMPType = h[0]
		info.ICMPCode = h[1]
		info.Payload = at + ICMPLen
	}
	info.L4 = at
	if info.ICMPEcho() {
		info.ICMPIdentifier = be.Uint16(h[4:])
		info.ICMPSequence = be.Uint16(h[6:])
	}
	return nil
}

// ARP is an ARP message for IPv4 over Ethernet (RFC 826).
type ARP struct {
	Operation     uint16 // ARPRequest or ARPReply
	SenderMAC     MAC
	SenderAddress netip.Addr
	TargetMAC     MAC
	TargetAddress netip.Addr
}

// Operations of ARP.
const (
	ARPRequest = 1
	ARPReply   = 2
)

// DecodeARP reads the ARP message of a frame whose EtherType is ARP's.
func DecodeARP(frame []byte) (ARP, error) {
	if len(frame) < EthernetLen+ARPLen {
		return ARP{}, ErrTruncated
	}
	h := frame[EthernetLen:]
	if be.Uint16(frame[12:]) != EtherTypeARP || be.Uint64(h)>>16 != 0x0001_0800_0604 {
		return ARP{}, ErrARP
	}
	return ARP{
		Operation:     be.Uint16(h[6:]),
		SenderMAC:     MAC(h[8:14]),
		SenderAddress: netip.AddrFrom4([4]byte(h[14:18])),
		TargetMAC:     MAC(h[18:24]),
		TargetAddress: netip.AddrFrom4([4]byte(h[24:28])),
	}, nil
}

// PutARP writes an Ethernet frame with message into frame, which has room for
// EthernetLen+ARPLen bytes, and returns that part of it.
func PutARP(frame []byte, destination, source MAC, message ARP) []byte {
	frame = frame[:EthernetLen+ARPLen]
	SetMACs(frame, destination, source)
	be.PutUint16(frame[12:], EtherTypeARP)
	h := frame[EthernetLen:]
	be.PutUint64(h, 0x0001_0800_0604<<16|uint64(message.Operation))
	sender, target := message.SenderAddress.As4(), message.TargetAddress.As4()
	copy(h[8:], message.SenderMAC[:])
	copy(h[14:], sender[:])
	copy(h[18:], message.TargetMAC[:])
	copy(h[24:], target[:])
	return frame
}

// Reply is the answer to a request: mac is who has the target's address.
func (a ARP) Reply(mac MAC) ARP {
	return ARP{
		Operation:     ARPReply,
		SenderMAC:     mac,
		SenderAddress: a.TargetAddress,
		TargetMAC:     a.SenderMAC,
		TargetAddress: a.SenderAddress,
	}
}
