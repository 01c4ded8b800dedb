// Package faultstest has a clock for tests of faults and of those who use
// them. It is no part of the product.
package faultstest

import (
	"slices"
	"sync"
	"time"

	"vz.test/vz/faults"
)

// Clock stands still until Advance. Its zero value is not usable; see New.
type Clock struct {
	mu     sync.Mutex
	now    time.Time
	timers []*timer // that are running
	serial uint64
}

// New returns a clock that shows a fixed, arbitrary moment.
func New() *Clock {
	return &Clock{now: time.Date(2031, 5, 6, 7, 8, 9, 0, time.UTC)}
}

func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// AfterFunc calls f from within the Advance that reaches its time, also for a
// d of zero.
func (c *Clock) AfterFunc(d time.Duration, f func()) faults.Timer {
	t := &timer{clock: c, f: f}
	t.Reset(d)
	return t
}

// Advance moves the clock by d and runs what falls due on the way, one after
// the other in order of time, on the calling goroutine. What a callback sets
// up runs too when it is due within d.
func (c *Clock) Advance(d time.Duration) {
	c.mu.Lock()
	end := c.now.Add(d)
	for {
		next := c.first()
		if next == nil || next.at.After(end) {
			break
		}
		if next.at.After(c.now) {
			c.now = next.at
		}
		c.remove(next)
		c.mu.Unlock()
		next.f()
		c.mu.Lock()
	}
	c.now = end
	c.mu.Unlock()
}

// Skip moves the clock by d and runs nothing: a host that was too busy.
func (c *Clock) Skip(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

func (c *Clock) first() *timer {
	if len(c.timers) == 0 {
		return nil
	}
	return slices.MinFunc(c.timers, func(a, b *timer) int {
		if d := a.at.Compare(b.at); d != 0 {
			return d
		}
		return int(a.serial) - int(b.serial)
	})
}

func (c *Clock) remove(t *timer) bool {
	i := slices.Index(c.timers, t)
	if i < 0 {
		return false
	}
	c.timers = slices.Delete(c.timers, i, i+1)
	return true
}

type timer struct {
	clock  *Clock
	f      func()
	at     time.Time
	serial uint64
}

func (t *timer) Reset(d time.Duration) bool {
	t.clock.mu.Lock()
	defer t.clock.mu.Unlock()
	was := t.clock.remove(t)
	t.clock.serial++
	t.at, t.serial = t.clock.now.Add(max(d, 0)), t.clock.serial
	t.clock.timers = append(t.clock.timers, t)
	return was
}

func (t *timer) Stop() bool {
	t.clock.mu.Lock()
	defer t.clock.mu.Unlock()
	return t.clock.remove(t)
}
