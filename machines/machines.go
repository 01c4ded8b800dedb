// Package machines is the contract between a supervisor and what runs
// Machines: one Driver per way of running one, and the Instance that it starts.
//
// Use: the supervisor calls Start for each boot, attaches the Instance's Ports
// to the route domain and speaks to the agent over its channel.
//
// A NIC is a link.Port, the agent's channel a byte stream; a driver knows
// nothing of addresses, policy or the definition beyond the Spec it is given.
package machines

import (
	"context"
	"io"
	"time"

	"vz.test/vz/netstack/link"
)

// Spec says what to run. It is immutable.
type Spec struct {
	EnvironmentID string
	MachineID     string
	Incarnation   string // inc_…, new for every boot lineage
	Name          string // the Machine's name: host name, messages
	Image         string
	Profile       string  // developer, hardened
	CPUs          float64 // 0: no limit
	MemoryBytes   int64   // 0: no limit
	NICs          []NIC
	// Dir is a directory of this Machine's own that survives a stop; the
	// driver makes it and all below it, and Remove takes it away.
	Dir string
	// Agent is the path of the vz-guest binary on the host.
	Agent string
}

// NIC is one network attachment, in the order of the definition.
type NIC struct {
	Network string
	Name    string // interface name inside: eth0, eth1, ...
	MAC     string
	MTU     int
}

// Note says that something asked for could not be had, and why; the Machine
// works without it.
type Note struct {
	Capability string
	Reason     string
}

// A Driver runs Machines in one way.
type Driver interface {
	// Name is the matrix's word for it: namespace, qemu, applevf, lima, external.
	Name() string
	// Start boots a Machine and returns when its agent's channel exists; it
	// does not wait for the agent. A missing thing of the host is a
	// *MissingError. Cancelling ctx undoes what was begun.
	Start(ctx context.Context, spec Spec) (Instance, error)
	// Clean ends whatever is left of a Machine that an earlier supervisor
	// started (processes, cgroups, mounts) and keeps its Dir. Idempotent.
	Clean(ctx context.Context, environmentID, machineID string) error
	// Remove is Clean and takes Dir away as well. Idempotent.
	Remove(ctx context.Context, spec Spec) error
}

// An Instance is one running Machine.
type Instance interface {
	// Ports are in the order of Spec.NICs. The caller owns and closes them.
	Ports() []link.Port
	// Agent is the channel to the agent; the caller owns and closes it.
	Agent() io.ReadWriteCloser
	// Capabilities are what the driver negotiated; Notes what could not be had.
	Capabilities() []string
	Notes() []Note
	// Done is closed when the Machine is gone; Err then says why.
	Done() <-chan struct{}
	Err() error
	// Kill ends the Machine at once and waits until it is gone, at most
	// timeout.
	Kill(timeout time.Duration) error
}

// MissingError says that the host lacks something that a driver needs.
type MissingError struct {
	What   string // such as /dev/net/tun
	Why    string // what was seen
	Remedy string // what to do about it
}

func (e *MissingError) Error() string {
	return e.What + ": " + e.Why + "; " + e.Remedy
}
