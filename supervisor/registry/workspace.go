package registry

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"vz.test/vz/internal/durable"
)

// DefinitionName is the file name of a ProjectDefinition.
const DefinitionName = "vz.json"

// FindDefinition is the path of the nearest vz.json, in dir or above it: an
// inner one hides an outer one. *NoDefinitionError when there is none.
func FindDefinition(dir string) (string, error) {
	start, err := physical(dir)
	if err != nil {
		return "", &FileError{"cannot look for " + DefinitionName + " in", dir, err, "change to a directory that exists"}
	}
	for at := start; ; at = filepath.Dir(at) {
		path := filepath.Join(at, DefinitionName)
		if info, err := os.Stat(path); err == nil {
			if !info.Mode().IsRegular() { // to read a pipe would wait for ever
				return "", &FileError{"cannot use", path, errors.New("it is not a regular file"), "name something else so"}
			}
			return path, nil
		} else if !errors.Is(err, fs.ErrNotExist) {
			// It may well be there: to go on would find another one.
			return "", &FileError{"cannot look at", path, err, "see that it can be read"}
		}
		if at == filepath.Dir(at) {
			return "", &NoDefinitionError{start}
		}
	}
}

// physical is a directory's path without links, as "above" means it.
func physical(dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	return filepath.EvalSymlinks(dir)
}

// A Worktree is a checkout: a git directory of its own and the files beside it.
// The zero value is that there is none. Root is a hint for display.
type Worktree struct {
	Root   string
	GitDir string
}

// FindWorktree finds the worktree that dir is in as git does, without git:
// GIT_DIR, else the nearest .git upward, be it a directory, or the file that a
// linked worktree or a submodule has in its place. Outside of git, and in a
// bare repository, there is none. getenv nil is os.Getenv. Errors are
// *WorkspaceError: a .git that leads nowhere is not taken for none at all.
func FindWorktree(dir string, getenv func(string) string) (Worktree, error) {
	if getenv == nil {
		getenv = os.Getenv
	}
	start, err := physical(dir)
	if err != nil {
		return Worktree{}, &WorkspaceError{Path: dir, Why: reason(err), Next: "change to a directory that exists", Err: err}
	}
	if given := getenv("GIT_DIR"); given != "" {
		path, err := physical(under(start, given))
		if err != nil || !isGitDir(path) {
			return Worktree{}, &WorkspaceError{Path: given, Why: "GIT_DIR leads to no git directory", Next: "unset GIT_DIR or set it right", Err: err}
		}
		root := start
		if tree := getenv("GIT_WORK_TREE"); tree != "" {
			root = under(start, tree)
		}
		return Worktree{Root: root, GitDir: path}, nil
	}
	for at := start; ; at = filepath.Dir(at) {
		path := filepath.Join(at, ".git")
		gitDir, err := resolveGit(path)
		if err != nil {
			return Worktree{}, err
		}
		if gitDir != "" {
			return Worktree{Root: at, GitDir: gitDir}, nil
		}
		if at == filepath.Dir(at) || isGitDir(at) {
			return Worktree{}, nil
		}
	}
}

func under(dir, path string) string {
	if filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(dir, path)
}

// resolveGit is the git directory that a .git stands for; empty when there is
// none.
func resolveGit(path string) (string, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", &WorkspaceError{Path: path, Why: reason(err), Next: "see that it can be read", Err: err}
	}
	if info.IsDir() {
		if !isGitDir(path) {
			return "", nil // git goes on upward too
		}
		path, err = physical(path)
		if err != nil {
			return "", &WorkspaceError{Path: path, Why: reason(err), Next: "see that it can be read", Err: err}
		}
		return path, nil
	}
	text, err := readFile(path)
	if err != nil {
		return "", &WorkspaceError{Path: path, Why: reason(err), Next: "see that it can be read", Err: err}
	}
	target, found := bytes.CutPrefix(text, []byte("gitdir: "))
	target = bytes.TrimRight(target, "\r\n")
	if !found || len(target) == 0 || bytes.IndexByte(target, 0) >= 0 {
		return "", &WorkspaceError{Path: path, Why: "it is a file, but does not say \"gitdir: PATH\"", Next: "`git worktree repair` mends it"}
	}
	gitDir, err := physical(under(filepath.Dir(path), string(target)))
	if err != nil || !isGitDir(gitDir) {
		return "", &WorkspaceError{Path: path, Why: fmt.Sprintf("it leads to %s, which is no git directory", target), Next: "`git worktree repair` in the main worktree mends it", Err: err}
	}
	return gitDir, nil
}

// isGitDir is git's own test (is_git_directory): HEAD, and objects and refs, or
// the commondir of a linked worktree that leads to them.
func isGitDir(path string) bool {
	if _, err := os.Lstat(filepath.Join(path, "HEAD")); err != nil {
		return false
	}
	if info, err := os.Stat(filepath.Join(path, "commondir")); err == nil && info.Mode().IsRegular() {
		return true
	}
	for _, dir := range []string{"objects", "refs"} {
		if info, err := os.Stat(filepath.Join(path, dir)); err != nil || !info.IsDir() {
			return false
		}
	}
	return true
}

// TokenPath is the file of the worktree's token. git copies it neither to a
// clone nor to another worktree; a worktree that is moved keeps it, since its
// git directory stays or moves along. (A copy of a checkout that also copies
// its git directory, such as by cp -a, is the same worktree to git and to vz.)
func (w Worktree) TokenPath() string { return filepath.Join(w.GitDir, "vz", "workspace-id") }

// token has the form of crypto/rand.Text: base32, at least 128 bits.
var token = regexp.MustCompile(`^[A-Z2-7]{26,64}$`)

// Token is the worktree's token; empty when it has none yet, or w is none.
func (w Worktree) Token() (string, error) {
	if w.GitDir == "" {
		return "", nil
	}
	text, err := readFile(w.TokenPath())
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", &WorkspaceError{Path: w.TokenPath(), Why: reason(err), Next: "see that it is yours and can be read", Err: err}
	}
	found := strings.TrimSuffix(string(text), "\n")
	if !token.MatchString(found) {
		return "", &WorkspaceError{Path: w.TokenPath(), Why: "it has no workspace token in it",
			Next: "remove the file, and bind the worktree again by `vz up --environment NAME`"}
	}
	return found, nil
}

// EnsureToken is the worktree's token, made if there is none: by whoever comes
// first, and the same to all who come at once. Empty when w is none.
func (w Worktree) EnsureToken() (string, error) {
	if found, err := w.Token(); found != "" || err != nil || w.GitDir == "" {
		return found, err
	}
	path := w.TokenPath()
	made := rand.Text()
	staged := filepath.Join(filepath.Dir(path), ".workspace-id-"+made[:8])
	err := os.MkdirAll(filepath.Dir(path), 0o700)
	if err == nil {
		err = durable.Stage(staged, []byte(made+"\n"), 0o600)
	}
	if err == nil {
		// A link appears whole or not at all, and never in place of another's.
		err = os.Link(staged, path)
		os.Remove(staged)
	}
	if err == nil {
		err = durable.SyncDir(filepath.Dir(path))
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return "", &WorkspaceError{Path: path, Why: reason(err), Next: "see that the git directory can be written to", Err: err}
	}
	return w.Token()
}
