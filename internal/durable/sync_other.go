//go:build !unix

package durable

import "os"

// syncDir does nothing: these systems have no such call for directories and
// journal names themselves.
func syncDir(*os.File) error { return nil }
