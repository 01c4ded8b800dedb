//go:build !linux

package ingress

import (
	"net/netip"
	"runtime"
)

// SocketOwner is not supported here yet: nobody is served.
func SocketOwner(local, remote netip.AddrPort) (uid int, err error) {
	return 0, &UnsupportedError{Capability: "looking up who owns a loopback connection", OS: runtime.GOOS}
}
