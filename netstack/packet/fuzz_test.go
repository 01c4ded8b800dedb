package packet

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"vz.test/vz/netstack/packet/packettest"
)

func seeds() [][]byte {
	extended := packettest.UDP(a6, b6, []byte("behind an extension"))
	extended = append(extended[:54:54], append([]byte{17, 0, 1, 4, 0, 0, 0, 0}, extended[54:]...)...)
	extended[20], extended[19] = 0, extended[19]+8
	udp := packettest.UDP(a4, b4, packettest.Pattern(400))
	router := netip.MustParseAddr("10.0.0.1")
	return [][]byte{
		udp,
		packettest.UDP(a6, b6, []byte("six")),
		packettest.TCP(a4, b4, 1, 2, ACK|PSH|FIN|CWR, packettest.Pattern(3000)),
		packettest.TCP(a6, b6, 1, 2, SYN, nil),
		packettest.ICMP(a4.Addr(), b4.Addr(), ICMPEcho, 0, 1, []byte("ping")),
		packettest.ICMP(a6.Addr(), b6.Addr(), ICMPv6Echo, 0, 1, []byte("ping")),
		packettest.ICMP(router, a4.Addr(), ICMPUnreachable, 3, 0, udp[14:]),
		packettest.ICMP(b6.Addr(), a6.Addr(), ICMPv6Unreachable, 1, 0, packettest.TCP(a6, b6, 1, 2, SYN, nil)[14:]),
		fragmentOf(udp, 7, 0, 200, true),
		fragmentOf(udp, 7, 200, 408, false),
		extended,
		PutARP(make([]byte, 42), Broadcast, packettest.A, ARP{ARPRequest, packettest.A, a4.Addr(), MAC{}, b4.Addr()}),
	}
}

// Whatever a guest sends: nothing panics, Info stays within the frame, and what
// was right before a rewriting or a cut is right after it.
func FuzzDecode(f *testing.F) {
	for _, seed := range seeds() {
		f.Add(seed, uint16(1000), false)
		f.Add(seed, uint16(9), true)
	}
	f.Fuzz(func(t *testing.T, frame []byte, size uint16, partial bool) {
		if len(frame) > EthernetLen+65535 {
			return
		}
		if message, err := DecodeARP(frame); err == nil {
			PutARP(make([]byte, 60), Broadcast, message.SenderMAC, message.Reply(packettest.B))
		}
		var info Info
		if Decode(frame, &info) != nil {
			return
		}
		require.LessOrEqual(t, info.Length, len(frame))
		if info.EtherType == EtherTypeARP {
			return
		}
		require.LessOrEqual(t, info.L3, info.Payload)
		require.LessOrEqual(t, info.Payload, info.Length)
		require.LessOrEqual(t, info.L4, info.Payload)

		if partial {
			SetPartialChecksum(frame, &info)
		}
		buffer := make([]byte, EthernetLen+65535)
		if answer := BuildICMPError(buffer, frame, &info, info.Destination, 1, 2, 3); answer != nil {
			var error, quoted Info
			require.NoError(t, Decode(answer, &error))
			require.True(t, VerifyTransport(answer, &error))
			if DecodeEmbedded(answer, &error, &quoted) == nil {
				require.LessOrEqual(t, quoted.Payload, quoted.Length)
				require.Equal(t, info.Source, quoted.Source)
				require.Equal(t, info.SourcePort, quoted.SourcePort)
			}
		}
		if answer := BuildReset(buffer, frame, &info); answer != nil {
			var reset Info
			require.NoError(t, Decode(answer, &reset))
			require.True(t, VerifyTransport(answer, &reset))
		}

		right := VerifyTransport(frame, &info)
		other := c4
		if info.IPv6() {
			other = c6
		}
		var embedded Info
		if DecodeEmbedded(frame, &info, &embedded) == nil {
			RewriteEmbeddedSource(frame, &info, &embedded, other.Addr(), other.Port())
			RewriteEmbeddedDestination(frame, &info, &embedded, other.Addr(), other.Port())
			require.Equal(t, right, VerifyTransport(frame, &info), "quote")
			var again Info
			require.NoError(t, DecodeEmbedded(frame, &info, &again))
			require.Equal(t, embedded, again)
		}
		RewriteSource(frame, &info, other.Addr(), other.Port())
		RewriteDestination(frame, &info, other.Addr(), other.Port())
		DecrementTTL(frame, &info)
		var again Info
		require.NoError(t, Decode(frame, &again))
		again.PartialChecksum = info.PartialChecksum
		require.Equal(t, info, again)
		require.Equal(t, right, VerifyTransport(frame, &info))

		payload := bytes.Clone(frame[info.Payload:info.Length])
		count := 0
		err := Split(frame, &info, int(size), buffer, func(segment []byte) bool {
			var part Info
			require.NoError(t, Decode(segment, &part))
			require.True(t, VerifyTransport(segment, &part))
			require.LessOrEqual(t, part.PayloadLen(), int(size))
			require.True(t, bytes.HasPrefix(payload, segment[part.Payload:part.Length]))
			payload = payload[part.PayloadLen():]
			count++
			return true
		})
		if err == nil {
			require.Empty(t, payload)
			require.NotZero(t, count)
		}
	})
}

// Any IPv4 packet, cut to any MTU and put together in an order that the fuzzer
// picks, is what it was.
func FuzzFragment(f *testing.F) {
	for _, seed := range seeds() {
		f.Add(seed, uint16(576), uint8(3))
	}
	f.Fuzz(func(t *testing.T, frame []byte, mtu uint16, turn uint8) {
		var info Info
		if Decode(frame, &info) != nil || info.EtherType != EtherTypeIPv4 || info.Fragment {
			return
		}
		frame = frame[:info.Length]
		var fragments [][]byte
		err := Fragment(frame, &info, int(mtu), make([]byte, EthernetLen+int(mtu)), func(fragment []byte) bool {
			require.LessOrEqual(t, len(fragment), EthernetLen+int(mtu))
			fragments = append(fragments, bytes.Clone(fragment))
			return true
		})
		if err != nil {
			require.ErrorIs(t, err, ErrMTU)
			return
		}
		if len(fragments) == 1 {
			require.Equal(t, frame, fragments[0])
			return
		}
		r := NewReassembler(Limits{Pieces: 1 << 16, SourceBytes: 1 << 30, Bytes: 1 << 30})
		for i := range fragments {
			fragment := fragments[(i+int(turn))%len(fragments)]
			var part Info
			require.NoError(t, Decode(fragment, &part))
			whole, _, err := r.Add(time.Time{}, fragment, &part)
			if err == ErrTinyFragment { // long options, small MTU
				return
			}
			require.NoError(t, err)
			if i == len(fragments)-1 {
				require.Equal(t, frame, whole)
			} else {
				require.Nil(t, whole)
			}
		}
	})
}

// Fragments as a hostile guest makes them: each four bytes of script are one,
// by offset, length and flags. The accounts hold, and a whole datagram has every
// byte from the fragment that brought it.
func FuzzReassemble(f *testing.F) {
	f.Add([]byte{0, 8, 1, 0, 8, 8, 0, 0})
	f.Add([]byte{0, 8, 1, 0, 4, 8, 1, 0, 12, 8, 0, 0, 0, 8, 1, 0})
	f.Add([]byte{8, 8, 0, 1, 0, 4, 1, 1, 4, 4, 1, 1, 255, 255, 0, 2})
	datagram := packettest.UDP(a4, b4, packettest.Pattern(4096))
	f.Fuzz(func(t *testing.T, script []byte) {
		limits := Limits{Bytes: 8000, SourceBytes: 4000, Datagrams: 4, Pieces: 16}
		r := NewReassembler(limits)
		now := time.Unix(0, 0)
		for ; len(script) >= 4; script = script[4:] {
			from := int(script[0]) * 8
			to := min(from+int(script[1])*8, 4104)
			if to <= from {
				continue
			}
			frame := fragmentOf(datagram, int(script[3]&7), from, to, script[2]&1 != 0)
			binary.BigEndian.PutUint32(frame[26:], 0x0a000000|uint32(script[3]>>3&3))
			setIPv4Length(frame[14:34], len(frame)-14)
			now = now.Add(time.Duration(script[2]>>1) * 100 * time.Millisecond)
			var info Info
			if Decode(frame, &info) != nil {
				continue
			}
			whole, _, err := r.Add(now, frame, &info)
			if whole != nil {
				require.NoError(t, err)
				require.True(t, bytes.HasPrefix(datagram[34:], whole[34:]))
			}
			sum, counts := 0, map[netip.Addr]int{}
			datagrams := 0
			for d := r.oldest; d != nil; d = d.newer {
				datagrams++
				counts[d.key.source]++
				for _, p := range d.pieces {
					sum += len(p.data) + pieceOverhead
				}
			}
			held, bytes := r.Held()
			require.Equal(t, datagrams, held)
			require.Equal(t, sum, bytes)
			require.LessOrEqual(t, bytes, limits.Bytes)
			require.Len(t, r.sources, len(counts))
			for source, n := range counts {
				require.LessOrEqual(t, n, limits.Datagrams)
				require.LessOrEqual(t, r.sources[source].bytes, limits.SourceBytes)
			}
		}
		r.Expire(now.Add(time.Hour))
		held, bytes := r.Held()
		require.Zero(t, held)
		require.Zero(t, bytes)
	})
}
