//go:build linux

// Package linktest makes network namespaces with TAP devices in them, so that
// tests of ports meet a real kernel on the other side.
//
// It needs root (or CAP_SYS_ADMIN and /dev/net/tun). Everything it makes hangs
// on descriptors that the test's cleanup closes; nothing gets a name on the
// host. It is for tests only.
package linktest

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"vz.test/vz/netstack/link"
)

// A Namespace is an unnamed network namespace with its loopback up.
type Namespace struct {
	file *os.File // /proc/…/ns/net, which keeps it alive
}

// New makes a namespace that ends with the test. Without the privilege the
// test is skipped, or fails where CI is set.
func New(t testing.TB) *Namespace {
	t.Helper()
	if os.Geteuid() != 0 {
		if os.Getenv("CI") != "" {
			t.Fatal("needs root for network namespaces")
		}
		t.Skip("needs root for network namespaces")
	}
	n := &Namespace{}
	err := onThread(func() (err error) {
		if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		if n.file, err = os.Open("/proc/thread-self/ns/net"); err != nil {
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(lo)
	})
	if err != nil {
		t.Fatal("network namespace:", err)
	}
	t.Cleanup(n.Close)
	return n
}

// Close lets go of the namespace before the test's end; sockets, processes and
// TAPs still in it keep it.
func (n *Namespace) Close() { _ = n.file.Close() }

// Do runs f on a thread in the namespace. Sockets that f makes belong to it for
// good, and so do processes that f starts.
func (n *Namespace) Do(f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(n.file.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("setns: %w", err)
		}
		return f()
	})
}

// onThread runs f on a thread that ends with it, so that no other goroutine
// ever finds itself in the wrong namespace.
func onThread(f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread is not reused
		result <- f()
	}()
	return <-result
}

// Run runs a command in the namespace and returns what it printed on both of
// its outputs.
func (n *Namespace) Run(name string, args ...string) (string, error) {
	var out []byte
	err := n.Do(func() (err error) {
		out, err = exec.Command(name, args...).CombinedOutput()
		return err
	})
	return string(out), err
}

// Start starts cmd in the namespace. Its thread ends at once, so cmd must not
// ask for Pdeathsig.
func (n *Namespace) Start(cmd *exec.Cmd) error { return n.Do(cmd.Start) }

// Listen returns a TCP listener in the namespace.
func (n *Namespace) Listen(addr netip.AddrPort) (listener *net.TCPListener, err error) {
	err = n.Do(func() (err error) {
		listener, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(addr))
		return err
	})
	return listener, err
}

// Dial connects by TCP from the namespace.
func (n *Namespace) Dial(addr netip.AddrPort) (conn *net.TCPConn, err error) {
	err = n.Do(func() (err error) {
		conn, err = net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(addr))
		return err
	})
	return conn, err
}

// ListenUDP returns a UDP socket in the namespace.
func (n *Namespace) ListenUDP(addr netip.AddrPort) (conn *net.UDPConn, err error) {
	err = n.Do(func() (err error) {
		conn, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(addr))
		return err
	})
	return conn, err
}

// TAP describes a TAP device.
type TAP struct {
	Name      string
	MAC       [6]byte // zero: the kernel picks one
	MTU       int     // zero: 1500
	Addresses []netip.Prefix
	Gateway   netip.Addr // default route, if valid
	// Neighbours are entered as permanent, for ports where nobody answers ARP.
	Neighbours map[netip.Addr][6]byte
}

// Open makes the TAP device in the namespace, up and with its addresses, and
// returns its descriptor as link.NewTAP takes it.
func (n *Namespace) Open(tap TAP) (file *os.File, err error) {
	err = n.Do(func() error {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("/dev/net/tun: %w", err)
		}
		if err := n.setUp(fd, tap); err != nil {
			_ = unix.Close(fd)
			return err
		}
		file = os.NewFile(uintptr(fd), "tap:"+tap.Name)
		return nil
	})
	return file, err
}

func (n *Namespace) setUp(fd int, tap TAP) error {
	request, err := unix.NewIfreq(tap.Name)
	if err != nil {
		return err
	}
	request.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
		return fmt.Errorf("TUNSETIFF: %w", err)
	}
	if err := unix.IoctlSetPointerInt(fd, unix.TUNSETVNETHDRSZ, 12); err != nil {
		return fmt.Errorf("TUNSETVNETHDRSZ: %w", err)
	}
	device, err := netlink.LinkByName(tap.Name)
	if err != nil {
		return err
	}
	if tap.MAC != [6]byte{} {
		if err := netlink.LinkSetHardwareAddr(device, tap.MAC[:]); err != nil {
			return err
		}
	}
	if tap.MTU != 0 {
		if err := netlink.LinkSetMTU(device, tap.MTU); err != nil {
			return err
		}
	}
	for _, prefix := range tap.Addresses {
		address := &netlink.Addr{IPNet: &net.IPNet{
			IP: prefix.Addr().AsSlice(), Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen()),
		}}
		if prefix.Addr().Is6() {
			address.Flags = unix.IFA_F_NODAD // usable at once
		}
		if err := netlink.AddrAdd(device, address); err != nil {
			return fmt.Errorf("address %s: %w", prefix, err)
		}
	}
	if err := netlink.LinkSetUp(device); err != nil {
		return err
	}
	for address, mac := range tap.Neighbours {
		family := netlink.FAMILY_V4
		if address.Is6() {
			family = netlink.FAMILY_V6
		}
		if err := netlink.NeighSet(&netlink.Neigh{
			LinkIndex: device.Attrs().Index, Family: family, State: netlink.NUD_PERMANENT,
			IP: address.AsSlice(), HardwareAddr: mac[:],
		}); err != nil {
			return fmt.Errorf("neighbour %s: %w", address, err)
		}
	}
	if tap.Gateway.IsValid() {
		if err := netlink.RouteAdd(&netlink.Route{LinkIndex: device.Attrs().Index, Gw: tap.Gateway.AsSlice()}); err != nil {
			return fmt.Errorf("route: %w", err)
		}
	}
	return nil
}

// Port makes the TAP device and returns the Port over it, closed when the test
// ends.
func (n *Namespace) Port(t testing.TB, tap TAP) link.Port {
	t.Helper()
	file, err := n.Open(tap)
	if err != nil {
		t.Fatal("TAP:", err)
	}
	mtu := tap.MTU
	if mtu == 0 {
		mtu = 1500
	}
	port, err := link.NewTAP(file, mtu)
	if err != nil {
		_ = file.Close()
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = port.Close() })
	return port
}
