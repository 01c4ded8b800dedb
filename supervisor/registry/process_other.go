//go:build !linux && !darwin

package registry

import "errors"

func processIdentity(int) (string, error) { return "", errors.ErrUnsupported }

func mountsBelow(string) ([]string, error) { return nil, nil }
