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
	macs    = [2][6]byte{{2, 0, 0, 0, 0, 1}, {2, 0, 0, 0, 0, 2}}
	server4 = netip.MustParseAddrPort("10.9.0.2:7000")
	public4 = netip.MustParseAddrPort("10.9.0.200:0")
	public6 = netip.MustParseAddrPort("[fd09::200]:0")
	server6 = netip.MustParseAddrPort("[fd09::2]:7000")
)

// A pair is two kernels' network stacks, each behind a TAP, and the simplest
// thing in between that keeps a port's promises.
type pair struct {
	way     way
	spaces  [2]*linktest.Namespace
	ports   [2]link.Port
	whole   *packet.Reassembler
	supers  [3]atomic.Int64 // super-frames read, by kind less one
	lowered atomic.Int64    // super-frames whose segments were made smaller
	joined  atomic.Int64    // datagrams put together from fragments
	refused atomic.Int64
}

// A way is what is between the two.
type way struct {
	mtu     int
	offload func(link.Port) link.Offload
	// middle may change what goes from port number i. With an answer, that goes
	// back in its place.
	middle func(i int, frame []byte, info *packet.Info) (answer []byte)
}

func newPair(t testing.TB, w way) *pair {
	p := &pair{way: w, whole: packet.NewReassembler(packet.Limits{})}
	for i := range p.spaces {
		p.spaces[i] = linktest.New(t)
		p.ports[i] = p.spaces[i].Port(t, linktest.TAP{
			Name: "eth0", MAC: macs[i], Addresses: prefixes[i],
			Neighbours: map[netip.Addr][6]byte{public4.Addr(): macs[1-i], public6.Addr(): macs[1-i]},
		})
	}
	done := make(chan struct{}, 2)
	for i := range p.ports {
		go func() {
			defer func() { done <- struct{}{} }()
			p.forward(i)
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

func (p *pair) forward(i int) {
	from, to := p.ports[i], p.ports[1-i]
	frames := make([]link.Frame, 64)
	buffer := make([]byte, 2048)
	var info packet.Info
	var fitter link.Fitter
	for {
		n, err := from.ReadFrames(frames)
		if err != nil {
			return
		}
		for k := range frames[:n] {
			f := &frames[k]
			if f.Segmentation != link.GSONone {
				p.supers[f.Segmentation-1].Add(1)
			}
			// A kernel's partial checksum is what we think it is.
			if f.Decode(&info) != nil || f.NeedsChecksum && !packet.VerifyTransport(f.Data, &info) {
				p.refused.Add(1)
				continue
			}
			largest := 0
			if info.Fragment && !info.IPv6() {
				whole, size, err := p.whole.Add(time.Now(), f.Data, &info)
				if err != nil || whole == nil {
					continue
				}
				*f, largest = link.Frame{Data: whole}, size
				if f.Decode(&info) != nil {
					p.refused.Add(1)
					continue
				}
				p.joined.Add(1)
			}
			if p.way.middle != nil && info.EtherType != packet.EtherTypeARP {
				if answer := p.way.middle(i, f.Data, &info); answer != nil {
					_, _ = from.WriteFrames([]link.Frame{{Data: answer}})
					continue
				}
			}
			if largest > 0 {
				_ = packet.Fragment(f.Data, &info, largest, buffer, func(fragment []byte) bool {
					_, err := to.WriteFrames([]link.Frame{{Data: fragment}})
					return err == nil
				})
				continue
			}
			size := f.GSOSize
			out, err := fitter.Fit(f, &info, p.way.offload(to), p.way.mtu)
			if err != nil {
				p.refused.Add(1)
				p.tooBig(from, f.Data, &info, p.way.mtu)
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

// nat is a NAT with one mapping rule: the first namespace's addresses are the
// public ones, its ports one higher. It takes a hop from what passes.
func nat(i int, frame []byte, info *packet.Info) []byte {
	if info.IPv6() && info.Protocol == packet.ProtocolICMPv6 && info.ICMPType >= 133 && info.ICMPType <= 137 {
		return nil // neighbour discovery is between neighbours
	}
	packet.DecrementTTL(frame, info)
	public := public4.Addr()
	if info.IPv6() {
		public = public6.Addr()
	}
	private := prefixes[0][0].Addr()
	if info.IPv6() {
		private = prefixes[0][1].Addr()
	}
	if i == 0 && info.Source == private {
		port := info.SourcePort
		if info.ICMPEcho() {
			port = info.ICMPIdentifier
		}
		packet.RewriteSource(frame, info, public, port+1)
	}
	if i == 1 && info.Destination == public {
		port := info.DestinationPort
		if info.ICMPEcho() {
			port = info.ICMPIdentifier
		}
		packet.RewriteDestination(frame, info, private, port-1)
		var quoted packet.Info
		if packet.DecodeEmbedded(frame, info, &quoted) == nil {
			packet.RewriteEmbeddedSource(frame, info, &quoted, private, quoted.SourcePort-1)
		}
	}
	return nil
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
	p := newPair(t, way{mtu: 1500, offload: whatItHas})
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
	p := newPair(t, way{mtu: 1400, offload: whatItHas})
	p.transfer(t, server4, 64<<20, false)
	p.transfer(t, server6, 64<<20, true)
	assert.Positive(t, p.supers[link.GSOTCP4-1].Load())
	assert.Positive(t, p.supers[link.GSOTCP6-1].Load())
	assert.Positive(t, p.lowered.Load())
}

// A datagram that may not be fragmented and is too big for the path fails at
// its sender, who learns the MTU.
func TestKernelPathMTU(t *testing.T) {
	p := newPair(t, way{mtu: 1400, offload: whatItHas})
	conn := p.dialUDP(t, server4)
	raw, err := conn.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
	}))
	require.NoError(t, err)
	for err == nil { // until the answer is there
		_, err = conn.Write(pattern()[:1400])
		time.Sleep(time.Millisecond)
	}
	require.ErrorIs(t, err, unix.EMSGSIZE)
	mtu := 0
	require.NoError(t, raw.Control(func(fd uintptr) {
		mtu, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU)
	}))
	require.NoError(t, err)
	assert.Equal(t, 1400, mtu)
	for { // once the last answer has been reported
		if _, err = conn.Write(pattern()[:1372]); err == nil {
			break
		}
		require.ErrorIs(t, err, unix.EMSGSIZE)
		time.Sleep(time.Millisecond)
	}
}

// The same to ports without any offload: super-frames are cut and every
// checksum is ours, verified by the kernel.
func TestKernelWithoutOffload(t *testing.T) {
	p := newPair(t, way{mtu: 1500, offload: nothing})
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
				p := newPair(t, way{mtu: 1500, offload: offload})
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

// Through NAT, partial checksums and complete ones: both kernels find every
// byte right, and an error that comes back names what was sent.
func TestKernelRewrite(t *testing.T) {
	for name, offload := range map[string]func(link.Port) link.Offload{"offload": whatItHas, "none": nothing} {
		t.Run(name, func(t *testing.T) {
			p := newPair(t, way{mtu: 1500, offload: offload, middle: nat})
			p.transfer(t, server4, 32<<20, false)
			p.transfer(t, server4, 32<<20, true)
			p.transfer(t, server6, 32<<20, false)
			p.transfer(t, server6, 32<<20, true)
			for _, server := range []netip.AddrPort{server4, server6} {
				receiver, err := p.spaces[1].ListenUDP(server)
				require.NoError(t, err)
				conn := p.dialUDP(t, server)
				_, err = conn.Write([]byte("there"))
				require.NoError(t, err)
				buffer := make([]byte, 100)
				n, from, err := receiver.ReadFromUDPAddrPort(buffer)
				require.NoError(t, err)
				assert.Equal(t, "there", string(buffer[:n]))
				local := conn.LocalAddr().(*net.UDPAddr).AddrPort()
				assert.Equal(t, local.Port()+1, from.Port())
				assert.NotEqual(t, local.Addr(), from.Addr().Unmap())
				_, err = receiver.WriteToUDPAddrPort([]byte("back"), from)
				require.NoError(t, err)
				n, err = conn.Read(buffer)
				require.NoError(t, err)
				assert.Equal(t, "back", string(buffer[:n]))

				require.NoError(t, receiver.Close())
				_, err = conn.Write([]byte("nobody there"))
				require.NoError(t, err)
				_, err = conn.Read(buffer)
				assert.ErrorIs(t, err, unix.ECONNREFUSED)
			}
		})
	}
}

func (p *pair) dialUDP(t testing.TB, server netip.AddrPort) (conn *net.UDPConn) {
	t.Helper()
	require.NoError(t, p.spaces[0].Do(func() (err error) {
		conn, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(server))
		return err
	}))
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// A kernel's fragments, put together, translated and cut again.
func TestKernelFragments(t *testing.T) {
	p := newPair(t, way{mtu: 1500, offload: whatItHas, middle: nat})
	receiver, err := p.spaces[1].ListenUDP(server4)
	require.NoError(t, err)
	defer receiver.Close()
	conn := p.dialUDP(t, server4)
	buffer := make([]byte, 65536)
	for _, size := range []int{1473, 8000, 60000} {
		_, err := conn.Write(pattern()[:size])
		require.NoError(t, err)
		n, from, err := receiver.ReadFromUDPAddrPort(buffer)
		require.NoError(t, err)
		require.Equal(t, pattern()[:size], buffer[:n])
		_, err = receiver.WriteToUDPAddrPort(buffer[:n], from)
		require.NoError(t, err)
		n, err = conn.Read(buffer)
		require.NoError(t, err)
		require.Equal(t, pattern()[:size], buffer[:n])
	}
	assert.Equal(t, int64(6), p.joined.Load())
	datagrams, _ := p.whole.Held()
	assert.Zero(t, datagrams)
}

// What a refused connection looks like to the one who asked for it.
func TestKernelRefusals(t *testing.T) {
	router4, router6 := netip.MustParseAddr("10.9.0.254"), netip.MustParseAddr("fd09::fe")
	buffer := make([]byte, packet.MaxICMPError) // the first port's loop alone writes it
	p := newPair(t, way{mtu: 1500, offload: whatItHas, middle: func(i int, frame []byte, info *packet.Info) []byte {
		switch {
		case i != 0 || info.Protocol != packet.ProtocolTCP:
			return nil
		case info.DestinationPort == 81:
			return packet.BuildReset(buffer, frame, info)
		case info.IPv6():
			return packet.BuildICMPError(buffer, frame, info, router6, packet.ICMPv6Unreachable, packet.ICMPv6Prohibited, 0)
		default:
			return packet.BuildICMPError(buffer, frame, info, router4, packet.ICMPUnreachable, packet.ICMPAdminProhibited, 0)
		}
	}})
	for _, server := range []netip.Addr{server4.Addr(), server6.Addr()} {
		_, err := p.spaces[0].Dial(netip.AddrPortFrom(server, 81))
		assert.ErrorIs(t, err, unix.ECONNREFUSED)
		want := unix.EHOSTUNREACH
		if server.Is6() {
			want = unix.EACCES
		}
		_, err = p.spaces[0].Dial(netip.AddrPortFrom(server, 82))
		assert.ErrorIs(t, err, want)
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
	// The reader ends: by the device's word, or by the poller's when the device
	// is in the middle of going (EPOLLERR, and a read says EAGAIN once more).
	if err := <-read; !errors.Is(err, unix.EBADFD) {
		assert.ErrorContains(t, err, "not pollable")
	}
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
			p := newPair(b, way{mtu: 1500, offload: offload})
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
	p := newPair(b, way{mtu: 1500, offload: whatItHas})
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
