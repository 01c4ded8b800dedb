package config

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
)

// Host is the computer that Machines are to run on.
type Host struct {
	OS   string // linux, darwin, windows: as GOOS
	Arch string // amd64, arm64: as GOARCH
}

// CurrentHost is this one.
func CurrentHost() Host { return Host{OS: runtime.GOOS, Arch: runtime.GOARCH} }

func (h Host) String() string { return h.OS + "/" + h.Arch }

// Status is a capability's label.
type Status string

// The labels. What is Active or Dev is admitted.
const (
	Active  Status = "ACTIVE"  // works and is shown by its evidence
	Dev     Status = "DEV"     // works in part, and documents say so
	Planned Status = "PLANNED" // not built yet
	NA      Status = "NA"      // will not be
)

// Any is the word for every host, target, profile or isolation.
const Any = "any"

// Entry is one row of the matrix: what is known of a capability on a host for
// a target, profile and isolation.
type Entry struct {
	ID           string `json:"id"` // CAPABILITY[@HOST/TARGET/…], unique
	Capability   string `json:"capability"`
	Host         string `json:"host"`      // linux, darwin, windows, any
	Target       string `json:"target"`    // linux, macos, any
	Profile      string `json:"profile"`   // developer, hardened, any
	Isolation    string `json:"isolation"` // vm, namespace, any
	Status       Status `json:"status"`
	Evidence     string `json:"evidence"`      // what shows it
	NegotiatedBy string `json:"negotiated_by"` // the package that provides it
	RejectedBy   string `json:"rejected_by"`   // who refuses it where it isn't
	Note         string `json:"note"`          // a sentence for people
}

// Admitted says whether a definition may ask for it.
func (e Entry) Admitted() bool { return e.Status == Active || e.Status == Dev }

// Capabilities is the whole matrix: the single source of every label.
type Capabilities struct {
	SchemaVersion string            `json:"schema_version"`
	Statuses      map[Status]string `json:"statuses"`
	Entries       []Entry           `json:"entries"`
}

//go:embed host-target-capabilities-v0.4.json
var matrixText []byte

var matrix = sync.OnceValue(func() *Capabilities {
	m := &Capabilities{}
	decoder := json.NewDecoder(bytes.NewReader(matrixText))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(m); err != nil {
		panic("the embedded matrix: " + err.Error())
	}
	return m
})

// Matrix is config/host-target-capabilities-v0.4.json. Nobody writes to it.
func Matrix() *Capabilities { return matrix() }

// Entry finds one by its ID.
func (m *Capabilities) Entry(id string) (Entry, bool) {
	i := slices.IndexFunc(m.Entries, func(e Entry) bool { return e.ID == id })
	if i < 0 {
		return Entry{}, false
	}
	return m.Entries[i], true
}

// Find returns the entry that says most precisely what holds; Any or nothing
// for a dimension matches only entries that hold for all of it. A capability
// that the matrix doesn't know is NA.
func (m *Capabilities) Find(capability, host, target, profile, isolation string) Entry {
	best, most := Entry{ID: capability, Capability: capability, Host: Any, Target: Any, Profile: Any, Isolation: Any, Status: NA}, -1
	for _, e := range m.Entries {
		if e.Capability != capability {
			continue
		}
		// The earlier dimension weighs more, so that no two fit equally well.
		fit, matches := 0, true
		for _, d := range []struct{ has, want string }{{e.Host, host}, {e.Target, target}, {e.Profile, profile}, {e.Isolation, isolation}} {
			fit *= 2
			if d.has == d.want && d.has != Any {
				fit++
			} else if d.has != Any {
				matches = false
			}
		}
		if matches && fit > most {
			best, most = e, fit
		}
	}
	return best
}

// claim is a label that a document gives: an HTML comment in Markdown, anything
// else around it elsewhere.
//
//	| Docker | not yet <!-- cap:docker.engine PLANNED --> |
var claim = regexp.MustCompile(`\bcap:([A-Za-z0-9_.@/-]+)(?:[ \t]+([A-Za-z]+))?`)

// CheckClaims holds a document to the matrix. Documents, help and the site mark
// each statement about a capability with
//
//	cap:ID STATUS
//
// (in Markdown inside an HTML comment), where ID is an entry's. It returns one
// error for each claim that names no entry or another status than the entry's,
// and one for each visible label in a line with a marker that contradicts it: a
// table cell that says ACTIVE beside cap:x PLANNED is a lie to the reader.
func (m *Capabilities) CheckClaims(file, text string) []error {
	var all []error
	for i, line := range strings.Split(text, "\n") {
		claims := claim.FindAllStringSubmatch(line, -1)
		said := map[Status]bool{}
		wrong := func(format string, args ...any) {
			all = append(all, fmt.Errorf("%s:%d: %s", file, i+1, fmt.Sprintf(format, args...)))
		}
		for _, c := range claims {
			id, status := c[1], Status(c[2])
			entry, found := m.Entry(id)
			said[entry.Status] = true
			switch {
			case !found:
				var ids []string
				for _, e := range m.Entries {
					ids = append(ids, e.ID)
				}
				problem := fmt.Sprintf("the matrix has no entry %q", id)
				if near := nearest(id, ids); near != "" {
					problem += fmt.Sprintf("; did you mean %q?", near)
				}
				wrong("%s", problem)
			case status != entry.Status:
				wrong("cap:%s says %q, and the matrix says %s", id, status, entry.Status)
			}
		}
		if len(claims) == 0 {
			continue
		}
		visible := claim.ReplaceAllString(line, "")
		for status := range m.Statuses {
			if !said[status] && regexp.MustCompile(`\b`+string(status)+`\b`).MatchString(visible) {
				wrong("the line reads %s, and its marker says otherwise", status)
			}
		}
	}
	return all
}
