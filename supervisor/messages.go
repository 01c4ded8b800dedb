package supervisor

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"vz.test/vz/config"
	"vz.test/vz/faults"
	"vz.test/vz/guest/wire"
	"vz.test/vz/netstack"
	"vz.test/vz/supervisor/api/vzv1"
	"vz.test/vz/supervisor/receipt"
)

// What the rooms say, in the API's words.

func (l *live) processMessages() []*vzv1.Process {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []*vzv1.Process
	for _, name := range sorted(l.processes) {
		all = append(all, processMessage(l.name, l.processes[name]))
	}
	return all
}

func pathMessages(paths []netstack.Path) []*vzv1.Path {
	var all []*vzv1.Path
	for _, p := range paths {
		m := &vzv1.Path{Name: p.Name, From: strings.Join(p.From, ","), To: strings.Join(p.To, ","), Network: p.Network,
			Protocol: p.Protocol, Implicit: p.Kind != netstack.PathDeclared}
		for _, r := range p.Ports {
			if r.First == r.Last {
				m.Ports = append(m.Ports, fmt.Sprint(r.First))
			} else {
				m.Ports = append(m.Ports, fmt.Sprintf("%d-%d", r.First, r.Last))
			}
		}
		all = append(all, m)
	}
	return all
}

func processEvent(machine string, p *wire.ProcessStatus) *vzv1.Event {
	return &vzv1.Event{Event: &vzv1.Event_Process{Process: processMessage(machine, p)}}
}

func processMessage(machine string, p *wire.ProcessStatus) *vzv1.Process {
	state := strings.ToLower(strings.TrimPrefix(p.GetState().String(), "STATE_"))
	return &vzv1.Process{Machine: machine, Name: p.GetName(), State: state, Pid: p.GetPid(), Restarts: p.GetRestarts(),
		ExitCode: p.GetExitCode(), Signal: p.GetSignal(), Message: p.GetMessage()}
}

func receiptMessage(r receipt.Receipt) *vzv1.Receipt {
	return &vzv1.Receipt{Sequence: r.Sequence, Kind: r.Kind, At: timestamppb.New(r.At), BodyJson: string(r.Body),
		Hash: r.Hash, Previous: r.Previous, Signature: r.Signature}
}

func headMessage(h receipt.Head) *vzv1.ReceiptHead {
	return &vzv1.ReceiptHead{Count: h.Count, Hash: h.Hash, Signature: h.Signature, PublicKey: h.PublicKey}
}

func refusalMessage(r netstack.Refusal) *vzv1.Refusal {
	destination := r.Destination.String()
	if r.Destination.Port() == 0 {
		destination = r.Destination.Addr().String()
	}
	return &vzv1.Refusal{At: timestamppb.New(r.Last), FirstAt: timestamppb.New(r.First), Machine: r.Machine, Network: r.Network,
		Protocol: protocolName(r.Protocol), Destination: destination, DestinationName: r.Name,
		Reason: r.Reason.String(), Explanation: r.Reason.Explain(), Count: r.Count}
}

func unsupportedMessage(e *config.UnsupportedError) *vzv1.UnsupportedCapability {
	return &vzv1.UnsupportedCapability{Capability: e.Capability, Host: e.Host, Target: e.Target, Profile: e.Profile,
		Status: string(e.Status), Pointer: e.Pointer}
}

func protocolName(number uint8) string {
	switch number {
	case 1:
		return "icmp"
	case 6:
		return "tcp"
	case 17:
		return "udp"
	}
	return strconv.Itoa(int(number))
}

func flowMessage(f netstack.FlowInfo) *vzv1.Flow {
	m := &vzv1.Flow{Id: f.Serial, Path: f.Path, Protocol: protocolName(f.Protocol), Source: f.From.String(), Destination: f.To.String(),
		SourceMachine: f.Source, DestinationMachine: f.Destination, State: f.State,
		PacketsForward: f.Request.Packets, BytesForward: f.Request.Bytes, PacketsReturn: f.Response.Packets, BytesReturn: f.Response.Bytes}
	if f.Public.IsValid() {
		m.TranslatedSource = f.Public.String()
	}
	return m
}

func faultSpec(r *vzv1.StartFaultRequest) faults.Spec {
	spec := faults.Spec{Name: r.GetName(), Path: r.GetSpec().GetPath(), Direction: r.GetSpec().GetDirection(), Seed: r.GetSpec().GetSeed(),
		At: millis(r.GetSpec().GetAtMillis()), TTL: millis(r.GetSpec().GetTtlMillis())}
	if l := r.GetSpec().GetLatency(); l != nil {
		spec.Latency = &faults.Latency{Delay: millis(l.GetDelayMillis())}
	}
	if l := r.GetSpec().GetLoss(); l != nil {
		spec.Loss = &faults.Loss{Probability: l.GetProbability()}
	}
	return spec
}

// millis does not overflow: what is too long is refused by the engine.
func millis(n uint64) time.Duration {
	return time.Duration(min(n, 1<<40)) * time.Millisecond
}

func faultMessage(f faults.Status) *vzv1.Fault {
	m := &vzv1.Fault{FaultId: f.ID, Name: f.Name, State: f.State, Origin: f.Origin,
		RemainingMillis: uint64(f.Remaining.Milliseconds()), HealedWhy: f.HealedWhy,
		Spec: &vzv1.FaultSpec{Path: f.Spec.Path, Direction: f.Spec.Direction, Seed: f.Spec.Seed,
			AtMillis: uint64(f.Spec.At.Milliseconds()), TtlMillis: uint64(f.Spec.TTL.Milliseconds())},
		Effect: &vzv1.FaultEffect{Matched: f.Effect.Matched, Decided: f.Effect.Decided, Applied: f.Effect.Applied,
			Overflowed: f.Effect.Overflowed, FirstEffectMillis: uint64(f.Effect.First.Milliseconds()), LastEffectMillis: uint64(f.Effect.Last.Milliseconds())},
	}
	if f.Spec.Latency != nil {
		m.Spec.Latency = &vzv1.LatencySpec{DelayMillis: uint64(f.Spec.Latency.Delay.Milliseconds())}
	}
	if f.Spec.Loss != nil {
		m.Spec.Loss = &vzv1.LossSpec{Probability: f.Spec.Loss.Probability}
	}
	if !f.ArmedAt.IsZero() {
		m.ArmedAt = timestamppb.New(f.ArmedAt)
	}
	if !f.HealedAt.IsZero() {
		m.HealedAt = timestamppb.New(f.HealedAt)
	}
	return m
}
