package config

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestMatrix(t *testing.T) {
	m := Matrix()
	assert.Equal(t, "0.4", m.SchemaVersion)
	assert.Len(t, m.Statuses, 4)
	ids := map[string]bool{}
	whole := map[string]bool{}
	for _, e := range m.Entries {
		assert.False(t, ids[e.ID], "%s twice", e.ID)
		ids[e.ID] = true

		want := e.Capability
		var dimensions []string
		for _, dimension := range []string{e.Host, e.Target, e.Profile, e.Isolation} {
			if dimension != Any {
				dimensions = append(dimensions, dimension)
			}
		}
		if len(dimensions) > 0 {
			want += "@" + strings.Join(dimensions, "/")
		} else {
			whole[e.Capability] = true
		}
		assert.Equal(t, want, e.ID)

		assert.Contains(t, m.Statuses, e.Status, e.ID)
		assert.Contains(t, []string{Any, "linux", "darwin", "windows"}, e.Host, e.ID)
		assert.Contains(t, []string{Any, "linux", "macos"}, e.Target, e.ID)
		assert.Contains(t, []string{Any, "developer", "hardened"}, e.Profile, e.ID)
		assert.Contains(t, []string{Any, "vm", "namespace"}, e.Isolation, e.ID)
		if e.Admitted() {
			assert.NotEmpty(t, e.Evidence, "%s is said to work and nothing shows it", e.ID)
		} else {
			assert.NotEmpty(t, e.Note, "%s is refused without a word", e.ID)
			assert.Regexp(t, `\.$`, e.Note, e.ID)
		}
	}
	for _, e := range m.Entries {
		if e.Host != "linux" && e.Host != "darwin" {
			continue
		}
		assert.True(t, whole[e.Capability], "%s has no entry for the rest of the world", e.Capability)
	}
}

func TestFind(t *testing.T) {
	m := Matrix()
	for _, test := range []struct{ capability, host, target, profile, isolation, want string }{
		{"isolation.vm", "linux", "linux", "developer", "vm", "isolation.vm@linux/linux"},
		{"isolation.vm", "linux", "macos", "developer", "vm", "isolation.vm@linux/macos"},
		{"isolation.vm", "darwin", "macos", "developer", "vm", "isolation.vm@darwin"},
		{"isolation.vm", "plan9", "linux", "developer", "vm", "isolation.vm"},
		{"docker.engine", "linux", "linux", "hardened", "namespace", "docker.engine@hardened"},
		{"docker.engine", "darwin", "macos", "hardened", "vm", "docker.engine@macos"},
		{"image.host", "linux", "linux", "developer", "vm", "image.host@linux/linux/vm"},
		{"path.tcp", "linux", Any, Any, Any, "path.tcp"},
	} {
		assert.Equal(t, test.want, m.Find(test.capability, test.host, test.target, test.profile, test.isolation).ID)
	}
	assert.Equal(t, NA, m.Find("teleport", "linux", "linux", "developer", "vm").Status)
	assert.Equal(t, NA, m.Find("isolation.namespace", "linux", Any, Any, Any).Status, "what is not known is not promised")
}

func TestCheckClaims(t *testing.T) {
	m := Matrix()
	assert.Empty(t, m.CheckClaims("README.md", `
| Docker | PLANNED <!-- cap:docker.engine PLANNED --> |
| namespaces | ACTIVE on Linux <!-- cap:isolation.namespace@linux/linux ACTIVE --> |
Both ACTIVE and PLANNED: <!-- cap:path.tcp ACTIVE --> <!-- cap:dns.zones PLANNED -->
A line without a marker may say ACTIVE, DEV or what it likes.
`))
	var texts []string
	for _, err := range m.CheckClaims("README.md", `
Docker works <!-- cap:docker.engine ACTIVE -->
<!-- cap:isolation.vn PLANNED -->
| zones | ACTIVE | <!-- cap:dns.zones PLANNED -->
<!-- cap:path.tcp -->
`) {
		texts = append(texts, err.Error())
	}
	assert.Equal(t, []string{
		`README.md:2: cap:docker.engine says "ACTIVE", and the matrix says PLANNED`,
		`README.md:3: the matrix has no entry "isolation.vn"; did you mean "isolation.vm"?`,
		`README.md:4: the line reads ACTIVE, and its marker says otherwise`,
		`README.md:5: cap:path.tcp says "", and the matrix says ACTIVE`,
	}, texts)
}

// TestClaims holds the project's own texts to the matrix.
func TestClaims(t *testing.T) {
	var files []string
	for _, pattern := range []string{"../*.md", "../docs/*", "../docs/*/*", "../examples/*/*.md", "../bench/*.md", "../cmd/*/*.go", "../cmd/*/*.txt"} {
		found, err := filepath.Glob(pattern)
		require.NoError(t, err)
		files = append(files, found...)
	}
	for _, file := range files {
		if info, err := os.Stat(file); err != nil || info.IsDir() {
			continue
		}
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, err := range Matrix().CheckClaims(file, string(text)) {
			assert.NoError(t, err)
		}
	}
}

// Evidence that is a package's tests names a package that is there.
func TestEvidence(t *testing.T) {
	tests := regexp.MustCompile(`^go test \./([a-z/]+?)(/\.\.\.)?$`)
	for _, e := range Matrix().Entries {
		if !e.Admitted() || e.Evidence == "make demo" {
			continue
		}
		match := tests.FindStringSubmatch(e.Evidence)
		if assert.NotNil(t, match, "%s: %s", e.ID, e.Evidence) {
			assert.DirExists(t, filepath.Join("..", match[1]), e.ID)
		}
	}
}
