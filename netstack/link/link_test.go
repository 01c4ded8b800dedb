package link

import (
	"bytes"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"vz.test/vz/netstack/packet"
	"vz.test/vz/netstack/packet/packettest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	a4 = netip.MustParseAddrPort("10.1.0.2:40000")
	b4 = netip.MustParseAddrPort("10.2.0.3:443")
	a6 = netip.MustParseAddrPort("[fd00::2]:40000")
	b6 = netip.MustParseAddrPort("[fd00:0:0:1::3]:443")
)

var everything = Offload{Checksum: true, TSO4: true, TSO6: true, USO: true}

// await waits for what another goroutine or a kernel does; the test binary's
// own timeout is the only limit.
func await(done func() bool) {
	for !done() {
		time.Sleep(time.Millisecond)
	}
}

// partial is a frame as a guest with offloads sends it: data's checksum is
// left to be completed, and size, when not 0, is the segments'.
func partial(t testing.TB, data []byte, size int) Frame {
	t.Helper()
	f := Frame{Data: bytes.Clone(data)}
	var info packet.Info
	require.NoError(t, f.Decode(&info))
	packet.SetPartialChecksum(f.Data, &info)
	f.NeedsChecksum = true
	f.ChecksumStart = uint16(info.L4)
	f.ChecksumOffset, _ = checksumOffset(info.Protocol)
	if size > 0 {
		f.GSOSize, f.HeaderLen = uint16(size), uint16(info.Payload)
		switch {
		case info.Protocol == packet.ProtocolUDP:
			f.Segmentation = GSOUDP
		case info.IPv6():
			f.Segmentation = GSOTCP6
		default:
			f.Segmentation = GSOTCP4
		}
	}
	return f
}

func TestPipe(t *testing.T) {
	a, b := Pipe(1500, everything)
	defer a.Close()
	assert.Equal(t, 1500, b.MTU())
	assert.Equal(t, everything, b.Offload())

	super := partial(t, packettest.TCP(a4, b4, 1, 2, packet.ACK, packettest.Pattern(50000)), 1448)
	small := Frame{Data: packettest.UDP(a4, b4, []byte("small"))}
	n, err := a.WriteFrames([]Frame{small, super})
	require.NoError(t, err)
	assert.Equal(t, 2, n)
	want := bytes.Clone(small.Data)
	small.Data[42] = 'X' // WriteFrames has not kept it
	frames := make([]Frame, 8)
	n, err = b.ReadFrames(frames)
	require.NoError(t, err)
	require.Equal(t, 2, n)
	assert.Equal(t, want, frames[0].Data)
	assert.Equal(t, super, frames[1])

	n, err = b.WriteFrames([]Frame{small})
	require.NoError(t, err)
	assert.Equal(t, 1, n)
	n, err = a.ReadFrames(frames[:1])
	require.NoError(t, err)
	assert.Equal(t, 1, n)

	require.NoError(t, b.Close())
	require.NoError(t, b.Close())
	for _, port := range []Port{a, b} {
		_, err = port.ReadFrames(frames)
		assert.ErrorIs(t, err, ErrClosed)
		_, err = port.WriteFrames([]Frame{small})
		assert.ErrorIs(t, err, ErrClosed)
	}
}

func TestPipeOverflow(t *testing.T) {
	a, b := Pipe(1500, everything)
	defer a.Close()
	small := Frame{Data: packettest.UDP(a4, b4, []byte("small"))}
	for range pipeFrames {
		n, err := a.WriteFrames([]Frame{small})
		require.NoError(t, err)
		require.Equal(t, 1, n)
	}
	n, err := a.WriteFrames([]Frame{small, small})
	require.NoError(t, err, "a full queue is no error")
	assert.Zero(t, n)
	_, overflowed := a.Drops()
	assert.Equal(t, uint64(2), overflowed)
	_, overflowed = b.Drops()
	assert.Zero(t, overflowed)

	frames := make([]Frame, pipeFrames*2)
	n, err = b.ReadFrames(frames)
	require.NoError(t, err)
	assert.Equal(t, pipeFrames, n)

	super := partial(t, packettest.TCP(a4, b4, 1, 2, packet.ACK, packettest.Pattern(65000)), 1448)
	taken := 0
	for range pipeFrames {
		n, err := a.WriteFrames([]Frame{super})
		require.NoError(t, err)
		taken += n
	}
	assert.Equal(t, pipeBytes/len(super.Data), taken, "bytes are bounded as well")
}

func TestPipeRefusesWhatDoesNotFit(t *testing.T) {
	a, b := Pipe(1500, Offload{Checksum: true, TSO4: true})
	defer a.Close()
	for name, frame := range map[string]Frame{
		"empty":     {},
		"above MTU": {Data: packettest.UDP(a4, b4, packettest.Pattern(1473))},
		"TSO6":      partial(t, packettest.TCP(a6, b6, 1, 2, packet.ACK, packettest.Pattern(5000)), 1400),
		"USO":       partial(t, packettest.UDP(a4, b4, packettest.Pattern(5000)), 1400),
		"MSS":       partial(t, packettest.TCP(a4, b4, 1, 2, packet.ACK, packettest.Pattern(5000)), 1449),
		"too long":  {Data: make([]byte, MaxFrame+1)},
	} {
		n, err := a.WriteFrames([]Frame{frame})
		require.NoError(t, err, name)
		assert.Zero(t, n, name)
	}
	malformed, _ := b.Drops()
	assert.Equal(t, uint64(6), malformed)
	n, err := a.WriteFrames([]Frame{
		{Data: packettest.UDP(a4, b4, packettest.Pattern(1472))},
		partial(t, packettest.TCP(a4, b4, 1, 2, packet.ACK, packettest.Pattern(5000)), 1448),
	})
	require.NoError(t, err)
	assert.Equal(t, 2, n)
}

// Many writers, one reader, and a Close in the middle of it.
func TestPipeConcurrent(t *testing.T) {
	a, b := Pipe(1500, Offload{})
	frame := Frame{Data: packettest.UDP(a4, b4, packettest.Pattern(1000))}
	var writers sync.WaitGroup
	for range 4 {
		writers.Go(func() {
			for {
				if _, err := a.WriteFrames([]Frame{frame, frame}); err != nil {
					assert.ErrorIs(t, err, ErrClosed)
					return
				}
			}
		})
	}
	frames := make([]Frame, 16)
	for range 1000 {
		n, err := b.ReadFrames(frames)
		require.NoError(t, err)
		for i := range n {
			require.Equal(t, frame.Data, frames[i].Data)
		}
	}
	require.NoError(t, b.Close())
	writers.Wait()
	_, err := b.ReadFrames(frames)
	assert.ErrorIs(t, err, ErrClosed)
}

func TestHeader(t *testing.T) {
	tcp4 := packettest.TCP(a4, b4, 1, 2, packet.ACK, packettest.Pattern(5000))
	tcp6 := packettest.TCP(a6, b6, 1, 2, packet.ACK, packettest.Pattern(5000))
	udp4 := packettest.UDP(a4, b4, packettest.Pattern(5000))
	udp6 := packettest.UDP(a6, b6, packettest.Pattern(5000))
	ecn := packettest.TCP(a4, b4, 1, 2, packet.ACK|packet.CWR, packettest.Pattern(5000))
	for name, test := range map[string]struct {
		frame  Frame
		header [headerLen]byte
	}{
		"complete": {Frame{Data: udp4}, [headerLen]byte{}},
		"checksum": {partial(t, tcp4, 0), [headerLen]byte{1, 0, 0, 0, 0, 0, 34, 0, 16, 0}},
		"UDP":      {partial(t, udp6, 0), [headerLen]byte{1, 0, 0, 0, 0, 0, 54, 0, 6, 0}},
		"TSO4":     {partial(t, tcp4, 1448), [headerLen]byte{1, 1, 66, 0, 0xa8, 0x05, 34, 0, 16, 0}},
		"TSO4 ECN": {partial(t, ecn, 1448), [headerLen]byte{1, 0x81, 66, 0, 0xa8, 0x05, 34, 0, 16, 0}},
		"TSO6":     {partial(t, tcp6, 1428), [headerLen]byte{1, 4, 86, 0, 0x94, 0x05, 54, 0, 16, 0}},
		"USO4":     {partial(t, udp4, 1000), [headerLen]byte{1, 5, 42, 0, 0xe8, 0x03, 34, 0, 6, 0}},
		"USO6":     {partial(t, udp6, 1000), [headerLen]byte{1, 5, 62, 0, 0xe8, 0x03, 54, 0, 6, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			var header [headerLen]byte
			putHeader(&header, &test.frame)
			assert.Equal(t, test.header, header)
			var got Frame
			var info packet.Info
			require.NoError(t, parseHeader(&header, test.frame.Data, &got, &info))
			assert.Equal(t, test.frame, got)
		})
	}
	parse := func(header [headerLen]byte, data []byte) (Frame, error) {
		var f Frame
		var info packet.Info
		err := parseHeader(&header, data, &f, &info)
		return f, err
	}
	t.Run("data valid says nothing", func(t *testing.T) {
		f, err := parse([headerLen]byte{2}, udp4)
		require.NoError(t, err)
		assert.Equal(t, Frame{Data: udp4}, f)
	})
	t.Run("one segment is no super-frame", func(t *testing.T) {
		f, err := parse([headerLen]byte{1, 1, 66, 0, 0x88, 0x13, 34, 0, 16, 0}, tcp4)
		require.NoError(t, err)
		assert.Equal(t, GSONone, f.Segmentation)
		assert.True(t, f.NeedsChecksum)
	})
	t.Run("Linux gives its first buffer's length", func(t *testing.T) {
		f, err := parse([headerLen]byte{1, 1, 0, 2, 0xa8, 0x05, 34, 0, 16, 0}, tcp4)
		require.NoError(t, err)
		assert.Equal(t, uint16(66), f.HeaderLen)
	})

	fragment := bytes.Clone(udp4)
	fragment[20] = 0x20
	vlan := bytes.Clone(tcp4)
	vlan[12] = 0x81
	icmp := packettest.ICMP(a4.Addr(), b4.Addr(), 8, 0, 1, packettest.Pattern(3000))
	for name, test := range map[string]struct {
		data   []byte
		header [headerLen]byte
	}{
		"no frame":             {nil, [headerLen]byte{}},
		"below Ethernet":       {tcp4[:13], [headerLen]byte{}},
		"unknown flag":         {tcp4, [headerLen]byte{8}},
		"receive coalescing":   {tcp4, [headerLen]byte{4}},
		"GSO, no checksum":     {tcp4, [headerLen]byte{0, 1, 66, 0, 0xa8, 0x05, 34, 0, 16, 0}},
		"ECN alone":            {tcp4, [headerLen]byte{1, 0x80, 66, 0, 0xa8, 0x05, 34, 0, 16, 0}},
		"UFO":                  {udp4, [headerLen]byte{1, 3, 42, 0, 0xe8, 0x03, 34, 0, 6, 0}},
		"unknown type":         {tcp4, [headerLen]byte{1, 9, 66, 0, 0xa8, 0x05, 34, 0, 16, 0}},
		"TSO6 on IPv4":         {tcp4, [headerLen]byte{1, 4, 66, 0, 0xa8, 0x05, 34, 0, 16, 0}},
		"TSO4 on IPv6":         {tcp6, [headerLen]byte{1, 1, 86, 0, 0xa8, 0x05, 54, 0, 16, 0}},
		"TSO4 on UDP":          {udp4, [headerLen]byte{1, 1, 42, 0, 0xa8, 0x05, 34, 0, 6, 0}},
		"USO on TCP":           {tcp4, [headerLen]byte{1, 5, 66, 0, 0xa8, 0x05, 34, 0, 16, 0}},
		"USO with ECN":         {udp4, [headerLen]byte{1, 0x85, 42, 0, 0xe8, 0x03, 34, 0, 6, 0}},
		"size 0":               {tcp4, [headerLen]byte{1, 1, 66, 0, 0, 0, 34, 0, 16, 0}},
		"tiny segments":        {tcp4, [headerLen]byte{1, 1, 66, 0, 7, 0, 34, 0, 16, 0}},
		"too many datagrams":   {udp4, [headerLen]byte{1, 5, 42, 0, 39, 0, 34, 0, 6, 0}},
		"hdr_len above frame":  {tcp4, [headerLen]byte{1, 1, 0, 0x20, 0xa8, 0x05, 34, 0, 16, 0}},
		"start in IP header":   {tcp4, [headerLen]byte{1, 0, 0, 0, 0, 0, 14, 0, 16, 0}},
		"start behind frame":   {tcp4, [headerLen]byte{1, 0, 0, 0, 0, 0, 0xff, 0xff, 16, 0}},
		"offset on the ports":  {tcp4, [headerLen]byte{1, 0, 0, 0, 0, 0, 34, 0, 0, 0}},
		"UDP's offset on TCP":  {tcp4, [headerLen]byte{1, 0, 0, 0, 0, 0, 34, 0, 6, 0}},
		"offset behind frame":  {tcp4, [headerLen]byte{1, 0, 0, 0, 0, 0, 34, 0, 0xff, 0xff}},
		"ICMP":                 {icmp, [headerLen]byte{1, 0, 0, 0, 0, 0, 34, 0, 2, 0}},
		"ICMP, invented field": {icmp, [headerLen]byte{1, 0, 0, 0, 0, 0, 34, 0, 0xff, 0xff}},
		"fragment":             {fragment, [headerLen]byte{1, 0, 0, 0, 0, 0, 34, 0, 6, 0}},
		"VLAN":                 {vlan, [headerLen]byte{1, 0, 0, 0, 0, 0, 34, 0, 16, 0}},
		"cut short":            {tcp4[:5000], [headerLen]byte{1, 0, 0, 0, 0, 0, 34, 0, 16, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parse(test.header, test.data)
			assert.ErrorIs(t, err, errHeader)
		})
	}
}

// Whatever a guest's header says, what comes out of it is a frame that can be
// completed and cut, and that says the same again when it is written.
func FuzzVnetHdr(f *testing.F) {
	for _, data := range [][]byte{
		packettest.TCP(a4, b4, 1, 2, packet.ACK|packet.CWR, packettest.Pattern(3000)),
		packettest.TCP(a6, b6, 1, 2, packet.ACK, packettest.Pattern(3000)),
		packettest.UDP(a4, b4, packettest.Pattern(3000)),
		packettest.UDP(a6, b6, packettest.Pattern(3000)),
	} {
		for _, size := range []int{0, 1000} {
			frame := partial(f, data, size)
			var header [headerLen]byte
			putHeader(&header, &frame)
			f.Add(append(header[:], frame.Data...))
		}
	}
	f.Fuzz(func(t *testing.T, read []byte) {
		if len(read) < headerLen {
			return
		}
		var frame Frame
		var info packet.Info
		if parseHeader((*[headerLen]byte)(read), read[headerLen:], &frame, &info) != nil {
			return
		}
		var header [headerLen]byte
		putHeader(&header, &frame)
		var again Frame
		require.NoError(t, parseHeader(&header, frame.Data, &again, &info))
		require.Equal(t, frame, again)

		if frame.Decode(&info) != nil {
			require.False(t, frame.NeedsChecksum)
			return
		}
		if !frame.NeedsChecksum {
			return
		}
		packet.SetPartialChecksum(frame.Data, &info) // the guest's may be wrong
		var fitter Fitter
		for _, to := range []Offload{everything, {}} {
			frames, err := fitter.Fit(&frame, &info, to, 1500)
			if err != nil {
				require.ErrorIs(t, err, ErrTooBig)
				continue
			}
			for i := range frames {
				requireFits(t, &frames[i], to, 1500)
			}
		}
	})
}

// requireFits asserts the invariant of a frame's way: MTU, checksum and GSO
// are what the port negotiated.
func requireFits(t *testing.T, f *Frame, to Offload, mtu int) {
	t.Helper()
	var info packet.Info
	require.NoError(t, f.Decode(&info))
	require.True(t, to.takes(f.Segmentation))
	require.True(t, to.Checksum || !f.NeedsChecksum)
	require.True(t, packet.VerifyTransport(f.Data, &info))
	if f.Segmentation == GSONone {
		require.LessOrEqual(t, info.Length-packet.EthernetLen, mtu)
	} else {
		require.LessOrEqual(t, int(f.HeaderLen)+int(f.GSOSize)-packet.EthernetLen, mtu)
	}
}

func TestFit(t *testing.T) {
	tcp4 := packettest.TCP(a4, b4, 1, 2, packet.ACK, packettest.Pattern(50000))
	tcp6 := packettest.TCP(a6, b6, 1, 2, packet.ACK, packettest.Pattern(50000))
	udp4 := packettest.UDP(a4, b4, packettest.Pattern(50000))
	segments := func(size int) int { return (50000 + size - 1) / size }
	type test struct {
		frame Frame
		to    Offload
		mtu   int
		want  int // frames
		err   error
	}
	for name, test := range map[string]test{
		"plain":                  {Frame{Data: packettest.UDP(a4, b4, []byte("x"))}, Offload{}, 1500, 1, nil},
		"plain at the MTU":       {Frame{Data: packettest.UDP(a4, b4, packettest.Pattern(1472))}, Offload{}, 1500, 1, nil},
		"plain above":            {Frame{Data: packettest.UDP(a4, b4, packettest.Pattern(1473))}, everything, 1500, 0, ErrTooBig},
		"checksum passes":        {partial(t, packettest.UDP(a4, b4, []byte("x")), 0), everything, 1500, 1, nil},
		"checksum completed":     {partial(t, packettest.UDP(a6, b6, []byte("x")), 0), Offload{}, 1500, 1, nil},
		"super-frame passes":     {partial(t, tcp4, 1448), everything, 1500, 1, nil},
		"smaller MTU, TSO":       {partial(t, tcp4, 1448), everything, 1400, 1, nil},
		"smaller MTU, TSO6":      {partial(t, tcp6, 1428), everything, 1400, 1, nil},
		"no TSO":                 {partial(t, tcp4, 1448), Offload{Checksum: true}, 1500, segments(1448), nil},
		"no TSO6":                {partial(t, tcp6, 1428), Offload{Checksum: true, TSO4: true}, 1500, segments(1428), nil},
		"TSO without checksum":   {partial(t, tcp4, 1448), Offload{TSO4: true}, 1500, segments(1448), nil},
		"nothing, smaller MTU":   {partial(t, tcp4, 1448), Offload{}, 1400, segments(1348), nil},
		"tiny MTU":               {partial(t, tcp4, 1448), Offload{}, 55, 0, ErrTooBig},
		"tiny segments":          {partial(t, tcp4, 8), Offload{}, 1500, segments(8), nil},
		"USO passes":             {partial(t, udp4, 1472), everything, 1500, 1, nil},
		"no USO":                 {partial(t, udp4, 1472), Offload{Checksum: true}, 1500, segments(1472), nil},
		"datagrams are kept":     {partial(t, udp4, 1472), everything, 1400, 0, ErrTooBig},
		"datagrams are kept, no": {partial(t, udp4, 1472), Offload{}, 1400, 0, ErrTooBig},
	} {
		t.Run(name, func(t *testing.T) {
			var fitter Fitter
			for range 2 { // the second time in memory that is there
				frame := test.frame
				frame.Data = bytes.Clone(frame.Data)
				var info packet.Info
				require.NoError(t, frame.Decode(&info))
				payload := bytes.Clone(frame.Data[info.Payload:info.Length])
				frames, err := fitter.Fit(&frame, &info, test.to, test.mtu)
				require.ErrorIs(t, err, test.err)
				require.Len(t, frames, test.want)
				var got []byte
				for i := range frames {
					requireFits(t, &frames[i], test.to, test.mtu)
					var part packet.Info
					require.NoError(t, frames[i].Decode(&part))
					got = append(got, frames[i].Data[part.Payload:part.Length]...)
				}
				if err == nil {
					assert.True(t, bytes.Equal(payload, got))
				}
			}
		})
	}
	t.Run("padding is not summed", func(t *testing.T) {
		frame := partial(t, packettest.UDP(a4, b4, []byte("x")), 0)
		frame.Data = append(frame.Data, 0xba, 0xdb, 0xad)
		var info packet.Info
		require.NoError(t, frame.Decode(&info))
		var fitter Fitter
		frames, err := fitter.Fit(&frame, &info, Offload{}, 1500)
		require.NoError(t, err)
		requireFits(t, &frames[0], Offload{}, 1500)
	})
	t.Run("memory goes again", func(t *testing.T) {
		var fitter Fitter
		for _, size := range []int{8, 1448} {
			frame := partial(t, tcp4, size)
			var info packet.Info
			require.NoError(t, frame.Decode(&info))
			_, err := fitter.Fit(&frame, &info, Offload{}, 1500)
			require.NoError(t, err)
		}
		assert.LessOrEqual(t, cap(fitter.arena), keepArena)
		assert.LessOrEqual(t, cap(fitter.frames), 64)
	})
}

func TestFitNoAllocations(t *testing.T) {
	super := partial(t, packettest.TCP(a4, b4, 1, 2, packet.ACK, packettest.Pattern(60000)), 1448)
	a, b := Pipe(1500, Offload{})
	defer a.Close()
	var fitter Fitter
	var info packet.Info
	frames := make([]Frame, 64)
	var header [headerLen]byte
	var back Frame
	once := func() {
		putHeader(&header, &super)
		if parseHeader(&header, super.Data, &back, &info) != nil || back.Decode(&info) != nil {
			panic("header")
		}
		out, err := fitter.Fit(&back, &info, b.Offload(), b.MTU())
		if err != nil {
			panic(err)
		}
		if n, err := a.WriteFrames(out); n != len(out) || err != nil {
			panic(fmt.Sprint(n, err))
		}
		if n, err := b.ReadFrames(frames); n != len(out) || err != nil {
			panic(fmt.Sprint(n, err))
		}
	}
	once()
	assert.Zero(t, testing.AllocsPerRun(100, once))
}
