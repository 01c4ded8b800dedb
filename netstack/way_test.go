package netstack_test

import (
	"math/rand/v2"
	"net/netip"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"vz.test/vz/netstack"
	"vz.test/vz/netstack/link"
	"vz.test/vz/netstack/netstacktest"
	"vz.test/vz/netstack/packet"
	"vz.test/vz/netstack/packet/packettest"
)

// An established flow's way costs no allocation, a refused packet's neither.
func TestWayAllocatesNothing(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	ports := map[string]link.Port{
		"web":    netstacktest.Wire(t, d, "web", "back", 1500, netstacktest.Full),
		"db":     netstacktest.Wire(t, d, "db", "back", 1500, netstacktest.None),
		"client": netstacktest.Wire(t, d, "client", "edge", 1500, netstacktest.Full),
	}
	super := packettest.TCP(at("10.20.0.2:40001"), at("10.20.0.3:5432"), 1001, 1, packet.ACK, packettest.Pattern(60000))
	var i packet.Info
	require.NoError(t, packet.Decode(super, &i))
	packet.SetPartialChecksum(super, &i)
	for _, test := range []struct {
		name           string
		machine, other string
		network        string
		first          []byte // opens the flow
		frame          link.Frame
		out            int // frames
	}{
		{"TCP", "web", "db", "back", tcp("10.20.0.2:40000", "10.20.0.3:5432", packet.SYN),
			link.Frame{Data: tcp("10.20.0.2:40000", "10.20.0.3:5432", packet.ACK)}, 1},
		{"super-frame cut into segments", "web", "db", "back", tcp("10.20.0.2:40001", "10.20.0.3:5432", packet.SYN),
			link.Frame{Data: super, NeedsChecksum: true, ChecksumStart: uint16(i.L4), ChecksumOffset: 16,
				Segmentation: link.GSOTCP4, GSOSize: 1448, HeaderLen: uint16(i.Payload)}, 42},
		{"UDP", "web", "db", "back", nil, link.Frame{Data: udp("10.20.0.2:40000", "10.20.0.3:5000", 1000)}, 1},
		{"refused", "web", "web", "back", nil, link.Frame{Data: tcp("10.20.0.2:40000", "10.20.0.3:22", packet.SYN)}, 1},
		{"ARP", "web", "web", "back", nil, link.Frame{Data: packet.PutARP(make([]byte, 42), packet.Broadcast, spec.Attachments[1].MAC,
			packet.ARP{Operation: packet.ARPRequest, SenderMAC: spec.Attachments[1].MAC, SenderAddress: webBack, TargetAddress: dbBack})}, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			carrier := d.Carrier(test.machine, test.network)
			mac := spec.Attachments[1].MAC
			var in link.Frame
			var out [64]link.Frame
			buffer := make([]byte, link.MaxFrame)
			carry := func(f link.Frame) {
				in = f
				in.Data = buffer[:copy(buffer, f.Data)]
				carrier.Carry(&in)
				for got := 0; got < test.out; {
					n, err := ports[test.other].ReadFrames(out[:])
					if err != nil {
						t.Fatal(err)
					}
					got += n
				}
			}
			packet.SetMACs(test.frame.Data, netstacktest.GatewayMAC, mac)
			if test.first != nil {
				packet.SetMACs(test.first, netstacktest.GatewayMAC, mac)
				in = link.Frame{Data: test.first}
				carrier.Carry(&in)
				_, err := ports[test.other].ReadFrames(out[:])
				require.NoError(t, err)
			}
			for range 100 { // pools and buffers grow to what they need
				carry(test.frame)
			}
			assert.Zero(t, testing.AllocsPerRun(100, func() { carry(test.frame) }))
		})
	}
	// With NAT on, back from the edge: the stack's packets allocate, so both
	// ways are carried by hand.
	t.Run("NAT", func(t *testing.T) {
		spec := netstacktest.Shop()
		spec.Paths[3].Protocol, spec.Paths[3].Ports = "any", nil
		require.NoError(t, d.Update(spec))
		request := udp("100.64.0.4:40000", "198.51.100.1:9", 1000)
		packet.SetMACs(request, netstacktest.GatewayMAC, spec.Attachments[5].MAC)
		d.Carrier("client", "edge").Carry(&link.Frame{Data: append([]byte(nil), request...)})
		var out [64]link.Frame
		_, err := ports["client"].ReadFrames(out[:]) // port unreachable
		require.NoError(t, err)
		response := udp("198.51.100.1:9", "203.0.113.4:40000", 1000)
		buffer := make([]byte, 2000)
		var in link.Frame
		carrier := d.GatewayCarrier()
		carry := func() {
			in = link.Frame{Data: buffer[:copy(buffer, response)]}
			carrier.Carry(&in)
			if _, err := ports["client"].ReadFrames(out[:]); err != nil {
				t.Fatal(err)
			}
		}
		carry()
		var info packet.Info
		require.NoError(t, packet.Decode(out[0].Data, &info))
		assert.Equal(t, at("100.64.0.4:40000"), netip.AddrPortFrom(info.Destination, info.DestinationPort))
		assert.True(t, packet.VerifyTransport(out[0].Data, &info))
		assert.Zero(t, testing.AllocsPerRun(100, carry))

		sink := d.SinkCarrier("client", "edge") // as Carrier, but the stack is left out
		out0 := func() {
			in = link.Frame{Data: buffer[:copy(buffer, request)]}
			sink.Carry(&in)
		}
		assert.Zero(t, testing.AllocsPerRun(100, out0))
	})
}

// Everything at once, for the race detector: traffic both ways, updates,
// faults, ports that come and go, and readers of it all.
func TestConcurrently(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{OnRefusal: func(netstack.Refusal) {}})
	web := netstacktest.Boot(t, d, spec, "web", "back")
	db := netstacktest.Boot(t, d, spec, "db", "back")
	l := db.Serve(t, 5432)
	edge, err := d.Listen(at("198.51.100.1:443"))
	require.NoError(t, err)
	for range 4 {
		go func() {
			for {
				if _, ok := <-echo(l); !ok {
					return
				}
			}
		}()
		go func() {
			for {
				if _, ok := <-echo(edge); !ok {
					return
				}
			}
		}()
	}
	var traffic, noise sync.WaitGroup
	for range 4 {
		traffic.Go(func() {
			for range 10 {
				c, err := web.Connect("10.20.0.3:5432")
				if assert.NoError(t, err) {
					talk(t, c, 100_000)
				}
				c, err = d.DialHost(t.Context(), "shop", 443)
				if assert.NoError(t, err) {
					talk(t, c, 100_000)
				}
			}
		})
	}
	done := make(chan struct{})
	until := func(f func(n int)) {
		noise.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-done:
					return
				default:
					f(n)
				}
			}
		})
	}
	until(func(n int) {
		next := netstacktest.Shop()
		if n%2 == 0 {
			next.Paths = next.Paths[:len(next.Paths):len(next.Paths)]
			next.Paths[2].Protocol = "any"
			next.Endpoints = append(next.Endpoints, netstack.Endpoint{Name: "other", Network: "edge", Address: ip("198.51.100.2"), Machine: "web"})
		}
		assert.NoError(t, d.Update(next))
	})
	until(func(n int) {
		var c netstack.Conditioner
		if n%2 == 0 {
			c = &conditioner{}
		}
		assert.NoError(t, d.Impair("web-db", c))
	})
	until(func(int) {
		d.Flows()
		d.Drops()
		d.Refusals()
		d.Ports()
		d.PathStats()
		d.Expire()
	})
	until(func(int) {
		ours, theirs := link.Pipe(1500, netstacktest.Full)
		assert.NoError(t, d.Attach("client", "edge", theirs))
		frame := tcp("100.64.0.4:40000", "100.64.0.2:22", packet.SYN)
		packet.SetMACs(frame, netstacktest.GatewayMAC, spec.Attachments[5].MAC)
		_, _ = ours.WriteFrames([]link.Frame{{Data: frame}})
		if rand.IntN(2) == 0 {
			_ = ours.Close()
		} else {
			d.Detach("client", "edge")
		}
	})
	traffic.Wait()
	close(done)
	noise.Wait()
}

// The whole way as one target: whatever a guest sends, the domain neither
// panics nor sends a frame that isn't sound, nor as from anybody it isn't.
func FuzzForward(f *testing.F) {
	for _, frame := range [][]byte{
		tcp("10.20.0.2:40000", "10.20.0.3:5432", packet.SYN),
		tcp("10.20.0.2:40000", "10.20.0.3:22", packet.SYN),
		udp("10.20.0.2:40000", "10.20.0.3:5000", 100),
		set(udp("10.20.0.2:40000", "10.20.0.3:5000", 100), 20, 0x20, 0),
		set(udp("10.20.0.2:40000", "10.20.0.1:53", 100), 22, 1),
		packettest.ICMP(webBack, backGateway, 8, 0, 7<<16|1, []byte("ping")),
		packettest.ICMP(webBack, dbBack, 3, 4, 1400, udp("10.20.0.3:5000", "10.20.0.2:40000", 100)[14:]),
		packet.PutARP(make([]byte, 42), packet.Broadcast, packettest.A, packet.ARP{Operation: 1, SenderMAC: packettest.A,
			SenderAddress: webBack, TargetAddress: dbBack}),
	} {
		f.Add(frame, uint16(0), false, true)
		f.Add(frame, uint16(8), true, false)
	}
	spec := netstacktest.Shop()
	d := netstacktest.New(f, spec, netstack.Options{})
	ports := []link.Port{
		netstacktest.Wire(f, d, "web", "back", 1500, netstacktest.Full),
		netstacktest.Wire(f, d, "db", "back", 576, netstacktest.None),
	}
	require.NoError(f, d.Impair("web-udp", passing{}))
	web, db := d.Carrier("web", "back"), d.Carrier("db", "back")
	f.Fuzz(func(t *testing.T, frame []byte, gso uint16, fromDB, repair bool) {
		if len(frame) < 14 || len(frame) > link.MaxFrame {
			return
		}
		frame = append([]byte(nil), frame...) // the engine's own, and forwarding writes
		carrier, attachment := web, spec.Attachments[1]
		if fromDB {
			carrier, attachment = db, spec.Attachments[3]
		}
		packet.SetMACs(frame, netstacktest.GatewayMAC, attachment.MAC)
		if header := 14 + int(frame[min(14, len(frame)-1)]&15)*4; repair && len(frame) >= header && header >= 34 {
			// Or few would get past the spoof check.
			source := attachment.Address.As4()
			frame[12], frame[13] = 8, 0
			set(frame, 26, source[:]...)
		}
		in := link.Frame{Data: frame}
		var info packet.Info
		if gso != 0 && packet.Decode(frame, &info) == nil && info.L4 != 0 && !info.Fragment {
			// What a link lets through: the header says what the frame bears out.
			switch info.Protocol {
			case packet.ProtocolTCP:
				in.Segmentation, in.ChecksumOffset = link.GSOTCP4, 16
			case packet.ProtocolUDP:
				in.Segmentation, in.ChecksumOffset = link.GSOUDP, 6
			}
			if in.Segmentation != link.GSONone && !info.IPv6() && gso >= 8 && info.PayloadLen() > int(gso) && info.PayloadLen() < 128*int(gso) {
				in.NeedsChecksum, in.ChecksumStart, in.GSOSize, in.HeaderLen = true, uint16(info.L4), gso, uint16(info.Payload)
			} else {
				in.Segmentation, in.ChecksumOffset = link.GSONone, 0
			}
		}
		before := [2]uint64{netstacktest.Sent(d, "web", "back"), netstacktest.Sent(d, "db", "back")}
		carrier.Carry(&in)
		after := [2]uint64{netstacktest.Sent(d, "web", "back"), netstacktest.Sent(d, "db", "back")}
		for i, port := range ports {
			malformed, _ := port.Drops()
			require.Zero(t, malformed, "a frame that doesn't fit its port")
			if after[i] == before[i] {
				continue
			}
			var out [link.MaxFrame / 8]link.Frame
			n, err := port.ReadFrames(out[:])
			require.NoError(t, err)
			for _, o := range out[:n] {
				require.NoError(t, o.Decode(&info))
				require.Equal(t, netstacktest.GatewayMAC, packet.SourceMAC(o.Data))
				if info.EtherType == packet.EtherTypeIPv4 && o.Segmentation == link.GSONone {
					require.LessOrEqual(t, info.Length-14, port.MTU())
				}
			}
		}
	})
}

// passing is a conditioner that does nothing.
type passing struct{}

func (passing) Condition(*packet.Flight) packet.Verdict { return packet.Pass }
func (passing) Forget(uint64)                           {}

func TestRouteSize(t *testing.T) {
	assert.EqualValues(t, 48, netstack.RouteSize, "flow's TestSize measures with this")
}
