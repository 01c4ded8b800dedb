package nat

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var (
	at     = netip.MustParseAddrPort
	public = netip.MustParseAddr("203.0.113.2")
	peerA  = netip.MustParseAddr("198.51.100.1")
	peerB  = netip.MustParseAddr("198.51.100.2")
)

const udp = 17

// RFC 4787, REQ-1: the same inside address and port have the same public ones,
// whoever they speak to.
func TestMappingIsEndpointIndependent(t *testing.T) {
	n := New()
	a, err := n.Acquire(udp, at("100.64.0.2:5000"), public, peerA)
	require.NoError(t, err)
	b, err := n.Acquire(udp, at("100.64.0.2:5000"), public, peerB)
	require.NoError(t, err)
	assert.Same(t, a, b)
	assert.Equal(t, at("203.0.113.2:5000"), a.Public, "port preserved")
	c, err := n.Acquire(6, at("100.64.0.2:5000"), public, peerA)
	require.NoError(t, err)
	assert.NotSame(t, a, c, "another protocol has ports of its own")
	assert.Equal(t, at("203.0.113.2:5000"), c.Public)
}

func TestMappingLivesWithItsFlows(t *testing.T) {
	n := New()
	m, _ := n.Acquire(udp, at("100.64.0.2:5000"), public, peerA)
	_, _ = n.Acquire(udp, at("100.64.0.2:5000"), public, peerA)
	_, _ = n.Acquire(udp, at("100.64.0.2:5000"), public, peerB)
	n.Release(m, peerA)
	assert.NotNil(t, n.Enter(udp, m.Public, peerA))
	n.Release(m, peerA)
	n.Release(m, peerA)
	assert.Nil(t, n.Enter(udp, m.Public, peerA), "nothing speaks to it any more")
	assert.Equal(t, 1, n.Len())
	n.Release(m, peerB)
	assert.Zero(t, n.Len())
	assert.Nil(t, n.Enter(udp, m.Public, peerB))
	assert.Empty(t, n.public)
}

// RFC 4787, REQ-8: who has been spoken to may answer, from any port; others
// may not.
func TestFilteringIsAddressDependent(t *testing.T) {
	n := New()
	m, _ := n.Acquire(udp, at("100.64.0.2:5000"), public, peerA)
	assert.Same(t, m, n.Enter(udp, m.Public, peerA))
	assert.Nil(t, n.Enter(udp, m.Public, peerB))
	assert.Nil(t, n.Enter(6, m.Public, peerA))
	assert.Nil(t, n.Enter(udp, at("203.0.113.2:5001"), peerA))
}

// RFC 4787, REQ-3 and REQ-4: where the port is taken, another of its parity
// and of its side of 1024.
func TestPortsWhereTheOwnIsTaken(t *testing.T) {
	n := New()
	acquire := func(inside string) uint16 {
		m, err := n.Acquire(udp, at(inside), public, peerA)
		require.NoError(t, err)
		return m.Public.Port()
	}
	assert.EqualValues(t, 5000, acquire("100.64.0.2:5000"))
	assert.EqualValues(t, 5002, acquire("100.64.0.3:5000"))
	assert.EqualValues(t, 5004, acquire("100.64.0.4:5000"))
	assert.EqualValues(t, 65535, acquire("100.64.0.2:65535"))
	assert.EqualValues(t, 1025, acquire("100.64.0.3:65535"))
	assert.EqualValues(t, 1023, acquire("100.64.0.2:1023"))
	assert.EqualValues(t, 3, acquire("100.64.0.3:1023"))
	assert.EqualValues(t, 1022, acquire("100.64.0.2:1022"))
	assert.EqualValues(t, 2, acquire("100.64.0.3:1022"))
}

func TestFull(t *testing.T) {
	n := New()
	inside := netip.MustParseAddr("100.64.0.2")
	for i := range 511 { // the odd ports from 3 to 1023
		_, err := n.Acquire(udp, netip.AddrPortFrom(inside, 1023), public, peerA)
		require.NoError(t, err, "%d", i)
		inside = inside.Next()
	}
	_, err := n.Acquire(udp, netip.AddrPortFrom(inside, 1023), public, peerA)
	require.ErrorIs(t, err, ErrFull)
	_, err = n.Acquire(udp, netip.AddrPortFrom(inside, 1022), public, peerA)
	require.NoError(t, err)
}
