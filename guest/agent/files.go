//go:build linux

package agent

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// root is where the Machine's files are: / but in tests.
type root string

func (r root) path(name string) string { return filepath.Join(string(r), name) }

// write makes the file have this content, and does nothing if it has. It
// replaces by rename, so that a reader sees the old or the new, and a link into
// the image becomes a file of the Machine's own. Where the directory cannot be
// written, a file from /run is bound over it.
func (r root) write(name string, content []byte) error {
	target := r.path(name)
	if info, err := os.Lstat(target); err == nil && info.Mode().IsRegular() {
		if old, err := os.ReadFile(target); err == nil && bytes.Equal(old, content) {
			return nil
		}
	}
	err := replace(target, content)
	if err == nil {
		return nil
	}
	if !errors.Is(err, unix.EROFS) && !errors.Is(err, unix.EBUSY) && !errors.Is(err, fs.ErrPermission) {
		return err
	}
	if bindErr := r.bind(name, content); bindErr != nil {
		return fmt.Errorf("%w; and binding a file over it: %v", err, bindErr)
	}
	return nil
}

func replace(target string, content []byte) error {
	dir := filepath.Dir(target)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, ".vz-*")
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	err = errors.Join(err, f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), target)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}

// bind writes in place what it bound earlier: a second mount over the first
// would pile up.
func (r root) bind(name string, content []byte) error {
	source := r.path(filepath.Join("/run/vz/bound", name))
	_, err := os.Stat(source)
	bound := err == nil
	if err := os.MkdirAll(filepath.Dir(source), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(source, content, 0o644); err != nil || bound {
		return err
	}
	if err := unix.Mount(source, r.path(name), "", unix.MS_BIND, ""); err != nil {
		os.Remove(source)
		return &fs.PathError{Op: "mount", Path: r.path(name), Err: err}
	}
	return nil
}
