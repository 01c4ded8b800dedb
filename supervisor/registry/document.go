package registry

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"vz.test/vz/internal/durable"
)

const (
	// version of the record's and the index's files. Within a version files
	// only grow, and unknown members are let through.
	version = 1
	// maxDocument bounds what is read of one file in bytes. A record of a
	// hundred Machines has about 100 KiB.
	maxDocument = 16 << 20
	// previousSuffix is that of the copy that was current before.
	previousSuffix = ".prev"
)

// A document is one versioned JSON file's content.
type document interface {
	// validate says whether the content makes sense, so that JSON that only
	// happens to parse is not taken for the state.
	validate() error
}

// decode reads a document's text.
func decode[T document](path string, text []byte, into T) error {
	var head struct {
		Version *int `json:"version"`
	}
	if err := json.Unmarshal(text, &head); err != nil {
		return err
	}
	switch {
	case head.Version == nil:
		return errors.New("it does not say its version")
	case *head.Version > version:
		return &NewerVersionError{path, *head.Version, version}
	case *head.Version < 1:
		return fmt.Errorf("its version is %d", *head.Version)
	}
	if err := json.Unmarshal(text, into); err != nil {
		return err
	}
	return into.validate()
}

// readDocument reads a file, or its previous copy when that one is damaged,
// with a warning. A file that is not there is fs.ErrNotExist; then a previous
// copy is not looked for: nothing takes only the current one away.
func readDocument[T document](r *Registry, path string, fresh func() T, next string) (T, error) {
	var none T
	text, err := readFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return none, err
	}
	if err != nil {
		return none, &FileError{"cannot read", path, err, "see that it is yours and the disk works"}
	}
	current := fresh()
	damage := decode(path, text, current)
	var newer *NewerVersionError
	if damage == nil {
		return current, nil
	} else if errors.As(damage, &newer) {
		return none, damage
	}
	if text, err = readFile(path + previousSuffix); err == nil {
		previous := fresh()
		if err = decode(path+previousSuffix, text, previous); err == nil {
			r.warn(&RestoredError{path, damage})
			return previous, nil
		} else if errors.As(err, &newer) {
			return none, err
		}
	}
	return none, &CorruptError{path, damage, next}
}

// writeDocument replaces a file and keeps what stood there as its previous
// copy, if that was good. One writer at a time: who, the caller's lock says.
func writeDocument[T document](path string, content T, fresh func() T) error {
	if err := content.validate(); err != nil {
		return &FileError{"cannot write", path, err, "this is a bug in vz: please report it"}
	}
	text, err := json.MarshalIndent(content, "", "  ")
	if err != nil {
		return &FileError{"cannot write", path, err, "this is a bug in vz: please report it"}
	}
	text = append(text, '\n')
	old, err := readFile(path)
	if err == nil {
		if bytes.Equal(old, text) {
			return nil
		}
		err = decode(path, old, fresh())
		var newer *NewerVersionError
		if errors.As(err, &newer) {
			return err
		}
		if err == nil {
			err = keepPrevious(path, old)
		} else {
			err = nil // damaged: the previous copy is the better one
		}
	} else if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err == nil {
		err = durable.Replace(path, text, 0o600)
	}
	if err != nil {
		return &FileError{"cannot write", path, err, "see that its directory can be written to and the disk is not full"}
	}
	return nil
}

// keepPrevious makes the current file the previous copy too. The current name
// stays: a crash at any instant leaves it whole.
func keepPrevious(path string, text []byte) error {
	previous, staged := path+previousSuffix, path+previousSuffix+durable.Suffix
	if err := os.Remove(staged); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	// A second name costs no write of the data; where the file system has no
	// such names, a copy does.
	if os.Link(path, staged) != nil {
		return durable.Replace(previous, text, 0o600)
	}
	err := os.Rename(staged, previous)
	// rename(2) of two names of one file does nothing, and leaves both: a crash
	// after an earlier one gets here.
	os.Remove(staged)
	return err
}

func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxDocument+1))
	if err == nil && len(text) > maxDocument {
		err = fmt.Errorf("it is longer than %d bytes", maxDocument)
	}
	return text, err
}
