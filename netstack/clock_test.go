package netstack_test

import (
	"sync/atomic"
	"time"
)

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// A clock stands still until it is told.
type clock struct{ at atomic.Int64 }

func (c *clock) Now() time.Time          { return epoch.Add(time.Duration(c.at.Load())) }
func (c *clock) advance(d time.Duration) { c.at.Add(int64(d)) }

// waitFor is a guard against hangs, not a limit.
const (
	waitFor = 20 * time.Second
	tick    = time.Millisecond
)
