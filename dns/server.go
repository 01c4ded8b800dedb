// Package dns answers the Machines of one Environment: each sees the names of
// its own View and no others.
//
//	packet, or message of a stream ──► who asks? (Config.View) ──► one of its slots
//	    ──► answer: the View, nothing else ──► Config.Log ──► reply
//
// Use: NewServer, then ServePacket and Serve on what listens on the gateways'
// port 53, each in a goroutine of its own; Close ends them.
//
// Every name that a View has not got is NXDOMAIN and so is a denied one, which
// says why by an extended error (RFC 8914) and in the log; a name without data
// of the type asked for is NODATA. Both come with an SOA (RFC 2308), so that
// they are cached for a second and no longer.
//
// Non-goals: the server forwards nothing, caches nothing and transfers no
// zones. What a View says is its maker's business; the server never waits for
// anybody to make one.
package dns

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// maxInFlight questions of one Machine may be under way at once. An answer
	// takes microseconds, so only a flood comes here; over UDP it is REFUSED,
	// over TCP the Machine waits.
	maxInFlight = 256
	// maxStreams TCP connections of one Machine; more are closed at once.
	maxStreams = 64
	// streamIdle is how long a connection may be silent (RFC 7766, 6.2.3: "in
	// the order of a few seconds"), and how long a write may take.
	streamIdle = 10 * time.Second
)

// What a question came by.
const (
	UDP = "udp"
	TCP = "tcp"
)

// A Query is a question and what became of it, for the log.
type Query struct {
	At        time.Time
	Client    netip.Addr
	Machine   string   // empty: nobody's address
	Name      string   // lower case, no final dot; empty for the root and for what is malformed
	Type      string   // "A", "PTR", "TYPE65280"
	Rcode     string   // "NOERROR", "NXDOMAIN"
	Answers   []string // addresses, or the name of a PTR
	Reason    string   // why there is no answer: of a denied name, its Record's; empty when there is one, or no data
	Transport string   // UDP or TCP
}

// Config of a Server. View is required.
type Config struct {
	// View finds who owns an address and what they may know; a nil view
	// refuses. It is called for each question and must be quick.
	View func(client netip.Addr) (machine string, view *View)

	// Log hears of each question before its reply is sent. It is called from
	// many goroutines and must not block. May be nil.
	Log func(Query)

	Now func() time.Time // nil: time.Now
}

// A Server answers on any number of sockets. It holds no goroutine but those
// that call Serve and ServePacket, one for each connection and one for each
// question under way.
type Server struct {
	config Config
	ctx    context.Context
	cancel context.CancelFunc
	busy   atomic.Uint64
	work   sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	open    map[io.Closer]struct{}
	clients map[string]*client // by Machine; "" is all unknown ones together
}

// client bounds what one Machine may hold.
type client struct {
	slots   chan struct{}
	streams atomic.Int32
}

// NewServer makes a server that listens nowhere yet.
func NewServer(config Config) *Server {
	if config.Now == nil {
		config.Now = time.Now
	}
	if config.Log == nil {
		config.Log = func(Query) {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	return &Server{config: config, ctx: ctx, cancel: cancel,
		open: map[io.Closer]struct{}{}, clients: map[string]*client{}}
}

// Overflows counts the questions and connections that were turned away because
// a Machine had too many under way.
func (s *Server) Overflows() uint64 { return s.busy.Load() }

// ServePacket answers the datagrams of conn, which it owns, until Close or an
// error of conn. The error is never nil; after Close it is net.ErrClosed.
func (s *Server) ServePacket(conn net.PacketConn) error {
	if !s.add(conn) {
		return net.ErrClosed
	}
	defer s.remove(conn)
	buffer := make([]byte, 65535)
	for {
		n, from, err := conn.ReadFrom(buffer)
		if err != nil {
			if s.passing(err) {
				continue
			}
			return s.end(err)
		}
		address := addressOf(from)
		machine, view := s.config.View(address)
		c := s.client(machine)
		select {
		case c.slots <- struct{}{}:
		default:
			s.busy.Add(1)
			if reply := s.answer(address, machine, view, true, UDP, buffer[:n]); reply != nil {
				conn.WriteTo(reply, from)
			}
			continue
		}
		message := append([]byte(nil), buffer[:n]...)
		s.work.Go(func() {
			defer func() { <-c.slots }()
			if reply := s.answer(address, machine, view, false, UDP, message); reply != nil {
				conn.WriteTo(reply, from) // a lost reply is the network's to lose
			}
		})
	}
}

// Serve answers on the connections of l, which it owns, until Close or an error
// of l. The error is never nil; after Close it is net.ErrClosed.
func (s *Server) Serve(l net.Listener) error {
	if !s.add(l) {
		return net.ErrClosed
	}
	defer s.remove(l)
	for {
		conn, err := l.Accept()
		if err != nil {
			if s.passing(err) {
				continue
			}
			return s.end(err)
		}
		machine, _ := s.config.View(addressOf(conn.RemoteAddr()))
		c := s.client(machine)
		if c.streams.Add(1) > maxStreams || !s.add(conn) {
			c.streams.Add(-1)
			s.busy.Add(1)
			conn.Close()
			continue
		}
		go func() {
			defer s.remove(conn)
			defer c.streams.Add(-1)
			s.stream(conn, c)
		}()
	}
}

// stream answers one connection. Questions may be pipelined and their answers
// come in any order (RFC 7766, 6.2.1.1, 7).
func (s *Server) stream(conn net.Conn, c *client) {
	address := addressOf(conn.RemoteAddr())
	var writing sync.Mutex
	var answering sync.WaitGroup
	defer answering.Wait() // before conn is closed
	for {
		conn.SetReadDeadline(time.Now().Add(streamIdle))
		var prefix [2]byte
		if _, err := io.ReadFull(conn, prefix[:]); err != nil {
			return
		}
		message := make([]byte, binary.BigEndian.Uint16(prefix[:]))
		if _, err := io.ReadFull(conn, message); err != nil {
			return
		}
		select {
		case c.slots <- struct{}{}:
		case <-s.ctx.Done():
			return
		}
		answering.Go(func() {
			defer func() { <-c.slots }()
			machine, view := s.config.View(address)
			reply := s.answer(address, machine, view, false, TCP, message)
			if reply == nil {
				conn.Close() // what sends no question has lost its place in the stream
				return
			}
			framed := binary.BigEndian.AppendUint16(make([]byte, 0, 2+len(reply)), uint16(len(reply)))
			writing.Lock()
			defer writing.Unlock()
			conn.SetWriteDeadline(time.Now().Add(streamIdle))
			if _, err := conn.Write(append(framed, reply...)); err != nil {
				conn.Close()
			}
		})
	}
}

func (s *Server) answer(from netip.Addr, machine string, view *View, busy bool, transport string, message []byte) []byte {
	reply, q := answer(view, busy, transport, message)
	q.At, q.Client, q.Machine, q.Transport = s.config.Now(), from, machine, transport
	s.config.Log(q)
	return reply
}

// Close ends every ServePacket and Serve, closes their connections and returns
// when they have ended and no question is under way. Log and View must not call
// it.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	s.cancel()
	for c := range s.open {
		c.Close()
	}
	s.mu.Unlock()
	s.work.Wait()
	return nil
}

// add takes what is served; remove, once its server has ended, lets it go.
func (s *Server) add(c io.Closer) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		c.Close()
		return false
	}
	s.open[c] = struct{}{}
	s.work.Add(1) // under the lock: Close, which waits, comes before or after
	return true
}

func (s *Server) remove(c io.Closer) {
	c.Close()
	s.mu.Lock()
	delete(s.open, c)
	s.mu.Unlock()
	s.work.Done()
}

func (s *Server) client(machine string) *client {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.clients[machine]
	if c == nil {
		c = &client{slots: make(chan struct{}, maxInFlight)}
		s.clients[machine] = c
	}
	return c
}

// passing says that a socket's error is not its end: out of descriptors, or an
// ICMP error of an earlier datagram.
func (s *Server) passing(err error) bool {
	temporary, ok := errors.AsType[interface {
		error
		Temporary() bool
	}](err)
	if !ok || !temporary.Temporary() || s.ctx.Err() != nil {
		return false
	}
	select { // some of them last for a while: do not spin
	case <-time.After(10 * time.Millisecond):
	case <-s.ctx.Done():
	}
	return true
}

func (s *Server) end(err error) error {
	if s.ctx.Err() != nil {
		return net.ErrClosed
	}
	return err
}

func addressOf(a net.Addr) netip.Addr {
	switch a := a.(type) {
	case *net.UDPAddr:
		return a.AddrPort().Addr().Unmap()
	case *net.TCPAddr:
		return a.AddrPort().Addr().Unmap()
	}
	port, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return netip.Addr{}
	}
	return port.Addr().Unmap()
}
