//go:build linux

package e2e

import (
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"vz.test/vz/config"
)

var environmentID = regexp.MustCompile(`env_[0-9a-z]{26}`)

// Two ups of one name at one instant: one creates, the other joins it.
func TestTwoUpsAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t, sole())
	results := make([]result, 4)
	var all sync.WaitGroup
	for i := range results {
		all.Go(func() { results[i] = w.run("vz", "up", "--environment", "same") })
	}
	all.Wait()
	ids := map[string]bool{}
	for _, r := range results {
		require.Zero(t, r.code, r.String())
		ids[environmentID.FindString(r.out)] = true
	}
	require.Len(t, ids, 1)
	require.Len(t, w.all(), 1)
	requireReady(t, w.status())
	require.Len(t, w.find(process.supervisor), 1)
	require.Len(t, w.find(process.agent), 1)
}

// The socket is found wherever it is, and its path fits (104 bytes on macOS).
func TestSocketPlaces(t *testing.T) {
	t.Parallel()
	w := newWorld(t, sole())
	long := w.dir + "/" + strings.Repeat("long/", 30)
	require.NoError(t, os.MkdirAll(long, 0o700))
	for _, runtime := range []string{"XDG_RUNTIME_DIR=" + long, "XDG_RUNTIME_DIR=", "XDG_RUNTIME_DIR=relative", "XDG_RUNTIME_DIR=/nowhere"} {
		cmd := w.command("vz", "up", "--environment", "blue")
		cmd.Env = append(cmd.Env, runtime)
		r := w.finish(cmd)
		require.Zero(t, r.code, r.String())
		e := w.status() // by another XDG_RUNTIME_DIR
		requireReady(t, e)
		socket := e.GetSupervisor().GetSocket()
		assert.Less(t, len(socket), 104)
		assert.Regexp(t, `^/tmp/vz-0(-[0-9a-f]+)?/[0-9a-z]+\.sock$`, socket)
		w.exec("one", "true")
		w.observe()
		w.vz("delete")
		require.Empty(t, w.awaitNothing())
		assert.NoFileExists(t, socket)
	}
}

// site is one Machine that serves the file /tmp/www/index.html at
// https://shop.test/, and one that may ask for it.
func site() *config.Definition {
	web := host("edge")
	web.Processes["server"] = config.Process{
		Command: []string{"sh", "-c", "mkdir -p /tmp/www && cd /tmp/www && exec python3 -u -m http.server 8080"},
		Ready:   &config.Ready{TCPPort: 8080},
	}
	definition := project(map[string]config.Machine{"web": web, "client": host("edge")})
	definition.Networks = map[string]config.Network{"edge": {Kind: config.NetworkSimulatedPublic}}
	definition.Paths = []config.Path{{Name: "client-shop", From: "client", To: "endpoint:shop", Network: "edge", Protocol: "tcp",
		Ports: []config.Port{{First: 443, Last: 443}}}}
	definition.Endpoints = map[string]config.Endpoint{"shop": {Host: "shop.test", Network: "edge", Kind: "https",
		Backend: config.Backend{Machine: "web", Port: 8080, Protocol: "http"}}}
	return definition
}

// Two Environments of one definition have the same names, addresses and ports,
// and nothing of each other.
func TestSideBySide(t *testing.T) {
	t.Parallel()
	w := newWorld(t, site())
	fetch := []string{"curl", "-sS", "--fail", "--max-time", "60", "https://shop.test/"}
	type seen struct{ proxy, ca, addresses string }
	look := map[string]seen{}
	for _, name := range []string{"blue", "green"} {
		w.vz("up", "--environment", name)
		w.vz("exec", "--environment", name, "--machine", "web", "--", "sh", "-c", "echo '"+name+"' > /tmp/www/index.html")
		e := w.status("--environment", name)
		requireReady(t, e)
		look[name] = seen{e.GetProxy().GetUrl(), e.GetProxy().GetCaPath(),
			address(t, e, "web", "edge") + " " + address(t, e, "client", "edge") + " " + e.GetEndpoints()[0].GetAddress()}
	}
	require.Equal(t, look["blue"].addresses, look["green"].addresses)
	require.NotEqual(t, look["blue"].proxy, look["green"].proxy)

	serves := func(name string) {
		t.Helper()
		inside := w.vz(append([]string{"exec", "--environment", name, "--machine", "client", "--"}, fetch...)...)
		assert.Equal(t, name+"\n", inside, "inside")
		r := w.run(fetch[0], append([]string{"--proxy", look[name].proxy, "--cacert", look[name].ca}, fetch[1:]...)...)
		assert.Equal(t, result{out: name + "\n"}, r, "from the host")
	}
	serves("blue")
	serves("green")
	r := w.run(fetch[0], append([]string{"--proxy", look["blue"].proxy, "--cacert", look["green"].ca}, fetch[1:]...)...)
	assert.Equal(t, 60, r.code, "each has an authority of its own: %s", r)

	// Nothing connects the two: not by the host's loopback, on which each has a
	// port, and not by the addresses, which in each are its own.
	port := look["green"].proxy[strings.LastIndex(look["green"].proxy, ":")+1:]
	for _, host := range []string{"127.0.0.1", "203.0.113.254", "100.64.0.1"} {
		said := w.vz("exec", "--environment", "blue", "--machine", "client", "--", "python3", "-c", hear, host, port)
		assert.Contains(t, []string{"Connection refused\n", "No route to host\n", "Network is unreachable\n"}, said, host)
	}

	r = w.run("vz", "status")
	assert.Equal(t, 1, r.code, "this worktree is bound to both")
	assert.Contains(t, r.err, "blue (env_")
	assert.Contains(t, r.err, "green (env_")

	w.vz("delete", "--environment", "blue")
	serves("green")
	require.Equal(t, "green", w.status().GetName(), "the sole bound one")
	_, err := w.command("curl", "-sS", look["blue"].proxy).Output()
	require.Error(t, err, "nobody listens on the deleted one's port")
}

// A worktree is bound to what it brought up, and to nothing else.
func TestWorktrees(t *testing.T) {
	t.Parallel()
	w := newWorld(t, sole())
	w.git("add", "-A")
	w.git("commit", "-qm", "first")
	main := w.project
	w.vz("up")
	first := w.status()
	require.Equal(t, "default", first.GetName(), "the first of a project needs no name")

	in := func(dir string) { w.project = dir }
	defer in(main)

	linked := w.dir + "/linked"
	w.git("worktree", "add", "-q", linked)
	in(linked)
	said := w.refused("status")
	assert.Contains(t, said, "binding of this worktree")
	assert.Contains(t, said, "default ("+first.GetEnvironmentId()+")")
	assert.Contains(t, w.refused("up"), "default ("+first.GetEnvironmentId()+")", "it neither adopts nor creates silently")
	require.Len(t, w.all(), 1)
	w.vz("up", "--environment", "default")
	require.Equal(t, first.GetEnvironmentId(), w.status().GetEnvironmentId())

	// Its binding goes where it goes.
	moved := w.dir + "/moved"
	in(main)
	w.git("worktree", "move", linked, moved)
	in(moved)
	require.Equal(t, first.GetEnvironmentId(), w.status().GetEnvironmentId())

	// A selector that is there and wrong fails at its level.
	w.vz("up", "--environment", "second")
	second := w.status("--environment", "second")
	w.vz("delete", "--environment", "second")
	require.Equal(t, first.GetEnvironmentId(), w.status().GetEnvironmentId())
	for selector, why := range map[string]string{
		second.GetEnvironmentId(): "VZ_ENVIRONMENT_ID", // stale
		"default":                 "ID",                // a name where an ID is required
	} {
		for _, verb := range []string{"status", "up", "stop", "delete"} {
			cmd := w.command("vz", verb)
			cmd.Env = append(cmd.Env, "VZ_ENVIRONMENT_ID="+selector)
			r := w.finish(cmd)
			assert.Equal(t, 1, r.code, "%s %s: %s", verb, selector, r)
			assert.Contains(t, r.err, why)
		}
		cmd := w.command("vz", "exec", "--", "true")
		cmd.Env = append(cmd.Env, "VZ_ENVIRONMENT_ID="+selector)
		assert.Equal(t, 125, w.finish(cmd).code)
	}
	cmd := w.command("vz", "status", "--environment", second.GetEnvironmentId())
	cmd.Env = append(cmd.Env, "VZ_ENVIRONMENT_ID="+first.GetEnvironmentId())
	assert.Equal(t, 1, w.finish(cmd).code, "--environment comes first")

	// A clone is a worktree of its own.
	clone := w.dir + "/clone"
	in(main)
	w.git("clone", "-q", main, clone)
	in(clone)
	assert.Contains(t, w.refused("status"), "binding of this worktree")

	// Outside of git nothing is bound, and nothing pretends so.
	plain := w.dir + "/plain"
	require.NoError(t, os.Mkdir(plain, 0o700))
	w.write(plain+"/vz.json", w.read(main+"/vz.json"))
	in(plain)
	assert.Equal(t, 1, w.run("vz", "status").code)
	require.Equal(t, first.GetEnvironmentId(), w.status("--environment", "default").GetEnvironmentId())

	// The nearest definition upward is the project.
	in(main)
	inner := main + "/inner/deep"
	require.NoError(t, os.MkdirAll(inner, 0o700))
	other := sole()
	other.ProjectID = "prj_01kbn3k8v7q2w5x9y4z6c1d0bb"
	text, err := other.JSON()
	require.NoError(t, err)
	w.write(main+"/inner/vz.json", string(text))
	in(inner)
	assert.Contains(t, w.refused("status", "--environment", "default"), "default", "another project has no such name")
	w.vz("up", "--environment", "default")
	require.Len(t, w.all(), 2)
	require.Equal(t, other.ProjectID, w.status("--environment", "default").GetProjectId())
	assert.Contains(t, w.refused("up", "--environment", first.GetEnvironmentId()), "project", "an ID of another project is refused")
}
