package faults

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"vz.test/vz/netstack/packet"
)

// The vectors come from testdata/golden.py, which is another implementation.
// A receipt of last year refers to them: if this fails, the code is wrong.
func TestGoldenVectors(t *testing.T) {
	b, err := os.ReadFile("testdata/golden.json")
	require.NoError(t, err)
	var golden struct {
		Words []struct {
			Seed        uint64 `json:",string"`
			Name        string
			Revision    uint64 `json:",string"`
			Direction   packet.Direction
			Source      string
			Destination string
			Protocol    uint8
			Port        uint16
			Ordinal     uint64 `json:",string"`
			Class       Class
			Index       uint64 `json:",string"`
			Attempt     uint32
			Lane        lane
			Word        string
		}
		Lists []struct {
			Probability float64
			Count       uint64
			Seed        uint64 `json:",string"`
			Name        string
			Lost        []uint64
		}
		Thresholds []struct {
			Probability float64
			Threshold   threshold `json:",string"`
		}
	}
	require.NoError(t, json.Unmarshal(b, &golden))
	require.Len(t, golden.Words, 24)
	for i, v := range golden.Words {
		key := newKey(v.Seed, v.Name, v.Revision)
		mid := (&FlowKey{v.Source, v.Destination, v.Protocol, v.Port, v.Ordinal}).mid(key, v.Direction)
		d := draw{block: key, mid: &mid, point: Point{v.Class, v.Index, v.Attempt}}
		assert.Equal(t, v.Word, fmt.Sprintf("%016x", d.word(v.Lane)), "word %d", i)
	}
	for i, v := range golden.Lists {
		spec := Spec{Name: v.Name, Seed: v.Seed, Loss: &Loss{v.Probability}}
		var lost []uint64
		for n := range v.Count {
			d, err := Decide(spec, packet.Request, FlowKey{"web", "db", 17, 53, 0}, Point{Class: UDP, Index: n})
			require.NoError(t, err)
			if d.Lost {
				lost = append(lost, n)
			}
		}
		assert.Equal(t, v.Lost, lost, "list %d", i)
	}
	for _, v := range golden.Thresholds {
		assert.Equal(t, v.Threshold, newThreshold(v.Probability), "p = %v", v.Probability)
	}
}

func TestThresholdEnds(t *testing.T) {
	assert.False(t, newThreshold(0).hit(0))
	assert.True(t, newThreshold(1).hit(math.MaxUint64))
	assert.True(t, newThreshold(math.SmallestNonzeroFloat64).hit(0), "above zero is never zero")
}

// Over many seeds the rate is the one asked for, in each class and on each of
// two lanes. At 4.9 σ a right engine fails once in a million.
func TestLossRateOverSeeds(t *testing.T) {
	const seeds, packets = 400, 500
	for _, p := range []float64{0.01, 0.3} {
		for _, class := range []Class{Data, UDP, ACK} {
			lost := 0
			hit := newThreshold(p)
			for seed := range uint64(seeds) {
				key := newKey(seed, "lossy", 0)
				mid := (&FlowKey{"web", "db", 6, 5432, 0}).mid(key, packet.Request)
				d := draw{block: key, mid: &mid, point: Point{Class: class}}
				for i := range uint64(packets) {
					d.point.Index = i * 1448
					if hit.hit(d.word(laneLoss)) {
						lost++
					}
				}
			}
			n := float64(seeds * packets)
			assert.InDelta(t, n*p, float64(lost), 4.9*math.Sqrt(n*p*(1-p)), "p = %v, class %d", p, class)
		}
	}
}

func TestDecideDirectionAndKind(t *testing.T) {
	flow, point := FlowKey{"web", "db", 6, 5432, 0}, Point{Class: Data}
	slow := Spec{Name: "slow", Direction: Request, Latency: &Latency{time.Second}}
	d, err := Decide(slow, packet.Request, flow, point)
	require.NoError(t, err)
	assert.Equal(t, Decision{Delay: time.Second}, d)
	d, err = Decide(slow, packet.Response, flow, point)
	require.NoError(t, err)
	assert.Equal(t, Decision{}, d)
	_, err = Decide(Spec{}, packet.Request, flow, point)
	assert.Error(t, err)
}

// tcp is a segment; payload bytes follow from length.
func tcp(flags uint8, seq, ack uint32, length int) *packet.Flight {
	return &packet.Flight{
		Flow:  packet.FlowID{Serial: 1, Source: "web", Destination: "db", Protocol: 6, DestinationPort: 5432},
		Info:  &packet.Info{L3: 14, L4: 34, Payload: 54, Length: 54 + length, Protocol: 6, TCPFlags: flags, Sequence: seq, Acknowledgement: ack},
		Frame: make([]byte, 54+length),
	}
}

func TestPointsOfTCP(t *testing.T) {
	var isn uint32 = math.MaxUint32 - 1000 // so that it wraps
	var c counts
	for i, step := range []struct {
		flags    uint8
		seq, ack uint32
		length   int
		want     Point
	}{
		{tcpSYN, isn, 0, 0, Point{SYN, 0, 0}},
		{tcpSYN, isn, 0, 0, Point{SYN, 0, 1}},
		{tcpACK, isn + 1, 7001, 0, Point{ACK, 0, 0}},
		{tcpACK, isn + 1, 7001, 1000, Point{Data, 0, 0}},
		{tcpACK, isn + 1001, 7001, 1000, Point{Data, 1000, 0}},
		{tcpACK, isn + 2001, 7001, 1000, Point{Data, 2000, 0}},
		{tcpACK, isn + 1001, 7001, 1000, Point{Data, 1000, 1}},
		{tcpACK, isn + 1001, 7001, 1000, Point{Data, 1000, 2}},
		{tcpACK, isn + 1, 7001, 3000, Point{Data, 0, 1}},
		{tcpACK, isn + 3001, 7001, 1000, Point{Data, 3000, 0}},
		{tcpACK, isn + 4001, 7501, 0, Point{ACK, 500, 0}},
		{tcpACK, isn + 4001, 7501, 0, Point{ACK, 500, 1}},
		{tcpACK, isn + 4001, 7501, 0, Point{ACK, 500, 2}},
		{tcpACK, isn + 4001, 7502, 0, Point{ACK, 501, 0}},
		{tcpACK | tcpFIN, isn + 4001, 7502, 5, Point{Data, 4000, 0}},
		{tcpACK | tcpFIN, isn + 4006, 7502, 0, Point{FIN, 0, 0}},
		{tcpACK | tcpFIN, isn + 4006, 7502, 0, Point{FIN, 0, 1}},
		{tcpRST, isn + 4007, 0, 0, Point{RST, 0, 0}},
	} {
		assert.Equal(t, step.want, c.point(tcp(step.flags, step.seq, step.ack, step.length)), "step %d", i)
	}
}

// Offsets go on where 32 bits end.
func TestPointsBeyond4GiB(t *testing.T) {
	var c counts
	c.point(tcp(tcpSYN, 99, 0, 0))
	seq, want := uint32(100), uint64(0)
	const step = 1 << 30
	for range 9 {
		f := tcp(tcpACK, seq, 1, 1)
		f.Info.Length += step - 1
		assert.Equal(t, Point{Data, want, 0}, c.point(f))
		seq, want = seq+step, want+step
	}
	f := tcp(tcpACK, seq-step, 1, 1)
	assert.Equal(t, Point{Data, want - step, 1}, c.point(f), "sent again")
}

// Without a SYN, offsets are from the first sequence number seen, and what was
// sent before that has a point as well.
func TestPointsOfOlderFlow(t *testing.T) {
	var c counts
	assert.Equal(t, Point{Data, 0, 0}, c.point(tcp(tcpACK, 5000, 1, 100)))
	before := c.point(tcp(tcpACK, 4900, 1, 100))
	assert.Equal(t, Point{Data, math.MaxUint64 - 99, 1}, before)
}

func TestPointsOfDatagramsAndEchoes(t *testing.T) {
	var c counts
	udp := &packet.Flight{Flow: packet.FlowID{Protocol: 17}, Info: &packet.Info{L4: 34, Protocol: 17}}
	assert.Equal(t, Point{UDP, 0, 0}, c.point(udp))
	assert.Equal(t, Point{UDP, 1, 0}, c.point(udp))
	later := &packet.Flight{Flow: udp.Flow, Info: &packet.Info{Protocol: 17, Fragment: true, FragmentOffset: 1480}}
	assert.Equal(t, Point{Other, 0, 0}, c.point(later), "a later fragment has no ports")
	unreachable := &packet.Flight{Flow: udp.Flow, Info: &packet.Info{L4: 34, Protocol: 1, ICMPType: 3}}
	assert.Equal(t, Point{Other, 1, 0}, c.point(unreachable))

	for _, protocol := range []uint8{1, 58} {
		c = counts{}
		kind := map[uint8]uint8{1: 8, 58: 128}[protocol]
		echo := func(n uint16) Point {
			return c.point(&packet.Flight{Flow: packet.FlowID{Protocol: protocol},
				Info: &packet.Info{L4: 34, Protocol: protocol, ICMPType: kind, ICMPSequence: n}})
		}
		assert.Equal(t, Point{Echo, 65534, 0}, echo(65534))
		assert.Equal(t, Point{Echo, 65535, 0}, echo(65535))
		assert.Equal(t, Point{Echo, 65536, 0}, echo(0))
		assert.Equal(t, Point{Echo, 65535, 1}, echo(65535))
		assert.Equal(t, Point{Echo, 65538, 0}, echo(2))
	}
}

// However much is sent again, memory is bounded and no start meets an attempt
// that it has had, so that no decision can hold it up for ever.
func TestResentIsBoundedAndNeverRepeats(t *testing.T) {
	var s series
	s.attempt(0, 1<<20)
	had := map[int64]uint32{}
	for round := range 5 {
		for start := int64(0); start < 300; start++ {
			a := s.attempt(start, 1)
			require.Greater(t, a, had[start], "round %d, start %d", round, start)
			had[start] = a
		}
	}
	assert.Equal(t, maxResent, s.resent.len)
}

func TestLatenessPercentiles(t *testing.T) {
	for v := range uint64(1 << 16) {
		i := bucket(v)
		require.Less(t, v, bucketEnd(i))
		if i > 0 {
			require.GreaterOrEqual(t, v, bucketEnd(i-1))
		}
	}
	var l lateness
	assert.Zero(t, l.percentile(99))
	for i := range 1000 {
		l.add(time.Duration(i) * time.Microsecond)
	}
	l.add(-time.Second)
	for _, p := range []uint64{50, 99} {
		exact := time.Duration(p) * 10 * time.Microsecond
		assert.GreaterOrEqual(t, l.percentile(p), exact)
		assert.LessOrEqual(t, l.percentile(p), exact*17/16+2*time.Microsecond)
	}
	assert.Equal(t, l.worst, l.percentile(100))
	l.add(time.Hour)
	assert.Equal(t, time.Hour, l.percentile(100))
	l.add(1000 * time.Hour) // more than there are buckets for
	assert.Equal(t, 1000*time.Hour, l.worst)
}

func TestWilson(t *testing.T) {
	// Newcombe (1998), table I: 81 of 263 and 0 of 20.
	low, high := wilson(81, 263)
	assert.InDelta(t, 0.2553, low, 5e-5)
	assert.InDelta(t, 0.3662, high, 5e-5)
	low, high = wilson(0, 20)
	assert.InDelta(t, 0, low, 1e-12)
	assert.InDelta(t, 0.1611, high, 5e-5)
}

// forLoss is a Conditioner with one armed fault of 30 % loss on requests.
func forLoss() *Conditioner {
	now := func() time.Duration { return 0 }
	c := newConditioner("web-db", System{}, now, 1, 1<<20, func(*Conditioner) {})
	m := newImpairment(&Spec{Name: "lossy", Direction: Request, Loss: &Loss{0.3}}, 0)
	m.touched = func() {}
	c.arm(m)
	return c
}

func TestNoAllocation(t *testing.T) {
	c := forLoss()
	f := tcp(tcpSYN, 0, 0, 0)
	c.Condition(f)
	f = tcp(tcpACK, 1, 1, 1448)
	assert.Zero(t, testing.AllocsPerRun(1000, func() {
		c.Condition(f)
		f.Info.Sequence += 1448
	}), "an impaired direction")
	f.Direction = packet.Response
	assert.Zero(t, testing.AllocsPerRun(1000, func() { c.Condition(f) }), "an unimpaired direction")
	c.heal(c.armed[0])
	assert.Zero(t, testing.AllocsPerRun(1000, func() { c.Condition(f) }), "no fault")
}

// More flows than the bounds allow are impaired all the same, and the fault
// says that it is no longer exact.
func TestFlowsAreBounded(t *testing.T) {
	c := forLoss()
	f := &packet.Flight{Info: &packet.Info{L4: 34, Protocol: 17},
		Flow: packet.FlowID{Source: "web", Destination: "db", Protocol: 17}}
	lost := 0
	const flows = maxServices + 4000
	for i := range flows {
		f.Flow.Serial, f.Flow.DestinationPort = uint64(i), uint16(i)
		if c.Condition(f) == packet.Lost {
			lost++
		}
	}
	m := c.armed[0]
	assert.Len(t, m.flows.known, maxServices)
	assert.Len(t, m.flows.services, maxServices)
	assert.NotZero(t, m.flows.because&crowded)
	assert.InDelta(t, flows*0.3, lost, 4.9*math.Sqrt(flows*0.3*0.7))
	for i := range flows {
		c.Forget(uint64(i))
	}
	assert.Empty(t, m.flows.known)
	for _, s := range m.flows.services {
		require.Zero(t, s.open)
	}
}

func TestMillis(t *testing.T) {
	for _, d := range []time.Duration{0, 1, 999, time.Microsecond, 100 * time.Millisecond, maxTime, maxTime - 1} {
		b, err := millis(d).MarshalJSON()
		require.NoError(t, err)
		var back millis
		require.NoError(t, back.UnmarshalJSON(b), "%s", b)
		assert.Equal(t, d, time.Duration(back))
	}
	for _, bad := range []string{"-1", "1e300", `"1"`, strconv.Itoa(31 * 24 * 3600 * 1000)} {
		assert.Error(t, new(millis).UnmarshalJSON([]byte(bad)), bad)
	}
}

func FuzzSpec(f *testing.F) {
	f.Add([]byte(`{"name":"slow","path":"web-db","direction":"both","seed":"42","revision":"0","latency":{"delay_millis":100},"at_millis":0,"ttl_millis":30000}`))
	f.Add([]byte(`{"name":"lossy","path":"web-db","direction":"request","seed":"1","revision":"7","loss":{"probability":0.01},"at_millis":0.5,"ttl_millis":1}`))
	f.Add([]byte(`{"loss":{"probability":2}}`))
	f.Add([]byte(`{"loss":null,"latency":{}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var s Spec
		if json.Unmarshal(b, &s) != nil {
			return
		}
		require.NoError(t, s.check())
		again, err := json.Marshal(s)
		require.NoError(t, err)
		var back Spec
		require.NoError(t, json.Unmarshal(again, &back))
		require.Equal(t, s, back)
		require.Equal(t, s.Digest(), back.Digest())
	})
}

func FuzzJournal(f *testing.F) {
	f.Add([]byte(`{"version":1,"faults":[{"origin":"api","armed_at":"2031-05-06T07:08:09Z","spec":{"fault_id":"flt_1","name":"slow","path":"web-db","direction":"both","seed":"42","revision":"0","latency":{"delay_millis":100},"at_millis":0,"ttl_millis":30000}}]}`))
	f.Add([]byte(`{"version":2,"faults":[]}`))
	f.Add([]byte(`{"version":1,"faults":[{}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		left, err := readJournal(b)
		if err != nil {
			return
		}
		for _, e := range left {
			require.NotEmpty(t, e.Spec.ID)
			require.NoError(t, e.Spec.check())
		}
	})
}

// FuzzPoints: whatever a guest sends, counting neither panics nor grows.
func FuzzPoints(f *testing.F) {
	f.Add([]byte{tcpSYN, 0, 0, 0, 0, 0, tcpACK, 1, 0, 0, 0, 9, tcpACK, 1, 0, 0, 0, 9})
	f.Fuzz(func(t *testing.T, b []byte) {
		c := forLoss()
		for ; len(b) >= 6; b = b[6:] {
			f := tcp(b[0], uint32(b[1])|uint32(b[2])<<24, uint32(b[3])|uint32(b[4])<<24, int(b[5]))
			f.Direction = packet.Direction(b[0] >> 7)
			f.Flow.Serial = uint64(b[0] >> 6 & 1)
			c.Condition(f)
		}
		flows := c.armed[0].flows
		require.LessOrEqual(t, len(flows.known), 2)
		for _, s := range flows.services {
			require.GreaterOrEqual(t, s.open, 0)
			require.LessOrEqual(t, s.open, 2)
		}
	})
}

func BenchmarkLoss(b *testing.B) {
	c := forLoss()
	c.Condition(tcp(tcpSYN, 0, 0, 0))
	f := tcp(tcpACK, 1, 1, 1448)
	b.ReportAllocs()
	for b.Loop() {
		c.Condition(f)
		f.Info.Sequence += 1448
	}
}

func BenchmarkUnimpairedDirection(b *testing.B) {
	c := forLoss()
	f := tcp(tcpACK, 1, 1, 1448)
	f.Direction = packet.Response
	b.ReportAllocs()
	for b.Loop() {
		c.Condition(f)
	}
}

// still is a clock whose timers never fire.
type still struct{ System }

func (still) AfterFunc(time.Duration, func()) Timer { return still{} }
func (still) Reset(time.Duration) bool              { return false }
func (still) Stop() bool                            { return false }

type discard struct{}

func (discard) Deliver([]byte) {}

// lateFrames returns a function that has a full frame of one of 1,000 flows
// held for half a millisecond, by a clock that moves a microsecond a packet,
// and releases what is due every 50.
func lateFrames() (frame func(), bytes int64) {
	var now time.Duration
	c := newConditioner("web-db", still{}, func() time.Duration { return now }, 1<<16, 64<<20, func(*Conditioner) {})
	m := newImpairment(&Spec{Name: "slow", Latency: &Latency{500 * time.Microsecond}}, 0)
	m.touched = func() {}
	c.arm(m)
	f := tcp(tcpACK, 1, 1, 1448)
	f.To = discard{}
	return func() {
		now += time.Microsecond
		f.Flow.Serial = uint64(now/time.Microsecond) % 1000
		c.Condition(f)
		if now%(50*time.Microsecond) == 0 {
			c.release(packet.Request)
		}
	}, int64(len(f.Frame))
}

func TestNoAllocationForLateFrames(t *testing.T) {
	frame, _ := lateFrames()
	for range 10000 {
		frame()
	}
	assert.Zero(t, testing.AllocsPerRun(10000, frame))
}

func BenchmarkLatency(b *testing.B) {
	frame, bytes := lateFrames()
	b.ReportAllocs()
	b.SetBytes(bytes)
	for b.Loop() {
		frame()
	}
}
