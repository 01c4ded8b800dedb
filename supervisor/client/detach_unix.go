//go:build unix

package client

import "syscall"

// detached puts a supervisor into a session of its own, so that neither the
// terminal's signals nor its end reach it.
func detached() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setsid: true} }
