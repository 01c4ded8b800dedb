// Command vz-guest is the agent inside a Machine; guest/agent is what it does.
//
//	vz-guest agent --fd 3    serve the supervisor at descriptor 3
//	vz-guest --version
package main

import (
	"flag"
	"fmt"
	"os"
)

// version is set by the build: -ldflags "-X main.version=…".
var version = "devel"

func main() {
	if len(os.Args) == 2 && os.Args[1] == "--version" {
		fmt.Println(version)
		return
	}
	if len(os.Args) < 2 || os.Args[1] != "agent" {
		fmt.Fprintln(os.Stderr, "usage: vz-guest agent [--fd N] | --version")
		os.Exit(2)
	}
	flags := flag.NewFlagSet("vz-guest agent", flag.ExitOnError)
	fd := flags.Int("fd", 3, "`descriptor` of the channel to the supervisor")
	flags.Parse(os.Args[2:])
	if err := run(*fd); err != nil {
		fmt.Fprintln(os.Stderr, "vz-guest:", err)
		os.Exit(1)
	}
}
