// Package version says what build this is.
package version

import "runtime/debug"

// Version is the release, or the module's version as the Go toolchain stamped
// it where no release was linked in (-ldflags "-X vz.test/vz/internal/version.release=v1.2.3").
func Version() string {
	if release != "" {
		return release
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}

var release string
