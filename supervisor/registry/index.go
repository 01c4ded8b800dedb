package registry

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// An index is what is kept of one project: which names its Environments have
// and which worktrees are bound to which. It is written under the project's
// lock and read without.
type index struct {
	Version      int              `json:"version"`
	ProjectID    string           `json:"project_id"`
	Environments map[string]entry `json:"environments"` // by name
	// Bindings are, by workspace token, when each Environment was bound last.
	Bindings map[string]map[string]time.Time `json:"bindings,omitempty"`
}

// An entry makes a name an Environment's. It is written before its directory is
// made and taken away after that is removed, so that a crash leaves an entry
// too many, never an Environment without one.
type entry struct {
	ID      string `json:"id"`
	Removal bool   `json:"removal,omitempty"` // begun; what is left is to be removed too
}

func newIndex() *index { return new(index) }

func (x *index) validate() error {
	if err := CheckID(x.ProjectID, KindProject); err != nil {
		return err
	}
	ids := map[string]bool{}
	for name, e := range x.Environments {
		if err := CheckName(name); err != nil {
			return err
		}
		if err := CheckID(e.ID, KindEnvironment); err != nil {
			return err
		}
		if ids[e.ID] {
			return fmt.Errorf("%s has two names", e.ID)
		}
		ids[e.ID] = true
	}
	for key, bound := range x.Bindings {
		if !token.MatchString(key) {
			return fmt.Errorf("%q is no workspace token", key)
		}
		for id := range bound {
			if err := CheckID(id, KindEnvironment); err != nil {
				return err
			}
		}
	}
	return nil
}

// name is that of an ID.
func (x *index) name(id string) (string, bool) {
	for name, e := range x.Environments {
		if e.ID == id {
			return name, true
		}
	}
	return "", false
}

// bound are the IDs that a worktree is bound to, sorted.
func (x *index) bound(token string) []string {
	if token == "" {
		return nil
	}
	return slices.Sorted(maps.Keys(x.Bindings[token]))
}

func (x *index) bind(token, id string, at time.Time) {
	if x.Bindings == nil {
		x.Bindings = map[string]map[string]time.Time{}
	}
	if x.Bindings[token] == nil {
		x.Bindings[token] = map[string]time.Time{}
	}
	x.Bindings[token][id] = at
}

// remove takes an Environment's name and bindings away.
func (x *index) remove(id string) {
	if name, ok := x.name(id); ok {
		delete(x.Environments, name)
	}
	for key, bound := range x.Bindings {
		delete(bound, id)
		if len(bound) == 0 {
			delete(x.Bindings, key)
		}
	}
}

// A view is an index and the Environments of the project that it does not have,
// as after the loss of an index: found by their records. Those whose names are
// free have been added to it; strays are the others, which only their IDs
// select.
type view struct {
	index
	strays []Candidate
	added  bool
}

func (v *view) candidates() []Candidate {
	all := slices.Clone(v.strays)
	for name, e := range v.Environments {
		all = append(all, Candidate{e.ID, name})
	}
	slices.SortFunc(all, compareCandidates)
	return all
}

// view reads a project's index. A project that has none has an empty one.
func (r *Registry) view(project string) (*view, error) {
	if err := CheckID(project, KindProject); err != nil {
		return nil, err
	}
	if err := r.check(r.root); err != nil {
		return nil, err
	}
	// Directories first: whoever has one has had an entry before.
	ids, err := r.environmentIDs()
	if err != nil {
		return nil, err
	}
	path := r.indexPath(project)
	x, err := readDocument(r, path, newIndex,
		"move it and its "+previousSuffix+" copy out of the way: names are found again in the Environments' records, worktrees are bound again by `vz up --environment NAME`")
	switch {
	case errors.Is(err, fs.ErrNotExist):
		x = &index{Version: version, ProjectID: project}
	case err != nil:
		return nil, err
	case x.ProjectID != project:
		return nil, &CorruptError{path, fmt.Errorf("it is the index of %s", x.ProjectID), "move it out of the way"}
	}
	if x.Environments == nil {
		x.Environments = map[string]entry{}
	}
	v := &view{index: *x}
	for _, id := range ids {
		if _, known := v.name(id); known {
			continue
		}
		record, err := r.quietly().Record(id)
		if err != nil || record.ProjectID != project {
			continue // nobody's that we know, or another project's
		}
		stray := &StrayError{project, id, record.Name, "the project's index does not have it", "`vz up` mends the index"}
		if _, taken := v.Environments[record.Name]; taken {
			stray.Why += ", and its name is another's"
			stray.Next = "select it by its ID, to delete it"
			v.strays = append(v.strays, Candidate{id, record.Name})
		} else {
			v.Environments[record.Name] = entry{ID: id}
			v.added = true
		}
		r.warn(stray)
	}
	return v, nil
}

// quietly is r without warnings, for records that nobody asked about.
func (r *Registry) quietly() *Registry {
	q := *r
	q.warn = func(error) {}
	return &q
}

func (r *Registry) saveIndex(v *view) error {
	v.Version = version
	return writeDocument(r.indexPath(v.ProjectID), &v.index, newIndex)
}

// inProject runs f with the project's lock held, which makes a name unique. It
// waits for whoever holds it: that is a matter of milliseconds, nothing that
// takes long is done under it.
func (r *Registry) inProject(project string, f func() error) error {
	if err := CheckID(project, KindProject); err != nil {
		return err
	}
	path := filepath.Join(r.ProjectDir(project), "lock")
	for {
		if err := r.makeDir(r.ProjectDir(project)); err != nil {
			return err
		}
		file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if errors.Is(err, fs.ErrNotExist) {
			continue // the last Environment's removal took the directory away
		}
		if err == nil {
			err = lockFile(file, lockExclusive, true)
			if err == nil && !current(file, path) {
				file.Close() // and the same while we waited
				continue
			}
		}
		if err != nil {
			return &FileError{"cannot lock", path, err, "see that it is yours and its file system has locks (flock)"}
		}
		defer file.Close()
		return f()
	}
}

// A Listed is one Environment in a list.
type Listed struct {
	ProjectID string
	ID        string
	Name      string
	Record    *Record // nil with Err
	// Err says why there is no record: *MissingError when an up or a delete
	// was cut off between the index and the directory.
	Err error
}

// List is what a project has, or with project empty all projects, by name. A
// project whose index can't be read is a warning, its Environments are listed
// by their records.
func (r *Registry) List(project string) ([]Listed, error) {
	projects := []string{project}
	if project == "" {
		var err error
		if projects, err = r.projectIDs(); err != nil {
			return nil, err
		}
	}
	var all []Listed
	seen := map[string]bool{}
	for _, p := range projects {
		v, err := r.view(p)
		if err != nil {
			if project != "" {
				return nil, err
			}
			r.warn(err)
			continue
		}
		for _, c := range v.candidates() {
			record, err := r.Record(c.ID)
			seen[c.ID] = true
			all = append(all, Listed{p, c.ID, c.Name, record, err})
		}
	}
	if project == "" {
		ids, err := r.environmentIDs()
		if err != nil {
			return nil, err
		}
		for _, id := range ids {
			if seen[id] {
				continue
			}
			l := Listed{ID: id}
			if l.Record, l.Err = r.Record(id); l.Record != nil {
				l.ProjectID, l.Name = l.Record.ProjectID, l.Record.Name
			}
			all = append(all, l)
		}
	}
	slices.SortStableFunc(all, func(a, b Listed) int {
		if c := strings.Compare(a.ProjectID, b.ProjectID); c != 0 {
			return c
		}
		return compareCandidates(Candidate{a.ID, a.Name}, Candidate{b.ID, b.Name})
	})
	return all, nil
}
