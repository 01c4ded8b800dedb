package netstack_test

import (
	"io"
	"net"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"vz.test/vz/netstack"
	"vz.test/vz/netstack/ipstack"
	"vz.test/vz/netstack/link"
	"vz.test/vz/netstack/netstacktest"
	"vz.test/vz/netstack/packet"
	"vz.test/vz/netstack/packet/packettest"
	"vz.test/vz/netstack/policy"
)

// open connects from a guest to a listener, and returns both ends.
func open(t *testing.T, from *netstacktest.Guest, to string, l net.Listener) (ours, theirs net.Conn) {
	t.Helper()
	accepted := make(chan net.Conn, 1)
	go func() {
		c, _ := l.Accept()
		accepted <- c
	}()
	ours, err := from.Connect(to)
	require.NoError(t, err)
	theirs = <-accepted
	require.NotNil(t, theirs)
	t.Cleanup(func() { _ = ours.Close(); _ = theirs.Close() })
	return ours, theirs
}

func alive(t *testing.T, a, b net.Conn) {
	t.Helper()
	for _, way := range [][2]net.Conn{{a, b}, {b, a}} {
		_, err := way[0].Write([]byte("x"))
		require.NoError(t, err)
		_, err = io.ReadFull(way[1], make([]byte, 1))
		require.NoError(t, err)
	}
}

func TestUpdateKeepsWhatItStillAllows(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	web := netstacktest.Boot(t, d, spec, "web", "back")
	db := netstacktest.Boot(t, d, spec, "db", "back")
	client := netstacktest.Boot(t, d, spec, "client", "edge")
	edge, err := d.Listen(at("198.51.100.1:443"))
	require.NoError(t, err)
	ours, theirs := open(t, web, "10.20.0.3:5432", db.Serve(t, 5432))
	shopOurs, shopTheirs := open(t, client, "198.51.100.1:443", edge)

	require.NoError(t, d.Update(netstacktest.Shop()))
	alive(t, ours, theirs)
	alive(t, shopOurs, shopTheirs)

	// Another name, more ports: the flow goes on, on the new path.
	next := netstacktest.Shop()
	next.Paths[0] = netstack.Path{Name: "all-db", From: []string{"web", "client"}, To: []string{"db"}, Network: "back", Protocol: "tcp"}
	require.NoError(t, d.Update(next))
	alive(t, ours, theirs)
	alive(t, shopOurs, shopTheirs)
	assert.True(t, slices.ContainsFunc(d.Flows(), func(f netstack.FlowInfo) bool { return f.Path == "all-db" }))

	// Without it: cut, and the next segment learns it.
	next = netstacktest.Shop()
	next.Paths = slices.Delete(next.Paths, 0, 1)
	next.Networks[1].Refuse = netstack.Reset
	require.NoError(t, d.Update(next))
	_, err = ours.Write([]byte("x"))
	require.NoError(t, err)
	_, err = ours.Read(make([]byte, 1))
	require.Error(t, err)
	_, err = web.Connect("10.20.0.3:5432")
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	alive(t, shopOurs, shopTheirs)

	// The edge's own side of a cut connection ends as well.
	next.Paths = slices.DeleteFunc(next.Paths, func(p netstack.Path) bool { return p.Name == "client-shop" })
	require.NoError(t, d.Update(next))
	_, err = shopTheirs.Write([]byte("x"))
	require.NoError(t, err)
	_, err = shopTheirs.Read(make([]byte, 1))
	require.Error(t, err)
	assert.Empty(t, d.Flows())
}

func TestUpdateMovesAddresses(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	client := netstacktest.Boot(t, d, spec, "client", "edge")
	l, err := d.Listen(at("198.51.100.1:443"))
	require.NoError(t, err)
	accepting := make(chan error, 1)
	go func() {
		_, err := l.Accept()
		accepting <- err
	}()
	next := netstacktest.Shop()
	next.Endpoints[0].Address = ip("198.51.100.9")
	next.HostAddress = ip("203.0.113.200")
	require.NoError(t, d.Update(next))
	require.ErrorIs(t, <-accepting, net.ErrClosed)
	_, err = client.Connect("198.51.100.1:443")
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	l, err = d.Listen(at("198.51.100.9:443"))
	require.NoError(t, err)
	from := echo(l)
	c, err := client.Connect("198.51.100.9:443")
	require.NoError(t, err)
	talk(t, c, 1000)
	<-from
	from = echo(l)
	c, err = d.DialHost(t.Context(), "shop", 443)
	require.NoError(t, err)
	talk(t, c, 1000)
	assert.Equal(t, "203.0.113.200", (<-from).(*net.TCPAddr).IP.String())

	// Nothing has changed after an error.
	bad := netstacktest.Shop()
	bad.Attachments[0].Address = bad.Attachments[4].Address
	require.Error(t, d.Update(bad))
	from = echo(l)
	c, err = client.Connect("198.51.100.9:443")
	require.NoError(t, err)
	talk(t, c, 1000)
	<-from
}

// A port goes on with its attachment, and is closed without it.
func TestUpdateMovesPorts(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	web := netstacktest.Plug(t, d, spec, "web", "back", 1500, netstacktest.None)
	db := netstacktest.Plug(t, d, spec, "db", "back", 1500, netstacktest.None)
	web.Send(udp("10.20.0.2:40000", "10.20.0.3:5000", 10))
	db.Next()
	next := netstacktest.Shop()
	next.Attachments[3].Address = ip("10.20.0.33")
	require.NoError(t, d.Update(next))
	assert.Empty(t, d.Flows())
	web.Send(udp("10.20.0.2:40000", "10.20.0.33:5000", 10))
	_, info := db.Next()
	assert.Equal(t, ip("10.20.0.33"), info.Destination)
	next.Attachments = slices.Delete(slices.Clone(next.Attachments), 3, 4)
	require.NoError(t, d.Update(next))
	_, err := db.Port.WriteFrames([]link.Frame{{Data: make([]byte, 60)}})
	require.ErrorIs(t, err, link.ErrClosed)
	var unknown *netstack.UnknownError
	a, b := link.Pipe(1500, netstacktest.None)
	defer a.Close()
	require.ErrorAs(t, d.Attach("db", "back", b), &unknown)
}

func TestAttachReplaces(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	web := netstacktest.Plug(t, d, spec, "web", "back", 1500, netstacktest.None)
	old := netstacktest.Plug(t, d, spec, "db", "back", 1500, netstacktest.None)
	web.Send(udp("10.20.0.2:40000", "10.20.0.3:5000", 10))
	old.Next()
	db := netstacktest.Plug(t, d, spec, "db", "back", 1500, netstacktest.None)
	_, err := old.Port.WriteFrames([]link.Frame{{Data: make([]byte, 60)}})
	require.ErrorIs(t, err, link.ErrClosed)
	web.Send(udp("10.20.0.2:40000", "10.20.0.3:5000", 10))
	db.Next()
}

// A closed port leaves no flow behind, whoever closes it (goroutines are
// TestMain's).
func TestClosedPortLeavesNothing(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	web := netstacktest.Plug(t, d, spec, "web", "back", 1500, netstacktest.None)
	for range 2 {
		db := netstacktest.Plug(t, d, spec, "db", "back", 1500, netstacktest.None)
		web.Send(udp("10.20.0.2:40000", "10.20.0.3:5000", 10))
		db.Next()
		require.Len(t, d.Flows(), 1)
		require.NoError(t, db.Port.Close()) // as when the Machine dies
		require.Eventually(t, func() bool { return len(d.Flows()) == 0 }, waitFor, tick)
		web.Send(udp("10.20.0.2:40000", "10.20.0.3:5000", 10))
		_, info := web.Next()
		assert.EqualValues(t, packet.ICMPHostUnreachable, info.ICMPCode)
	}
	assert.EqualValues(t, 2, netstacktest.Count(d, "web", "back", policy.UnreachableMachine))
	require.NoError(t, d.Close())
	require.NoError(t, d.Close())
	_, err := web.Port.WriteFrames([]link.Frame{{Data: make([]byte, 60)}})
	require.ErrorIs(t, err, link.ErrClosed)
	require.ErrorIs(t, d.Update(spec), netstack.ErrClosed)
	a, b := link.Pipe(1500, netstacktest.None)
	defer a.Close()
	require.ErrorIs(t, d.Attach("web", "back", b), netstack.ErrClosed)
	_, err = d.Listen(at("10.20.0.1:53"))
	require.ErrorIs(t, err, netstack.ErrClosed)
	_, err = d.ListenPacket(at("10.20.0.1:53"))
	require.ErrorIs(t, err, netstack.ErrClosed)
	_, err = d.DialHost(t.Context(), "shop", 443)
	require.ErrorIs(t, err, netstack.ErrClosed)
	_, err = d.DialBackend(t.Context(), "shop")
	require.ErrorIs(t, err, netstack.ErrClosed)
}

// A guest that doesn't read loses its own frames, and others' go on.
func TestSlowGuestCostsOnlyItself(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	web := netstacktest.Plug(t, d, spec, "web", "back", 1500, netstacktest.None)
	netstacktest.Wire(t, d, "db", "back", 1500, netstacktest.None) // nobody reads
	client := netstacktest.Plug(t, d, spec, "client", "edge", 1500, netstacktest.None)
	shop := netstacktest.Plug(t, d, spec, "web", "edge", 1500, netstacktest.None)
	const sent = 2000
	for range sent {
		web.Send(udp("10.20.0.2:40000", "10.20.0.3:5000", 1400))
		client.Send(udp("100.64.0.4:40000", "100.64.0.2:5000", 1400))
		shop.Next()
	}
	lost := func() uint64 { return netstacktest.Count(d, "db", "back", policy.PortOverflow) }
	require.Eventually(t, func() bool { return netstacktest.Sent(d, "db", "back") == sent }, waitFor, tick)
	web.Quiet()
	assert.Greater(t, lost(), uint64(0))
	assert.Less(t, lost(), uint64(sent))
	assert.Zero(t, netstacktest.Count(d, "web", "edge", policy.PortOverflow))
}

// stuck is a port whose far side doesn't let a write return.
type stuck struct {
	link.Port
	writing chan struct{}
	free    chan struct{}
}

func (s *stuck) WriteFrames(frames []link.Frame) (int, error) {
	s.writing <- struct{}{}
	<-s.free
	return len(frames), nil
}

// No lock is held across a guest write: while one hangs, all else goes on.
func TestNoLockIsHeldAcrossAWrite(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	ours, theirs := link.Pipe(1500, netstacktest.None)
	defer ours.Close()
	db := &stuck{theirs, make(chan struct{}), make(chan struct{})}
	require.NoError(t, d.Attach("db", "back", db))
	web := netstacktest.Plug(t, d, spec, "web", "back", 1500, netstacktest.None)
	client := netstacktest.Boot(t, d, spec, "client", "edge")
	l, err := d.Listen(at("198.51.100.1:443"))
	require.NoError(t, err)

	web.Send(udp("10.20.0.2:40000", "10.20.0.3:5000", 10))
	<-db.writing
	next := netstacktest.Shop()
	next.Paths[0].Protocol = "any"
	require.NoError(t, d.Update(next))
	require.NoError(t, d.Impair("web-udp", &conditioner{}))
	from := echo(l)
	c, err := client.Connect("198.51.100.1:443")
	require.NoError(t, err)
	talk(t, c, 100_000)
	<-from
	assert.Len(t, d.Flows(), 2)
	assert.NotEmpty(t, d.Ports())
	d.Expire()
	_, err = client.Connect("100.64.0.77:1")
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	assert.NotEmpty(t, d.Refusals())
	close(db.free)
}

func TestFlowsExpire(t *testing.T) {
	spec := netstacktest.Shop()
	clock := &clock{}
	d := netstacktest.New(t, spec, netstack.Options{Clock: clock})
	web := netstacktest.Plug(t, d, spec, "web", "back", 1500, netstacktest.None)
	db := netstacktest.Plug(t, d, spec, "db", "back", 1500, netstacktest.None)
	web.Send(udp("10.20.0.2:40000", "10.20.0.3:5000", 10))
	db.Next()
	clock.advance(2 * time.Minute)
	d.Expire()
	require.Len(t, d.Flows(), 1, "RFC 4787: not before two minutes")
	db.Send(udp("10.20.0.3:5000", "10.20.0.2:40000", 10))
	web.Next()
	clock.advance(4 * time.Minute)
	d.Expire()
	require.Len(t, d.Flows(), 1, "an answer keeps it")
	clock.advance(time.Minute)
	d.Expire()
	require.Empty(t, d.Flows())
	db.Send(udp("10.20.0.3:5000", "10.20.0.2:40000", 10))
	_, info := db.Next()
	assert.EqualValues(t, packet.ICMPAdminProhibited, info.ICMPCode)
}

// A connection that ended gives its ports to the next one, which is a flow of
// its own.
func TestPortsAreReused(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	web := netstacktest.Plug(t, d, spec, "web", "back", 1500, netstacktest.None)
	db := netstacktest.Plug(t, d, spec, "db", "back", 1500, netstacktest.None)
	for i := range 3 {
		web.Send(tcp("10.20.0.2:40000", "10.20.0.3:5432", packet.SYN))
		db.Next()
		flows := d.Flows()
		require.Len(t, flows, 1)
		assert.EqualValues(t, i+1, flows[0].Serial)
		assert.Equal(t, "opening", flows[0].State)
		db.Send(tcp("10.20.0.3:5432", "10.20.0.2:40000", packet.RST|packet.ACK))
		web.Next()
		assert.Equal(t, "closed", d.Flows()[0].State)
	}
}

func TestFlowTableIsBounded(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{MaxMachineFlows: 10})
	web := netstacktest.Plug(t, d, spec, "web", "back", 1500, netstacktest.None)
	db := netstacktest.Plug(t, d, spec, "db", "back", 1500, netstacktest.None)
	client := netstacktest.Plug(t, d, spec, "client", "edge", 1500, netstacktest.None)
	shop := netstacktest.Plug(t, d, spec, "web", "edge", 1500, netstacktest.None)
	for i := range 12 {
		web.Send(packettest.UDP(at("10.20.0.2:40000"), at("10.20.0.3:5000"), packettest.Pattern(10)))
		web.Send(udp("10.20.0.2:"+string(rune('1'+i/10))+string(rune('0'+i%10)), "10.20.0.3:5000", 10))
	}
	for range 12 + 9 {
		db.Next()
	}
	web.Quiet()
	assert.EqualValues(t, 3, netstacktest.Count(d, "web", "back", policy.FlowTableFull))
	client.Send(udp("100.64.0.4:40000", "100.64.0.2:5000", 10))
	shop.Next()
}

func TestOnRefusal(t *testing.T) {
	spec := netstacktest.Shop()
	told := make(chan netstack.Refusal, 100)
	clock := &clock{}
	d := netstacktest.New(t, spec, netstack.Options{Clock: clock, OnRefusal: func(r netstack.Refusal) { told <- r }})
	web := netstacktest.Plug(t, d, spec, "web", "back", 1500, netstacktest.None)
	for range 5 {
		web.Send(tcp("10.20.0.2:40000", "10.20.0.3:22", packet.SYN))
		web.Next()
	}
	r := <-told
	assert.Equal(t, "web", r.Machine)
	assert.Equal(t, "back", r.Network)
	assert.Equal(t, "db", r.Name)
	assert.Equal(t, at("10.20.0.3:22"), r.Destination)
	assert.Equal(t, policy.PortNotDeclared, r.Reason)
	assert.EqualValues(t, 1, r.Count)
	assert.Empty(t, told, "the same is news once")
	clock.advance(time.Minute)
	web.Send(tcp("10.20.0.2:40000", "10.20.0.3:22", packet.SYN))
	web.Next()
	assert.EqualValues(t, 6, (<-told).Count)
	// A scan is remembered by its latest ports, and told in part.
	for port := range 600 {
		f := tcp("10.20.0.2:40000", "10.20.0.3:22", packet.SYN)
		f[36], f[37] = byte((port+6000)>>8), byte(port+6000)
		web.Send(f)
		for netstacktest.Count(d, "web", "back", policy.PortNotDeclared) != uint64(6+port+1) {
			runtime.Gosched() // no more than the pipe holds
		}
	}
	all := d.Refusals()
	require.Len(t, all, 256)
	assert.EqualValues(t, 6599, all[255].Destination.Port())
	assert.Less(t, len(told), 30)
}

func TestMachineOfAnAddress(t *testing.T) {
	d := netstacktest.New(t, netstacktest.Shop(), netstack.Options{})
	for addr, want := range map[string]string{
		"10.10.0.2": "web", "10.20.0.2": "web", "203.0.113.2": "web", "203.0.113.4": "client", "::ffff:10.20.0.3": "db",
		"10.10.0.1": "", "198.51.100.1": "", "203.0.113.254": "", "192.0.2.1": "", "2001:db8::1": "",
	} {
		name, ok := d.Machine(ip(addr))
		assert.Equal(t, want, name, addr)
		assert.Equal(t, want != "", ok, addr)
	}
}

// CloseWrite leaves the other direction open, both ways through the edge.
func TestHalfClose(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	client := netstacktest.Boot(t, d, spec, "client", "edge")
	l, err := d.Listen(at("198.51.100.1:443"))
	require.NoError(t, err)
	ours, theirs := open(t, client, "198.51.100.1:443", l)
	for _, way := range [][2]net.Conn{{ours, theirs}, {theirs, ours}} {
		_, err = way[0].Write([]byte("last"))
		require.NoError(t, err)
		require.NoError(t, way[0].(ipstack.Conn).CloseWrite())
		got, err := io.ReadAll(way[1])
		require.NoError(t, err)
		assert.Equal(t, "last", string(got))
	}
	require.Eventually(t, func() bool {
		f := d.Flows()
		return len(f) == 1 && f[0].State == "closed"
	}, waitFor, tick)
}
