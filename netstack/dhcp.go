package netstack

import (
	"encoding/binary"
	"net/netip"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"vz.test/vz/netstack/link"
	"vz.test/vz/netstack/packet"
	"vz.test/vz/netstack/policy"
)

// lease is how long an address is given for. It is the same for good, so this
// only bounds how long a Machine goes on with what an Update has changed.
const lease = time.Hour

const (
	dhcpServerPort = 67
	dhcpClientPort = 68
)

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// isDHCP reports whether a packet is for the DHCP server.
func isDHCP(from *station, info *packet.Info) bool {
	return info.Protocol == packet.ProtocolUDP && info.L4 != 0 && !info.Fragment &&
		info.DestinationPort == dhcpServerPort && info.SourcePort == dhcpClientPort &&
		(info.Source.IsUnspecified() || info.Source == from.Address) &&
		(info.Destination == broadcast || info.Destination == from.network.Gateway)
}

// dhcp serves an attachment its own address and nothing else.
func (w *worker) dhcp(from *station, f *link.Frame) {
	info := &w.info
	if info.PartialChecksum {
		packet.SetTransportChecksum(f.Data, info)
	}
	if !packet.VerifyTransport(f.Data, info) {
		w.drop(from, policy.Malformed)
		return
	}
	request, err := dhcpv4.FromBytes(f.Data[info.Payload:info.Length])
	if err != nil || request.OpCode != dhcpv4.OpcodeBootRequest {
		w.drop(from, policy.Malformed)
		return
	}
	if string(request.ClientHWAddr) != string(from.MAC[:]) {
		w.drop(from, policy.SpoofedMAC)
		return
	}
	w.d.mu.RLock()
	search := w.d.world.spec.SearchDomains
	w.d.mu.RUnlock()
	reply := dhcpReply(from, search, request)
	if reply == nil {
		return
	}
	// RFC 2131, 4.1. The frame goes to the one Machine there is in any case.
	to := from.Address
	switch client := address(request.ClientIPAddr); {
	case reply.MessageType() == dhcpv4.MessageTypeNak:
		to = broadcast
	case client == from.Address:
	case request.IsBroadcast():
		to = broadcast
	}
	destination := from.MAC
	if to == broadcast {
		destination = packet.Broadcast
	}
	payload := reply.ToBytes()
	if len(payload) > answerRoom-packet.EthernetLen-packet.IPv4Len-packet.UDPLen {
		w.drop(from, policy.Malformed) // it asked us to copy back too much
		return
	}
	w.say(from, packet.BuildUDP(w.answer[:], destination, w.d.options.GatewayMAC,
		netip.AddrPortFrom(from.network.Gateway, dhcpServerPort), netip.AddrPortFrom(to, dhcpClientPort), payload))
}

// dhcpReply is the answer to a request, or nil where there is none
// (RFC 2131, 4.3).
func dhcpReply(from *station, search []string, request *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
	server := from.network.Gateway
	kind := dhcpv4.MessageTypeAck
	yours := from.Address
	switch request.MessageType() {
	case dhcpv4.MessageTypeDiscover:
		kind = dhcpv4.MessageTypeOffer
	case dhcpv4.MessageTypeRequest:
		if id := address(request.ServerIdentifier()); id.IsValid() && id != server {
			return nil // it has chosen another server
		}
		wanted := address(request.RequestedIPAddress())
		if !wanted.IsValid() || wanted.IsUnspecified() {
			wanted = address(request.ClientIPAddr)
		}
		if wanted != from.Address {
			kind = dhcpv4.MessageTypeNak
		}
	case dhcpv4.MessageTypeInform:
		yours = netip.IPv4Unspecified()
	default: // DECLINE, RELEASE: the address stays whose it is
		return nil
	}
	options := []dhcpv4.Modifier{
		dhcpv4.WithMessageType(kind),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(server.AsSlice())),
	}
	if kind != dhcpv4.MessageTypeNak {
		mtu := binary.BigEndian.AppendUint16(nil, uint16(from.network.MTU))
		options = append(options,
			dhcpv4.WithYourIP(yours.AsSlice()),
			dhcpv4.WithClientIP(request.ClientIPAddr),
			dhcpv4.WithNetmask(mask(from.network.Prefix)),
			dhcpv4.WithDNS(server.AsSlice()),
			dhcpv4.WithOption(dhcpv4.OptGeneric(dhcpv4.OptionInterfaceMTU, mtu)),
		)
		if from.router {
			options = append(options, dhcpv4.WithRouter(server.AsSlice()))
		}
		if len(search) > 0 {
			options = append(options,
				dhcpv4.WithOption(dhcpv4.OptDomainName(search[0])),
				dhcpv4.WithDomainSearchList(search...))
		}
		if request.MessageType() != dhcpv4.MessageTypeInform {
			options = append(options, dhcpv4.WithLeaseTime(uint32(lease/time.Second)))
		}
	}
	reply, err := dhcpv4.NewReplyFromRequest(request, options...)
	if err != nil {
		return nil
	}
	return reply
}

// address is an IPv4 address of package net's kind; not valid when it is none.
func address(ip []byte) netip.Addr {
	addr, _ := netip.AddrFromSlice(ip)
	return addr.Unmap()
}

func mask(prefix netip.Prefix) []byte {
	return binary.BigEndian.AppendUint32(nil, ^uint32(0)<<(32-prefix.Bits()))
}
