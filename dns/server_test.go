package dns

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	wire "github.com/miekg/dns"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func addrs(texts ...string) (all []netip.Addr) {
	for _, t := range texts {
		all = append(all, netip.MustParseAddr(t))
	}
	return all
}

// shop is what web sees in the example: db on one network, many on another,
// and a client that no path reaches.
func shop() *View {
	many := make([]string, 100)
	for i := range many {
		many[i] = fmt.Sprintf("10.30.0.%d", i+1)
	}
	db := Record{Addrs: addrs("10.20.0.20")}
	denied := Record{Denied: "no path lets web reach client"}
	return &View{Records: map[string]Record{
		"db": db, "db.back": db, "db.vz.internal": db, "db.back.vz.internal": db,
		"client": denied, "client.front": denied, "client.vz.internal": denied,
		"shop.test":  {Addrs: addrs("198.51.100.2")},
		"six.test":   {Addrs: addrs("198.51.100.3", "2001:db8::3")},
		"many.test":  {Addrs: addrs(many...)},
		"empty.test": {},
	}}
}

// serve serves view to loopback over UDP and TCP.
func serve(t *testing.T, config Config) (server *Server, address string) {
	t.Helper()
	var packets net.PacketConn
	var stream net.Listener
	for range 20 { // the port of one may be taken for the other
		var err error
		packets, err = net.ListenPacket("udp4", "127.0.0.1:0")
		require.NoError(t, err)
		address = packets.LocalAddr().String()
		if stream, err = net.Listen("tcp4", address); err == nil {
			break
		}
		packets.Close()
	}
	require.NotNil(t, stream)
	server = NewServer(config)
	done := make(chan error, 2)
	go func() { done <- server.ServePacket(packets) }()
	go func() { done <- server.Serve(stream) }()
	t.Cleanup(func() {
		assert.NoError(t, server.Close())
		assert.ErrorIs(t, <-done, net.ErrClosed)
		assert.ErrorIs(t, <-done, net.ErrClosed)
	})
	return server, address
}

func always(view *View) Config {
	return Config{View: func(netip.Addr) (string, *View) { return "web", view }}
}

func ask(t *testing.T, transport, address string, m *wire.Msg) *wire.Msg {
	t.Helper()
	client := wire.Client{Net: transport, UDPSize: 65535}
	reply, _, err := client.Exchange(m, address)
	require.NoError(t, err)
	return reply
}

func question(name string, kind uint16) *wire.Msg {
	return new(wire.Msg).SetQuestion(name, kind)
}

func TestAnswers(t *testing.T) {
	_, address := serve(t, always(shop()))
	for _, test := range []struct {
		name   string
		kind   uint16
		rcode  int
		answer string // after the TTL; empty: none, and an SOA
	}{
		{"db.", wire.TypeA, wire.RcodeSuccess, "IN\tA\t10.20.0.20"},
		{"db.back.", wire.TypeA, wire.RcodeSuccess, "IN\tA\t10.20.0.20"},
		{"db.vz.internal.", wire.TypeA, wire.RcodeSuccess, "IN\tA\t10.20.0.20"},
		{"DB.Back.vz.INTERNAL.", wire.TypeA, wire.RcodeSuccess, "IN\tA\t10.20.0.20"},
		{"sHoP.tEsT.", wire.TypeA, wire.RcodeSuccess, "IN\tA\t198.51.100.2"},
		{"shop.test.", wire.TypeAAAA, wire.RcodeSuccess, ""},
		{"shop.test.", wire.TypeMX, wire.RcodeSuccess, ""},
		{"shop.test.", wire.TypeHTTPS, wire.RcodeSuccess, ""},
		{"shop.test.", wire.TypeSOA, wire.RcodeSuccess, ""},
		{"shop.test.", 65280, wire.RcodeSuccess, ""},
		{"shop.test.", wire.TypeANY, wire.RcodeSuccess, "IN\tHINFO\t\"RFC8482\" \"\""},
		{"six.test.", wire.TypeAAAA, wire.RcodeSuccess, "IN\tAAAA\t2001:db8::3"},
		{"six.test.", wire.TypeA, wire.RcodeSuccess, "IN\tA\t198.51.100.3"},
		{"empty.test.", wire.TypeA, wire.RcodeSuccess, ""},
		{"client.", wire.TypeA, wire.RcodeNameError, ""},
		{"client.", wire.TypeAAAA, wire.RcodeNameError, ""},
		{"client.", wire.TypeANY, wire.RcodeNameError, ""},
		{"client.vz.internal.", wire.TypeTXT, wire.RcodeNameError, ""},
		{"front.", wire.TypeA, wire.RcodeNameError, ""}, // above a denied name only
		{"back.", wire.TypeA, wire.RcodeSuccess, ""},    // above a name
		{"vz.internal.", wire.TypeA, wire.RcodeSuccess, ""},
		{"test.", wire.TypeNS, wire.RcodeSuccess, ""},
		{".", wire.TypeNS, wire.RcodeSuccess, ""},
		{"www.shop.test.", wire.TypeA, wire.RcodeNameError, ""},
		{"example.com.", wire.TypeA, wire.RcodeNameError, ""},
		{`d\.b.`, wire.TypeA, wire.RcodeNameError, ""},
		{"20.0.20.10.in-addr.arpa.", wire.TypePTR, wire.RcodeSuccess, "IN\tPTR\tdb.back.vz.internal."},
		{"2.100.51.198.IN-ADDR.arpa.", wire.TypePTR, wire.RcodeSuccess, "IN\tPTR\tshop.test."},
		{"20.0.20.10.in-addr.arpa.", wire.TypeA, wire.RcodeSuccess, ""},
		{"0.20.10.in-addr.arpa.", wire.TypePTR, wire.RcodeSuccess, ""},
		{"21.0.20.10.in-addr.arpa.", wire.TypePTR, wire.RcodeNameError, ""},
		{mustReverse("2001:db8::3"), wire.TypePTR, wire.RcodeSuccess, "IN\tPTR\tsix.test."},
	} {
		for _, transport := range []string{UDP, TCP} {
			t.Run(transport+" "+test.name+" "+wire.Type(test.kind).String(), func(t *testing.T) {
				request := question(test.name, test.kind)
				reply := ask(t, transport, address, request)
				assert.Equal(t, wire.RcodeToString[test.rcode], wire.RcodeToString[reply.Rcode])
				assert.Equal(t, request.Question, reply.Question, "spelt as it was asked (0x20)")
				assert.True(t, reply.Authoritative)
				assert.True(t, reply.RecursionAvailable)
				assert.True(t, reply.RecursionDesired)
				assert.Nil(t, reply.IsEdns0(), "no OPT to a client that sent none")
				if test.answer == "" {
					assert.Empty(t, reply.Answer)
					require.Len(t, reply.Ns, 1)
					soa := reply.Ns[0].(*wire.SOA)
					assert.EqualValues(t, 1, soa.Minttl)
					assert.EqualValues(t, 1, soa.Hdr.Ttl)
					return
				}
				require.Len(t, reply.Answer, 1)
				assert.Equal(t, fmt.Sprintf("%s\t5\t%s", test.name, test.answer), reply.Answer[0].String())
			})
		}
	}
}

func mustReverse(a string) string {
	r, err := wire.ReverseAddr(a)
	if err != nil {
		panic(err)
	}
	return r
}

func TestWhatIsNoQuestion(t *testing.T) {
	_, address := serve(t, always(shop()))
	change := func(f func(*wire.Msg)) *wire.Msg {
		m := question("db.", wire.TypeA)
		f(m)
		return m
	}
	opt := func(change func(*wire.OPT)) wire.RR {
		o := &wire.OPT{Hdr: wire.RR_Header{Name: ".", Rrtype: wire.TypeOPT}}
		change(o)
		return o
	}
	for _, test := range []struct {
		name    string
		message *wire.Msg
		rcode   int
	}{
		{"class CHAOS", change(func(m *wire.Msg) { m.Question[0].Qclass = wire.ClassCHAOS }), wire.RcodeRefused},
		{"class ANY", change(func(m *wire.Msg) { m.Question[0].Qclass = wire.ClassANY }), wire.RcodeRefused},
		{"transfer", change(func(m *wire.Msg) { m.Question[0].Qtype = wire.TypeAXFR }), wire.RcodeRefused},
		{"meta type", change(func(m *wire.Msg) { m.Question[0].Qtype = wire.TypeMAILA }), wire.RcodeNotImplemented},
		{"OPT as a type", change(func(m *wire.Msg) { m.Question[0].Qtype = wire.TypeOPT }), wire.RcodeNotImplemented},
		{"NOTIFY", change(func(m *wire.Msg) { m.Opcode = wire.OpcodeNotify }), wire.RcodeNotImplemented},
		{"UPDATE", change(func(m *wire.Msg) { m.Opcode = wire.OpcodeUpdate }), wire.RcodeNotImplemented},
		{"no question", change(func(m *wire.Msg) { m.Question = nil }), wire.RcodeFormatError},
		{"two questions", change(func(m *wire.Msg) { m.Question = append(m.Question, m.Question[0]) }), wire.RcodeFormatError},
		{"two OPTs", change(func(m *wire.Msg) {
			m.Extra = []wire.RR{opt(func(*wire.OPT) {}), opt(func(*wire.OPT) {})}
		}), wire.RcodeFormatError},
		{"a named OPT", change(func(m *wire.Msg) {
			m.Extra = []wire.RR{opt(func(o *wire.OPT) { o.Hdr.Name = "x." })}
		}), wire.RcodeFormatError},
		{"EDNS 1", change(func(m *wire.Msg) {
			m.Extra = []wire.RR{opt(func(o *wire.OPT) { o.SetVersion(1) })}
		}), wire.RcodeBadVers},
	} {
		t.Run(test.name, func(t *testing.T) {
			raw, err := test.message.Pack()
			require.NoError(t, err)
			reply := exchange(t, address, raw)
			assert.Equal(t, wire.RcodeToString[test.rcode], wire.RcodeToString[reply.Rcode])
			assert.Equal(t, test.message.Id, reply.Id)
			assert.Equal(t, test.message.Opcode, reply.Opcode)
			assert.True(t, reply.Response)
			assert.Empty(t, reply.Answer)
		})
	}
	t.Run("malformed", func(t *testing.T) {
		raw, err := question("db.", wire.TypeA).Pack()
		require.NoError(t, err)
		reply := exchange(t, address, raw[:len(raw)-3])
		assert.Equal(t, wire.RcodeFormatError, reply.Rcode)
	})
}

// exchange sends raw bytes over UDP.
func exchange(t *testing.T, address string, raw []byte) *wire.Msg {
	t.Helper()
	conn, err := net.Dial("udp", address)
	require.NoError(t, err)
	defer conn.Close()
	_, err = conn.Write(raw)
	require.NoError(t, err)
	buffer := make([]byte, 65535)
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(10*time.Second)))
	n, err := conn.Read(buffer)
	require.NoError(t, err)
	var reply wire.Msg
	require.NoError(t, reply.Unpack(buffer[:n]))
	return &reply
}

// A response, or less than a header, is met with silence: the question behind
// them is the first that is answered.
func TestSilence(t *testing.T) {
	_, address := serve(t, always(shop()))
	conn, err := net.Dial("udp", address)
	require.NoError(t, err)
	defer conn.Close()
	response := question("db.", wire.TypeA)
	response.Response = true
	raw, err := response.Pack()
	require.NoError(t, err)
	asked := question("db.", wire.TypeA)
	rawAsked, err := asked.Pack()
	require.NoError(t, err)
	for _, m := range [][]byte{raw, {}, raw[:11], rawAsked} {
		_, err := conn.Write(m)
		require.NoError(t, err)
	}
	buffer := make([]byte, 512)
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(10*time.Second)))
	n, err := conn.Read(buffer)
	require.NoError(t, err)
	var reply wire.Msg
	require.NoError(t, reply.Unpack(buffer[:n]))
	assert.Equal(t, asked.Id, reply.Id)
}

func TestDeniedSaysWhyToThoseWhoSpeakEDNS(t *testing.T) {
	var log []Query
	var mu sync.Mutex
	config := always(shop())
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	config.Now = func() time.Time { return at }
	config.Log = func(q Query) { mu.Lock(); defer mu.Unlock(); log = append(log, q) }
	_, address := serve(t, config)

	denied := question("Client.", wire.TypeA)
	denied.SetEdns0(1232, true)
	reply := ask(t, UDP, address, denied)
	opt := reply.IsEdns0()
	require.NotNil(t, opt)
	assert.True(t, opt.Do())
	require.Len(t, opt.Option, 1)
	ede := opt.Option[0].(*wire.EDNS0_EDE)
	assert.EqualValues(t, 15, ede.InfoCode)
	assert.Equal(t, "no path lets web reach client", ede.ExtraText)

	unknown := question("other.", wire.TypeA)
	unknown.SetEdns0(1232, false)
	reply = ask(t, UDP, address, unknown)
	require.NotNil(t, reply.IsEdns0())
	assert.Empty(t, reply.IsEdns0().Option, "a name that is not there is not denied")
	assert.False(t, reply.IsEdns0().Do())

	ask(t, TCP, address, question("db.", wire.TypeA))
	ask(t, UDP, address, question("db.", wire.TypeAAAA))

	client := netip.MustParseAddr("127.0.0.1")
	mu.Lock()
	defer mu.Unlock()
	assert.Equal(t, []Query{
		{At: at, Client: client, Machine: "web", Name: "client", Type: "A", Rcode: "NXDOMAIN", Reason: "no path lets web reach client", Transport: UDP},
		{At: at, Client: client, Machine: "web", Name: "other", Type: "A", Rcode: "NXDOMAIN", Reason: "no such name", Transport: UDP},
		{At: at, Client: client, Machine: "web", Name: "db", Type: "A", Rcode: "NOERROR", Answers: []string{"10.20.0.20"}, Transport: TCP},
		{At: at, Client: client, Machine: "web", Name: "db", Type: "AAAA", Rcode: "NOERROR", Transport: UDP},
	}, log)
}

// The longest reason to the longest name needs no TCP at 512 bytes.
func TestDeniedFitsIntoTheSmallestDatagram(t *testing.T) {
	long := strings.Repeat(strings.Repeat("a", 63)+".", 3) + strings.Repeat("a", 60)
	view := &View{Records: map[string]Record{long: {Denied: strings.Repeat("why ", 100) + "é"}}}
	m := question(long+".", wire.TypeA)
	m.SetEdns0(512, false)
	raw, err := m.Pack()
	require.NoError(t, err)
	reply, q := answer(view, false, UDP, raw)
	var got wire.Msg
	require.NoError(t, got.Unpack(reply))
	assert.LessOrEqual(t, len(reply), 512)
	assert.False(t, got.Truncated)
	assert.Equal(t, "NXDOMAIN", q.Rcode)
	assert.Len(t, got.IsEdns0().Option, 1)
	assert.Len(t, got.Ns, 1)
}

func TestTruncation(t *testing.T) {
	_, address := serve(t, always(shop()))
	for _, test := range []struct {
		offered   uint16 // 0: no EDNS
		limit     int
		truncated bool
	}{
		{0, 512, true}, {100, 512, true}, {512, 512, true}, {1000, 1000, true}, {4096, 1232, true},
	} {
		m := question("many.test.", wire.TypeA)
		if test.offered > 0 {
			m.SetEdns0(test.offered, false)
		}
		raw, err := m.Pack()
		require.NoError(t, err)
		reply, _ := answer(shop(), false, UDP, raw)
		var got wire.Msg
		require.NoError(t, got.Unpack(reply))
		assert.LessOrEqual(t, len(reply), test.limit)
		assert.Equal(t, test.truncated, got.Truncated)
		assert.Equal(t, test.offered > 0, got.IsEdns0() != nil)
	}
	udp := ask(t, UDP, address, question("many.test.", wire.TypeA))
	assert.True(t, udp.Truncated)
	tcp := ask(t, TCP, address, question("many.test.", wire.TypeA))
	assert.False(t, tcp.Truncated)
	assert.Len(t, tcp.Answer, 100)
}

func TestUnknownClientIsRefused(t *testing.T) {
	var reason atomic.Value
	_, address := serve(t, Config{
		View: func(netip.Addr) (string, *View) { return "", nil },
		Log:  func(q Query) { reason.Store(q.Reason) },
	})
	for _, transport := range []string{UDP, TCP} {
		reply := ask(t, transport, address, question("db.", wire.TypeA))
		assert.Equal(t, wire.RcodeRefused, reply.Rcode)
		assert.Equal(t, "unknown client", reason.Load())
	}
}

// Another view is another answer at once, on a connection that is open too.
func TestViewIsSwapped(t *testing.T) {
	var view atomic.Pointer[View]
	view.Store(shop())
	_, address := serve(t, Config{View: func(netip.Addr) (string, *View) { return "web", view.Load() }})
	conn, err := wire.Dial("tcp", address)
	require.NoError(t, err)
	defer conn.Close()
	for _, want := range []int{wire.RcodeSuccess, wire.RcodeNameError} {
		require.NoError(t, conn.WriteMsg(question("db.", wire.TypeA)))
		reply, err := conn.ReadMsg()
		require.NoError(t, err)
		assert.Equal(t, want, reply.Rcode)
		view.Store(&View{Records: map[string]Record{"db": {Denied: "no more"}}})
	}
}

func TestPipelined(t *testing.T) {
	_, address := serve(t, always(shop()))
	conn, err := net.Dial("tcp", address)
	require.NoError(t, err)
	defer conn.Close()
	const n = 1000 // more than may be in flight
	go func() {
		for i := range n {
			m := question("db.", wire.TypeA)
			m.Id = uint16(i)
			raw, _ := m.Pack()
			framed := append(binary.BigEndian.AppendUint16(nil, uint16(len(raw))), raw...)
			conn.Write(framed[:5]) // in pieces
			conn.Write(framed[5:])
		}
	}()
	seen := map[uint16]bool{}
	stream := &wire.Conn{Conn: conn}
	for range n {
		reply, err := stream.ReadMsg()
		require.NoError(t, err)
		assert.Len(t, reply.Answer, 1)
		seen[reply.Id] = true
	}
	assert.Len(t, seen, n)
}

// One Machine's flood is refused and counted; another's question is answered.
func TestFloodCostsOnlyItself(t *testing.T) {
	gate := make(chan struct{})
	machine := atomic.Value{}
	machine.Store("flood")
	stuck := make(chan struct{}, 2*maxInFlight)
	server, address := serve(t, Config{
		View: func(netip.Addr) (string, *View) { return machine.Load().(string), shop() },
		Log: func(q Query) {
			if q.Machine == "flood" && q.Reason == "" {
				stuck <- struct{}{}
				<-gate
			}
		},
	})
	defer close(gate)
	raw, err := question("db.", wire.TypeA).Pack()
	require.NoError(t, err)
	conn, err := net.Dial("udp", address)
	require.NoError(t, err)
	defer conn.Close()
	for range maxInFlight {
		_, err := conn.Write(raw)
		require.NoError(t, err)
		<-stuck
	}
	reply := exchange(t, address, raw)
	assert.Equal(t, wire.RcodeRefused, reply.Rcode)
	assert.EqualValues(t, 1, server.Overflows())
	machine.Store("quiet")
	reply = exchange(t, address, raw)
	assert.Equal(t, wire.RcodeSuccess, reply.Rcode)
}

func TestStreamsAreBounded(t *testing.T) {
	server, address := serve(t, always(shop()))
	for range maxStreams {
		conn, err := net.Dial("tcp", address)
		require.NoError(t, err)
		defer conn.Close()
	}
	conn, err := net.Dial("tcp", address)
	require.NoError(t, err)
	defer conn.Close()
	_, err = io.ReadAll(conn)
	_ = err // end of stream or a reset
	assert.EqualValues(t, 1, server.Overflows())
}

func TestServeAfterClose(t *testing.T) {
	server := NewServer(always(shop()))
	require.NoError(t, server.Close())
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	assert.ErrorIs(t, server.Serve(l), net.ErrClosed)
	p, err := net.ListenPacket("udp", "127.0.0.1:0")
	require.NoError(t, err)
	assert.ErrorIs(t, server.ServePacket(p), net.ErrClosed)
}

func TestDig(t *testing.T) {
	if _, err := exec.LookPath("dig"); err != nil {
		t.Skip("dig is not installed")
	}
	_, address := serve(t, always(shop()))
	host, port, err := net.SplitHostPort(address)
	require.NoError(t, err)
	for _, test := range []struct {
		args []string
		want []string
	}{
		{[]string{"db.vz.internal"}, []string{"status: NOERROR", "10.20.0.20", "flags: qr aa rd ra"}},
		{[]string{"client"}, []string{"status: NXDOMAIN", "EDE: 15 (Blocked)", "no path lets web reach client", "SOA"}},
		{[]string{"shop.test", "AAAA"}, []string{"status: NOERROR", "ANSWER: 0", "SOA"}},
		{[]string{"+tcp", "many.test"}, []string{"ANSWER: 100"}},
		{[]string{"+noedns", "many.test"}, []string{"Truncated, retrying in TCP mode", "ANSWER: 100"}},
		{[]string{"-x", "10.20.0.20"}, []string{"db.back.vz.internal."}},
		{[]string{"ANY", "shop.test"}, []string{"RFC8482"}},
		{[]string{"+edns=1", "+noednsneg", "db"}, []string{"status: BADVERS"}},
		{[]string{"CH", "TXT", "version.bind"}, []string{"status: REFUSED"}},
	} {
		args := append([]string{"@" + host, "-p", port, "+time=5"}, test.args...)
		out, err := exec.Command("dig", args...).CombinedOutput()
		require.NoError(t, err, string(out))
		for _, want := range test.want {
			assert.Contains(t, string(out), want, strings.Join(args, " "))
		}
	}
}

func FuzzServe(f *testing.F) {
	for _, m := range []*wire.Msg{
		question("db.", wire.TypeA), question("Client.", wire.TypeAAAA), question("many.test.", wire.TypeA),
		question("20.0.20.10.in-addr.arpa.", wire.TypePTR), question("shop.test.", wire.TypeANY),
		question("client.", wire.TypeA).SetEdns0(4096, true), new(wire.Msg).SetNotify("db."),
		new(wire.Msg).SetAxfr("test."), question(`\000\255\.x.`, wire.TypeA),
	} {
		raw, err := m.Pack()
		require.NoError(f, err)
		f.Add(raw)
		f.Add(raw[:len(raw)-1])
		f.Add(append(raw, 0))
	}
	f.Add([]byte{})
	f.Add([]byte("\x00\x01\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\xc0\x0c\x00\x01\x00\x01")) // a name that points to itself
	view := shop()
	f.Fuzz(func(t *testing.T, message []byte) {
		for _, transport := range []string{UDP, TCP} {
			reply, q := answer(view, false, transport, message)
			if reply == nil {
				assert.True(t, len(message) < 12 || message[2]&0x80 != 0, "%+v", q)
				continue
			}
			if transport == UDP {
				assert.LessOrEqual(t, len(reply), maxUDP)
			}
			var got wire.Msg
			require.NoError(t, got.Unpack(reply))
			assert.Equal(t, message[:2], reply[:2], "the question's ID")
			assert.True(t, got.Response)
			assert.NotEmpty(t, q.Rcode)
			if got.Rcode == wire.RcodeSuccess {
				assert.NotEqual(t, len(got.Answer) > 0, len(got.Ns) > 0, "answers or an SOA")
			}
		}
	})
}

func BenchmarkAnswer(b *testing.B) {
	view := shop()
	raw, err := question("db.vz.internal.", wire.TypeA).SetEdns0(1232, false).Pack()
	require.NoError(b, err)
	b.ReportAllocs()
	for b.Loop() {
		answer(view, false, UDP, raw)
	}
}
