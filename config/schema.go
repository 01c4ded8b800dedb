package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"

	"vz.test/vz/schemas"
)

// schema is the compiled JSON Schema and its parts by their locations, which
// is how the validator's errors name them.
type schema struct {
	root  *jsonschema.Schema
	parts map[string]*jsonschema.Schema
}

var compiled = sync.OnceValue(func() *schema {
	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(schemas.ProjectDefinitionV1))
	if err != nil {
		panic("the embedded schema: " + err.Error())
	}
	compiler := jsonschema.NewCompiler()
	compiler.UseLoader(jsonschema.SchemeURLLoader{}) // nothing is ever fetched
	if err := compiler.AddResource(schemas.ProjectDefinitionV1ID, document); err != nil {
		panic("the embedded schema: " + err.Error())
	}
	s := &schema{root: compiler.MustCompile(schemas.ProjectDefinitionV1ID), parts: map[string]*jsonschema.Schema{}}
	s.collect(s.root)
	return s
})

func (s *schema) collect(part *jsonschema.Schema) {
	if part == nil || s.parts[part.Location] != nil {
		return
	}
	s.parts[part.Location] = part
	s.collect(part.Ref)
	s.collect(part.PropertyNames)
	s.collect(part.Items2020)
	for _, property := range part.Properties {
		s.collect(property)
	}
	if additional, ok := part.AdditionalProperties.(*jsonschema.Schema); ok {
		s.collect(additional)
	}
	for _, one := range part.OneOf {
		s.collect(one)
	}
}

// check notes every way in which the document does not fit the schema, and
// voids what doesn't, so that the rest can be decoded and looked at further.
func (s *schema) check(p *problems) {
	root := p.doc.root
	value := root.any()
	s.names(p, s.root, root, nil)
	invalid, ok := errors.AsType[*jsonschema.ValidationError](s.root.Validate(value))
	if !ok {
		return
	}
	// Noted first and voided afterwards: positions need what voiding removes.
	var voids []func()
	s.translate(p, invalid, &voids)
	for _, void := range voids {
		void()
	}
}

// names checks the keys of maps. The validator would do that too, but the
// place that it reports shares memory with later ones (v6.0.3, PropertyNames
// takes vd.vloc unclosed), so it can't be relied on.
func (s *schema) names(p *problems, part *jsonschema.Schema, n *node, tokens []string) {
	for ; part != nil; part = part.Ref {
		if n.object {
			additional, _ := part.AdditionalProperties.(*jsonschema.Schema)
			for _, key := range n.keys() {
				at := append(slices.Clone(tokens), key)
				if part.PropertyNames != nil && part.PropertyNames.Validate(key) != nil {
					p.addKey(at, quote(key)+" can't be a name here", title(part.PropertyNames), "")
				}
				if property := part.Properties[key]; property != nil {
					s.names(p, property, n.members[key], at)
				} else if additional != nil {
					s.names(p, additional, n.members[key], at)
				}
			}
		}
		for i, item := range n.items {
			if part.Items2020 != nil {
				s.names(p, part.Items2020, item, append(slices.Clone(tokens), strconv.Itoa(i)))
			}
		}
	}
}

// title is what would be right, in words.
func title(part *jsonschema.Schema) string {
	for ; part != nil; part = part.Ref {
		if part.Title != "" {
			return part.Title
		}
	}
	return ""
}

// expected is title, or else what the keywords say.
func expected(part *jsonschema.Schema) string {
	if right := title(part); right != "" {
		return right
	}
	for ; part != nil; part = part.Ref {
		switch {
		case part.Enum != nil:
			return list(texts(part.Enum.Values))
		case part.Const != nil:
			return literal(*part.Const)
		case part.Types != nil && len(part.Required) > 0:
			return articles(part.Types.ToStrings()) + " with " + strings.Join(part.Required, ", ")
		case part.Types != nil:
			return articles(part.Types.ToStrings())
		}
	}
	return ""
}

func (s *schema) translate(p *problems, e *jsonschema.ValidationError, voids *[]func()) {
	part := s.parts[e.SchemaURL]
	tokens := e.InstanceLocation
	n, whole := p.doc.find(tokens)
	if whole && n.bad {
		return // noted while reading
	}
	// wrong is a value that can't stand; note is a mistake that may be looked past.
	note := func(problem, want, suggestion string) { p.add(tokens, problem, want, suggestion) }
	wrong := func(problem, want, suggestion string) {
		if right := title(part); right != "" {
			want = right
		}
		note(problem, want, suggestion)
		if whole {
			*voids = append(*voids, n.void)
		}
	}
	switch k := e.ErrorKind.(type) {
	case *kind.PropertyNames:
		return // names has seen it
	case *kind.OneOf:
		var keys, said []string
		for _, one := range part.OneOf {
			keys = append(keys, one.Required...)
		}
		for _, key := range keys {
			if whole && n.members[key] != nil {
				said = append(said, key)
			}
		}
		if len(said) == 0 {
			note("none of "+strings.Join(keys, ", ")+" is said", "exactly one of them", "")
		} else {
			note(strings.Join(said, " and ")+" are said together", "exactly one of "+list(keys), "")
		}
		return
	case *kind.AdditionalProperties:
		known := slices.Sorted(maps.Keys(part.Properties))
		slices.Sort(k.Properties)
		for _, key := range k.Properties {
			free := slices.DeleteFunc(slices.Clone(known), func(name string) bool { return n.members[name] != nil })
			p.addKey(append(slices.Clone(tokens), key), "unknown key "+quote(key), "one of "+strings.Join(known, ", "), nearest(key, free))
			*voids = append(*voids, func() { delete(n.members, key) })
		}
		return
	case *kind.Required:
		for _, key := range k.Missing {
			note(quote(key)+" is missing", expected(part.Properties[key]), "")
		}
		return
	case *kind.Type:
		wrong("this is "+article(k.Got), articles(k.Want), "")
	case *kind.Enum:
		known := texts(k.Want)
		if got, ok := k.Got.(string); ok {
			wrong(quote(got)+" is not known here", list(known), nearest(got, known))
		} else {
			wrong("this is "+literal(k.Got), list(known), "")
		}
	case *kind.Const:
		wrong("this is "+literal(k.Got), literal(k.Want), "")
	case *kind.Pattern:
		wrong(quote(k.Got)+" does not fit", "", "")
	case *kind.MaxLength:
		note(fmt.Sprintf("%d characters", k.Got), fmt.Sprintf("at most %d", k.Want), "")
		*voids = append(*voids, n.void)
	case *kind.Minimum:
		wrong(number(k.Got)+" is too small", "at least "+number(k.Want), "")
	case *kind.Maximum:
		wrong(number(k.Got)+" is too large", "at most "+number(k.Want), "")
	case *kind.ExclusiveMinimum:
		wrong(number(k.Got)+" is too small", "more than "+number(k.Want), "")
	case *kind.MinItems:
		note(fmt.Sprintf("%d entries", k.Got), fmt.Sprintf("at least %d", k.Want), "")
	case *kind.MaxItems:
		note(fmt.Sprintf("%d entries", k.Got), fmt.Sprintf("at most %d", k.Want), "")
	case *kind.MinProperties:
		note(fmt.Sprintf("%d entries", k.Got), fmt.Sprintf("at least %d", k.Want), "")
	case *kind.MaxProperties:
		note(fmt.Sprintf("%d entries", k.Got), fmt.Sprintf("at most %d", k.Want), "")
	case *kind.UniqueItems:
		note(fmt.Sprintf("entries %d and %d are the same", k.Duplicates[0], k.Duplicates[1]), "each once", "")
	default:
		if len(e.Causes) == 0 {
			note("this does not fit the schema", "", "")
		}
	}
	for _, cause := range e.Causes {
		s.translate(p, cause, voids)
	}
}

func texts(values []any) []string {
	var all []string
	for _, value := range values {
		all = append(all, fmt.Sprint(value))
	}
	return all
}

func article(kind string) string {
	switch kind {
	case "null":
		return kind
	case "object", "array", "integer":
		return "an " + kind
	}
	return "a " + kind
}

func articles(kinds []string) string {
	var words []string
	for _, kind := range kinds {
		words = append(words, article(kind))
	}
	return list(words)
}

func literal(value any) string {
	text, err := json.Marshal(value)
	if err != nil || len(text) > 80 {
		return "something else"
	}
	return string(text)
}

func number(r *big.Rat) string {
	if r.IsInt() {
		return r.Num().String()
	}
	f, _ := r.Float64()
	return strconv.FormatFloat(f, 'g', -1, 64)
}
