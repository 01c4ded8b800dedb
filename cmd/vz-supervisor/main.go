// Command vz-supervisor is the process of one live Environment. "vz up" starts
// it; nobody needs to start it by hand.
//
//	vz-supervisor --environment-id env_…
//
// It finds the state directory as vz does (XDG_STATE_HOME, XDG_RUNTIME_DIR) and
// writes one line of JSON to the descriptor given by --ready-fd when its API
// answers, or says there why it never will.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/alecthomas/kong"

	"vz.test/vz/internal/version"
	"vz.test/vz/machines/namespace"
	"vz.test/vz/supervisor"
	"vz.test/vz/supervisor/launcher"
	"vz.test/vz/supervisor/registry"
)

type flags struct {
	EnvironmentID string           `required:"" help:"The Environment to supervise."`
	ReadyFd       int              `default:"0" help:"A descriptor to write one line of JSON to when the API answers."`
	Agent         string           `type:"path" help:"The vz-guest binary; beside this one if left out."`
	Version       kong.VersionFlag `help:"Print the version."`
}

func main() {
	// The launcher and the first stage of a Machine are this binary as well;
	// they take their own arguments.
	if launcher.Dispatch(os.Args[1:]) {
		return
	}
	var f flags
	kong.Parse(&f, kong.Name("vz-supervisor"), kong.Description("The process of one live Environment; vz up starts it."),
		kong.Vars{"version": version.Version()})
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	ready := announce(f.ReadyFd)
	if err := run(f, log, func() { ready(nil) }); err != nil {
		log.Error("the supervisor ended", "error", err)
		ready(err)
		os.Exit(1)
	}
}

// A message is the line that a starter reads from the ready descriptor.
type message struct {
	Ready bool   `json:"ready"`
	What  string `json:"what,omitempty"`
	Why   string `json:"why,omitempty"`
	Next  string `json:"next,omitempty"`
	Held  bool   `json:"held,omitempty"` // another supervisor has the Environment
}

// announce returns what says once whether the supervisor came up.
func announce(fd int) func(error) {
	if fd == 0 {
		return func(error) {}
	}
	syscall.CloseOnExec(fd)
	pipe := os.NewFile(uintptr(fd), "ready")
	return func(err error) {
		if pipe == nil {
			return
		}
		m := message{Ready: err == nil}
		var explained registry.Explained
		if errors.As(err, &explained) {
			m.What, m.Why, m.Next = explained.Explain()
		} else if err != nil {
			m.What = err.Error()
		}
		var held *registry.HeldError
		m.Held = errors.As(err, &held)
		json.NewEncoder(pipe).Encode(m)
		pipe.Close()
		pipe = nil
	}
}

func run(f flags, log *slog.Logger, ready func()) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	r, err := registry.Open(registry.Options{Warn: func(err error) { log.Warn("worked around", "error", err) }})
	if err != nil {
		return err
	}
	if f.Agent == "" {
		self, err := os.Executable()
		if err != nil {
			return err
		}
		f.Agent = filepath.Join(filepath.Dir(self), "vz-guest")
	}
	if _, err := os.Stat(f.Agent); err != nil {
		return fmt.Errorf("the guest agent is missing: %w", err)
	}
	// The owner lock comes before everything: its holder alone may end what an
	// earlier supervisor left.
	owner, err := r.Own(ctx, f.EnvironmentID)
	if err != nil {
		return err
	}
	defer owner.Close()
	listener, err := owner.Listen()
	if err != nil {
		return err
	}
	defer listener.Close()
	// The launcher is started next: it keeps the privileges that this process
	// gives up before it reads a byte of a guest's.
	dir := r.EnvironmentDir(f.EnvironmentID)
	client, err := launcher.Start(ctx, launcher.Options{
		EnvironmentID: f.EnvironmentID, StateDir: dir, Hidden: []string{r.Root()}, Agent: f.Agent, Log: os.Stderr})
	if err != nil {
		return fmt.Errorf("starting the launcher: %w", err)
	}
	defer client.Close()
	notes, err := launcher.Confine(dir, r.RuntimeDir())
	if err != nil {
		return fmt.Errorf("giving up privileges: %w", err)
	}
	return supervisor.Run(ctx, supervisor.Options{
		Registry: r, Owner: owner, Listener: listener, Driver: namespace.New(client), DriverGone: client.Done(),
		Agent: f.Agent, Notes: notes, Version: version.Version(), Log: log, Ready: ready,
	})
}
