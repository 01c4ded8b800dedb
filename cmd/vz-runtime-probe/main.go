// Command vz-runtime-probe shows what a running supervisor knows, as JSON
// lines. It connects to a living one and never starts any.
//
//	vz-runtime-probe                     the aggregate, then events as they come
//	vz-runtime-probe --once              the aggregate
//	vz-runtime-probe refusals            drop counters and refusals with reasons
//	vz-runtime-probe fault start …       impair a path for a while
//	vz-runtime-probe receipts --verify   check the evidence
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"github.com/alecthomas/kong"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"vz.test/vz/guest/wire"
	"vz.test/vz/internal/version"
	"vz.test/vz/supervisor/api/vzv1"
	"vz.test/vz/supervisor/client"
	"vz.test/vz/supervisor/receipt"
	"vz.test/vz/supervisor/registry"
)

type commandLine struct {
	Environment *string          `short:"e" placeholder:"E" help:"The Environment, by ID or name; else VZ_ENVIRONMENT_ID, else this worktree's binding."`
	Version     kong.VersionFlag `help:"Print the version."`

	Watch    watchCommand    `cmd:"" default:"withargs" help:"The aggregate, then events as they come (the default)."`
	Flows    flowsCommand    `cmd:"" help:"The flows that are tracked now."`
	Refusals refusalsCommand `cmd:"" help:"Drop counters, and the most recent refusals with their reasons."`
	Queries  queriesCommand  `cmd:"" help:"The most recent DNS questions; for denied names, why."`
	Paths    pathsCommand    `cmd:"" help:"Declared and implicit paths with their counters."`
	Logs     logsCommand     `cmd:"" help:"What a declared process wrote."`
	Fault    struct {
		Start faultStartCommand `cmd:"" help:"Impair a path from now on, for at most its TTL."`
		List  faultListCommand  `cmd:"" help:"Faults with their effect so far."`
		Heal  faultHealCommand  `cmd:"" help:"End a fault before its time."`
	} `cmd:"" help:"Impair paths."`
	Receipts receiptsCommand `cmd:"" help:"The signed, chained evidence."`
}

func main() {
	var line commandLine
	parser := kong.Must(&line, kong.Name("vz-runtime-probe"),
		kong.Description("Shows what a running supervisor knows, as JSON lines. It never starts one."),
		kong.Vars{"version": version.Version()}, kong.ConfigureHelp(kong.HelpOptions{Compact: true}))
	parsed, err := parser.Parse(os.Args[1:])
	if err != nil {
		fmt.Fprintf(os.Stderr, "vz-runtime-probe: %v; see %s --help\n", err, helped(err))
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	parsed.BindTo(ctx, (*context.Context)(nil))
	err = parsed.Run(&line)
	if err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintf(os.Stderr, "vz-runtime-probe: %v\n", client.Problem(err))
		os.Exit(1)
	}
}

// helped is the command whose help has what a usage error is about; of watch,
// the default, only when it was said.
func helped(err error) string {
	if wrong, ok := errors.AsType[*kong.ParseError](err); ok {
		if at := wrong.Context.Selected(); at != nil && slices.Contains(os.Args[1:], at.Name) {
			return at.FullPath()
		}
	}
	return "vz-runtime-probe"
}

// selected is the Environment that the flags select.
func (l *commandLine) selected() (*registry.Registry, *registry.Selection, error) {
	r, err := registry.Open(registry.Options{Warn: func(err error) { fmt.Fprintf(os.Stderr, "vz-runtime-probe: warning: %v\n", err) }})
	if err != nil {
		return nil, nil, err
	}
	s, err := client.Place{Registry: r, Environment: l.Environment}.Select()
	return r, s, err
}

// connect speaks to the selected Environment's supervisor.
func (l *commandLine) connect(ctx context.Context) (*client.Client, *vzv1.Environment, error) {
	r, s, err := l.selected()
	if err != nil {
		return nil, nil, err
	}
	return client.Connect(ctx, r, s.EnvironmentID)
}

// print writes messages, one line each. protojson adds spaces at random so that
// nobody relies on its bytes; here lines are for grep, so they are made plain.
func print[T proto.Message](messages ...T) error {
	for _, m := range messages {
		text, err := protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: true}.Marshal(m)
		if err != nil {
			return err
		}
		plain, err := json.Marshal(json.RawMessage(text)) // compacts
		if err != nil {
			return err
		}
		fmt.Printf("%s\n", plain)
	}
	return nil
}

type watchCommand struct {
	Once   bool `help:"Only the aggregate."`
	Replay bool `help:"Recent events first." default:"true" negatable:""`
}

func (c *watchCommand) Run(ctx context.Context, l *commandLine) error {
	session, environment, err := l.connect(ctx)
	if err != nil {
		return err
	}
	if err := print(environment); err != nil || c.Once {
		return err
	}
	stream, err := session.Environment.Watch(ctx, connect.NewRequest(&vzv1.WatchEnvironmentRequest{Replay: c.Replay}))
	if err != nil {
		return err
	}
	for stream.Receive() {
		if err := print(stream.Msg()); err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		return nil
	}
	return stream.Err()
}

type flowsCommand struct{}

func (*flowsCommand) Run(ctx context.Context, l *commandLine) error {
	session, _, err := l.connect(ctx)
	if err != nil {
		return err
	}
	r, err := session.Networks.ListFlows(ctx, connect.NewRequest(&vzv1.ListRequest{}))
	if err != nil {
		return err
	}
	return print(r.Msg.GetFlows()...)
}

type refusalsCommand struct{}

func (*refusalsCommand) Run(ctx context.Context, l *commandLine) error {
	session, _, err := l.connect(ctx)
	if err != nil {
		return err
	}
	r, err := session.Networks.ListRefusals(ctx, connect.NewRequest(&vzv1.ListRequest{}))
	if err != nil {
		return err
	}
	return errors.Join(print(r.Msg.GetDrops()...), print(r.Msg.GetRefusals()...))
}

type queriesCommand struct{}

func (*queriesCommand) Run(ctx context.Context, l *commandLine) error {
	session, _, err := l.connect(ctx)
	if err != nil {
		return err
	}
	r, err := session.Networks.ListQueries(ctx, connect.NewRequest(&vzv1.ListRequest{}))
	if err != nil {
		return err
	}
	return print(r.Msg.GetQueries()...)
}

type pathsCommand struct{}

func (*pathsCommand) Run(ctx context.Context, l *commandLine) error {
	_, environment, err := l.connect(ctx)
	if err != nil {
		return err
	}
	return print(environment.GetPaths()...)
}

type logsCommand struct {
	Machine string `arg:"" help:"The Machine, by ID or name."`
	Process string `arg:"" help:"The process's name."`
	Follow  bool   `short:"f" help:"Go on as it writes."`
}

func (c *logsCommand) Run(ctx context.Context, l *commandLine) error {
	session, _, err := l.connect(ctx)
	if err != nil {
		return err
	}
	stream, err := session.Processes.Logs(ctx, connect.NewRequest(&vzv1.ProcessLogsRequest{Machine: c.Machine, Process: c.Process, Follow: c.Follow}))
	if err != nil {
		return err
	}
	for stream.Receive() {
		if err := writeLog(stream.Msg()); err != nil {
			return err
		}
	}
	return stream.Err()
}

func writeLog(chunk *wire.LogChunk) error {
	out := os.Stdout
	if chunk.GetStderr() {
		out = os.Stderr
	}
	_, err := out.Write(chunk.GetData())
	return err
}

type faultStartCommand struct {
	Name      string        `arg:"" help:"The fault's name; with the seed it decides the fault's fate."`
	Path      string        `required:"" help:"A declared path, or an implicit one: dns:MACHINE, backend:ENDPOINT, host:ENDPOINT."`
	Direction string        `enum:"request,response,both" default:"both" help:"request, response or both."`
	Seed      uint64        `default:"1" help:"The same seed and traffic meet the same decisions."`
	Latency   time.Duration `help:"Delay each packet by this much."`
	Loss      float64       `help:"Lose each packet with this probability, 0 to 1."`
	TTL       time.Duration `required:"" name:"ttl" help:"When the fault heals by itself."`
}

func (c *faultStartCommand) Run(ctx context.Context, l *commandLine) error {
	session, _, err := l.connect(ctx)
	if err != nil {
		return err
	}
	spec := &vzv1.FaultSpec{Path: c.Path, Direction: c.Direction, Seed: c.Seed, TtlMillis: uint64(c.TTL.Milliseconds())}
	if c.Latency != 0 {
		spec.Latency = &vzv1.LatencySpec{DelayMillis: uint64(c.Latency.Milliseconds())}
	}
	if c.Loss != 0 {
		spec.Loss = &vzv1.LossSpec{Probability: c.Loss}
	}
	r, err := session.Faults.Start(ctx, connect.NewRequest(&vzv1.StartFaultRequest{Name: c.Name, Spec: spec}))
	if err != nil {
		return err
	}
	return print(r.Msg)
}

type faultListCommand struct{}

func (*faultListCommand) Run(ctx context.Context, l *commandLine) error {
	_, environment, err := l.connect(ctx)
	if err != nil {
		return err
	}
	return print(environment.GetFaults()...)
}

type faultHealCommand struct {
	Fault string `arg:"" help:"The fault's ID or name."`
}

func (c *faultHealCommand) Run(ctx context.Context, l *commandLine) error {
	session, _, err := l.connect(ctx)
	if err != nil {
		return err
	}
	r, err := session.Faults.Heal(ctx, connect.NewRequest(&vzv1.HealFaultRequest{FaultId: c.Fault}))
	if err != nil {
		return err
	}
	return print(r.Msg)
}

type receiptsCommand struct {
	Kind   string `enum:"lifecycle,fault," default:"" help:"Only receipts of this kind: lifecycle, fault."`
	Verify bool   `help:"Check the chain, each signature and the head."`
}

func (c *receiptsCommand) Run(ctx context.Context, l *commandLine) error {
	if c.Verify {
		return c.verify(l)
	}
	session, _, err := l.connect(ctx)
	if err != nil {
		return err
	}
	r, err := session.Receipts.List(ctx, connect.NewRequest(&vzv1.ListReceiptsRequest{}))
	if err != nil {
		return err
	}
	receipts := r.Msg.GetReceipts()
	if c.Kind != "" {
		receipts = slices.DeleteFunc(receipts, func(r *vzv1.Receipt) bool { return r.GetKind() != c.Kind })
	}
	return print(receipts...)
}

// verify reads the evidence from disk: it needs no supervisor, and trusts none.
func (c *receiptsCommand) verify(l *commandLine) error {
	r, s, err := l.selected()
	if err != nil {
		return err
	}
	head, err := receipt.VerifyDir(r.ReceiptsDir(s.EnvironmentID))
	if err != nil {
		return err
	}
	fmt.Printf("verified: %d receipts of %s, head %s, key %s\n", head.Count, head.EnvironmentID, head.Hash, head.PublicKey)
	return nil
}
