package packet

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"math/rand/v2"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"vz.test/vz/netstack/packet/packettest"
)

var (
	a4 = netip.MustParseAddrPort("10.1.0.2:40000")
	b4 = netip.MustParseAddrPort("10.2.0.3:443")
	c4 = netip.MustParseAddrPort("203.0.113.77:51111")
	a6 = netip.MustParseAddrPort("[fd00::2]:40000")
	b6 = netip.MustParseAddrPort("[fd00:0:0:1::3]:443")
	c6 = netip.MustParseAddrPort("[2001:db8::77]:51111")
)

func decode(t testing.TB, frame []byte) Info {
	t.Helper()
	var info Info
	require.NoError(t, Decode(frame, &info), "%x", frame)
	return info
}

func unhex(t testing.TB, text string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.NewReplacer(" ", "", "\n", "", "\t", "").Replace(text))
	require.NoError(t, err)
	return b
}

func TestDecodeTCP(t *testing.T) {
	for name, ends := range map[string][2]netip.AddrPort{"v4": {a4, b4}, "v6": {a6, b6}} {
		t.Run(name, func(t *testing.T) {
			frame := packettest.TCP(ends[0], ends[1], 1000, 2000, SYN|ECE, []byte("hello"))
			frame = append(frame, make([]byte, 9)...) // Ethernet padding
			info := decode(t, frame)
			assert.Equal(t, ends[0].Addr(), info.Source)
			assert.Equal(t, ends[1].Addr(), info.Destination)
			assert.Equal(t, ends[0].Port(), info.SourcePort)
			assert.Equal(t, ends[1].Port(), info.DestinationPort)
			assert.Equal(t, uint8(ProtocolTCP), info.Protocol)
			assert.Equal(t, uint32(1000), info.Sequence)
			assert.Equal(t, uint32(2000), info.Acknowledgement)
			assert.Equal(t, uint8(SYN|ECE), info.TCPFlags)
			assert.Equal(t, 5, info.PayloadLen())
			assert.Equal(t, "hello", string(frame[info.Payload:info.Length]))
			assert.Equal(t, uint8(64), info.TTL)
			assert.Equal(t, name == "v6", info.IPv6())
			assert.True(t, VerifyTransport(frame, &info))
			frame[info.Payload] ^= 1
			assert.False(t, VerifyTransport(frame, &info))
			assert.Equal(t, MAC(packettest.A), SourceMAC(frame))
			assert.Equal(t, "02:00:00:00:00:0b", DestinationMAC(frame).String())
		})
	}
}

func TestDecodeEcho(t *testing.T) {
	info := decode(t, packettest.ICMP(a4.Addr(), b4.Addr(), ICMPEcho, 0, 0xbeef0007, []byte("ping")))
	assert.True(t, info.ICMPEcho())
	assert.False(t, info.ICMPError())
	assert.Equal(t, uint16(0xbeef), info.ICMPIdentifier)
	assert.Equal(t, uint16(7), info.ICMPSequence)
	info = decode(t, packettest.ICMP(a6.Addr(), b6.Addr(), ICMPv6EchoReply, 0, 0xbeef0007, nil))
	assert.True(t, info.ICMPEcho())
	assert.Equal(t, uint16(0xbeef), info.ICMPIdentifier)
}

// The header that textbooks sum (checksum b861), before a datagram of 95 bytes.
func TestDecodeGolden(t *testing.T) {
	frame := unhex(t, `
		52540012 35025254 00123456 0800
		45000073 00004000 4011b861 c0a80001 c0a800c7
		5bd30035 005f0000`)
	frame = append(frame, make([]byte, 87)...)
	info := decode(t, frame)
	assert.Equal(t, "192.168.0.1", info.Source.String())
	assert.Equal(t, "192.168.0.199", info.Destination.String())
	assert.Equal(t, uint16(23507), info.SourcePort)
	assert.Equal(t, uint16(53), info.DestinationPort)
	assert.True(t, info.DontFragment)
	assert.False(t, info.Fragment)
	assert.Equal(t, 87, info.PayloadLen())
	assert.True(t, VerifyTransport(frame, &info), "without a checksum")
}

func TestDecodeRefuses(t *testing.T) {
	udp := packettest.UDP(a4, b4, []byte("12345678"))
	tcp := packettest.TCP(a4, b4, 1, 2, ACK, nil)
	udp6 := packettest.UDP(a6, b6, []byte("12345678"))
	sum := func(f []byte) []byte {
		header := f[14 : 14+int(f[14]&15)*4]
		header[10], header[11] = 0, 0
		binary.BigEndian.PutUint16(header[10:], ^packettest.Sum(header))
		return f
	}
	with := func(frame []byte, change ...int) []byte {
		f := bytes.Clone(frame)
		for i := 0; i < len(change); i += 2 {
			f[change[i]] = byte(change[i+1])
		}
		return f
	}
	options := func(option ...byte) []byte {
		f := append(bytes.Clone(udp[:34]), option...)
		f = append(f, udp[34:]...)
		f[14] = byte(0x40 | (20+len(option))/4)
		f[17] += byte(len(option))
		return sum(f)
	}
	extension := func(next byte, header ...byte) []byte {
		f := append(bytes.Clone(udp6[:54]), header...)
		f = append(f, udp6[54:]...)
		f[20] = next
		f[19] += byte(len(header))
		return f
	}
	for name, test := range map[string]struct {
		frame []byte
		want  error
	}{
		"empty":                {nil, ErrTruncated},
		"no IP header":         {udp[:20], ErrTruncated},
		"cut short":            {udp[:len(udp)-1], ErrTruncated},
		"VLAN":                 {with(udp, 12, 0x81, 13, 0), ErrVLAN},
		"QinQ":                 {with(udp, 12, 0x88, 13, 0xa8), ErrVLAN},
		"LLC":                  {with(udp, 12, 0, 13, 38), ErrEtherType},
		"version 6 in IPv4":    {with(udp, 14, 0x65), ErrVersion},
		"version 4 in IPv6":    {with(udp6, 14, 0x40), ErrVersion},
		"header of 16":         {with(udp, 14, 0x44), ErrHeaderLength},
		"length below header":  {with(udp, 16, 0, 17, 19), ErrLength},
		"length above frame":   {with(udp, 16, 4), ErrTruncated},
		"checksum":             {with(udp, 22, 63), ErrChecksum},
		"UDP length 7":         {with(udp, 39, 7), ErrLength},
		"UDP length too large": {with(udp, 39, 17), ErrLength},
		"TCP header of 16":     {with(tcp, 46, 4<<4), ErrHeaderLength},
		"TCP header too long":  {with(tcp, 46, 9<<4), ErrHeaderLength},
		"TCP too short":        {sum(with(tcp, 17, 39))[:14+39], ErrTruncated},
		"empty fragment":       {sum(with(udp[:34], 17, 20, 20, 0x20)), ErrFragment},
		"odd fragment":         {sum(with(udp[:49], 17, 35, 20, 0x20)), ErrFragment},
		"ping of death":        {sum(with(udp, 20, 0x1f, 21, 0xff)), ErrFragment},
		"option length 0":      {options(7, 0, 0, 0), ErrOptions},
		"option too long":      {options(1, 7, 4, 0), ErrOptions},
		"option without room":  {options(1, 1, 1, 7), ErrOptions},
		"IPv6 cut short":       {udp6[:len(udp6)-1], ErrTruncated},
		"hop-by-hop second":    {extension(60, 0, 0, 1, 4, 0, 0, 0, 0, 17, 0, 1, 4, 0, 0, 0, 0), ErrExtensions},
		"extension too long":   {extension(0, 17, 9, 1, 4, 0, 0, 0, 0), ErrTruncated},
		"ARP too short":        {with(udp[:40], 13, 6), ErrTruncated},
	} {
		t.Run(name, func(t *testing.T) {
			var info Info
			assert.ErrorIs(t, Decode(test.frame, &info), test.want)
		})
	}

	t.Run("flags", func(t *testing.T) {
		info := decode(t, options(148, 4, 0, 0)) // router alert
		assert.True(t, info.HasOptions)
		assert.False(t, info.SourceRoute)
		assert.Equal(t, a4.Port(), info.SourcePort)
		info = decode(t, options(131, 7, 4, 1, 1, 1, 1, 0))
		assert.True(t, info.SourceRoute)
		info = decode(t, extension(0, 17, 0, 1, 4, 0, 0, 0, 0))
		assert.True(t, info.HasOptions)
		assert.Equal(t, a6.Port(), info.SourcePort)
		info = decode(t, extension(43, 17, 0, 0, 0, 0, 0, 0, 0))
		assert.True(t, info.SourceRoute)
		info = decode(t, extension(44, 17, 0, 0, 1, 1, 2, 3, 4)) // first of more
		assert.True(t, info.Fragment)
		assert.True(t, info.MoreFragments)
		assert.Equal(t, uint32(0x01020304), info.FragmentID)
		assert.NotZero(t, info.L4)
		info = decode(t, extension(44, 17, 0, 0, 8, 1, 2, 3, 4)) // the last one
		assert.Equal(t, uint16(8), info.FragmentOffset)
		assert.Zero(t, info.L4)
		info = decode(t, extension(44, 17, 0, 0, 0, 1, 2, 3, 4)) // atomic
		assert.False(t, info.Fragment)
		assert.NotZero(t, info.L4)
		info = decode(t, sum(with(udp, 20, 0, 21, 9)))
		assert.Equal(t, uint16(72), info.FragmentOffset)
		assert.Zero(t, info.L4)
		assert.Zero(t, info.SourcePort)
	})
}

func TestARP(t *testing.T) {
	request := ARP{
		Operation: ARPRequest, SenderMAC: packettest.A, SenderAddress: a4.Addr(), TargetAddress: b4.Addr(),
	}
	buffer := make([]byte, 60)
	frame := PutARP(buffer, Broadcast, packettest.A, request)
	assert.Equal(t, unhex(t, `ffffffffffff 02000000000a 0806 0001 0800 06 04 0001
		02000000000a 0a010002 000000000000 0a020003`), frame)
	got, err := DecodeARP(frame)
	require.NoError(t, err)
	assert.Equal(t, request, got)
	info := decode(t, frame)
	assert.Equal(t, uint16(EtherTypeARP), info.EtherType)

	reply := got.Reply(packettest.B)
	frame = PutARP(buffer, reply.TargetMAC, reply.SenderMAC, reply)
	got, err = DecodeARP(frame)
	require.NoError(t, err)
	assert.Equal(t, ARP{ARPReply, packettest.B, b4.Addr(), packettest.A, a4.Addr()}, got)

	frame[15] = 6 // hardware type IEEE 802
	_, err = DecodeARP(frame)
	assert.ErrorIs(t, err, ErrARP)
}

func TestSum(t *testing.T) {
	// RFC 1071, section 3.
	assert.Equal(t, uint16(0xddf2), Sum([]byte{0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7}, 0))
	random := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		data := make([]byte, random.IntN(300))
		switch random.IntN(3) {
		case 0:
			for i := range data {
				data[i] = byte(random.Uint32())
			}
		case 1: // all carries
			for i := range data {
				data[i] = 0xff
			}
		}
		initial := uint16(random.Uint32())
		want := packettest.Sum(binary.BigEndian.AppendUint16(nil, initial), data)
		got := Sum(data, initial)
		require.Equal(t, want%0xffff, got%0xffff, "%x", data)
		require.Equal(t, want == 0, got == 0, "zero only from zeros: %x", data)
	}
}

func TestUpdated(t *testing.T) {
	// RFC 1624, section 4: the case that RFC 1141 gets wrong.
	assert.Equal(t, uint16(0x0000), updated(0xdd2f, 0x5555, 0x3285))
}

// A frame rewritten back and forth is what it was, and right in between.
func TestRewrite(t *testing.T) {
	type ends struct{ from, to, other netip.AddrPort }
	v4, v6 := ends{a4, b4, c4}, ends{a6, b6, c6}
	for name, test := range map[string]struct {
		ends  ends
		frame []byte
	}{
		"TCP4":  {v4, packettest.TCP(a4, b4, 1, 2, ACK, []byte("odd"))},
		"TCP6":  {v6, packettest.TCP(a6, b6, 1, 2, ACK, []byte("odd"))},
		"UDP4":  {v4, packettest.UDP(a4, b4, []byte("some"))},
		"UDP6":  {v6, packettest.UDP(a6, b6, []byte("some"))},
		"echo4": {v4, packettest.ICMP(a4.Addr(), b4.Addr(), ICMPEcho, 0, uint32(a4.Port())<<16, []byte("x"))},
		"echo6": {v6, packettest.ICMP(a6.Addr(), b6.Addr(), ICMPv6Echo, 0, uint32(a6.Port())<<16, []byte("x"))},
	} {
		t.Run(name, func(t *testing.T) {
			for _, partial := range []bool{false, true} {
				frame := bytes.Clone(test.frame)
				info := decode(t, frame)
				if partial {
					SetPartialChecksum(frame, &info)
				}
				before := bytes.Clone(frame)
				RewriteSource(frame, &info, test.ends.other.Addr(), test.ends.other.Port())
				RewriteDestination(frame, &info, test.ends.from.Addr(), 99)
				again := decode(t, frame)
				again.PartialChecksum = info.PartialChecksum
				require.Equal(t, again, info, "Info is kept true")
				require.True(t, VerifyTransport(frame, &info))
				assert.Equal(t, test.ends.other.Addr(), info.Source)
				assert.Equal(t, test.ends.from.Addr(), info.Destination)
				if info.ICMPEcho() {
					assert.Equal(t, test.ends.other.Port(), info.ICMPIdentifier)
				} else {
					assert.Equal(t, test.ends.other.Port(), info.SourcePort)
					assert.Equal(t, uint16(99), info.DestinationPort)
				}
				if info.PartialChecksum {
					complete := bytes.Clone(frame)
					field := map[uint8]int{ProtocolTCP: 16, ProtocolUDP: 6}[info.Protocol]
					require.NoError(t, CompleteChecksum(complete[:info.Length], info.L4, field))
					done := decode(t, complete)
					assert.True(t, VerifyTransport(complete, &done))
				}
				RewriteSource(frame, &info, test.ends.from.Addr(), test.ends.from.Port())
				RewriteDestination(frame, &info, test.ends.to.Addr(), test.ends.to.Port())
				assert.Equal(t, before, frame)
			}
		})
	}
	t.Run("absent UDP checksum", func(t *testing.T) {
		frame := packettest.UDP(a4, b4, []byte("some"))
		frame[40], frame[41] = 0, 0
		info := decode(t, frame)
		RewriteSource(frame, &info, c4.Addr(), c4.Port())
		assert.Equal(t, []byte{0, 0}, frame[40:42])
		decode(t, frame)
	})
	t.Run("UDP checksum never becomes zero", func(t *testing.T) {
		frame := packettest.UDP(a4, b4, []byte{0, 0})
		info := decode(t, frame)
		seen := false
		for port := range 65536 {
			RewriteSource(frame, &info, a4.Addr(), uint16(port))
			field := binary.BigEndian.Uint16(frame[40:])
			require.NotZero(t, field)
			seen = seen || field == 0xffff
		}
		assert.True(t, seen)
	})
	t.Run("wrong stays wrong", func(t *testing.T) {
		frame := packettest.TCP(a4, b4, 1, 2, ACK, []byte("payload"))
		frame[len(frame)-1] ^= 0x40
		info := decode(t, frame)
		RewriteSource(frame, &info, c4.Addr(), c4.Port())
		assert.False(t, VerifyTransport(frame, &info))
	})
	t.Run("other family", func(t *testing.T) {
		frame := packettest.UDP(a4, b4, nil)
		info := decode(t, frame)
		assert.Panics(t, func() { RewriteSource(frame, &info, a6.Addr(), 1) })
	})
}

func TestDecrementTTL(t *testing.T) {
	for _, frame := range [][]byte{packettest.UDP(a4, b4, nil), packettest.UDP(a6, b6, nil)} {
		info := decode(t, frame)
		for ttl := 63; ttl >= 1; ttl-- {
			require.True(t, DecrementTTL(frame, &info))
			require.Equal(t, uint8(ttl), decode(t, frame).TTL)
		}
		assert.False(t, DecrementTTL(frame, &info))
		assert.Equal(t, uint8(1), decode(t, frame).TTL)
	}
}

func TestSetTransportChecksum(t *testing.T) {
	for _, want := range [][]byte{
		packettest.TCP(a4, b4, 1, 2, ACK, []byte("odd")),
		packettest.UDP(a6, b6, []byte("some")),
		packettest.ICMP(a4.Addr(), b4.Addr(), ICMPEcho, 0, 7, []byte("ping")),
		packettest.ICMP(a6.Addr(), b6.Addr(), ICMPv6Echo, 0, 7, []byte("ping")),
		packettest.IP(a4.Addr(), b4.Addr(), 132, []byte("SCTP is left alone")),
	} {
		frame := bytes.Clone(want)
		info := decode(t, frame)
		if offset, _, ok := checksumOffset(info.Protocol); ok {
			frame[info.L4+offset] ^= 0x55
		}
		info.PartialChecksum = info.L4 != 0
		SetTransportChecksum(frame, &info)
		assert.Equal(t, want, frame)
		assert.False(t, info.PartialChecksum)
	}
}

func TestMACText(t *testing.T) {
	var mac MAC
	require.NoError(t, mac.UnmarshalText([]byte("02:00:00:00:00:0a")))
	assert.Equal(t, MAC(packettest.A), mac)
	text, err := mac.MarshalText()
	require.NoError(t, err)
	assert.Equal(t, "02:00:00:00:00:0a", string(text))
	assert.Error(t, mac.UnmarshalText([]byte("02:00:00:00:00")))
	assert.Error(t, mac.UnmarshalText([]byte("02:00:00:00:00:0a:0b:0c")))
	assert.True(t, Broadcast.Multicast())
	assert.False(t, mac.Multicast())
}

func TestCompleteChecksumRefuses(t *testing.T) {
	assert.ErrorIs(t, CompleteChecksum(make([]byte, 20), 10, 9), ErrLength)
	assert.ErrorIs(t, CompleteChecksum(make([]byte, 20), -1, 9), ErrLength)
	assert.NoError(t, CompleteChecksum(make([]byte, 20), 10, 8))
}

// An ICMP error comes back through NAT: outside it names the NAT's address and
// port, inside the Machine's (RFC 5508, 4.2).
func TestEmbedded(t *testing.T) {
	type test struct {
		inside, outside []byte // what was sent, before and after NAT
		private, public netip.AddrPort
		router          netip.Addr
	}
	echo := func(from netip.AddrPort, to netip.Addr) []byte {
		typ := uint8(ICMPEcho)
		if to.Is6() {
			typ = ICMPv6Echo
		}
		return packettest.ICMP(from.Addr(), to, typ, 0, uint32(from.Port())<<16|5, []byte("abc"))
	}
	router4, router6 := netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("2001:db8::1")
	for name, test := range map[string]test{
		"UDP4":  {packettest.UDP(a4, b4, []byte("abc")), packettest.UDP(c4, b4, []byte("abc")), a4, c4, router4},
		"TCP4":  {packettest.TCP(a4, b4, 1, 0, SYN, nil), packettest.TCP(c4, b4, 1, 0, SYN, nil), a4, c4, router4},
		"echo4": {echo(a4, b4.Addr()), echo(c4, b4.Addr()), a4, c4, router4},
		"UDP6":  {packettest.UDP(a6, b6, []byte("abc")), packettest.UDP(c6, b6, []byte("abc")), a6, c6, router6},
		"TCP6":  {packettest.TCP(a6, b6, 1, 0, SYN, nil), packettest.TCP(c6, b6, 1, 0, SYN, nil), a6, c6, router6},
		"echo6": {echo(a6, b6.Addr()), echo(c6, b6.Addr()), a6, c6, router6},
	} {
		header := 20
		typ := uint8(ICMPUnreachable)
		if test.private.Addr().Is6() {
			header, typ = 40, ICMPv6Unreachable
		}
		for cut, quote := range map[string]int{"whole": len(test.outside) - 14, "8 bytes": header + 8, "9 bytes": header + 9} {
			t.Run(name+" "+cut, func(t *testing.T) {
				frame := packettest.ICMP(test.router, test.public.Addr(), typ, 1, 0, test.outside[14:14+quote])
				info := decode(t, frame)
				require.True(t, info.ICMPError())
				var embedded Info
				require.NoError(t, DecodeEmbedded(frame, &info, &embedded))
				assert.Equal(t, test.public.Addr(), embedded.Source)
				assert.GreaterOrEqual(t, embedded.PayloadLen(), 0)
				RewriteEmbeddedSource(frame, &info, &embedded, test.private.Addr(), test.private.Port())
				RewriteDestination(frame, &info, test.private.Addr(), 0)
				want := packettest.ICMP(test.router, test.private.Addr(), typ, 1, 0, test.inside[14:14+quote])
				assert.Equal(t, want, frame)
			})
		}
	}
	t.Run("destination", func(t *testing.T) {
		frame := packettest.ICMP(router4, a4.Addr(), ICMPUnreachable, 3, 0, packettest.UDP(a4, b4, []byte("abc"))[14:])
		info := decode(t, frame)
		var embedded Info
		require.NoError(t, DecodeEmbedded(frame, &info, &embedded))
		RewriteEmbeddedDestination(frame, &info, &embedded, c4.Addr(), c4.Port())
		assert.Equal(t, packettest.ICMP(router4, a4.Addr(), ICMPUnreachable, 3, 0, packettest.UDP(a4, c4, []byte("abc"))[14:]), frame)
	})
	t.Run("refuses", func(t *testing.T) {
		var embedded Info
		frame := packettest.UDP(a4, b4, nil)
		info := decode(t, frame)
		assert.ErrorIs(t, DecodeEmbedded(frame, &info, &embedded), ErrNotQuoted)
		quote := packettest.UDP(a4, b4, nil)[14:]
		quote[8]++
		frame = packettest.ICMP(router4, a4.Addr(), ICMPUnreachable, 3, 0, quote)
		info = decode(t, frame)
		assert.ErrorIs(t, DecodeEmbedded(frame, &info, &embedded), ErrChecksum)
		frame = packettest.ICMP(router4, a4.Addr(), ICMPUnreachable, 3, 0, nil)
		info = decode(t, frame)
		assert.ErrorIs(t, DecodeEmbedded(frame, &info, &embedded), ErrTruncated)
	})
}

func TestSplitTCP(t *testing.T) {
	for name, ends := range map[string][2]netip.AddrPort{"v4": {a4, b4}, "v6": {a6, b6}} {
		t.Run(name, func(t *testing.T) {
			payload := packettest.Pattern(10000)
			frame := packettest.TCP(ends[0], ends[1], 0xfffffff0, 7, CWR|ACK|PSH|FIN, payload)
			info := decode(t, frame)
			SetPartialChecksum(frame, &info)
			original := bytes.Clone(frame)
			var got []byte
			index := 0
			buffer := make([]byte, 2000)
			require.NoError(t, Split(frame, &info, 1448, buffer, func(segment []byte) bool {
				part := decode(t, segment)
				require.True(t, VerifyTransport(segment, &part))
				require.Equal(t, uint32(0xfffffff0)+uint32(index*1448), part.Sequence)
				require.Equal(t, uint32(7), part.Acknowledgement)
				want := uint8(ACK)
				if index == 0 {
					want |= CWR
				}
				if index == 6 {
					want |= PSH | FIN
				}
				require.Equal(t, want, part.TCPFlags, "segment %d", index)
				if !part.IPv6() {
					require.Equal(t, uint16(0x1234+index), part.Identification)
				}
				require.Equal(t, len(segment), part.Length)
				got = append(got, segment[part.Payload:part.Length]...)
				index++
				return true
			}))
			assert.Equal(t, 7, index)
			assert.Equal(t, payload, got)
			assert.Equal(t, original, frame)
		})
	}
}

func TestSplitUDP(t *testing.T) {
	for name, ends := range map[string][2]netip.AddrPort{"v4": {a4, b4}, "v6": {a6, b6}} {
		t.Run(name, func(t *testing.T) {
			payload := packettest.Pattern(3001)
			frame := packettest.UDP(ends[0], ends[1], payload)
			info := decode(t, frame)
			SetPartialChecksum(frame, &info)
			var segments [][]byte
			require.NoError(t, Split(frame, &info, 1000, make([]byte, 1100), func(segment []byte) bool {
				segments = append(segments, bytes.Clone(segment))
				return true
			}))
			require.Len(t, segments, 4)
			for i, segment := range segments {
				want := packettest.UDP(ends[0], ends[1], payload[i*1000:min(3001, i*1000+1000)])
				got := decode(t, segment)
				if !got.IPv6() { // packettest gives all the same identification
					assert.Equal(t, uint16(0x1234+i), got.Identification)
					binary.BigEndian.PutUint16(want[18:], uint16(0x1234+i))
					binary.BigEndian.PutUint16(want[24:], 0)
					binary.BigEndian.PutUint16(want[24:], ^packettest.Sum(want[14:34]))
				}
				assert.Equal(t, want, segment)
			}
		})
	}
}

func TestSplitKeepsAbsentChecksum(t *testing.T) {
	frame := packettest.UDP(a4, b4, packettest.Pattern(3000))
	frame[40], frame[41] = 0, 0
	info := decode(t, frame)
	require.NoError(t, Split(frame, &info, 1000, make([]byte, 1100), func(segment []byte) bool {
		return assert.Equal(t, []byte{0, 0}, segment[40:42])
	}))
}

// Fragments from many goroutines at once, as from many ports: each datagram is
// completed once.
func TestReassemblerConcurrent(t *testing.T) {
	const workers, datagrams = 4, 50
	datagram := packettest.UDP(a4, b4, packettest.Pattern(392))
	r := NewReassembler(Limits{Datagrams: datagrams})
	var completed atomic.Int64
	var group sync.WaitGroup
	for worker := range workers {
		group.Go(func() {
			var info Info
			for id := range datagrams {
				from := worker * 104
				to := min(from+104, 400)
				fragment := fragmentOf(datagram, id, from, to, to < 400)
				if !assert.NoError(t, Decode(fragment, &info)) {
					return
				}
				whole, _, err := r.Add(time.Time{}, fragment, &info)
				assert.NoError(t, err)
				if whole != nil {
					completed.Add(1)
				}
			}
		})
	}
	group.Wait()
	assert.Equal(t, int64(datagrams), completed.Load())
	held, bytes := r.Held()
	assert.Zero(t, held)
	assert.Zero(t, bytes)
}

func TestSplitRefuses(t *testing.T) {
	never := func([]byte) bool { t.Fatal("emitted"); return false }
	frame := packettest.TCP(a4, b4, 1, 2, ACK, packettest.Pattern(3000))
	info := decode(t, frame)
	assert.ErrorIs(t, Split(frame, &info, 0, make([]byte, 3000), never), ErrSplit)
	assert.ErrorIs(t, Split(frame, &info, 1448, make([]byte, 1448), never), ErrBuffer)
	frame = packettest.ICMP(a4.Addr(), b4.Addr(), ICMPEcho, 0, 0, packettest.Pattern(3000))
	info = decode(t, frame)
	assert.ErrorIs(t, Split(frame, &info, 1448, make([]byte, 3000), never), ErrSplit)
	n := 0
	frame = packettest.TCP(a4, b4, 1, 2, ACK, packettest.Pattern(3000))
	info = decode(t, frame)
	require.NoError(t, Split(frame, &info, 1000, make([]byte, 3000), func([]byte) bool { n++; return false }))
	assert.Equal(t, 1, n, "emit stops it")
}

func TestICMPError(t *testing.T) {
	router := netip.MustParseAddr("10.1.0.1")
	dst := make([]byte, MaxICMPError)

	offending := packettest.UDP(a4, b4, packettest.Pattern(1472))
	info := decode(t, offending)
	frame := BuildICMPError(dst, offending, &info, router, ICMPUnreachable, ICMPFragmentNeeded, 1400)
	require.Len(t, frame, 14+576)
	assert.Equal(t, MAC(packettest.A), DestinationMAC(frame))
	assert.Equal(t, MAC(packettest.B), SourceMAC(frame))
	got := decode(t, frame)
	assert.True(t, VerifyTransport(frame, &got))
	assert.Equal(t, router, got.Source)
	assert.Equal(t, a4.Addr(), got.Destination)
	assert.Equal(t, uint16(1400), binary.BigEndian.Uint16(frame[got.L4+6:]))
	assert.Equal(t, offending[14:14+548], frame[got.Payload:got.Length])
	var quoted Info
	require.NoError(t, DecodeEmbedded(frame, &got, &quoted))
	assert.Equal(t, b4.Port(), quoted.DestinationPort)

	// A partial checksum is completed in the quote, so that the sender finds
	// its own packet there.
	whole := packettest.UDP(a4, b4, []byte("abc"))
	partial := bytes.Clone(whole)
	info = decode(t, partial)
	SetPartialChecksum(partial, &info)
	frame = BuildICMPError(dst, partial, &info, router, ICMPUnreachable, ICMPAdminProhibited, 0)
	assert.Equal(t, whole[14:], frame[42:])

	six := packettest.UDP(a6, b6, packettest.Pattern(1452))
	info = decode(t, six)
	frame = BuildICMPError(dst, six, &info, netip.MustParseAddr("fd00::1"), ICMPv6PacketTooBig, 0, 1300)
	require.Len(t, frame, 14+1280)
	got = decode(t, frame)
	assert.True(t, VerifyTransport(frame, &got))
	assert.Equal(t, uint32(1300), binary.BigEndian.Uint32(frame[got.L4+4:]))

	at := func(source, destination string) []byte {
		return packettest.UDP(netip.AddrPortFrom(netip.MustParseAddr(source), 1), netip.AddrPortFrom(netip.MustParseAddr(destination), 2), nil)
	}
	group := packettest.UDP(a4, b4, nil)
	group[0] |= 1
	later := packettest.UDP(a4, b4, nil)
	later[21] = 8
	binary.BigEndian.PutUint16(later[24:], 0)
	binary.BigEndian.PutUint16(later[24:], ^packettest.Sum(later[14:34]))
	for name, silent := range map[string][]byte{
		"an error":         packettest.ICMP(a4.Addr(), b4.Addr(), ICMPUnreachable, 3, 0, whole[14:]),
		"to a group":       at("10.1.0.2", "224.0.0.251"),
		"to everybody":     at("10.1.0.2", "255.255.255.255"),
		"from nobody":      at("0.0.0.0", "10.2.0.3"),
		"from loopback":    at("127.0.0.1", "10.2.0.3"),
		"from a group":     at("224.0.0.1", "10.2.0.3"),
		"group MAC":        group,
		"a later fragment": later,
	} {
		info := decode(t, silent)
		assert.Nil(t, BuildICMPError(dst, silent, &info, router, ICMPUnreachable, 13, 0), name)
	}
}

func TestReset(t *testing.T) {
	dst := make([]byte, 100)
	for name, ends := range map[string][2]netip.AddrPort{"v4": {a4, b4}, "v6": {a6, b6}} {
		t.Run(name, func(t *testing.T) {
			for _, test := range []struct {
				flags                     uint8
				payload                   int
				wantSequence, wantNumber  uint32
				wantFlags                 uint8
				sequence, acknowledgement uint32
			}{
				{SYN, 0, 0, 1001, RST | ACK, 1000, 0},
				{SYN, 5, 0, 1006, RST | ACK, 1000, 0},
				{FIN, 5, 0, 1006, RST | ACK, 1000, 0},
				{ACK, 5, 77, 0, RST, 1000, 77},
				{SYN | ACK, 0, 77, 0, RST, 1000, 77},
			} {
				segment := packettest.TCP(ends[0], ends[1], test.sequence, test.acknowledgement, test.flags, make([]byte, test.payload))
				info := decode(t, segment)
				frame := BuildReset(dst, segment, &info)
				require.NotNil(t, frame)
				got := decode(t, frame)
				assert.True(t, VerifyTransport(frame, &got))
				assert.Equal(t, ends[1], netip.AddrPortFrom(got.Source, got.SourcePort))
				assert.Equal(t, ends[0], netip.AddrPortFrom(got.Destination, got.DestinationPort))
				assert.Equal(t, test.wantFlags, got.TCPFlags)
				assert.Equal(t, test.wantSequence, got.Sequence)
				assert.Equal(t, test.wantNumber, got.Acknowledgement)
			}
			segment := packettest.TCP(ends[0], ends[1], 1, 1, RST, nil)
			info := decode(t, segment)
			assert.Nil(t, BuildReset(dst, segment, &info), "never a RST for a RST")
		})
	}
}

func TestBuildUDP(t *testing.T) {
	dst := make([]byte, 200)
	for _, ends := range [][2]netip.AddrPort{{a4, b4}, {a6, b6}} {
		frame := BuildUDP(dst, packettest.B, packettest.A, ends[0], ends[1], []byte("payload"))
		info := decode(t, frame)
		assert.True(t, VerifyTransport(frame, &info))
		want := packettest.UDP(ends[0], ends[1], []byte("payload"))
		wanted := decode(t, want)
		assert.Equal(t, want[wanted.L4:], frame[info.L4:])
	}
}

func TestFragment(t *testing.T) {
	datagram := packettest.UDP(a4, b4, packettest.Pattern(4000))
	info := decode(t, datagram)
	cut := func(t *testing.T, frame []byte, info *Info, mtu int) (fragments [][]byte) {
		t.Helper()
		require.NoError(t, Fragment(frame, info, mtu, make([]byte, 14+mtu), func(f []byte) bool {
			require.LessOrEqual(t, len(f), 14+mtu)
			fragments = append(fragments, bytes.Clone(f))
			return true
		}))
		return fragments
	}
	fragments := cut(t, datagram, &info, 1500)
	require.Len(t, fragments, 3)
	assert.Len(t, fragments[0], 14+1500)
	last := decode(t, fragments[2])
	assert.False(t, last.MoreFragments)
	assert.Equal(t, uint16(2960), last.FragmentOffset)

	// Fragments of fragments, put together in any order.
	var smaller [][]byte
	for _, fragment := range fragments {
		info := decode(t, fragment)
		smaller = append(smaller, cut(t, fragment, &info, 576)...)
	}
	rand.New(rand.NewPCG(3, 4)).Shuffle(len(smaller), func(i, j int) { smaller[i], smaller[j] = smaller[j], smaller[i] })
	r := NewReassembler(Limits{})
	for i, fragment := range smaller {
		info := decode(t, fragment)
		whole, largest, err := r.Add(time.Time{}, fragment, &info)
		require.NoError(t, err)
		if i < len(smaller)-1 {
			require.Nil(t, whole)
			continue
		}
		assert.Equal(t, datagram, whole)
		assert.Equal(t, 572, largest)
	}
	datagrams, held := r.Held()
	assert.Zero(t, datagrams)
	assert.Zero(t, held)
	assert.Empty(t, r.sources)

	t.Run("fits", func(t *testing.T) {
		frame := packettest.UDP(a4, b4, []byte("x"))
		info := decode(t, frame)
		assert.Equal(t, [][]byte{frame}, cut(t, frame, &info, 68))
	})
	t.Run("options", func(t *testing.T) {
		// NOP, record route (first fragment only), router alert (in all).
		options := []byte{1, 7, 7, 4, 0, 0, 0, 0, 148, 4, 0, 0}
		frame := append(bytes.Clone(datagram[:34]), options...)
		frame = append(frame, datagram[34:]...)
		frame[14] = 0x48
		setIPv4Length(frame[14:46], len(frame)-14)
		info := decode(t, frame)
		fragments := cut(t, frame, &info, 1500)
		require.Len(t, fragments, 3)
		assert.Equal(t, options, fragments[0][34:46])
		for _, fragment := range fragments[1:] {
			assert.Equal(t, byte(0x46), fragment[14])
			assert.Equal(t, options[8:], fragment[34:38])
		}
		r := NewReassembler(Limits{})
		var whole []byte
		for _, fragment := range fragments {
			info := decode(t, fragment)
			var err error
			whole, _, err = r.Add(time.Time{}, fragment, &info)
			require.NoError(t, err)
		}
		assert.Equal(t, frame, whole)
	})
	t.Run("refuses", func(t *testing.T) {
		buffer := make([]byte, 2000)
		never := func([]byte) bool { t.Fatal("emitted"); return false }
		assert.ErrorIs(t, Fragment(datagram, &info, 67, buffer, never), ErrMTU)
		assert.ErrorIs(t, Fragment(datagram, &info, 1500, buffer[:1500], never), ErrBuffer)
		partial := info
		partial.PartialChecksum = true
		assert.ErrorIs(t, Fragment(datagram, &partial, 1500, buffer, never), ErrPartial)
		six := packettest.UDP(a6, b6, nil)
		info := decode(t, six)
		assert.ErrorIs(t, Fragment(six, &info, 1500, buffer, never), ErrNotIPv4)
	})
}

// fragmentOf is one fragment with the bytes [from, to) of a UDP datagram.
func fragmentOf(datagram []byte, id, from, to int, more bool) []byte {
	frame := append(bytes.Clone(datagram[:34]), datagram[34+from:34+to]...)
	h := frame[14:34]
	binary.BigEndian.PutUint16(h[4:], uint16(id))
	field := uint16(from / 8)
	if more {
		field |= 0x2000
	}
	binary.BigEndian.PutUint16(h[6:], field)
	setIPv4Length(h, len(frame)-14)
	return frame
}

func TestReassembler(t *testing.T) {
	datagram := packettest.UDP(a4, b4, packettest.Pattern(392)) // 400 bytes of payload
	now := time.Unix(1000, 0)
	add := func(t *testing.T, r *Reassembler, at time.Time, frame []byte) ([]byte, error) {
		t.Helper()
		info := decode(t, frame)
		whole, _, err := r.Add(at, frame, &info)
		return whole, err
	}
	held := func(r *Reassembler) int { n, _ := r.Held(); return n }

	t.Run("duplicates", func(t *testing.T) {
		r := NewReassembler(Limits{})
		for range 3 {
			whole, err := add(t, r, now, fragmentOf(datagram, 1, 0, 200, true))
			require.NoError(t, err)
			require.Nil(t, whole)
		}
		for range 2 {
			_, err := add(t, r, now, fragmentOf(datagram, 1, 304, 400, false))
			require.NoError(t, err)
		}
		whole, err := add(t, r, now, fragmentOf(datagram, 1, 200, 304, true))
		require.NoError(t, err)
		assert.Equal(t, datagram[34:], whole[34:])
	})
	t.Run("overlap", func(t *testing.T) {
		r := NewReassembler(Limits{})
		_, err := add(t, r, now, fragmentOf(datagram, 1, 0, 200, true))
		require.NoError(t, err)
		_, err = add(t, r, now, fragmentOf(datagram, 1, 192, 400, false))
		require.ErrorIs(t, err, ErrOverlap)
		_, bytes := r.Held()
		assert.Zero(t, bytes)
		// What would have completed it comes too late, until it is forgotten.
		_, err = add(t, r, now, fragmentOf(datagram, 1, 200, 400, false))
		require.ErrorIs(t, err, ErrOverlap)
		_, err = add(t, r, now.Add(time.Minute), fragmentOf(datagram, 1, 0, 200, true))
		require.NoError(t, err)
		whole, err := add(t, r, now.Add(time.Minute), fragmentOf(datagram, 1, 200, 400, false))
		require.NoError(t, err)
		assert.NotNil(t, whole)
	})
	t.Run("same place, other bytes", func(t *testing.T) {
		r := NewReassembler(Limits{})
		fragment := fragmentOf(datagram, 1, 0, 200, true)
		_, err := add(t, r, now, fragment)
		require.NoError(t, err)
		fragment[100] ^= 1
		_, err = add(t, r, now, fragment)
		assert.ErrorIs(t, err, ErrOverlap)
	})
	t.Run("two ends", func(t *testing.T) {
		r := NewReassembler(Limits{})
		_, err := add(t, r, now, fragmentOf(datagram, 1, 200, 400, false))
		require.NoError(t, err)
		_, err = add(t, r, now, fragmentOf(datagram, 1, 104, 200, false))
		assert.ErrorIs(t, err, ErrFragment)
		_, err = add(t, r, now, fragmentOf(datagram, 2, 104, 200, false))
		require.NoError(t, err)
		_, err = add(t, r, now, fragmentOf(datagram, 2, 200, 400, true))
		assert.ErrorIs(t, err, ErrFragment)
	})
	t.Run("tiny first fragment", func(t *testing.T) {
		r := NewReassembler(Limits{})
		segment := packettest.TCP(a4, b4, 1, 2, SYN, packettest.Pattern(100))
		_, err := add(t, r, now, fragmentOf(segment, 1, 0, 16, true))
		assert.ErrorIs(t, err, ErrTinyFragment)
		_, err = add(t, r, now, fragmentOf(segment, 1, 16, 132, false))
		assert.ErrorIs(t, err, ErrOverlap)
	})
	t.Run("timeout", func(t *testing.T) {
		r := NewReassembler(Limits{})
		_, err := add(t, r, now, fragmentOf(datagram, 1, 0, 200, true))
		require.NoError(t, err)
		_, err = add(t, r, now.Add(20*time.Second), fragmentOf(datagram, 2, 0, 200, true))
		require.NoError(t, err)
		r.Expire(now.Add(30*time.Second - 1))
		assert.Equal(t, 2, held(r))
		r.Expire(now.Add(30 * time.Second))
		assert.Equal(t, 1, held(r))
		whole, err := add(t, r, now.Add(50*time.Second), fragmentOf(datagram, 2, 200, 400, false))
		require.NoError(t, err)
		assert.Nil(t, whole, "its other half is gone")
		expired, evicted := r.Dropped()
		assert.Equal(t, [2]uint64{2, 0}, [2]uint64{expired, evicted})
	})
	t.Run("a source starves itself", func(t *testing.T) {
		r := NewReassembler(Limits{Datagrams: 4})
		other := packettest.UDP(c4, b4, packettest.Pattern(392))
		_, err := add(t, r, now, fragmentOf(other, 1, 0, 200, true))
		require.NoError(t, err)
		for id := range 100 {
			_, err := add(t, r, now, fragmentOf(datagram, id, 0, 200, true))
			require.NoError(t, err)
		}
		assert.Equal(t, 5, held(r))
		_, evicted := r.Dropped()
		assert.Equal(t, uint64(96), evicted)
		whole, err := add(t, r, now, fragmentOf(other, 1, 200, 400, false))
		require.NoError(t, err)
		assert.NotNil(t, whole)
		whole, err = add(t, r, now, fragmentOf(datagram, 99, 200, 400, false))
		require.NoError(t, err)
		assert.NotNil(t, whole, "its newest lives")
	})
	t.Run("bytes", func(t *testing.T) {
		r := NewReassembler(Limits{Bytes: 4000, SourceBytes: 1000})
		for id := range 50 {
			_, err := add(t, r, now, fragmentOf(datagram, id, 0, 200, true))
			require.NoError(t, err)
			_, bytes := r.Held()
			require.LessOrEqual(t, bytes, 1000)
		}
		big := packettest.UDP(c4, b4, packettest.Pattern(2000))
		_, err := add(t, r, now, fragmentOf(big, 1, 0, 1200, true))
		assert.ErrorIs(t, err, ErrTooMany, "one datagram alone is above the source's share")
	})
	t.Run("pieces", func(t *testing.T) {
		r := NewReassembler(Limits{Pieces: 10})
		for i := range 10 {
			_, err := add(t, r, now, fragmentOf(datagram, 1, i*16, i*16+8, true))
			require.NoError(t, err)
		}
		_, err := add(t, r, now, fragmentOf(datagram, 1, 200, 208, true))
		assert.ErrorIs(t, err, ErrTooMany)
	})
	t.Run("whole and IPv6", func(t *testing.T) {
		r := NewReassembler(Limits{})
		for _, frame := range [][]byte{datagram, packettest.UDP(a6, b6, nil)} {
			_, err := add(t, r, now, frame)
			assert.ErrorIs(t, err, ErrNotIPv4)
		}
	})
	t.Run("largest datagram", func(t *testing.T) {
		r := NewReassembler(Limits{})
		big := packettest.UDP(a4, b4, packettest.Pattern(65507))
		info := decode(t, big)
		var whole []byte
		require.NoError(t, Fragment(big, &info, 1500, make([]byte, 1514), func(f []byte) bool {
			var err error
			whole, err = add(t, r, now, f)
			return assert.NoError(t, err)
		}))
		assert.Equal(t, big, whole)
	})
}

func TestNoAllocations(t *testing.T) {
	for name, ends := range map[string][3]netip.AddrPort{"v4": {a4, b4, c4}, "v6": {a6, b6, c6}} {
		t.Run(name, func(t *testing.T) {
			super := packettest.TCP(ends[0], ends[1], 1, 2, ACK|PSH, packettest.Pattern(60000))
			quote := packettest.UDP(ends[0], ends[1], []byte("abc"))[14:]
			unreachable := packettest.ICMP(ends[1].Addr(), ends[0].Addr(), 3, 3, 0, quote)
			var info, embedded Info
			buffer := make([]byte, 2000)
			count := 0
			assert.Zero(t, testing.AllocsPerRun(100, func() {
				if Decode(super, &info) != nil || !VerifyTransport(super, &info) {
					panic("frame spoiled")
				}
				RewriteSource(super, &info, ends[2].Addr(), ends[2].Port())
				DecrementTTL(super, &info)
				if Split(super, &info, 1448, buffer, func(segment []byte) bool { count += len(segment); return true }) != nil {
					panic("split")
				}
				RewriteSource(super, &info, ends[0].Addr(), ends[0].Port())
				if info.IPv6() {
					super[21] = 64
				} else {
					super[22] = 64
					setIPv4Length(super[14:34], len(super)-14)
				}
				if Decode(unreachable, &info) != nil || DecodeEmbedded(unreachable, &info, &embedded) != nil {
					panic("quote spoiled")
				}
				RewriteEmbeddedSource(unreachable, &info, &embedded, ends[0].Addr(), ends[0].Port())
				if Decode(super[:20], &info) == nil {
					panic("error expected")
				}
				_ = Decode(super, &info)
				BuildICMPError(buffer, super, &info, ends[2].Addr(), 3, 4, 1400)
				BuildReset(buffer, super, &info)
			}))
			assert.NotZero(t, count)
		})
	}
}

func BenchmarkDecode(b *testing.B) {
	frame := packettest.TCP(a4, b4, 1, 2, ACK, nil)
	var info Info
	for b.Loop() {
		_ = Decode(frame, &info)
	}
}

func BenchmarkSum(b *testing.B) {
	data := packettest.Pattern(65536)
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		Sum(data, 0)
	}
}

func BenchmarkRewrite(b *testing.B) {
	frame := packettest.TCP(a4, b4, 1, 2, ACK, nil)
	var info Info
	_ = Decode(frame, &info)
	for b.Loop() {
		RewriteSource(frame, &info, c4.Addr(), c4.Port())
	}
}

func BenchmarkSplit(b *testing.B) {
	frame := packettest.TCP(a4, b4, 1, 2, ACK, packettest.Pattern(65000))
	var info Info
	_ = Decode(frame, &info)
	buffer := make([]byte, 2000)
	b.SetBytes(65000)
	for b.Loop() {
		_ = Split(frame, &info, 1448, buffer, func([]byte) bool { return true })
	}
}
