package link

import (
	"errors"

	"vz.test/vz/netstack/packet"
)

// ErrTooBig is returned for a frame that no cutting makes fit: an IP packet
// above the port's MTU, or a super-frame of datagrams that are. Whether it is
// fragmented or answered by ICMP is for others to say.
var ErrTooBig = errors.New("link: larger than the port's MTU")

// A Fitter makes frames fit the port they go to. One goroutine at a time uses
// it; the zero value is ready.
type Fitter struct {
	frames []Frame
	arena  []byte // segments' bytes
}

// What a Fitter keeps between calls, in bytes: a 64 KiB super-frame's segments
// of an ordinary size. What a tiny segment size made it grow to goes again.
const keepArena = 128 << 10

// Fit returns f as one or more frames that a port with offload and mtu takes:
// as it is where that fits, with its checksum completed where the port can't,
// cut into segments where the port lacks that kind of segmentation, and with
// smaller TCP segments where they would exceed mtu. info is f's, as it is now
// (Frame.Decode, kept true by rewriting).
//
// The checksum is completed in f itself. The result is valid until f.Data's
// owner takes it back or the next call. Errors: ErrTooBig, packet.ErrSplit.
func (t *Fitter) Fit(f *Frame, info *packet.Info, to Offload, mtu int) ([]Frame, error) {
	if f.Segmentation == GSONone {
		if info.Length-packet.EthernetLen > mtu {
			return nil, ErrTooBig
		}
		if f.NeedsChecksum && !to.Checksum {
			err := packet.CompleteChecksum(f.Data[:info.Length], int(f.ChecksumStart), int(f.ChecksumOffset))
			if err != nil {
				return nil, err
			}
			f.NeedsChecksum, f.ChecksumStart, f.ChecksumOffset = false, 0, 0
			info.PartialChecksum = false
		}
		return t.one(f), nil
	}
	size := int(f.GSOSize)
	if room := mtu + packet.EthernetLen - info.Payload; size > room {
		if f.Segmentation == GSOUDP || room < minTCPSegment {
			return nil, ErrTooBig
		}
		size = room
	}
	if to.takes(f.Segmentation) {
		out := t.one(f)
		out[0].GSOSize = uint16(size)
		return out, nil
	}
	return t.cut(f, info, size)
}

// one returns f alone. It is a copy, because f is the caller's to reuse.
func (t *Fitter) one(f *Frame) []Frame {
	t.frames = append(t.frames[:0], *f)
	return t.frames
}

func (t *Fitter) cut(f *Frame, info *packet.Info, size int) ([]Frame, error) {
	n, err := packet.Segments(f.Data, info, size)
	if err != nil {
		return nil, err
	}
	need := n*info.Payload + info.PayloadLen()
	if cap(t.arena) < need || cap(t.arena) > keepArena && need <= keepArena {
		t.arena = make([]byte, max(need, keepArena))
		t.frames = make([]Frame, 0, n)
	}
	t.frames = t.frames[:0]
	rest := t.arena[:cap(t.arena)]
	for index := range n {
		segment := packet.PutSegment(rest, f.Data, info, size, index)
		rest = rest[len(segment):]
		t.frames = append(t.frames, Frame{Data: segment})
	}
	return t.frames, nil
}
