package ingress

import (
	"bytes"
	"errors"
	"io"
	"net/netip"
)

// What SOCKS5 (RFC 1928) needs here is small: no authentication, CONNECT, and
// names that we resolve. Everything else has its typed refusal.

const socksVersion = 5

// SOCKS4 has no names of its own and no errors worth the name; its clients are
// told no (request rejected or failed, code 91).
const socks4Version = 4

var socks4Rejected = []byte{0, 91, 0, 0, 0, 0, 0, 0}

const (
	socksNoAuthentication = 0x00
	socksNoneAcceptable   = 0xff

	socksConnect = 1

	socksIPv4, socksName, socksIPv6 = 1, 3, 4
)

// Replies of RFC 1928, 6.
const (
	socksSucceeded       = 0
	socksFailure         = 1
	socksNotAllowed      = 2
	socksHostUnreachable = 4
	socksRefused         = 5
	socksExpired         = 6
	socksNoCommand       = 7
	socksNoAddressType   = 8
)

var (
	errSocksVersion     = errors.New("not SOCKS version 5")
	errSocksAddressType = errors.New("unknown SOCKS address type")
)

// readSocksMethods reads a greeting and picks the method.
func readSocksMethods(r io.Reader) (method byte, err error) {
	var head [2]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, err
	}
	if head[0] != socksVersion {
		return 0, errSocksVersion
	}
	methods := make([]byte, head[1])
	if _, err := io.ReadFull(r, methods); err != nil {
		return 0, err
	}
	if bytes.IndexByte(methods, socksNoAuthentication) < 0 {
		return socksNoneAcceptable, nil
	}
	return socksNoAuthentication, nil
}

// socksRequest asks for a host, a name or an address in text, and a port.
type socksRequest struct {
	command byte
	host    string
	port    uint16
}

func readSocksRequest(r io.Reader) (q socksRequest, err error) {
	var head [4]byte // version, command, reserved, address type
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return q, err
	}
	if head[0] != socksVersion {
		return q, errSocksVersion
	}
	var length byte
	switch head[3] {
	case socksIPv4:
		length = 4
	case socksIPv6:
		length = 16
	case socksName:
		var one [1]byte
		if _, err := io.ReadFull(r, one[:]); err != nil {
			return q, err
		}
		length = one[0]
	default:
		return q, errSocksAddressType
	}
	rest := make([]byte, int(length)+2)
	if _, err := io.ReadFull(r, rest); err != nil {
		return q, err
	}
	address, port := rest[:length], rest[length:]
	q = socksRequest{command: head[1], host: string(address), port: uint16(port[0])<<8 | uint16(port[1])}
	if head[3] != socksName {
		a, _ := netip.AddrFromSlice(address)
		q.host = a.String()
	}
	return q, nil
}

// socksReply has no bound address to tell: it would be of a network that the
// client knows nothing of.
func socksReply(code byte) []byte {
	return []byte{socksVersion, code, 0, socksIPv4, 0, 0, 0, 0, 0, 0}
}

// socksCode is the nearest that SOCKS has to a problem.
func socksCode(p *problem) byte {
	switch {
	case p.Status == 403:
		return socksNotAllowed
	case p.Reason == "refused":
		return socksRefused
	case p.Reason == "refused by policy":
		return socksNotAllowed
	case p.Reason == "unreachable":
		return socksHostUnreachable
	case p.Reason == "timeout":
		return socksExpired
	}
	return socksFailure
}
