package vz

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const module = "vz.test/vz"

type pkg struct {
	ImportPath   string
	Name         string
	Doc          string
	Imports      []string
	TestImports  []string
	XTestImports []string
	Deps         []string
}

// packages are all of the module's, as the go command sees them for one system.
func packages(t *testing.T, goos string) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-json", "./...")
	cmd.Env = append(cmd.Environ(), "GOOS="+goos, "CGO_ENABLED=0")
	out, err := cmd.Output()
	require.NoError(t, err)
	var all []pkg
	decoder := json.NewDecoder(strings.NewReader(string(out)))
	for {
		var p pkg
		err := decoder.Decode(&p)
		if errors.Is(err, io.EOF) {
			return all
		}
		require.NoError(t, err)
		all = append(all, p)
	}
}

// room is the first part of a package's path in the module, or "" for a
// package of another module.
func room(path string) string {
	path, ok := strings.CutPrefix(path, module+"/")
	if !ok {
		return ""
	}
	first, _, _ := strings.Cut(path, "/")
	return first
}

// level orders the rooms: a package imports only rooms of a higher level, or
// its own. Rooms of the level "work" never import one another.
var level = map[string]int{
	"cmd": 0, "supervisor": 1,
	"netstack": 2, "dns": 2, "ingress": 2, "faults": 2, "machines": 2, "guest": 2, "volumes": 2,
	"config": 3, "schemas": 4,
	"internal": 5, // leaves that know no room
}

// exceptions to the rule above: leaf rooms only.
var exceptions = map[[2]string][]string{
	{"machines", "netstack"}: {module + "/netstack/link", module + "/netstack/link/linktest"},
	{"faults", "netstack"}:   {module + "/netstack/packet"},
}

func TestRoomsImportOnlyDownwards(t *testing.T) {
	for _, p := range packages(t, "linux") {
		from := room(p.ImportPath)
		if from == "" {
			continue
		}
		for _, i := range p.Imports {
			to := room(i)
			if to == "" || to == from || slices.Contains(exceptions[[2]string{from, to}], i) {
				continue
			}
			require.Containsf(t, level, to, "%s imports %s, a room without a level", p.ImportPath, i)
			require.Lessf(t, level[from], level[to], "%s must not import %s", p.ImportPath, i)
		}
	}
}

// fences say where alone a module may be imported.
var fences = map[string][]string{
	"gvisor.dev/gvisor":                      {"netstack"},
	"github.com/containers/gvisor-tap-vsock": {"netstack/link", "bench"},
	"github.com/Code-Hex/vz":                 {"machines/applevf"},
	"github.com/vishvananda/netlink":         {"machines/namespace", "guest/agent", "netstack/link/linktest"},
	"github.com/google/nftables":             {"machines/namespace"},
	"github.com/miekg/dns":                   {"dns"},
	"github.com/alecthomas/kong":             {"cmd"},
}

func TestFences(t *testing.T) {
	for _, p := range packages(t, "linux") {
		here := strings.TrimPrefix(p.ImportPath, module+"/")
		for _, i := range p.Imports {
			for fence, rooms := range fences {
				if i != fence && !strings.HasPrefix(i, fence+"/") {
					continue
				}
				inside := slices.ContainsFunc(rooms, func(r string) bool { return here == r || strings.HasPrefix(here, r+"/") })
				require.Truef(t, inside, "%s imports %s, which is only for %v", here, i, rooms)
			}
			if strings.HasPrefix(i, "github.com/stretchr/testify") {
				require.Truef(t, strings.HasSuffix(here, "test"), "%s imports %s outside of tests", here, i)
			}
		}
	}
}

// The command line starts fast and stays small: it knows the registry and the
// API, never the network stack.
func TestCommandLineLinksNoNetworkStack(t *testing.T) {
	for _, p := range packages(t, "linux") {
		if p.ImportPath != module+"/cmd/vz" && p.ImportPath != module+"/supervisor/client" {
			continue
		}
		for _, d := range p.Deps {
			require.Falsef(t, strings.HasPrefix(d, "gvisor.dev/"), "%s links %s", p.ImportPath, d)
		}
	}
}

func TestEveryPackageSaysWhatItIsFor(t *testing.T) {
	for _, p := range packages(t, "linux") {
		generated := strings.HasSuffix(p.ImportPath, "connect") || strings.HasSuffix(p.ImportPath, "/vzv1") || strings.HasSuffix(p.ImportPath, "/wire")
		if generated || p.Name == "main" && p.Doc != "" {
			continue
		}
		require.NotEmptyf(t, p.Doc, "%s has no package comment", p.ImportPath)
	}
}

func TestGeneratedCodeIsCurrent(t *testing.T) {
	dir := t.TempDir()
	out, err := exec.Command("go", "run", "./schemas/generate", dir).CombinedOutput()
	require.NoError(t, err, string(out))
	for _, generated := range []string{"guest/wire/guest.pb.go", "guest/wire/wireconnect", "supervisor/api/vzv1"} {
		out, err := exec.Command("diff", "-r", generated, dir+"/"+generated).CombinedOutput()
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		require.NoErrorf(t, err, "run make generate: %s", lines[0])
	}
}
