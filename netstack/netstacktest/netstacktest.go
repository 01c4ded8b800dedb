// Package netstacktest makes small route domains for tests: the shop of
// CONTRACT.md, guests that are gVisor stacks at the far end of a link.Pipe, and
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
