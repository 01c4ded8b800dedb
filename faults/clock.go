package faults

import "time"

// A Clock is where all time comes from. Now must carry a monotonic reading, or
// never go back; package faultstest has one that stands still until told.
type Clock interface {
	Now() time.Time
	// AfterFunc calls f once, after d, from any goroutine but never from
	// within AfterFunc or Reset.
	AfterFunc(d time.Duration, f func()) Timer
}

// A Timer is what *time.Timer is for AfterFunc.
type Timer interface {
	Reset(d time.Duration) bool
	Stop() bool
}

// System is the host's clock. Its monotonic reading stands still while the
// host sleeps, and so do TTLs.
type System struct{}

func (System) Now() time.Time { return time.Now() }
