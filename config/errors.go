package config

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// FileName is what a project's definition is called.
const FileName = "vz.json"

// Error is one mistake of a definition.
type Error struct {
	File       string // FileName, or what Load was given; empty without a text
	Line       int    // from 1; 0 without a text
	Column     int    // from 1, in characters
	Pointer    string // JSON pointer (RFC 6901) to the value or the key
	Problem    string // what is wrong
	Want       string // what would be right; may be empty
	Suggestion string // the nearest known word; may be empty
}

func (e *Error) Error() string {
	text := e.Problem
	switch {
	case e.Suggestion != "":
		text += fmt.Sprintf("; did you mean %q?", e.Suggestion)
	case e.Want != "":
		text += "; want " + e.Want
	}
	return place(e.File, e.Line, e.Column, e.Pointer) + text
}

// Errors are all mistakes of a definition, in the order of the text.
type Errors []*Error

// shown bounds what Error prints: the rest would hide the beginning. kept
// bounds what is noted at all: nobody mends ten thousand mistakes one by one.
const (
	shown = 50
	kept  = 10000
)

func (e Errors) Error() string {
	lines := make([]string, 0, min(len(e), shown)+1)
	for _, one := range e[:min(len(e), shown)] {
		lines = append(lines, one.Error())
	}
	if more := len(e) - shown; more > 0 {
		lines = append(lines, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(lines, "\n")
}

// Unwrap lets errors.As find an *Error.
func (e Errors) Unwrap() []error {
	all := make([]error, len(e))
	for i, one := range e {
		all[i] = one
	}
	return all
}

// place is what an error about a definition begins with.
func place(file string, line, column int, pointer string) string {
	var b strings.Builder
	if file != "" {
		fmt.Fprintf(&b, "%s:", file)
	}
	if line > 0 {
		fmt.Fprintf(&b, "%d:%d:", line, column)
	}
	if pointer == "" {
		pointer = "/"
	}
	if b.Len() > 0 {
		b.WriteByte(' ')
	}
	b.WriteString(printable(pointer))
	b.WriteString(": ")
	return b.String()
}

// printable keeps a document's own control characters away from terminals.
func printable(s string) string {
	if strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) < 0 {
		return s
	}
	quoted := strconv.Quote(s)
	return quoted[1 : len(quoted)-1]
}

// quote is a value in a message; long ones are cut.
func quote(s string) string {
	const most = 80
	if runes := []rune(s); len(runes) > most {
		s = string(runes[:most]) + "…"
	}
	return strconv.Quote(s)
}

// list is words in a sentence: a, b or c; long ones are cut.
func list(words []string) string {
	const most = 12
	if len(words) > most {
		return strings.Join(words[:most], ", ") + ", …"
	}
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:len(words)-1], ", ") + " or " + words[len(words)-1]
}

// pointer makes a JSON pointer of its tokens.
func pointer(tokens ...string) string {
	var b strings.Builder
	for _, token := range tokens {
		b.WriteByte('/')
		b.WriteString(strings.NewReplacer("~", "~0", "/", "~1").Replace(token))
	}
	return b.String()
}

// split takes a JSON pointer apart.
func split(pointer string) []string {
	if pointer == "" {
		return nil
	}
	tokens := strings.Split(strings.TrimPrefix(pointer, "/"), "/")
	for i, token := range tokens {
		tokens[i] = strings.NewReplacer("~1", "/", "~0", "~").Replace(token)
	}
	return tokens
}

// nearest is the known word that a misspelt one most likely means: the fewest
// edits, at most a third of its length and three; empty when none is near.
func nearest(word string, known []string) string {
	if len(word) > 256 || len(known) > 2048 {
		return "" // not worth the time
	}
	best, least := "", min(3, max(1, len(word)/3))+1
	for _, candidate := range known {
		if candidate == word || len(candidate) > 3*len(word)+16 {
			continue
		}
		distance := edits(word, candidate)
		if len(candidate) > 2 && len(word) > 2 && distance >= least &&
			(strings.HasPrefix(candidate, word) || strings.HasPrefix(word, candidate)) {
			distance = least - 1 // "dup" and "duplication"
		}
		if distance < least {
			best, least = candidate, distance
		}
	}
	return best
}

// edits is the optimal string alignment distance: insertions, deletions,
// substitutions and swaps of neighbours.
func edits(a, b string) int {
	s, t := []rune(a), []rune(b)
	before, above, row := make([]int, len(t)+1), make([]int, len(t)+1), make([]int, len(t)+1)
	for j := range above {
		above[j] = j
	}
	for i := range s {
		row[0] = i + 1
		for j := range t {
			cost := 1
			if s[i] == t[j] {
				cost = 0
			}
			row[j+1] = min(above[j+1]+1, row[j]+1, above[j]+cost)
			if i > 0 && j > 0 && s[i] == t[j-1] && s[i-1] == t[j] {
				row[j+1] = min(row[j+1], before[j-1]+1)
			}
		}
		before, above, row = above, row, before
	}
	return above[len(t)]
}

// problems collects the mistakes of one document.
type problems struct {
	doc  *document
	file string
	all  Errors
}

// add notes a mistake at the value that tokens lead to.
func (p *problems) add(tokens []string, problem, want, suggestion string) {
	p.at(p.doc.offset(tokens), tokens, problem, want, suggestion)
}

// addKey notes a mistake of the key itself.
func (p *problems) addKey(tokens []string, problem, want, suggestion string) {
	p.at(p.doc.keyOffset(tokens), tokens, problem, want, suggestion)
}

func (p *problems) at(offset int, tokens []string, problem, want, suggestion string) {
	if len(p.all) >= kept {
		return
	}
	line, column := p.doc.position(offset)
	p.all = append(p.all, &Error{
		File: p.file, Line: line, Column: column, Pointer: pointer(tokens...),
		Problem: problem, Want: want, Suggestion: suggestion,
	})
}

// err is what was noted, in the order of the text and without repetitions.
func (p *problems) err() error {
	if len(p.all) == 0 {
		return nil
	}
	slices.SortStableFunc(p.all, func(a, b *Error) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column),
			cmp.Compare(a.Pointer, b.Pointer), cmp.Compare(a.Problem, b.Problem))
	})
	return slices.CompactFunc(p.all, func(a, b *Error) bool { return *a == *b })
}
