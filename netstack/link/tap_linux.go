package link

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"vz.test/vz/netstack/packet"
)

// A tap is a Port over a TAP device's descriptor.
//
// The descriptor is non-blocking and on Go's netpoller, which measured a
// quarter faster than blocking reads in threads of their own. Each read and
// write moves one frame, as the device has it: a super-frame stays whole.
//
// Close order: the file is closed, which wakes the reader and lets calls under
// way end; the descriptor goes with the last of them.
type tap struct {
	file    *os.File
	raw     syscall.RawConn
	mtu     int
	offload Offload

	reader tapReader
	writer tapWriter

	closed                atomic.Bool
	malformed, overflowed atomic.Uint64
}

// tapReader belongs to the one goroutine in ReadFrames. Its step is made once,
// because a closure for each call would be an allocation for each call.
type tapReader struct {
	arena  []byte
	into   []Frame
	n      int
	waited bool
	err    error
	info   packet.Info
	step   func(fd uintptr) bool
}

// tapWriter is under mu.
type tapWriter struct {
	mu     sync.Mutex
	from   []Frame
	taken  int
	err    error
	header [headerLen]byte
	parts  [2]unix.Iovec
	step   func(fd uintptr) bool
}

// A reader's arena holds frames one behind the other, as many as come, as long
// as a largest one still fits: two super-frames, or forty of 1500 bytes. A
// device moves one frame for a system call, so a larger batch would gain
// nothing and cost cache and, for each Machine, memory. What no frame has
// reached is never touched.
const (
	slot      = headerLen + MaxFrame
	arenaSize = 2 * ((slot + 63) &^ 63)
)

// maxMalformed bounds how many bad frames one turn of the reader skips, so
// that a flood of them can't keep Close waiting.
const maxMalformed = 64

// NewTAP returns a Port over f, the descriptor of a TAP device that was opened
// with IFF_TAP|IFF_NO_PI|IFF_VNET_HDR and given a 12-byte virtio_net_hdr. mtu
// is the device's, in bytes. Checksum and segmentation offload are asked of the
// kernel; Offload says what it has (USO came with Linux 6.2).
//
// The Port owns f, which is closed before NewTAP returns in favour of a
// duplicate; on an error f is still the caller's. Errors are the kernel's, or
// say what is wrong with the descriptor.
func NewTAP(f *os.File, mtu int) (Port, error) {
	control, err := f.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("link: TAP: %w", err)
	}
	var offload Offload
	fd := -1
	controlErr := control.Control(func(old uintptr) {
		if offload, err = setUpTAP(int(old)); err != nil {
			return
		}
		// A duplicate, because os.File may hold f as a blocking one, or have it
		// on the poller since before it was a TAP's, when it reported errors.
		if fd, err = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 3); err != nil {
			err = fmt.Errorf("duplicate: %w", err)
		}
	})
	if err = errors.Join(controlErr, err); err != nil {
		return nil, fmt.Errorf("link: TAP: %w", err)
	}
	t, err := newTAP(fd, f.Name(), mtu, offload)
	if err != nil {
		return nil, err
	}
	_ = f.Close()
	return t, nil
}

// newTAP is NewTAP for a descriptor that is set up, which it owns.
func newTAP(fd int, name string, mtu int, offload Offload) (*tap, error) {
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("link: TAP: %w", err)
	}
	file := os.NewFile(uintptr(fd), name) // non-blocking, so on the poller
	raw, err := file.SyscallConn()
	if err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("link: TAP: %w", err)
	}
	t := &tap{file: file, raw: raw, mtu: mtu, offload: offload}
	t.reader.step = t.read
	t.writer.step = t.write
	return t, nil
}

// setUpTAP checks that fd is what NewTAP says and turns on what it can.
func setUpTAP(fd int) (Offload, error) {
	request, err := unix.NewIfreq("")
	if err != nil {
		return Offload{}, err
	}
	if err := unix.IoctlIfreq(fd, unix.TUNGETIFF, request); err != nil {
		return Offload{}, fmt.Errorf("TUNGETIFF: %w", err)
	}
	const want = unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR
	if request.Uint16()&(want|unix.IFF_TUN) != want {
		return Offload{}, errors.New("not opened with IFF_TAP|IFF_NO_PI|IFF_VNET_HDR")
	}
	size, err := unix.IoctlGetInt(fd, unix.TUNGETVNETHDRSZ)
	if err != nil {
		return Offload{}, fmt.Errorf("TUNGETVNETHDRSZ: %w", err)
	}
	if size != headerLen {
		return Offload{}, fmt.Errorf("virtio_net_hdr of %d bytes, not %d", size, headerLen)
	}
	if err := unix.IoctlSetPointerInt(fd, unix.TUNSETVNETLE, 1); err != nil {
		return Offload{}, fmt.Errorf("TUNSETVNETLE: %w", err)
	}
	const base = unix.TUN_F_CSUM | unix.TUN_F_TSO4 | unix.TUN_F_TSO6 | unix.TUN_F_TSO_ECN
	offload := Offload{Checksum: true, TSO4: true, TSO6: true, USO: true}
	if err := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, base|unix.TUN_F_USO4|unix.TUN_F_USO6); err != nil {
		offload.USO = false
		if err := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, base); err != nil {
			return Offload{}, fmt.Errorf("TUNSETOFFLOAD: %w", err)
		}
	}
	return offload, nil
}

func (t *tap) ReadFrames(frames []Frame) (int, error) {
	r := &t.reader
	if len(frames) == 0 {
		return 0, nil
	}
	if r.arena == nil {
		r.arena = make([]byte, arenaSize)
	}
	r.into, r.n, r.err = frames, 0, nil
	for r.n == 0 && r.err == nil {
		if err := t.raw.Read(r.step); err != nil {
			r.err = err
		}
	}
	r.into = nil
	if r.n > 0 { // an error comes again
		return r.n, nil
	}
	return 0, t.failed("read", r.err)
}

// read fills in r.into from the device and reports false when it has to wait.
// Who has waited takes one frame and goes: to look for a second one costs a
// system call before the first has been seen to, and if there are more then the
// next call finds them at once and takes them all.
func (t *tap) read(fd uintptr) bool {
	r := &t.reader
	used := 0
	for malformed := 0; r.n < len(r.into) && used+slot <= len(r.arena) && malformed < maxMalformed; {
		buffer := r.arena[used : used+slot]
		n, err := unix.Read(int(fd), buffer)
		switch {
		case err == unix.EAGAIN:
			r.waited = r.n == 0 && malformed == 0
			return !r.waited
		case err == unix.EINTR:
			continue
		case err != nil:
			r.err = err
			return true
		}
		if n < headerLen || parseHeader((*[headerLen]byte)(buffer), buffer[headerLen:n:n], &r.into[r.n], &r.info) != nil {
			t.malformed.Add(1)
			malformed++
			continue
		}
		r.n++
		used += (n + 63) &^ 63 // frames of their own cache lines
		if r.waited {
			r.waited = false
			break
		}
	}
	return true
}

func (t *tap) WriteFrames(frames []Frame) (int, error) {
	w := &t.writer
	w.mu.Lock()
	defer w.mu.Unlock()
	w.from, w.taken, w.err = frames, 0, nil
	err := t.raw.Write(w.step)
	w.from, w.parts = nil, [2]unix.Iovec{}
	if err == nil {
		err = w.err
	}
	if err != nil {
		return w.taken, t.failed("write", err)
	}
	return w.taken, nil
}

// write hands all of w.from to the device. It never waits: a TAP hands frames
// to its own network stack within the call, and one that says EAGAIN has a
// limit on memory in flight that somebody has set and its Machine has filled.
func (t *tap) write(fd uintptr) bool {
	w := &t.writer
	for i := range w.from {
		f := &w.from[i]
		if len(f.Data) == 0 {
			t.overflowed.Add(1)
			continue
		}
		putHeader(&w.header, f)
		w.parts[0].Base = &w.header[0]
		w.parts[0].SetLen(headerLen)
		w.parts[1].Base = &f.Data[0]
		w.parts[1].SetLen(len(f.Data))
		errno := unix.EINTR
		for errno == unix.EINTR {
			_, _, errno = unix.Syscall(unix.SYS_WRITEV, fd, uintptr(unsafe.Pointer(&w.parts[0])), 2)
		}
		switch errno {
		case 0:
			w.taken++
		case unix.EBADFD: // the device is gone, with the namespace it was in
			t.overflowed.Add(uint64(len(w.from) - i))
			w.err = errno
			return true
		default: // EAGAIN; EIO while the interface is down; ENOMEM
			t.overflowed.Add(1)
		}
	}
	return true
}

// failed is err as a caller sees it. A RawConn's own error for a closed file
// can't be told by errors.Is.
func (t *tap) failed(what string, err error) error {
	if t.closed.Load() {
		return ErrClosed
	}
	return fmt.Errorf("link: TAP %s: %w", what, err)
}

func (t *tap) MTU() int         { return t.mtu }
func (t *tap) Offload() Offload { return t.offload }

func (t *tap) Drops() (malformed, overflowed uint64) {
	return t.malformed.Load(), t.overflowed.Load()
}

func (t *tap) Close() error {
	if t.closed.Swap(true) {
		return nil
	}
	if err := t.file.Close(); err != nil {
		return fmt.Errorf("link: TAP close: %w", err)
	}
	return nil
}
