package faults

import (
	"math"
	"time"
)

// States of a fault.
const (
	Pending = "pending" // its time on the timeline has not come
	Armed   = "armed"
	Healed  = "healed" // for good; also without ever having been armed
)

// Origins of a fault.
const (
	FromDefinition = "definition"
	FromAPI        = "api"
)

// Why a fault has healed.
const (
	WhyTTL       = "ttl"
	WhyAPI       = "api"
	WhyOwnerExit = "owner-exit"
	WhyRestart   = "restart"   // the supervisor died with it; see Recover
	WhyReconcile = "reconcile" // another timeline, or its path is gone
	WhyFailed    = "failed"    // it could not be armed; see Status.Error
)

// Classes of determinism.
const (
	Exact            = "exact"
	OrdinalDependent = "ordinal-dependent"
)

// Status is a fault and what it has done: a copy, of one moment.
type Status struct {
	ID, Name   string
	Spec       Spec
	SpecDigest string // see Spec.Digest
	State      string
	Origin     string

	ArmedAt   time.Time     // zero: never yet
	HealedAt  time.Time     // zero: not yet
	Remaining time.Duration // until it heals by itself; pending: its whole TTL
	HealedWhy string
	Error     string // with WhyFailed

	Effect Effect
	// Determinism is Exact as long as nothing was decided by what another run
	// may not repeat; Because says what that was: tcp-segmentation (a segment
	// with data was drawn for, and the guest chooses segments),
	// concurrent-flows (of the same source, destination, protocol and port),
	// older-flows (TCP flows that began before the fault; other protocols
	// don't show it), too-many-flows (beyond the bounds).
	Determinism string
	Because     []string
	Achieved    Achieved

	Vacuous  bool // healed, and it matched nothing
	Degraded bool // the host was too busy to keep time: a late 99th percentile
}

// Effect counts the packets of one fault.
type Effect struct {
	Matched    uint64 // on its path, in its direction
	Decided    uint64 // of those, it wanted to impair
	Applied    uint64 // of those, it did: not lost by another fault, and room in the queue
	Overflowed uint64 // decided, and lost because the queue was full

	First, Last time.Duration // effect, after arming; only with Applied
}

// Achieved is what came of what was asked for.
type Achieved struct {
	Delay *DelayError // of a fault that delays, once a packet was released
	Loss  *LossRate   // of a fault that loses, once a packet was matched
}

// DelayError says how much later than asked for packets were handed to their
// port. Percentiles are upper bounds, true to 1/16. Packets that healing
// released are not in it.
type DelayError struct {
	Samples       uint64
	P50, P99, Max time.Duration
}

// LossRate is the share of matched packets that were lost, with its Wilson
// score interval at 95 %.
type LossRate struct {
	Rate, Low, High float64
}

// lateLimit is the P99 of delay error beyond which a fault is Degraded: the
// acceptance values allow 5 ms in a round trip, half of it in each direction.
const lateLimit = 2500 * time.Microsecond

// observe fills in what an impairment has counted.
func (s *Status) observe(m *impairment) {
	t := &m.tally
	s.Effect = Effect{t.matched, t.decided, t.applied, t.overflowed, t.first, t.last}
	if m.flows != nil && m.flows.because != 0 {
		s.Determinism = OrdinalDependent
		for i, word := range words {
			if m.flows.because&(1<<i) != 0 {
				s.Because = append(s.Because, word)
			}
		}
	}
	if m.late.samples > 0 {
		p99 := m.late.percentile(99)
		s.Achieved.Delay = &DelayError{m.late.samples, m.late.percentile(50), p99, m.late.worst}
		s.Degraded = p99 > lateLimit
	}
	if s.Spec.Loss != nil && t.matched > 0 {
		low, high := wilson(t.applied, t.matched)
		s.Achieved.Loss = &LossRate{float64(t.applied) / float64(t.matched), low, high}
	}
}

// wilson is the 95 % score interval of k of n (E. B. Wilson, 1927), to six
// decimals, so that it is the same where a compiler fuses multiplication and
// addition.
func wilson(k, n uint64) (low, high float64) {
	const z = 1.959963984540054
	p, size := float64(k)/float64(n), float64(n)
	middle := p + z*z/(2*size)
	spread := z * math.Sqrt(p*(1-p)/size+z*z/(4*size*size))
	scale := 1 + z*z/size
	low, high = max(0, (middle-spread)/scale), min(1, (middle+spread)/scale)
	return math.Round(low*1e6) / 1e6, math.Round(high*1e6) / 1e6
}

// Receipt is the body of a fault's receipt. Its JSON is the same for the same
// Status.
type Receipt struct {
	FaultID     string           `json:"fault_id"`
	Name        string           `json:"name"`
	Origin      string           `json:"origin"`
	State       string           `json:"state"`
	Spec        Spec             `json:"spec"`
	SpecDigest  string           `json:"spec_digest"`
	ArmedAt     *time.Time       `json:"armed_at,omitempty"`
	HealedAt    *time.Time       `json:"healed_at,omitempty"`
	HealedWhy   string           `json:"healed_why,omitempty"`
	Error       string           `json:"error,omitempty"`
	Determinism string           `json:"determinism,omitempty"`
	Because     []string         `json:"because,omitempty"`
	Effect      *ReceiptEffect   `json:"effect,omitempty"` // none: it was lost with the supervisor
	Achieved    *ReceiptAchieved `json:"achieved,omitempty"`
	Vacuous     bool             `json:"vacuous"`
	Degraded    bool             `json:"degraded"`
}

// ReceiptEffect is Effect as a receipt has it.
type ReceiptEffect struct {
	Matched    uint64  `json:"matched"`
	Decided    uint64  `json:"decided"`
	Applied    uint64  `json:"applied"`
	Overflowed uint64  `json:"overflowed"`
	First      *millis `json:"first_effect_millis,omitempty"` // after arming
	Last       *millis `json:"last_effect_millis,omitempty"`
}

// ReceiptAchieved is Achieved as a receipt has it, beside what was asked for.
type ReceiptAchieved struct {
	Delay *receiptDelay `json:"delay,omitempty"`
	Loss  *receiptLoss  `json:"loss,omitempty"`
}

type receiptDelay struct {
	Requested millis `json:"requested_millis"`
	Samples   uint64 `json:"samples"`
	P50       millis `json:"error_p50_millis"`
	P99       millis `json:"error_p99_millis"`
	Max       millis `json:"error_max_millis"`
}

type receiptLoss struct {
	Requested  float64 `json:"requested"`
	Rate       float64 `json:"rate"`
	Low        float64 `json:"low"`
	High       float64 `json:"high"`
	Confidence float64 `json:"confidence"`
}

// Receipt returns the fault's evidence as it stands.
func (s Status) Receipt() Receipt {
	r := Receipt{
		FaultID: s.ID, Name: s.Name, Origin: s.Origin, State: s.State,
		Spec: s.Spec, SpecDigest: s.SpecDigest,
		HealedWhy: s.HealedWhy, Error: s.Error,
		Vacuous: s.Vacuous, Degraded: s.Degraded,
	}
	r.Spec.ID = ""
	if !s.ArmedAt.IsZero() {
		r.ArmedAt = new(s.ArmedAt.UTC())
	}
	if !s.HealedAt.IsZero() {
		r.HealedAt = new(s.HealedAt.UTC())
	}
	if s.HealedWhy == WhyRestart {
		return r
	}
	r.Determinism, r.Because = s.Determinism, s.Because
	r.Effect = &ReceiptEffect{Matched: s.Effect.Matched, Decided: s.Effect.Decided,
		Applied: s.Effect.Applied, Overflowed: s.Effect.Overflowed}
	if s.Effect.Applied > 0 {
		r.Effect.First, r.Effect.Last = new(millis(s.Effect.First)), new(millis(s.Effect.Last))
	}
	if d := s.Achieved.Delay; d != nil && s.Spec.Latency != nil {
		r.Achieved = &ReceiptAchieved{Delay: &receiptDelay{millis(s.Spec.Latency.Delay), d.Samples,
			millis(d.P50), millis(d.P99), millis(d.Max)}}
	}
	if l := s.Achieved.Loss; l != nil && s.Spec.Loss != nil {
		r.Achieved = &ReceiptAchieved{Loss: &receiptLoss{s.Spec.Loss.Probability, l.Rate, l.Low, l.High, 0.95}}
	}
	return r
}
