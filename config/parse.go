package config

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
)

// Parse reads a definition's text and validates it whole: JSON, schema, then
// everything that a schema can't say. The error is an Errors, all mistakes at
// once. What it returns is valid on every host; Admit says whether this host
// and this version can do it.
func Parse(data []byte) (*Definition, error) {
	return parse(FileName, data)
}

// Load is Parse of a file, and returns its text as well; mistakes carry the
// file's name as given.
func Load(path string) (*Definition, []byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, nil, err
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, MaxSize+1))
	if err != nil {
		return nil, nil, err
	}
	def, err := parse(path, data)
	return def, data, err
}

// Check is Parse and Admit, with the file's name and the place in data in each
// error of either. file may be empty for FileName.
func Check(file string, data []byte, host Host) (*Definition, error) {
	file = cmp.Or(file, FileName)
	def, err := parse(file, data)
	if err != nil {
		return nil, err
	}
	err = Admit(def, host)
	if refused, ok := errors.AsType[Unsupported](err); ok {
		doc := read(data, &problems{})
		for _, one := range refused {
			one.File = file
			one.Line, one.Column = doc.position(doc.offset(split(one.Pointer)))
		}
	}
	if err != nil {
		return nil, err
	}
	return def, nil
}

// Validate is what Parse does, for a definition made in Go: its mistakes have
// pointers and no lines.
func (d *Definition) Validate() error {
	data, err := d.JSON()
	if err != nil {
		return err
	}
	_, err = parse("", data)
	if mistakes, ok := errors.AsType[Errors](err); ok {
		for _, one := range mistakes {
			one.Line, one.Column = 0, 0
		}
	}
	return err
}

// JSON is the definition's text, keys in the order of the types and names
// sorted: the document that Parse reads back equal. It doesn't validate.
func (d *Definition) JSON() ([]byte, error) {
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(d); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// Digest names a definition's text: sha256:HEX.
func Digest(data []byte) string {
	sum := sha256.Sum256(data)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func parse(file string, data []byte) (*Definition, error) {
	p := &problems{file: file}
	p.doc = read(data, p)
	if p.doc == nil {
		// Positions were taken while the text was still at hand.
		return nil, p.err()
	}
	if !p.doc.root.object {
		p.add(nil, "a definition is a JSON object", "{ … }", "")
		return nil, p.err()
	}
	broken := sections(p)
	def, err := decode(p.doc.root.any())
	if err != nil {
		// The schema is stricter than the types; a test holds it to that.
		p.add(nil, err.Error(), "", "")
		return nil, p.err()
	}
	validate(p, def, broken)
	if err := p.err(); err != nil {
		return nil, err
	}
	// Once more through the canonical text: an empty list and one that was
	// left out are the same.
	text, err := def.JSON()
	if err != nil {
		return nil, err
	}
	canonical := &Definition{}
	if err := json.Unmarshal(text, canonical); err != nil {
		return nil, fmt.Errorf("reading the canonical text: %w", err)
	}
	return canonical, nil
}

// sections checks the document against the schema and returns the top-level
// keys that can't be looked into: what refers to them is left alone, so that
// one mistake isn't reported a hundred times.
func sections(p *problems) map[string]bool {
	before := len(p.all)
	compiled().check(p)
	broken := map[string]bool{}
	for _, mistake := range p.all[before:] {
		tokens := split(mistake.Pointer)
		if len(tokens) != 1 {
			continue
		}
		n, whole := p.doc.find(tokens)
		if !whole || !n.object && !n.array {
			broken[tokens[0]] = true
			broken[mistake.Suggestion] = true
		}
	}
	return broken
}

func decode(value any) (*Definition, error) {
	text, err := json.Marshal(value)
	if err != nil {
		return nil, err
	}
	def := &Definition{}
	if err := json.Unmarshal(text, def); err != nil {
		return nil, err
	}
	return def, nil
}

// MarshalJSON writes a number or "FIRST-LAST".
func (p Port) MarshalJSON() ([]byte, error) {
	if p.First == p.Last {
		return strconv.AppendUint(nil, uint64(p.First), 10), nil
	}
	return json.Marshal(p.String())
}

// UnmarshalJSON reads a number or "FIRST-LAST". That First comes first is
// Parse's to say.
func (p *Port) UnmarshalJSON(data []byte) error {
	text := string(data)
	if text == "null" {
		return nil
	}
	if text[0] == '"' {
		if err := json.Unmarshal(data, &text); err != nil {
			return err
		}
	}
	first, last, isRange := strings.Cut(text, "-")
	if !isRange {
		last = first
	}
	for _, end := range []struct {
		text string
		port *uint16
	}{{first, &p.First}, {last, &p.Last}} {
		port, err := strconv.ParseUint(end.text, 10, 16)
		if err != nil || port == 0 {
			return fmt.Errorf("%s is not a port or a range of ports", quote(text))
		}
		*end.port = uint16(port)
	}
	return nil
}

func (p Port) String() string {
	if p.First == p.Last {
		return strconv.Itoa(int(p.First))
	}
	return fmt.Sprintf("%d-%d", p.First, p.Last)
}

// Contains says whether the range holds port.
func (p Port) Contains(port uint16) bool { return p.First <= port && port <= p.Last }

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
