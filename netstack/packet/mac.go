package packet

import (
	"fmt"
	"net"
)

// MarshalText is String.
func (m MAC) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// UnmarshalText reads six pairs of hexadecimal digits with colons or dashes.
func (m *MAC) UnmarshalText(text []byte) error {
	parsed, err := net.ParseMAC(string(text))
	if err != nil || len(parsed) != len(m) {
		return fmt.Errorf("packet: %q is no MAC address", text)
	}
	*m = MAC(parsed)
	return nil
}
