package ingress

import (
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func asUser(uid uint32) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
}

func TestSocketOwner(t *testing.T) {
	for _, network := range []string{"tcp4", "tcp6", "tcp"} { // the last listens on both families
		listenOn := map[string]string{"tcp4": "127.0.0.1:0", "tcp6": "[::1]:0", "tcp": ":0"}[network]
		l, err := net.Listen(network, listenOn)
		if err != nil && network == "tcp6" {
			continue // no IPv6 here
		}
		require.NoError(t, err)
		defer l.Close()
		to := l.Addr().String()
		if network == "tcp" {
			_, port, err := net.SplitHostPort(to)
			require.NoError(t, err)
			to = "127.0.0.1:" + port
		}
		client, err := net.Dial("tcp", to)
		require.NoError(t, err)
		server, err := l.Accept()
		require.NoError(t, err)
		uid, err := SocketOwner(addrPort(server.LocalAddr()), addrPort(server.RemoteAddr()))
		require.NoError(t, err, network)
		assert.Equal(t, os.Getuid(), uid)
		client.Close()
		_, err = SocketOwner(addrPort(server.LocalAddr()), addrPort(server.RemoteAddr()))
		assert.ErrorIs(t, err, ErrNoOwner, "the client is gone")
		server.Close()
	}
}

func TestFindOwner(t *testing.T) {
	const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 11111 1 0000000000000000 100 0 0 10 0
   1: 0100007F:C001 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1000        0 22222 1 0000000000000000 20 4 30 10 -1
   2: 0100007F:1F90 0100007F:C001 01 00000000:00000000 00:00000000 00000000     0        0 33333 1 0000000000000000 20 4 30 10 -1
   3: 0100007F:C002 0100007F:1F90 06 00000000:00000000 03:00000F5B 00000000     0        0 0 3 0000000000000000
   4: 0100007F:C003 0100007F:1F90 04 00000001:00000000 01:00000015 00000000     0        0 0 3 0000000000000000
   5: 0000000000000000FFFF00000100007F:C004 0000000000000000FFFF00000100007F:1F90 01 00000000:00000000 00:00000000 00000000  4294967294        0 44444 1 0
   6: 00000000000000000000000001000000:C005 00000000000000000000000001000000:1F90 01 00000000:00000000 00:00000000 00000000  1001        0 55555 1 0
   7: nonsense
   8: XX00007F:C006 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1000        0 66666 1 0
   9: 0100007F:C007 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  minus        0 77777 1 0
`
	for _, test := range []struct {
		address, peer string
		uid           int
		none          bool
	}{
		{"127.0.0.1:49153", "127.0.0.1:8080", 1000, false},
		{"127.0.0.1:49153", "127.0.0.1:8081", 0, true},           // another peer
		{"127.0.0.1:49153", "127.0.0.2:8080", 0, true},           // another peer
		{"127.0.0.1:49154", "127.0.0.1:8080", 0, true},           // TIME_WAIT
		{"127.0.0.1:49155", "127.0.0.1:8080", 0, true},           // closed, not all sent
		{"127.0.0.1:49156", "127.0.0.1:8080", 4294967294, false}, // mapped
		{"[::ffff:127.0.0.1]:49153", "127.0.0.1:8080", 1000, false},
		{"[::1]:49157", "[::1]:8080", 1001, false},
		{"127.0.0.1:49158", "127.0.0.1:8080", 0, true},
	} {
		uid, err := findOwner(strings.NewReader(table), netip.MustParseAddrPort(test.address), netip.MustParseAddrPort(test.peer))
		if test.none {
			assert.ErrorIs(t, err, ErrNoOwner, test.address)
			continue
		}
		require.NoError(t, err, test.address)
		assert.Equal(t, test.uid, uid, test.address)
	}
	_, err := findOwner(strings.NewReader(table), netip.MustParseAddrPort("127.0.0.1:49159"), netip.MustParseAddrPort("127.0.0.1:8080"))
	assert.Error(t, err)
	assert.NotErrorIs(t, err, ErrNoOwner)
}
