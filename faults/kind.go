package faults

import "time"

// kinds is the closed table of what a fault can be, in the order in which a
// packet meets them.
var kinds = [...]kind{
	{name: "loss", draws: true, find: func(s *Spec) params {
		if s.Loss == nil {
			return nil
		}
		return s.Loss
	}},
	{name: "latency", find: func(s *Spec) params {
		if s.Latency == nil {
			return nil
		}
		return s.Latency
	}},
}

type kind struct {
	name  string
	draws bool               // it reads the block, so packets have to be counted
	find  func(*Spec) params // nil when the spec is of another kind
}

// params is what Spec says of one kind.
type params interface {
	check() error // a *SpecError; nil when they are within their range
	decider() decider
}

// A decider decides for each packet. decide says whether the fault wants to
// impair it and adds how to o; it reads nothing but d and its own parameters,
// and does the same whether or not an earlier fault has lost the packet.
type decider interface {
	decide(d *draw, o *outcome) bool
}

// An outcome is what all faults together do to one packet.
type outcome struct {
	lost  bool
	delay time.Duration
}
