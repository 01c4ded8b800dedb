package faults

import (
	"sync/atomic"
	"syscall"
	"time"
)

// lead is how long before its time a timer wakes, to sleep the rest by itself.
// Go's netpoller rounds what an idle process has left to sleep to whole
// milliseconds: measured on two busy cores, packets were 0.6 to 0.8 ms late at
// the median with time.AfterFunc, and 0.08 to 0.11 ms with this, from 50 to
// 100,000 packets a second, for 0.15 of a core at most.
const lead = 1200 * time.Microsecond

// AfterFunc's timers are true to about a tenth of a millisecond. f may be
// called once too often when Reset or Stop comes while it wakes.
func (System) AfterFunc(d time.Duration, f func()) Timer {
	t := &fineTimer{f: f}
	t.at.Store(int64(time.Since(origin) + d))
	t.coarse = time.AfterFunc(d-lead, t.wake)
	return t
}

var origin = time.Now()

type fineTimer struct {
	f      func()
	at     atomic.Int64 // since origin
	coarse *time.Timer
}

func (t *fineTimer) Reset(d time.Duration) bool {
	t.at.Store(int64(time.Since(origin) + d))
	return t.coarse.Reset(d - lead)
}

func (t *fineTimer) Stop() bool { return t.coarse.Stop() }

func (t *fineTimer) wake() {
	for {
		left := time.Duration(t.at.Load()) - time.Since(origin)
		if left > 2*lead {
			return // it was set anew, and wakes again
		}
		if left <= 0 {
			break
		}
		rest := syscall.NsecToTimespec(int64(left))
		_ = syscall.Nanosleep(&rest, nil) // a signal may end it: look again
	}
	t.f()
}
