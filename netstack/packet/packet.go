// Package packet reads and writes Ethernet, ARP, IPv4, ICMP, UDP and TCP
// headers in place, without allocating: decoding, checksums, cutting of
// super-frames, fragments.
//
// Use: Decode a frame into an Info that the caller keeps for the next frame,
// rewrite in place with the Info beside it (both stay true to each other), and
// build answers into buffers that the caller owns. Lengths and offsets are in
// bytes, and every error is one of the package's values.
//
// It decides nothing; policy, flows and faults do. It has no clock, starts no
// goroutine, and reads no VLAN tags, no jumbograms and nothing above layer 4.
package packet

import "net/netip"

// Sizes of headers in bytes, without options.
const (
	EthernetLen = 14
	ARPLen      = 28
	IPv4Len     = 20
	IPv6Len     = 40
	TCPLen      = 20
	UDPLen      = 8
	ICMPLen     = 8
)

// EtherTypes that Decode knows (IEEE 802 numbers).
const (
	EtherTypeIPv4 = 0x0800
	EtherTypeARP  = 0x0806
	EtherTypeIPv6 = 0x86dd
)

// Protocol numbers (IANA).
const (
	ProtocolICMP   = 1
	ProtocolTCP    = 6
	ProtocolUDP    = 17
	ProtocolICMPv6 = 58
)

// TCP flags (RFC 9293, 3.1).
const (
	FIN = 1 << iota
	SYN
	RST
	PSH
	ACK
	URG
	ECE
	CWR
)

// ICMP types that vz speaks of (RFC 792, RFC 4443).
const (
	ICMPEchoReply    = 0
	ICMPUnreachable  = 3
	ICMPEcho         = 8
	ICMPTimeExceeded = 11
	ICMPParameter    = 12

	ICMPv6Unreachable  = 1
	ICMPv6PacketTooBig = 2
	ICMPv6TimeExceeded = 3
	ICMPv6Parameter    = 4
	ICMPv6Echo         = 128
	ICMPv6EchoReply    = 129
)

// Codes of ICMPUnreachable (RFC 792, RFC 1812) and ICMPv6Unreachable.
const (
	ICMPNetUnreachable   = 0
	ICMPHostUnreachable  = 1
	ICMPPortUnreachable  = 3
	ICMPFragmentNeeded   = 4
	ICMPAdminProhibited  = 13
	ICMPv6NoRoute        = 0
	ICMPv6Prohibited     = 1
	ICMPv6PortUnreached  = 4
	ICMPTTLExceeded      = 0
	ICMPReassemblyExpiry = 1
)

// MAC is an Ethernet address.
type MAC [6]byte

// Broadcast is everybody's address.
var Broadcast = MAC{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// Multicast reports whether m is a group's address (broadcast included).
func (m MAC) Multicast() bool { return m[0]&1 != 0 }

// String is the address as six pairs of hexadecimal digits with colons.
func (m MAC) String() string {
	const digits = "0123456789abcdef"
	text := make([]byte, 0, 17)
	for i, b := range m {
		if i > 0 {
			text = append(text, ':')
		}
		text = append(text, digits[b>>4], digits[b&15])
	}
	return string(text)
}

// SourceMAC is the sender in the Ethernet header of a decoded frame.
func SourceMAC(frame []byte) MAC { return MAC(frame[6:12]) }

// DestinationMAC is the receiver in the Ethernet header of a decoded frame.
func DestinationMAC(frame []byte) MAC { return MAC(frame[0:6]) }

// SetMACs writes both addresses of the Ethernet header.
func SetMACs(frame []byte, destination, source MAC) {
	copy(frame[0:6], destination[:])
	copy(frame[6:12], source[:])
}

// Info is what the headers of one frame say. It holds no pointers into the
// frame; offsets are from the frame's first byte.
type Info struct {
	EtherType uint16
	L3        int // offset of the IP header
	L4        int // offset of the transport header; 0 when there is none to read
	Payload   int // offset of the transport payload
	Length    int // end of the IP packet within the frame (the frame may be padded)

	Source, Destination         netip.Addr
	Protocol                    uint8 // IANA number
	TTL                         uint8
	DontFragment                bool
	Fragment                    bool   // any fragment: offset or more-fragments set
	FragmentOffset              uint16 // bytes
	MoreFragments               bool
	Identification              uint16
	SourcePort, DestinationPort uint16 // TCP and UDP
	TCPFlags                    uint8
	Sequence, Acknowledgement   uint32 // TCP
	ICMPType, ICMPCode          uint8
	ICMPIdentifier              uint16 // echo
	ICMPSequence                uint16 // echo

	// HasOptions: IPv4 options or IPv6 extension headers other than Fragment
	// are there. SourceRoute: one of them is a source route (IPv4 LSRR or
	// SSRR; IPv6 type 0, which RFC 5095 forbids).
	HasOptions  bool
	SourceRoute bool
	// FragmentID is the whole fragment identification: the Identification of
	// IPv4, the 32 bits of an IPv6 Fragment header.
	FragmentID uint32
	// PartialChecksum: the transport checksum holds only the pseudo-header's
	// sum (link.Frame.NeedsChecksum). Decode can't see it and sets it false;
	// whoever read the frame sets it, so that rewriting keeps it right.
	PartialChecksum bool
}

// IPv6 reports whether the packet is one of IPv6.
func (i *Info) IPv6() bool { return i.EtherType == EtherTypeIPv6 }

// ICMPError reports whether the packet is an ICMP or ICMPv6 error message,
// which quotes the packet that it is about (RFC 792, RFC 4443).
func (i *Info) ICMPError() bool {
	if i.L4 == 0 {
		return false
	}
	switch i.Protocol {
	case ProtocolICMP:
		switch i.ICMPType {
		case 3, 4, 5, 11, 12:
			return true
		}
	case ProtocolICMPv6:
		return i.ICMPType < 128
	}
	return false
}

// ICMPEcho reports whether the packet is an ICMP or ICMPv6 echo request or
// reply, so that ICMPIdentifier and ICMPSequence are its own.
func (i *Info) ICMPEcho() bool {
	if i.L4 == 0 {
		return false
	}
	switch i.Protocol {
	case ProtocolICMP:
		return i.ICMPType == ICMPEcho || i.ICMPType == ICMPEchoReply
	case ProtocolICMPv6:
		return i.ICMPType == ICMPv6Echo || i.ICMPType == ICMPv6EchoReply
	}
	return false
}

// PayloadLen is the number of transport payload bytes.
func (i *Info) PayloadLen() int { return i.Length - i.Payload }
