package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"sort"
	"strconv"
	"strings"
	"unicode/utf8"
)

// MaxSize bounds a definition's text, in bytes: ten thousand egress rules take
// a fifth of it.
const MaxSize = 4 << 20

// maxDepth is twice what the schema can reach, maxValues twice what a text of
// MaxSize that says something needs.
const (
	maxDepth  = 32
	maxValues = 1 << 18
)

// document is a JSON text that remembers where each value stands.
type document struct {
	text   []byte
	lines  []int // offset of each line's first byte
	before []int // characters before each block, so that a column is found at once in one long line
	root   *node
}

const block = 1024 // bytes

// node is one value. Pointers are never spelt out while reading: long keys
// around many children would make that quadratic.
type node struct {
	key, start int // offsets of the key (or the value itself) and of the value
	value      any // string, json.Number, bool or nil; unused for the next two
	members    map[string]*node
	items      []*node
	object     bool
	array      bool
	bad        bool // its value was refused while reading
}

// read parses data. Mistakes after which reading can go on (repeated keys,
// absurd numbers) are noted, others end it; the result is nil then.
func read(data []byte, p *problems) *document {
	doc := &document{text: data, lines: []int{0}}
	p.doc = doc
	characters := 0
	for i, c := range data {
		if i%block == 0 {
			doc.before = append(doc.before, characters)
		}
		if utf8.RuneStart(c) {
			characters++
		}
		if c == '\n' {
			doc.lines = append(doc.lines, i+1)
		}
	}
	if len(data)%block == 0 {
		doc.before = append(doc.before, characters)
	}
	fail := func(offset int, problem, want string) *document {
		p.at(offset, nil, problem, want, "")
		return nil
	}
	if len(data) > MaxSize {
		return fail(0, fmt.Sprintf("the text has %d bytes", len(data)), fmt.Sprintf("at most %d", MaxSize))
	}
	if bytes.HasPrefix(data, []byte("\ufeff")) {
		return fail(0, "the text begins with a byte order mark", "JSON without one (RFC 8259)")
	}
	if !utf8.Valid(data) {
		offset := 0
		for offset < len(data) {
			r, size := utf8.DecodeRune(data[offset:])
			if r == utf8.RuneError && size == 1 {
				break
			}
			offset += size
		}
		return fail(offset, "the text is not UTF-8 here", "UTF-8")
	}
	if len(bytes.TrimSpace(data)) == 0 {
		return fail(0, "the text is empty", "a JSON object")
	}

	// The decoder's token stream is laxer than the grammar, so the grammar is
	// checked first; this finds trailing data as well.
	var raw json.RawMessage
	if err := json.Unmarshal(data, &raw); err != nil {
		offset := len(data)
		if syntax, ok := errors.AsType[*json.SyntaxError](err); ok && int(syntax.Offset) > 0 {
			offset = int(syntax.Offset) - 1
			if syntax.Error() == "unexpected end of JSON input" {
				offset = len(data)
			}
		}
		return fail(offset, "not JSON: "+err.Error(), "")
	}
	r := &reader{p: p, text: data, decoder: json.NewDecoder(bytes.NewReader(data))}
	r.decoder.UseNumber()
	root, err := r.value(nil, 0)
	if err != nil {
		return fail(r.start, err.Error(), "")
	}
	doc.root = root
	return doc
}

type reader struct {
	p       *problems
	text    []byte
	decoder *json.Decoder
	start   int // of the last token
	values  int
}

// token returns the next token and where it begins.
func (r *reader) token() (json.Token, int, error) {
	start := int(r.decoder.InputOffset())
	for start < len(r.text) && strings.IndexByte(" \t\r\n,:", r.text[start]) >= 0 {
		start++
	}
	r.start = start
	token, err := r.decoder.Token()
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return token, start, err
}

func (r *reader) value(tokens []string, depth int) (*node, error) {
	token, start, err := r.token()
	if err != nil {
		return nil, err
	}
	if r.values++; r.values > maxValues {
		return nil, fmt.Errorf("more than %d values", maxValues)
	}
	n := &node{key: start, start: start}
	delim, structure := token.(json.Delim)
	if structure && depth >= maxDepth {
		return nil, fmt.Errorf("nested deeper than %d levels", maxDepth)
	}
	switch {
	case structure && delim == '{':
		n.object, n.members = true, map[string]*node{}
		for r.decoder.More() {
			token, start, err := r.token()
			if err != nil {
				return nil, err
			}
			key := token.(string) // the grammar was checked
			member, err := r.value(append(tokens, key), depth+1)
			if err != nil {
				return nil, err
			}
			member.key = start
			if first, twice := n.members[key]; twice {
				line, column := r.p.doc.position(first.key)
				r.p.at(start, append(tokens, key), fmt.Sprintf("%s is said twice", quote(key)),
					fmt.Sprintf("it once; the first is at %d:%d", line, column), "")
				continue
			}
			n.members[key] = member
		}
		_, _, err = r.token()
	case structure:
		n.array = true
		for r.decoder.More() {
			item, err := r.value(append(tokens, strconv.Itoa(len(n.items))), depth+1)
			if err != nil {
				return nil, err
			}
			n.items = append(n.items, item)
		}
		_, _, err = r.token()
	default:
		n.value = token
		if number, ok := token.(json.Number); ok {
			if n.value, ok = plain(number); !ok {
				r.p.at(start, tokens, "the number "+quote(string(number))+" is out of range", "", "")
				n.value, n.bad = nil, true
			}
		}
	}
	return n, err
}

// plain writes a whole number without point and exponent, so that 5e3 is an
// integer to Go as it is to JSON Schema. It refuses what no field could hold,
// before somebody makes a big.Rat of 1e999999999.
func plain(number json.Number) (json.Number, bool) {
	text := string(number)
	if len(text) > 64 {
		return "", false
	}
	mantissa, exponent, found := strings.Cut(strings.ToLower(text), "e")
	if found {
		if e, err := strconv.Atoi(exponent); err != nil || e > 30 || e < -30 {
			return "", false
		}
	} else if !strings.Contains(mantissa, ".") {
		if text == "-0" {
			return "0", true
		}
		return number, true
	}
	value, ok := new(big.Rat).SetString(text)
	if !ok {
		return "", false
	}
	if value.IsInt() {
		return json.Number(value.Num().String()), true
	}
	return number, true
}

// any is the value as the schema's validator and json.Marshal take it.
func (n *node) any() any {
	switch {
	case n.object:
		object := make(map[string]any, len(n.members))
		for key, member := range n.members {
			object[key] = member.any()
		}
		return object
	case n.array:
		array := make([]any, len(n.items))
		for i, item := range n.items {
			array[i] = item.any()
		}
		return array
	default:
		return n.value
	}
}

// keys are an object's, sorted.
func (n *node) keys() []string { return sortedKeys(n.members) }

// void takes the value away, leaving null in its place.
func (n *node) void() { *n = node{key: n.key, start: n.start} }

// find follows tokens as far as they lead; whole says whether to the end.
func (d *document) find(tokens []string) (n *node, whole bool) {
	if d == nil || d.root == nil {
		return nil, false
	}
	n = d.root
	for _, token := range tokens {
		var next *node
		if n.object {
			next = n.members[token]
		} else if i, err := strconv.Atoi(token); err == nil && n.array && i >= 0 && i < len(n.items) {
			next = n.items[i]
		}
		if next == nil {
			return n, false
		}
		n = next
	}
	return n, true
}

func (d *document) offset(tokens []string) int {
	if n, _ := d.find(tokens); n != nil {
		return n.start
	}
	return 0
}

func (d *document) keyOffset(tokens []string) int {
	if n, _ := d.find(tokens); n != nil {
		return n.key
	}
	return 0
}

// position is the line and the column, in characters, of a byte's offset.
func (d *document) position(offset int) (line, column int) {
	offset = min(max(offset, 0), len(d.text))
	line = sort.SearchInts(d.lines, offset+1)
	return line, d.characters(offset) - d.characters(d.lines[line-1]) + 1
}

// characters counts those that begin before offset.
func (d *document) characters(offset int) int {
	count := d.before[offset/block]
	for _, c := range d.text[offset/block*block : offset] {
		if utf8.RuneStart(c) {
			count++
		}
	}
	return count
}

// Locate says where in a definition's text the value of a JSON pointer stands,
// or the nearest one around it; line 0 when the text is not JSON.
func Locate(data []byte, pointer string) (line, column int) {
	p := &problems{}
	doc := read(data, p)
	if doc == nil {
		return 0, 0
	}
	return doc.position(doc.offset(split(pointer)))
}
