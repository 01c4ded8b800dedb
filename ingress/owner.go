package ingress

import (
	"errors"
	"net/netip"
)

// An OwnerFunc finds the uid that owns the other end of an accepted loopback
// connection: the socket whose own address is remote and whose peer is local.
type OwnerFunc func(local, remote netip.AddrPort) (uid int, err error)

// ErrNoOwner says that no living socket is the other end of a connection.
var ErrNoOwner = errors.New("ingress: no process holds the other end of the connection")

// UnsupportedError names what this host's system can't do.
type UnsupportedError struct {
	Capability string
	OS         string
}

func (e *UnsupportedError) Error() string {
	return "ingress: " + e.Capability + " is not supported on " + e.OS
}
