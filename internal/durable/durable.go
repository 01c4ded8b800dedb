// Package durable replaces files so that a crash at any instant leaves either
// the old content or the new, whole.
//
// Use: Replace for small files that one writer at a time owns (who that is, a
// lock of the caller's says). It is no database: there is no transaction over
// two files, and no protection from two writers of one path.
package durable

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// Suffix is that of the file under which new content is written before it takes
// the final name. It is the same each time, so that a crash leaves at most one
// such file and the next Replace takes it away.
const Suffix = ".new"

// Replace makes data the content of path, mode perm. It returns when the file
// and its name are on the disk.
func Replace(path string, data []byte, perm fs.FileMode) error {
	if err := Stage(path+Suffix, data, perm); err != nil {
		return err
	}
	if err := os.Rename(path+Suffix, path); err != nil {
		return errors.Join(err, os.Remove(path+Suffix))
	}
	return SyncDir(filepath.Dir(path))
}

// Stage writes data to path, in place, and returns when it is on the disk. What
// stood there is lost; a failure leaves no file.
func Stage(path string, data []byte, perm fs.FileMode) (err error) {
	// Never through a link that somebody left there, and with the mode asked
	// for: an older file of that name would keep its own.
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm)
	if err != nil {
		return err
	}
	defer func() {
		if err = errors.Join(err, f.Close()); err != nil {
			os.Remove(path)
		}
	}()
	if _, err := f.Write(data); err != nil {
		return err
	}
	return f.Sync()
}

// SyncDir puts the names in a directory on the disk: fsync of a file does not
// do that for the entry that leads to it.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(syncDir(d), d.Close())
}
