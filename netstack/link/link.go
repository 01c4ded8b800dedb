// Package link is where a route domain meets its Machines: ports that carry
// Ethernet frames in and out, whatever stands behind them (a TAP device with
// virtio_net_hdr, a QEMU stream or datagram socket, an in-memory pipe).
//
// Use: NewTAP or Pipe makes a Port; Frame.Decode reads what comes from one, and
// a Fitter makes it fit the Port that it goes to.
//
// It knows framings and offloads, nothing of addresses, policy or flows.
package link

import "errors"

// ErrClosed is returned by every call on a closed Port.
var ErrClosed = errors.New("link: port closed")

// MaxFrame is the largest frame in bytes that a Port carries: a 64 KiB
// super-frame (GSO) with its Ethernet header.
const MaxFrame = 65535 + 14

// A Frame is one Ethernet frame with what virtio-net says of it (virtio 1.2,
// 5.1.6). Data has no virtio_net_hdr; the Port adds and removes it.
type Frame struct {
	Data []byte // Ethernet header first; owned as the call says

	// NeedsChecksum: the transport checksum holds only the pseudo-header's
	// part and is to be completed at ChecksumStart+ChecksumOffset.
	NeedsChecksum  bool
	ChecksumStart  uint16
	ChecksumOffset uint16

	// Segmentation, when not GSONone, says that Data is a super-frame to be
	// cut into segments of GSOSize payload bytes behind HeaderLen of headers.
	Segmentation GSO
	GSOSize      uint16
	HeaderLen    uint16
}

// GSO is the kind of a super-frame.
type GSO uint8

const (
	GSONone GSO = iota
	GSOTCP4
	GSOTCP6
	GSOUDP // UDP_L4, one datagram per segment
)

// Offload says what the far side of a Port takes: a frame written to the Port
// is made to fit before.
type Offload struct {
	Checksum bool // NeedsChecksum frames
	TSO4     bool
	TSO6     bool
	USO      bool
}

// A Port is one Machine's attachment to one network.
//
// ReadFrames is called by one goroutine, WriteFrames by any number. Close may
// be called by anybody, more than once, and makes both return ErrClosed.
type Port interface {
	// ReadFrames waits for at least one frame and fills in up to len(frames).
	// The Data slices belong to the Port and are valid until the next call.
	// A malformed frame is counted by the Port and skipped.
	ReadFrames(frames []Frame) (n int, err error)
	// WriteFrames sends frames in order without keeping their Data. It never
	// waits for a slow far side longer than the Port's own bound; frames that
	// do not fit are dropped and counted in the Port's Drops. n is how many
	// were taken.
	WriteFrames(frames []Frame) (n int, err error)
	// MTU is the largest IP packet in bytes that the far side takes.
	MTU() int
	Offload() Offload
	// Drops is how many frames were lost here: malformed from the far side,
	// or not taken by it.
	Drops() (malformed, overflowed uint64)
	Close() error
}
