package faults

import (
	"errors"
	"fmt"
	"time"
)

// ErrClosed is what an engine answers after Close.
var ErrClosed = errors.New("faults: the engine is closed")

// SpecError is one thing that is wrong with a Spec; there may be several,
// joined.
type SpecError struct {
	Field, Problem string
}

func (e *SpecError) Error() string { return "fault: " + e.Field + " " + e.Problem }

// TTLError refuses a fault that would not end by itself, or too late.
type TTLError struct {
	Name string
	Ends time.Duration // from now, asked for; 0: no TTL at all
	Cap  time.Duration
}

func (e *TTLError) Error() string {
	if e.Ends == 0 {
		return fmt.Sprintf("fault %q needs a TTL: a fault ends by itself", e.Name)
	}
	return fmt.Sprintf("fault %q would end after %v, the cap is %v", e.Name, e.Ends, e.Cap)
}

// OverlapError refuses a fault of a kind that its path and direction would
// have twice at one time.
type OverlapError struct {
	Name, With string // the refused one, and the one that is there
	Kind, Path string
}

func (e *OverlapError) Error() string {
	return fmt.Sprintf("fault %q overlaps %q: both are %s on path %q; heal that first, or choose another time or direction",
		e.Name, e.With, e.Kind, e.Path)
}

// NameError refuses a name or ID that a pending or armed fault has.
type NameError struct{ Name string }

func (e *NameError) Error() string {
	return fmt.Sprintf("fault %q exists already and has not healed", e.Name)
}

// NotFoundError says that no fault has this ID or name.
type NotFoundError struct{ Fault string }

func (e *NotFoundError) Error() string { return fmt.Sprintf("no fault %q", e.Fault) }

// LimitError refuses a fault beyond an engine's bounds.
type LimitError struct {
	What  string
	Limit int
}

func (e *LimitError) Error() string {
	return fmt.Sprintf("no more than %d %s", e.Limit, e.What)
}

// PathError says that a fault could not be put on its path; it wraps the
// answer of Options.Impair.
type PathError struct {
	Name, Path string
	Err        error
}

func (e *PathError) Error() string {
	return fmt.Sprintf("fault %q on path %q: %v", e.Name, e.Path, e.Err)
}

func (e *PathError) Unwrap() error { return e.Err }
