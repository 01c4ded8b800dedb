package registry

import (
	"fmt"

	"vz.test/vz/supervisor/api/vzv1"
)

// SessionView is what a supervisor has of one Machine: the session with its
// agent that was registered at boot. The zero value is that there is none, as
// when no supervisor lives.
type SessionView struct {
	Live        bool   // registered at boot and open
	Spent       bool   // ended by a positive stop
	Incarnation string // that the agent named; with Live or Spent
}

// Health says how a Machine's record and the session with it agree,
// and why when they do not. m is nil when its record can't be read.
//
//	             live, same   live, other   spent        none
//	ready        supervised   diverged      diverged     unsupervised
//	starting     supervised   diverged      inactive     inactive
//	stopping     supervised   diverged      inactive     inactive
//	others       diverged     diverged      inactive     inactive
//
// No packet is sent to the Machine: this is about who holds what, no ping.
func Health(m *Machine, s SessionView) (health vzv1.Health, reason string) {
	if m == nil {
		return vzv1.Health_HEALTH_UNOBSERVABLE, "the Machine's record cannot be read"
	}
	if s.Live {
		switch {
		case s.Incarnation != m.Incarnation:
			return vzv1.Health_HEALTH_DIVERGED, fmt.Sprintf("the session is with incarnation %s, the record has %q", s.Incarnation, m.Incarnation)
		case m.State == MachineReady, m.State == MachineStarting, m.State == MachineStopping:
			return vzv1.Health_HEALTH_SUPERVISED, ""
		}
		return vzv1.Health_HEALTH_DIVERGED, fmt.Sprintf("the record says %s, but the agent's session is open", m.State)
	}
	if m.State != MachineReady {
		return vzv1.Health_HEALTH_INACTIVE, ""
	}
	if s.Spent {
		return vzv1.Health_HEALTH_DIVERGED, "the record says ready, but the Machine was stopped"
	}
	return vzv1.Health_HEALTH_UNSUPERVISED, "the record says ready, but no supervisor has a session with the Machine"
}
