package netstack

import "vz.test/vz/netstack/link"

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
