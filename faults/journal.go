package faults

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"vz.test/vz/internal/durable"
)

// The journal is one small JSON file with the faults that are armed, so that
// a supervisor that died with them leaves evidence. It is written before a
// fault is armed, and again when OnChange has returned from its healing: a
// receipt may come twice after a crash, never not at all.

const (
	journalVersion = 1
	maxJournal     = 16 << 20 // bytes; 1,024 faults are about 500 kB
)

type journal struct {
	file    string // empty: none
	entries []journalEntry
}

type journalJSON struct {
	Version int            `json:"version"`
	Faults  []journalEntry `json:"faults"`
}

type journalEntry struct {
	Origin  string    `json:"origin"`
	ArmedAt time.Time `json:"armed_at"`
	Spec    Spec      `json:"spec"`
}

func (j *journal) add(s *Status) error {
	if j.file == "" {
		return nil
	}
	j.entries = append(j.entries, journalEntry{s.Origin, s.ArmedAt.UTC(), s.Spec})
	err := j.write()
	if err != nil {
		j.entries = j.entries[:len(j.entries)-1]
	}
	return err
}

func (j *journal) remove(id string) error {
	n := len(j.entries)
	j.entries = slices.DeleteFunc(j.entries, func(e journalEntry) bool { return e.Spec.ID == id })
	if len(j.entries) == n {
		return nil
	}
	return j.write()
}

func (j *journal) write() error {
	if len(j.entries) == 0 {
		return clearJournal(j.file)
	}
	b, err := json.Marshal(journalJSON{journalVersion, j.entries})
	if err != nil {
		return err
	}
	return durable.Replace(j.file, b, 0o600)
}

// Recover reads the journal that a supervisor left behind, calls receipt for
// each fault that was armed, healed by the restart at the given time, and then
// removes it. It stops at receipt's first error and keeps the journal. What a
// fault had done by then is not known. Call it before New. No journal is no
// error.
func Recover(file string, now time.Time, receipt func(Status) error) error {
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxJournal+1))
	if err != nil {
		return err
	}
	left, err := readJournal(b)
	if err != nil {
		return fmt.Errorf("journal of faults %s: %w", file, err)
	}
	for _, e := range left {
		err := receipt(Status{
			ID: e.Spec.ID, Name: e.Spec.Name, Spec: e.Spec, SpecDigest: e.Spec.Digest(),
			State: Healed, Origin: e.Origin, ArmedAt: e.ArmedAt, HealedAt: now, HealedWhy: WhyRestart,
		})
		if err != nil {
			return err
		}
	}
	return clearJournal(file)
}

func readJournal(b []byte) ([]journalEntry, error) {
	if len(b) > maxJournal {
		return nil, fmt.Errorf("is larger than %d bytes", maxJournal)
	}
	var version struct{ Version int }
	if err := json.Unmarshal(b, &version); err != nil {
		return nil, err
	}
	if version.Version != journalVersion {
		return nil, fmt.Errorf("has version %d, this vz knows %d", version.Version, journalVersion)
	}
	var j journalJSON
	if err := unmarshal(b, &j); err != nil {
		return nil, err
	}
	for _, e := range j.Faults {
		if e.Spec.check() != nil || e.Spec.ID == "" {
			return nil, errors.New("has an entry that is no fault")
		}
	}
	return j.Faults, nil
}

func clearJournal(file string) error {
	if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return durable.SyncDir(filepath.Dir(file))
}
