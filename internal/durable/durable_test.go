package durable

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestReplace(t *testing.T) {
	dir := t.TempDir()
	path, outside := filepath.Join(dir, "file"), filepath.Join(t.TempDir(), "outside")
	require.NoError(t, os.WriteFile(outside, []byte("kept"), 0o644))
	for name, before := range map[string]func(){
		"nothing there":       func() {},
		"an older file":       func() { require.NoError(t, os.WriteFile(path, []byte("longer than the new"), 0o644)) },
		"half of a new one":   func() { require.NoError(t, os.WriteFile(path+Suffix, []byte("ne"), 0o644)) },
		"a link in its place": func() { require.NoError(t, os.Symlink(outside, path+Suffix)) },
	} {
		t.Run(name, func(t *testing.T) {
			before()
			require.NoError(t, Replace(path, []byte("new"), 0o600))
			got, err := os.ReadFile(path)
			require.NoError(t, err)
			assert.Equal(t, "new", string(got))
			info, err := os.Lstat(path)
			require.NoError(t, err)
			assert.Equal(t, fs.FileMode(0o600), info.Mode())
			assert.NoFileExists(t, path+Suffix)
		})
	}
	kept, err := os.ReadFile(outside)
	require.NoError(t, err)
	assert.Equal(t, "kept", string(kept), "nothing is written through a link")

	// A failure leaves what was there.
	require.NoError(t, os.MkdirAll(filepath.Join(path+Suffix, "in the way"), 0o700))
	require.Error(t, Replace(path, []byte("newer"), 0o600))
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, "new", string(got))
	require.ErrorIs(t, Replace(filepath.Join(dir, "none", "file"), nil, 0o600), fs.ErrNotExist)
}
