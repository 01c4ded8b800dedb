//go:build !linux

package ingress

import "syscall"

func asUser(uid uint32) *syscall.SysProcAttr { return nil }
