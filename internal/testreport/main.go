// Command testreport reads the events of "go test -json" on standard input
// and prints what a person wants of them: one line a package, the output of
// what failed, every skipped test with its reason, and a closing count. It
// exits 1 when something failed; with -no-skips also when something was
// skipped, which is how continuous integration runs as root on Linux, where
// nothing has a reason to be skipped.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strings"
)

type event struct {
	Action  string
	Package string
	Test    string
	Elapsed float64
	Output  string
}

func main() {
	noSkips := flag.Bool("no-skips", false, "a skipped test is a failure")
	flag.Parse()

	output := map[[2]string]*strings.Builder{} // package, test → what it printed
	var skipped []string
	passed, failed := 0, 0
	in := bufio.NewReaderSize(os.Stdin, 1<<20)
	for {
		line, err := in.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if json.Unmarshal(line, &e) != nil {
				os.Stdout.Write(line) // a build error, or the go command's own word
				continue
			}
			key := [2]string{e.Package, e.Test}
			switch e.Action {
			case "output", "build-output":
				if output[key] == nil {
					output[key] = new(strings.Builder)
				}
				output[key].WriteString(e.Output)
				if e.Action == "build-output" {
					fmt.Print(e.Output)
				}
			case "pass":
				if e.Test == "" {
					fmt.Printf("ok    %-50s %6.1fs\n", e.Package, e.Elapsed)
				} else {
					passed++
				}
				delete(output, key)
			case "fail":
				if e.Test == "" {
					fmt.Printf("FAIL  %-50s %6.1fs\n", e.Package, e.Elapsed)
					failed++ // the package: a panic, a build error, or its tests
				} else {
					failed++
					fmt.Printf("--- FAIL: %s %s\n", e.Package, e.Test)
				}
				if o := output[key]; o != nil {
					fmt.Print(o.String())
				}
			case "skip":
				if e.Test != "" {
					skipped = append(skipped, fmt.Sprintf("%s %s: %s", e.Package, e.Test, reason(output[key])))
				}
			}
		}
		if err != nil {
			break
		}
	}
	for _, s := range skipped {
		fmt.Println("skipped:", s)
	}
	fmt.Printf("%d passed, %d failed, %d skipped\n", passed, failed, len(skipped))
	if failed > 0 || passed == 0 || *noSkips && len(skipped) > 0 {
		os.Exit(1)
	}
}

// reason is what a skipped test said last.
func reason(o *strings.Builder) string {
	if o == nil {
		return "no reason given"
	}
	for _, line := range strings.Split(o.String(), "\n") {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "===") && !strings.HasPrefix(line, "---") {
			return line
		}
	}
	return "no reason given"
}
