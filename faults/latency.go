package faults

import "time"

// maxDelay is the longest delay: what outlives any TTL at run time is no delay.
const maxDelay = time.Hour

// Latency holds each packet for a fixed time. It draws nothing.
type Latency struct {
	Delay time.Duration
}

func (l *Latency) check() error {
	if l.Delay < 0 || l.Delay > maxDelay {
		return &SpecError{Field: "latency.delay", Problem: "must be from 0 to " + maxDelay.String()}
	}
	return nil
}

func (l *Latency) decider() decider { return latencyDecider{l.Delay} }

type latencyJSON struct {
	Delay millis `json:"delay_millis"`
}

func (l Latency) MarshalJSON() ([]byte, error) { return marshal(latencyJSON{millis(l.Delay)}) }

func (l *Latency) UnmarshalJSON(b []byte) error {
	var j latencyJSON
	if err := unmarshal(b, &j); err != nil {
		return err
	}
	l.Delay = time.Duration(j.Delay)
	return nil
}

type latencyDecider struct{ delay time.Duration }

func (l latencyDecider) decide(_ *draw, o *outcome) bool {
	o.delay += l.delay
	return true
}
