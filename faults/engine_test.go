package faults_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"vz.test/vz/faults"
	"vz.test/vz/faults/faultstest"
	"vz.test/vz/netstack/packet"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const ms = time.Millisecond

// world is an engine with a route domain that has the paths web-db and
// host:shop, and a memory of what it was told.
type world struct {
	t      *testing.T
	clock  *faultstest.Clock
	engine *faults.Engine

	mu    sync.Mutex
	paths map[string]*faults.Conditioner
	told  []faults.Status
}

var errNoPath = errors.New("no such path")

func newWorld(t *testing.T, change ...func(*faults.Options)) *world {
	w := &world{t: t, clock: faultstest.New(), paths: map[string]*faults.Conditioner{}}
	ids := 0
	options := faults.Options{
		Clock: w.clock,
		Impair: func(path string, c *faults.Conditioner) error {
			if path != "web-db" && path != "host:shop" {
				return errNoPath
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			if c == nil {
				delete(w.paths, path)
			} else {
				w.paths[path] = c
			}
			return nil
		},
		OnChange: func(s faults.Status) error {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.told = append(w.told, s)
			return nil
		},
		NewID: func() string { ids++; return fmt.Sprintf("flt_%d", ids) },
	}
	for _, c := range change {
		c(&options)
	}
	w.engine = faults.New(options)
	t.Cleanup(func() {
		assert.NoError(t, w.engine.Close(faults.WhyAPI))
		assert.Empty(t, w.paths, "a path is still impaired")
	})
	return w
}

// send passes a packet on like netstack does.
func (w *world) send(f *packet.Flight) packet.Verdict {
	w.mu.Lock()
	c := w.paths["web-db"]
	w.mu.Unlock()
	v := packet.Pass
	if c != nil {
		v = c.Condition(f)
	}
	if v == packet.Pass {
		f.To.Deliver(f.Frame)
	}
	return v
}

// events tells what OnChange heard, in short.
func (w *world) events() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var es []string
	for _, s := range w.told {
		es = append(es, fmt.Sprintf("%s %s %s %d", s.Name, s.State, s.HealedWhy, s.Effect.Applied))
	}
	return es
}

func (w *world) state(name string) faults.Status {
	for _, s := range slices.Backward(w.engine.List()) {
		if s.Name == name {
			return s
		}
	}
	require.Fail(w.t, "no fault "+name)
	return faults.Status{}
}

// sink writes down what is delivered to it, and when.
type sink struct {
	clock *faultstest.Clock
	mu    sync.Mutex
	got   []string
	at    []time.Time
}

func (s *sink) Deliver(frame []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.got = append(s.got, string(frame))
	if s.clock != nil {
		s.at = append(s.at, s.clock.Now())
	}
}

// datagram is the n-th of a UDP flow.
func datagram(serial uint64, d packet.Direction, frame string, to packet.Sink) *packet.Flight {
	return &packet.Flight{
		Direction: d,
		Flow:      packet.FlowID{Serial: serial, Source: "web", Destination: "db", Protocol: 17, DestinationPort: 53},
		Info:      &packet.Info{L3: 14, L4: 34, Payload: 42, Length: 42, Protocol: 17},
		Frame:     []byte(frame),
		To:        to,
	}
}

func slow(name string, delay, ttl time.Duration) faults.Spec {
	return faults.Spec{Name: name, Path: "web-db", Seed: 42, Latency: &faults.Latency{Delay: delay}, TTL: ttl}
}

func lossy(name string, p float64, ttl time.Duration) faults.Spec {
	return faults.Spec{Name: name, Path: "web-db", Seed: 42, Loss: &faults.Loss{Probability: p}, TTL: ttl}
}

func TestLatencyHoldsAndKeepsOrder(t *testing.T) {
	w := newWorld(t)
	start := w.clock.Now()
	_, err := w.engine.Start(slow("slow", 100*ms, time.Minute))
	require.NoError(t, err)
	to := &sink{clock: w.clock}
	for i := range 200 {
		assert.Equal(t, packet.Held, w.send(datagram(uint64(i%3), packet.Direction(i%2), fmt.Sprint(i), to)))
		if i%10 == 9 {
			w.clock.Advance(ms)
		}
	}
	assert.Empty(t, to.got, "20 ms have passed")
	w.clock.Advance(79 * ms)
	assert.Empty(t, to.got, "99 ms have passed")
	w.clock.Advance(ms)
	assert.Len(t, to.got, 10)
	w.clock.Advance(time.Second)
	require.Len(t, to.got, 200)
	for d := range 2 {
		last := -1
		for i, frame := range to.got {
			var n int
			fmt.Sscan(frame, &n)
			if n%2 == d {
				assert.Greater(t, n, last, "order")
				last = n
			}
			assert.Equal(t, start.Add(time.Duration(n/10)*ms+100*ms), to.at[i])
		}
	}
	s := w.state("slow")
	assert.Equal(t, faults.Effect{Matched: 200, Decided: 200, Applied: 200, First: 0, Last: 19 * ms}, s.Effect)
	assert.Equal(t, &faults.DelayError{Samples: 200}, s.Achieved.Delay)
	assert.False(t, s.Degraded)
	assert.Equal(t, faults.Exact, s.Determinism)
}

func TestLatencyOfOneDirection(t *testing.T) {
	for direction, impaired := range map[string]packet.Direction{
		faults.Request: packet.Request, faults.Response: packet.Response,
	} {
		w := newWorld(t)
		spec := slow("slow", 100*ms, time.Minute)
		spec.Direction = direction
		_, err := w.engine.Start(spec)
		require.NoError(t, err)
		to := new(sink)
		assert.Equal(t, packet.Held, w.send(datagram(1, impaired, "held", to)))
		assert.Equal(t, packet.Pass, w.send(datagram(1, 1-impaired, "passed", to)))
		assert.Equal(t, []string{"passed"}, to.got)
		assert.EqualValues(t, 1, w.state("slow").Effect.Matched)
	}
}

// The caller's frame is its own again when Condition returns.
func TestHeldFramesAreCopies(t *testing.T) {
	w := newWorld(t)
	_, err := w.engine.Start(slow("slow", ms, time.Minute))
	require.NoError(t, err)
	to := new(sink)
	var want []string
	for _, size := range []int{1, 256, 257, 2048, 9000, 16384, 65536, 70000} {
		for _, fill := range []byte("ab") {
			frame := slices.Repeat([]byte{fill}, size)
			want = append(want, string(frame))
			f := datagram(1, packet.Request, "", to)
			f.Frame = frame
			w.send(f)
			clear(frame)
		}
		w.clock.Advance(ms / 4) // so that buffers come back while others are held
	}
	w.clock.Advance(ms)
	assert.True(t, slices.Equal(want, to.got))
}

func TestOverflowIsLostAndCountedApart(t *testing.T) {
	for _, limit := range []func(*faults.Options){
		func(o *faults.Options) { o.QueuePackets = 5 },
		func(o *faults.Options) { o.QueueBytes = 50 },
	} {
		w := newWorld(t, limit)
		_, err := w.engine.Start(slow("slow", 100*ms, time.Minute))
		require.NoError(t, err)
		to := new(sink)
		for i := range 8 {
			want := packet.Held
			if i >= 5 {
				want = packet.Lost
			}
			assert.Equal(t, want, w.send(datagram(1, packet.Request, fmt.Sprintf("%10d", i), to)))
		}
		assert.Equal(t, packet.Held, w.send(datagram(1, packet.Response, "another queue", to)))
		w.clock.Advance(100 * ms)
		assert.Len(t, to.got, 6)
		e := w.state("slow").Effect
		assert.Equal(t, []uint64{9, 9, 6, 3}, []uint64{e.Matched, e.Decided, e.Applied, e.Overflowed})
		assert.Equal(t, packet.Held, w.send(datagram(1, packet.Request, "there is room again", to)))
	}
}

func TestLossComesBeforeLatency(t *testing.T) {
	w := newWorld(t)
	// Armed first, and met last all the same.
	_, err := w.engine.Start(slow("slow", 100*ms, time.Minute))
	require.NoError(t, err)
	_, err = w.engine.Start(lossy("lossy", 0.5, time.Minute))
	require.NoError(t, err)
	to := new(sink)
	for i := range 100 {
		w.send(datagram(1, packet.Request, fmt.Sprint(i), to))
	}
	w.clock.Advance(100 * ms)
	l, s := w.state("lossy").Effect, w.state("slow").Effect
	assert.Equal(t, l.Decided, l.Applied)
	assert.EqualValues(t, 100, l.Matched)
	assert.EqualValues(t, 100, s.Matched)
	assert.EqualValues(t, 100, s.Decided)
	assert.Equal(t, 100-l.Applied, s.Applied)
	assert.Len(t, to.got, int(s.Applied))
}

// Healing delivers what is held, at once, in order, and nothing overtakes it:
// neither what comes while it is delivered.
func TestHealReleasesInOrder(t *testing.T) {
	w := newWorld(t)
	_, err := w.engine.Start(slow("slow", 100*ms, time.Minute))
	require.NoError(t, err)
	to := &sink{clock: w.clock}
	for i := range 150 { // more than one batch
		w.send(datagram(uint64(i%2), packet.Request, fmt.Sprint(i), to))
		w.clock.Advance(ms / 10)
	}
	s, err := w.engine.Heal("slow", faults.WhyAPI)
	require.NoError(t, err)
	assert.Equal(t, faults.Healed, s.State)
	assert.Equal(t, packet.Held, w.send(datagram(0, packet.Request, "150", to)), "it must not overtake")
	assert.Equal(t, packet.Pass, w.send(datagram(7, packet.Request, "other flow", new(sink))))
	assert.Equal(t, packet.Pass, w.send(datagram(0, packet.Response, "other direction", new(sink))))
	w.clock.Advance(0)
	require.Len(t, to.got, 151)
	for i, frame := range to.got {
		assert.Equal(t, fmt.Sprint(i), frame)
	}
	assert.Empty(t, w.paths, "the last packet has left")
	assert.EqualValues(t, 150, w.state("slow").Effect.Applied)
	assert.Nil(t, w.state("slow").Achieved.Delay, "released early is not late")
	assert.Equal(t, packet.Pass, w.send(datagram(0, packet.Request, "151", to)))
}

// A packet that comes from within a delivery waits for it.
func TestNothingOvertakesADelivery(t *testing.T) {
	w := newWorld(t)
	_, err := w.engine.Start(slow("slow", 100*ms, time.Second))
	require.NoError(t, err)
	to := new(sink)
	var verdict packet.Verdict
	w.send(datagram(1, packet.Request, "first", deliver(func(frame []byte) {
		verdict = w.send(datagram(1, packet.Request, "second", to))
		to.Deliver(frame)
	})))
	_, err = w.engine.Heal("slow", faults.WhyAPI)
	require.NoError(t, err)
	w.clock.Advance(0)
	assert.Equal(t, packet.Held, verdict)
	assert.Equal(t, []string{"first", "second"}, to.got)
}

type deliver func([]byte)

func (d deliver) Deliver(frame []byte) { d(frame) }

func TestTTLHealsWithoutAnybody(t *testing.T) {
	w := newWorld(t)
	armed := w.clock.Now()
	s, err := w.engine.Start(slow("slow", 100*ms, 3*time.Second))
	require.NoError(t, err)
	assert.Equal(t, faults.Armed, s.State)
	assert.Equal(t, 3*time.Second, s.Remaining)
	assert.Equal(t, "flt_1", s.ID)
	w.clock.Advance(time.Second)
	to := new(sink)
	w.send(datagram(1, packet.Request, "a", to))
	assert.Equal(t, 2*time.Second, w.state("slow").Remaining)
	w.clock.Advance(2*time.Second - 1)
	assert.Equal(t, faults.Armed, w.state("slow").State)
	w.clock.Advance(1)
	s = w.state("slow")
	assert.Equal(t, faults.Healed, s.State)
	assert.Equal(t, faults.WhyTTL, s.HealedWhy)
	assert.Equal(t, armed, s.ArmedAt)
	assert.Equal(t, armed.Add(3*time.Second), s.HealedAt)
	assert.Zero(t, s.Remaining)
	assert.False(t, s.Vacuous)
	assert.Equal(t, faults.Effect{Matched: 1, Decided: 1, Applied: 1, First: time.Second, Last: time.Second}, s.Effect)
	assert.Empty(t, w.paths)
	assert.Equal(t, []string{"slow armed  0", "slow armed  1", "slow healed ttl 1"}, w.events())
	again, err := w.engine.Heal("slow", faults.WhyAPI)
	require.NoError(t, err)
	assert.Equal(t, s, again, "it has healed before")
}

func TestVacuous(t *testing.T) {
	w := newWorld(t)
	_, err := w.engine.Start(lossy("lossy", 1, time.Second))
	require.NoError(t, err)
	assert.False(t, w.state("lossy").Vacuous, "it may still meet something")
	w.clock.Advance(time.Second)
	assert.True(t, w.state("lossy").Vacuous)
	assert.Contains(t, receipt(t, w.state("lossy")), `"vacuous":true`)
}

func TestDegradedWhenTheHostIsBusy(t *testing.T) {
	w := newWorld(t)
	_, err := w.engine.Start(slow("slow", 100*ms, time.Minute))
	require.NoError(t, err)
	w.send(datagram(1, packet.Request, "a", new(sink)))
	w.clock.Skip(110 * ms)
	w.clock.Advance(0)
	s := w.state("slow")
	assert.Equal(t, &faults.DelayError{Samples: 1, P50: 10 * ms, P99: 10 * ms, Max: 10 * ms}, s.Achieved.Delay)
	assert.True(t, s.Degraded)
}

func TestRefusals(t *testing.T) {
	w := newWorld(t)
	start := func(s faults.Spec) error {
		_, err := w.engine.Start(s)
		return err
	}
	var spec *faults.SpecError
	for field, s := range map[string]faults.Spec{
		"kind":             {Name: "x", Path: "web-db", TTL: 1},
		"loss.probability": lossy("x", 1.01, time.Second),
		"latency.delay":    slow("x", -1, time.Second),
		"direction":        {Path: "web-db", Direction: "up", Loss: &faults.Loss{}, TTL: 1},
		"ttl":              lossy("x", 0, -1),
		"at":               {Path: "web-db", Loss: &faults.Loss{}, TTL: 1, At: -1},
	} {
		require.ErrorAs(t, start(s), &spec, field)
		assert.Equal(t, field, spec.Field)
	}
	both := slow("x", 1, time.Second)
	both.Loss = &faults.Loss{}
	require.ErrorAs(t, start(both), &spec)

	var ttl *faults.TTLError
	require.ErrorAs(t, start(slow("x", ms, 0)), &ttl)
	require.ErrorAs(t, start(slow("x", ms, time.Hour+1)), &ttl)
	assert.Equal(t, time.Hour, ttl.Cap)
	late := slow("x", ms, time.Hour)
	late.At = 1
	require.ErrorAs(t, start(late), &ttl)

	elsewhere := slow("x", ms, time.Second)
	elsewhere.Path = "nowhere"
	var path *faults.PathError
	require.ErrorAs(t, start(elsewhere), &path)
	require.ErrorIs(t, start(elsewhere), errNoPath)
	elsewhere.At = time.Second
	require.ErrorIs(t, start(elsewhere), errNoPath, "not only when its time has come")

	_, err := w.engine.Heal("x", faults.WhyAPI)
	var missing *faults.NotFoundError
	require.ErrorAs(t, err, &missing)
	assert.Empty(t, w.engine.List(), "nothing came of any of it")
	assert.Empty(t, w.paths)
	assert.Empty(t, w.told)
}

func TestOverlap(t *testing.T) {
	w := newWorld(t)
	request := slow("request", ms, time.Minute)
	request.Direction = faults.Request
	_, err := w.engine.Start(request)
	require.NoError(t, err)

	var overlap *faults.OverlapError
	_, err = w.engine.Start(slow("both", ms, time.Minute))
	require.ErrorAs(t, err, &overlap)
	assert.Equal(t, &faults.OverlapError{Name: "both", With: "request", Kind: "latency", Path: "web-db"}, overlap)
	var name *faults.NameError
	_, err = w.engine.Start(lossy("request", 0, time.Minute))
	require.ErrorAs(t, err, &name)

	_, err = w.engine.Start(lossy("another kind", 0, time.Minute))
	require.NoError(t, err)
	response := slow("response", ms, time.Minute)
	response.Direction = faults.Response
	_, err = w.engine.Start(response)
	require.NoError(t, err)
	elsewhere := slow("elsewhere", ms, time.Minute)
	elsewhere.Path = "host:shop"
	_, err = w.engine.Start(elsewhere)
	require.NoError(t, err)
	later := slow("later", ms, time.Minute)
	later.At = time.Minute
	_, err = w.engine.Start(later)
	require.NoError(t, err, "one begins when the other ends")
	later.Name, later.At = "too early", 2*time.Minute-1
	_, err = w.engine.Start(later)
	require.ErrorAs(t, err, &overlap)
	assert.Equal(t, "later", overlap.With)
}

// What follows at once is armed after its predecessor has healed, also when
// the host slept over both.
func TestTimeline(t *testing.T) {
	w := newWorld(t)
	first, second, last := slow("first", 100*ms, time.Second), slow("second", 200*ms, time.Second), lossy("last", 1, time.Second)
	first.At, second.At, last.At = time.Second, 2*time.Second, 10*time.Second
	require.NoError(t, w.engine.Declare([]faults.Spec{second, first, last}))
	for _, s := range w.engine.List() {
		assert.Equal(t, faults.Pending, s.State)
		assert.Equal(t, faults.FromDefinition, s.Origin)
		assert.Zero(t, s.ArmedAt)
	}
	assert.Empty(t, w.paths, "a path with nothing but plans is unimpaired")
	w.clock.Advance(time.Second)
	assert.Equal(t, []string{"first armed  0"}, w.events())
	w.clock.Advance(time.Second)
	assert.Equal(t, []string{"first armed  0", "first healed ttl 0", "second armed  0"}, w.events())
	_, err := w.engine.Start(slow("conflict", ms, time.Second))
	var overlap *faults.OverlapError
	require.ErrorAs(t, err, &overlap)
	w.clock.Skip(time.Minute)
	w.clock.Advance(0)
	assert.Equal(t, []string{"second healed ttl 0", "last armed  0", "last healed ttl 0"}, w.events()[3:])
}

func TestDeclareStartsAnew(t *testing.T) {
	w := newWorld(t)
	a, b := slow("a", 100*ms, time.Hour), lossy("b", 1, time.Hour)
	b.At = time.Minute
	require.NoError(t, w.engine.Declare([]faults.Spec{a, b}))
	_, err := w.engine.Start(faults.Spec{Name: "api", Path: "host:shop", Latency: &faults.Latency{Delay: ms}, TTL: time.Hour})
	require.NoError(t, err)
	w.clock.Advance(30 * time.Second)

	bad := slow("bad", ms, time.Hour)
	bad.Path = "nowhere"
	err = w.engine.Declare([]faults.Spec{a, a, bad, lossy("worse", 7, time.Hour), lossy("endless", 0, 0)})
	require.ErrorIs(t, err, errNoPath)
	var name *faults.NameError
	require.ErrorAs(t, err, &name)
	var spec *faults.SpecError
	require.ErrorAs(t, err, &spec)
	var ttl *faults.TTLError
	require.ErrorAs(t, err, &ttl)
	assert.Equal(t, faults.Armed, w.state("a").State, "a refused timeline changes nothing")

	require.NoError(t, w.engine.Declare([]faults.Spec{a, b}))
	assert.Equal(t, []string{"a armed  0", "api armed  0", "a healed reconcile 0", "b healed reconcile 0", "a armed  0"}, w.events())
	assert.Equal(t, faults.Armed, w.state("api").State)
	w.clock.Advance(30 * time.Second)
	assert.Equal(t, faults.Pending, w.state("b").State, "its minute began again")
	w.clock.Advance(30 * time.Second)
	assert.Equal(t, faults.Armed, w.state("b").State)
	require.NoError(t, w.engine.Declare(nil))
	assert.Equal(t, faults.WhyReconcile, w.state("b").HealedWhy)
	assert.Equal(t, faults.Armed, w.state("api").State)
}

func TestPathGoneOnTheTimeline(t *testing.T) {
	var gone bool
	w := newWorld(t, func(o *faults.Options) {
		impair := o.Impair
		o.Impair = func(path string, c *faults.Conditioner) error {
			if gone {
				return errNoPath
			}
			return impair(path, c)
		}
	})
	a := slow("a", ms, time.Minute)
	a.At = time.Second
	require.NoError(t, w.engine.Declare([]faults.Spec{a}))
	gone = true
	w.clock.Advance(time.Second)
	s := w.state("a")
	assert.Equal(t, faults.WhyFailed, s.HealedWhy)
	assert.Contains(t, s.Error, errNoPath.Error())
	assert.Zero(t, s.ArmedAt)
	assert.True(t, s.Vacuous)
}

func TestCloseReleasesAndRefuses(t *testing.T) {
	w := newWorld(t)
	_, err := w.engine.Start(slow("slow", time.Minute, time.Hour))
	require.NoError(t, err)
	to := new(sink)
	for i := range 100 {
		w.send(datagram(1, packet.Direction(i%2), fmt.Sprint(i), to))
	}
	require.NoError(t, w.engine.Close(faults.WhyOwnerExit))
	assert.Len(t, to.got, 100, "without the clock")
	assert.Equal(t, "slow healed owner-exit 100", w.events()[len(w.events())-1])
	_, err = w.engine.Start(slow("slow", ms, time.Hour))
	require.ErrorIs(t, err, faults.ErrClosed)
	require.ErrorIs(t, w.engine.Declare(nil), faults.ErrClosed)
	assert.Len(t, w.engine.List(), 1)
}

func TestHistoryIsBounded(t *testing.T) {
	w := newWorld(t)
	for i := range 1100 {
		_, err := w.engine.Start(slow(fmt.Sprint(i), ms, time.Second))
		require.NoError(t, err)
		w.clock.Advance(time.Second)
	}
	list := w.engine.List()
	assert.Len(t, list, 1024)
	assert.Equal(t, "1099", list[len(list)-1].Name)
}

func TestLimits(t *testing.T) {
	w := newWorld(t)
	var limit *faults.LimitError
	specs := make([]faults.Spec, 1025)
	for i := range specs {
		specs[i] = slow(fmt.Sprint(i), ms, time.Second)
		specs[i].At = time.Duration(i) * time.Second
	}
	require.ErrorAs(t, w.engine.Declare(specs), &limit)
	require.NoError(t, w.engine.Declare(specs[:1024]))
}

func receipt(t *testing.T, s faults.Status) string {
	b, err := json.Marshal(s.Receipt())
	require.NoError(t, err)
	return string(b)
}

func TestReceipt(t *testing.T) {
	w := newWorld(t)
	_, err := w.engine.Start(lossy("lossy", 0.25, time.Second))
	require.NoError(t, err)
	for range 100 {
		w.send(datagram(1, packet.Request, "", new(sink)))
		w.clock.Advance(ms)
	}
	w.clock.Advance(time.Second)
	s := w.state("lossy")
	// The golden list of this seed and name has 30 of 100, from 4 to 94; the interval is
	// Python's.
	assert.JSONEq(t, `{
		"fault_id": "flt_1", "name": "lossy", "origin": "api", "state": "healed",
		"spec": {"name": "lossy", "path": "web-db", "direction": "both", "seed": "42", "revision": "0",
			"loss": {"probability": 0.25}, "at_millis": 0, "ttl_millis": 1000},
		"spec_digest": "`+s.SpecDigest+`",
		"armed_at": "2031-05-06T07:08:09Z", "healed_at": "2031-05-06T07:08:10Z", "healed_why": "ttl",
		"determinism": "exact",
		"effect": {"matched": 100, "decided": 30, "applied": 30, "overflowed": 0,
			"first_effect_millis": 4, "last_effect_millis": 94},
		"achieved": {"loss": {"requested": 0.25, "rate": 0.3, "low": 0.218949, "high": 0.395849, "confidence": 0.95}},
		"vacuous": false, "degraded": false}`, receipt(t, s))
	other := lossy("lossy", 0.25, time.Second)
	other.ID, other.Direction = "flt_other", faults.Both
	assert.Equal(t, s.SpecDigest, other.Digest(), "an ID and a written default make no difference")
	other.Seed++
	assert.NotEqual(t, s.SpecDigest, other.Digest())
}

func TestNameByDefault(t *testing.T) {
	w := newWorld(t)
	s, err := w.engine.Start(slow("", ms, time.Second))
	require.NoError(t, err)
	assert.Equal(t, "latency/web-db/both", s.Name)
}

func TestIDs(t *testing.T) {
	w := newWorld(t, func(o *faults.Options) { o.NewID = nil })
	a, err := w.engine.Start(slow("a", ms, time.Second))
	require.NoError(t, err)
	w.clock.Advance(time.Second)
	b, err := w.engine.Start(slow("b", ms, time.Second))
	require.NoError(t, err)
	assert.Regexp(t, `^flt_[0-9a-f]{12}[a-z2-7]{16}$`, a.ID)
	assert.Less(t, a.ID, b.ID)
	again := slow("c", ms, time.Second)
	again.ID = a.ID
	_, err = w.engine.Start(again)
	var name *faults.NameError
	require.ErrorAs(t, err, &name)
}

// OnChange may call the engine.
func TestOnChangeMayHeal(t *testing.T) {
	var w *world
	w = newWorld(t, func(o *faults.Options) {
		tell := o.OnChange
		o.OnChange = func(s faults.Status) error {
			err := tell(s)
			if s.State == faults.Armed {
				_, err := w.engine.Heal(s.ID, faults.WhyAPI)
				assert.NoError(t, err)
			}
			return err
		}
	})
	_, err := w.engine.Start(slow("slow", ms, time.Minute))
	require.NoError(t, err)
	assert.Equal(t, []string{"slow armed  0", "slow healed api 0"}, w.events())
}

func TestRecover(t *testing.T) {
	file := filepath.Join(t.TempDir(), "faults.json")
	keep := func(o *faults.Options) { o.Journal = file }
	w := newWorld(t, keep)
	later := lossy("later", 1, time.Minute)
	later.At = time.Minute
	require.NoError(t, w.engine.Declare([]faults.Spec{slow("declared", 100*ms, time.Minute), later}))
	_, err := w.engine.Start(lossy("api", 0.5, time.Minute))
	require.NoError(t, err)
	spent, err := w.engine.Start(faults.Spec{Name: "spent", Path: "host:shop", Loss: &faults.Loss{}, TTL: time.Second})
	require.NoError(t, err)
	w.clock.Advance(time.Second)
	armed := w.clock.Now().Add(-time.Second)

	// The supervisor is killed here: only the file is left.
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	assert.NotContains(t, string(b), spent.ID)
	died := filepath.Join(t.TempDir(), "faults.json")
	require.NoError(t, os.WriteFile(died, b, 0o600))

	full := errors.New("disk full")
	require.ErrorIs(t, faults.Recover(died, w.clock.Now(), func(faults.Status) error { return full }), full)
	var left []string
	require.NoError(t, faults.Recover(died, w.clock.Now(), func(s faults.Status) error {
		left = append(left, s.Name+" "+s.Origin)
		assert.Equal(t, armed, s.ArmedAt)
		assert.Equal(t, w.clock.Now(), s.HealedAt)
		assert.Equal(t, w.state(s.Name).SpecDigest, s.SpecDigest)
		r := receipt(t, s)
		assert.Contains(t, r, `"healed_why":"restart"`)
		assert.NotContains(t, r, `"effect"`, "nobody knows it")
		return nil
	}))
	assert.Equal(t, []string{"declared definition", "api api"}, left)
	assert.NoFileExists(t, died)
	require.NoError(t, faults.Recover(died, w.clock.Now(), nil), "once")

	require.NoError(t, w.engine.Close(faults.WhyAPI))
	assert.NoFileExists(t, file, "all has healed, and was told")
	left2, err := os.ReadDir(filepath.Dir(file))
	require.NoError(t, err)
	assert.Empty(t, left2)
}

// A receipt that could not be written when the fault healed is written by the
// next supervisor.
func TestJournalKeepsWhatHasNoReceipt(t *testing.T) {
	file := filepath.Join(t.TempDir(), "faults.json")
	engine := faults.New(faults.Options{
		Impair:  func(string, *faults.Conditioner) error { return nil },
		Journal: file,
		OnChange: func(s faults.Status) error {
			if s.State == faults.Healed && s.Name == "lost" {
				return errors.New("disk full")
			}
			return nil
		},
	})
	for _, name := range []string{"lost", "written"} {
		_, err := engine.Start(slow(name, ms, time.Minute))
		require.NoError(t, err)
		_, err = engine.Heal(name, faults.WhyAPI)
		require.NoError(t, err)
	}
	require.ErrorContains(t, engine.Close(faults.WhyOwnerExit), "disk full")
	var left []string
	require.NoError(t, faults.Recover(file, time.Now(), func(s faults.Status) error {
		left = append(left, s.Name)
		return nil
	}))
	require.Equal(t, []string{"lost"}, left)
}

func TestNoJournalNoFault(t *testing.T) {
	w := newWorld(t, func(o *faults.Options) { o.Journal = filepath.Join(t.TempDir(), "missing", "faults.json") })
	_, err := w.engine.Start(slow("slow", ms, time.Minute))
	require.ErrorIs(t, err, os.ErrNotExist)
	assert.Empty(t, w.paths)
	assert.Empty(t, w.engine.List())
}

func TestRecoverRefusesWhatItDoesNotKnow(t *testing.T) {
	file := filepath.Join(t.TempDir(), "faults.json")
	for _, bad := range []string{``, `{`, `{"version":2}`, `{"version":1,"faults":[{}]}`, `{"version":1,"more":1}`} {
		require.NoError(t, os.WriteFile(file, []byte(bad), 0o600))
		assert.Error(t, faults.Recover(file, time.Now(), nil), bad)
		assert.FileExists(t, file)
	}
}

// A script is one flow's packets, in order.
type script []*packet.Flight

// scripts are flows of several services: TCP with retransmissions, UDP, ICMP.
// Serials, ephemeral things and sequence numbers come from r, so that they
// differ from run to run.
func scripts(r *rand.Rand) []script {
	var all []script
	add := func(source string, protocol uint8, port uint16, fill func(next func(d packet.Direction) *packet.Flight)) {
		id := packet.FlowID{Serial: r.Uint64(), Source: source, Destination: "db", Protocol: protocol, DestinationPort: port}
		var s script
		fill(func(d packet.Direction) *packet.Flight {
			f := &packet.Flight{Direction: d, Flow: id, To: new(sink), Frame: []byte("x"),
				Info: &packet.Info{L3: 14, L4: 34, Payload: 54, Length: 54, Protocol: protocol,
					SourcePort: uint16(r.Uint32())}}
			s = append(s, f)
			return f
		})
		all = append(all, s)
	}
	for _, source := range []string{"web", "client"} {
		for port := range uint16(3) {
			add(source, 17, 53+port, func(next func(packet.Direction) *packet.Flight) {
				for i := range 60 {
					next(packet.Direction(i % 2))
				}
			})
			add(source, 6, 5432+port, func(next func(packet.Direction) *packet.Flight) {
				isn := [2]uint32{r.Uint32(), r.Uint32()}
				at := func(d packet.Direction, flags uint8, sent, received, length int) {
					f := next(d)
					f.Info.TCPFlags, f.Info.Length = flags, 54+length
					f.Info.Sequence = isn[d] + uint32(sent)
					f.Info.Acknowledgement = isn[1-d] + uint32(received)
				}
				at(0, 2, 0, 0, 0)
				at(0, 2, 0, 0, 0)
				at(1, 0x12, 0, 1, 0)
				at(0, 0x10, 1, 1, 0)
				for i := range 40 {
					at(0, 0x10, 1+i*1000, 1, 1000)
					at(1, 0x10, 1, 1001+i*1000, 0)
					if i%5 == 0 {
						at(0, 0x10, 1+i*1000, 1, 1000)
					}
				}
				at(0, 0x11, 40001, 1, 0)
				at(1, 0x11, 1, 40002, 0)
			})
		}
		add(source, 1, 0, func(next func(packet.Direction) *packet.Flight) {
			for i := range uint16(30) {
				next(0).Info.ICMPType = 8
				f := next(1)
				f.Info.ICMPSequence = i
			}
		})
	}
	return all
}

// lots runs scripts, interleaved by r, and returns each flow's verdicts.
func lots(w *world, all []script, r *rand.Rand) [][]packet.Verdict {
	verdicts := make([][]packet.Verdict, len(all))
	at := make([]int, len(all))
	for left := len(all); left > 0; {
		i := r.IntN(len(all))
		for n := 1 + r.IntN(20); n > 0 && at[i] < len(all[i]); n-- { // a batch
			verdicts[i] = append(verdicts[i], w.send(all[i][at[i]]))
			if at[i]++; at[i] == len(all[i]) {
				left--
			}
		}
	}
	return verdicts
}

// The same seed and traffic meet the same decisions, whatever other flows do,
// in whatever batches, whatever other faults are armed before or meanwhile.
func TestDecisionsAreOfTheFlowAlone(t *testing.T) {
	run := func(seed, order uint64, alone int, latency bool) [][]packet.Verdict {
		w := newWorld(t)
		if latency {
			_, err := w.engine.Start(slow("slow", ms, time.Minute))
			require.NoError(t, err)
		}
		spec := lossy("lossy", 0.2, time.Minute)
		spec.Seed = seed
		_, err := w.engine.Start(spec)
		require.NoError(t, err)
		r := rand.New(rand.NewPCG(order, 0))
		all := scripts(r)
		if alone >= 0 {
			all = all[alone : alone+1]
		}
		verdicts := lots(w, all, r)
		for _, vs := range verdicts { // held and passed are not lost
			for i := range vs {
				if vs[i] == packet.Held {
					vs[i] = packet.Pass
				}
			}
		}
		return verdicts
	}
	want := run(42, 0, -1, false)
	for order := range uint64(20) {
		assert.Equal(t, want, run(42, order, -1, order%2 == 1), "order %d", order)
	}
	for i := range want {
		assert.Equal(t, want[i:i+1], run(42, 99, i, false), "flow %d alone", i)
		assert.Contains(t, want[i], packet.Lost)
	}
	assert.NotEqual(t, want, run(43, 0, -1, false))
	assert.NotEqual(t, want[0], want[2], "another port, another flow")
}

// The engine decides as Decide says.
func TestEngineAgreesWithDecide(t *testing.T) {
	w := newWorld(t)
	spec := lossy("lossy", 0.25, time.Minute)
	_, err := w.engine.Start(spec)
	require.NoError(t, err)
	for ordinal := range uint64(5) {
		for i := range uint64(200) {
			d := packet.Direction(i % 2)
			got := w.send(datagram(100+ordinal, d, "", new(sink)))
			want, err := faults.Decide(spec, d, faults.FlowKey{Source: "web", Destination: "db", Protocol: 17, DestinationPort: 53, Ordinal: ordinal},
				faults.Point{Class: faults.UDP, Index: i / 2})
			require.NoError(t, err)
			require.Equal(t, want.Lost, got == packet.Lost, "flow %d, packet %d", ordinal, i)
		}
	}
	assert.Equal(t, faults.Exact, w.state("lossy").Determinism)
}

func segment(serial uint64, d packet.Direction, flags uint8, seq uint32, length int) *packet.Flight {
	return &packet.Flight{Direction: d, To: new(sink), Frame: []byte("x"),
		Flow: packet.FlowID{Serial: serial, Source: "web", Destination: "db", Protocol: 6, DestinationPort: 80},
		Info: &packet.Info{L3: 14, L4: 34, Payload: 54, Length: 54 + length, Protocol: 6, TCPFlags: flags, Sequence: seq}}
}

func TestDeterminismClass(t *testing.T) {
	const syn, ack, fin = 2, 0x10, 0x11
	for name, c := range map[string]struct {
		packets []*packet.Flight
		because []string
	}{
		"one after the other": {[]*packet.Flight{
			segment(1, 0, syn, 5, 0), segment(1, 0, syn, 5, 0), segment(1, 1, syn|ack, 9, 0), segment(1, 0, fin, 6, 0),
			segment(2, 0, syn, 7, 0)}, nil},
		"same ports, another connection": {[]*packet.Flight{
			segment(1, 0, syn, 5, 0), segment(1, 0, fin, 6, 0), segment(1, 0, syn, 77, 0)}, nil},
		"at once":                         {[]*packet.Flight{segment(1, 0, syn, 5, 0), segment(2, 0, syn, 7, 0)}, []string{"concurrent-flows"}},
		"data":                            {[]*packet.Flight{segment(1, 0, syn, 5, 0), segment(1, 0, ack, 6, 9)}, []string{"tcp-segmentation"}},
		"older":                           {[]*packet.Flight{segment(1, 0, ack, 6, 0)}, []string{"older-flows"}},
		"older, seen from the other side": {[]*packet.Flight{segment(1, 1, ack, 6, 0)}, []string{"older-flows"}},
		"datagrams, answered": {[]*packet.Flight{
			datagram(1, 0, "", new(sink)), datagram(1, 1, "", new(sink)), datagram(2, 0, "", new(sink))}, nil},
		"datagrams, not answered": {[]*packet.Flight{
			datagram(1, 0, "", new(sink)), datagram(2, 0, "", new(sink))}, []string{"concurrent-flows"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			_, err := w.engine.Start(lossy("lossy", 0, time.Minute))
			require.NoError(t, err)
			for _, f := range c.packets {
				w.send(f)
			}
			s := w.state("lossy")
			assert.Equal(t, c.because, s.Because)
			assert.Equal(t, c.because == nil, s.Determinism == faults.Exact)
		})
	}
}

// The ordinal counts connections, not SYNs; a fault that hears only responses
// counts them by their originators.
func TestOrdinalsFollowConnections(t *testing.T) {
	w := newWorld(t)
	spec := lossy("lossy", 0.5, time.Minute)
	spec.Direction = faults.Response
	_, err := w.engine.Start(spec)
	require.NoError(t, err)
	w.send(segment(8, 0, 2, 5, 0))
	w.send(segment(8, 0, 2, 5, 0))
	w.send(segment(9, 0, 2, 6, 0))
	w.send(segment(8, 0, 2, 99, 0)) // the ports of 8 again
	for serial, ordinal := range map[uint64]uint64{9: 1, 8: 2} {
		for i := range uint32(100) {
			got := w.send(segment(serial, 1, 0x12, 5, 0))
			want, err := faults.Decide(spec, packet.Response,
				faults.FlowKey{Source: "web", Destination: "db", Protocol: 6, DestinationPort: 80, Ordinal: ordinal},
				faults.Point{Class: faults.SYN, Attempt: i})
			require.NoError(t, err)
			require.Equal(t, want.Lost, got == packet.Lost)
		}
	}
}

// On the host's clock, with everything at once: for the race detector, and to
// show that no packet is lost by arming, healing or closing, nor overtakes.
func TestConcurrency(t *testing.T) {
	var mu sync.Mutex
	var c *faults.Conditioner
	var healed []faults.Status
	e := faults.New(faults.Options{
		Impair:   func(_ string, n *faults.Conditioner) error { mu.Lock(); c = n; mu.Unlock(); return nil },
		OnChange: func(s faults.Status) error { healed = append(healed, s); return nil },
		Journal:  filepath.Join(t.TempDir(), "faults.json"),
	})
	const flows, packets = 4, 20000
	sinks := make([]sink, flows)
	var senders sync.WaitGroup
	for i := range flows {
		senders.Go(func() {
			f := datagram(uint64(i), packet.Direction(i%2), "", &sinks[i])
			for n := range packets {
				f.Frame = fmt.Appendf(f.Frame[:0], "%08d", n)
				mu.Lock()
				now := c
				mu.Unlock()
				if now == nil || now.Condition(f) == packet.Pass {
					f.To.Deliver(f.Frame)
				}
				if n%1000 == 0 {
					time.Sleep(ms)
				}
			}
			mu.Lock()
			now := c
			mu.Unlock()
			if now != nil {
				now.Forget(uint64(i))
			}
		})
	}
	for i := range 40 {
		_, err := e.Start(slow(fmt.Sprint(i), time.Duration(i%4)*ms/2, 2*ms))
		require.NoError(t, err)
		e.List()
		time.Sleep(ms)
		_, err = e.Heal(fmt.Sprint(i), faults.WhyAPI)
		require.NoError(t, err)
	}
	_, err := e.Start(slow("last", time.Minute, time.Hour))
	require.NoError(t, err)
	senders.Wait()
	last := datagram(flows, packet.Request, "last", new(sink))
	require.Equal(t, packet.Held, c.Condition(last))
	require.NoError(t, e.Close(faults.WhyAPI))
	assert.Nil(t, c)
	var applied uint64
	for _, s := range healed {
		if s.State == faults.Healed {
			applied += s.Effect.Applied
		}
	}
	assert.NotZero(t, applied)
	assert.Equal(t, []string{"last"}, last.To.(*sink).got)
	for i := range sinks {
		require.Len(t, sinks[i].got, packets)
		assert.True(t, slices.IsSorted(sinks[i].got), "flow %d is out of order", i)
	}
}

// Never too early, on the host's clock; how late is for make accept.
func TestSystemClock(t *testing.T) {
	for _, d := range []time.Duration{-1, 0, 500 * time.Microsecond, 3 * ms} {
		start, done := time.Now(), make(chan time.Duration, 1)
		faults.System{}.AfterFunc(d, func() { done <- time.Since(start) })
		assert.GreaterOrEqual(t, <-done, d)
	}
	stopped := faults.System{}.AfterFunc(time.Hour, func() { t.Error("it was stopped") })
	assert.True(t, stopped.Stop())
	done := make(chan time.Duration, 1)
	start := time.Now()
	timer := faults.System{}.AfterFunc(time.Hour, func() { done <- time.Since(start) })
	assert.True(t, timer.Reset(2*ms))
	assert.GreaterOrEqual(t, <-done, 2*ms)
}
