package registry

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func selector(t *testing.T, err error, level Level, reason Reason, candidates ...string) *SelectorError {
	t.Helper()
	var s *SelectorError
	require.ErrorAs(t, err, &s, "%v", err)
	assert.Equal(t, level, s.Level, "%v", err)
	assert.Equal(t, reason, s.Reason, "%v", err)
	names := []string{}
	for _, c := range s.Candidates {
		require.NotEmpty(t, c.ID)
		names = append(names, c.Name)
	}
	if candidates != nil {
		assert.Equal(t, candidates, names, "%v", err)
	}
	_, why, next := s.Explain()
	assert.NotEmpty(t, why)
	assert.NotEmpty(t, next)
	return s
}

// A world for selection: project one has a, b and c. Worktree bound is bound to
// a, twice to a and b, unbound to none. Project two has its own a, bound in
// worktree twice too.
type world struct {
	*home
	one, two                       string
	a, b, c, foreign               string
	bound, twice, unbound, nowhere Worktree
}

func newWorld(t *testing.T) *world {
	w := &world{home: newHome(t), one: NewID(KindProject), two: NewID(KindProject)}
	w.bound, w.twice, w.unbound = worktree(t, repository(t)), worktree(t, repository(t)), worktree(t, repository(t))
	w.a = w.home.bound(w.one, "a", w.bound).EnvironmentID
	w.home.bound(w.one, "a", w.twice)
	w.b = w.home.bound(w.one, "b", w.twice).EnvironmentID
	w.c = w.up(w.one, "c", Worktree{}).EnvironmentID
	w.foreign = w.home.bound(w.two, "a", w.twice).EnvironmentID
	return w
}

func TestSelectEnvironment(t *testing.T) {
	w := newWorld(t)
	gone := NewID(KindEnvironment)
	machine := NewID(KindMachine)
	all := []string{"a", "b", "c"}
	for name, c := range map[string]struct {
		q          Request
		want       string
		level      Level
		reason     Reason
		candidates []string
	}{
		"flag: name":                         {Request{Flag: ptr("b"), ProjectID: w.one}, w.b, LevelFlag, "", nil},
		"flag: ID":                           {Request{Flag: &w.b, ProjectID: w.one}, w.b, LevelFlag, "", nil},
		"flag: before env and binding":       {Request{Flag: ptr("b"), Env: w.a, Worktree: w.bound, ProjectID: w.one}, w.b, LevelFlag, "", nil},
		"flag: the nearest project's name":   {Request{Flag: ptr("a"), ProjectID: w.two}, w.foreign, LevelFlag, "", nil},
		"flag: ID of another project":        {Request{Flag: &w.foreign, ProjectID: w.one}, w.foreign, LevelFlag, "", nil},
		"flag: ID outside of a project":      {Request{Flag: &w.a}, w.a, LevelFlag, "", nil},
		"flag: name outside of a project":    {Request{Flag: ptr("a")}, "", LevelFlag, ReasonNoProject, nil},
		"flag: unknown, beside a binding":    {Request{Flag: ptr("x"), Worktree: w.bound, ProjectID: w.one}, "", LevelFlag, ReasonNotFound, all},
		"flag: another project's name":       {Request{Flag: ptr("b"), ProjectID: w.two}, "", LevelFlag, ReasonNotFound, []string{"a"}},
		"flag: empty, beside a binding":      {Request{Flag: ptr(""), Worktree: w.bound, ProjectID: w.one}, "", LevelFlag, ReasonInvalid, nil},
		"flag: no name":                      {Request{Flag: ptr("A/B"), ProjectID: w.one}, "", LevelFlag, ReasonInvalid, nil},
		"flag: no ID":                        {Request{Flag: ptr("env_x"), ProjectID: w.one}, "", LevelFlag, ReasonInvalid, nil},
		"flag: a Machine's ID":               {Request{Flag: &machine, ProjectID: w.one}, "", LevelFlag, ReasonWrongKind, nil},
		"flag: stale ID, beside a binding":   {Request{Flag: &gone, Worktree: w.bound, ProjectID: w.one}, "", LevelFlag, ReasonStale, nil},
		"flag: stale ID, beside a valid env": {Request{Flag: &gone, Env: w.a, ProjectID: w.one}, "", LevelFlag, ReasonStale, nil},

		"env: ID":                         {Request{Env: w.b, ProjectID: w.one}, w.b, LevelEnv, "", nil},
		"env: before the binding":         {Request{Env: w.b, Worktree: w.bound, ProjectID: w.one}, w.b, LevelEnv, "", nil},
		"env: outside of a project":       {Request{Env: w.b}, w.b, LevelEnv, "", nil},
		"env: of another project":         {Request{Env: w.foreign, ProjectID: w.one}, w.foreign, LevelEnv, "", nil},
		"env: stale, beside a binding":    {Request{Env: gone, Worktree: w.bound, ProjectID: w.one}, "", LevelEnv, ReasonStale, nil},
		"env: name where an ID is needed": {Request{Env: "a", Worktree: w.bound, ProjectID: w.one}, "", LevelEnv, ReasonWrongKind, nil},
		"env: a Machine's ID":             {Request{Env: machine, Worktree: w.bound, ProjectID: w.one}, "", LevelEnv, ReasonWrongKind, nil},
		"env: garbage, beside a binding":  {Request{Env: "env_", Worktree: w.bound, ProjectID: w.one}, "", LevelEnv, ReasonInvalid, nil},
		"env: path, beside a binding":     {Request{Env: "../_", Worktree: w.bound, ProjectID: w.one}, "", LevelEnv, ReasonInvalid, nil},
		"env: empty is not set":           {Request{Env: "", Worktree: w.bound, ProjectID: w.one}, w.a, LevelBinding, "", nil},

		"binding":                          {Request{Worktree: w.bound, ProjectID: w.one}, w.a, LevelBinding, "", nil},
		"binding: two":                     {Request{Worktree: w.twice, ProjectID: w.one}, "", LevelBinding, ReasonAmbiguous, []string{"a", "b"}},
		"binding: of the nearest project":  {Request{Worktree: w.twice, ProjectID: w.two}, w.foreign, LevelBinding, "", nil},
		"binding: of another project":      {Request{Worktree: w.bound, ProjectID: w.two}, "", LevelBinding, ReasonUnbound, []string{"a"}},
		"binding: no definition here":      {Request{Worktree: w.bound}, w.a, LevelBinding, "", nil},
		"binding: no definition, several":  {Request{Worktree: w.twice}, "", LevelBinding, ReasonAmbiguous, []string{"a", "b", "a"}},
		"unbound beside existing ones":     {Request{Worktree: w.unbound, ProjectID: w.one}, "", LevelBinding, ReasonUnbound, all},
		"not a git repository":             {Request{Worktree: w.nowhere, ProjectID: w.one}, "", LevelBinding, ReasonUnbound, all},
		"unbound, a project that has none": {Request{Worktree: w.unbound, ProjectID: NewID(KindProject)}, "", LevelBinding, ReasonUnbound, []string{}},
	} {
		t.Run(name, func(t *testing.T) {
			before := files(t, w.Root())
			s, err := w.SelectEnvironment(c.q)
			assert.Equal(t, before, files(t, w.Root()), "selecting makes nothing")
			if c.reason != "" {
				selector(t, err, c.level, c.reason, c.candidates...)
				return
			}
			require.NoError(t, err)
			assert.Equal(t, c.want, s.EnvironmentID)
			assert.Equal(t, c.level, s.Level)
			require.NotNil(t, s.Record)
			assert.Equal(t, s.Record.ProjectID, s.ProjectID)
		})
	}
	assert.Empty(t, w.warnings)
}

func TestPrepareUp(t *testing.T) {
	w := newWorld(t)
	gone, machine := NewID(KindEnvironment), NewID(KindMachine)
	all := []string{"a", "b", "c"}
	for name, c := range map[string]struct {
		q          Request
		want       string
		level      Level
		reason     Reason
		candidates []string
	}{
		"flag: name":                      {Request{Flag: ptr("c"), Worktree: w.bound, ProjectID: w.one}, w.c, LevelFlag, "", nil},
		"flag: ID":                        {Request{Flag: &w.c, Worktree: w.bound, ProjectID: w.one}, w.c, LevelFlag, "", nil},
		"flag: the same name elsewhere":   {Request{Flag: ptr("a"), ProjectID: w.two}, w.foreign, LevelFlag, "", nil},
		"flag: ID of another project":     {Request{Flag: &w.foreign, ProjectID: w.one}, "", LevelFlag, ReasonForeignProject, nil},
		"flag: stale ID":                  {Request{Flag: &gone, Worktree: w.bound, ProjectID: w.one}, "", LevelFlag, ReasonStale, nil},
		"flag: a Machine's ID":            {Request{Flag: &machine, Worktree: w.bound, ProjectID: w.one}, "", LevelFlag, ReasonWrongKind, nil},
		"flag: empty":                     {Request{Flag: ptr(""), Worktree: w.bound, ProjectID: w.one}, "", LevelFlag, ReasonInvalid, nil},
		"flag: no name":                   {Request{Flag: ptr("A"), Worktree: w.bound, ProjectID: w.one}, "", LevelFlag, ReasonInvalid, nil},
		"env: ID":                         {Request{Env: w.c, Worktree: w.bound, ProjectID: w.one}, w.c, LevelEnv, "", nil},
		"env: of another project":         {Request{Env: w.foreign, Worktree: w.bound, ProjectID: w.one}, "", LevelEnv, ReasonForeignProject, nil},
		"env: stale, beside a binding":    {Request{Env: gone, Worktree: w.bound, ProjectID: w.one}, "", LevelEnv, ReasonStale, nil},
		"env: name where an ID is needed": {Request{Env: "a", Worktree: w.bound, ProjectID: w.one}, "", LevelEnv, ReasonWrongKind, nil},
		"binding":                         {Request{Worktree: w.bound, ProjectID: w.one}, w.a, LevelBinding, "", nil},
		"binding: two":                    {Request{Worktree: w.twice, ProjectID: w.one}, "", LevelBinding, ReasonAmbiguous, []string{"a", "b"}},
		"unbound beside existing ones":    {Request{Worktree: w.unbound, ProjectID: w.one}, "", LevelBinding, ReasonUnbound, all},
		"not a git repository":            {Request{Worktree: w.nowhere, ProjectID: w.one}, "", LevelBinding, ReasonUnbound, all},
	} {
		t.Run(name, func(t *testing.T) {
			before := files(t, w.Root())
			s, created, err := w.PrepareUp(UpRequest{Request: c.q})
			assert.Equal(t, before, files(t, w.Root()), "nothing is made")
			assert.False(t, created)
			if c.reason != "" {
				selector(t, err, c.level, c.reason, c.candidates...)
				return
			}
			require.NoError(t, err)
			assert.Equal(t, c.want, s.EnvironmentID)
			assert.Equal(t, c.level, s.Level)
		})
	}
	none, err := w.unbound.Token()
	require.NoError(t, err)
	assert.Empty(t, none, "an up that fails leaves no token")
}

func TestPrepareUpMakes(t *testing.T) {
	h := newHome(t)
	project := NewID(KindProject)
	first, second := worktree(t, repository(t)), worktree(t, repository(t))
	up := func(q Request) (*Selection, bool, error) {
		q.ProjectID = project
		return h.PrepareUp(UpRequest{Request: q, ProjectName: "shop"})
	}

	_, _, err := h.PrepareUp(UpRequest{Request: Request{ProjectID: "prj_x"}})
	explained(t, err)
	_, _, err = up(Request{Flag: ptr("A")})
	selector(t, err, LevelFlag, ReasonInvalid)
	_, _, err = up(Request{Env: NewID(KindEnvironment)})
	selector(t, err, LevelEnv, ReasonStale)
	assert.Empty(t, files(t, h.dir), "a refused up makes not even directories")

	// default is made, and found again, by the worktree that made it.
	s, created, err := up(Request{Worktree: first})
	require.NoError(t, err)
	assert.True(t, created)
	assert.Equal(t, LevelDefault, s.Level)
	assert.Equal(t, "default", s.Name)
	assert.Equal(t, Created, s.Record.State)
	assert.Equal(t, "shop", s.Record.ProjectName)
	assert.Equal(t, os.Geteuid(), s.Record.OwnerUID)
	assert.Equal(t, first.Root, s.Record.Worktree)
	again, created, err := up(Request{Worktree: first})
	require.NoError(t, err)
	assert.False(t, created)
	assert.Equal(t, s.EnvironmentID, again.EnvironmentID)
	_, err = h.SelectEnvironment(Request{Worktree: first, ProjectID: project})
	require.NoError(t, err, "delete finds it after an up that was cut off")

	// Another worktree neither adopts it nor makes one.
	_, _, err = up(Request{Worktree: second})
	selector(t, err, LevelBinding, ReasonUnbound, "default")
	// A name makes one; it is bound when up has succeeded, not before.
	named, created, err := up(Request{Flag: ptr("other"), Worktree: second})
	require.NoError(t, err)
	assert.True(t, created)
	_, _, err = up(Request{Worktree: second})
	selector(t, err, LevelBinding, ReasonUnbound, "default", "other")
	require.NoError(t, h.Bind(project, second, named.EnvironmentID))
	require.NoError(t, h.Bind(project, second, named.EnvironmentID), "binding again is fine")
	got, _, err := up(Request{Worktree: second})
	require.NoError(t, err)
	assert.Equal(t, named.EnvironmentID, got.EnvironmentID)
	// Bound to a second one, it has to say which.
	require.NoError(t, h.Bind(project, second, s.EnvironmentID))
	_, _, err = up(Request{Worktree: second})
	selector(t, err, LevelBinding, ReasonAmbiguous, "default", "other")

	// What is not the project's or not there is not bound.
	foreign := h.up(NewID(KindProject), "x", Worktree{})
	selector(t, h.Bind(project, second, foreign.EnvironmentID), LevelBinding, ReasonForeignProject)
	var missing *MissingError
	require.ErrorAs(t, h.Bind(project, second, NewID(KindEnvironment)), &missing)
	require.NoError(t, h.Bind(project, Worktree{}, s.EnvironmentID), "outside of git nothing is bound")

	// Outside of git a project's first one is default, and the next up has to
	// name it.
	outside := NewID(KindProject)
	_, created, err = h.PrepareUp(UpRequest{Request: Request{ProjectID: outside}})
	require.NoError(t, err)
	assert.True(t, created)
	_, _, err = h.PrepareUp(UpRequest{Request: Request{ProjectID: outside}})
	selector(t, err, LevelBinding, ReasonUnbound, "default")
	assert.Contains(t, err.Error(), "no git worktree")
}

func TestNotOwner(t *testing.T) {
	h := newHome(t)
	project := NewID(KindProject)
	tree := worktree(t, repository(t))
	s := h.bound(project, "a", tree)
	s.Record.OwnerUID = os.Geteuid() + 1
	require.NoError(t, h.Save(s.Record))
	for level, q := range map[Level]Request{
		LevelFlag: {Flag: ptr("a"), ProjectID: project}, LevelEnv: {Env: s.EnvironmentID}, LevelBinding: {Worktree: tree, ProjectID: project},
	} {
		_, err := h.SelectEnvironment(q)
		selector(t, err, level, ReasonNotOwner)
		q.ProjectID = project
		_, _, err = h.PrepareUp(UpRequest{Request: q})
		selector(t, err, level, ReasonNotOwner)
	}
	selector(t, h.Bind(project, tree, s.EnvironmentID), LevelBinding, ReasonNotOwner)
}

// Worktrees that are moved, added or cloned, through the whole selection.
func TestBindingsFollowWorktrees(t *testing.T) {
	h := newHome(t)
	project := NewID(KindProject)
	main := repository(t)
	base := filepath.Dir(main)
	a := h.bound(project, "a", worktree(t, main))
	from := func(dir string) (*Selection, error) {
		return h.SelectEnvironment(Request{Worktree: worktree(t, dir), ProjectID: project})
	}
	linked := filepath.Join(base, "linked")
	git(t, main, "worktree", "add", "-q", linked)
	_, err := from(linked)
	selector(t, err, LevelBinding, ReasonUnbound, "a")
	b := h.bound(project, "b", worktree(t, linked))

	moved := filepath.Join(base, "moved")
	require.NoError(t, os.Rename(linked, moved))
	s, err := from(moved)
	require.NoError(t, err)
	assert.Equal(t, b.EnvironmentID, s.EnvironmentID)

	// Another worktree where the moved one was is another one.
	git(t, main, "worktree", "add", "-q", "-f", linked, "-b", "third")
	_, err = from(linked)
	selector(t, err, LevelBinding, ReasonUnbound, "a", "b")
	s, err = from(main)
	require.NoError(t, err)
	assert.Equal(t, a.EnvironmentID, s.EnvironmentID)

	git(t, base, "clone", "-q", main, "clone")
	_, err = from(filepath.Join(base, "clone"))
	selector(t, err, LevelBinding, ReasonUnbound, "a", "b")

	// A nested project in the same worktree has bindings of its own.
	nested := NewID(KindProject)
	_, err = h.SelectEnvironment(Request{Worktree: worktree(t, main), ProjectID: nested})
	selector(t, err, LevelBinding, ReasonUnbound)
	n, created, err := h.PrepareUp(UpRequest{Request: Request{Worktree: worktree(t, main), ProjectID: nested}})
	require.NoError(t, err)
	assert.True(t, created)
	s, err = from(main)
	require.NoError(t, err)
	assert.Equal(t, a.EnvironmentID, s.EnvironmentID)
	assert.NotEqual(t, n.EnvironmentID, s.EnvironmentID)
}

// Of two ups of one name at one instant, one makes it and the other gets it.
func TestTwoUpsAtOnce(t *testing.T) {
	t.Run("in one process", func(t *testing.T) {
		h := newHome(t)
		for range 10 {
			project := NewID(KindProject)
			made := make([]string, 8)
			var creators sync.Map
			var group sync.WaitGroup
			for i := range made {
				r := h.another()
				group.Go(func() {
					s, created, err := r.PrepareUp(UpRequest{Request: Request{Flag: ptr("one"), ProjectID: project}})
					if assert.NoError(t, err) {
						made[i] = s.EnvironmentID
						if created {
							creators.Store(i, true)
						}
					}
				})
			}
			group.Wait()
			count := 0
			creators.Range(func(any, any) bool { count++; return true })
			assert.Equal(t, 1, count, "one made it")
			for _, id := range made {
				assert.Equal(t, made[0], id)
			}
		}
		assert.Empty(t, h.warnings)
	})
	t.Run("in processes", func(t *testing.T) {
		h := newHome(t)
		for _, name := range []string{"one", ""} { // "": default, bound by its worktree
			project := NewID(KindProject)
			tree := repository(t)
			var readers []*bufio.Reader
			for range 4 {
				_, out := other(t, "up", h.dir, project, tree, name)
				readers = append(readers, bufio.NewReader(out))
			}
			ids, made := map[string]bool{}, 0
			for _, r := range readers {
				line, err := r.ReadString('\n')
				require.NoError(t, err)
				id, created, _ := strings.Cut(strings.TrimSpace(line), " ")
				require.NoError(t, CheckID(id, KindEnvironment), line)
				ids[id] = true
				if created == "true" {
					made++
				}
			}
			assert.Len(t, ids, 1)
			assert.Equal(t, 1, made)
			list, err := h.List(project)
			require.NoError(t, err)
			assert.Len(t, list, 1)
		}
	})
}

func otherUp() {
	q := UpRequest{Request: Request{ProjectID: os.Args[2]}}
	if os.Args[4] != "" {
		q.Flag = &os.Args[4]
	}
	r, err := open(Options{Getenv: environ(os.Args[1])}, os.Args[1], os.Geteuid())
	if err == nil {
		q.Worktree, err = FindWorktree(os.Args[3], nil)
	}
	if err == nil {
		var s *Selection
		var created bool
		if s, created, err = r.PrepareUp(q); err == nil {
			fmt.Println(s.EnvironmentID, created)
			return
		}
	}
	fmt.Println(err)
	os.Exit(1)
}

func TestSelectMachine(t *testing.T) {
	web, db := NewID(KindMachine), NewID(KindMachine)
	two := &Record{Name: "e", EnvironmentID: NewID(KindEnvironment), Machines: []Machine{{MachineID: web, Name: "web"}, {MachineID: db, Name: "db"}}}
	chosen, stale := two.Clone(), two.Clone()
	chosen.DefaultMachine, stale.DefaultMachine = "db", "gone"
	byID := two.Clone()
	byID.DefaultMachine = web
	sole := &Record{Machines: two.Machines[:1]}
	foreign := NewID(KindMachine)
	for name, c := range map[string]struct {
		record *Record
		flag   *string
		env    string
		want   string
		level  Level
		reason Reason
	}{
		"flag: name":                       {chosen, ptr("web"), "", web, "", ""},
		"flag: ID":                         {chosen, &web, "", web, "", ""},
		"flag: before all":                 {chosen, &web, db, web, "", ""},
		"flag: unknown, beside a default":  {chosen, ptr("x"), "", "", LevelMachineFlag, ReasonNotFound},
		"flag: empty":                      {chosen, ptr(""), "", "", LevelMachineFlag, ReasonInvalid},
		"flag: another Environment's":      {chosen, &foreign, "", "", LevelMachineFlag, ReasonStale},
		"flag: an Environment's ID":        {chosen, &chosen.EnvironmentID, "", "", LevelMachineFlag, ReasonWrongKind},
		"flag: no ID":                      {chosen, ptr("mch_"), "", "", LevelMachineFlag, ReasonInvalid},
		"env: ID":                          {chosen, nil, web, web, "", ""},
		"env: name":                        {chosen, nil, "web", "", LevelMachineEnv, ReasonWrongKind},
		"env: another Environment's":       {chosen, nil, foreign, "", LevelMachineEnv, ReasonStale},
		"env: foreign beside the sole one": {sole, nil, foreign, "", LevelMachineEnv, ReasonStale},
		"default":                          {chosen, nil, "", db, "", ""},
		"default: gone":                    {stale, nil, "", "", LevelMachineDefault, ReasonStale},
		"default: an ID":                   {byID, nil, "", "", LevelMachineDefault, ReasonStale},
		"sole":                             {sole, nil, "", web, "", ""},
		"several":                          {two, nil, "", "", LevelMachineSole, ReasonAmbiguous},
		"none":                             {&Record{}, nil, "", "", LevelMachineSole, ReasonNotFound},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := SelectMachine(c.record, c.flag, c.env)
			if c.reason != "" {
				s := selector(t, err, c.level, c.reason)
				assert.Len(t, s.Candidates, len(c.record.Machines))
				return
			}
			require.NoError(t, err)
			assert.Equal(t, c.want, m.MachineID)
		})
	}
}

func TestRemove(t *testing.T) {
	w := newWorld(t)
	before, err := w.List("")
	require.NoError(t, err)
	assert.Len(t, before, 4)
	require.NoError(t, os.MkdirAll(filepath.Join(w.MachineDir(w.a, NewID(KindMachine)), "work", "work"), 0o700))

	require.NoError(t, w.Remove(w.one, w.a, nil))
	assert.NoDirExists(t, w.EnvironmentDir(w.a))
	_, err = w.SelectEnvironment(Request{Env: w.a, Worktree: w.bound, ProjectID: w.one})
	selector(t, err, LevelEnv, ReasonStale)
	_, err = w.SelectEnvironment(Request{Worktree: w.bound, ProjectID: w.one})
	selector(t, err, LevelBinding, ReasonUnbound, "b", "c")
	s, err := w.SelectEnvironment(Request{Worktree: w.twice, ProjectID: w.one})
	require.NoError(t, err, "one of two bindings is left")
	assert.Equal(t, w.b, s.EnvironmentID)
	require.NoError(t, w.Remove(w.one, w.a, nil), "again is fine")
	var missing *MissingError
	require.ErrorAs(t, w.Save(&Record{EnvironmentID: w.a, ProjectID: w.one, Name: "a", State: Ready}), &missing, "nothing brings it back")
	assert.NoDirExists(t, w.EnvironmentDir(w.a))

	made := w.up(w.one, "a", Worktree{})
	assert.NotEqual(t, w.a, made.EnvironmentID, "the name is free, the ID is spent")
	for _, id := range []string{made.EnvironmentID, w.b, w.c} {
		owner, err := w.Own(context.Background(), id)
		require.NoError(t, err)
		require.NoError(t, w.Remove("", id, owner))
	}
	assert.NoDirExists(t, w.ProjectDir(w.one))
	assert.DirExists(t, w.ProjectDir(w.two))
	require.NoError(t, w.Remove("", w.foreign, nil))
	assert.DirExists(t, w.Root())
	assert.Empty(t, files(t, w.Root()), "nothing but the empty state directory")
	list, err := w.List("")
	require.NoError(t, err)
	assert.Empty(t, list)
	assert.Empty(t, w.warnings)
}

// A removal that is cut off between any two steps is finished by the next
// delete, and by up.
func TestRemoveAfterACrash(t *testing.T) {
	steps := map[string]func(h *home, project, id string){
		"state recorded": func(h *home, project, id string) {
			r, err := h.Record(id)
			require.NoError(h.t, err)
			r.State = Deleting
			require.NoError(h.t, h.Save(r))
		},
		"removal noted": func(h *home, project, id string) { noteRemoval(h, project, id) },
		"renamed": func(h *home, project, id string) {
			noteRemoval(h, project, id)
			require.NoError(h.t, os.Rename(h.EnvironmentDir(id), h.trash(id)))
		},
		"half removed": func(h *home, project, id string) {
			noteRemoval(h, project, id)
			require.NoError(h.t, os.Rename(h.EnvironmentDir(id), h.trash(id)))
			require.NoError(h.t, os.Remove(filepath.Join(h.trash(id), "record.json")))
		},
		"removed, but for the index": func(h *home, project, id string) {
			noteRemoval(h, project, id)
			require.NoError(h.t, os.RemoveAll(h.EnvironmentDir(id)))
		},
		"made, but for the directory": func(h *home, project, id string) {
			require.NoError(h.t, os.RemoveAll(h.EnvironmentDir(id)))
		},
		"made, but for the record": func(h *home, project, id string) {
			require.NoError(h.t, os.Remove(h.RecordPath(id)))
		},
		"index lost": func(h *home, project, id string) { require.NoError(h.t, os.RemoveAll(h.ProjectDir(project))) },
	}
	for name, crash := range steps {
		for _, by := range []string{"name", "ID", "binding"} {
			if by == "binding" && name == "index lost" {
				continue // bindings are lost with it
			}
			t.Run(name+"/delete by "+by, func(t *testing.T) {
				h := newHome(t)
				project := NewID(KindProject)
				tree := worktree(t, repository(t))
				id := h.bound(project, "a", tree).EnvironmentID
				crash(h, project, id)
				q := map[string]Request{"name": {Flag: ptr("a"), ProjectID: project}, "ID": {Env: id}, "binding": {Worktree: tree, ProjectID: project}}[by]
				s, err := h.SelectEnvironment(q)
				require.NoError(t, err)
				assert.Equal(t, id, s.EnvironmentID)
				list, err := h.List("")
				require.NoError(t, err)
				assert.Len(t, list, 1)
				require.NoError(t, h.Remove(s.ProjectID, s.EnvironmentID, nil))
				assert.Empty(t, files(t, h.Root()))
			})
		}
		t.Run(name+"/up", func(t *testing.T) {
			h := newHome(t)
			project := NewID(KindProject)
			tree := worktree(t, repository(t))
			id := h.bound(project, "a", tree).EnvironmentID
			crash(h, project, id)
			s := h.up(project, "a", tree)
			require.NoError(t, s.Err)
			require.NotNil(t, s.Record)
			spent := name == "renamed" || name == "half removed" || name == "removed, but for the index"
			assert.Equal(t, spent, s.EnvironmentID != id)
			require.NoError(t, h.Bind(project, tree, s.EnvironmentID))
			list, err := h.List("")
			require.NoError(t, err)
			require.Len(t, list, 1)
			require.NoError(t, list[0].Err)
			assert.Equal(t, s.EnvironmentID, list[0].ID)
			for _, path := range files(t, h.Root()) {
				assert.NotContains(t, path, trashPrefix)
			}
			require.NoError(t, h.Remove("", s.EnvironmentID, nil))
			assert.Empty(t, files(t, h.Root()))
		})
		t.Run(name+"/bare up", func(t *testing.T) {
			h := newHome(t)
			project := NewID(KindProject)
			tree := worktree(t, repository(t))
			s, _, err := h.PrepareUp(UpRequest{Request: Request{Worktree: tree, ProjectID: project}})
			require.NoError(t, err)
			crash(h, project, s.EnvironmentID)
			_, _, err = h.PrepareUp(UpRequest{Request: Request{Worktree: tree, ProjectID: project}})
			if name == "index lost" {
				selector(t, err, LevelBinding, ReasonUnbound, "default")
				return
			}
			require.NoError(t, err)
		})
	}
}

func noteRemoval(h *home, project, id string) {
	require.NoError(h.t, h.inProject(project, func() error {
		v, err := h.view(project)
		if err != nil {
			return err
		}
		name, _ := v.name(id)
		v.Environments[name] = entry{ID: id, Removal: true}
		return h.saveIndex(v)
	}))
}

// A lost or damaged index is found again in the records; a name that two have
// is one's, and the other is selected by its ID.
func TestStrays(t *testing.T) {
	h := newHome(t)
	project := NewID(KindProject)
	old := h.up(project, "a", Worktree{})
	require.NoError(t, os.WriteFile(h.indexPath(project), []byte("{"), 0o600))
	os.Remove(h.indexPath(project) + previousSuffix)
	var corrupt *CorruptError
	_, err := h.SelectEnvironment(Request{Flag: ptr("a"), ProjectID: project})
	require.ErrorAs(t, err, &corrupt)
	assert.Contains(t, err.Error(), "found again")
	_, err = h.SelectEnvironment(Request{Env: old.EnvironmentID})
	require.NoError(t, err, "an ID needs no index")
	list, err := h.List("")
	require.NoError(t, err)
	assert.Len(t, list, 1, "nor does the list")

	require.NoError(t, os.Remove(h.indexPath(project)))
	h.warnings = nil
	s, err := h.SelectEnvironment(Request{Flag: ptr("a"), ProjectID: project})
	require.NoError(t, err)
	assert.Equal(t, old.EnvironmentID, s.EnvironmentID)
	require.NotEmpty(t, h.warnings)
	var stray *StrayError
	require.ErrorAs(t, h.warnings[0], &stray)
	explained(t, h.warnings[0])

	// up mends the index.
	assert.Equal(t, old.EnvironmentID, h.up(project, "a", Worktree{}).EnvironmentID)
	h.warnings = nil
	other := h.up(project, "b", Worktree{})
	assert.Empty(t, h.warnings)

	// Two of one name: the index has one, and says so of the other.
	other.Record.Name = "a"
	require.NoError(t, h.Save(other.Record))
	require.NoError(t, h.inProject(project, func() error {
		v, err := h.view(project)
		require.NoError(t, err)
		v.remove(other.EnvironmentID)
		return h.saveIndex(v)
	}))
	s, err = h.SelectEnvironment(Request{Flag: ptr("a"), ProjectID: project})
	require.NoError(t, err)
	assert.Equal(t, old.EnvironmentID, s.EnvironmentID)
	_, err = h.SelectEnvironment(Request{ProjectID: project})
	selector(t, err, LevelBinding, ReasonUnbound, "a", "a")
	s, err = h.SelectEnvironment(Request{Flag: &other.EnvironmentID, ProjectID: project})
	require.NoError(t, err)
	require.NoError(t, h.Remove(s.ProjectID, s.EnvironmentID, nil))
	require.NoError(t, h.Remove("", old.EnvironmentID, nil))
	assert.Empty(t, files(t, h.Root()))

	// A binding whose Environment nobody knows any more.
	tree := worktree(t, repository(t))
	bound := h.bound(project, "a", tree)
	require.NoError(t, h.inProject(project, func() error {
		v, err := h.view(project)
		require.NoError(t, err)
		delete(v.Environments, "a")
		return h.saveIndex(v)
	}))
	require.NoError(t, os.RemoveAll(h.EnvironmentDir(bound.EnvironmentID)))
	for _, try := range []func() error{
		func() error { _, err := h.SelectEnvironment(Request{Worktree: tree, ProjectID: project}); return err },
		func() error {
			_, _, err := h.PrepareUp(UpRequest{Request: Request{Worktree: tree, ProjectID: project}})
			return err
		},
	} {
		selector(t, try(), LevelBinding, ReasonStale)
	}
}

// What is mounted in an Environment's directory is not removed with it.
func TestRemoveRefusesMounts(t *testing.T) {
	h := newHome(t)
	s := h.up(NewID(KindProject), "a", Worktree{})
	mounts, err := mountsBelow(h.EnvironmentDir(s.EnvironmentID))
	require.NoError(t, err)
	assert.Empty(t, mounts)
	mounts, err = mountsBelow("/")
	require.NoError(t, err)
	assert.Contains(t, mounts, "/proc")
	assert.Contains(t, mounts, "/")
	if os.Geteuid() != 0 {
		t.Skip("only root can mount here")
	}
	point := filepath.Join(h.MachineDir(s.EnvironmentID, NewID(KindMachine)), "a b")
	require.NoError(t, os.MkdirAll(point, 0o700))
	require.NoError(t, exec.Command("mount", "-t", "tmpfs", "tmpfs", point).Run())
	t.Cleanup(func() { exec.Command("umount", point).Run() })
	precious := filepath.Join(point, "precious")
	require.NoError(t, os.WriteFile(precious, nil, 0o600))
	var place *PlaceError
	require.ErrorAs(t, h.Remove("", s.EnvironmentID, nil), &place)
	assert.Contains(t, place.Why, point)
	assert.FileExists(t, precious)
	require.NoError(t, exec.Command("umount", point).Run())
	require.NoError(t, h.Remove("", s.EnvironmentID, nil))
	assert.Empty(t, files(t, h.Root()))
}

func TestErrorsExplain(t *testing.T) {
	cause := errors.New("cause")
	for _, err := range []Explained{
		&FileError{"cannot", "/p", cause, "n"}, &PlaceError{"/p", "w", "n"}, &NewerVersionError{"/p", 2, 1},
		&CorruptError{"/p", cause, "n"}, &RestoredError{"/p", cause}, &StrayError{"p", "e", "n", "w", "x"},
		&HeldError{"e", 1}, &HeldError{"e", 0}, &MissingError{"e"}, &NameError{"N"}, &NoDefinitionError{"/d"},
		&WorkspaceError{Path: "/p", Why: "w", Next: "n"},
	} {
		what, why, next := err.Explain()
		assert.NotEmpty(t, what, "%T", err)
		assert.NotEmpty(t, why, "%T", err)
		assert.NotEmpty(t, next, "%T", err)
		assert.Equal(t, what+": "+why+"; "+next, err.Error())
	}
}
