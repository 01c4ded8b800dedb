package flow

import (
	"sync/atomic"

	"vz.test/vz/netstack/packet"
)

// tracker follows a TCP connection as far as its timeout needs it, from both
// directions' goroutines. It believes what it sees: a Machine can't send as
// another, so only the two ends of a connection can end it.
//
//	opening ──SYN,ACK back, ACK──► established ──both FINs──► closing ──both acked──► closed
//	   └───────────────────────────── RST ─────────────────────────────────────────────► closed
type tracker struct {
	bits atomic.Uint32
	fins [2]atomic.Uint32 // by direction: the sequence number behind its FIN
}

const (
	answered    = 1 << iota // SYN,ACK came back
	established             // and was acknowledged
	reset
	finRequest // a FIN was sent; finRequest<<direction
	finResponse
	ackedRequest // and acknowledged by the other side
	ackedResponse
)

func (t *tracker) see(direction packet.Direction, info *packet.Info) {
	had := t.bits.Load()
	bits := had
	flags := info.TCPFlags
	switch {
	case flags&packet.RST != 0:
		bits |= reset
	case flags&packet.SYN != 0:
		if direction == packet.Response && flags&packet.ACK != 0 {
			bits |= answered
		}
	case direction == packet.Request && had&answered != 0:
		bits |= established
	}
	if flags&packet.FIN != 0 {
		t.fins[direction].Store(info.Sequence + uint32(info.PayloadLen()) + 1)
		bits |= finRequest << direction
	}
	other := direction ^ 1
	if had&(finRequest<<other) != 0 && flags&packet.ACK != 0 &&
		int32(info.Acknowledgement-t.fins[other].Load()) >= 0 {
		bits |= ackedRequest << other
	}
	if bits != had {
		t.bits.Or(bits)
	}
}

// State is where a TCP connection stands; other protocols' flows are Open.
type State uint8

const (
	Opening State = iota
	Open
	Closing // both sides have sent their FIN
	Closed  // and both are acknowledged, or one side has reset it
)

func (s State) String() string {
	return [...]string{"opening", "open", "closing", "closed"}[s&3]
}

func (t *tracker) state() State {
	switch bits := t.bits.Load(); {
	case bits&reset != 0, bits&ackedRequest != 0 && bits&ackedResponse != 0:
		return Closed
	case bits&finRequest != 0 && bits&finResponse != 0:
		return Closing
	case bits&established != 0:
		return Open
	}
	return Opening
}
