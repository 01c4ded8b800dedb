package namespace

import (
	"errors"
	"fmt"

	"vz.test/vz/machines"
)

// An order tells Init what to build. It comes over the control socket once
// everything outside is ready, so that waiting for it is the synchronisation.
type order struct {
	Name      string   // host name
	MachineID string   // makes /etc/machine-id
	Hidden    []string // host paths to mask beside masked
	Hardened  bool
}

// A word is what Init says on the control socket, as JSON, before the socket
// closes itself by exec: its notes, or why it failed.
type word struct {
	Notes   []machines.Note        `json:",omitempty"`
	Failed  string                 `json:",omitempty"`
	Missing *machines.MissingError `json:",omitempty"`
}

func failure(err error) word {
	w := word{Failed: err.Error()}
	errors.As(err, &w.Missing)
	return w
}

func (w word) err() error {
	switch {
	case w.Failed == "":
		return nil
	case w.Missing != nil && w.Failed == w.Missing.Error():
		return w.Missing
	case w.Missing != nil:
		return fmt.Errorf("inside: %w", w.Missing)
	}
	return errors.New("inside: " + w.Failed)
}
