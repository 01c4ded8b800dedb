// Command vz brings reproducible, isolated Developer Environments up and down.
// Flags and output are all it has; what it does is supervisor/client's.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"

	"vz.test/vz/config"
	"vz.test/vz/internal/version"
	"vz.test/vz/supervisor/api"
	"vz.test/vz/supervisor/client"
	"vz.test/vz/supervisor/registry"
)

const description = `Reproducible, parallel Developer Environments from a checked-in vz.json.

An Environment is chosen by --environment (ID or name), else by
VZ_ENVIRONMENT_ID (ID), else by the binding that vz up gave this worktree.`

// commandLine is every flag that vz has.
type commandLine struct {
	Up     upCommand     `cmd:"" help:"Create the Environment or make it what vz.json says."`
	Exec   execCommand   `cmd:"" help:"Run a command in a Machine, which is started if it is down."`
	Status statusCommand `cmd:"" help:"Show what is recorded and how each Machine fares."`
	Stop   stopCommand   `cmd:"" help:"Stop every Machine; identity and state stay."`
	Delete deleteCommand `cmd:"" help:"Take everything of the Environment away."`

	Progress string           `enum:"auto,tty,plain,json,quiet" default:"auto" help:"How steps are shown on stderr: auto, tty, plain, json, quiet."`
	Version  kong.VersionFlag `help:"Print the version."`
}

// selection is how an Environment is chosen.
type selection struct {
	Environment *string `short:"e" placeholder:"E" help:"The Environment, by ID or name."`
}

// Exit statuses.
const (
	exitFailed = 1
	exitUsage  = 2
)

func main() { os.Exit(run(os.Args[1:])) }

// exited carries a command's exit status out of kong.
type exited int

func run(args []string) (status int) {
	var line commandLine
	parser, err := kong.New(&line, kong.Name("vz"), kong.Description(description), kong.UsageOnError(),
		kong.Vars{"version": version.Version()}, kong.ConfigureHelp(kong.HelpOptions{Compact: true}),
		kong.Exit(func(code int) { panic(exited(code)) }))
	if err != nil {
		panic(err)
	}
	defer func() { // --help and --version end by kong's Exit
		switch code := recover().(type) {
		case nil:
		case exited:
			status = int(code)
		default:
			panic(code)
		}
	}()
	if len(args) == 0 {
		args = []string{"--help"}
	}
	isExec := verb(args) == "exec"
	parsed, err := parser.Parse(args)
	if err != nil {
		fmt.Fprintf(os.Stderr, "vz: %v; see %s --help\n", err, helped(err))
		if isExec {
			return client.StatusFailed
		}
		return exitUsage
	}
	err = parsed.Run(&line)
	var code exitStatus
	if errors.As(err, &code) {
		err = code.err
		status = code.status
	} else if err != nil {
		status = exitFailed
	}
	if err != nil {
		report(os.Stderr, err)
	}
	return status
}

// helped is the command whose help has what a usage error is about.
func helped(err error) string {
	if wrong, ok := errors.AsType[*kong.ParseError](err); ok && wrong.Context.Selected() != nil {
		return wrong.Context.Selected().FullPath()
	}
	return "vz"
}

// verb is the first argument that is one: before it stand flags and their values.
func verb(args []string) string {
	verbs := []string{"up", "exec", "status", "stop", "delete"}
	if i := slices.IndexFunc(args, func(a string) bool { return slices.Contains(verbs, a) }); i >= 0 {
		return args[i]
	}
	return ""
}

// exitStatus is an error, or nothing worth words, with a status of its own.
type exitStatus struct {
	status int
	err    error
}

func (e exitStatus) Error() string { return fmt.Sprint("exit status ", e.status) }

// report writes what failed, why, and the next thing to do.
func report(w io.Writer, err error) {
	var (
		problem   *api.Problem
		explained registry.Explained
		mistakes  config.Errors
		refused   config.Unsupported
	)
	err = client.Problem(err)
	switch {
	case errors.As(err, &mistakes), errors.As(err, &refused):
		fmt.Fprintln(w, err)
		fmt.Fprintln(w, "vz: the definition is refused; nothing was changed")
		if strings.Contains(err.Error(), "project_id") {
			fmt.Fprintf(w, "     next: a project_id for a new project: %s\n", registry.NewID(registry.KindProject))
		}
	case errors.As(err, &problem):
		lines(w, problem.What, problem.Why, problem.Next)
		if problem.LogPath != "" {
			fmt.Fprintf(w, "     log: %s\n", problem.LogPath)
		}
	case errors.As(err, &explained):
		what, why, next := explained.Explain()
		lines(w, what, why, next)
	case errors.Is(err, context.Canceled):
		fmt.Fprintln(w, "vz: cancelled")
	default:
		fmt.Fprintf(w, "vz: %v\n", err)
	}
}

func lines(w io.Writer, what, why, next string) {
	fmt.Fprintf(w, "vz: %s\n", what)
	if why != "" {
		fmt.Fprintf(w, "     why: %s\n", strings.ReplaceAll(why, "\n", "\n          "))
	}
	if next != "" {
		fmt.Fprintf(w, "     next: %s\n", next)
	}
}

// interruptible ends with SIGINT, SIGTERM and SIGHUP.
func interruptible() (context.Context, context.CancelFunc) {
	return signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
}

// open finds the user's state; damage that was worked around is said, once.
func open() (*registry.Registry, error) {
	said := map[string]bool{}
	return registry.Open(registry.Options{Warn: func(err error) {
		if text := err.Error(); !said[text] {
			said[text] = true
			fmt.Fprintf(os.Stderr, "vz: warning: %s\n", text)
		}
	}})
}
