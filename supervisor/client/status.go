package client

import (
	"context"
	"errors"

	"vz.test/vz/supervisor/api/vzv1"
	"vz.test/vz/supervisor/registry"
)

// Status is an Environment as its supervisor tells it, or, where none lives or
// answers, as it is recorded. It starts nothing.
func Status(ctx context.Context, r *registry.Registry, environment string) (*vzv1.Environment, error) {
	c, aggregate, err := Connect(ctx, r, environment)
	if err == nil {
		c.Close()
		return aggregate, nil
	}
	lock := registry.LockFree
	if silent := (*SilentError)(nil); errors.As(err, &silent) {
		lock = registry.LockSilent
	} else if !errors.Is(err, ErrNotRunning) {
		return nil, err
	}
	record, err := r.Record(environment)
	if err != nil {
		return nil, err
	}
	return registry.Project(record, lock), nil
}
