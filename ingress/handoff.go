package ingress

import (
	"bufio"
	"net"
	"sync"
)

// handoff is the listener of the HTTP server: what accept gives it.
type handoff struct {
	conns   chan net.Conn
	closed  chan struct{}
	once    sync.Once
	address net.Addr
}

func (h *handoff) hand(conn net.Conn) bool {
	select {
	case h.conns <- conn:
		return true
	case <-h.closed:
		return false
	}
}

func (h *handoff) Accept() (net.Conn, error) {
	select {
	case conn := <-h.conns:
		return conn, nil
	case <-h.closed:
		return nil, net.ErrClosed
	}
}

func (h *handoff) Close() error {
	h.once.Do(func() { close(h.closed) })
	return nil
}

func (h *handoff) Addr() net.Addr { return h.address }

// peeked is a connection of which something was read already.
type peeked struct {
	net.Conn
	reader *bufio.Reader
	closed func()
}

func (c *peeked) Read(b []byte) (int, error) { return c.reader.Read(b) }

func (c *peeked) Close() error {
	c.closed()
	return nil
}

func (c *peeked) CloseWrite() error { return closeWrite(c.Conn) }

func (c *peeked) SetLinger(seconds int) error {
	if l, ok := c.Conn.(interface{ SetLinger(sec int) error }); ok {
		return l.SetLinger(seconds)
	}
	return nil
}
