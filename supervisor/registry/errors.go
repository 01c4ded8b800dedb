package registry

import (
	"fmt"
	"io/fs"
	"strings"
)

// Explained is what every error of this package is: it says what failed, why,
// and the next thing to do. Any of the parts but the first may be empty.
type Explained interface {
	error
	Explain() (what, why, next string)
}

func sentence(what, why, next string) string {
	var b strings.Builder
	b.WriteString(what)
	if why != "" {
		b.WriteString(": " + why)
	}
	if next != "" {
		b.WriteString("; " + next)
	}
	return b.String()
}

// A FileError is a failure of a file or directory that vz keeps state in.
type FileError struct {
	What string // such as "cannot write the record"
	Path string
	Err  error
	Next string
}

func (e *FileError) Explain() (what, why, next string) {
	return e.What + " " + e.Path, reason(e.Err), e.Next
}
func (e *FileError) Error() string { return sentence(e.Explain()) }
func (e *FileError) Unwrap() error { return e.Err }

// reason is an error's text without the path, which is said already.
func reason(err error) string {
	type unwrapper interface{ Unwrap() error }
	for err != nil {
		switch e := err.(type) {
		case unwrapper:
			if inner := e.Unwrap(); inner != nil {
				err = inner
				continue
			}
		}
		return err.Error()
	}
	return ""
}

// A PlaceError says that a directory can't be trusted with state or sockets:
// somebody else's, open to others, or no directory at all.
type PlaceError struct {
	Path string
	Why  string
	Next string
}

func (e *PlaceError) Explain() (what, why, next string) {
	return "cannot use the directory " + e.Path, e.Why, e.Next
}
func (e *PlaceError) Error() string { return sentence(e.Explain()) }

// A NewerVersionError refuses a file that a newer vz wrote. It is neither read
// nor replaced, and no older copy is taken in its place.
type NewerVersionError struct {
	Path         string
	Found, Known int
}

func (e *NewerVersionError) Explain() (what, why, next string) {
	return "cannot read " + e.Path,
		fmt.Sprintf("it has version %d, this vz knows up to %d", e.Found, e.Known),
		"use the vz that wrote it, or a newer one"
}
func (e *NewerVersionError) Error() string { return sentence(e.Explain()) }

// A CorruptError says that a file and the previous copy of it are both
// unusable.
type CorruptError struct {
	Path string
	Err  error // what is wrong with the current copy
	Next string
}

func (e *CorruptError) Explain() (what, why, next string) {
	return "cannot read " + e.Path, "it is damaged (" + e.Err.Error() + ") and no good earlier copy stands beside it", e.Next
}
func (e *CorruptError) Error() string { return sentence(e.Explain()) }
func (e *CorruptError) Unwrap() error { return e.Err }

// A RestoredError is a warning: the current copy of a file was damaged and the
// previous good one was used.
type RestoredError struct {
	Path string
	Err  error
}

func (e *RestoredError) Explain() (what, why, next string) {
	return "used the previous copy of " + e.Path, "the current one is damaged (" + e.Err.Error() + ")",
		"the last change may be missing; `vz up` reconciles"
}
func (e *RestoredError) Error() string { return sentence(e.Explain()) }
func (e *RestoredError) Unwrap() error { return e.Err }

// A StrayError is a warning: the index of a project and the directories of its
// Environments did not agree, as after a crash.
type StrayError struct {
	ProjectID     string
	EnvironmentID string
	Name          string
	Why           string
	Next          string
}

func (e *StrayError) Explain() (what, why, next string) {
	return fmt.Sprintf("Environment %s (%s) of project %s is incomplete", e.EnvironmentID, e.Name, e.ProjectID), e.Why, e.Next
}
func (e *StrayError) Error() string { return sentence(e.Explain()) }

// A HeldError says that a living supervisor owns the Environment.
type HeldError struct {
	EnvironmentID string
	PID           int // a hint of the owner's; 0 when unknown
}

func (e *HeldError) Explain() (what, why, next string) {
	owner := "another supervisor owns it"
	if e.PID > 0 {
		owner = fmt.Sprintf("the supervisor with process ID %d owns it", e.PID)
	}
	return "cannot take Environment " + e.EnvironmentID, owner,
		"talk to that one (`vz status`), or `vz stop` it first"
}
func (e *HeldError) Error() string { return sentence(e.Explain()) }

// A MissingError says that an Environment has no directory. It is also
// fs.ErrNotExist.
type MissingError struct {
	EnvironmentID string
}

func (e *MissingError) Explain() (what, why, next string) {
	return "there is no Environment " + e.EnvironmentID, "the state directory has nothing under this ID",
		"`vz status --all` lists what there is"
}
func (e *MissingError) Error() string { return sentence(e.Explain()) }
func (e *MissingError) Unwrap() error { return fs.ErrNotExist }

// An IDError says that a text is no ID of the kind wanted.
type IDError struct {
	Value string
	Want  Kind // empty: of any kind
	Why   string
}

func (e *IDError) Explain() (what, why, next string) {
	what = fmt.Sprintf("%q is not an ID", e.Value)
	if e.Want != "" {
		what = fmt.Sprintf("%q is not the ID of %s", e.Value, e.Want.article())
	}
	return what, e.Why, ""
}
func (e *IDError) Error() string { return sentence(e.Explain()) }

// A NameError says that a text can't be the name of an Environment.
type NameError struct {
	Value string
}

func (e *NameError) Explain() (what, why, next string) {
	return fmt.Sprintf("%q cannot be the name of an Environment", e.Value),
		"a name has 1 to 63 of a-z, 0-9 and -, and neither begins nor ends with -", "choose such a name"
}
func (e *NameError) Error() string { return sentence(e.Explain()) }

// A WorkspaceError says that the git directory of a worktree can't be used.
type WorkspaceError struct {
	Path string
	Why  string
	Next string
	Err  error
}

func (e *WorkspaceError) Explain() (what, why, next string) {
	return "cannot tell which worktree this is from " + e.Path, e.Why, e.Next
}
func (e *WorkspaceError) Error() string { return sentence(e.Explain()) }
func (e *WorkspaceError) Unwrap() error { return e.Err }

// A NoDefinitionError says that no vz.json was found.
type NoDefinitionError struct {
	Dir string
}

func (e *NoDefinitionError) Explain() (what, why, next string) {
	return "there is no " + DefinitionName, "neither " + e.Dir + " nor a directory above it has one",
		"change to a project's directory, write a vz.json (see README.md), or name an Environment by its ID"
}
func (e *NoDefinitionError) Error() string { return sentence(e.Explain()) }

// Level is where a selector came from, in the order in which they are asked.
type Level string

const (
	LevelFlag    Level = "--environment"
	LevelEnv     Level = "VZ_ENVIRONMENT_ID"
	LevelBinding Level = "the binding of this worktree"
	LevelDefault Level = "default" // made by up in a project that has none

	LevelMachineFlag    Level = "--machine"
	LevelMachineEnv     Level = "VZ_MACHINE_ID"
	LevelMachineDefault Level = "default_machine"
	LevelMachineSole    Level = "the sole Machine"
)

// Reason is why a selection failed.
type Reason string

const (
	ReasonInvalid        Reason = "invalid"         // neither a name nor an ID can look like that
	ReasonWrongKind      Reason = "wrong kind"      // a name where an ID is required, or the ID of something else
	ReasonNotFound       Reason = "not found"       // nothing has that name
	ReasonStale          Reason = "stale"           // the ID of what is no more
	ReasonAmbiguous      Reason = "ambiguous"       // several would do
	ReasonUnbound        Reason = "unbound"         // no selector, and this worktree has no binding
	ReasonForeignProject Reason = "foreign project" // it is another project's
	ReasonNotOwner       Reason = "not owner"       // it is another user's, or another Environment's
	ReasonNoProject      Reason = "no project"      // a name needs a project to be looked up in
)

// Candidate is one that could have been meant.
type Candidate struct {
	ID   string
	Name string
}

// A SelectorError says at which level a selection failed. Nothing below that
// level was asked.
type SelectorError struct {
	Level      Level
	Value      string // as it was given; empty for a binding
	Reason     Reason
	Detail     string
	Next       string
	Candidates []Candidate
}

func (e *SelectorError) Explain() (what, why, next string) {
	noun := "an Environment"
	switch e.Level {
	case LevelMachineFlag, LevelMachineEnv, LevelMachineDefault, LevelMachineSole:
		noun = "a Machine"
	}
	what = "cannot select " + noun
	if e.Value != "" {
		what += fmt.Sprintf(" by %s %q", e.Level, e.Value)
	} else if e.Level != LevelDefault {
		what += " by " + string(e.Level)
	}
	why = e.Detail
	if len(e.Candidates) > 0 {
		names := make([]string, len(e.Candidates))
		for i, c := range e.Candidates {
			names[i] = c.Name + " (" + c.ID + ")"
		}
		why += ". There are: " + strings.Join(names, ", ")
	}
	return what, why, e.Next
}
func (e *SelectorError) Error() string { return sentence(e.Explain()) }
