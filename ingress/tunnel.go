package ingress

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// tunnelBuffer is what each direction holds at most, beyond the sockets'
	// own buffers. 32 KiB is two TLS records, and what io.Copy takes.
	tunnelBuffer = 32 << 10
	// halfIdle is how long one direction may be silent when the other has
	// ended. RFC 5382 would have 4 minutes for a NAT; this is a bit above.
	// A tunnel with both ends open may be silent for good: WebSockets are.
	halfIdle = 5 * time.Minute
)

var tunnelBuffers = sync.Pool{New: func() any { return new([tunnelBuffer]byte) }}

// tunnel carries bytes both ways between two connections until both directions
// have ended, each by itself, or one has failed, and closes them. first is read
// before a: what was read of it already. A connection that breaks, breaks the
// other; what is TCP is reset.
func tunnel(a net.Conn, first io.Reader, b net.Conn) {
	var half atomic.Bool
	failed := make(chan bool, 2)
	direction := func(to net.Conn, from net.Conn, r io.Reader) {
		err := carry(to, from, r, &half)
		if err == nil {
			half.Store(true)
			err = errors.Join(closeWrite(to), to.SetReadDeadline(time.Now().Add(halfIdle)))
		}
		failed <- err != nil
	}
	go direction(b, a, first)
	go direction(a, b, b)
	broken := <-failed
	if !broken {
		broken = <-failed
		a.Close()
		b.Close()
		return
	}
	reset(a)
	reset(b)
	<-failed
}

// carry copies r, which reads from, until its end. io.Copy would do but for the
// deadline, and would take buffers of its own.
func carry(to, from net.Conn, r io.Reader, half *atomic.Bool) error {
	buffer := tunnelBuffers.Get().(*[tunnelBuffer]byte)
	defer tunnelBuffers.Put(buffer)
	for {
		n, err := r.Read(buffer[:])
		if n > 0 {
			if half.Load() {
				from.SetReadDeadline(time.Now().Add(halfIdle))
			}
			if _, err := to.Write(buffer[:n]); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func closeWrite(c net.Conn) error {
	if half, ok := c.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil // it can't be half closed: the other direction ends it
}

// reset closes so that the peer sees a failure, not an end, where that can be.
func reset(c net.Conn) {
	if l, ok := c.(interface{ SetLinger(sec int) error }); ok {
		l.SetLinger(0)
	}
	c.Close()
}
