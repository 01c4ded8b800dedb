package netstack

import (
	"unsafe"

	"vz.test/vz/netstack/link"
	"vz.test/vz/netstack/packet"
)

// A Carrier carries frames as the loop of a port does, on the test's own
// goroutine.
type Carrier struct {
	w *worker
	s *station
}

func (d *Domain) Carrier(machine, network string) *Carrier {
	return &Carrier{&worker{d: d}, d.current().stations[place{machine, network}]}
}

func (c *Carrier) Carry(f *link.Frame) {
	c.w.now = c.w.d.now()
	c.w.enter(c.s, f)
	c.w.flush()
}

// Expire does what the domain does every second.
func (d *Domain) Expire() { d.flows.Expire(d.now()) }

// Mappings is how many NAT has.
func (d *Domain) Mappings() int { return d.nat.Len() }

// GatewayCarrier carries frames as from the gateway's stack.
func (d *Domain) GatewayCarrier() *GatewayCarrier { return &GatewayCarrier{&worker{d: d}} }

type GatewayCarrier struct{ w *worker }

func (c *GatewayCarrier) Carry(f *link.Frame) {
	c.w.now = c.w.d.now()
	if f.Decode(&c.w.info) == nil {
		c.w.pass(c.w.d.gateway, f)
	}
	c.w.flush()
}

// SinkCarrier is Carrier for a flow to the gateway's stack, which is left out.
func (d *Domain) SinkCarrier(machine, network string) *Carrier {
	d.gateway.stack = func([]byte, *packet.Info) {}
	return d.Carrier(machine, network)
}

// RouteSize is what flow's TestSize takes a Value to have.
const RouteSize = unsafe.Sizeof(route{})
