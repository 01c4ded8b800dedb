// Package client is how programs use vz: it selects an Environment, starts its
// supervisor where one is needed, and speaks to it on its unix socket.
//
// Use: Up, Stop, Delete and Status do what the verbs do; Ensure or Connect gives
// a Client for everything else, Client.Run among it.
//
// It links the registry and the API's messages, never the network stack; what
// an Environment is and does is its supervisor's.
package client

import (
	"context"
	"net"
	"net/http"
	"time"

	"connectrpc.com/connect"

	"vz.test/vz/supervisor/api"
	"vz.test/vz/supervisor/api/vzv1/vzv1connect"
)

// A Client speaks to the supervisor of one Environment. Its services are the
// API's; errors of theirs that a person is to read come back from Problem.
// Safe for use by several goroutines.
type Client struct {
	Environment vzv1connect.EnvironmentServiceClient
	Machines    vzv1connect.MachineServiceClient
	Networks    vzv1connect.NetworkServiceClient
	Faults      vzv1connect.FaultServiceClient
	Processes   vzv1connect.ProcessServiceClient
	Executions  vzv1connect.ExecutionServiceClient
	Receipts    vzv1connect.ReceiptServiceClient

	transport *http.Transport
}

// New speaks to the supervisor at a unix socket. It connects when first used.
func New(socket string) *Client {
	dialer := net.Dialer{Timeout: 5 * time.Second}
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, "unix", socket)
		},
		Protocols:          protocols,
		DisableCompression: true,
		HTTP2: &http.HTTP2Config{
			MaxReceiveBufferPerStream:     4 << 20,
			MaxReceiveBufferPerConnection: 32 << 20,
		},
	}
	hc := &http.Client{Transport: transport}
	const base = "http://vz"
	options := []connect.ClientOption{
		connect.WithReadMaxBytes(64 << 20),
		connect.WithAcceptCompression("gzip", nil, nil), // the socket is memory: compressing would only cost
	}
	return &Client{
		Environment: vzv1connect.NewEnvironmentServiceClient(hc, base, options...),
		Machines:    vzv1connect.NewMachineServiceClient(hc, base, options...),
		Networks:    vzv1connect.NewNetworkServiceClient(hc, base, options...),
		Faults:      vzv1connect.NewFaultServiceClient(hc, base, options...),
		Processes:   vzv1connect.NewProcessServiceClient(hc, base, options...),
		Executions:  vzv1connect.NewExecutionServiceClient(hc, base, options...),
		Receipts:    vzv1connect.NewReceiptServiceClient(hc, base, options...),
		transport:   transport,
	}
}

// Close drops idle connections. Calls under way end by their contexts.
func (c *Client) Close() { c.transport.CloseIdleConnections() }

// Problem is err as people are to read it: the *api.Problem that the
// supervisor sent, where it sent one.
func Problem(err error) error { return api.FromConnect(err) }
