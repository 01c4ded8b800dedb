package netstack_test

import (
	"context"
	"slices"
	"sync"
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

// A conditioner notes all that it is given and does as it is told.
type conditioner struct {
	mu       sync.Mutex
	verdict  func(f *packet.Flight) packet.Verdict
	flights  []flight
	held     []heldFrame
	forgot   []uint64
	problems []string
}

type flight struct {
	direction packet.Direction
	flow      packet.FlowID
	payload   int
}

type heldFrame struct {
	to    packet.Sink
	frame []byte
}

func (c *conditioner) Condition(f *packet.Flight) packet.Verdict {
	c.mu.Lock()
	defer c.mu.Unlock()
	var info packet.Info
	switch {
	case packet.Decode(f.Frame, &info) != nil || len(f.Frame) != info.Length:
		c.problems = append(c.problems, "no frame")
	case info.PartialChecksum || f.Info.PartialChecksum || !packet.VerifyTransport(f.Frame, &info):
		c.problems = append(c.problems, "checksum")
	case info != *f.Info:
		c.problems = append(c.problems, "info")
	}
	c.flights = append(c.flights, flight{f.Direction, f.Flow, f.Info.PayloadLen()})
	verdict := packet.Pass
	if c.verdict != nil {
		verdict = c.verdict(f)
	}
	if verdict == packet.Held {
		c.held = append(c.held, heldFrame{f.To, slices.Clone(f.Frame)})
	}
	return verdict
}

func (c *conditioner) Forget(flow uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forgot = append(c.forgot, flow)
}

func (c *conditioner) release() {
	c.mu.Lock()
	held := c.held
	c.held = nil
	c.mu.Unlock()
	for _, h := range held {
		h.to.Deliver(h.frame)
	}
}

func (c *conditioner) seen() []flight {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.flights)
}

func TestImpairUnknownPath(t *testing.T) {
	d := netstacktest.New(t, netstacktest.Shop(), netstack.Options{})
	var unknown *netstack.UnknownError
	require.ErrorAs(t, d.Impair("nothing", &conditioner{}), &unknown)
	assert.Equal(t, netstack.UnknownError{What: "path", Name: "nothing"}, *unknown)
}

func TestConditionerLosesAndHolds(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	web := netstacktest.Plug(t, d, spec, "web", "back", 1500, netstacktest.Full)
	db := netstacktest.Plug(t, d, spec, "db", "back", 1500, netstacktest.Full)
	c := &conditioner{}
	require.NoError(t, d.Impair("web-udp", c))
	send := func(last byte) { web.Send(udp("10.20.0.2:40000", "10.20.0.3:5000", int(last))) }

	send(1)
	_, info := db.Next()
	assert.Equal(t, 1, info.PayloadLen())
	c.verdict = func(*packet.Flight) packet.Verdict { return packet.Lost }
	send(2)
	web.Quiet()
	c.verdict = func(*packet.Flight) packet.Verdict { return packet.Held }
	send(3)
	web.Quiet()
	c.verdict = nil
	send(4)
	_, info = db.Next()
	assert.Equal(t, 4, info.PayloadLen(), "2 is lost, 3 is held")
	c.release()
	_, info = db.Next()
	assert.Equal(t, 3, info.PayloadLen())
	assert.EqualValues(t, 1, netstacktest.Count(d, "web", "back", policy.FaultLost))

	// Super-frames come as segments.
	var i packet.Info
	data := packettest.UDP(at("10.20.0.2:40000"), at("10.20.0.3:5000"), packettest.Pattern(2500))
	require.NoError(t, packet.Decode(data, &i))
	packet.SetMACs(data, netstacktest.GatewayMAC, web.Attachment.MAC)
	packet.SetPartialChecksum(data, &i)
	web.SendRaw(link.Frame{Data: data, NeedsChecksum: true, ChecksumStart: uint16(i.L4), ChecksumOffset: 6,
		Segmentation: link.GSOUDP, GSOSize: 1000, HeaderLen: uint16(i.Payload)})
	for _, size := range []int{1000, 1000, 500} {
		_, info = db.Next()
		assert.Equal(t, size, info.PayloadLen())
	}
	db.Send(udp("10.20.0.3:5000", "10.20.0.2:40000", 7))
	web.Next()

	serial := d.Flows()[0].Serial
	id := packet.FlowID{Serial: serial, Source: "web", Destination: "db", Protocol: 17, DestinationPort: 5000}
	var want []flight
	for _, size := range []int{1, 2, 3, 4, 1000, 1000, 500} {
		want = append(want, flight{packet.Request, id, size})
	}
	assert.Equal(t, append(want, flight{packet.Response, id, 7}), c.seen())
	assert.Empty(t, c.problems)

	require.NoError(t, d.Impair("web-udp", nil))
	send(8)
	db.Next()
	assert.Len(t, c.seen(), 8, "healed")
	require.NoError(t, d.Impair("web-udp", c))
	d.Detach("db", "back")
	assert.Equal(t, []uint64{serial}, c.forgot)
}

// Every direction is impaired exactly once, what the gateway originates and
// the host's port included.
func TestEveryDirectionIsImpairedOnce(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	web := netstacktest.Boot(t, d, spec, "web", "edge")
	backend := web.Serve(t, 8080)
	l, err := d.Listen(at("198.51.100.1:443"))
	require.NoError(t, err)
	client := netstacktest.Boot(t, d, spec, "client", "edge")
	gateway, err := d.ListenPacket(at("100.64.0.1:53"))
	require.NoError(t, err)
	go func() {
		b := make([]byte, 100)
		if n, from, err := gateway.ReadFrom(b); err == nil {
			_, _ = gateway.WriteTo(b[:n], from)
		}
	}()
	for _, test := range []struct {
		path string
		id   packet.FlowID
		talk func(t *testing.T)
	}{
		{"client-shop", packet.FlowID{Source: "client", Destination: "endpoint:shop", Protocol: 6, DestinationPort: 443}, func(t *testing.T) {
			echo(l)
			c, err := client.Connect("198.51.100.1:443")
			require.NoError(t, err)
			talk(t, c, 1<<17)
		}},
		{"host:shop", packet.FlowID{Source: "host", Destination: "endpoint:shop", Protocol: 6, DestinationPort: 443}, func(t *testing.T) {
			echo(l)
			c, err := d.DialHost(context.Background(), "shop", 443)
			require.NoError(t, err)
			talk(t, c, 1<<17)
		}},
		{"backend:shop", packet.FlowID{Source: "edge", Destination: "web", Protocol: 6, DestinationPort: 8080}, func(t *testing.T) {
			echo(backend)
			c, err := d.DialBackend(context.Background(), "shop")
			require.NoError(t, err)
			talk(t, c, 1<<17)
		}},
		{"dns:client", packet.FlowID{Source: "client", Destination: "gateway", Protocol: 17, DestinationPort: 53}, func(t *testing.T) {
			c, err := client.DialPacket(at("100.64.0.4:5353"), at("100.64.0.1:53"))
			require.NoError(t, err)
			defer c.Close()
			_, err = c.Write([]byte("question"))
			require.NoError(t, err)
			_, err = c.Read(make([]byte, 100))
			require.NoError(t, err)
		}},
	} {
		t.Run(test.path, func(t *testing.T) {
			// Each packet is held once, and goes on when the other end needs it:
			// a second time round it would come here again.
			c := &conditioner{}
			c.verdict = func(*packet.Flight) packet.Verdict {
				go c.release()
				return packet.Held
			}
			require.NoError(t, d.Impair(test.path, c))
			test.talk(t)
			require.NoError(t, d.Impair(test.path, nil))
			bytes := map[packet.Direction]int{}
			for _, f := range c.seen() {
				f.flow.Serial = 0
				require.Equal(t, test.id, f.flow)
				bytes[f.direction] += f.payload
			}
			assert.Empty(t, c.problems)
			size := 1 << 17
			if test.id.Protocol == packet.ProtocolUDP {
				size = len("question")
				assert.Equal(t, size, bytes[packet.Request])
				assert.Equal(t, size, bytes[packet.Response])
			}
			assert.GreaterOrEqual(t, bytes[packet.Request], size) // more where TCP sends again
			assert.GreaterOrEqual(t, bytes[packet.Response], size)
		})
	}
	for _, p := range d.PathStats() {
		if p.Name == "client-shop" {
			assert.EqualValues(t, 1, p.Opened)
			assert.Greater(t, p.Request.Bytes, uint64(1<<17))
			assert.Greater(t, p.Response.Bytes, uint64(1<<17))
		}
	}
}
