//go:build !linux

package faults

import "time"

func (System) AfterFunc(d time.Duration, f func()) Timer { return time.AfterFunc(d, f) }
