package flow

import (
	"fmt"
	"net/netip"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"vz.test/vz/netstack/packet"
	"vz.test/vz/netstack/packet/packettest"
)

var at = netip.MustParseAddrPort

func info(t testing.TB, frame []byte) *packet.Info {
	i := new(packet.Info)
	require.NoError(t, packet.Decode(frame, i))
	return i
}

func TestKeys(t *testing.T) {
	ip := netip.MustParseAddr
	request := KeyOf(info(t, packettest.UDP(at("10.0.0.1:5"), at("10.0.0.2:6"), nil)))
	assert.Equal(t, NewKey(17, at("10.0.0.1:5"), at("10.0.0.2:6")), request)
	assert.Equal(t, at("10.0.0.1:5"), request.From())
	assert.Equal(t, at("10.0.0.2:6"), request.To())
	response := KeyOf(info(t, packettest.UDP(at("10.0.0.2:6"), at("10.0.0.1:5"), nil)))
	assert.Equal(t, response, request.Reverse())

	for _, pair := range [][2]string{{"10.0.0.1", "10.0.0.2"}, {"2001:db8::1", "2001:db8::2"}} {
		a, b := ip(pair[0]), ip(pair[1])
		echo, reply := uint8(8), uint8(0)
		if a.Is6() {
			echo, reply = 128, 129
		}
		request = KeyOf(info(t, packettest.ICMP(a, b, echo, 0, 7<<16|1, nil)))
		assert.EqualValues(t, 7, request.SourcePort)
		response = KeyOf(info(t, packettest.ICMP(b, a, reply, 0, 7<<16|9, nil)))
		assert.Equal(t, response, request.Reverse())
		other := KeyOf(info(t, packettest.ICMP(b, a, echo, 0, 7<<16|1, nil)))
		assert.NotEqual(t, response, other, "both may ping with one identifier")
	}
}

func newFlow(from, to string, protocol uint8) *Flow[int] {
	f := &Flow[int]{}
	f.Ways[0].Key = NewKey(protocol, at(from), at(to))
	f.Ways[1].Key = f.Ways[0].Key.Reverse()
	return f
}

func TestTable(t *testing.T) {
	var ended []*Flow[int]
	table := New(10, 5, func(f *Flow[int]) { ended = append(ended, f) })
	var owner Owner
	f := newFlow("10.0.0.1:5", "10.0.0.2:6", 17)
	f.Ways[1].Key = NewKey(17, at("10.0.0.2:6"), at("203.0.113.1:5")) // as behind NAT
	require.NoError(t, table.Insert(0, &owner, f))
	assert.EqualValues(t, 1, f.Serial)
	for direction := range f.Ways {
		w := table.Lookup(&f.Ways[direction].Key)
		require.Same(t, &f.Ways[direction], w)
		assert.Same(t, f, w.Flow())
		assert.EqualValues(t, direction, w.Direction())
	}
	none := f.Ways[0].Key.Reverse()
	assert.Nil(t, table.Lookup(&none))
	require.ErrorIs(t, table.Insert(0, &owner, newFlow("10.0.0.1:5", "10.0.0.2:6", 17)), ErrTaken)
	require.ErrorIs(t, table.Insert(0, &owner, newFlow("203.0.113.1:5", "10.0.0.2:6", 17)), ErrTaken)
	assert.Equal(t, 1, table.Len())
	assert.Equal(t, 1, owner.Open())
	table.Remove(f)
	table.Remove(f)
	assert.Equal(t, []*Flow[int]{f}, ended)
	assert.Nil(t, table.Lookup(&f.Ways[0].Key))
	assert.Nil(t, table.Lookup(&f.Ways[1].Key))
	assert.Zero(t, table.Len())
	assert.Zero(t, owner.Open())
}

func TestTableIsBounded(t *testing.T) {
	table := New(8, 5, func(*Flow[int]) {})
	var a, b Owner
	insert := func(owner *Owner, i int) error {
		return table.Insert(0, owner, newFlow(fmt.Sprintf("10.0.0.1:%d", i), "10.0.0.2:6", 17))
	}
	for i := range 5 {
		require.NoError(t, insert(&a, i+1))
	}
	require.ErrorIs(t, insert(&a, 6), ErrFull)
	for i := range 3 {
		require.NoError(t, insert(&b, i+10))
	}
	require.ErrorIs(t, insert(&b, 20), ErrFull)
	assert.Equal(t, 8, table.Len())
	assert.Equal(t, 5, a.Open())
	assert.Equal(t, 3, b.Open())
	table.Each(table.Remove)
	assert.Zero(t, table.Len())
	require.NoError(t, insert(&a, 1))
}

func TestTimeouts(t *testing.T) {
	tcp := func(flags uint8) []byte {
		return packettest.TCP(at("10.0.0.1:5"), at("10.0.0.2:6"), 100, 200, flags, nil)
	}
	back := func(flags uint8) []byte {
		return packettest.TCP(at("10.0.0.2:6"), at("10.0.0.1:5"), 200, 101, flags, nil)
	}
	opening := [][]byte{tcp(packet.SYN), back(packet.SYN | packet.ACK), tcp(packet.ACK)}
	for _, test := range []struct {
		name   string
		frames [][]byte
		state  State
		idle   time.Duration
	}{
		{"SYN", opening[:1], Opening, 4 * time.Minute},
		{"SYN,ACK", opening[:2], Opening, 4 * time.Minute},
		{"established", opening, Open, 2*time.Hour + 4*time.Minute},
		{"half closed", append(opening[:3:3], tcp(packet.FIN|packet.ACK), back(packet.ACK)), Open, 2*time.Hour + 4*time.Minute},
		{"both FINs", append(opening[:3:3], tcp(packet.FIN|packet.ACK), back(packet.FIN|packet.ACK)), Closing, 4 * time.Minute},
		{"reset by either", append(opening[:3:3], back(packet.RST)), Closed, 20 * time.Second},
		{"refused", append(opening[:1:1], back(packet.RST|packet.ACK)), Closed, 20 * time.Second},
		{"UDP", [][]byte{packettest.UDP(at("10.0.0.1:5"), at("10.0.0.2:6"), nil)}, Open, 5 * time.Minute},
		{"DNS", [][]byte{packettest.UDP(at("10.0.0.1:5"), at("10.0.0.2:53"), nil)}, Open, 20 * time.Second},
		{"echo", [][]byte{packettest.ICMP(at("10.0.0.1:5").Addr(), at("10.0.0.2:6").Addr(), 8, 0, 7<<16, nil)}, Open, time.Minute},
		{"SCTP", [][]byte{packettest.IP(at("10.0.0.1:5").Addr(), at("10.0.0.2:6").Addr(), 132, make([]byte, 12))}, Open, 5 * time.Minute},
	} {
		t.Run(test.name, func(t *testing.T) {
			ended := 0
			table := New(10, 10, func(*Flow[int]) { ended++ })
			f := &Flow[int]{}
			f.Ways[0].Key = KeyOf(info(t, test.frames[0]))
			f.Ways[1].Key = f.Ways[0].Key.Reverse()
			require.NoError(t, table.Insert(0, &Owner{}, f))
			now := time.Hour
			for _, frame := range test.frames {
				i := info(t, frame)
				key := KeyOf(i)
				table.Lookup(&key).See(now, i)
			}
			assert.Equal(t, test.state, f.State())
			table.Expire(now + test.idle - 1)
			require.Zero(t, ended)
			table.Expire(now + test.idle)
			require.Equal(t, 1, ended)
		})
	}
}

// A connection is closed when both FINs are acknowledged, and not by an
// acknowledgement of what came before them.
func TestClosing(t *testing.T) {
	table := New(10, 10, func(*Flow[int]) {})
	f := newFlow("10.0.0.1:5", "10.0.0.2:6", 6)
	require.NoError(t, table.Insert(0, &Owner{}, f))
	see := func(direction packet.Direction, sequence, acknowledgement uint32, flags uint8, payload int) State {
		from, to := at("10.0.0.1:5"), at("10.0.0.2:6")
		if direction == packet.Response {
			from, to = to, from
		}
		f.Ways[direction].See(0, info(t, packettest.TCP(from, to, sequence, acknowledgement, flags, packettest.Pattern(payload))))
		return f.State()
	}
	const ack = packet.ACK
	see(packet.Request, 0xfffffff0, 0, packet.SYN, 0)
	see(packet.Response, 500, 0xfffffff1, packet.SYN|ack, 0)
	require.Equal(t, Open, see(packet.Request, 0xfffffff1, 501, ack, 0))
	require.Equal(t, Open, see(packet.Request, 0xfffffff1, 501, packet.FIN|ack, 100)) // ends at 0x56, past the wrap
	require.Equal(t, Closing, see(packet.Response, 501, 0xfffffff1, packet.FIN|ack, 0))
	require.Equal(t, Closing, see(packet.Request, 0x56, 502, ack, 0))
	require.Equal(t, Closing, see(packet.Response, 502, 0x55, ack, 0))
	require.Equal(t, Closed, see(packet.Response, 502, 0x56, ack, 0))
}

func TestCounts(t *testing.T) {
	table := New(10, 10, func(*Flow[int]) {})
	f := newFlow("10.0.0.1:5", "10.0.0.2:6", 17)
	require.NoError(t, table.Insert(0, &Owner{}, f))
	i := info(t, packettest.UDP(at("10.0.0.1:5"), at("10.0.0.2:6"), packettest.Pattern(72)))
	f.Ways[0].See(time.Second, i)
	f.Ways[0].Add(i) // an ICMP error about it would not keep it alive
	packets, bytes := f.Ways[0].Count()
	assert.EqualValues(t, 2, packets)
	assert.EqualValues(t, 200, bytes)
	assert.Equal(t, time.Second, f.Idle(2*time.Second))
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		key := KeyOf(i)
		table.Lookup(&key).See(time.Second, i)
	}))
}

func TestConcurrently(t *testing.T) {
	var ended sync.Map
	table := New(1000, 1000, func(f *Flow[int]) {
		_, again := ended.LoadOrStore(f.Serial, true)
		assert.False(t, again)
	})
	var wait sync.WaitGroup
	var owner Owner
	for range 4 {
		wait.Go(func() {
			for i := range 2000 {
				f := newFlow(fmt.Sprintf("10.0.0.1:%d", i%50), "10.0.0.2:6", 17)
				if table.Insert(0, &owner, f) != nil {
					if w := table.Lookup(&f.Ways[1].Key); w != nil {
						table.Remove(w.Flow())
					}
				}
				if i%100 == 0 {
					table.Expire(time.Hour)
				}
			}
		})
	}
	wait.Wait()
	table.Each(table.Remove)
	assert.Zero(t, table.Len())
	assert.Zero(t, owner.Open())
}

// The size that DESIGN's budget counts: 400 bytes a flow, with a Value of 48
// as the route domain has it.
func TestSize(t *testing.T) {
	type value struct {
		a, b, c, d *int
		s          string
	}
	table := New(1<<20, 1<<20, func(*Flow[value]) {})
	var owner Owner
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	const n = 10_000
	for i := range n {
		f := &Flow[value]{}
		f.Ways[0].Key = NewKey(17, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 14), 1}), uint16(i)), at("10.0.0.2:6"))
		f.Ways[1].Key = f.Ways[0].Key.Reverse()
		require.NoError(t, table.Insert(0, &owner, f))
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	each := (after.HeapAlloc - before.HeapAlloc) / n
	t.Logf("%d bytes a flow", each)
	assert.LessOrEqual(t, each, uint64(400))
	runtime.KeepAlive(table)
}

func BenchmarkLookup(b *testing.B) {
	for _, flows := range []int{10, 10_000, 100_000} {
		b.Run(fmt.Sprintf("flows=%d", flows), func(b *testing.B) {
			table := New(1<<20, 1<<20, func(*Flow[int]) {})
			var owner Owner
			keys := make([]Key, flows)
			for i := range keys {
				f := &Flow[int]{}
				f.Ways[0].Key = NewKey(6, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 14), 1}), uint16(i)), at("10.0.0.2:6"))
				f.Ways[1].Key = f.Ways[0].Key.Reverse()
				require.NoError(b, table.Insert(0, &owner, f))
				keys[i] = f.Ways[0].Key
			}
			for i := 0; b.Loop(); i++ {
				table.Lookup(&keys[i%min(flows, 64)])
			}
		})
	}
}
