package client

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
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

// Select finds an Environment that exists.
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
		end, ending, err := ask(ctx, p.Registry, selected.EnvironmentID, onEvent, func(c *Client) (*stream, error) {
			return c.Environment.Reconcile(ctx, connect.NewRequest(request))
		})
		if ending && err == nil || errors.Is(err, fs.ErrNotExist) {
			continue // it may be deleted by now, and is made anew then
		}
		if err != nil {
			return nil, err
		}
		return end.GetEnvironment(), p.Registry.Bind(definition.ProjectID, worktree, selected.EnvironmentID)
	}
}

type stream = connect.ServerStreamForClient[vzv1.Event]

// ask has long work done by an Environment's supervisor, which is started if
// none lives. ending says that the one that was asked did nothing but end, and
// has: whoever asked looks again at what there is.
func ask(ctx context.Context, r *registry.Registry, environment string, onEvent func(*vzv1.Event), call func(*Client) (*stream, error)) (end *vzv1.Progress, ending bool, err error) {
	c, err := Ensure(ctx, r, environment)
	if err != nil {
		return nil, false, err
	}
	events, err := call(c)
	if err == nil {
		end, err = Follow(events, onEvent)
	} else {
		err = Problem(err)
	}
	c.Close()             // or the supervisor's end waits a second for that of an idle connection
	var dial *net.OpError // it took the connection of Ensure, and no more
	if api.IsEnding(err) || errors.As(err, &dial) && dial.Op == "dial" {
		return nil, true, ended(ctx, r, environment)
	}
	return end, false, err
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
	_, ending, err := ask(ctx, r, environment, onEvent, func(c *Client) (*stream, error) {
		return c.Environment.Stop(ctx, connect.NewRequest(&vzv1.StopEnvironmentRequest{}))
	})
	if err != nil || ending {
		return err
	}
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
	end, ending, err := ask(ctx, r, s.EnvironmentID, onEvent, func(c *Client) (*stream, error) {
		return c.Environment.Delete(ctx, connect.NewRequest(&vzv1.DeleteEnvironmentRequest{}))
	})
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, r.Remove(s.ProjectID, s.EnvironmentID, nil)
	case err != nil:
		return nil, err
	case ending: // another's stop or delete
		return Delete(ctx, r, s, onEvent)
	}
	if err := ended(ctx, r, s.EnvironmentID); err != nil {
		return nil, err
	}
	return end.GetReceiptHead(), r.Remove(s.ProjectID, s.EnvironmentID, nil)
}
