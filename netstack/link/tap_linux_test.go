package link

import (
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"vz.test/vz/netstack/packet"
	"vz.test/vz/netstack/packet/packettest"
)

// hostile is a tap over a datagram socket, so that the test is the device and
// can say what no kernel would.
func hostile(t *testing.T) (port *tap, device int) {
	t.Helper()
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	port, err = newTAP(ends[0], "hostile", 1500, everything)
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.NoError(t, port.Close())
		assert.NoError(t, unix.Close(ends[1]))
	})
	return port, ends[1]
}

func TestTAPSkipsMalformed(t *testing.T) {
	port, device := hostile(t)
	good := packettest.UDP(a4, b4, []byte("good"))
	send := func(header [headerLen]byte, data []byte) {
		_, err := unix.Write(device, append(header[:], data...))
		require.NoError(t, err)
	}
	send([headerLen]byte{0xff}, good)
	send([headerLen]byte{}, good)
	send([headerLen]byte{}, good[:5])
	_, err := unix.Write(device, []byte{1, 2, 3})
	require.NoError(t, err)
	send([headerLen]byte{}, good)
	frames := make([]Frame, 8)
	n, err := port.ReadFrames(frames)
	require.NoError(t, err)
	for got := n; got < 2; got += n { // they may come one by one
		require.Equal(t, good, frames[0].Data)
		n, err = port.ReadFrames(frames)
		require.NoError(t, err)
	}
	assert.Equal(t, good, frames[n-1].Data)
	malformed, _ := port.Drops()
	assert.Equal(t, uint64(3), malformed)
}

// Nothing but bad frames: the reader stays in ReadFrames, and Close still ends
// it.
func TestTAPCloseInFlood(t *testing.T) {
	port, device := hostile(t)
	done := make(chan struct{})
	stop := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default: // EAGAIN never: the socket blocks, and fails once closed
				if _, err := unix.SendmsgN(device, []byte{1, 2, 3}, nil, nil, unix.MSG_NOSIGNAL); err != nil {
					return
				}
			}
		}
	}()
	read := make(chan error)
	go func() {
		_, err := port.ReadFrames(make([]Frame, 4))
		read <- err
	}()
	await(func() bool {
		malformed, _ := port.Drops()
		return malformed > 1000
	})
	require.NoError(t, port.Close())
	assert.ErrorIs(t, <-read, ErrClosed)
	close(stop)
	<-done
}

// A device that takes nothing costs a drop, never a wait.
func TestTAPDropsWhatIsNotTaken(t *testing.T) {
	port, device := hostile(t)
	super := partial(t, packettest.TCP(a4, b4, 1, 2, packet.ACK, packettest.Pattern(50000)), 1448)
	written, taken := 0, 0
	for range 100 {
		n, err := port.WriteFrames([]Frame{super, super})
		require.NoError(t, err)
		written, taken = written+2, taken+n
	}
	require.Positive(t, taken)
	require.Less(t, taken, written)
	_, overflowed := port.Drops()
	assert.Equal(t, uint64(written-taken), overflowed)

	buffer := make([]byte, 1<<17)
	for range taken {
		n, err := unix.Read(device, buffer)
		require.NoError(t, err)
		var f Frame
		var info packet.Info
		require.NoError(t, parseHeader((*[headerLen]byte)(buffer), buffer[headerLen:n], &f, &info))
		require.Equal(t, super, f)
	}
	n, err := port.WriteFrames([]Frame{{}, super})
	require.NoError(t, err)
	assert.Equal(t, 1, n, "an empty frame is dropped")
}

func TestTAPCloses(t *testing.T) {
	port, _ := hostile(t)
	read := make(chan error)
	go func() {
		_, err := port.ReadFrames(make([]Frame, 4))
		read <- err
	}()
	require.NoError(t, port.Close())
	assert.ErrorIs(t, <-read, ErrClosed)
	_, err := port.ReadFrames(make([]Frame, 4))
	assert.ErrorIs(t, err, ErrClosed)
	_, err = port.WriteFrames([]Frame{{Data: make([]byte, 60)}})
	assert.ErrorIs(t, err, ErrClosed)
	require.NoError(t, port.Close())
}

func TestNewTAPRefuses(t *testing.T) {
	f, err := os.Open(os.DevNull)
	require.NoError(t, err)
	_, err = NewTAP(f, 1500)
	assert.ErrorContains(t, err, "TUNGETIFF")
	assert.NoError(t, f.Close(), "still the caller's")
	_, err = NewTAP(f, 1500)
	assert.Error(t, err)
}
