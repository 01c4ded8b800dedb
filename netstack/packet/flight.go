package packet

// Direction is a flow's: Request from its originator, Response back to it.
type Direction uint8

const (
	Request Direction = iota
	Response
)

// A Flight is one packet on its way along a path, as a conditioner sees it.
// It belongs to the caller and is valid until the call returns.
type Flight struct {
	Direction Direction
	Flow      FlowID
	Info      *Info  // the packet's decoded headers
	Frame     []byte // from its Ethernet header on, never a super-frame, checksums complete
	To        Sink   // where it goes when it is released
}

// FlowID names a flow by what stays the same in every run of the same traffic:
// never ephemeral ports, addresses or sequence numbers.
type FlowID struct {
	Serial          uint64 // unique within the route domain; not stable between runs
	Source          string // Machine, "host" or "edge"
	Destination     string // Machine, "gateway" or "endpoint:NAME"
	Protocol        uint8  // IANA number
	DestinationPort uint16 // ICMP: 0
}

// A Sink takes a frame that was held. Deliver does not keep frame, may be
// called from any goroutine and never blocks for longer than a port write.
type Sink interface {
	Deliver(frame []byte)
}

// Verdict says what becomes of a Flight now.
type Verdict uint8

const (
	Pass Verdict = iota // goes on at once
	Held                // was copied; its Sink gets it later
	Lost                // was dropped by a fault
)
