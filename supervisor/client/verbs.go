package client

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"

	"connectrpc.com/connect"

	"vz.test/vz/config"
	"vz.test/vz/supervisor/api"
	"vz.test/vz/supervisor/api/vzv1"
	"vz.test/vz/supervisor/registry"
)

// A Place is from where an Environment is selected: a user's state and a
// directory.
type Place struct {
	Registry *registry.Registry
	Dir      string              // empty: the working directory
	Getenv   func(string) string // nil: os.Getenv
	// Environment is --environment, an ID or a name; nil when not given.
	Environment *string
}

func (p *Place) fill() error {
	if p.Getenv == nil {
		p.Getenv = os.Getenv
	}
	if p.Dir != "" {
		return nil
	}
	dir, err := os.Getwd()
	p.Dir = dir
	return err
}

// Select finds an Environment that exists (CONTRACT §1).
func (p Place) Select() (*registry.Selection, error) {
	if err := p.fill(); err != nil {
		return nil, err
	}
	worktree, err := registry.FindWorktree(p.Dir, p.Getenv)
	if err != nil {
		return nil, err
	}
	request := registry.Request{Flag: p.Environment, Env: p.Getenv("VZ_ENVIRONMENT_ID"), Worktree: worktree, ProjectID: p.project()}
	return p.Registry.SelectEnvironment(request)
}

// project is that of the nearest vz.json. One that is missing or invalid is
// none: then IDs and bindings still select, and names say that they can't.
func (p Place) project() string {
	path, err := registry.FindDefinition(p.Dir)
	if err != nil {
		return ""
	}
	definition, _, err := config.Load(path)
	if err != nil {
		return ""
	}
	return definition.ProjectID
}

// Record is what is recorded of the selected Environment, for what needs one.
func (p Place) Record() (*registry.Record, error) {
	s, err := p.Select()
	if err != nil {
		return nil, err
	}
	return s.Record, s.Err
}

// Up brings the Environment of a place up: it admits the nearest vz.json
// whole, selects or makes the Environment, starts its supervisor, reconciles,
// and on success binds the worktree to it. onEvent is told each step. The
// error is config.Errors or config.Unsupported when nothing was changed.
func Up(ctx context.Context, p Place, onEvent func(*vzv1.Event)) (*vzv1.Environment, error) {
	if err := p.fill(); err != nil {
		return nil, err
	}
	path, err := registry.FindDefinition(p.Dir)
	if err != nil {
		return nil, err
	}
	text, err := readDefinition(path)
	if err != nil {
		return nil, err
	}
	definition, err := config.Check(path, text, config.CurrentHost())
	if err != nil {
		return nil, err
	}
	worktree, err := registry.FindWorktree(p.Dir, p.Getenv)
	if err != nil {
		return nil, err
	}
	prepare := registry.UpRequest{ProjectName: definition.Name, Request: registry.Request{
		Flag: p.Environment, Env: p.Getenv("VZ_ENVIRONMENT_ID"), Worktree: worktree, ProjectID: definition.ProjectID,
	}}
	request := &vzv1.ReconcileRequest{Definition: text, DefinitionPath: path, Worktree: worktree.Root}
	for {
		selected, _, err := p.Registry.PrepareUp(prepare)
		if err != nil {
			return nil, err
		}
		if selected.Record.State == registry.Deleting {
			// A delete was cut off, and parts may be gone already. It is
			// finished; then there is one to make, if this place may make one.
			if _, err := Delete(ctx, p.Registry, selected, onEvent); err != nil {
				return nil, err
			}
			continue
		}
		environment, err := reconcile(ctx, p.Registry, selected.EnvironmentID, request, onEvent)
		if api.IsEnding(err) || errors.Is(err, fs.ErrNotExist) {
			// Of a deleted Environment nothing may be left by then, so that
			// it is made anew.
			if err := ended(ctx, p.Registry, selected.EnvironmentID); err != nil {
				return nil, err
			}
			continue
		}
		if err != nil {
			return nil, err
		}
		return environment, p.Registry.Bind(definition.ProjectID, worktree, selected.EnvironmentID)
	}
}

func reconcile(ctx context.Context, r *registry.Registry, environment string, request *vzv1.ReconcileRequest, onEvent func(*vzv1.Event)) (*vzv1.Environment, error) {
	c, err := Ensure(ctx, r, environment)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	stream, err := c.Environment.Reconcile(ctx, connect.NewRequest(request))
	if err != nil {
		return nil, Problem(err)
	}
	end, err := Follow(stream, onEvent)
	return end.GetEnvironment(), err
}

func readDefinition(path string) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return io.ReadAll(io.LimitReader(file, config.MaxSize+1)) // one more, so that Check sees that it is too large
}

// Follow reads the events of long work to its terminal one. The work's failure
// is the error.
func Follow(stream *connect.ServerStreamForClient[vzv1.Event], onEvent func(*vzv1.Event)) (*vzv1.Progress, error) {
	defer stream.Close()
	for stream.Receive() {
		event := stream.Msg()
		onEvent(event)
		p := event.GetProgress()
		if !p.GetTerminal() {
			continue
		}
		if p.GetStatus() == vzv1.Progress_STATUS_FAILED {
			return p, api.FromMessage(connect.CodeInternal, p.GetError())
		}
		return p, nil
	}
	if err := stream.Err(); err != nil {
		return nil, Problem(err)
	}
	return nil, api.NewProblem(connect.CodeUnavailable, "the supervisor ended in the middle of the work", "", "run the command again")
}

// Stop takes an Environment down. It starts a supervisor only if a dead one
// left something to take down.
func Stop(ctx context.Context, r *registry.Registry, environment string, onEvent func(*vzv1.Event)) error {
	record, err := r.Record(environment)
	if err != nil {
		return err
	}
	locked, err := r.Locked(environment)
	if err != nil {
		return err
	}
	if !locked && (record.State == registry.Stopped || record.State == registry.Created) {
		return nil
	}
	c, err := Ensure(ctx, r, environment)
	if err != nil {
		return err
	}
	defer c.Close()
	stream, err := c.Environment.Stop(ctx, connect.NewRequest(&vzv1.StopEnvironmentRequest{}))
	if err != nil {
		return Problem(err)
	}
	if _, err = Follow(stream, onEvent); err != nil && !api.IsEnding(err) {
		return err
	}
	c.Close() // or its end waits a second for that of an idle connection
	return ended(ctx, r, environment)
}

// Delete takes everything of an Environment away and returns the final head of
// its receipts. One whose record is gone or damaged, so that no supervisor can
// start on it, is cleared away here; then there is no head.
func Delete(ctx context.Context, r *registry.Registry, s *registry.Selection, onEvent func(*vzv1.Event)) (*vzv1.ReceiptHead, error) {
	if damage := (*registry.CorruptError)(nil); errors.As(s.Err, &damage) {
		// No supervisor can run on it, but one that tries ends what is left
		// of the Machines first.
		start(ctx, r, s.EnvironmentID)
	}
	if s.Err != nil {
		return nil, r.Remove(s.ProjectID, s.EnvironmentID, nil)
	}
	c, err := Ensure(ctx, r, s.EnvironmentID)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, r.Remove(s.ProjectID, s.EnvironmentID, nil)
	}
	if err != nil {
		return nil, err
	}
	defer c.Close()
	stream, err := c.Environment.Delete(ctx, connect.NewRequest(&vzv1.DeleteEnvironmentRequest{}))
	if err != nil {
		return nil, Problem(err)
	}
	end, err := Follow(stream, onEvent)
	ending := api.IsEnding(err)
	if err != nil && !ending {
		return nil, err
	}
	c.Close() // as above
	if err := ended(ctx, r, s.EnvironmentID); err != nil {
		return nil, err
	}
	if ending { // another's stop or delete
		return Delete(ctx, r, s, onEvent)
	}
	return end.GetReceiptHead(), r.Remove(s.ProjectID, s.EnvironmentID, nil)
}
