package faults

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"vz.test/vz/netstack/packet"
)

// Directions of a fault.
const (
	Both     = "both" // each direction once
	Request  = "request"
	Response = "response"
)

// Spec is one fault: exactly one kind, on one path and direction. It is a
// value; the engine keeps a copy of its own.
type Spec struct {
	ID   string // opaque; empty: the engine's choice. Not part of the decision or the digest
	Name string // stable between runs, part of the key; empty: KIND/PATH/DIRECTION
	Path string

	Direction string // Both, Request or Response; empty: Both
	Seed      uint64
	Revision  uint64 // another revision of the same fault decides differently

	Latency *Latency
	Loss    *Loss

	At  time.Duration // from the start of the timeline, or of the request
	TTL time.Duration // from arming
}

const (
	maxName = 256 // bytes; also of a path's name
	// maxTime is beyond what anybody waits for, and below where a float64 of
	// milliseconds would lose the nanoseconds.
	maxTime = 30 * 24 * time.Hour
)

// check says all that is wrong with a spec, TTL's cap aside.
func (s *Spec) check() error {
	var errs []error
	bad := func(field, problem string) { errs = append(errs, &SpecError{Field: field, Problem: problem}) }
	if len(s.Name) > maxName {
		bad("name", fmt.Sprintf("is longer than %d bytes", maxName))
	}
	if len(s.Path) > maxName {
		bad("path", fmt.Sprintf("is longer than %d bytes", maxName))
	}
	switch s.Direction {
	case "", Both, Request, Response:
	default:
		bad("direction", fmt.Sprintf("is %q, must be request, response or both", s.Direction))
	}
	if s.At < 0 || s.At > maxTime {
		bad("at", "must be from 0 to "+maxTime.String())
	}
	if s.TTL < 0 || s.TTL > maxTime {
		bad("ttl", "must be from 0 to "+maxTime.String())
	}
	found := 0
	for i := range kinds {
		if p := kinds[i].find(s); p != nil {
			found++
			if err := p.check(); err != nil {
				errs = append(errs, err)
			}
		}
	}
	if found != 1 {
		var names []string
		for _, k := range kinds {
			names = append(names, k.name)
		}
		bad("kind", fmt.Sprintf("must be exactly one of %s; %d are given", strings.Join(names, ", "), found))
	}
	return errors.Join(errs...)
}

// normal fills in what a checked spec leaves to defaults, and copies what it
// points to.
func (s Spec) normal() Spec {
	if s.Direction == "" {
		s.Direction = Both
	}
	if s.Name == "" {
		k, _ := s.kind()
		s.Name = kinds[k].name + "/" + s.Path + "/" + s.Direction
	}
	if s.Latency != nil {
		s.Latency = new(*s.Latency)
	}
	if s.Loss != nil {
		s.Loss = new(*s.Loss)
	}
	return s
}

// kind returns a checked spec's place in kinds, and its parameters.
func (s *Spec) kind() (int, params) {
	for i := range kinds {
		if p := kinds[i].find(s); p != nil {
			return i, p
		}
	}
	panic("faults: a spec without a kind was not refused")
}

// impairs says which directions are meant, by packet.Direction.
func (s *Spec) impairs() [2]bool {
	return [2]bool{packet.Request: s.Direction != Response, packet.Response: s.Direction != Request}
}

// Digest is the SHA-256 of the spec as JSON without its ID: the same for the
// same fault in each run.
func (s Spec) Digest() string {
	s.ID = ""
	b, err := json.Marshal(s)
	if err != nil {
		panic(err) // no field of a checked spec can fail
	}
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// specJSON is a spec in receipts and in the journal. The order of its fields
// is the canonical one. Seed and revision are strings, since JSON numbers end
// at 2⁵³ for most readers.
type specJSON struct {
	ID        string   `json:"fault_id,omitempty"`
	Name      string   `json:"name"`
	Path      string   `json:"path"`
	Direction string   `json:"direction"`
	Seed      uint64   `json:"seed,string"`
	Revision  uint64   `json:"revision,string"`
	Latency   *Latency `json:"latency,omitempty"`
	Loss      *Loss    `json:"loss,omitempty"`
	At        millis   `json:"at_millis"`
	TTL       millis   `json:"ttl_millis"`
}

func (s Spec) MarshalJSON() ([]byte, error) {
	return marshal(specJSON{s.ID, s.Name, s.Path, s.Direction, s.Seed, s.Revision,
		s.Latency, s.Loss, millis(s.At), millis(s.TTL)})
}

// UnmarshalJSON reads what MarshalJSON wrote and refuses what is not a valid
// spec.
func (s *Spec) UnmarshalJSON(b []byte) error {
	var j specJSON
	if err := unmarshal(b, &j); err != nil {
		return err
	}
	spec := Spec{j.ID, j.Name, j.Path, j.Direction, j.Seed, j.Revision,
		j.Latency, j.Loss, time.Duration(j.At), time.Duration(j.TTL)}
	if err := spec.check(); err != nil {
		return err
	}
	*s = spec.normal()
	return nil
}

// millis is a duration that is written in milliseconds, with a fraction where
// it has one.
type millis time.Duration

func (m millis) MarshalJSON() ([]byte, error) { return json.Marshal(float64(m) / 1e6) }

func (m *millis) UnmarshalJSON(b []byte) error {
	var f float64
	if err := json.Unmarshal(b, &f); err != nil {
		return err
	}
	if f < 0 || f > float64(maxTime)/1e6 {
		return fmt.Errorf("%v milliseconds is out of range", f)
	}
	*m = millis(math.Round(f * 1e6))
	return nil
}

func marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), err
}

func unmarshal(b []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if _, err := d.Token(); err != io.EOF {
		return errors.New("something follows the JSON document")
	}
	return nil
}
