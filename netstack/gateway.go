package netstack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"

	"vz.test/vz/netstack/ipstack"
	"vz.test/vz/netstack/link"
)

// NotConnectedError says that a Machine has no port on the network.
type NotConnectedError struct{ Machine, Network string }

func (e *NotConnectedError) Error() string {
	return fmt.Sprintf("netstack: machine %s is not connected to network %s", e.Machine, e.Network)
}

// ListenPacket receives UDP on a gateway's address. Clients are seen by their
// inside address.
func (d *Domain) ListenPacket(addr netip.AddrPort) (net.PacketConn, error) {
	if _, err := d.alive(); err != nil {
		return nil, err
	}
	c, err := d.stack.ListenPacket(addr)
	if err != nil {
		return nil, fmt.Errorf("netstack: listen udp %s: %w", addr, err)
	}
	return &packetConn{PacketConn: c, of: &d.listeners, entry: d.listeners.add(addr.Addr(), c)}, nil
}

// Listen accepts TCP on a gateway's or an endpoint's address. To an endpoint
// clients come from their public address, to a gateway from their inside one.
// The connections have CloseWrite.
func (d *Domain) Listen(addr netip.AddrPort) (net.Listener, error) {
	if _, err := d.alive(); err != nil {
		return nil, err
	}
	l, err := d.stack.Listen(addr)
	if err != nil {
		return nil, fmt.Errorf("netstack: listen tcp %s: %w", addr, err)
	}
	return &listener{Listener: l, of: &d.listeners, entry: d.listeners.add(addr.Addr(), l)}, nil
}

// DialBackend connects from the gateway of an endpoint's network to its
// backend, along the path backend:ENDPOINT. The connection has CloseWrite.
// Errors: UnknownError, NotConnectedError at once when the Machine has no port,
// else a *net.OpError with ECONNREFUSED and the like, or ctx's.
func (d *Domain) DialBackend(ctx context.Context, endpoint string) (net.Conn, error) {
	w, err := d.alive()
	if err != nil {
		return nil, err
	}
	e, name := w.endpoint(endpoint), backendPath(endpoint)
	if e == nil {
		return nil, &UnknownError{"endpoint", endpoint}
	}
	if w.paths[name] == nil {
		return nil, &UnknownError{"path", name}
	}
	to := w.stations[place{e.Machine, e.Network}]
	if to == nil {
		return nil, &UnknownError{"attachment", e.Machine + " on " + e.Network}
	}
	if to.port.Load() == nil {
		return nil, &NotConnectedError{e.Machine, e.Network}
	}
	var from netip.AddrPort
	c, err := d.stack.Dial(ctx, netip.AddrPortFrom(to.network.Gateway, 0), netip.AddrPortFrom(to.Address, e.Port),
		func(local netip.AddrPort) {
			from = local
			d.mu.Lock()
			d.dials[from] = name
			d.mu.Unlock()
		})
	d.mu.Lock() // the flow knows its path by now
	delete(d.dials, from)
	d.mu.Unlock()
	if err != nil {
		return nil, fmt.Errorf("netstack: backend of endpoint %s: %w", endpoint, err)
	}
	return c, nil
}

func (w *world) endpoint(name string) *Endpoint {
	i := slices.IndexFunc(w.spec.Endpoints, func(e Endpoint) bool { return e.Name == name })
	if i < 0 {
		return nil
	}
	return &w.spec.Endpoints[i]
}

// DialHost connects from the host's port to an endpoint, as the host's browser
// does, along the path host:ENDPOINT. The connection has CloseWrite. Errors:
// UnknownError, else a *net.OpError with ECONNREFUSED and the like, or ctx's.
func (d *Domain) DialHost(ctx context.Context, endpoint string, port uint16) (net.Conn, error) {
	w, err := d.alive()
	if err != nil {
		return nil, err
	}
	e, h := w.endpoint(endpoint), d.host.Load()
	switch {
	case e == nil:
		return nil, &UnknownError{"endpoint", endpoint}
	case h == nil:
		return nil, &UnknownError{"attachment", hostName}
	}
	c, err := h.Dial(ctx, netip.AddrPortFrom(w.spec.HostAddress, 0), netip.AddrPortFrom(e.Address, port), nil)
	if err != nil {
		return nil, fmt.Errorf("netstack: endpoint %s: %w", endpoint, err)
	}
	return c, nil
}

// connectHost gives the host its port, or another one when its address has
// changed. Domain.change is held.
func (d *Domain) connectHost(w *world) error {
	s := w.stations[place{machine: hostName}]
	if s != nil && s.port.Load() != nil {
		return nil
	}
	if h := d.host.Swap(nil); h != nil {
		_ = h.Close()
	}
	if s == nil {
		return nil
	}
	ours, theirs := link.Pipe(s.network.MTU, link.Offload{Checksum: true, TSO4: true, TSO6: true, USO: true})
	h, err := ipstack.Attach(theirs, ipstack.Config{MAC: hostMAC, Neighbour: d.options.GatewayMAC})
	if err != nil {
		return err
	}
	if err := h.AddAddress(s.Address); err != nil {
		_ = h.Close()
		return err
	}
	d.connect(s, ours)
	d.host.Store(h)
	return nil
}

// listeners are what is open in the stack, by address.
type listeners struct {
	mu  sync.Mutex
	all map[*listening]struct{}
}

type listening struct {
	addr netip.Addr
	what interface{ Close() error }
}

func (l *listeners) add(addr netip.Addr, what interface{ Close() error }) *listening {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.all == nil {
		l.all = map[*listening]struct{}{}
	}
	entry := &listening{addr, what}
	l.all[entry] = struct{}{}
	return entry
}

func (l *listeners) remove(entry *listening) {
	l.mu.Lock()
	delete(l.all, entry)
	l.mu.Unlock()
}

// close closes those that match, without the lock.
func (l *listeners) close(match func(*listening) bool) {
	var closing []*listening
	l.mu.Lock()
	for entry := range l.all {
		if match(entry) {
			closing = append(closing, entry)
			delete(l.all, entry)
		}
	}
	l.mu.Unlock()
	for _, entry := range closing {
		_ = entry.what.Close()
	}
}

func (l *listeners) closeAt(addr netip.Addr) {
	l.close(func(entry *listening) bool { return entry.addr == addr })
}

func (l *listeners) closeAll() { l.close(func(*listening) bool { return true }) }

type listener struct {
	net.Listener
	of    *listeners
	entry *listening
}

func (l *listener) Close() error {
	l.of.remove(l.entry)
	return l.Listener.Close()
}

type packetConn struct {
	net.PacketConn
	of    *listeners
	entry *listening
}

// ReadFrom after Close is net.ErrClosed, for which gonet says io.EOF.
func (c *packetConn) ReadFrom(p []byte) (int, net.Addr, error) {
	n, from, err := c.PacketConn.ReadFrom(p)
	if errors.Is(err, io.EOF) {
		err = net.ErrClosed
	}
	return n, from, err
}

func (c *packetConn) Close() error {
	c.of.remove(c.entry)
	return c.PacketConn.Close()
}
