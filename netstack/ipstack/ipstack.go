// Package ipstack is an IP host behind frames: gVisor's stack with vz's
// settings, listeners and dialers of package net's kind, and Ethernet frames,
// super-frames among them, in and out. It is the only package that imports
// gVisor.
//
// Use: New with a function that takes what the stack sends, Input for what it
// receives; or Attach for a host at the end of a link.Port. The route domain's
// gateway is a Stack, and so is the host behind the proxy's port.
//
// It forwards nothing, resolves no link addresses (every frame goes to the one
// neighbour), and has no firewall.
package ipstack

import (
	"fmt"
	"net/netip"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"vz.test/vz/netstack/link"
	"vz.test/vz/netstack/packet"
)

const nic = 1

// Config says what a Stack is. It doesn't change.
type Config struct {
	MAC, Neighbour packet.MAC // of every frame it sends
	MTU            int        // bytes of IP
	// Output takes frames that the stack sends: segments of TCP may be
	// super-frames and lack their checksum. They are valid until it returns.
	// It is called by many goroutines, by Input's too, and with a connection's
	// lock held: it must not call the Stack.
	Output func(frames []link.Frame)
}

// A Stack is an IP host. Its methods are for any goroutine.
type Stack struct {
	config Config
	stack  *stack.Stack
	link   *endpoint
}

// Settings of TCP, and what they were chosen against.
var (
	// RACK stormed on a drop-tail queue in a prototype: 4.8 Mbit/s of goodput
	// against 9.2 without it. SACK recovery alone does.
	recovery = tcpip.TCPRecovery(0)
	sack     = tcpip.TCPSACKEnabled(true)
	// The default of a minute would let the edge open 16k connections to one
	// backend a minute. Our neighbour is the Machine itself, and what a fault
	// delays longer than this meets a new connection's sequence numbers.
	timeWait      = tcpip.TCPTimeWaitTimeoutOption(5 * time.Second)
	moderate      = tcpip.TCPModerateReceiveBufferOption(true)
	sendBuffer    = tcpip.TCPSendBufferSizeRangeOption{Min: 4 << 10, Default: 1 << 20, Max: 4 << 20}
	receiveBuffer = tcpip.TCPReceiveBufferSizeRangeOption{Min: 4 << 10, Default: 1 << 20, Max: 4 << 20}
)

// New starts a Stack without addresses. Close ends it.
func New(config Config) (*Stack, error) {
	s := &Stack{config: config, stack: stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4},
	})}
	for _, option := range []tcpip.SettableTransportProtocolOption{
		&recovery, &sack, &timeWait, &moderate, &sendBuffer, &receiveBuffer,
	} {
		if err := s.stack.SetTransportProtocolOption(tcp.ProtocolNumber, option); err != nil {
			s.stack.Destroy()
			return nil, fmt.Errorf("ipstack: TCP option %T: %w", option, asError(err))
		}
	}
	s.link = &endpoint{config: config}
	if err := s.stack.CreateNIC(nic, s.link); err != nil {
		s.stack.Destroy()
		return nil, fmt.Errorf("ipstack: NIC: %w", asError(err))
	}
	s.stack.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: nic}})
	return s, nil
}

// AddAddress gives it an address.
func (s *Stack) AddAddress(addr netip.Addr) error {
	err := s.stack.AddProtocolAddress(nic, tcpip.ProtocolAddress{
		Protocol:          ipv4.ProtocolNumber,
		AddressWithPrefix: tcpip.AddrFromSlice(addr.AsSlice()).WithPrefix(),
	}, stack.AddressProperties{})
	if err != nil {
		return fmt.Errorf("ipstack: address %s: %w", addr, asError(err))
	}
	return nil
}

// RemoveAddress takes an address away. Connections that use it are not ended.
func (s *Stack) RemoveAddress(addr netip.Addr) error {
	if err := s.stack.RemoveAddress(nic, tcpip.AddrFromSlice(addr.AsSlice())); err != nil {
		return fmt.Errorf("ipstack: address %s: %w", addr, asError(err))
	}
	return nil
}

// Input takes one IP packet out of a frame that was decoded into info; a TCP
// super-frame is one packet. It keeps nothing of frame. A partial checksum
// (info.PartialChecksum) is taken for right, as it never left this machine; a
// complete one is verified here, and a packet with a wrong one is dropped.
//
// It can't be left to gVisor: that asks the NIC's capabilities, once for all
// packets (nic.DeliverNetworkPacket overwrites RXChecksumValidated), so the
// endpoint says that it has verified them.
func (s *Stack) Input(frame []byte, info *packet.Info) {
	to := s.link.dispatcher
	if to == nil || info.IPv6() || !info.PartialChecksum && !packet.VerifyTransport(frame, info) {
		return
	}
	p := stack.NewPacketBuffer(stack.PacketBufferOptions{
		Payload: buffer.MakeWithData(frame[info.L3:info.Length]),
	})
	to.DeliverNetworkPacket(ipv4.ProtocolNumber, p)
	p.DecRef()
}

// Close resets every connection, closes every listener and waits for the
// stack's goroutines. Output may be called until it returns.
func (s *Stack) Close() { s.stack.Destroy() }

// endpoint is the stack's way out: gVisor's LinkEndpoint.
type endpoint struct {
	config     Config
	dispatcher stack.NetworkDispatcher // set once, by CreateNIC, before any packet
}

var (
	_ stack.LinkEndpoint = (*endpoint)(nil)
	_ stack.GSOEndpoint  = (*endpoint)(nil)
)

var buffers = sync.Pool{New: func() any { return new([link.MaxFrame]byte) }}

func (e *endpoint) WritePackets(packets stack.PacketBufferList) (int, tcpip.Error) {
	buffer := buffers.Get().(*[link.MaxFrame]byte)
	defer buffers.Put(buffer)
	var frames [1]link.Frame
	all := packets.AsSlice()
	for _, p := range all {
		n := packet.EthernetLen
		for _, part := range p.AsSlices() {
			n += copy(buffer[n:], part)
		}
		frames[0] = link.Frame{Data: buffer[:n]}
		packet.SetMACs(frames[0].Data, e.config.Neighbour, e.config.MAC)
		frames[0].Data[12], frames[0].Data[13] = packet.EtherTypeIPv4>>8, packet.EtherTypeIPv4&0xff
		describe(p, &frames[0])
		e.config.Output(frames[:])
	}
	return len(all), nil
}

// describe carries over what gVisor leaves to be done: the checksum, and
// segmentation where there is more than one segment.
func describe(p *stack.PacketBuffer, f *link.Frame) {
	gso := &p.GSOOptions
	if gso.Type == stack.GSONone || !gso.NeedsCsum {
		return
	}
	f.NeedsChecksum = true
	f.ChecksumStart = uint16(packet.EthernetLen + len(p.NetworkHeader().Slice()))
	f.ChecksumOffset = gso.CsumOffset
	if p.Data().Size() > int(gso.MSS) {
		f.Segmentation = link.GSOTCP4
		f.GSOSize = gso.MSS
		f.HeaderLen = f.ChecksumStart + uint16(len(p.TransportHeader().Slice()))
	}
}

func (e *endpoint) MTU() uint32                             { return uint32(e.config.MTU) }
func (e *endpoint) SetMTU(uint32)                           {}
func (e *endpoint) MaxHeaderLength() uint16                 { return 0 }
func (e *endpoint) LinkAddress() tcpip.LinkAddress          { return "" }
func (e *endpoint) SetLinkAddress(tcpip.LinkAddress)        {}
func (e *endpoint) IsAttached() bool                        { return e.dispatcher != nil }
func (e *endpoint) Wait()                                   {}
func (e *endpoint) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareNone }
func (e *endpoint) AddHeader(*stack.PacketBuffer)           {}
func (e *endpoint) ParseHeader(*stack.PacketBuffer) bool    { return true }
func (e *endpoint) Close()                                  {}
func (e *endpoint) SetOnCloseAction(func())                 {}

func (e *endpoint) Capabilities() stack.LinkEndpointCapabilities {
	return stack.CapabilityRXChecksumOffload // see Input
}

// TXChecksumOffload is not among the capabilities: with it, gVisor's SYN,ACKs
// leave without a checksum and without saying so.

func (e *endpoint) GSOMaxSize() uint32               { return 65535 }
func (e *endpoint) SupportedGSO() stack.SupportedGSO { return stack.HostGSOSupported }

func (e *endpoint) Attach(d stack.NetworkDispatcher) {
	if d != nil { // nil when the NIC goes, after which gVisor drops what it is given
		e.dispatcher = d
	}
}
