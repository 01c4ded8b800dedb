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
			buffer := make([]byte, link.MaxFrame)
			carry := func(f *link.Frame) {
				in = *f
				in.Data = buffer[:len(f.Data)]
				copy(in.Data, f.Data[:54]) // what forwarding changes
				carrier.Carry(&in)
				if _, err := db.ReadFrames(out[:]); err != nil {
					b.Fatal(err)
				}
			}
			made := func(port int, flags uint8, payload int) *link.Frame {
				data := packettest.TCP(netip.AddrPortFrom(webBack, uint16(port)), at("10.20.0.3:5432"), 1, 1, flags, packettest.Pattern(payload))
				packet.SetMACs(data, netstacktest.GatewayMAC, spec.Attachments[1].MAC)
				copy(buffer, data)
				return &link.Frame{Data: data}
			}
			for i := range c.flows {
				carry(made(1024+i, packet.SYN, 0))
			}
			f := made(1024, packet.ACK, c.payload)
			if c.payload > 1448 {
				var i packet.Info
				require.NoError(b, packet.Decode(f.Data, &i))
				packet.SetPartialChecksum(f.Data, &i)
				f.NeedsChecksum, f.ChecksumStart, f.ChecksumOffset = true, uint16(i.L4), 16
				f.Segmentation, f.GSOSize, f.HeaderLen = link.GSOTCP4, 1448, uint16(i.Payload)
			}
			b.SetBytes(int64(c.payload))
			b.ReportAllocs()
			for b.Loop() {
				carry(f)
			}
		})
	}
}
