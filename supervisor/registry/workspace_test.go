package registry

import (
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func nothing(string) string { return "" }

func TestFindDefinition(t *testing.T) {
	root, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	deep := filepath.Join(root, "outer", "inner", "deep")
	require.NoError(t, os.MkdirAll(deep, 0o755))
	_, err = FindDefinition(deep)
	var none *NoDefinitionError
	require.ErrorAs(t, err, &none)
	explained(t, err)

	outer, inner := filepath.Join(root, "outer", DefinitionName), filepath.Join(root, "outer", "inner", DefinitionName)
	require.NoError(t, os.WriteFile(outer, nil, 0o644))
	require.NoError(t, os.WriteFile(inner, nil, 0o644))
	require.NoError(t, os.Symlink(deep, filepath.Join(root, "elsewhere")))
	for dir, want := range map[string]string{
		deep:                             inner,
		filepath.Dir(inner):              inner,
		filepath.Join(root, "outer"):     outer,
		filepath.Join(root, "elsewhere"): inner, // above where it leads, not where the link is
	} {
		found, err := FindDefinition(dir)
		require.NoError(t, err)
		assert.Equal(t, want, found, dir)
	}
	// Nearest wins, even when it can't be read: another is never taken for it.
	require.NoError(t, os.Remove(inner))
	require.NoError(t, os.Symlink(inner, inner))
	_, err = FindDefinition(deep)
	require.Error(t, err)
	explained(t, err)
	require.NoError(t, os.Remove(inner))
	require.NoError(t, exec.Command("mkfifo", inner).Run()) // Windows has no call for it
	_, err = FindDefinition(deep)
	require.ErrorContains(t, err, "regular file")
	explained(t, err)
	_, err = FindDefinition(filepath.Join(root, "none"))
	explained(t, err)
}

func TestWorkspaceTokens(t *testing.T) {
	main := repository(t)
	base := filepath.Dir(main)
	key := mustToken(t, main)
	assert.Equal(t, key, mustToken(t, main), "made once")
	sub := filepath.Join(main, "a", "b")
	require.NoError(t, os.MkdirAll(sub, 0o755))
	assert.Equal(t, key, mustToken(t, sub), "the same everywhere in the worktree")
	assert.Equal(t, base+"/repo", worktree(t, sub).Root)
	info, err := os.Stat(worktree(t, main).TokenPath())
	require.NoError(t, err)
	assert.Equal(t, os.FileMode(0o600), info.Mode().Perm())

	t.Run("git worktree add", func(t *testing.T) {
		linked := filepath.Join(base, "linked")
		git(t, main, "worktree", "add", "-q", linked)
		own := mustToken(t, linked)
		assert.NotEqual(t, key, own)
		assert.Equal(t, filepath.Join(main, ".git", "worktrees", "linked"), worktree(t, linked).GitDir)

		git(t, main, "worktree", "move", linked, filepath.Join(base, "moved"))
		assert.Equal(t, own, mustToken(t, filepath.Join(base, "moved")), "moved by git")
		require.NoError(t, os.Rename(filepath.Join(base, "moved"), filepath.Join(base, "again")))
		assert.Equal(t, own, mustToken(t, filepath.Join(base, "again")), "moved by hand")

		// The main one's move breaks the link until git repairs it.
		require.NoError(t, os.Rename(main, filepath.Join(base, "repo2")))
		_, err := FindWorktree(filepath.Join(base, "again"), nothing)
		var broken *WorkspaceError
		require.ErrorAs(t, err, &broken)
		assert.Contains(t, err.Error(), "git worktree repair")
		git(t, filepath.Join(base, "repo2"), "worktree", "repair", filepath.Join(base, "again"))
		assert.Equal(t, own, mustToken(t, filepath.Join(base, "again")))
		assert.Equal(t, key, mustToken(t, filepath.Join(base, "repo2")), "the main one keeps its own")
		require.NoError(t, os.Rename(filepath.Join(base, "repo2"), main))
		git(t, main, "worktree", "repair", filepath.Join(base, "again"))

		// Removed and added again under the same name, it is another one.
		git(t, main, "worktree", "remove", filepath.Join(base, "again"))
		git(t, main, "worktree", "add", "-q", linked, "HEAD")
		assert.NotEqual(t, own, mustToken(t, linked))
	})
	t.Run("clone", func(t *testing.T) {
		clone := filepath.Join(base, "clone")
		git(t, base, "clone", "-q", main, clone)
		has, err := worktree(t, clone).Token()
		require.NoError(t, err)
		assert.Empty(t, has, "none comes along")
		assert.NotEqual(t, key, mustToken(t, clone))
	})
	t.Run("submodule", func(t *testing.T) {
		super := repository(t)
		git(t, super, "submodule", "add", "-q", main, "part")
		own := mustToken(t, filepath.Join(super, "part"))
		assert.NotEqual(t, own, mustToken(t, super))
		assert.NotEqual(t, own, key)
		assert.Equal(t, filepath.Join(super, ".git", "modules", "part"), worktree(t, filepath.Join(super, "part")).GitDir)
	})
	t.Run("no trace in git's eyes", func(t *testing.T) {
		git(t, main, "fsck", "--strict")
		git(t, main, "gc", "-q", "--prune=now")
		assert.Equal(t, key, mustToken(t, main))
	})
}

func TestFindWorktree(t *testing.T) {
	root, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	repo := repository(t)
	var broken *WorkspaceError

	t.Run("outside of git", func(t *testing.T) {
		w, err := FindWorktree(root, nothing)
		require.NoError(t, err)
		assert.Equal(t, Worktree{}, w)
		key, err := w.EnsureToken()
		require.NoError(t, err)
		assert.Empty(t, key, "nothing pretends one")
	})
	t.Run("bare", func(t *testing.T) {
		bare := filepath.Join(repo, "bare.git") // even within another one
		git(t, repo, "clone", "-q", "--bare", ".", bare)
		w, err := FindWorktree(filepath.Join(bare, "refs"), nothing)
		require.NoError(t, err)
		assert.Equal(t, Worktree{}, w)
	})
	t.Run("an empty .git is none", func(t *testing.T) {
		inner := filepath.Join(repo, "inner")
		require.NoError(t, os.MkdirAll(filepath.Join(inner, ".git"), 0o755))
		assert.Equal(t, repo, worktree(t, inner).Root)
	})
	t.Run("GIT_DIR", func(t *testing.T) {
		env := func(vars map[string]string) func(string) string { return func(k string) string { return vars[k] } }
		w, err := FindWorktree(root, env(map[string]string{"GIT_DIR": filepath.Join(repo, ".git")}))
		require.NoError(t, err)
		assert.Equal(t, Worktree{Root: root, GitDir: filepath.Join(repo, ".git")}, w)
		w, err = FindWorktree(repo, env(map[string]string{"GIT_DIR": ".git", "GIT_WORK_TREE": "inner"}))
		require.NoError(t, err)
		assert.Equal(t, Worktree{Root: filepath.Join(repo, "inner"), GitDir: filepath.Join(repo, ".git")}, w)
		_, err = FindWorktree(repo, env(map[string]string{"GIT_DIR": "/none"}))
		require.ErrorAs(t, err, &broken)
	})
	for name, text := range map[string]string{
		"empty": "", "garbage": "what", "nowhere": "gitdir: /none\n", "nothing": "gitdir: \n",
		"no git directory": "gitdir: " + root + "\n", "zeros": "gitdir: a\x00b\n",
	} {
		t.Run(".git file: "+name, func(t *testing.T) {
			dir := filepath.Join(repo, "broken")
			require.NoError(t, os.MkdirAll(dir, 0o755))
			require.NoError(t, os.WriteFile(filepath.Join(dir, ".git"), []byte(text), 0o644))
			_, err := FindWorktree(dir, nothing)
			require.ErrorAs(t, err, &broken, "it is not taken for the outer one")
			explained(t, err)
		})
	}
	t.Run("a damaged token", func(t *testing.T) {
		w := worktree(t, repo)
		require.NoError(t, os.MkdirAll(filepath.Dir(w.TokenPath()), 0o700))
		for _, text := range []string{"", "short\n", "../../../../../../../etc/passwd\n"} {
			require.NoError(t, os.WriteFile(w.TokenPath(), []byte(text), 0o600))
			_, err := w.EnsureToken()
			require.ErrorAs(t, err, &broken)
			assert.Contains(t, err.Error(), "remove the file")
		}
	})
	_, err = FindWorktree(filepath.Join(root, "none"), nothing)
	require.ErrorAs(t, err, &broken)
}

// Of many that come at once, one makes the token and all have it.
func TestEnsureTokenAtOnce(t *testing.T) {
	w := worktree(t, repository(t))
	made := make([]string, 16)
	var group sync.WaitGroup
	for i := range made {
		group.Go(func() {
			key, err := w.EnsureToken()
			assert.NoError(t, err)
			made[i] = key
		})
	}
	group.Wait()
	for _, key := range made {
		assert.NotEmpty(t, key)
		assert.Equal(t, made[0], key)
	}
	assert.Equal(t, []string{"workspace-id"}, files(t, filepath.Dir(w.TokenPath())), "no copies are left")
}
