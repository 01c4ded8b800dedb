package namespace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"vz.test/vz/machines"
	"vz.test/vz/netstack/link"
)

// Driver implements machines.Driver over a Launcher.
type Driver struct {
	launcher Launcher
}

// New returns a Driver that asks l for what needs privilege.
func New(l Launcher) *Driver { return &Driver{l} }

func (d *Driver) Name() string { return "namespace" }

// Start boots a Machine of image "host".
func (d *Driver) Start(ctx context.Context, spec machines.Spec) (machines.Instance, error) {
	if spec.Image != "host" {
		return nil, fmt.Errorf("machine %s: image %q: namespace Machines run image host", spec.Name, spec.Image)
	}
	created, err := d.launcher.Create(ctx, spec)
	if err != nil {
		return nil, err
	}
	i, err := newInstance(d.launcher, spec, created)
	if err != nil {
		// Not ctx: it may be what ended the start.
		kill, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		return nil, errors.Join(err, d.launcher.Kill(kill, spec.MachineID))
	}
	return i, nil
}

// undoTimeout bounds the killing of a Machine whose start failed half way.
const undoTimeout = 10 * time.Second

// Clean implements machines.Driver.
func (d *Driver) Clean(ctx context.Context, environmentID, machineID string) error {
	return d.launcher.Clean(ctx, machineID)
}

// Remove implements machines.Driver.
func (d *Driver) Remove(ctx context.Context, spec machines.Spec) error {
	return d.launcher.Remove(ctx, spec.MachineID, spec.Dir)
}

type instance struct {
	launcher Launcher
	spec     machines.Spec
	created  *Created
	ports    []link.Port
	agent    io.ReadWriteCloser
}

// newInstance takes the descriptors over; on an error they are closed.
func newInstance(l Launcher, spec machines.Spec, c *Created) (*instance, error) {
	i := &instance{launcher: l, spec: spec, created: c}
	conn, err := net.FileConn(c.Agent)
	c.Agent.Close()
	if err == nil && len(c.NICs) != len(spec.NICs) {
		err = fmt.Errorf("launcher: %d interfaces came for %d", len(c.NICs), len(spec.NICs))
	}
	files := slices.Clone(c.NICs)
	for n := range spec.NICs {
		if err != nil {
			break
		}
		var port link.Port
		if port, err = openPort(files[0], spec.NICs[n].MTU); err == nil {
			i.ports = append(i.ports, port)
			files = files[1:]
		}
	}
	if err != nil {
		for _, f := range files {
			f.Close()
		}
		for _, p := range i.ports {
			p.Close()
		}
		if conn != nil {
			conn.Close()
		}
		return nil, fmt.Errorf("machine %s: %w", spec.Name, err)
	}
	i.agent = conn
	return i, nil
}

func (i *instance) Ports() []link.Port        { return i.ports }
func (i *instance) Agent() io.ReadWriteCloser { return i.agent }
func (i *instance) Capabilities() []string    { return i.created.Capabilities }
func (i *instance) Notes() []machines.Note    { return i.created.Notes }
func (i *instance) Done() <-chan struct{}     { return i.created.Done }
func (i *instance) Err() error                { return i.created.Err() }

// Kill implements machines.Instance.
func (i *instance) Kill(timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	select {
	case <-i.created.Done:
		return nil
	default:
	}
	if err := i.launcher.Kill(ctx, i.spec.MachineID); err != nil {
		return err
	}
	select {
	case <-i.created.Done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("machine %s does not end: %w", i.spec.Name, ctx.Err())
	}
}
