// Package wire is what a supervisor and an agent say to each other: the
// messages of schemas/proto/vz/guest/v1, and the bounds of the channel that both
// ends hold to. It sends nothing: guest and guest/agent do.
package wire

import (
	"io"
	"net"
	"os"
	"time"
)

// Both ends of the channel hold to these.
const (
	// Protocol and OldestProtocol are the versions of the messages that this
	// build speaks.
	Protocol       = 1
	OldestProtocol = 1

	// ChunkBytes is the most of a stream that one message carries: what one
	// read of a pipe of the kernel's default capacity returns.
	ChunkBytes = 64 << 10
	// MessageBytes bounds a message, so that neither end can make the other
	// allocate without limit. The largest in use is Configure's, with a bundle
	// of certificates.
	MessageBytes = 4 << 20
	// Streams bounds the calls that are open at once; 64 parallel executions
	// with their watchers are what is promised.
	Streams = 1000
	// StreamWindow is how far a sender may run ahead of the reader of one
	// stream. The channel never leaves the computer, so the product of
	// bandwidth and delay is far smaller; it is also what a stalled reader
	// costs in memory.
	StreamWindow = 1 << 20
	// ChannelWindow lets every stream fill its own window, so that a stalled
	// execution cannot stall its neighbours.
	ChannelWindow = Streams * StreamWindow
	// StdinWindow is ExecStarted.stdin_window.
	StdinWindow = 1 << 20
	// FrameBytes is the largest HTTP/2 frame: a chunk and its envelope go in
	// one frame with room to spare.
	FrameBytes = 256 << 10
)

// Conn makes of a byte stream the net.Conn that HTTP/2 asks for. It has no
// deadlines; the HTTP/2 settings in use set none.
func Conn(stream io.ReadWriteCloser) net.Conn { return conn{stream} }

type conn struct{ io.ReadWriteCloser }

func (conn) LocalAddr() net.Addr              { return address{} }
func (conn) RemoteAddr() net.Addr             { return address{} }
func (conn) SetDeadline(time.Time) error      { return os.ErrNoDeadline }
func (conn) SetReadDeadline(time.Time) error  { return os.ErrNoDeadline }
func (conn) SetWriteDeadline(time.Time) error { return os.ErrNoDeadline }

type address struct{}

func (address) Network() string { return "channel" }
func (address) String() string  { return "guest" }
