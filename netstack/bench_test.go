package netstack_test

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"vz.test/vz/netstack"
	"vz.test/vz/netstack/link"
	"vz.test/vz/netstack/netstacktest"
	"vz.test/vz/netstack/packet"
	"vz.test/vz/netstack/packet/packettest"
)

// BenchmarkWay is what the domain adds to a frame between two ports: cost by
// flows and by paths, and of a super-frame.
func BenchmarkWay(b *testing.B) {
	for _, c := range []struct{ flows, paths, payload int }{{1, 2, 64}, {10_000, 2, 64}, {1, 1000, 64}, {1, 2, 60_000}} {
		b.Run(fmt.Sprintf("flows=%d/paths=%d/payload=%d", c.flows, c.paths, c.payload), func(b *testing.B) {
			spec := netstacktest.Shop()
			for i := range c.paths {
				spec.Paths = append(spec.Paths, netstack.Path{Name: fmt.Sprint("path-", i), From: []string{fmt.Sprint("m", i)},
					To: []string{"db"}, Network: "back", Protocol: "tcp"})
			}
			d := netstacktest.New(b, spec, netstack.Options{})
			netstacktest.Wire(b, d, "web", "back", 1500, netstacktest.Full)
			db := netstacktest.Wire(b, d, "db", "back", 1500, netstacktest.Full)
			carrier := d.Carrier("web", "back")
			var out [64]link.Frame
			var in link.Frame
			carry := func() {
				carrier.Carry(&in)
				if _, err := db.ReadFrames(out[:]); err != nil {
					b.Fatal(err)
				}
			}
			var frame []byte
			for i := range c.flows {
				from := netip.AddrPortFrom(webBack, uint16(1024+i))
				for _, flags := range []uint8{packet.SYN, packet.ACK} {
					frame = packettest.TCP(from, at("10.20.0.3:5432"), 1, 1, flags, packettest.Pattern(c.payload))
					packet.SetMACs(frame, netstacktest.GatewayMAC, spec.Attachments[1].MAC)
					if c.payload > 1400 && flags == packet.SYN {
						frame = frame[:0]
						frame = append(frame, tcp(from.String(), "10.20.0.3:5432", packet.SYN)...)
						packet.SetMACs(frame, netstacktest.GatewayMAC, spec.Attachments[1].MAC)
					}
					in = link.Frame{Data: frame}
					if c.payload > 1400 && flags == packet.ACK {
						break
					}
					carry()
				}
			}
			if c.payload > 1400 {
				var i packet.Info
				require.NoError(b, packet.Decode(frame, &i))
				packet.SetPartialChecksum(frame, &i)
				in = link.Frame{Data: frame, NeedsChecksum: true, ChecksumStart: uint16(i.L4), ChecksumOffset: 16,
					Segmentation: link.GSOTCP4, GSOSize: 1448, HeaderLen: uint16(i.Payload)}
			}
			start := in
			original := append([]byte(nil), frame[:54]...)
			b.SetBytes(int64(c.payload))
			b.ReportAllocs()
			for b.Loop() {
				in = start
				copy(in.Data, original)
				carry()
			}
		})
	}
}
