package flow

import (
	"encoding/binary"
	"net/netip"

	"vz.test/vz/netstack/packet"
)

// A Key names one direction of a flow by what its packets carry when they
// enter the route domain. An IPv4 address is in its mapped form (RFC 4291,
// 2.5.5.2), so that both families share a table.
//
// An echo request has its identifier for a source port, a reply for a
// destination port, so that Reverse works for them too. Protocols without
// ports have zero.
type Key struct {
	Source, Destination         [16]byte
	SourcePort, DestinationPort uint16
	Protocol                    uint8
}

// KeyOf is the Key of a decoded packet that is no fragment and no ICMP error.
func KeyOf(info *packet.Info) Key {
	k := Key{Source: info.Source.As16(), Destination: info.Destination.As16(), Protocol: info.Protocol,
		SourcePort: info.SourcePort, DestinationPort: info.DestinationPort}
	if info.ICMPEcho() {
		if info.ICMPType == packet.ICMPEcho || info.ICMPType == packet.ICMPv6Echo {
			k.SourcePort = info.ICMPIdentifier
		} else {
			k.DestinationPort = info.ICMPIdentifier
		}
	}
	return k
}

// NewKey is the Key of packets from one address and port to another.
func NewKey(protocol uint8, from, to netip.AddrPort) Key {
	return Key{Source: from.Addr().As16(), Destination: to.Addr().As16(),
		SourcePort: from.Port(), DestinationPort: to.Port(), Protocol: protocol}
}

// Reverse is the Key of an answer.
func (k Key) Reverse() Key {
	return Key{Source: k.Destination, Destination: k.Source,
		SourcePort: k.DestinationPort, DestinationPort: k.SourcePort, Protocol: k.Protocol}
}

// From is the source address and port.
func (k Key) From() netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(k.Source).Unmap(), k.SourcePort)
}

// To is the destination address and port.
func (k Key) To() netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(k.Destination).Unmap(), k.DestinationPort)
}

// shard spreads keys by what differs most among them. It need not be hard to
// guess: who fills one shard only waits for its lock more often.
func (k *Key) shard() uint32 {
	h := uint32(k.SourcePort)<<16 | uint32(k.DestinationPort)
	h ^= binary.BigEndian.Uint32(k.Source[12:]) ^ binary.LittleEndian.Uint32(k.Destination[12:])
	return h * 0x9e3779b1 >> (32 - shardBits)
}
