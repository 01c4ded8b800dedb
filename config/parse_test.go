package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// good are definitions that Parse takes.
var good = []string{"testdata/draft.json", "testdata/whole.json", "../examples/shop/vz.json"}

func TestParseGood(t *testing.T) {
	for _, file := range good {
		def, data, err := Load(file)
		require.NoError(t, err, file)
		assert.NotEmpty(t, def.Machines)
		assert.True(t, strings.HasPrefix(Digest(data), "sha256:"))

		text, err := def.JSON()
		require.NoError(t, err)
		again, err := Parse(text)
		require.NoError(t, err, file)
		assert.Equal(t, def, again, file)
		assert.NoError(t, def.Validate())
	}
}

// The Go types hold what the schema knows: nothing of a definition that uses
// every property is lost on the way through them.
func TestNothingIsLost(t *testing.T) {
	def, data, err := Load("testdata/whole.json")
	require.NoError(t, err)
	text, err := def.JSON()
	require.NoError(t, err)
	back, all := flatten(t, text), flatten(t, data)
	for pointer, value := range all {
		if value == false || pointer == "/faults/15/path_mtu/icmp" {
			continue // what is left out is false
		}
		assert.Equal(t, value, back[pointer], pointer)
	}
}

// flatten spells out every leaf of a document.
func flatten(t *testing.T, data []byte) map[string]any {
	t.Helper()
	all := map[string]any{}
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.UseNumber()
	var root any
	require.NoError(t, decoder.Decode(&root))
	var walk func(at string, v any)
	walk = func(at string, v any) {
		switch v := v.(type) {
		case map[string]any:
			for key, member := range v {
				walk(at+pointer(key), member)
			}
		case []any:
			for i, item := range v {
				walk(fmt.Sprintf("%s/%d", at, i), item)
			}
		default:
			all[at] = v
		}
	}
	walk("", root)
	return all
}

func TestParseBroken(t *testing.T) {
	deep := strings.Repeat("[", 40) + strings.Repeat("]", 40)
	for _, test := range []struct{ name, text, want string }{
		{"empty", "", "vz.json:1:1: /: the text is empty; want a JSON object"},
		{"blank", " \n ", "vz.json:1:1: /: the text is empty; want a JSON object"},
		{"no object", "[]", "vz.json:1:1: /: a definition is a JSON object; want { … }"},
		{"null", "null", "vz.json:1:1: /: a definition is a JSON object; want { … }"},
		{"cut off", "{\n  \"name\":", "vz.json:2:10: /: not JSON: unexpected end of JSON input"},
		{"a comma too many", "{\n  \"name\": \"é\",}", "vz.json:2:15: /: not JSON: invalid character '}' looking for beginning of object key string"},
		{"trailing", "{} {}", "vz.json:1:4: /: not JSON: invalid character '{' after top-level value"},
		{"comment", "// x\n{}", "vz.json:1:1: /: not JSON: invalid character '/' looking for beginning of value"},
		{"byte order mark", "\ufeff{}", "vz.json:1:1: /: the text begins with a byte order mark; want JSON without one (RFC 8259)"},
		{"not UTF-8", "{\n\"\xff\": 1}", "vz.json:2:2: /: the text is not UTF-8 here; want UTF-8"},
		{"too deep", `{"name": ` + deep + `}`, "vz.json:1:41: /: nested deeper than 32 levels"},
		{"too large", strings.Repeat(" ", MaxSize) + "{}", fmt.Sprintf("vz.json:1:1: /: the text has %d bytes; want at most %d", MaxSize+2, MaxSize)},
	} {
		_, err := Parse([]byte(test.text))
		assert.EqualError(t, err, test.want, test.name)
	}
}

// base is a small valid definition that mistakes are made in.
const base = `{
  "schema_version": 1,
  "project_id": "prj_01kbcdefghjkmnpqrstvwxyz01",
  "name": "shop",
  "networks": {
    "front": { "kind": "private", "cidr": "10.10.0.0/24" },
    "back": { "kind": "private", "cidr": "10.20.0.0/24" },
    "edge": { "kind": "simulated_public" }
  },
  "groups": { "all": [ "web", "db" ] },
  "machines": {
    "web": {
      "target": { "os": "linux", "arch": "host", "image": "host" },
      "profile": "developer", "docker": false, "isolation": "namespace",
      "networks": [ { "name": "front" }, { "name": "back" }, { "name": "edge" } ]
    },
    "db": {
      "target": { "os": "linux", "arch": "host", "image": "host" },
      "profile": "developer", "docker": false, "isolation": "namespace",
      "networks": [ { "name": "back" } ]
    }
  },
  "paths": [
    { "name": "web-db", "from": "web", "to": "db", "network": "back", "protocol": "tcp", "ports": [ 5432 ] }
  ],
  "endpoints": {
    "shop": { "host": "shop.test", "network": "edge", "kind": "https", "backend": { "machine": "web", "port": 8080 } }
  },
  "volumes": {
    "disk": { "kind": "block", "size_bytes": 1073741824 },
    "cache": { "kind": "shared_cache", "consistency": { "model": "bounded_staleness", "staleness_bound_millis": 1000 } }
  },
  "secrets": { "key": { "from_env": "KEY" } },
  "faults": [
    { "name": "slow", "path": "web-db", "seed": 42, "latency": { "delay_millis": 100 }, "ttl_millis": 30000 }
  ]
}
`

// with puts a value (JSON; "" deletes) into the base at a pointer; "-" as the
// last token appends to an array.
func with(t testing.TB, edits ...string) []byte {
	t.Helper()
	decoder := json.NewDecoder(strings.NewReader(base))
	decoder.UseNumber()
	var root any
	require.NoError(t, decoder.Decode(&root))
	for i := 0; i < len(edits); i += 2 {
		var value any
		if edits[i+1] != "" {
			require.NoError(t, json.Unmarshal([]byte(edits[i+1]), &value), edits[i+1])
		}
		root = put(t, root, split(edits[i]), value, edits[i+1] == "")
	}
	data, err := json.MarshalIndent(root, "", "  ")
	require.NoError(t, err)
	return data
}

func put(t testing.TB, root any, tokens []string, value any, remove bool) any {
	t.Helper()
	if len(tokens) == 0 {
		return value
	}
	switch root := root.(type) {
	case []any:
		if tokens[0] == "-" {
			return append(root, value)
		}
		var i int
		_, err := fmt.Sscan(tokens[0], &i)
		require.NoError(t, err)
		root[i] = put(t, root[i], tokens[1:], value, remove)
		return root
	case map[string]any:
		if len(tokens) == 1 && remove {
			delete(root, tokens[0])
			return root
		}
		member, ok := root[tokens[0]]
		if !ok && len(tokens) > 1 {
			member = map[string]any{}
			if tokens[1] == "-" {
				member = []any{}
			}
		}
		root[tokens[0]] = put(t, member, tokens[1:], value, remove)
		return root
	}
	require.Fail(t, "no such place", "%v", tokens)
	return nil
}

// mistakes are pointer and text without the place, which with moves around.
func mistakes(err error) []string {
	all, _ := errors.AsType[Errors](err)
	var texts []string
	for _, one := range all {
		copied := *one
		copied.File, copied.Line, copied.Column = "", 0, 0
		texts = append(texts, copied.Error())
	}
	return texts
}

func TestParsePlaces(t *testing.T) {
	_, err := Parse([]byte(base))
	require.NoError(t, err)

	text := strings.Replace(base, `{ "name": "front" }, {`, `{ "name": "frnt" }, {`, 1)
	_, err = Parse([]byte(text))
	assert.EqualError(t, err, `vz.json:15:31: /machines/web/networks/0/name: no network "frnt" is declared; did you mean "front"?`)
	one, ok := errors.AsType[*Error](err)
	require.True(t, ok)
	assert.Equal(t, Error{File: "vz.json", Line: 15, Column: 31, Pointer: "/machines/web/networks/0/name",
		Problem: `no network "frnt" is declared`, Want: "back, edge or front", Suggestion: "front"}, *one)

	// Columns count characters, not bytes; a key's mistake stands at the key.
	_, err = Parse([]byte(strings.Replace(base, `{ "from_env": "KEY" }`, `{ "from_env": "KEY", "é": 1, "form_file": "x" }`, 1)))
	assert.EqualError(t, err, `vz.json:33:44: /secrets/key/é: unknown key "é"; want one of from_env, from_file
vz.json:33:52: /secrets/key/form_file: unknown key "form_file"; did you mean "from_file"?`)

	line, column := Locate([]byte(base), "/faults/0/latency/delay_millis")
	assert.Equal(t, [2]int{35, 82}, [2]int{line, column})
	line, _ = Locate([]byte(base), "/faults/0/nothing/here")
	assert.Equal(t, 35, line)
	line, _ = Locate([]byte("{"), "/faults")
	assert.Zero(t, line)
}

// All mistakes come at once, in the order of the text, those of the schema and
// those beyond it.
func TestParseAllAtOnce(t *testing.T) {
	_, err := Parse([]byte(`{
  "schema_version": 2,
  "project_id": "prj_1",
  "nmae": "shop",
  "name": "Shop",
  "name": "shop",
  "default_machine": "wbe",
  "networks": { "front": { "kind": "privat", "cidr": "10.10.0.1/24", "mtu": 1e99 } },
  "machines": {
    "web": { "target": { "os": "linux", "image": "hots" }, "profile": "developer", "isolation": "namespace",
             "networks": [ { "name": "frnt" } ], "resources": { "cpus": 0 } },
    "Web": { "target": { "os": "linux", "arch": "host", "image": "host" }, "profile": 7, "isolation": "namespace" }
  },
  "paths": [ { "name": "p", "from": "web", "to": "web", "network": "front", "protocol": "tcp", "ports": [ 0, "9-8", true ] } ]
}`))
	require.Error(t, err)
	assert.Equal(t, strings.TrimSpace(`
vz.json:2:21: /schema_version: this is 2; want 1
vz.json:3:17: /project_id: "prj_1" does not fit; want prj_ and 26 lower-case characters of a ULID, made once and kept
vz.json:4:3: /nmae: unknown key "nmae"; want one of $schema, default_machine, endpoints, faults, groups, machines, name, networks, paths, project_id, schema_version, secrets, volumes, zones
vz.json:5:11: /name: "Shop" does not fit; want a name of 1 to 63 lower-case letters, digits and hyphens that begins and ends with a letter or digit
vz.json:6:3: /name: "name" is said twice; want it once; the first is at 5:3
vz.json:7:22: /default_machine: no Machine "wbe" is declared; did you mean "web"?
vz.json:8:36: /networks/front/kind: "privat" is not known here; did you mean "private"?
vz.json:8:54: /networks/front/cidr: "10.10.0.1/24" has bits beyond its length; did you mean "10.10.0.0/24"?
vz.json:8:77: /networks/front/mtu: the number "1e99" is out of range
vz.json:10:24: /machines/web/target: "arch" is missing; want host, amd64 or arm64
vz.json:10:50: /machines/web/target/image: "hots" does not fit; want host, debian:SUITE[+PACKAGE…], tar:FILE, an OCI reference with its registry or repository (docker.io/library/alpine:3.20), or for macOS clean or xcode
vz.json:11:38: /machines/web/networks/0/name: no network "frnt" is declared; did you mean "front"?
vz.json:11:73: /machines/web/resources/cpus: 0 is too small; want more than 0
vz.json:12:5: /machines/Web: "Web" can't be a name here; want a name of 1 to 63 lower-case letters, digits and hyphens that begins and ends with a letter or digit
vz.json:12:87: /machines/Web/profile: this is 7; want developer or hardened
vz.json:14:37: /paths/0/from: Machine "web" is not attached to network "front"; want an attachment in /machines/web/networks
vz.json:14:50: /paths/0/to: Machine "web" is not attached to network "front"; want an attachment in /machines/web/networks
vz.json:14:50: /paths/0/to: the path leads from "web" to itself; want another Machine
vz.json:14:107: /paths/0/ports/0: 0 is too small; want a port number, or a range such as "8000-8100"
vz.json:14:110: /paths/0/ports/1: "9-8" runs backwards; did you mean "8-9"?
vz.json:14:117: /paths/0/ports/2: this is a boolean; want a port number, or a range such as "8000-8100"`), err.Error())
}

// One mistake at the top is not repeated by everything that refers to it.
func TestParseNoEchoes(t *testing.T) {
	for _, section := range []string{"networks", "machines", "endpoints", "paths", "groups", "volumes", "secrets"} {
		_, err := Parse(with(t, "/"+section, `"nothing"`))
		all, _ := errors.AsType[Errors](err)
		require.NotEmpty(t, all, section)
		for _, one := range all {
			assert.Equal(t, "/"+section, one.Pointer, one.Error())
		}
		_, err = Parse([]byte(strings.Replace(base, `"`+section+`": `, `"`+section+`s": `, 1)))
		all, _ = errors.AsType[Errors](err)
		for _, one := range all {
			if one.Pointer != "" { // "machines" is missing
				assert.Equal(t, "/"+section+"s", one.Pointer, one.Error())
				assert.Equal(t, section, one.Suggestion)
			}
		}
	}
}

func TestParseSpellings(t *testing.T) {
	// A whole number is one however it is written, as JSON Schema has it.
	def, err := Parse([]byte(strings.NewReplacer("5432", "5.432e3", "8080", "8080.0", `"seed": 42`, `"seed": 18446744073709551615`).Replace(base)))
	require.NoError(t, err)
	assert.Equal(t, []Port{{5432, 5432}}, def.Paths[0].Ports)
	assert.Equal(t, 8080, def.Endpoints["shop"].Backend.Port)
	assert.Equal(t, uint64(18446744073709551615), def.Faults[0].Seed)

	// An empty list is one that was left out.
	def, err = Parse(with(t, "/machines/db/projections", "[]", "/secrets", "{}"))
	require.NoError(t, err)
	plain, err := Parse(with(t, "/secrets", ""))
	require.NoError(t, err)
	assert.Equal(t, plain, def)

	// A field's name is its name: encoding/json alone would take this one.
	_, err = Parse([]byte(strings.Replace(base, `"name": "shop"`, `"Name": "shop"`, 1)))
	assert.ErrorContains(t, err, `unknown key "Name"; did you mean "name"?`)

	// Numbers that would take for ever to compare.
	for _, number := range []string{"1e999999999", "1e-999999999", "1" + strings.Repeat("0", 100)} {
		_, err = Parse([]byte(strings.Replace(base, "5432", number, 1)))
		assert.ErrorContains(t, err, "is out of range")
	}
}

func TestManyMistakes(t *testing.T) {
	var b strings.Builder
	b.WriteString(`{ "faults": [ `)
	for range 400 {
		b.WriteString(`{},`)
	}
	_, err := Parse([]byte(strings.TrimSuffix(b.String(), ",") + " ] }"))
	all, _ := errors.AsType[Errors](err)
	assert.Greater(t, len(all), 1000)
	assert.Len(t, strings.Split(err.Error(), "\n"), shown+1)
	assert.Contains(t, err.Error(), fmt.Sprintf("and %d more", len(all)-shown))
}

func TestLoad(t *testing.T) {
	_, _, err := Load(filepath.Join(t.TempDir(), "vz.json"))
	assert.ErrorIs(t, err, os.ErrNotExist)
	file := filepath.Join(t.TempDir(), "vz.json")
	require.NoError(t, os.WriteFile(file, []byte("{"), 0o600))
	_, data, err := Load(file)
	assert.ErrorContains(t, err, file+":1:2: /: not JSON")
	assert.Equal(t, "{", string(data))
}

func TestPort(t *testing.T) {
	for text, want := range map[string]Port{`80`: {80, 80}, `"80-80"`: {80, 80}, `"8000-8100"`: {8000, 8100}, `"1-65535"`: {1, 65535}} {
		var port Port
		require.NoError(t, json.Unmarshal([]byte(text), &port), text)
		assert.Equal(t, want, port)
		again, err := json.Marshal(port)
		require.NoError(t, err)
		if want.First == want.Last {
			text = "80"
		}
		assert.Equal(t, text, string(again))
		assert.True(t, port.Contains(port.First) && port.Contains(port.Last) && !port.Contains(port.First-1))
	}
	for _, text := range []string{`0`, `65536`, `"a"`, `"1-"`, `""`, `-1`, `true`, `"1-2-3"`, `{}`} {
		assert.Error(t, json.Unmarshal([]byte(text), new(Port)), text)
	}
}

func TestNearest(t *testing.T) {
	known := []string{"latency", "loss", "duplication", "dns"}
	for word, want := range map[string]string{
		"latnecy": "latency", "los": "loss", "dup": "duplication", "dsn": "dns", "xyz": "", "": "", "loss": "",
		strings.Repeat("x", 5000): "",
	} {
		assert.Equal(t, want, nearest(word, known), word)
	}
}

// An aliasing bug of jsonschema v6.0.3 makes its PropertyNames errors point
// anywhere; ours must not.
func TestNamesPointRight(t *testing.T) {
	_, err := Parse(with(t, "/machines/web/processes/Bad Name", `{ "command": [ "x" ] }`, "/machines/web/processes/ok", `{ "command": [ "x" ], "env": { "1A": "" } }`, "/networks/-x", `{ "kind": "private", "cidr": "10.30.0.0/24" }`))
	var pointers []string
	all, _ := errors.AsType[Errors](err)
	for _, one := range all {
		pointers = append(pointers, one.Pointer)
	}
	assert.Equal(t, []string{"/machines/web/processes/Bad Name", "/machines/web/processes/ok/env/1A", "/networks/-x"}, pointers)
}

// Whatever stands in the place of any value, the answer is a list of mistakes
// with places, or a definition that reads back equal: what the schema lets
// through, the types can hold.
func TestAnythingAnywhere(t *testing.T) {
	data, err := os.ReadFile("testdata/whole.json")
	require.NoError(t, err)
	odd := []string{`null`, `true`, `0`, `-1`, `1.5`, `1e30`, `18446744073709551616`, `""`, `"x"`, `"8-9"`, `"host"`, `[]`, `{}`, `[null]`, `{"x":null}`, `["x"]`}
	doc := read(data, &problems{})
	var spans [][2]int // of every value in the text
	decoder := json.NewDecoder(bytes.NewReader(data))
	var walk func(n *node)
	walk = func(n *node) {
		var raw json.RawMessage
		decoder = json.NewDecoder(bytes.NewReader(data[n.start:]))
		require.NoError(t, decoder.Decode(&raw))
		spans = append(spans, [2]int{n.start, n.start + len(raw)})
		for _, key := range n.keys() {
			walk(n.members[key])
		}
		for _, item := range n.items {
			walk(item)
		}
	}
	walk(doc.root)
	for i, span := range spans {
		// Two of them at each place, all of them at a few: time is short.
		for _, value := range []string{odd[i%len(odd)], odd[(i*7+3)%len(odd)]} {
			text := string(data[:span[0]]) + value + string(data[span[1]:])
			def, err := Parse([]byte(text))
			if err != nil {
				all, ok := errors.AsType[Errors](err)
				require.True(t, ok, "%T %v", err, err)
				for _, one := range all {
					require.Positive(t, one.Line)
					require.NotContains(t, one.Problem, "json:", "%s at %d", value, span[0])
					require.NotContains(t, one.Problem, "does not fit the schema")
				}
				continue
			}
			again, err := def.JSON()
			require.NoError(t, err)
			back, err := Parse(again)
			require.NoError(t, err)
			require.Equal(t, def, back)
		}
	}
}

func BenchmarkParse(b *testing.B) {
	data, err := os.ReadFile("testdata/whole.json")
	require.NoError(b, err)
	for b.Loop() {
		_, err = Parse(data)
	}
	require.NoError(b, err)
}

// Texts made to cost as much as they can end all the same.
func TestParseIsBounded(t *testing.T) {
	long := strings.Repeat("k", 1<<20)
	for name, text := range map[string]string{
		"many mistakes in one line": `{"faults":[` + strings.Repeat("{},", 100000) + `{}]}`,
		"a long key over many":      `{"` + long + `":[` + strings.Repeat("0,", 200000) + `0]}`,
		"many values":               `{"faults":[` + strings.Repeat("0,", maxValues) + `0]}`,
		"keys said twice":           `{` + strings.Repeat(`"a":0,`, 100000) + `"a":0}`,
	} {
		_, err := Parse([]byte(text))
		all, ok := errors.AsType[Errors](err)
		require.True(t, ok, name)
		assert.LessOrEqual(t, len(all), kept)
		assert.Less(t, len(err.Error()), 3<<20, name)
	}
}

func TestPosition(t *testing.T) {
	text := strings.Repeat("é", 3000) + "\n" + strings.Repeat("x", 1100) + "\n\n"
	doc := read([]byte(text), &problems{})
	require.Nil(t, doc)
	p := &problems{}
	read([]byte(text), p)
	for offset := range len(text) + 1 {
		line, column := p.doc.position(offset)
		before := text[:offset]
		start := strings.LastIndexByte(before, '\n') + 1
		require.Equal(t, strings.Count(before, "\n")+1, line)
		if offset < 6000 && offset%2 == 1 {
			continue // inside a character
		}
		require.Equal(t, len([]rune(before[start:]))+1, column)
	}
}
