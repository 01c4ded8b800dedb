package config_test

import (
	"fmt"

	"vz.test/vz/config"
)

// A definition is written in Go by filling in the types, and read back by Parse
// from what JSON returns.
func ExampleDefinition() {
	no := false
	machine := func(networks ...string) config.Machine {
		m := config.Machine{
			Target:    config.Target{OS: "linux", Arch: "host", Image: "host"},
			Profile:   "developer",
			Docker:    &no,
			Isolation: "namespace",
		}
		for _, network := range networks {
			m.Networks = append(m.Networks, config.Attachment{Name: network})
		}
		return m
	}
	def := &config.Definition{
		SchemaVersion: 1,
		ProjectID:     "prj_01kbcdefghjkmnpqrstvwxyz01",
		Name:          "pair",
		Networks:      map[string]config.Network{"back": {Kind: config.NetworkPrivate, CIDR: "10.20.0.0/24"}},
		Machines:      map[string]config.Machine{"app": machine("back"), "db": machine("back")},
		Paths: []config.Path{{
			Name: "app-db", From: "app", To: "db", Network: "back",
			Protocol: "tcp", Ports: []config.Port{{First: 5432, Last: 5432}},
		}},
	}
	if err := config.Admit(def, config.Host{OS: "linux", Arch: "arm64"}); err != nil {
		fmt.Println(err)
	}

	// A mistake is found before anything is made of it.
	def.Paths[0].To = "bd"
	fmt.Println(def.Validate())

	// So is what this host and version can't do.
	def.Paths[0].To = "db"
	db := def.Machines["db"]
	db.Isolation = "vm"
	db.Target.Image = "debian:bookworm+postgresql"
	def.Machines["db"] = db
	fmt.Println(config.Admit(def, config.Host{OS: "linux", Arch: "arm64"}))
	// Output:
	// /paths/0/to: no Machine "bd" is declared; did you mean "db"?
	// /machines/db/isolation: isolation.vm is not supported for a linux developer Machine on linux/arm64 (PLANNED, matrix entry isolation.vm@linux/linux): Virtual machines by QEMU are not built yet; "isolation": "namespace" works on Linux hosts.
	// /machines/db/target/image: image.debian is not supported for a linux developer Machine on linux/arm64 (PLANNED, matrix entry image.debian): Images from Debian's packages are not built yet; image host works on Linux hosts.
}
