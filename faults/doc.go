// Package faults is the impairment engine: it decides, from a seed, what
// becomes of each packet on an impaired path, holds the packets that are late,
// and keeps faults to their timeline and their TTL.
//
// # Use
//
// The supervisor makes one [Engine] per Environment and joins it to the route
// domain by Options.Impair: the engine hands a [Conditioner] over when the
// first fault is armed on a path and takes it back, by nil, when the last one
// has healed and nothing of its is held any more. [Engine.Declare] starts the
// definition's timeline, [Engine.Start] arms a fault at run time,
// [Engine.Heal] ends one early. Options.OnChange hears of each arming, first
// effect and healing; [Status.Receipt] is the evidence to be signed.
//
// # What is promised
//
// Decision determinism: the same definition, seed and traffic meet the same
// decision for each packet of each flow, whatever other flows, timing and
// batching do. Timing itself is not promised; the receipt says what was
// achieved. A decision is a pure function ([Decide]):
//
//	key   = HKDF-SHA256(secret: seed, salt: "vz/faults/1", info: name, revision), 16 bytes
//	flow  = SHA-256(direction ‖ source ‖ destination ‖ protocol ‖ port ‖ ordinal), 16 bytes
//	block = AES-128(key, AES-128(key, flow) ⊕ (class ‖ part ‖ attempt ‖ index))
//
// That is CBC-MAC over exactly two blocks: a PRF for messages of one fixed
// length, about 20 ns a packet with AES instructions (the inner encryption is
// kept with the flow), without allocation, and the same on every machine. HMAC
// would cost 500 ns, and hash/maphash differs between runs. A guest that knows
// its own traffic learns nothing about the decisions to come.
//
// Each kind reads its own 64-bit lane of the block, lane n being word n%2 of
// part n/2, so that a kind that is added never shifts another. Every armed
// fault sees every packet, also those that another one drops, so that neither
// does a fault that is added. testdata/golden.json freezes all this; it was
// made by another implementation. Never change it: receipts refer to it.
//
// The flow key has Machine names, protocol, destination port and the ordinal:
// the connections of those four counted since the fault was armed. Never
// ephemeral ports, addresses or initial sequence numbers. Class, index and
// attempt are described at [Class]. A receipt says "ordinal-dependent" instead
// of "exact" where the ordinal or the index hung on something that is not
// repeated: see [Status].Because.
//
// # Composition
//
// One packet meets the armed faults of its path and direction in the order of
// the table kinds (kind.go): loss before latency, so that a lost packet takes
// no room in a queue. Direction request is from the flow's originator,
// response is back to it, both is each of them once. Two faults of one kind
// whose path, direction and time overlap are refused ([OverlapError]), never
// merged, never last-wins.
//
// # Queues
//
// Late packets are copied into one queue per path and direction, bounded in
// packets and bytes; what doesn't fit is lost and counted apart
// (Effect.Overflowed). Order within a flow and direction is kept: a packet is
// due at max(when its predecessor is due, now + delay). One timer per path and
// direction, so that a slow Machine delays only its own. No lock is held while
// a frame is delivered.
//
// Arming touches packets from then on; nothing that was passed before is
// affected. Healing releases the packets that the fault held at once and in
// order, and those that come while they are released queue behind them: no
// packet is lost or overtaken by healing. Both are one short critical section
// over the whole path and wait for no traffic.
//
// # Bounds
//
// Per fault that draws: 32,768 flows of about 300 bytes, 4,096 services, and
// for each flow and direction with retransmissions 800 bytes that remember 64
// of them. Beyond, flows share one counter and older retransmissions share one
// attempt: the rate stays right, the receipt says ordinal-dependent. Per path
// and direction: Options.QueuePackets and QueueBytes. 64 faults per path,
// 1,024 pending or armed per engine; the last 1,024 healed ones are listed.
//
// # To add a kind
//
//  1. A file of its own (loss.go is the shortest): the type that Spec points
//     to, with JSON tags, and its methods check and decider.
//  2. The decider: a pure function from the packet's draws to the outcome. If
//     it draws, give it the next free lane in decision.go.
//  3. A pointer in Spec and a line in the table kinds, at its place in the
//     order of composition.
//  4. If it does to a packet what no kind did before, a field in outcome, and
//     its meaning in Conditioner.Condition.
//  5. Golden vectors for its lane (testdata/golden.py), a row in the tests.
//
// # Not here
//
// Which path a flow is on, which frames are a path's at all (ARP and DHCP are
// not), GSO: netstack cuts super-frames first. Signing and keeping receipts:
// supervisor/receipt. There is no clock and no randomness here but the
// injected.
package faults
