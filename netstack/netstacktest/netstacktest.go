// Package netstacktest makes small route domains for tests: the
// shop, guests that are gVisor stacks at the far end of a link.Pipe, and
// wires that a test writes frames to by hand.
package netstacktest

import (
	"context"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"vz.test/vz/netstack"
	"vz.test/vz/netstack/ipstack"
	"vz.test/vz/netstack/link"
	"vz.test/vz/netstack/packet"
)

// GatewayMAC is what Shop's gateway answers to.
var GatewayMAC = packet.MAC{0x02, 'v', 'z', 0, 0, 0x01}

// Full is every offload, as a TAP has it; None is a plain network card.
var (
	Full = link.Offload{Checksum: true, TSO4: true, TSO6: true, USO: true}
	None = link.Offload{}
)

// Shop is two private networks and an edge; web, db and client; the endpoint
// shop, which web serves; and paths
//
//	web-db       web → db       back   tcp/5432
//	web-dns      web → db       back   udp/5000-5010
//	web-ping     web → db       back   icmp
//	client-shop  client → shop  edge   tcp/443
//	pair         client → web   edge   any
//
// with all that are implicit. front resets, back prohibits.
func Shop() netstack.Spec {
	addr, prefix := netip.MustParseAddr, netip.MustParsePrefix
	port := func(first, last uint16) []netstack.PortRange { return []netstack.PortRange{{First: first, Last: last}} }
	s := netstack.Spec{
		Networks: []netstack.Network{
			{Name: "front", Kind: netstack.Private, Prefix: prefix("10.10.0.0/24"), Gateway: addr("10.10.0.1"), MTU: 1500, Refuse: netstack.Reset},
			{Name: "back", Kind: netstack.Private, Prefix: prefix("10.20.0.0/24"), Gateway: addr("10.20.0.1"), MTU: 1500, Refuse: netstack.Prohibited},
			{Name: "edge", Kind: netstack.SimulatedPublic, Prefix: prefix("100.64.0.0/24"), Gateway: addr("100.64.0.1"), MTU: 1500, Refuse: netstack.Reset},
		},
		Attachments: []netstack.Attachment{
			{Machine: "web", Network: "front", MAC: mac(1), Address: addr("10.10.0.2")},
			{Machine: "web", Network: "back", MAC: mac(2), Address: addr("10.20.0.2")},
			{Machine: "web", Network: "edge", MAC: mac(3), Address: addr("100.64.0.2"), Public: addr("203.0.113.2")},
			{Machine: "db", Network: "back", MAC: mac(4), Address: addr("10.20.0.3")},
			{Machine: "client", Network: "front", MAC: mac(5), Address: addr("10.10.0.4")},
			{Machine: "client", Network: "edge", MAC: mac(6), Address: addr("100.64.0.4"), Public: addr("203.0.113.4")},
		},
		Endpoints: []netstack.Endpoint{
			{Name: "shop", Network: "edge", Address: addr("198.51.100.1"), Ports: []uint16{443, 80}, Machine: "web", Port: 8080},
		},
		Paths: []netstack.Path{
			{Name: "web-db", From: []string{"web"}, To: []string{"db"}, Network: "back", Protocol: "tcp", Ports: port(5432, 5432)},
			{Name: "web-udp", From: []string{"web"}, To: []string{"db"}, Network: "back", Protocol: "udp", Ports: port(5000, 5010)},
			{Name: "web-ping", From: []string{"web"}, To: []string{"db"}, Network: "back", Protocol: "icmp"},
			{Name: "client-shop", From: []string{"client"}, To: []string{"endpoint:shop"}, Network: "edge", Protocol: "tcp", Ports: port(443, 443)},
			{Name: "pair", From: []string{"client"}, To: []string{"web"}, Network: "edge", Protocol: "any"},
		},
		SearchDomains: []string{"vz.internal"},
		HostAddress:   addr("203.0.113.254"),
	}
	for _, machine := range []string{"web", "db", "client"} {
		s.Paths = append(s.Paths, netstack.Path{Name: "dns:" + machine, Kind: netstack.PathDNS, From: []string{machine}, To: []string{"gateway"}})
	}
	s.Paths = append(s.Paths,
		netstack.Path{Name: "backend:shop", Kind: netstack.PathBackend, From: []string{"edge"}, To: []string{"web"},
			Network: "edge", Protocol: "tcp", Ports: port(8080, 8080)},
		netstack.Path{Name: "host:shop", Kind: netstack.PathHost, From: []string{"host"}, To: []string{"endpoint:shop"},
			Network: "edge", Protocol: "tcp"})
	return s
}

func mac(last byte) packet.MAC { return packet.MAC{0x02, 0, 0, 0, 0, last} }

// New makes a Domain that the test closes at its end.
func New(t testing.TB, spec netstack.Spec, options netstack.Options) *netstack.Domain {
	t.Helper()
	d, err := netstack.New(spec, options)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

// Wire attaches the far end of a pipe as a Machine's port and returns ours.
func Wire(t testing.TB, d *netstack.Domain, machine, network string, mtu int, offload link.Offload) link.Port {
	t.Helper()
	ours, theirs := link.Pipe(mtu, offload)
	require.NoError(t, d.Attach(machine, network, theirs))
	return ours
}

// A Guest is one attachment with a TCP/IP stack behind it.
type Guest struct {
	*ipstack.Host
	Attachment netstack.Attachment
}

// Boot attaches a Guest with every offload.
func Boot(t testing.TB, d *netstack.Domain, spec netstack.Spec, machine, network string) *Guest {
	t.Helper()
	return BootOn(t, d, spec, machine, network, 1500, Full)
}

// BootOn attaches a Guest.
func BootOn(t testing.TB, d *netstack.Domain, spec netstack.Spec, machine, network string, mtu int, offload link.Offload) *Guest {
	t.Helper()
	for _, a := range spec.Attachments {
		if a.Machine != machine || a.Network != network {
			continue
		}
		h, err := ipstack.Attach(Wire(t, d, machine, network, mtu, offload),
			ipstack.Config{MAC: a.MAC, Neighbour: GatewayMAC})
		require.NoError(t, err)
		t.Cleanup(func() { _ = h.Close() })
		require.NoError(t, h.AddAddress(a.Address))
		return &Guest{h, a}
	}
	require.FailNow(t, "no such attachment", "%s on %s", machine, network)
	return nil
}

// Connect dials TCP from the Guest.
func (g *Guest) Connect(to string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	return g.Dial(ctx, netip.AddrPortFrom(g.Attachment.Address, 0), netip.MustParseAddrPort(to), nil)
}

// Serve listens for TCP on one of the Guest's ports.
func (g *Guest) Serve(t testing.TB, port uint16) net.Listener {
	t.Helper()
	l, err := g.Listen(netip.AddrPortFrom(g.Attachment.Address, port))
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// A Line is one attachment whose frames a test makes and reads by hand.
type Line struct {
	Port       link.Port
	Attachment netstack.Attachment
	t          testing.TB
	frames     chan link.Frame
}

// Plug attaches a Line.
func Plug(t testing.TB, d *netstack.Domain, spec netstack.Spec, machine, network string, mtu int, offload link.Offload) *Line {
	t.Helper()
	for _, a := range spec.Attachments {
		if a.Machine == machine && a.Network == network {
			l := &Line{Port: Wire(t, d, machine, network, mtu, offload), Attachment: a, t: t, frames: make(chan link.Frame, 1024)}
			done := make(chan struct{})
			go l.read(done)
			t.Cleanup(func() { _ = l.Port.Close(); <-done })
			return l
		}
	}
	require.FailNow(t, "no such attachment", "%s on %s", machine, network)
	return nil
}

func (l *Line) read(done chan struct{}) {
	defer close(done)
	var batch [16]link.Frame
	for {
		n, err := l.Port.ReadFrames(batch[:])
		if err != nil {
			close(l.frames)
			return
		}
		for _, f := range batch[:n] {
			f.Data = append([]byte(nil), f.Data...)
			l.frames <- f
		}
	}
}

// Send sends a frame from this attachment's MAC to the gateway's.
func (l *Line) Send(frame []byte) {
	packet.SetMACs(frame, GatewayMAC, l.Attachment.MAC)
	l.SendRaw(link.Frame{Data: frame})
}

// SendRaw sends a frame as it is.
func (l *Line) SendRaw(f link.Frame) {
	l.t.Helper()
	n, err := l.Port.WriteFrames([]link.Frame{f})
	require.NoError(l.t, err)
	require.Equal(l.t, 1, n)
}

// Next is the next frame that comes, decoded; it is for this attachment.
func (l *Line) Next() (link.Frame, *packet.Info) {
	l.t.Helper()
	f, info := l.NextAny()
	require.Equal(l.t, l.Attachment.MAC, packet.DestinationMAC(f.Data))
	return f, info
}

// NextAny is Next, for a broadcast too.
func (l *Line) NextAny() (link.Frame, *packet.Info) {
	l.t.Helper()
	select {
	case f, ok := <-l.frames:
		require.True(l.t, ok, "the port is closed")
		info := new(packet.Info)
		require.NoError(l.t, f.Decode(info))
		require.Equal(l.t, GatewayMAC, packet.SourceMAC(f.Data))
		require.True(l.t, packet.VerifyTransport(f.Data, info), "transport checksum")
		return f, info
	case <-time.After(20 * time.Second): // a hang, not a limit
		require.FailNow(l.t, "no frame came")
	}
	return link.Frame{}, nil
}

// Quiet checks that what was sent so far is not answered: the answer to an ARP
// request, which comes after, is the next frame.
func (l *Line) Quiet() {
	l.t.Helper()
	any := netip.AddrFrom4([4]byte{})
	frame := packet.PutARP(make([]byte, 64), packet.Broadcast, l.Attachment.MAC, packet.ARP{Operation: packet.ARPRequest,
		SenderMAC: l.Attachment.MAC, SenderAddress: any, TargetAddress: l.Attachment.Address.Next()})
	l.SendRaw(link.Frame{Data: frame})
	select {
	case f := <-l.frames:
		info := new(packet.Info)
		require.NoError(l.t, packet.Decode(f.Data, info))
		require.EqualValues(l.t, packet.EtherTypeARP, info.EtherType, "unexpected frame %+v", info)
	case <-time.After(20 * time.Second):
		require.FailNow(l.t, "no frame came")
	}
}

// Count is how often frames of an attachment were dropped for a reason.
func Count(d *netstack.Domain, machine, network string, why netstack.Reason) uint64 {
	for _, c := range d.Drops() {
		if c.Machine == machine && c.Network == network && c.Reason == why {
			return c.Count
		}
	}
	return 0
}

// Sent is how many frames an attachment was sent.
func Sent(d *netstack.Domain, machine, network string) uint64 {
	for _, p := range d.Ports() {
		if p.Machine == machine && p.Network == network {
			return p.SentFrames
		}
	}
	return 0
}
