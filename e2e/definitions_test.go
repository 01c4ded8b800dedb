//go:build linux

package e2e

import (
	"testing"

	"github.com/stretchr/testify/require"

	"vz.test/vz/config"
)

// shop is examples/shop.
func shop(t *testing.T) *config.Definition {
	t.Helper()
	definition, _, err := config.Load("../examples/shop/vz.json")
	require.NoError(t, err)
	return copyOf(t, definition)
}

// copyOf is a definition that may be changed.
func copyOf(t *testing.T, definition *config.Definition) *config.Definition {
	t.Helper()
	text, err := definition.JSON()
	require.NoError(t, err)
	again, err := config.Parse(text)
	require.NoError(t, err)
	return again
}

// host is a namespace Machine over the host's tools.
func host(networks ...string) config.Machine {
	docker := false
	m := config.Machine{
		Target:    config.Target{OS: "linux", Arch: "host", Image: "host"},
		Profile:   "developer",
		Docker:    &docker,
		Isolation: "namespace",
		Processes: map[string]config.Process{},
	}
	for _, name := range networks {
		m.Networks = append(m.Networks, config.Attachment{Name: name})
	}
	return m
}

// project is a definition of these Machines on one private network.
func project(machines map[string]config.Machine) *config.Definition {
	return &config.Definition{
		SchemaVersion: 1,
		ProjectID:     "prj_01kbn3k8v7q2w5x9y4z6c1d0aa",
		Name:          "e2e",
		Networks:      map[string]config.Network{"net": {Kind: config.NetworkPrivate, CIDR: "10.77.0.0/24", Refuse: "reset"}},
		Machines:      machines,
	}
}

// sole is one Machine, called one, with nothing to do.
func sole() *config.Definition {
	return project(map[string]config.Machine{"one": host("net")})
}

// echo is a process that says its greeting to whoever connects, and then
// everything that it hears.
func echo(greeting string, port int) config.Process {
	return config.Process{
		Command: []string{"python3", "-u", "-c", `
import socketserver, sys

class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        self.wfile.write(sys.argv[1].encode() + b"\n")
        for line in self.rfile:
            self.wfile.write(line)

socketserver.ThreadingTCPServer.allow_reuse_address = True
socketserver.ThreadingTCPServer.daemon_threads = True
socketserver.ThreadingTCPServer(("", int(sys.argv[2])), Echo).serve_forever()
`, greeting, itoa(port)},
		Restart: "on_failure",
		Ready:   &config.Ready{TCPPort: port},
	}
}

// path joins two Machines for one TCP port of net.
func path(name, from, to string, port int) config.Path {
	return config.Path{Name: name, From: from, To: to, Network: "net", Protocol: "tcp",
		Ports: []config.Port{{First: uint16(port), Last: uint16(port)}}}
}

// hear connects and prints the first line that comes, or what the kernel says.
const hear = `
import socket, sys
try:
    s = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20)
    print(s.makefile().readline().strip())
except OSError as e:
    print(e.strerror or e)
`

// roundTrip prints how many milliseconds a connect takes.
const roundTrip = `
import socket, sys, time
began = time.monotonic()
socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30)
print((time.monotonic() - began) * 1000)
`
