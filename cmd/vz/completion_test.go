package main

import (
	"os"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/stretchr/testify/require"
)

// Completion scripts are written by hand; this holds them to the flags there
// are.
func TestCompletionsKnowEveryVerbAndFlag(t *testing.T) {
	parser, err := kong.New(new(commandLine), kong.Vars{"version": ""})
	require.NoError(t, err)
	for _, file := range []string{"vz.bash", "_vz", "vz.fish"} {
		text, err := os.ReadFile("../../completions/" + file)
		require.NoError(t, err)
		check := func(node *kong.Node) {
			for _, flag := range node.Flags {
				require.Regexp(t, `(--|-l )`+flag.Name+`\b`, string(text), file)
			}
		}
		check(parser.Model.Node)
		for _, verb := range parser.Model.Children {
			require.Regexp(t, `\b`+verb.Name+`\b`, string(text), file)
			check(verb)
		}
	}
}
