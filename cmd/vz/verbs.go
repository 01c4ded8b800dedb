package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"vz.test/vz/supervisor/api/vzv1"
	"vz.test/vz/supervisor/client"
	"vz.test/vz/supervisor/registry"
)

// place is where the command runs and what --environment says.
func (s *selection) place() (client.Place, error) {
	r, err := open()
	return client.Place{Registry: r, Environment: s.Environment}, err
}

type upCommand struct {
	selection
	JSON bool `name:"json" help:"Print the Environment as JSON."`
}

func (c *upCommand) Run(line *commandLine) error {
	ctx, stop := interruptible()
	defer stop()
	p, err := c.place()
	if err != nil {
		return err
	}
	show := newProgress(line.Progress, os.Stderr)
	environment, err := client.Up(ctx, p, show.event)
	show.close()
	if err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("cancelled; what was begun is kept, vz delete takes it away")
		}
		return err
	}
	if c.JSON {
		return printJSON(environment)
	}
	fmt.Printf("%s (%s) is %s\n", environment.GetName(), environment.GetEnvironmentId(), word(environment.GetState()))
	for _, e := range environment.GetEndpoints() {
		fmt.Printf("  %s → %s:%d\n", e.GetUrl(), e.GetBackendMachine(), e.GetBackendPort())
	}
	if p := environment.GetProxy(); p.GetUrl() != "" && len(environment.GetEndpoints()) > 0 {
		fmt.Printf("  from the host: curl --proxy %s --cacert %s %s\n", p.GetUrl(), p.GetCaPath(), environment.GetEndpoints()[0].GetUrl())
	}
	return nil
}

type statusCommand struct {
	selection
	All     bool    `help:"Every Environment of this user."`
	Machine *string `short:"m" placeholder:"M" help:"Only this Machine, by ID or name."`
	JSON    bool    `name:"json" help:"Print JSON."`
}

func (c *statusCommand) Run() error {
	ctx, stop := interruptible()
	defer stop()
	p, err := c.place()
	if err != nil {
		return err
	}
	if c.All {
		if c.Environment != nil || c.Machine != nil {
			return exitStatus{exitUsage, fmt.Errorf("--all goes with neither --environment nor --machine; see vz status --help")}
		}
		return c.all(ctx, p.Registry)
	}
	s, err := p.Select()
	if err != nil {
		return err
	}
	environment, err := client.Status(ctx, p.Registry, s.EnvironmentID)
	if err != nil {
		return err
	}
	if c.Machine == nil {
		if c.JSON {
			return printJSON(environment)
		}
		printStatus(os.Stdout, environment)
		return nil
	}
	if s.Err != nil {
		return s.Err
	}
	m, err := registry.SelectMachine(s.Record, c.Machine, "")
	if err != nil {
		return err
	}
	for _, one := range environment.GetMachines() {
		if one.GetMachineId() == m.MachineID {
			if c.JSON {
				return printJSON(one)
			}
			printMachine(os.Stdout, one)
		}
	}
	return nil
}

// all lists every Environment of the user, the damaged ones too.
func (c *statusCommand) all(ctx context.Context, r *registry.Registry) error {
	listed, err := r.List("")
	if err != nil {
		return err
	}
	environments := []*vzv1.Environment{}
	for _, l := range listed {
		environment := &vzv1.Environment{ProjectId: l.ProjectID, EnvironmentId: l.ID, Name: l.Name}
		if l.Err == nil {
			environment, err = client.Status(ctx, r, l.ID)
		} else {
			err = l.Err
		}
		if err != nil {
			environment = &vzv1.Environment{ProjectId: l.ProjectID, EnvironmentId: l.ID, Name: l.Name, Message: err.Error()}
		}
		environments = append(environments, environment)
	}
	if !c.JSON {
		printList(os.Stdout, environments)
		return nil
	}
	parts := []json.RawMessage{}
	for _, e := range environments {
		text, err := marshal(e)
		if err != nil {
			return err
		}
		parts = append(parts, text)
	}
	encoder := json.NewEncoder(os.Stdout)
	encoder.SetIndent("", "  ")
	return encoder.Encode(map[string]any{"environments": parts})
}

type stopCommand struct{ selection }

func (c *stopCommand) Run(line *commandLine) error {
	ctx, stop := interruptible()
	defer stop()
	p, err := c.place()
	if err != nil {
		return err
	}
	record, err := p.Record()
	if err != nil {
		return err
	}
	show := newProgress(line.Progress, os.Stderr)
	err = client.Stop(ctx, p.Registry, record.EnvironmentID, show.event)
	show.close()
	if err == nil {
		fmt.Printf("%s (%s) is stopped\n", record.Name, record.EnvironmentID)
	}
	return err
}

type deleteCommand struct {
	selection
	JSON bool `name:"json" help:"Print what was deleted, and the receipts' final head, as JSON."`
}

func (c *deleteCommand) Run(line *commandLine) error {
	ctx, stop := interruptible()
	defer stop()
	p, err := c.place()
	if err != nil {
		return err
	}
	s, err := p.Select()
	if err != nil {
		return err
	}
	show := newProgress(line.Progress, os.Stderr)
	head, err := client.Delete(ctx, p.Registry, s, show.event)
	show.close()
	if err != nil {
		return err
	}
	if c.JSON {
		return json.NewEncoder(os.Stdout).Encode(map[string]any{
			"environment_id": s.EnvironmentID, "name": s.Name,
			"receipt_head": map[string]any{"count": head.GetCount(), "hash": head.GetHash(), "signature": head.GetSignature(), "public_key": head.GetPublicKey()},
		})
	}
	fmt.Printf("%s (%s) is deleted\n", s.Name, s.EnvironmentID)
	if head != nil {
		fmt.Printf("  receipts: %d, head %s, key %s\n", head.GetCount(), head.GetHash(), head.GetPublicKey())
	}
	return nil
}

// selectRecord is the Environment of an exec.
func (s *selection) selectRecord() (*registry.Registry, *registry.Record, error) {
	p, err := s.place()
	if err != nil {
		return nil, nil, err
	}
	record, err := p.Record()
	return p.Registry, record, err
}

func marshal(m proto.Message) ([]byte, error) {
	return protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: true}.Marshal(m)
}

// printJSON prints a message with the field names of the API's JSON, indented
// the same way in every build.
func printJSON(m proto.Message) error {
	text, err := marshal(m)
	if err != nil {
		return err
	}
	encoder := json.NewEncoder(os.Stdout)
	encoder.SetIndent("", "  ")
	return encoder.Encode(json.RawMessage(text))
}
