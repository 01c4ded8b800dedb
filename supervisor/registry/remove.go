package registry

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Remove takes all that is kept of an Environment away: its socket, its
// directory, its bindings and its name; with a project's last one that
// project's directory too, and with the last of all everything but the empty
// state directory. What its Machines had outside of it (processes, mounts,
// disks with other owners) has been cleared away before.
//
// owner is the Environment's lock if the caller holds it, which Remove closes
// in any case; nil takes it, and fails with *HeldError while a supervisor lives.
// project may be empty when nobody knows it: then any index that has it.
//
// A crash at any point is finished by the next Remove:
//
//	record says deleting → entry says removal → directory renamed → its content
//	removed → entry removed
func (r *Registry) Remove(project, environment string, owner *Owner) error {
	defer func() { closeOwner(owner) }()
	if err := CheckID(environment, KindEnvironment); err != nil {
		return err
	}
	own := func() (err error) {
		if owner == nil && r.exists(environment) {
			owner, err = r.Own(context.Background(), environment)
		}
		if missing := new(MissingError); errors.As(err, &missing) {
			return nil
		}
		return err
	}
	if err := own(); err != nil {
		return err
	}

	record, err := r.Record(environment)
	var newer *NewerVersionError
	switch {
	case errors.As(err, &newer):
		return err
	case err == nil:
		project = record.ProjectID
		if record.State != Deleting {
			record.State, record.Message = Deleting, ""
			// On a full disk nothing can be written, but delete makes room.
			if err := r.Save(record); err != nil {
				r.warn(err)
			}
		}
		if s := record.Supervisor; s != nil {
			r.removeSocket(s.Socket)
		}
	case project == "":
		if project, err = r.projectOf(environment); err != nil {
			return err
		}
	}
	r.removeSocket(r.SocketPath(environment))
	if project == "" {
		if err := r.discard(environment); err != nil {
			return err
		}
		os.Remove(r.environments())
		return nil
	}
	err = r.inProject(project, func() error {
		// An up may have made it again since we looked.
		if err := own(); err != nil {
			return err
		}
		v, err := r.view(project)
		if err != nil {
			var corrupt *CorruptError
			if !errors.As(err, &corrupt) {
				return err
			}
			// The index is lost; its names are in the records, this one is not
			// to be found there again.
			r.warn(err)
			return r.discard(environment)
		}
		name, listed := v.name(environment)
		if listed && !v.Environments[name].Removal {
			v.Environments[name] = entry{ID: environment, Removal: true}
			if err := r.saveIndex(v); err != nil {
				r.warn(err)
			}
		}
		if err := r.discard(environment); err != nil {
			return err
		}
		v.remove(environment)
		return r.saveIndex(v)
	})
	if err != nil {
		return err
	}
	r.sweep(project)
	return nil
}

func closeOwner(o *Owner) {
	if o != nil {
		o.Close()
	}
}

// projectOf is the project whose index has an Environment; empty when none has.
func (r *Registry) projectOf(environment string) (string, error) {
	projects, err := r.projectIDs()
	if err != nil {
		return "", err
	}
	for _, project := range projects {
		if _, ok := r.entry(project, environment); ok {
			return project, nil
		}
	}
	return "", nil
}

// discard makes an Environment's directory trash and removes it, and what other
// removals that were cut off have left. Renaming comes first: half an
// Environment is never taken for a whole one.
func (r *Registry) discard(environment string) error {
	dir, trash := r.EnvironmentDir(environment), r.trash(environment)
	failed := func(path string, err error) error {
		return &FileError{"cannot remove", path, err, "clear it away by hand if its files belong to another user, then `vz delete` again"}
	}
	if r.exists(environment) {
		if err := removeTree(trash); err != nil {
			return failed(trash, err)
		}
		if err := noMounts(dir); err != nil {
			return err
		}
		if err := os.Rename(dir, trash); err != nil {
			return failed(dir, err)
		}
	}
	entries, err := os.ReadDir(r.environments())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return failed(r.environments(), err)
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), trashPrefix) {
			continue
		}
		path := filepath.Join(r.environments(), e.Name())
		err := noMounts(path)
		if err == nil {
			err = removeTree(path)
		}
		switch {
		case err == nil:
		case path == trash:
			return failed(path, err)
		default:
			r.warn(failed(path, err))
		}
	}
	return nil
}

// noMounts refuses to remove a directory with something mounted in it: what
// would be removed then is not the Environment's.
func noMounts(dir string) error {
	mounts, err := mountsBelow(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return &FileError{"cannot tell what is mounted in", dir, err, "see that /proc is mounted"}
	}
	if len(mounts) > 0 {
		return &PlaceError{dir, fmt.Sprintf("%s is still mounted in it", mounts[0]), "umount it, then `vz delete` again"}
	}
	return nil
}

// removeTree is os.RemoveAll that also gets rid of directories that their
// owner may not enter, such as the work directory of an overlay (mode 0).
func removeTree(path string) error {
	err := os.RemoveAll(path)
	if !errors.Is(err, fs.ErrPermission) {
		return err
	}
	filepath.WalkDir(path, func(at string, d fs.DirEntry, err error) error {
		// A directory is visited before it is read: this is in time.
		if d != nil && d.IsDir() {
			os.Chmod(at, 0o700)
		}
		return nil
	})
	return os.RemoveAll(path)
}

// removeSocket removes a socket, and its directory if that is vz's and empty.
func (r *Registry) removeSocket(path string) {
	info, err := os.Lstat(path)
	if err == nil && info.Mode().Type() == fs.ModeSocket && ownedBy(info, r.uid) {
		os.Remove(path)
	}
	if dir := filepath.Dir(path); dir == r.runtime || strings.HasPrefix(filepath.Base(dir), "vz") {
		os.Remove(dir) // fails unless it is empty
	}
}
