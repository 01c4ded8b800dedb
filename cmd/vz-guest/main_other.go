//go:build !linux

package main

import "errors"

func run(int) error { return errors.New("the agent runs in Linux Machines only") }
