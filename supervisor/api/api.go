// Package api serves the typed resources of one Environment on a unix socket:
// connect, gRPC and JSON by curl on the same address, and watch and logs as
// plain GET streams of NDJSON too.
//
// It knows transports, peers and encodings. What the resources are is the
// Backend's, which the supervisor implements. It serves its own Environment
// and nothing else; creating, listing and selecting are supervisor/registry's.
package api

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"vz.test/vz/guest/wire"
	"vz.test/vz/supervisor/api/vzv1"
	"vz.test/vz/supervisor/api/vzv1/vzv1connect"
)

// maxRequest bounds one message from a client in bytes. The largest is the
// text of a definition.
const maxRequest = 4 << 20

// A Backend is the Environment behind the API. Calls may come at any time and
// in parallel. Errors are *Problem where a person is to read them. A send that
// fails means the client is gone; ctx ends then too.
type Backend interface {
	Environment(ctx context.Context) (*vzv1.Environment, error)
	Watch(ctx context.Context, replay bool, send func(*vzv1.Event) error) error
	Reconcile(ctx context.Context, r *vzv1.ReconcileRequest, send func(*vzv1.Event) error) error
	Stop(ctx context.Context, send func(*vzv1.Event) error) error
	Delete(ctx context.Context, send func(*vzv1.Event) error) error

	Machine(ctx context.Context, selector string) (*vzv1.Machine, error)
	StartMachine(ctx context.Context, selector string, send func(*vzv1.Event) error) error
	StopMachine(ctx context.Context, selector string, send func(*vzv1.Event) error) error
	Exec(ctx context.Context, first *vzv1.ExecRequest, receive func() (*wire.ExecRequest, error), send func(*vzv1.ExecResponse) error) error

	Flows(ctx context.Context) ([]*vzv1.Flow, error)
	Refusals(ctx context.Context) (*vzv1.ListRefusalsResponse, error)
	Queries(ctx context.Context) ([]*vzv1.DNSQuery, error)

	StartFault(ctx context.Context, r *vzv1.StartFaultRequest) (*vzv1.Fault, error)
	Fault(ctx context.Context, selector string) (*vzv1.Fault, error)
	HealFault(ctx context.Context, selector string) (*vzv1.Fault, error)

	Logs(ctx context.Context, r *vzv1.ProcessLogsRequest, send func(*wire.LogChunk) error) error

	Executions(ctx context.Context) ([]*vzv1.Execution, error)
	CancelExecution(ctx context.Context, id string) error

	Receipts(ctx context.Context, after uint64) (*vzv1.ListReceiptsResponse, error)
}

// Serve answers on l until ctx ends; then it lets calls under way finish for
// up to grace. It closes l. The caller has seen to it that l is private to its
// owner (see Private).
func Serve(ctx context.Context, l net.Listener, backend Backend, grace time.Duration) error {
	server := &http.Server{
		Handler:           Handler(backend),
		ReadHeaderTimeout: 10 * time.Second,
		Protocols:         protocols(),
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: 1000, // execs run in parallel on one connection
			// A window as large as an exec's output needs, so that 1 GiB
			// through stdout does not stop for acknowledgements.
			MaxReceiveBufferPerStream:     1 << 20,
			MaxReceiveBufferPerConnection: 16 << 20,
		},
	}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(l) }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), grace)
	defer cancel()
	if err := server.Shutdown(stop); err != nil {
		server.Close()
	}
	<-failed
	return nil
}

// protocols are HTTP/1.1 for curl and HTTP/2 in the clear for streams that go
// both ways.
func protocols() *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	return p
}

// Handler is the API as one HTTP handler.
func Handler(backend Backend) http.Handler {
	mux := http.NewServeMux()
	options := []connect.HandlerOption{
		connect.WithReadMaxBytes(maxRequest),
		connect.WithInterceptors(problems{}),
		connect.WithCodec(strictJSON("json")),
		connect.WithCodec(strictJSON("json; charset=utf-8")),
	}
	mux.Handle(vzv1connect.NewEnvironmentServiceHandler(environments{backend}, options...))
	mux.Handle(vzv1connect.NewMachineServiceHandler(machines{backend}, options...))
	mux.Handle(vzv1connect.NewNetworkServiceHandler(networks{backend}, options...))
	mux.Handle(vzv1connect.NewFaultServiceHandler(faults{backend}, options...))
	mux.Handle(vzv1connect.NewProcessServiceHandler(processes{backend}, options...))
	mux.Handle(vzv1connect.NewExecutionServiceHandler(executions{backend}, options...))
	mux.Handle(vzv1connect.NewReceiptServiceHandler(receipts{backend}, options...))
	mux.HandleFunc("GET /v1/events", func(w http.ResponseWriter, r *http.Request) {
		replay, _ := strconv.ParseBool(r.URL.Query().Get("replay"))
		ndjson(w, func(send func(proto.Message) error) error {
			return backend.Watch(r.Context(), replay, func(e *vzv1.Event) error { return send(e) })
		})
	})
	mux.HandleFunc("GET /v1/logs", func(w http.ResponseWriter, r *http.Request) {
		query := r.URL.Query()
		follow, _ := strconv.ParseBool(query.Get("follow"))
		request := &vzv1.ProcessLogsRequest{Machine: query.Get("machine"), Process: query.Get("process"), Follow: follow}
		ndjson(w, func(send func(proto.Message) error) error {
			return backend.Logs(r.Context(), request, func(c *wire.LogChunk) error { return send(c) })
		})
	})
	return mux
}

// ndjson writes each message that stream sends as one line of JSON. An error
// before the first line is the reply's status, one after it the last line.
func ndjson(w http.ResponseWriter, stream func(send func(proto.Message) error) error) {
	begun := false
	flush := http.NewResponseController(w)
	err := stream(func(m proto.Message) error {
		line, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
		if err != nil {
			return err
		}
		if !begun {
			w.Header().Set("Content-Type", "application/x-ndjson")
			begun = true
		}
		if _, err := w.Write(append(line, '\n')); err != nil {
			return err
		}
		return flush.Flush()
	})
	if err == nil || errors.Is(err, context.Canceled) {
		return
	}
	line, _ := protojson.MarshalOptions{UseProtoNames: true}.Marshal(AsMessage(err))
	if !begun {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusBadRequest)
	}
	w.Write(append(line, '\n'))
}

// problems turns every handler's error into one that carries its Problem.
type problems struct{}

func (problems) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		response, err := next(ctx, r)
		return response, toConnect(err)
	}
}

func (problems) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (problems) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		return toConnect(next(ctx, conn))
	}
}

type environments struct{ backend Backend }

func (s environments) Get(ctx context.Context, _ *connect.Request[vzv1.GetEnvironmentRequest]) (*connect.Response[vzv1.Environment], error) {
	return reply(s.backend.Environment(ctx))
}

func (s environments) Watch(ctx context.Context, r *connect.Request[vzv1.WatchEnvironmentRequest], out *connect.ServerStream[vzv1.Event]) error {
	// Headers go out at once, so that a client knows it is subscribed before
	// the first event.
	if err := out.Send(nil); err != nil {
		return err
	}
	return s.backend.Watch(ctx, r.Msg.GetReplay(), out.Send)
}

func (s environments) Reconcile(ctx context.Context, r *connect.Request[vzv1.ReconcileRequest], out *connect.ServerStream[vzv1.Event]) error {
	return s.backend.Reconcile(ctx, r.Msg, out.Send)
}

func (s environments) Stop(ctx context.Context, _ *connect.Request[vzv1.StopEnvironmentRequest], out *connect.ServerStream[vzv1.Event]) error {
	return s.backend.Stop(ctx, out.Send)
}

func (s environments) Delete(ctx context.Context, _ *connect.Request[vzv1.DeleteEnvironmentRequest], out *connect.ServerStream[vzv1.Event]) error {
	return s.backend.Delete(ctx, out.Send)
}

type machines struct{ backend Backend }

func (s machines) Get(ctx context.Context, r *connect.Request[vzv1.GetMachineRequest]) (*connect.Response[vzv1.Machine], error) {
	return reply(s.backend.Machine(ctx, r.Msg.GetMachine()))
}

func (s machines) List(ctx context.Context, _ *connect.Request[vzv1.ListMachinesRequest]) (*connect.Response[vzv1.ListMachinesResponse], error) {
	return project(ctx, s.backend, func(e *vzv1.Environment) *vzv1.ListMachinesResponse {
		return &vzv1.ListMachinesResponse{Machines: e.GetMachines()}
	})
}

func (s machines) Start(ctx context.Context, r *connect.Request[vzv1.StartMachineRequest], out *connect.ServerStream[vzv1.Event]) error {
	return s.backend.StartMachine(ctx, r.Msg.GetMachine(), out.Send)
}

func (s machines) Stop(ctx context.Context, r *connect.Request[vzv1.StopMachineRequest], out *connect.ServerStream[vzv1.Event]) error {
	return s.backend.StopMachine(ctx, r.Msg.GetMachine(), out.Send)
}

func (s machines) Exec(ctx context.Context, stream *connect.BidiStream[vzv1.ExecRequest, vzv1.ExecResponse]) error {
	first, err := stream.Receive()
	if err != nil {
		return err
	}
	pending := first.GetInput()
	receive := func() (*wire.ExecRequest, error) {
		for {
			if input := pending; input != nil {
				pending = nil
				return input, nil
			}
			next, err := stream.Receive()
			if errors.Is(err, io.EOF) {
				return nil, io.EOF
			}
			if err != nil {
				return nil, err
			}
			pending = next.GetInput()
		}
	}
	return s.backend.Exec(ctx, first, receive, stream.Send)
}

func (s machines) GetCapabilities(ctx context.Context, r *connect.Request[vzv1.GetMachineRequest]) (*connect.Response[vzv1.Capabilities], error) {
	m, err := s.backend.Machine(ctx, r.Msg.GetMachine())
	return reply(m.GetCapabilities(), err)
}

type networks struct{ backend Backend }

func (s networks) ListNetworks(ctx context.Context, _ *connect.Request[vzv1.ListRequest]) (*connect.Response[vzv1.ListNetworksResponse], error) {
	return project(ctx, s.backend, func(e *vzv1.Environment) *vzv1.ListNetworksResponse {
		return &vzv1.ListNetworksResponse{Networks: e.GetNetworks()}
	})
}

func (s networks) ListPaths(ctx context.Context, _ *connect.Request[vzv1.ListRequest]) (*connect.Response[vzv1.ListPathsResponse], error) {
	return project(ctx, s.backend, func(e *vzv1.Environment) *vzv1.ListPathsResponse {
		return &vzv1.ListPathsResponse{Paths: e.GetPaths()}
	})
}

func (s networks) ListEndpoints(ctx context.Context, _ *connect.Request[vzv1.ListRequest]) (*connect.Response[vzv1.ListEndpointsResponse], error) {
	return project(ctx, s.backend, func(e *vzv1.Environment) *vzv1.ListEndpointsResponse {
		return &vzv1.ListEndpointsResponse{Endpoints: e.GetEndpoints()}
	})
}

func (s networks) ListFlows(ctx context.Context, _ *connect.Request[vzv1.ListRequest]) (*connect.Response[vzv1.ListFlowsResponse], error) {
	flows, err := s.backend.Flows(ctx)
	return reply(&vzv1.ListFlowsResponse{Flows: flows}, err)
}

func (s networks) ListRefusals(ctx context.Context, _ *connect.Request[vzv1.ListRequest]) (*connect.Response[vzv1.ListRefusalsResponse], error) {
	return reply(s.backend.Refusals(ctx))
}

func (s networks) ListQueries(ctx context.Context, _ *connect.Request[vzv1.ListRequest]) (*connect.Response[vzv1.ListQueriesResponse], error) {
	queries, err := s.backend.Queries(ctx)
	return reply(&vzv1.ListQueriesResponse{Queries: queries}, err)
}

type faults struct{ backend Backend }

func (s faults) Start(ctx context.Context, r *connect.Request[vzv1.StartFaultRequest]) (*connect.Response[vzv1.Fault], error) {
	return reply(s.backend.StartFault(ctx, r.Msg))
}

func (s faults) Get(ctx context.Context, r *connect.Request[vzv1.GetFaultRequest]) (*connect.Response[vzv1.Fault], error) {
	return reply(s.backend.Fault(ctx, r.Msg.GetFaultId()))
}

func (s faults) List(ctx context.Context, _ *connect.Request[vzv1.ListRequest]) (*connect.Response[vzv1.ListFaultsResponse], error) {
	return project(ctx, s.backend, func(e *vzv1.Environment) *vzv1.ListFaultsResponse {
		return &vzv1.ListFaultsResponse{Faults: e.GetFaults()}
	})
}

func (s faults) Heal(ctx context.Context, r *connect.Request[vzv1.HealFaultRequest]) (*connect.Response[vzv1.Fault], error) {
	return reply(s.backend.HealFault(ctx, r.Msg.GetFaultId()))
}

type processes struct{ backend Backend }

func (s processes) List(ctx context.Context, r *connect.Request[vzv1.ListProcessesRequest]) (*connect.Response[vzv1.ListProcessesResponse], error) {
	return project(ctx, s.backend, func(e *vzv1.Environment) *vzv1.ListProcessesResponse {
		response := new(vzv1.ListProcessesResponse)
		for _, m := range e.GetMachines() {
			if want := r.Msg.GetMachine(); want == "" || want == m.GetName() || want == m.GetMachineId() {
				response.Processes = append(response.Processes, m.GetProcesses()...)
			}
		}
		return response
	})
}

func (s processes) Logs(ctx context.Context, r *connect.Request[vzv1.ProcessLogsRequest], out *connect.ServerStream[wire.LogChunk]) error {
	return s.backend.Logs(ctx, r.Msg, out.Send)
}

type executions struct{ backend Backend }

func (s executions) List(ctx context.Context, _ *connect.Request[vzv1.ListRequest]) (*connect.Response[vzv1.ListExecutionsResponse], error) {
	list, err := s.backend.Executions(ctx)
	return reply(&vzv1.ListExecutionsResponse{Executions: list}, err)
}

func (s executions) Cancel(ctx context.Context, r *connect.Request[vzv1.CancelExecutionRequest]) (*connect.Response[vzv1.CancelExecutionResponse], error) {
	return reply(&vzv1.CancelExecutionResponse{}, s.backend.CancelExecution(ctx, r.Msg.GetExecutionId()))
}

type receipts struct{ backend Backend }

func (s receipts) List(ctx context.Context, r *connect.Request[vzv1.ListReceiptsRequest]) (*connect.Response[vzv1.ListReceiptsResponse], error) {
	return reply(s.backend.Receipts(ctx, r.Msg.GetAfterSequence()))
}

func (s receipts) Head(ctx context.Context, _ *connect.Request[vzv1.ListRequest]) (*connect.Response[vzv1.ReceiptHead], error) {
	all, err := s.backend.Receipts(ctx, 0)
	return reply(all.GetHead(), err)
}

// reply is a message or an error as connect wants them.
func reply[T any](message *T, err error) (*connect.Response[T], error) {
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(message), nil
}

// project answers with a part of the aggregate, so that a list and the whole
// never say different things.
func project[T any](ctx context.Context, backend Backend, part func(*vzv1.Environment) *T) (*connect.Response[T], error) {
	environment, err := backend.Environment(ctx)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(part(environment)), nil
}
