package ipstack

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"
)

// Conn is a TCP connection: CloseWrite sends the FIN and leaves the other
// direction open.
type Conn interface {
	net.Conn
	CloseWrite() error
}

// Dial connects from the address local, with a port that the stack picks when
// local has none, to remote. picked, which may be nil, is told the local
// address before the first segment is sent. The error's cause is ECONNREFUSED,
// EHOSTUNREACH and so on, or ctx's.
func (s *Stack) Dial(ctx context.Context, local, remote netip.AddrPort, picked func(local netip.AddrPort)) (Conn, error) {
	fail := func(err error) error {
		return &net.OpError{Op: "dial", Net: "tcp", Source: net.TCPAddrFromAddrPort(local),
			Addr: net.TCPAddrFromAddrPort(remote), Err: err}
	}
	if err := ctx.Err(); err != nil {
		return nil, fail(err)
	}
	var queue waiter.Queue
	ep, err := s.stack.NewEndpoint(tcp.ProtocolNumber, ipv4.ProtocolNumber, &queue)
	if err != nil {
		return nil, fail(asError(err))
	}
	entry, writable := waiter.NewChannelEntry(waiter.WritableEvents | waiter.EventErr | waiter.EventHUp)
	queue.EventRegister(&entry)
	defer queue.EventUnregister(&entry)
	if err := ep.Bind(full(local)); err != nil {
		ep.Close()
		return nil, fail(asError(err))
	}
	if picked != nil {
		at, err := ep.GetLocalAddress()
		if err != nil {
			ep.Close()
			return nil, fail(asError(err))
		}
		picked(netip.AddrPortFrom(local.Addr(), at.Port))
	}
	err = ep.Connect(full(remote))
	if _, started := err.(*tcpip.ErrConnectStarted); started {
		select {
		case <-ctx.Done():
			ep.Abort()
			ep.Close()
			return nil, fail(ctx.Err())
		case <-writable:
			err = ep.LastError()
		}
	}
	if err != nil {
		ep.Close()
		return nil, fail(asError(err))
	}
	return gonet.NewTCPConn(&queue, ep), nil
}

// Listen accepts TCP connections to addr, which the Stack has. Its connections
// are Conns.
func (s *Stack) Listen(addr netip.AddrPort) (net.Listener, error) {
	l, err := gonet.ListenTCP(s.stack, full(addr), ipv4.ProtocolNumber)
	if err != nil {
		return nil, err
	}
	return &listener{TCPListener: l}, nil
}

// ListenPacket receives UDP datagrams to addr, which the Stack has.
func (s *Stack) ListenPacket(addr netip.AddrPort) (net.PacketConn, error) {
	local := full(addr)
	return gonet.DialUDP(s.stack, &local, nil, ipv4.ProtocolNumber)
}

// DialPacket exchanges UDP datagrams with remote from the address local.
func (s *Stack) DialPacket(local, remote netip.AddrPort) (net.Conn, error) {
	from, to := full(local), full(remote)
	return gonet.DialUDP(s.stack, &from, &to, ipv4.ProtocolNumber)
}

// listener makes Close end a blocked Accept, which gonet's does not.
type listener struct {
	*gonet.TCPListener
	once sync.Once
}

func (l *listener) Accept() (net.Conn, error) {
	c, err := l.TCPListener.Accept()
	if err != nil {
		return nil, &net.OpError{Op: "accept", Net: "tcp", Addr: l.Addr(), Err: net.ErrClosed}
	}
	return c, nil
}

func (l *listener) Close() error {
	l.once.Do(func() {
		l.Shutdown()
		_ = l.TCPListener.Close()
	})
	return nil
}

func full(a netip.AddrPort) tcpip.FullAddress {
	return tcpip.FullAddress{NIC: nic, Addr: tcpip.AddrFromSlice(a.Addr().AsSlice()), Port: a.Port()}
}

// asError gives gVisor's errors their names in package syscall, so that who
// relays a failed dial can make it fail likewise.
func asError(err tcpip.Error) error {
	switch err.(type) {
	case *tcpip.ErrConnectionRefused:
		return os.NewSyscallError("connect", syscall.ECONNREFUSED)
	case *tcpip.ErrConnectionReset, *tcpip.ErrConnectionAborted:
		return os.NewSyscallError("connect", syscall.ECONNRESET)
	case *tcpip.ErrHostUnreachable, *tcpip.ErrHostDown:
		return os.NewSyscallError("connect", syscall.EHOSTUNREACH)
	case *tcpip.ErrNetworkUnreachable:
		return os.NewSyscallError("connect", syscall.ENETUNREACH)
	case *tcpip.ErrTimeout:
		return os.NewSyscallError("connect", syscall.ETIMEDOUT)
	case *tcpip.ErrPortInUse:
		return os.NewSyscallError("bind", syscall.EADDRINUSE)
	case *tcpip.ErrBadLocalAddress:
		return os.NewSyscallError("bind", syscall.EADDRNOTAVAIL)
	}
	return errors.New(err.String())
}
