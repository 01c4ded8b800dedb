// Package netstack is the route domain: the one L3 world of an Environment,
// through which every frame of every Machine goes.
//
// Use: New from a Spec, Attach a link.Port for each attachment of a Machine
// that runs, Listen for what the gateway and the edge serve, Update when the
// definition changes, Impair a path. A frame's way is forward.go, top to
// bottom.
//
// Every frame belongs to one port, and to one path or one counted Reason.
// Machine to Machine never enters the gateway's stack (package ipstack); what
// is addressed to a gateway or an endpoint does.
//
// What it does not: it starts no Machine, serves no DNS or HTTP, decides no
// fault (a Conditioner does), reaches nothing outside the Environment, and
// carries IPv4 only so far.
//
// # Goroutines and locks
//
// Each port has one goroutine, which carries a frame all the way to the write
// on the other port; the gateway's stack calls in with goroutines of its own.
// One more expires flows and reports refusals. Domain.mu guards the world, the
// compiled Spec: read-locked to open a flow, locked to replace the world; an
// established flow takes only a read lock of its shard of the flow table. No
// lock is held across a write to a port or a call into the stack.
package netstack
