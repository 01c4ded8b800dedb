package supervisor

import (
	"testing"

	"vz.test/vz/config"
	"vz.test/vz/supervisor/registry"
)

func TestWhatADHCPLeaseSaysIsOfTheBoot(t *testing.T) {
	m := registry.Machine{Name: "web", Attachments: []registry.Attachment{{Network: "front", Address: "10.10.0.2"}}}
	front := registry.Network{Name: "front", CIDR: "10.10.0.0/24", Gateway: "10.10.0.1", MTU: 1500, Refuse: "reset"}
	digest := func(front registry.Network, back string) string {
		return bootDigest(config.Machine{}, m, map[string]registry.Network{"front": front, "back": {Name: "back", CIDR: back}})
	}
	booted := digest(front, "10.20.0.0/24")
	wider, narrower, silent := front, front, front
	wider.CIDR, narrower.MTU, silent.Refuse = "10.10.0.0/16", 1400, "drop"
	if digest(wider, "10.20.0.0/24") == booted || digest(narrower, "10.20.0.0/24") == booted {
		t.Error("a Machine keeps a lease that is no longer true")
	}
	if digest(silent, "10.21.0.0/24") != booted {
		t.Error("a Machine boots anew for what is not its own")
	}
}
