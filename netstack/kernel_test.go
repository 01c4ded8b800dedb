//go:build linux

package netstack_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"vz.test/vz/netstack"
	"vz.test/vz/netstack/link/linktest"
	"vz.test/vz/netstack/netstacktest"
	"vz.test/vz/netstack/packet/packettest"
	"vz.test/vz/netstack/policy"
)

// kernel attaches a real network stack, configured as DHCP would do it.
func kernel(t *testing.T, d *netstack.Domain, spec netstack.Spec, machine, network string, mtu int, router bool) *linktest.Namespace {
	t.Helper()
	n := linktest.New(t)
	for _, a := range spec.Attachments {
		if a.Machine != machine || a.Network != network {
			continue
		}
		tap := linktest.TAP{Name: "eth0", MAC: a.MAC, MTU: mtu, Addresses: []netip.Prefix{netip.PrefixFrom(a.Address, 24)}}
		if router {
			tap.Gateway = netip.PrefixFrom(a.Address, 24).Masked().Addr().Next()
		}
		require.NoError(t, d.Attach(machine, network, n.Port(t, tap)))
	}
	return n
}

// between sends size bytes from a client to a listener and back.
func between(t *testing.T, dial func() (net.Conn, error), l net.Listener, size int) net.Addr {
	t.Helper()
	from := make(chan net.Addr, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			close(from)
			return
		}
		from <- c.RemoteAddr()
		_, _ = io.Copy(c, c)
		_ = c.Close()
	}()
	c, err := dial()
	require.NoError(t, err)
	defer c.Close()
	want := packettest.Pattern(size)
	go func() {
		_, _ = c.Write(want)
		_ = c.(interface{ CloseWrite() error }).CloseWrite()
	}()
	got, err := io.ReadAll(c)
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, got), "what came back differs")
	return <-from
}

func TestKernelToKernel(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	web := kernel(t, d, spec, "web", "back", 1500, false)
	db := kernel(t, d, spec, "db", "back", 1400, false)
	l, err := db.Listen(at("10.20.0.3:5432"))
	require.NoError(t, err)
	defer l.Close()
	from := between(t, func() (net.Conn, error) { return web.Dial(at("10.20.0.3:5432")) }, l, 64<<20)
	assert.Contains(t, from.String(), "10.20.0.2:")

	out, err := web.Run("ping", "-c", "2", "-i", "0.01", "-W", "5", "10.20.0.3")
	require.NoError(t, err, out)
	out, _ = web.Run("ping", "-c", "1", "-W", "5", "-M", "do", "-s", "1472", "10.20.0.3")
	assert.Contains(t, out, "mtu = 1400", "path MTU discovery")
	out, err = web.Run("ping", "-c", "1", "-W", "5", "-M", "dont", "-s", "4000", "10.20.0.3")
	require.NoError(t, err, out)
	out, _ = web.Run("ping", "-c", "1", "-W", "5", "-t", "1", "10.20.0.3")
	assert.Contains(t, strings.ToLower(out), "time to live exceeded")
	out, err = web.Run("ping", "-c", "1", "-W", "5", "10.20.0.1")
	require.NoError(t, err, out)
	out, _ = web.Run("ip", "neigh", "show", "10.20.0.3")
	assert.Contains(t, out, netstacktest.GatewayMAC.String())
}

// What a refused dial sees, and that it sees it from the network, not a timer.
func TestKernelIsRefused(t *testing.T) {
	for _, test := range []struct {
		refuse   netstack.Refuse
		tcp, udp error
	}{
		{netstack.Reset, syscall.ECONNREFUSED, syscall.ECONNREFUSED},
		{netstack.Prohibited, syscall.EHOSTUNREACH, syscall.EHOSTUNREACH},
	} {
		t.Run(test.refuse.String(), func(t *testing.T) {
			spec := netstacktest.Shop()
			spec.Networks[1].Refuse = test.refuse
			d := netstacktest.New(t, spec, netstack.Options{})
			web := kernel(t, d, spec, "web", "back", 1500, true)
			for _, to := range []string{"10.20.0.3:22", "10.20.0.77:22", "192.0.2.1:22"} {
				_, err := web.Dial(at(to))
				assert.ErrorIs(t, err, test.tcp, to)
				assert.ErrorIs(t, datagram(t, web, to), test.udp, to)
			}
			_, err := web.Dial(at("10.20.0.3:5432")) // allowed, but db isn't there
			assert.ErrorIs(t, err, syscall.EHOSTUNREACH)
			assert.NotZero(t, netstacktest.Count(d, "web", "back", policy.EgressOffline))
		})
	}
}

// datagram sends one and returns the error that comes back for it.
func datagram(t *testing.T, n *linktest.Namespace, to string) (err error) {
	t.Helper()
	var c net.Conn
	require.NoError(t, n.Do(func() (err error) {
		c, err = net.Dial("udp", to)
		return err
	}))
	defer c.Close()
	_, err = c.Write([]byte("hello"))
	require.NoError(t, err)
	_, err = c.Read(make([]byte, 1))
	var no net.Error
	require.True(t, errors.As(err, &no))
	return err
}

// A real client at the edge: NAT, the gateway's stack, super-frames both ways.
func TestKernelToEdge(t *testing.T) {
	spec := netstacktest.Shop()
	d := netstacktest.New(t, spec, netstack.Options{})
	client := kernel(t, d, spec, "client", "edge", 1500, true)
	web := kernel(t, d, spec, "web", "edge", 1500, true)
	l, err := d.Listen(at("198.51.100.1:443"))
	require.NoError(t, err)
	from := between(t, func() (net.Conn, error) { return client.Dial(at("198.51.100.1:443")) }, l, 32<<20)
	assert.Contains(t, from.String(), "203.0.113.4:")

	backend, err := web.Listen(at("100.64.0.2:8080"))
	require.NoError(t, err)
	defer backend.Close()
	from = between(t, func() (net.Conn, error) { return d.DialBackend(t.Context(), "shop") }, backend, 32<<20)
	assert.Contains(t, from.String(), "100.64.0.1:")
	_, err = client.Dial(at("198.51.100.1:22"))
	assert.ErrorIs(t, err, syscall.ECONNREFUSED)
}
