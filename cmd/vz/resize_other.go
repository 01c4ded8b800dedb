//go:build !unix

package main

import "os"

// notifyResize does nothing: this system does not tell.
func notifyResize(chan<- os.Signal) {}
