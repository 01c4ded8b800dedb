package netstack_test

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"vz.test/vz/netstack"
	"vz.test/vz/netstack/link"
	"vz.test/vz/netstack/netstacktest"
	"vz.test/vz/netstack/packet"
	"vz.test/vz/netstack/packet/packettest"
	"vz.test/vz/netstack/policy"
)

// ask sends a DHCP message from source, and returns the answer.
func ask(t *testing.T, l *netstacktest.Line, source, destination string, m *dhcpv4.DHCPv4) (*dhcpv4.DHCPv4, *packet.Info) {
	t.Helper()
	frame := packettest.UDP(at(source), at(destination), m.ToBytes())
	packet.SetMACs(frame, packet.Broadcast, l.Attachment.MAC)
	l.SendRaw(link.Frame{Data: frame})
	f, info := l.Next()
	require.EqualValues(t, 67, info.SourcePort)
	require.EqualValues(t, 68, info.DestinationPort)
	reply, err := dhcpv4.FromBytes(f.Data[info.Payload:info.Length])
	require.NoError(t, err)
	require.Equal(t, m.TransactionID, reply.TransactionID)
	return reply, info
}

func discover(t *testing.T, l *netstacktest.Line) *dhcpv4.DHCPv4 {
	t.Helper()
	m, err := dhcpv4.NewDiscovery(net.HardwareAddr(l.Attachment.MAC[:]))
	require.NoError(t, err)
	return m
}

func TestDHCP(t *testing.T) {
	spec := netstacktest.Shop()
	spec.Networks[2].MTU = 9000
	d := netstacktest.New(t, spec, netstack.Options{})
	for _, test := range []struct {
		network, address, gateway, router string
		mtu                               byte
	}{
		{"front", "10.10.0.2", "10.10.0.1", "", 1500 >> 8},
		{"back", "10.20.0.2", "10.20.0.1", "", 1500 >> 8},
		{"edge", "100.64.0.2", "100.64.0.1", "100.64.0.1", 9000 >> 8},
	} {
		web := netstacktest.Plug(t, d, spec, "web", test.network, 1500, netstacktest.None)
		offer, info := ask(t, web, "0.0.0.0:68", "255.255.255.255:67", discover(t, web))
		assert.Equal(t, dhcpv4.MessageTypeOffer, offer.MessageType())
		assert.Equal(t, test.address, info.Destination.String())
		request, err := dhcpv4.NewRequestFromOffer(offer)
		require.NoError(t, err)
		ack, _ := ask(t, web, "0.0.0.0:68", "255.255.255.255:67", request)
		assert.Equal(t, dhcpv4.MessageTypeAck, ack.MessageType())
		for _, m := range []*dhcpv4.DHCPv4{offer, ack} {
			assert.Equal(t, test.address, m.YourIPAddr.String())
			assert.Equal(t, test.gateway, m.ServerIdentifier().String())
			assert.Equal(t, "ffffff00", m.SubnetMask().String())
			assert.Equal(t, test.gateway, m.DNS()[0].String())
			assert.Equal(t, "vz.internal", m.DomainName())
			assert.Equal(t, []string{"vz.internal"}, m.DomainSearch().Labels)
			assert.Equal(t, time.Hour, m.IPAddressLeaseTime(0))
			assert.Equal(t, test.mtu, m.Options.Get(dhcpv4.OptionInterfaceMTU)[0])
			if test.router == "" {
				assert.Empty(t, m.Router(), "one default route only")
			} else {
				assert.Equal(t, test.router, m.Router()[0].String())
			}
		}
		renew, err := dhcpv4.NewRenewFromAck(ack)
		require.NoError(t, err)
		ack, info = ask(t, web, test.address+":68", test.gateway+":67", renew)
		assert.Equal(t, dhcpv4.MessageTypeAck, ack.MessageType())
		assert.Equal(t, test.address, info.Destination.String())
		inform, err := dhcpv4.NewInform(net.HardwareAddr(web.Attachment.MAC[:]), net.ParseIP(test.address).To4())
		require.NoError(t, err)
		ack, _ = ask(t, web, test.address+":68", "255.255.255.255:67", inform)
		assert.Equal(t, dhcpv4.MessageTypeAck, ack.MessageType())
		assert.True(t, ack.YourIPAddr.IsUnspecified())
		assert.Zero(t, ack.IPAddressLeaseTime(0))
	}
	assert.Empty(t, d.Flows(), "DHCP is no flow")
	assert.Empty(t, d.Drops())
}

// A Machine gets its own address or none.
func TestDHCPOfAnotherAddress(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	db := netstacktest.Plug(t, d, spec, "db", "back", 1500, netstacktest.None)
	wrong := dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(net.IPv4(10, 20, 0, 9)))
	request, err := dhcpv4.New(dhcpv4.WithMessageType(dhcpv4.MessageTypeRequest), dhcpv4.WithHwAddr(net.HardwareAddr(db.Attachment.MAC[:])), wrong)
	require.NoError(t, err)
	nak, info := askAny(t, db, request)
	assert.Equal(t, dhcpv4.MessageTypeNak, nak.MessageType())
	assert.Equal(t, "255.255.255.255", info.Destination.String())

	silent := func(m *dhcpv4.DHCPv4) {
		frame := packettest.UDP(at("0.0.0.0:68"), at("255.255.255.255:67"), m.ToBytes())
		packet.SetMACs(frame, packet.Broadcast, db.Attachment.MAC)
		db.SendRaw(link.Frame{Data: frame})
		db.Quiet()
	}
	other := discover(t, db)
	other.ClientHWAddr = net.HardwareAddr{2, 9, 9, 9, 9, 9}
	silent(other)
	assert.EqualValues(t, 1, netstacktest.Count(d, "db", "back", policy.SpoofedMAC))
	release := discover(t, db)
	release.UpdateOption(dhcpv4.OptMessageType(dhcpv4.MessageTypeRelease))
	silent(release)
	elsewhere, err := dhcpv4.New(dhcpv4.WithMessageType(dhcpv4.MessageTypeRequest), dhcpv4.WithHwAddr(net.HardwareAddr(db.Attachment.MAC[:])),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(net.IPv4(192, 0, 2, 1))))
	require.NoError(t, err)
	silent(elsewhere)
	noise := discover(t, db)
	noise.OpCode = dhcpv4.OpcodeBootReply
	silent(noise)
	assert.EqualValues(t, 1, netstacktest.Count(d, "db", "back", policy.Malformed))
}

// askAny is ask where the answer may be a broadcast.
func askAny(t *testing.T, l *netstacktest.Line, m *dhcpv4.DHCPv4) (*dhcpv4.DHCPv4, *packet.Info) {
	t.Helper()
	frame := packettest.UDP(at("0.0.0.0:68"), at("255.255.255.255:67"), m.ToBytes())
	packet.SetMACs(frame, packet.Broadcast, l.Attachment.MAC)
	l.SendRaw(link.Frame{Data: frame})
	f, info := l.NextAny()
	reply, err := dhcpv4.FromBytes(f.Data[info.Payload:info.Length])
	require.NoError(t, err)
	return reply, info
}

// A guest's bytes reach the DHCP parser unread.
func FuzzDHCP(f *testing.F) {
	mac := packet.MAC{0x02, 0, 0, 0, 0, 4}
	for _, kind := range []dhcpv4.MessageType{dhcpv4.MessageTypeDiscover, dhcpv4.MessageTypeRequest, dhcpv4.MessageTypeInform} {
		m, err := dhcpv4.New(dhcpv4.WithMessageType(kind), dhcpv4.WithHwAddr(mac[:]),
			dhcpv4.WithOption(dhcpv4.OptClientIdentifier([]byte("id"))))
		require.NoError(f, err)
		f.Add(m.ToBytes(), true)
	}
	f.Add([]byte{1}, false)
	spec := netstacktest.Shop()
	d := netstacktest.New(f, spec, netstack.Options{})
	port := netstacktest.Wire(f, d, "db", "back", 1500, netstacktest.None)
	carrier := d.Carrier("db", "back")
	var out [4]link.Frame
	f.Fuzz(func(t *testing.T, payload []byte, bound bool) {
		if len(payload) > 1472 {
			return
		}
		source := netip.MustParseAddrPort("0.0.0.0:68")
		if bound {
			source = netip.MustParseAddrPort("10.20.0.3:68")
		}
		frame := packettest.UDP(source, netip.MustParseAddrPort("255.255.255.255:67"), payload)
		packet.SetMACs(frame, packet.Broadcast, mac)
		before := netstacktest.Sent(d, "db", "back")
		carrier.Carry(&link.Frame{Data: frame})
		if netstacktest.Sent(d, "db", "back") == before {
			return
		}
		n, err := port.ReadFrames(out[:])
		require.NoError(t, err)
		require.Equal(t, 1, n)
		var info packet.Info
		require.NoError(t, packet.Decode(out[0].Data, &info))
		require.True(t, packet.VerifyTransport(out[0].Data, &info))
		reply, err := dhcpv4.FromBytes(out[0].Data[info.Payload:info.Length])
		require.NoError(t, err)
		yours := reply.YourIPAddr.String()
		require.True(t, yours == "10.20.0.3" || yours == "0.0.0.0", "it gives away %s", yours)
	})
}
