package supervisor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"

	"vz.test/vz/config"
	"vz.test/vz/faults"
	"vz.test/vz/machines"
	"vz.test/vz/supervisor/api"
	"vz.test/vz/supervisor/api/vzv1"
	"vz.test/vz/supervisor/registry"
)

// Reconcile makes the Environment what a definition says: only what changed is
// touched, a Machine that is down is booted, and the declared faults' timeline
// starts anew. When it fails, what came up stays up for a look.
func (s *Supervisor) Reconcile(ctx context.Context, request *vzv1.ReconcileRequest, send func(*vzv1.Event) error) error {
	definition, err := config.Check(request.GetDefinitionPath(), request.GetDefinition(), config.CurrentHost())
	if err != nil {
		refused := api.NewProblem(connect.CodeInvalidArgument, "the definition is refused", err.Error(), "")
		if first, ok := errors.AsType[*config.UnsupportedError](err); ok {
			refused.Unsupported = unsupportedMessage(first)
		}
		return refused
	}
	if record := s.snapshot(); record.ProjectID != definition.ProjectID {
		return api.NewProblem(connect.CodeFailedPrecondition, "the definition is another project's",
			fmt.Sprintf("it says %s, the Environment belongs to %s", definition.ProjectID, record.ProjectID), "")
	}
	op, done, err := s.begin(ctx, "up", send)
	if err != nil {
		return err
	}
	defer done()
	if s.snapshot().State == registry.Deleting {
		return api.NewProblem(connect.CodeFailedPrecondition, "the Environment can't be brought up", "its deletion has begun", "run vz delete to finish it, then vz up")
	}
	digest := config.Digest(request.GetDefinition())
	err = s.up(ctx, op, definition, request, digest)
	if err != nil && ctx.Err() != nil {
		err = errors.New("cancelled")
	}
	result := "ready"
	if err != nil {
		result = err.Error()
		s.update(func(r *registry.Record) { r.State, r.Message = registry.Failed, err.Error() })
	}
	body := lifecycle{Operation: "up", Result: result, Definition: digest}
	for _, m := range s.snapshot().Machines {
		body.Machines = append(body.Machines, m.Name+"="+m.Incarnation)
	}
	err = errors.Join(err, s.receipt("lifecycle", body))
	s.finish(op, err, &vzv1.Progress{})
	return nil
}

// finish sends the terminal event of an operation.
func (s *Supervisor) finish(op *operation, err error, p *vzv1.Progress) {
	p.Status = vzv1.Progress_STATUS_DONE
	if err != nil {
		s.log.Error("operation failed", "operation", op.name, "error", err)
		p.Status = vzv1.Progress_STATUS_FAILED
		p.Error = problem(op.name, err, s.registry.LogPath(s.id)).Message()
	} else if op.name != "delete" {
		p.Environment, _ = s.Environment(context.Background())
	}
	op.end(p)
}

// problem says what failed, why, and the next thing to do.
func problem(operation string, err error, log string) *api.Problem {
	if p, ok := errors.AsType[*api.Problem](err); ok {
		return p
	}
	p := api.NewProblem(connect.CodeInternal, operation+" failed", err.Error(), "")
	p.LogPath = log
	if missing, ok := errors.AsType[*machines.MissingError](err); ok {
		p.Next = missing.Remedy
	} else if explained, ok := errors.AsType[registry.Explained](err); ok {
		_, _, p.Next = explained.Explain()
	}
	if p.Next == "" {
		p.Next = "mend the cause and run the same command again; vz delete takes everything down"
	}
	return p
}

func (s *Supervisor) up(ctx context.Context, op *operation, definition *config.Definition, request *vzv1.ReconcileRequest, digest string) error {
	done := op.step("environment.plan", "")
	next := s.snapshot()
	before := next.Clone()
	if err := allocate(definition, s.driver.Name(), next); err != nil {
		return done("", err)
	}
	t, err := plan(definition, next)
	if err != nil {
		return done("", err)
	}
	if err := s.registry.SaveDefinition(next, request.GetDefinition()); err != nil {
		return done("", err)
	}
	if request.GetWorktree() != "" {
		next.Worktree = request.GetWorktree()
	}
	// Machines that are no longer declared stay in the record until they are
	// gone, or a crash would leave them to nobody.
	var leaving []registry.Machine
	for _, m := range before.Machines {
		if next.Machine(m.Name) == nil {
			leaving = append(leaving, m)
		}
	}
	err = s.update(func(r *registry.Record) {
		*r = *next.Clone()
		r.Machines = append(r.Machines, leaving...)
		r.State, r.Message = registry.Reconciling, ""
		r.Revision++
	})
	if done("", err) != nil {
		return err
	}
	for _, m := range leaving {
		if err := s.removeMachine(ctx, op, m, definition); err != nil {
			return err
		}
	}
	// A Machine whose boot-time parts changed must be down before its network
	// changes under it.
	if err := s.stopChanged(ctx, op, definition, next); err != nil {
		return err
	}
	if err := s.ensureNetwork(op, definition, t); err != nil {
		return err
	}
	if err := s.ensureMachines(ctx, op, definition, next); err != nil {
		return err
	}
	if len(definition.Faults) > 0 {
		done = op.step("faults.declare", "")
		if err := s.network.faults.Declare(faultSpecs(definition)); done(fmt.Sprintf("%d on the timeline", len(definition.Faults)), err) != nil {
			return err
		}
	} else if err := s.network.faults.Declare(nil); err != nil {
		return err
	}
	return s.update(conclude)
}

// conclude says how an Environment is whose Machines were to be brought up: one
// may have ended since, or not have been asked for.
func conclude(r *registry.Record) {
	r.State, r.Message = registry.Ready, ""
	for _, m := range r.Machines {
		if m.State != registry.MachineReady {
			r.State, r.Message = registry.Degraded, fmt.Sprintf("machine %s is %s", m.Name, m.State)
		}
	}
}

// recorded is the definition that the Environment was last brought up from.
func (s *Supervisor) recorded() (*config.Definition, error) {
	text, err := s.registry.Definition(s.snapshot())
	if err != nil {
		return nil, err
	}
	return config.Check(s.registry.DefinitionPath(s.id), text, config.CurrentHost())
}

func (s *Supervisor) removeMachine(ctx context.Context, op *operation, m registry.Machine, definition *config.Definition) error {
	if err := s.shutdown(ctx, op, m.Name, stopGrace); err != nil {
		return err
	}
	done := op.step("machine.remove", m.Name)
	err := s.driver.Remove(ctx, machines.Spec{EnvironmentID: s.id, MachineID: m.MachineID, Name: m.Name, Dir: s.registry.MachineDir(s.id, m.MachineID)})
	if err == nil {
		err = s.update(func(r *registry.Record) {
			r.Machines = slices.DeleteFunc(r.Machines, func(o registry.Machine) bool { return o.MachineID == m.MachineID })
		})
	}
	return done("", err)
}

// networks are those recorded, by name.
func (s *Supervisor) networks() map[string]registry.Network {
	networks := map[string]registry.Network{}
	for _, n := range s.snapshot().Networks {
		networks[n.Name] = n
	}
	return networks
}

func (s *Supervisor) stopChanged(ctx context.Context, op *operation, definition *config.Definition, next *registry.Record) error {
	return s.each(next.Machines, func(m registry.Machine) error {
		l := s.liveMachine(m.Name)
		if l == nil || l.made == bootDigest(definition.Machines[m.Name], m, s.networks()) {
			return nil
		}
		return s.shutdown(ctx, op, m.Name, stopGrace)
	})
}

func (s *Supervisor) ensureNetwork(op *operation, definition *config.Definition, t *topology) error {
	done := op.step("network", "")
	s.mu.Lock()
	s.definition = definition
	s.mu.Unlock()
	record := s.snapshot()
	if s.network != nil {
		err := s.network.update(s, t)
		if err == nil {
			s.network.definition = record.DefinitionDigest
		}
		return done("", err)
	}
	n, err := s.openNetwork(t, record.Proxy.Port)
	if err != nil {
		return done("", err)
	}
	n.definition = record.DefinitionDigest
	s.mu.Lock()
	s.network, s.domain = n, n.domain
	s.mu.Unlock()
	return done("", nil)
}

// ensureMachines boots what is down and gives what is up its processes, all
// Machines side by side, and waits until everything declared is ready.
func (s *Supervisor) ensureMachines(ctx context.Context, op *operation, definition *config.Definition, record *registry.Record) error {
	return s.each(record.Machines, func(m registry.Machine) error {
		return s.ensureMachine(ctx, op, definition, m)
	})
}

func (s *Supervisor) ensureMachine(ctx context.Context, op *operation, definition *config.Definition, m registry.Machine) error {
	l := s.liveMachine(m.Name)
	if l != nil && l.session.Err() != nil { // it ended just now, and watchMachine is about to let it go
		s.release(l)
		l = nil
	}
	specs := processSpecs(definition.Machines[m.Name])
	if l == nil {
		if err := s.boot(ctx, op, definition, m); err != nil {
			return err
		}
		if l = s.liveMachine(m.Name); l == nil {
			return fmt.Errorf("machine %s ended as soon as it was up", m.Name)
		}
	} else if err := l.setProcesses(ctx, specs); err != nil {
		return fmt.Errorf("machine %s: %w", m.Name, err)
	}
	if len(specs) == 0 {
		return nil
	}
	done := op.step("machine.ready", m.Name)
	return done("", s.awaitReady(ctx, l, specs))
}

// each does something for every Machine at once and waits for all.
func (s *Supervisor) each(all []registry.Machine, do func(registry.Machine) error) error {
	errs := make([]error, len(all))
	var wait sync.WaitGroup
	for i, m := range all {
		wait.Go(func() { errs[i] = do(m) })
	}
	wait.Wait()
	return errors.Join(errs...)
}

// Stop takes the Environment down, keeps its identity and declared state, and
// ends the supervisor.
func (s *Supervisor) Stop(ctx context.Context, send func(*vzv1.Event) error) error {
	// A stop that has begun is carried out, whatever becomes of its client.
	op, done, err := s.begin(ctx, "stop", send)
	if err != nil {
		return err
	}
	defer done()
	ctx = context.WithoutCancel(ctx)
	mark := func(state registry.State) error {
		return s.update(func(r *registry.Record) {
			if r.State != registry.Deleting { // a deletion that has begun stays one
				r.State, r.Message = state, ""
			}
		})
	}
	mark(registry.Stopping)
	err = s.takeDown(ctx, op, stopGrace)
	if err == nil {
		err = mark(registry.Stopped)
	}
	result := "stopped"
	if err != nil {
		result = err.Error()
	}
	err = errors.Join(err, s.receipt("lifecycle", lifecycle{Operation: "stop", Result: result}))
	s.ending = true
	s.finish(op, err, &vzv1.Progress{})
	s.end()
	return nil
}

// takeDown stops every Machine and then the network. Order: Machines first, so
// that their last words still have a network; then faults, doors and domain.
func (s *Supervisor) takeDown(ctx context.Context, op *operation, grace time.Duration) error {
	err := s.each(s.snapshot().Machines, func(m registry.Machine) error {
		return s.shutdown(ctx, op, m.Name, grace)
	})
	if n := s.network; n != nil {
		done := op.step("network.close", "")
		n.close(s, faults.WhyOwnerExit)
		s.mu.Lock()
		s.network, s.domain = nil, nil
		s.mu.Unlock()
		done("", nil)
	}
	return err
}

// Delete takes everything of the Environment away but its directory, and the
// supervisor ends: it may write nowhere else, so that the directory is for the
// client to remove (client.Delete). A crash in the middle leaves the record
// marked, and the next delete finishes.
func (s *Supervisor) Delete(ctx context.Context, send func(*vzv1.Event) error) error {
	op, done, err := s.begin(ctx, "delete", send)
	if err != nil {
		return err
	}
	defer done()
	ctx = context.WithoutCancel(ctx)
	head, err := s.delete(ctx, op)
	s.ending = true
	s.finish(op, err, &vzv1.Progress{ReceiptHead: head})
	s.end()
	return nil
}

func (s *Supervisor) delete(ctx context.Context, op *operation) (*vzv1.ReceiptHead, error) {
	// Until the Machines' files are gone, a full disk may take no word of it:
	// what can't be recorded is logged.
	s.update(func(r *registry.Record) { r.State, r.Message = registry.Deleting, "" })
	// Nothing of the Machines is kept, so there is nothing to save by grace.
	if err := s.takeDown(ctx, op, 0); err != nil {
		s.log.Error("taking the Environment down", "error", err)
	}
	err := s.each(s.snapshot().Machines, func(m registry.Machine) error {
		done := op.step("machine.remove", m.Name)
		return done("", s.driver.Remove(ctx, machines.Spec{EnvironmentID: s.id, MachineID: m.MachineID, Name: m.Name, Dir: s.registry.MachineDir(s.id, m.MachineID)}))
	})
	if err != nil {
		return nil, err
	}
	if err := s.receipt("lifecycle", lifecycle{Operation: "delete", Result: "deleted"}); err != nil {
		s.log.Error("the receipt of the delete", "error", err)
	}
	if s.receipts == nil {
		return nil, nil
	}
	return headMessage(s.receipts.Head()), nil
}
