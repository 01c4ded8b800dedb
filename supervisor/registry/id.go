package registry

import (
	"crypto/rand"
	"io"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/oklog/ulid/v2"
)

// Kind is what an ID names; it is the ID's prefix.
type Kind string

const (
	KindProject     Kind = "prj"
	KindEnvironment Kind = "env"
	KindMachine     Kind = "mch"
	KindIncarnation Kind = "inc"
	KindFault       Kind = "flt"
	KindExecution   Kind = "exe"
)

func (k Kind) article() string {
	switch k {
	case KindProject:
		return "a project"
	case KindEnvironment:
		return "an Environment"
	case KindMachine:
		return "a Machine"
	case KindIncarnation:
		return "an incarnation"
	case KindFault:
		return "a fault"
	case KindExecution:
		return "an execution"
	}
	return "nothing known"
}

func (k Kind) known() bool { return k.article() != "nothing known" }

// ids makes IDs that sort in the order in which this process made them.
var ids = generator{now: time.Now, entropy: rand.Reader}

// NewID makes an ID of the given kind: the kind, "_" and a lower-case ULID, 48
// bits of time in ms and 80 from the system's CSPRNG. Safe for any goroutine.
func NewID(kind Kind) string { return string(kind) + "_" + ids.next() }

type generator struct {
	now     func() time.Time
	entropy io.Reader

	mu        sync.Mutex
	monotonic *ulid.MonotonicEntropy
	last      uint64 // ms
}

func (g *generator) next() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.monotonic == nil {
		g.monotonic = ulid.Monotonic(g.entropy, 0)
	}
	// A clock that is set back must not break the order.
	ms := max(ulid.Timestamp(g.now()), g.last)
	id, err := ulid.New(ms, g.monotonic)
	if err != nil {
		// The increments of one ms overflowed 80 bits: go on in the next one.
		// crypto/rand itself never fails, it ends the process.
		ms++
		id = ulid.MustNew(ms, g.monotonic)
	}
	g.last = ms
	return strings.ToLower(id.String())
}

// ParseID says of which kind an ID is. Errors are *IDError.
func ParseID(s string) (Kind, error) {
	prefix, rest, found := strings.Cut(s, "_")
	kind := Kind(prefix)
	if !found || !kind.known() {
		return "", &IDError{Value: s, Why: "an ID begins with prj_, env_, mch_, inc_, flt_ or exe_"}
	}
	if id, err := ulid.ParseStrict(strings.ToUpper(rest)); err != nil || strings.ToLower(id.String()) != rest {
		return "", &IDError{Value: s, Why: prefix + "_ is followed by a ULID of 26 characters in lower case"}
	}
	return kind, nil
}

// CheckID says whether s is an ID of the given kind. Errors are *IDError.
func CheckID(s string, want Kind) error {
	kind, err := ParseID(s)
	if err != nil {
		err.(*IDError).Want = want
		return err
	}
	if kind != want {
		return &IDError{Value: s, Want: want, Why: "it is the ID of " + kind.article()}
	}
	return nil
}

// looksLikeID says whether a selector is meant as an ID: names have no "_".
func looksLikeID(s string) bool { return strings.Contains(s, "_") }

var name = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// CheckName says whether s can be the name of an Environment: a DNS label in
// lower case, so that no name can be taken for an ID. Errors are *NameError.
func CheckName(s string) error {
	if !name.MatchString(s) {
		return &NameError{Value: s}
	}
	return nil
}
