package netstack_test

import (
	"net"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"vz.test/vz/netstack"
	"vz.test/vz/netstack/link"
	"vz.test/vz/netstack/netstacktest"
	"vz.test/vz/netstack/packet"
	"vz.test/vz/netstack/packet/packettest"
	"vz.test/vz/netstack/policy"
)

var (
	ip = netip.MustParseAddr
	at = netip.MustParseAddrPort

	webBack, dbBack    = ip("10.20.0.2"), ip("10.20.0.3")
	clientEdge         = ip("100.64.0.4")
	webFront           = ip("10.10.0.2")
	backGateway, shop_ = ip("10.20.0.1"), ip("198.51.100.1")
)

// tcp is a segment's frame without payload.
func tcp(from, to string, flags uint8) []byte {
	return packettest.TCP(at(from), at(to), 1000, 2000, flags, nil)
}

func udp(from, to string, size int) []byte {
	return packettest.UDP(at(from), at(to), packettest.Pattern(size))
}

// set changes bytes of a frame and makes its IPv4 header checksum right again.
func set(frame []byte, offset int, bytes ...byte) []byte {
	copy(frame[offset:], bytes)
	frame[24], frame[25] = 0, 0
	sum := ^packettest.Sum(frame[14 : 14+int(frame[14]&15)*4])
	frame[24], frame[25] = byte(sum>>8), byte(sum)
	return frame
}

// Every frame belongs to one port, one path or one refusal with a reason: each
// of these is answered by nothing and counted once.
func TestSilentDrops(t *testing.T) {
	spec := netstacktest.Shop()
	good := func() []byte { return tcp("10.20.0.2:40000", "10.20.0.3:5432", packet.SYN) }
	arp := func(senderMAC packet.MAC, sender, target netip.Addr) func(*netstacktest.Line) []byte {
		return func(l *netstacktest.Line) []byte {
			return packet.PutARP(make([]byte, 42), packet.Broadcast, l.Attachment.MAC, packet.ARP{
				Operation: packet.ARPRequest, SenderMAC: senderMAC, SenderAddress: sender, TargetAddress: target})
		}
	}
	own := spec.Attachments[1].MAC
	for _, test := range []struct {
		name  string
		why   policy.Reason // Allowed: not even counted
		frame func(l *netstacktest.Line) []byte
	}{
		{"source MAC", policy.SpoofedMAC, func(l *netstacktest.Line) []byte {
			f := good()
			packet.SetMACs(f, netstacktest.GatewayMAC, packet.MAC{2, 9, 9, 9, 9, 9})
			return f
		}},
		{"source address", policy.SpoofedAddress, func(*netstacktest.Line) []byte {
			return tcp("10.20.0.9:1", "10.20.0.3:5432", packet.SYN)
		}},
		{"another attachment's address", policy.SpoofedAddress, func(*netstacktest.Line) []byte {
			return tcp("10.10.0.2:1", "10.20.0.3:5432", packet.SYN)
		}},
		{"no source address", policy.SpoofedAddress, func(*netstacktest.Line) []byte {
			return udp("0.0.0.0:68", "10.20.0.3:5000", 1)
		}},
		{"foreign MAC", policy.ForeignMAC, func(l *netstacktest.Line) []byte {
			f := good()
			packet.SetMACs(f, packet.MAC{2, 9, 9, 9, 9, 9}, l.Attachment.MAC)
			return f
		}},
		{"broadcast MAC, unicast IP", policy.ForeignMAC, func(l *netstacktest.Line) []byte {
			f := good()
			packet.SetMACs(f, packet.Broadcast, l.Attachment.MAC)
			return f
		}},
		{"ARP of another MAC", policy.SpoofedMAC, arp(packet.MAC{2, 9, 9, 9, 9, 9}, webBack, dbBack)},
		{"ARP of another address", policy.SpoofedAddress, arp(own, dbBack, webBack)},
		{"ARP off link", policy.NoRoute, arp(own, webBack, ip("192.0.2.1"))},
		{"ARP for itself", policy.Allowed, arp(own, webBack, webBack)},
		{"duplicate-address probe", policy.Allowed, arp(own, netip.IPv4Unspecified(), webBack)},
		{"multicast", policy.Multicast, func(*netstacktest.Line) []byte { return udp("10.20.0.2:5353", "224.0.0.251:5353", 9) }},
		{"broadcast", policy.Multicast, func(*netstacktest.Line) []byte { return udp("10.20.0.2:5353", "255.255.255.255:9", 9) }},
		{"directed broadcast", policy.Multicast, func(*netstacktest.Line) []byte { return udp("10.20.0.2:5353", "10.20.0.255:9", 9) }},
		{"loopback", policy.Multicast, func(*netstacktest.Line) []byte { return udp("10.20.0.2:5353", "127.0.0.1:9", 9) }},
		{"IPv6", policy.UnknownProtocol, func(*netstacktest.Line) []byte { return udp("[fe80::1]:1", "[fe80::2]:2", 9) }},
		{"VLAN", policy.UnknownProtocol, func(*netstacktest.Line) []byte { f := good(); f[12], f[13] = 0x81, 0; return f }},
		{"bad header checksum", policy.Malformed, func(*netstacktest.Line) []byte { f := good(); f[24] ^= 1; return f }},
		{"truncated", policy.Malformed, func(*netstacktest.Line) []byte { return good()[:30] }},
		{"source route", policy.SourceRouted, func(*netstacktest.Line) []byte {
			f := good()
			f = append(append(f[:34:34], 131, 3, 4, 0), f[34:]...)
			f[14], f[17] = 0x46, f[17]+4
			return set(f, 14)
		}},
		{"impossible fragment", policy.FragmentRefused, func(*netstacktest.Line) []byte {
			return set(udp("10.20.0.2:1", "10.20.0.3:5000", 99), 20, 0x20, 0) // more to come, odd length
		}},
		{"unrelated ICMP error", policy.UnrelatedError, func(*netstacktest.Line) []byte {
			return packettest.ICMP(webBack, dbBack, 3, 3, 0, tcp("10.20.0.3:1", "10.20.0.2:2", packet.SYN)[14:])
		}},
		{"redirect", policy.UnrelatedError, func(*netstacktest.Line) []byte {
			return packettest.ICMP(webBack, dbBack, 5, 1, 0, udp("10.20.0.3:5000", "10.20.0.2:2", 10)[14:])
		}},
		{"stray echo reply", policy.NoFlow, func(*netstacktest.Line) []byte {
			return packettest.ICMP(webBack, dbBack, 0, 0, 7<<16|1, nil)
		}},
		{"stray RST", policy.NoFlow, func(*netstacktest.Line) []byte {
			return tcp("10.20.0.2:40000", "10.20.0.3:5432", packet.RST)
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			d := netstacktest.New(t, spec, netstack.Options{})
			web := netstacktest.Plug(t, d, spec, "web", "back", 1500, netstacktest.None)
			frame := test.frame(web)
			if [6]byte(frame[6:12]) == packettest.A { // as packettest made it
				packet.SetMACs(frame, netstacktest.GatewayMAC, web.Attachment.MAC)
			}
			web.SendRaw(link.Frame{Data: frame})
			web.Quiet()
			drops := d.Drops()
			if test.why == policy.Allowed {
				assert.Empty(t, drops)
				return
			}
			assert.Equal(t, []netstack.DropCount{{Machine: "web", Network: "back", Reason: test.why, Count: 1}}, drops)
		})
	}
}

// What a network answers to what no path allows.
func TestAnswers(t *testing.T) {
	for _, refuse := range []netstack.Refuse{netstack.Reset, netstack.Prohibited, netstack.Drop} {
		t.Run(refuse.String(), func(t *testing.T) {
			spec := netstacktest.Shop()
			spec.Networks[1].Refuse = refuse
			d := netstacktest.New(t, spec, netstack.Options{})
			web := netstacktest.Plug(t, d, spec, "web", "back", 1500, netstacktest.None)
			for _, frame := range [][]byte{
				tcp("10.20.0.2:40000", "10.20.0.3:22", packet.SYN),
				udp("10.20.0.2:40000", "10.20.0.3:22", 10),
				packettest.ICMP(webBack, ip("10.20.0.77"), 8, 0, 7<<16|1, nil),
			} {
				sent := append([]byte(nil), frame...)
				web.Send(frame)
				if refuse == netstack.Drop {
					web.Quiet()
					continue
				}
				f, info := web.Next()
				assert.Equal(t, webBack, info.Destination)
				switch {
				case refuse == netstack.Reset && sent[23] == packet.ProtocolTCP:
					assert.EqualValues(t, packet.RST|packet.ACK, info.TCPFlags)
					assert.EqualValues(t, 1001, info.Acknowledgement)
					assert.Equal(t, dbBack, info.Source)
					continue
				case refuse == netstack.Reset && sent[23] == packet.ProtocolUDP:
					assert.EqualValues(t, packet.ICMPPortUnreachable, info.ICMPCode)
				default:
					assert.EqualValues(t, packet.ICMPAdminProhibited, info.ICMPCode)
				}
				assert.EqualValues(t, packet.ICMPUnreachable, info.ICMPType)
				assert.Equal(t, backGateway, info.Source)
				assert.Equal(t, sent[14:], f.Data[info.Payload:info.Length], "the packet is quoted")
			}
		})
	}
}

func TestAnswersAreLimited(t *testing.T) {
	spec := netstacktest.Shop()
	clock := &clock{}
	d := netstacktest.New(t, spec, netstack.Options{Clock: clock})
	web := netstacktest.Plug(t, d, spec, "web", "back", 1500, netstacktest.None)
	const sent = 400
	for range sent {
		web.Send(udp("10.20.0.2:40000", "10.20.0.3:22", 10))
	}
	require.Eventually(t, func() bool {
		return netstacktest.Count(d, "web", "back", policy.PortNotDeclared) == sent
	}, waitFor, tick)
	assert.EqualValues(t, sent-250, netstacktest.Count(d, "web", "back", policy.AnswerLimited))
}

func TestTTL(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	web := netstacktest.Plug(t, d, spec, "web", "back", 1500, netstacktest.None)
	db := netstacktest.Plug(t, d, spec, "db", "back", 1500, netstacktest.None)

	web.Send(udp("10.20.0.2:40000", "10.20.0.3:5000", 10))
	_, info := db.Next()
	assert.EqualValues(t, 63, info.TTL)

	web.Send(set(udp("10.20.0.2:40000", "10.20.0.3:5000", 10), 22, 1))
	_, info = web.Next()
	assert.EqualValues(t, packet.ICMPTimeExceeded, info.ICMPType)
	assert.Equal(t, backGateway, info.Source, "traceroute sees the gateway")
	assert.EqualValues(t, 1, netstacktest.Count(d, "web", "back", policy.TTLExceeded))

	// The gateway itself is no hop.
	web.Send(set(packettest.ICMP(webBack, backGateway, 8, 0, 7<<16|1, []byte("ping")), 22, 1))
	_, info = web.Next()
	assert.EqualValues(t, packet.ICMPEchoReply, info.ICMPType)
	assert.EqualValues(t, 7, info.ICMPIdentifier)
	assert.EqualValues(t, 64, info.TTL)
}

// What follows the IP packet in a frame stays behind.
func TestPaddingEnds(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	web := netstacktest.Plug(t, d, spec, "web", "back", 9000, netstacktest.None)
	db := netstacktest.Plug(t, d, spec, "db", "back", 1500, netstacktest.None)
	web.Send(append(udp("10.20.0.2:40000", "10.20.0.3:5000", 1), make([]byte, 3000)...))
	f, info := db.Next()
	assert.Len(t, f.Data, info.Length)
}

func TestEchoBetweenMachines(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	web := netstacktest.Plug(t, d, spec, "web", "back", 1500, netstacktest.None)
	db := netstacktest.Plug(t, d, spec, "db", "back", 1500, netstacktest.None)
	web.Send(packettest.ICMP(webBack, dbBack, 8, 0, 7<<16|1, []byte("ping")))
	_, info := db.Next()
	assert.EqualValues(t, packet.ICMPEcho, info.ICMPType)
	db.Send(packettest.ICMP(dbBack, webBack, 0, 0, 7<<16|1, []byte("ping")))
	_, info = web.Next()
	assert.EqualValues(t, packet.ICMPEchoReply, info.ICMPType)
	assert.Len(t, d.Flows(), 1)
	// The path is web's, not db's.
	db.Send(packettest.ICMP(dbBack, webBack, 8, 0, 7<<16|1, []byte("ping")))
	_, info = db.Next()
	assert.EqualValues(t, packet.ICMPAdminProhibited, info.ICMPCode)
}

func TestARP(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	web := netstacktest.Plug(t, d, spec, "web", "back", 1500, netstacktest.None)
	for _, target := range []string{"10.20.0.1", "10.20.0.3", "10.20.0.200"} {
		web.SendRaw(link.Frame{Data: packet.PutARP(make([]byte, 42), packet.Broadcast, web.Attachment.MAC, packet.ARP{
			Operation: packet.ARPRequest, SenderMAC: web.Attachment.MAC, SenderAddress: webBack, TargetAddress: ip(target)})})
		f, _ := web.Next()
		m, err := packet.DecodeARP(f.Data)
		require.NoError(t, err)
		assert.Equal(t, packet.ARP{Operation: packet.ARPReply, SenderMAC: netstacktest.GatewayMAC, SenderAddress: ip(target),
			TargetMAC: web.Attachment.MAC, TargetAddress: webBack}, m)
	}
}

func TestPathMTU(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	web := netstacktest.Plug(t, d, spec, "web", "back", 1500, netstacktest.Full)
	db := netstacktest.Plug(t, d, spec, "db", "back", 1400, netstacktest.None)

	frame := set(udp("10.20.0.2:40000", "10.20.0.3:5000", 1472), 20, 0x40, 0)
	sent := append([]byte(nil), frame...)
	web.Send(frame)
	f, info := web.Next()
	assert.EqualValues(t, packet.ICMPUnreachable, info.ICMPType)
	assert.EqualValues(t, packet.ICMPFragmentNeeded, info.ICMPCode)
	assert.EqualValues(t, 1400, int(f.Data[info.L4+6])<<8|int(f.Data[info.L4+7]))
	quoted := f.Data[info.Payload:info.Length]
	assert.Equal(t, sent[14:14+len(quoted)], quoted)

	// Without DF it is fragmented, and comes together again.
	web.Send(set(sent, 20, 0, 0))
	whole := packet.NewReassembler(packet.Limits{})
	for range 2 {
		f, info = db.Next()
		assert.LessOrEqual(t, info.Length-14, 1400)
		data, _, err := whole.Add(epoch, f.Data, info)
		require.NoError(t, err)
		if data != nil {
			require.NoError(t, packet.Decode(data, info))
			assert.True(t, packet.VerifyTransport(data, info))
			assert.Equal(t, packettest.Pattern(1472), data[info.Payload:info.Length])
		}
	}

	// A super-frame of TCP is cut to what fits, with checksums made.
	syn := tcp("10.20.0.2:40001", "10.20.0.3:5432", packet.SYN)
	web.Send(syn)
	db.Next()
	data := packettest.TCP(at("10.20.0.2:40001"), at("10.20.0.3:5432"), 1001, 1, packet.ACK, packettest.Pattern(4000))
	var i packet.Info
	require.NoError(t, packet.Decode(data, &i))
	packet.SetMACs(data, netstacktest.GatewayMAC, web.Attachment.MAC)
	packet.SetPartialChecksum(data, &i)
	web.SendRaw(link.Frame{Data: data, NeedsChecksum: true, ChecksumStart: uint16(i.L4), ChecksumOffset: 16,
		Segmentation: link.GSOTCP4, GSOSize: 1448, HeaderLen: uint16(i.Payload)})
	var got []byte
	for len(got) < 4000 {
		f, info = db.Next() // verifies the checksum
		assert.LessOrEqual(t, info.Length-14, 1400)
		assert.False(t, f.NeedsChecksum)
		got = append(got, f.Data[info.Payload:info.Length]...)
	}
	assert.Equal(t, packettest.Pattern(4000), got)
}

// fragments cuts a frame.
func fragments(t *testing.T, frame []byte, mtu int) (all [][]byte) {
	t.Helper()
	var info packet.Info
	require.NoError(t, packet.Decode(frame, &info))
	require.NoError(t, packet.Fragment(frame, &info, mtu, make([]byte, 2000), func(piece []byte) bool {
		all = append(all, append([]byte(nil), piece...))
		return true
	}))
	return all
}

func TestFragmentsAreJudgedTogether(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	web := netstacktest.Plug(t, d, spec, "web", "back", 1500, netstacktest.None)
	db := netstacktest.Plug(t, d, spec, "db", "back", 1500, netstacktest.None)
	pieces := fragments(t, udp("10.20.0.2:40000", "10.20.0.3:5000", 1200), 576)
	require.Len(t, pieces, 3)
	for _, i := range []int{2, 0, 1} {
		web.Send(pieces[i])
	}
	f, info := db.Next()
	assert.Equal(t, packettest.Pattern(1200), f.Data[info.Payload:info.Length])

	// Not allowed: one refusal for the whole, and nothing passes.
	for _, piece := range fragments(t, udp("10.20.0.2:40000", "10.20.0.3:22", 1200), 576) {
		web.Send(piece)
	}
	_, info = web.Next()
	assert.EqualValues(t, packet.ICMPAdminProhibited, info.ICMPCode)
	db.Quiet()
	assert.EqualValues(t, 1, netstacktest.Count(d, "web", "back", policy.PortNotDeclared))
}

func TestFragmentsTooLargeForTheNextLink(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	web := netstacktest.Plug(t, d, spec, "web", "back", 1500, netstacktest.None)
	db := netstacktest.Plug(t, d, spec, "db", "back", 700, netstacktest.None)
	for _, piece := range fragments(t, udp("10.20.0.2:40000", "10.20.0.3:5000", 2000), 1400) {
		web.Send(piece)
	}
	total := 0
	for total < 2008 {
		f, info := db.Next()
		assert.LessOrEqual(t, len(f.Data)-14, 700)
		total += info.Length - info.L3 - 20
	}
	assert.Equal(t, 2008, total)

	for _, piece := range fragments(t, set(udp("10.20.0.2:40000", "10.20.0.3:5000", 2000), 20, 0x40, 0), 1400) {
		web.Send(piece)
	}
	_, info := web.Next()
	assert.EqualValues(t, packet.ICMPFragmentNeeded, info.ICMPCode)
}

// An ICMP error about a packet that NAT has changed comes back changed as the
// packet was (RFC 5508).
func TestICMPErrorsAreTranslated(t *testing.T) {
	spec := netstacktest.Shop()
	spec.Paths[3].Protocol, spec.Paths[3].Ports = "any", nil
	d := netstacktest.New(t, spec, netstack.Options{})
	client := netstacktest.Plug(t, d, spec, "client", "edge", 1500, netstacktest.None)
	frame := udp("100.64.0.4:40000", "198.51.100.1:9", 10) // nobody listens: the edge's stack says so
	sent := append([]byte(nil), frame...)
	client.Send(frame)
	f, info := client.Next()
	assert.EqualValues(t, packet.ICMPUnreachable, info.ICMPType)
	assert.EqualValues(t, packet.ICMPPortUnreachable, info.ICMPCode)
	assert.Equal(t, shop_, info.Source)
	assert.Equal(t, clientEdge, info.Destination)
	assert.EqualValues(t, 0xffff, packettest.Sum(f.Data[info.L4:info.Length]))
	quoted := f.Data[info.Payload:info.Length]
	assert.Equal(t, sent[14+12:], quoted[12:], "addresses, ports and checksum as they were sent")
	assert.EqualValues(t, 0xffff, packettest.Sum(quoted[:20]))
}

func TestICMPErrorsBetweenMachines(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	web := netstacktest.Plug(t, d, spec, "web", "back", 1500, netstacktest.None)
	db := netstacktest.Plug(t, d, spec, "db", "back", 1500, netstacktest.None)
	web.Send(udp("10.20.0.2:40000", "10.20.0.3:5000", 10))
	f, _ := db.Next()
	db.Send(packettest.ICMP(dbBack, webBack, 3, 3, 0, f.Data[14:]))
	_, info := web.Next()
	assert.EqualValues(t, packet.ICMPPortUnreachable, info.ICMPCode)
	assert.Equal(t, dbBack, info.Source)
	// The same from one that the flow has nothing to do with.
	db.Send(packettest.ICMP(dbBack, webBack, 3, 3, 0, udp("10.20.0.2:40000", "10.20.0.3:5001", 10)[14:]))
	db.Quiet()
	web.Quiet()
	assert.EqualValues(t, 1, netstacktest.Count(d, "db", "back", policy.UnrelatedError))
}

// From outside comes in what is addressed to a public port by somebody whom
// that port has spoken to: address-dependent filtering.
func TestNATFiltering(t *testing.T) {
	spec := netstacktest.Shop()
	spec.Endpoints = append(spec.Endpoints, netstack.Endpoint{Name: "other", Network: "edge", Address: ip("198.51.100.2"),
		Machine: "web", Port: 81})
	any := func(name, to string) netstack.Path {
		return netstack.Path{Name: name, From: []string{"client"}, To: []string{to}, Network: "edge", Protocol: "udp"}
	}
	spec.Paths = append(spec.Paths, any("client-shop-udp", "endpoint:shop"), any("client-other-udp", "endpoint:other"))
	d := netstacktest.New(t, spec, netstack.Options{})
	client := netstacktest.Plug(t, d, spec, "client", "edge", 1500, netstacktest.None)
	listen := func(addr string) net.PacketConn {
		c, err := d.ListenPacket(at(addr))
		require.NoError(t, err)
		return c
	}
	shop, second, other := listen("198.51.100.1:9"), listen("198.51.100.1:10"), listen("198.51.100.2:9")
	public := net.UDPAddrFromAddrPort(at("203.0.113.4:40000"))
	send := func(c net.PacketConn) {
		_, err := c.WriteTo([]byte("hello"), public)
		require.NoError(t, err)
	}
	send(second)
	client.Quiet()
	client.Send(udp("100.64.0.4:40000", "198.51.100.1:9", 10))
	buffer := make([]byte, 100)
	_, from, err := shop.ReadFrom(buffer)
	require.NoError(t, err)
	assert.Equal(t, public.String(), from.String())
	for _, c := range []net.PacketConn{shop, second} {
		send(c)
		_, info := client.Next()
		assert.Equal(t, at(c.LocalAddr().String()), netip.AddrPortFrom(info.Source, info.SourcePort))
		assert.Equal(t, at("100.64.0.4:40000"), netip.AddrPortFrom(info.Destination, info.DestinationPort))
	}
	send(other)
	client.Quiet()
	assert.EqualValues(t, 2, netstacktest.Count(d, "edge", "", policy.NATFiltered))
	assert.Equal(t, 1, d.Mappings())
	d.Detach("client", "edge")
	assert.Zero(t, d.Mappings())

	// One Machine's public address is not another's way in.
	web := netstacktest.Plug(t, d, spec, "web", "edge", 1500, netstacktest.None)
	web.Send(udp("100.64.0.2:6000", "203.0.113.4:40000", 10))
	_, info := web.Next()
	assert.EqualValues(t, packet.ICMPPortUnreachable, info.ICMPCode)
	assert.EqualValues(t, 1, netstacktest.Count(d, "web", "edge", policy.NoPath))
}

// A packet to a gateway that no path of the sender's is about has no business
// there.
func TestGatewayAnswersDNSAndEchoOnly(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	web := netstacktest.Plug(t, d, spec, "web", "back", 1500, netstacktest.None)
	web.Send(tcp("10.20.0.2:40000", "10.20.0.1:80", packet.SYN))
	_, info := web.Next()
	assert.EqualValues(t, packet.ICMPAdminProhibited, info.ICMPCode)
	assert.EqualValues(t, 1, netstacktest.Count(d, "web", "back", policy.PortNotDeclared))
}
