package registry

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// DefaultName is the Environment that up makes in a project that has none.
const DefaultName = "default"

// A Request says which Environment is wanted, as far as it is said. Selectors
// are asked in the order of the fields; one that is there but can't be followed
// fails, and the next is not asked.
type Request struct {
	// Flag is --environment, an ID or a name; nil when it was not given. An
	// empty one was given: `--environment "$UNSET"` selects nothing.
	Flag *string
	// Env is VZ_ENVIRONMENT_ID, an ID; empty is not set.
	Env string
	// Worktree is where the command runs.
	Worktree Worktree
	// ProjectID is that of the nearest vz.json; empty when there is none (or
	// none that can be read). Names are looked up in it, and bindings too; when
	// it is empty, a binding in any project counts.
	ProjectID string
}

// A Selection is an Environment that was selected.
type Selection struct {
	ProjectID     string
	EnvironmentID string
	Name          string
	Level         Level
	// Record is what is recorded. It is nil when there is none, and Err says
	// why: a *MissingError when an up or a delete was cut off between the index
	// and the directory, a *CorruptError when it is damaged. Remove clears both
	// away; up makes the former again.
	Record *Record
	Err    error
}

// SelectEnvironment selects one that exists. Errors are *SelectorError where
// the selection is at fault.
func (r *Registry) SelectEnvironment(q Request) (*Selection, error) {
	switch {
	case q.Flag != nil:
		return r.selectFlag(q)
	case q.Env != "":
		return r.selectEnv(q)
	}
	return r.selectBinding(q)
}

func (r *Registry) selectFlag(q Request) (*Selection, error) {
	value := *q.Flag
	if looksLikeID(value) {
		return r.selectID(LevelFlag, value)
	}
	if err := CheckName(value); err != nil {
		what, why, _ := err.(*NameError).Explain()
		return nil, &SelectorError{Level: LevelFlag, Value: value, Reason: ReasonInvalid,
			Detail: what + ": " + why, Next: "give a name or an ID; `vz status --all` lists them"}
	}
	if q.ProjectID == "" {
		return nil, &SelectorError{Level: LevelFlag, Value: value, Reason: ReasonNoProject,
			Detail: "a name is looked up in the project of the nearest " + DefinitionName + ", and there is none that can be read",
			Next:   "change to the project's directory, or give the Environment's ID (`vz status --all`)"}
	}
	v, err := r.view(q.ProjectID)
	if err != nil {
		return nil, err
	}
	e, ok := v.Environments[value]
	if !ok {
		return nil, &SelectorError{Level: LevelFlag, Value: value, Reason: ReasonNotFound, Candidates: v.candidates(),
			Detail: "the project has no Environment of that name",
			Next:   "`vz up --environment " + value + "` makes it"}
	}
	return r.selected(LevelFlag, value, q.ProjectID, e.ID, value)
}

func (r *Registry) selectEnv(q Request) (*Selection, error) {
	if !looksLikeID(q.Env) {
		return nil, &SelectorError{Level: LevelEnv, Value: q.Env, Reason: ReasonWrongKind,
			Detail: "it must be an Environment's ID, never a name",
			Next:   "unset VZ_ENVIRONMENT_ID, set it to an ID (`vz status --all`), or give --environment"}
	}
	return r.selectID(LevelEnv, q.Env)
}

// selectID follows an ID, of whichever project.
func (r *Registry) selectID(level Level, id string) (*Selection, error) {
	next := "`vz status --all` lists what there is"
	if level == LevelEnv {
		next = "unset VZ_ENVIRONMENT_ID, or set it to an ID that `vz status --all` lists"
	}
	if err := CheckID(id, KindEnvironment); err != nil {
		e := err.(*IDError)
		reason := ReasonInvalid
		if _, err := ParseID(id); err == nil {
			reason = ReasonWrongKind
		}
		return nil, &SelectorError{Level: level, Value: id, Reason: reason, Detail: e.Why, Next: next}
	}
	if r.exists(id) {
		record, err := r.Record(id)
		if err == nil {
			return r.selected(level, id, record.ProjectID, id, record.Name)
		}
	}
	// Its record does not say whose it is, but an index may.
	projects, err := r.projectIDs()
	if err != nil {
		return nil, err
	}
	for _, project := range projects {
		v, err := r.quietly().view(project)
		if err != nil {
			r.warn(err)
			continue
		}
		if name, ok := v.name(id); ok {
			return r.selected(level, id, project, id, name)
		}
	}
	if r.exists(id) {
		return r.selected(level, id, "", id, "")
	}
	return nil, &SelectorError{Level: level, Value: id, Reason: ReasonStale,
		Detail: "that Environment does not exist, or no longer", Next: next}
}

func (r *Registry) selectBinding(q Request) (*Selection, error) {
	key, err := q.Worktree.Token()
	if err != nil {
		return nil, err
	}
	projects := []string{q.ProjectID}
	if q.ProjectID == "" {
		if projects, err = r.projectIDs(); err != nil {
			return nil, err
		}
	}
	var bound, all []Candidate
	owner := map[string]string{} // environment → project
	for _, project := range projects {
		v, err := r.view(project)
		if err != nil {
			return nil, err
		}
		for _, id := range v.bound(key) {
			name, _ := v.name(id)
			bound = append(bound, Candidate{id, name})
			owner[id] = project
		}
		all = append(all, v.candidates()...)
	}
	if len(bound) == 1 {
		return r.selected(LevelBinding, "", owner[bound[0].ID], bound[0].ID, bound[0].Name)
	}
	return nil, notBound(q.Worktree, bound, all)
}

// notBound is why a worktree's bindings select nothing.
func notBound(w Worktree, bound, all []Candidate) *SelectorError {
	if len(bound) > 1 {
		return &SelectorError{Level: LevelBinding, Reason: ReasonAmbiguous, Candidates: bound,
			Detail: "it is bound to several Environments", Next: "say which one with --environment"}
	}
	e := &SelectorError{Level: LevelBinding, Reason: ReasonUnbound, Candidates: all,
		Detail: "this worktree is bound to no Environment", Next: "say which one with --environment; `vz up --environment NAME` binds it, and makes it if the name is new"}
	if w.GitDir == "" {
		e.Detail = "this is no git worktree, so that there is no binding"
		e.Next = "say which one with --environment; in a git worktree vz up would bind it"
	}
	if len(all) == 0 {
		e.Detail += ", and there is no Environment to choose from"
		e.Next = "`vz up` makes one"
	}
	return e
}

// selected reads what was selected and sees that it is this user's.
func (r *Registry) selected(level Level, value, project, id, name string) (*Selection, error) {
	s := &Selection{ProjectID: project, EnvironmentID: id, Name: name, Level: level}
	s.Record, s.Err = r.Record(id)
	var newer *NewerVersionError
	var corrupt *CorruptError
	var missing *MissingError
	switch {
	case errors.As(s.Err, &newer):
		return nil, s.Err // not ours to touch
	case errors.As(s.Err, &missing):
		if _, known := r.entry(project, id); level == LevelBinding && !known {
			return nil, &SelectorError{Level: level, Value: id, Reason: ReasonStale,
				Detail: "the Environment that this worktree is bound to no longer exists",
				Next:   "bind it to another by `vz up --environment NAME`"}
		}
	case s.Err != nil && !errors.As(s.Err, &corrupt):
		return nil, s.Err
	}
	foreign := s.Record != nil && s.Record.OwnerUID != r.uid
	if info, err := os.Lstat(r.EnvironmentDir(id)); err == nil && !ownedBy(info, r.uid) {
		foreign = true
	}
	if foreign {
		return nil, &SelectorError{Level: level, Value: value, Reason: ReasonNotOwner,
			Detail: fmt.Sprintf("Environment %s belongs to another user than ID %d", id, r.uid), Next: "run vz as its owner"}
	}
	return s, nil
}

func (r *Registry) entry(project, id string) (entry, bool) {
	v, err := r.quietly().view(project)
	if err != nil {
		return entry{}, false
	}
	name, ok := v.name(id)
	return v.Environments[name], ok
}

// An UpRequest is a Request of up, which may make what does not exist.
type UpRequest struct {
	Request
	ProjectName string
}

// PrepareUp selects the Environment that up is to reconcile, or makes its
// identity: its name and ID, its directory, and a record in the state created.
// The definition is admitted before.
//
// A name is made if the project does not have it. Without a selector it is the
// one Environment that the worktree is bound to; in a project that has none at
// all, one called default is made, and bound at once: a first up that is cut
// off must be found again by the next up and by delete. Everything else is bound
// by Bind, when up has succeeded. Of two callers at one instant one makes it and
// the other gets the same.
func (r *Registry) PrepareUp(q UpRequest) (s *Selection, created bool, err error) {
	if err := CheckID(q.ProjectID, KindProject); err != nil {
		return nil, false, err
	}
	// Selectors that can't lead anywhere fail before anything is made, the
	// project's directory included.
	if q.Flag == nil && q.Env != "" || q.Flag != nil && (looksLikeID(*q.Flag) || CheckName(*q.Flag) != nil) {
		s, err = r.SelectEnvironment(q.Request)
		if err == nil && s.ProjectID == "" {
			err = s.Err // nobody can tell whose it is
		}
		if err == nil && s.ProjectID != q.ProjectID {
			value, level := q.Env, LevelEnv
			if q.Flag != nil {
				value, level = *q.Flag, LevelFlag
			}
			err = &SelectorError{Level: level, Value: value, Reason: ReasonForeignProject,
				Detail: fmt.Sprintf("that Environment belongs to project %s, the nearest %s is of %s", s.ProjectID, DefinitionName, q.ProjectID),
				Next:   "change to that project's directory, or select one of this project by its name"}
		}
		if err != nil {
			return nil, false, err
		}
	}
	err = r.inProject(q.ProjectID, func() error {
		s, created, err = r.prepare(q)
		return err
	})
	if err != nil {
		// The project's directory was made for its lock: not to be left behind.
		r.sweep(q.ProjectID)
		return nil, false, err
	}
	return s, created, nil
}

// prepare is PrepareUp with the project's lock held.
func (r *Registry) prepare(q UpRequest) (*Selection, bool, error) {
	v, err := r.view(q.ProjectID)
	if err != nil {
		return nil, false, err
	}
	var level Level
	var name, id string // id empty: to be made
	bind := ""
	switch {
	case q.Flag != nil && !looksLikeID(*q.Flag):
		level, name = LevelFlag, *q.Flag
		id = v.Environments[name].ID
	case q.Flag != nil || q.Env != "":
		s, err := r.SelectEnvironment(q.Request) // again: it may be gone by now
		if err != nil {
			return nil, false, err
		}
		level, name, id = s.Level, s.Name, s.EnvironmentID
	default:
		level = LevelBinding
		key, err := q.Worktree.Token()
		if err != nil {
			return nil, false, err
		}
		bound := v.bound(key)
		all := v.candidates()
		switch {
		case len(bound) == 1:
			id = bound[0]
			name, _ = v.name(id)
		case len(bound) > 1:
			return nil, false, notBound(q.Worktree, slices.DeleteFunc(all, func(c Candidate) bool { return !slices.Contains(bound, c.ID) }), all)
		case len(all) > 0:
			return nil, false, notBound(q.Worktree, nil, all)
		default:
			level, name = LevelDefault, DefaultName
			if bind, err = q.Worktree.EnsureToken(); err != nil {
				return nil, false, err
			}
		}
	}
	if id != "" {
		s, err := r.selected(level, name, q.ProjectID, id, name)
		if err != nil {
			return nil, false, err
		}
		var missing *MissingError
		switch {
		case s.Err == nil:
			if v.added || v.Environments[name].Removal {
				// up has been asked for after the delete that was cut off
				// before it removed anything.
				if e, ok := v.Environments[name]; ok && e.ID == id {
					v.Environments[name] = entry{ID: id}
				}
				err = r.saveIndex(v)
			}
			return s, false, err
		case !errors.As(s.Err, &missing):
			return nil, false, s.Err
		}
		if v.Environments[name].Removal {
			// A delete was cut off after the Environment was no more. It is
			// finished first; its ID is spent, its name and bindings are free.
			if err := r.discard(id); err != nil {
				return nil, false, err
			}
			v.remove(id)
			if err := r.saveIndex(v); err != nil {
				return nil, false, err
			}
			return r.prepare(q)
		}
	}
	if id == "" {
		id = NewID(KindEnvironment)
	}
	v.Environments[name] = entry{ID: id}
	now := r.now().UTC()
	if bind != "" {
		v.bind(bind, id, now)
	}
	record := &Record{
		Version: version, ProjectID: q.ProjectID, ProjectName: q.ProjectName, EnvironmentID: id, Name: name,
		OwnerUID: r.uid, CreatedAt: now, State: Created, Worktree: q.Worktree.Root,
	}
	if err := r.saveIndex(v); err != nil {
		return nil, false, err
	}
	if err := r.makeDir(r.EnvironmentDir(id)); err != nil {
		return nil, false, err
	}
	if err := r.Save(record); err != nil {
		return nil, false, err
	}
	return &Selection{ProjectID: q.ProjectID, EnvironmentID: id, Name: name, Level: level, Record: record}, true, nil
}

// Bind binds a worktree to an Environment, for when its up has succeeded. It
// first sees that the project and this user own it. Outside of git it does
// nothing. Binding again notes the time anew.
func (r *Registry) Bind(project string, w Worktree, environment string) error {
	if w.GitDir == "" {
		return nil
	}
	record, err := r.Record(environment)
	if err != nil {
		return err
	}
	refused := &SelectorError{Level: LevelBinding, Value: environment, Next: "select one of your own of this project"}
	if record.ProjectID != project {
		refused.Reason, refused.Detail = ReasonForeignProject, "it belongs to project "+record.ProjectID
		return refused
	}
	if record.OwnerUID != r.uid {
		refused.Reason, refused.Detail = ReasonNotOwner, fmt.Sprintf("it belongs to user ID %d", record.OwnerUID)
		return refused
	}
	key, err := w.EnsureToken()
	if err != nil {
		return err
	}
	return r.inProject(project, func() error {
		v, err := r.view(project)
		if err != nil {
			return err
		}
		name, ok := v.name(environment)
		if !ok || v.Environments[name].Removal {
			return &MissingError{environment}
		}
		v.bind(key, environment, r.now().UTC())
		return r.saveIndex(v)
	})
}

// SelectMachine selects a Machine of the Environment that r records: by flag
// (--machine, an ID or a name; nil when not given), else env (VZ_MACHINE_ID, an
// ID of this Environment's; empty is not set), else the declared default, else
// the sole Machine. Errors are *SelectorError. The result points into r.
func SelectMachine(r *Record, flag *string, env string) (*Machine, error) {
	var all []Candidate
	for _, m := range r.Machines {
		all = append(all, Candidate{m.MachineID, m.Name})
	}
	slices.SortFunc(all, compareCandidates)
	fail := func(level Level, value string, reason Reason, detail, next string) (*Machine, error) {
		return nil, &SelectorError{Level: level, Value: value, Reason: reason, Detail: detail, Next: next, Candidates: all}
	}
	byID := func(level Level, id, next string) (*Machine, error) {
		if err := CheckID(id, KindMachine); err != nil {
			reason := ReasonInvalid
			if _, err := ParseID(id); err == nil {
				reason = ReasonWrongKind
			}
			return fail(level, id, reason, err.(*IDError).Why, next)
		}
		if m := r.Machine(id); m != nil {
			return m, nil
		}
		return fail(level, id, ReasonStale, fmt.Sprintf("Environment %s (%s) has no Machine of that ID", r.Name, r.EnvironmentID), next)
	}
	switch {
	case flag != nil:
		const next = "give the name or the ID of one that there is"
		switch {
		case *flag == "":
			return fail(LevelMachineFlag, *flag, ReasonInvalid, "it was given without a value", next)
		case looksLikeID(*flag):
			return byID(LevelMachineFlag, *flag, next)
		}
		if m := r.Machine(*flag); m != nil {
			return m, nil
		}
		return fail(LevelMachineFlag, *flag, ReasonNotFound, fmt.Sprintf("Environment %s has no Machine of that name", r.Name), next)
	case env != "":
		const next = "unset VZ_MACHINE_ID, set it to an ID of this Environment's, or give --machine"
		if !looksLikeID(env) {
			return fail(LevelMachineEnv, env, ReasonWrongKind, "it must be a Machine's ID, never a name", next)
		}
		return byID(LevelMachineEnv, env, next)
	case r.DefaultMachine != "":
		if m := r.Machine(r.DefaultMachine); m != nil && m.Name == r.DefaultMachine {
			return m, nil
		}
		return fail(LevelMachineDefault, r.DefaultMachine, ReasonStale, "the Environment has no such Machine", "`vz up` reconciles it, or give --machine")
	case len(r.Machines) == 1:
		return &r.Machines[0], nil
	case len(r.Machines) == 0:
		return fail(LevelMachineSole, "", ReasonNotFound, "the Environment has no Machine yet", "`vz up` brings it up")
	}
	return fail(LevelMachineSole, "", ReasonAmbiguous, "the Environment has several and declares no default",
		"say which one with --machine, or declare default_machine in "+DefinitionName)
}

// sweep takes the directories of a project without Environments away, and those
// above that are empty then. Failures do not matter: they are empty
// directories, and the next one tries again.
func (r *Registry) sweep(project string) {
	dir := r.ProjectDir(project)
	path := filepath.Join(dir, "lock")
	if file, err := os.OpenFile(path, os.O_RDWR, 0); err == nil {
		// With the lock, so that nobody else is about to write; who waits for
		// it sees that it is gone (inProject).
		if lockFile(file, lockExclusive, false) == nil && current(file, path) {
			if v, err := r.quietly().view(project); err == nil && len(v.candidates()) == 0 {
				for _, name := range []string{"index.json", "index.json" + previousSuffix} {
					os.Remove(filepath.Join(dir, name))
				}
				if entries, err := os.ReadDir(dir); err == nil && !slices.ContainsFunc(entries, func(e os.DirEntry) bool {
					return e.Name() != "lock" && !strings.HasPrefix(e.Name(), "index.json")
				}) {
					os.RemoveAll(dir)
				}
			}
		}
		file.Close()
	}
	os.Remove(r.projects())
	os.Remove(r.environments())
}
