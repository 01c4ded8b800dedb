package netstack_test

import (
	"context"
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"vz.test/vz/netstack"
	"vz.test/vz/netstack/ipstack"
	"vz.test/vz/netstack/netstacktest"
	"vz.test/vz/netstack/packet/packettest"
	"vz.test/vz/netstack/policy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// echo serves one connection: what comes is sent back, and its end too.
func echo(l net.Listener) <-chan net.Addr {
	from := make(chan net.Addr, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			close(from)
			return
		}
		from <- c.RemoteAddr()
		_, _ = io.Copy(c, c)
		_ = c.(ipstack.Conn).CloseWrite()
		_ = c.Close()
	}()
	return from
}

// talk sends bytes, then the end, and checks that all of it comes back.
func talk(t *testing.T, c net.Conn, size int) {
	t.Helper()
	want := packettest.Pattern(size)
	go func() {
		_, _ = c.Write(want)
		_ = c.(ipstack.Conn).CloseWrite()
	}()
	got, err := io.ReadAll(c)
	require.NoError(t, err)
	require.Equal(t, want, got)
	require.NoError(t, c.Close())
}

func TestMachineToMachine(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	web := netstacktest.Boot(t, d, spec, "web", "back")
	db := netstacktest.Boot(t, d, spec, "db", "back")
	from := echo(db.Serve(t, 5432))
	c, err := web.Connect("10.20.0.3:5432")
	require.NoError(t, err)
	talk(t, c, 1<<20)
	assert.Equal(t, c.LocalAddr().String(), (<-from).String())
	flows := d.Flows()
	require.Len(t, flows, 1)
	assert.Equal(t, "web-db", flows[0].Path)
	for _, p := range d.Ports() {
		if p.Machine == "edge" {
			assert.Zero(t, p.SentFrames, "Machine to Machine never enters the stack")
		}
	}
}

func TestRefused(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	webFront := netstacktest.Boot(t, d, spec, "web", "front")
	webBack := netstacktest.Boot(t, d, spec, "web", "back")
	client := netstacktest.Boot(t, d, spec, "client", "front")
	edge := netstacktest.Boot(t, d, spec, "client", "edge")
	for _, test := range []struct {
		from  *netstacktest.Guest
		to    string
		err   error
		why   policy.Reason
		named string
	}{
		{client, "10.10.0.2:80", syscall.ECONNREFUSED, policy.OtherNetwork, "web"},
		{webFront, "10.10.0.4:80", syscall.ECONNREFUSED, policy.NoPath, "client"},
		{webBack, "10.20.0.3:5433", syscall.EHOSTUNREACH, policy.PortNotDeclared, "db"},
		{webBack, "10.20.0.3:5432", syscall.EHOSTUNREACH, policy.UnreachableMachine, "db"},
		{webFront, "10.20.0.3:5432", syscall.ECONNREFUSED, policy.OtherNetwork, "db"},
		{client, "10.10.0.77:80", syscall.ECONNREFUSED, policy.NoRoute, ""},
		{edge, "192.0.2.1:80", syscall.ECONNREFUSED, policy.EgressOffline, ""},
		{edge, "198.51.100.1:80", syscall.ECONNREFUSED, policy.PortNotDeclared, "endpoint:shop"},
		{edge, "203.0.113.2:80", syscall.ECONNREFUSED, policy.NATFiltered, "web"},
		{client, "203.0.113.2:80", syscall.ECONNREFUSED, policy.OtherNetwork, "web"},
	} {
		_, err := test.from.Connect(test.to)
		assert.ErrorIs(t, err, test.err, test.to)
		all := d.Refusals()
		require.NotEmpty(t, all)
		last := all[len(all)-1]
		assert.Equal(t, test.why, last.Reason, test.to)
		assert.Equal(t, test.to, last.Destination.String())
		assert.Equal(t, test.named, last.Name)
	}
}

func TestEndpointIsReachedThroughNAT(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	client := netstacktest.Boot(t, d, spec, "client", "edge")
	l, err := d.Listen(netip.MustParseAddrPort("198.51.100.1:443"))
	require.NoError(t, err)
	from := echo(l)
	c, err := client.Connect("198.51.100.1:443")
	require.NoError(t, err)
	inside := c.LocalAddr().(*net.TCPAddr)
	talk(t, c, 1<<20)
	outside := (<-from).(*net.TCPAddr)
	assert.Equal(t, "203.0.113.4", outside.IP.String())
	assert.Equal(t, inside.Port, outside.Port)
	name, ok := d.Machine(outside.AddrPort().Addr())
	assert.True(t, ok)
	assert.Equal(t, "client", name)
}

func TestHostAndBackend(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	ctx := context.Background()
	_, err := d.DialBackend(ctx, "shop")
	var gone *netstack.NotConnectedError
	require.ErrorAs(t, err, &gone)
	web := netstacktest.Boot(t, d, spec, "web", "edge")
	_, err = d.DialBackend(ctx, "shop")
	require.ErrorIs(t, err, syscall.ECONNREFUSED)

	from := echo(web.Serve(t, 8080))
	l, err := d.Listen(netip.MustParseAddrPort("198.51.100.1:443"))
	require.NoError(t, err)
	go func() {
		in, err := l.Accept()
		if err != nil {
			return
		}
		out, err := d.DialBackend(ctx, "shop")
		if !assert.NoError(t, err) {
			return
		}
		go func() {
			_, _ = io.Copy(out, in)
			_ = out.(ipstack.Conn).CloseWrite()
		}()
		_, _ = io.Copy(in, out)
		_ = in.(ipstack.Conn).CloseWrite()
		_ = in.Close()
		_ = out.Close()
	}()
	c, err := d.DialHost(ctx, "shop", 443)
	require.NoError(t, err)
	talk(t, c, 4<<20)
	assert.Equal(t, "100.64.0.1", (<-from).(*net.TCPAddr).IP.String())
	var paths []string
	for _, f := range d.Flows() {
		paths = append(paths, f.Path)
	}
	assert.ElementsMatch(t, []string{"host:shop", "backend:shop", "backend:shop"}, paths)

	_, err = d.DialHost(ctx, "shop", 22)
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
}

func TestDNSListener(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	web := netstacktest.Boot(t, d, spec, "web", "back")
	gateway := netip.MustParseAddrPort("10.20.0.1:53")
	p, err := d.ListenPacket(gateway)
	require.NoError(t, err)
	go func() {
		b := make([]byte, 2000)
		n, from, err := p.ReadFrom(b)
		if err == nil {
			_, _ = p.WriteTo(append([]byte(from.String()+" "), b[:n]...), from)
		}
	}()
	c, err := web.DialPacket(netip.AddrPortFrom(web.Attachment.Address, 0), gateway)
	require.NoError(t, err)
	defer c.Close()
	_, err = c.Write([]byte("question"))
	require.NoError(t, err)
	b := make([]byte, 2000)
	n, err := c.Read(b)
	require.NoError(t, err)
	assert.Equal(t, c.LocalAddr().String()+" question", string(b[:n]))
	assert.Equal(t, "dns:web", d.Flows()[0].Path)
}
