//go:build linux

package link_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"vz.test/vz/netstack/link"
	"vz.test/vz/netstack/link/linktest"
	"vz.test/vz/netstack/packet"
)

var (
	prefixes = [2][]netip.Prefix{
		{netip.MustParsePrefix("10.9.0.1/24"), netip.MustParsePrefix("fd09::1/64")},
		{netip.MustParsePrefix("10.9.0.2/24"), netip.MustParsePrefix("fd09::2/64")},
	}
	server4 = netip.MustParseAddrPort("10.9.0.2:7000")
	server6 = netip.MustParseAddrPort("[fd09::2]:7000")
)

// A pair is two kernels' network stacks, each behind a TAP, and the simplest
// thing in between that keeps a port's promises.
type pair struct {
	spaces  [2]*linktest.Namespace
	ports   [2]link.Port
	supers  [3]atomic.Int64 // super-frames read, by kind less one
	lowered atomic.Int64    // super-frames whose segments were made smaller
	refused atomic.Int64
}

// newPair makes a pair; frames are made to fit offload and mtu.
func newPair(t testing.TB, mtu int, offload func(link.Port) link.Offload) *pair {
	p := &pair{}
	for i := range p.spaces {
		p.spaces[i] = linktest.New(t)
		p.ports[i] = p.spaces[i].Port(t, linktest.TAP{Name: "eth0", Addresses: prefixes[i]})
	}
	done := make(chan struct{}, 2)
	for i := range p.ports {
		from, to := p.ports[i], p.ports[1-i]
		go func() {
			defer func() { done <- struct{}{} }()
			p.forward(from, to, mtu, offload(to))
		}()
	}
	t.Cleanup(func() {
		for _, port := range p.ports {
			assert.NoError(t, port.Close())
		}
		<-done
		<-done
	})
	return p
}

func (p *pair) forward(from, to link.Port, mtu int, offload link.Offload) {
	frames := make([]link.Frame, 64)
	var info packet.Info
	var fitter link.Fitter
	for {
		n, err := from.ReadFrames(frames)
		if err != nil {
			return
		}
		for i := range frames[:n] {
			f := &frames[i]
			if f.Segmentation != link.GSONone {
				p.supers[f.Segmentation-1].Add(1)
			}
			if f.Decode(&info) != nil {
				p.refused.Add(1)
				continue
			}
			size := f.GSOSize
			out, err := fitter.Fit(f, &info, offload, mtu)
			if err != nil {
				p.refused.Add(1)
				p.tooBig(from, f.Data, &info, mtu)
				continue
			}
			if out[0].GSOSize < size {
				p.lowered.Add(1)
			}
			if _, err := to.WriteFrames(out); err != nil {
				return
			}
		}
	}
}

// tooBig tells the sender of a frame what MTU there is (RFC 1191, RFC 8201).
func (p *pair) tooBig(back link.Port, frame []byte, info *packet.Info, mtu int) {
	router, typ, code := netip.MustParseAddr("10.9.0.254"), uint8(packet.ICMPUnreachable), uint8(packet.ICMPFragmentNeeded)
	if info.IPv6() {
		router, typ, code = netip.MustParseAddr("fd09::fe"), packet.ICMPv6PacketTooBig, 0
	}
	answer := packet.BuildICMPError(make([]byte, packet.MaxICMPError), frame, info, router, typ, code, mtu)
	if answer != nil {
		_, _ = back.WriteFrames([]link.Frame{{Data: answer}})
	}
}

func whatItHas(port link.Port) link.Offload { return port.Offload() }
func nothing(link.Port) link.Offload        { return link.Offload{} }

// stream writes size bytes that repeat in no power of two.
func stream(to io.Writer, size int64) error {
	buffer := pattern()
	for size > 0 {
		n, err := to.Write(buffer[:min(size, int64(len(buffer)))])
		if err != nil {
			return err
		}
		size -= int64(n)
	}
	return nil
}

// verify reads what stream wrote, to the end.
func verify(from io.Reader, size int64) error {
	want := pattern()
	got := make([]byte, len(want))
	for at := int64(0); at < size; {
		n := int(min(size-at, int64(len(got))))
		if _, err := io.ReadFull(from, got[:n]); err != nil {
			return fmt.Errorf("after %d bytes: %w", at, err)
		}
		if !bytes.Equal(want[:n], got[:n]) {
			return fmt.Errorf("wrong bytes between %d and %d", at, at+int64(n))
		}
		at += int64(n)
	}
	if n, err := from.Read(got); n != 0 || err != io.EOF {
		return fmt.Errorf("%d bytes too many, %v", n, err)
	}
	return nil
}

var patternBytes = func() []byte {
	b := make([]byte, 1<<20-3)
	for i := range b {
		b[i] = byte(i*7 + i/251 + i/65537)
	}
	return b
}()

func pattern() []byte { return patternBytes }

// transfer sends size bytes from the first namespace to the second, or back.
func (p *pair) transfer(t testing.TB, server netip.AddrPort, size int64, back bool) {
	t.Helper()
	listener, err := p.spaces[1].Listen(server)
	require.NoError(t, err)
	defer listener.Close()
	result := make(chan error, 1)
	go func() {
		conn, err := listener.AcceptTCP()
		if err != nil {
			result <- err
			return
		}
		defer conn.Close()
		if back {
			result <- stream(conn, size)
		} else {
			result <- verify(conn, size)
		}
	}()
	conn, err := p.spaces[0].Dial(server)
	require.NoError(t, err)
	defer conn.Close()
	if back {
		require.NoError(t, conn.CloseWrite())
		require.NoError(t, verify(conn, size))
	} else {
		require.NoError(t, stream(conn, size))
		require.NoError(t, conn.CloseWrite())
	}
	require.NoError(t, <-result)
}

// A quarter of a gigabyte each way, bit-exact: a kernel trusts a frame that
// says its checksum is to be completed, so nothing else would see corruption.
func TestKernelTCP(t *testing.T) {
	p := newPair(t, 1500, whatItHas)
	require.Equal(t, link.Offload{Checksum: true, TSO4: true, TSO6: true, USO: p.ports[0].Offload().USO}, p.ports[0].Offload())
	const size = 256 << 20
	p.transfer(t, server4, size, false)
	p.transfer(t, server4, size, true)
	assert.Positive(t, p.supers[link.GSOTCP4-1].Load())
	p.transfer(t, server6, size/8, false)
	p.transfer(t, server6, size/8, true)
	assert.Positive(t, p.supers[link.GSOTCP6-1].Load())
	assert.Zero(t, p.refused.Load())
	for _, port := range p.ports {
		malformed, _ := port.Drops()
		assert.Zero(t, malformed)
	}
}

// The same over a path of a smaller MTU than either end knows of. Super-frames
// go on whole, with smaller segments; what isn't one is answered, and the
// kernel takes our word for it.
func TestKernelSmallerMTU(t *testing.T) {
	p := newPair(t, 1400, whatItHas)
	p.transfer(t, server4, 64<<20, false)
	p.transfer(t, server6, 64<<20, true)
	assert.Positive(t, p.supers[link.GSOTCP4-1].Load())
	assert.Positive(t, p.supers[link.GSOTCP6-1].Load())
	assert.Positive(t, p.lowered.Load())
}

// A datagram that may not be fragmented and is too big for the path fails at
// its sender, who learns the MTU.
func TestKernelPathMTU(t *testing.T) {
	p := newPair(t, 1400, whatItHas)
	var conn *net.UDPConn
	require.NoError(t, p.spaces[0].Do(func() (err error) {
		conn, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(server4))
		return err
	}))
	defer conn.Close()
	raw, err := conn.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
	}))
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		_, err := conn.Write(pattern()[:1400])
		return errors.Is(err, unix.EMSGSIZE)
	}, time.Minute, time.Millisecond)
	mtu := 0
	require.NoError(t, raw.Control(func(fd uintptr) {
		mtu, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU)
	}))
	require.NoError(t, err)
	assert.Equal(t, 1400, mtu)
	require.Eventually(t, func() bool { // once the last answer has been reported
		_, err := conn.Write(pattern()[:1372])
		return err == nil
	}, time.Minute, time.Millisecond)
}

// The same to ports without any offload: super-frames are cut and every
// checksum is ours, verified by the kernel.
func TestKernelWithoutOffload(t *testing.T) {
	p := newPair(t, 1500, nothing)
	p.transfer(t, server4, 64<<20, false)
	p.transfer(t, server6, 64<<20, true)
	assert.Positive(t, p.supers[link.GSOTCP4-1].Load())
	assert.Positive(t, p.supers[link.GSOTCP6-1].Load())
}

// A burst of datagrams in one super-frame comes out as the datagrams it was,
// whether the port takes it whole or not.
func TestKernelUDP(t *testing.T) {
	for name, offload := range map[string]func(link.Port) link.Offload{"USO": whatItHas, "cut": nothing} {
		for _, server := range []netip.AddrPort{server4, server6} {
			t.Run(name+" "+server.String(), func(t *testing.T) {
				p := newPair(t, 1500, offload)
				receiver, err := p.spaces[1].ListenUDP(server)
				require.NoError(t, err)
				defer receiver.Close()
				sender, err := p.spaces[0].ListenUDP(netip.AddrPort{})
				require.NoError(t, err)
				defer sender.Close()
				raw, err := sender.SyscallConn()
				require.NoError(t, err)
				require.NoError(t, raw.Control(func(fd uintptr) {
					err = unix.SetsockoptInt(int(fd), unix.SOL_UDP, unix.UDP_SEGMENT, 1000)
				}))
				require.NoError(t, err)
				const burst = 20_500
				// The first one may wait for the neighbour, and is not measured.
				_, err = sender.WriteToUDPAddrPort([]byte("hello"), server)
				require.NoError(t, err)
				buffer := make([]byte, 65536)
				n, err := receiver.Read(buffer)
				require.NoError(t, err)
				require.Equal(t, "hello", string(buffer[:n]))
				_, err = sender.WriteToUDPAddrPort(pattern()[:burst], server)
				require.NoError(t, err)
				for at := 0; at < burst; at += 1000 {
					n, err := receiver.Read(buffer)
					require.NoError(t, err)
					require.Equal(t, pattern()[at:min(at+1000, burst)], buffer[:n])
				}
				if p.ports[0].Offload().USO {
					assert.Positive(t, p.supers[link.GSOUDP-1].Load())
				}
			})
		}
	}
}

// A device that goes away ends its reader and its writers.
func TestKernelDeviceGone(t *testing.T) {
	space := linktest.New(t)
	port := space.Port(t, linktest.TAP{Name: "eth0", Addresses: prefixes[0]})
	read := make(chan error)
	go func() {
		frames := make([]link.Frame, 8)
		for {
			if _, err := port.ReadFrames(frames); err != nil {
				read <- err
				return
			}
		}
	}()
	out, err := space.Run("ip", "link", "delete", "eth0")
	require.NoError(t, err, out)
	assert.ErrorIs(t, <-read, unix.EBADFD)
	_, err = port.WriteFrames([]link.Frame{{Data: make([]byte, 60)}})
	assert.ErrorIs(t, err, unix.EBADFD)
}

// An interface that is down takes nothing, and that is a drop.
func TestKernelInterfaceDown(t *testing.T) {
	space := linktest.New(t)
	port := space.Port(t, linktest.TAP{Name: "eth0"})
	out, err := space.Run("ip", "link", "set", "eth0", "down")
	require.NoError(t, err, out)
	n, err := port.WriteFrames([]link.Frame{{Data: make([]byte, 60)}})
	require.NoError(t, err)
	assert.Zero(t, n)
	_, overflowed := port.Drops()
	assert.Equal(t, uint64(1), overflowed)
}

// Opening and closing ports, with a reader in each, leaves no descriptor.
func TestKernelNoLeak(t *testing.T) {
	space := linktest.New(t)
	count := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		require.NoError(t, err)
		return len(entries)
	}
	cycle := func() {
		file, err := space.Open(linktest.TAP{Name: "eth0"})
		require.NoError(t, err)
		port, err := link.NewTAP(file, 1500)
		require.NoError(t, err)
		read := make(chan error)
		go func() {
			var err error
			for err == nil {
				_, err = port.ReadFrames(make([]link.Frame, 8))
			}
			read <- err
		}()
		require.NoError(t, port.Close())
		assert.ErrorIs(t, <-read, link.ErrClosed)
	}
	cycle()
	before := count()
	for range 20 {
		cycle()
	}
	assert.Equal(t, before, count())
}

// From one kernel through both ports to the other, for nothing on the heap.
func TestKernelNoAllocations(t *testing.T) {
	const burst = 16
	var spaces [2]*linktest.Namespace
	var ports [2]link.Port
	macs := [2][6]byte{{2, 0, 0, 0, 0, 1}, {2, 0, 0, 0, 0, 2}}
	for i := range spaces {
		spaces[i] = linktest.New(t)
		ports[i] = spaces[i].Port(t, linktest.TAP{
			Name: "eth0", MAC: macs[i], Addresses: prefixes[i][:1],
			Neighbours: map[netip.Addr][6]byte{prefixes[1-i][0].Addr(): macs[1-i]},
		})
	}
	receiver, err := spaces[1].ListenUDP(server4)
	require.NoError(t, err)
	defer receiver.Close()
	var sender net.Conn
	require.NoError(t, spaces[0].Do(func() (err error) {
		sender, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(server4))
		return err
	}))
	defer sender.Close()
	frames := make([]link.Frame, 64)
	buffer := make([]byte, 2000)
	var info packet.Info
	var fitter link.Fitter
	once := func() {
		for range burst {
			if _, err := sender.Write(buffer[:1000]); err != nil {
				panic(err)
			}
		}
		for got := 0; got < burst; {
			n, err := ports[0].ReadFrames(frames)
			if err != nil {
				panic(err)
			}
			for i := range frames[:n] {
				if frames[i].Decode(&info) != nil || info.DestinationPort != server4.Port() {
					continue // the kernel's own chatter
				}
				got++
				out, err := fitter.Fit(&frames[i], &info, ports[1].Offload(), ports[1].MTU())
				if err != nil {
					panic(err)
				}
				if n, err := ports[1].WriteFrames(out); n != len(out) || err != nil {
					panic(fmt.Sprint(n, err))
				}
			}
		}
		for range burst {
			if n, err := receiver.Read(buffer); n != 1000 || err != nil {
				panic(fmt.Sprint(n, err))
			}
		}
	}
	once()
	assert.Zero(t, testing.AllocsPerRun(100, once))
}

func BenchmarkKernelTCP(b *testing.B) {
	for name, offload := range map[string]func(link.Port) link.Offload{"offload": whatItHas, "none": nothing} {
		b.Run(name, func(b *testing.B) {
			p := newPair(b, 1500, offload)
			const size = 256 << 20
			b.SetBytes(size)
			for b.Loop() {
				p.transfer(b, server4, size, false)
			}
		})
	}
}

// One byte there and back.
func BenchmarkKernelRoundTrip(b *testing.B) {
	p := newPair(b, 1500, whatItHas)
	listener, err := p.spaces[1].Listen(server4)
	require.NoError(b, err)
	defer listener.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		conn, err := listener.AcceptTCP()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = io.Copy(struct{ io.Writer }{conn}, struct{ io.Reader }{conn})
	}()
	conn, err := p.spaces[0].Dial(server4)
	require.NoError(b, err)
	one := make([]byte, 1)
	for b.Loop() {
		if _, err := conn.Write(one); err != nil {
			b.Fatal(err)
		}
		if _, err := conn.Read(one); err != nil {
			b.Fatal(err)
		}
	}
	_ = conn.Close()
	<-done
}
