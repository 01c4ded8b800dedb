package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var linux = Host{OS: "linux", Arch: "amd64"}

func TestAdmitExamples(t *testing.T) {
	for _, arch := range []string{"amd64", "arm64"} {
		def, data, err := Load("../examples/shop/vz.json")
		require.NoError(t, err)
		require.NoError(t, Admit(def, Host{"linux", arch}))
		_, err = Check("", data, Host{"linux", arch})
		require.NoError(t, err)
	}
	def, err := Parse([]byte(base))
	require.NoError(t, err)
	// The base declares volumes and a secret.
	assert.Equal(t, []string{"/secrets/key secret", "/volumes/cache volume.shared_cache", "/volumes/disk volume.block"}, refusals(Admit(def, linux)))
}

// refusals are pointer and capability.
func refusals(err error) []string {
	all, _ := errors.AsType[Unsupported](err)
	var texts []string
	for _, one := range all {
		texts = append(texts, one.Pointer+" "+one.Capability)
	}
	slices.Sort(texts)
	return texts
}

// admissible is the base without what this version can't do.
func admissible(t testing.TB, edits ...string) *Definition {
	t.Helper()
	def, err := Parse(with(t, append([]string{"/volumes", "", "/secrets", ""}, edits...)...))
	require.NoError(t, err)
	return def
}

func TestAdmit(t *testing.T) {
	require.NoError(t, Admit(admissible(t), linux))
	volume := []string{"/volumes", `{ "disk": { "kind": "block", "size_bytes": 1073741824 }, "cache": { "kind": "shared_cache", "consistency": { "model": "bounded_staleness", "staleness_bound_millis": 1 } } }`}
	fault := func(body string) []string {
		return []string{"/faults", `[ { "name": "f", "path": "web-db", "seed": 1, "ttl_millis": 1000, ` + body + ` } ]`}
	}
	for _, test := range []struct {
		name  string
		edits []string
		want  []string
	}{
		{"hardened", []string{"/machines/db/profile", `"hardened"`, "/machines/db/docker", ""}, nil},
		{"resources", []string{"/machines/db/resources", `{ "cpus": 0.5, "memory_bytes": 268435456 }`}, nil},
		{"a driver", []string{"/machines/db/driver", `"namespace"`}, nil},
		{"the host's architecture by name", []string{"/machines/db/target/arch", `"amd64"`}, nil},
		{"capabilities", []string{"/machines/db/capabilities", `[ "posix_exec", "posix_pty", "processes", "logs" ]`}, nil},
		{"processes", []string{"/machines/db/processes", `{ "p": { "command": [ "x", "" ], "env": { "A": "b" }, "cwd": "/", "restart": "always", "ready": { "tcp_port": 1 } } }`}, nil},
		{"offline in words", []string{"/machines/db/egress", `{ "mode": "offline" }`}, nil},
		{"IPv4 in words", []string{"/networks/back/ipv6", "false", "/networks/back/mtu", "9000", "/networks/back/refuse", `"drop"`}, nil},
		{"default NAT in words", []string{"/networks/edge/nat", `{ "mapping": "endpoint_independent", "filtering": "address_dependent" }`}, nil},
		{"no hairpin", []string{"/networks/edge/nat", `{ "hairpin": false }`}, []string{"/networks/edge/nat/hairpin nat.hairpin"}},
		{"every protocol and group", []string{"/paths", `[
			{ "name": "a", "from": "group:all", "to": "group:all", "network": "back", "protocol": "udp", "ports": [ "1-65535" ] },
			{ "name": "b", "from": "web", "to": "db", "network": "back", "protocol": "icmp" },
			{ "name": "c", "from": "web", "to": "endpoint:shop", "network": "edge", "protocol": "any" } ]`, "/faults", ""}, nil},
		{"an http endpoint", []string{"/endpoints/shop/kind", `"http"`, "/endpoints/shop/port", "80", "/endpoints/shop/backend/protocol", `"http"`}, nil},
		{"the redirect in words", []string{"/endpoints/shop/redirect_http", "true", "/endpoints/shop/port", "443"}, nil},
		{"loss on implicit paths", []string{"/faults", `[ { "name": "a", "path": "dns:web", "seed": 1, "ttl_millis": 1, "loss": { "probability": 0.1 } },
			{ "name": "b", "path": "backend:shop", "direction": "request", "seed": 1, "ttl_millis": 1, "at_millis": 5, "loss": { "probability": 1 } },
			{ "name": "c", "path": "host:shop", "direction": "response", "seed": 1, "ttl_millis": 1, "latency": { "delay_millis": 1 } } ]`}, nil},

		{"Docker unsaid", []string{"/machines/db/docker", ""}, []string{"/machines/db docker.engine"}},
		{"Docker said", []string{"/machines/db/docker", "true"}, []string{"/machines/db/docker docker.engine"}},
		{"a VM", []string{"/machines/db/isolation", `"vm"`}, []string{"/machines/db/isolation isolation.vm", "/machines/db/target/image image.host"}},
		{"QEMU", []string{"/machines/db/isolation", `"vm"`, "/machines/db/driver", `"qemu"`}, []string{"/machines/db/driver driver.qemu", "/machines/db/isolation isolation.vm", "/machines/db/target/image image.host"}},
		{"external", []string{"/machines/db/isolation", `"vm"`, "/machines/db/driver", `"external"`, "/machines/db/target/image", `"external"`}, []string{"/machines/db/driver driver.external", "/machines/db/isolation isolation.vm", "/machines/db/target/image image.external"}},
		{"macOS", []string{"/machines/db", `{ "target": { "os": "macos", "arch": "arm64", "image": "clean" }, "profile": "developer", "isolation": "vm", "networks": [ { "name": "back" } ] }`},
			[]string{"/machines/db/isolation isolation.vm", "/machines/db/target/arch target.arch.foreign", "/machines/db/target/image image.macos", "/machines/db/target/os target.macos"}},
		{"another architecture", []string{"/machines/db/target/arch", `"arm64"`}, []string{"/machines/db/target/arch target.arch.foreign"}},
		{"Debian", []string{"/machines/db/target/image", `"debian:bookworm"`}, []string{"/machines/db/target/image image.debian"}},
		{"OCI", []string{"/machines/db/target/image", `"ghcr.io/a/b:1"`}, []string{"/machines/db/target/image image.oci"}},
		{"a tar", []string{"/machines/db/target/image", `"tar:root.tar"`}, []string{"/machines/db/target/image image.tar"}},
		{"a disk", []string{"/machines/db/resources", `{ "disk_bytes": 1073741824 }`}, []string{"/machines/db/resources/disk_bytes resources.disk"}},
		{"capabilities", []string{"/machines/db/capabilities", `[ "snapshots", "teleport" ]`}, []string{"/machines/db/capabilities/0 machine.snapshots", "/machines/db/capabilities/1 machine.unknown"}},
		{"projections", []string{"/machines/db/projections", `[ { "source_path": ".", "mount_path": "/a", "mode": "read_write" }, { "source_path": ".", "mount_path": "/b", "mode": "snapshot" } ]`}, []string{"/machines/db/projections/0 projection.read_write", "/machines/db/projections/1 projection.snapshot"}},
		{"volumes", append([]string{"/machines/db/volumes", `[ { "name": "disk", "mount_path": "/a" }, { "name": "cache", "mount_path": "/b" } ]`}, volume...),
			[]string{"/machines/db/volumes/0 volume.block", "/machines/db/volumes/1 volume.shared_cache", "/volumes/cache volume.shared_cache", "/volumes/disk volume.block"}},
		{"secrets", []string{"/secrets", `{ "key": { "from_env": "A" } }`, "/machines/db/secrets", `[ { "name": "key", "env": "A" } ]`}, []string{"/machines/db/secrets/0 secret", "/secrets/key secret"}},
		{"allowed", []string{"/machines/db/egress", `{ "mode": "allowed", "host_proxy": true, "allow": [ { "cidr": "10.0.0.0/8" } ] }`}, []string{"/machines/db/egress/allow/0 egress.allowlist", "/machines/db/egress/host_proxy egress.host_proxy", "/machines/db/egress/mode egress.allowed"}},
		{"allowlist", []string{"/machines/db/egress", `{ "mode": "allowlist" }`}, []string{"/machines/db/egress/mode egress.allowlist"}},
		{"imports and exports", []string{"/machines/db/host_imports", `[ { "name": "a", "protocol": "tcp", "host_port": 1 } ]`, "/machines/db/host_exports", `[ { "name": "a", "protocol": "udp", "port": 1 } ]`}, []string{"/machines/db/host_exports/0 host_export.udp", "/machines/db/host_imports/0 host_import.tcp"}},
		{"IPv6", []string{"/networks/back/ipv6", "true", "/networks/back/cidr6", `"fd00::/64"`, "/machines/db/networks/0/address6", `"fd00::5"`}, []string{"/machines/db/networks/0/address6 network.ipv6", "/networks/back/cidr6 network.ipv6", "/networks/back/ipv6 network.ipv6"}},
		{"NAT", []string{"/networks/edge/nat", `{ "mapping": "address_dependent", "filtering": "endpoint_independent", "hairpin": true }`}, []string{"/networks/edge/nat/filtering nat.filtering.endpoint_independent", "/networks/edge/nat/hairpin nat.hairpin", "/networks/edge/nat/mapping nat.mapping.address_dependent"}},
		{"a path from the host", []string{"/paths/-", `{ "name": "h", "from": "host", "to": "endpoint:shop", "network": "edge", "protocol": "tcp", "ports": [ 443 ] }`}, []string{"/paths/1/from path.from_host"}},
		{"zones", []string{"/zones", `{ "a.example": { "records": [ { "name": "@", "type": "TXT", "values": [ "x" ] } ] } }`}, []string{"/zones/a.example dns.zones"}},
		{"endpoint kinds", []string{"/endpoints/a", `{ "host": "a.test", "network": "edge", "kind": "tcp", "port": 1, "backend": { "machine": "web", "port": 1 } }`, "/endpoints/b", `{ "host": "*.b.test", "network": "edge", "kind": "tls_passthrough", "backend": { "machine": "web", "port": 1 } }`},
			[]string{"/endpoints/a/kind endpoint.tcp", "/endpoints/a/port endpoint.port", "/endpoints/b/host endpoint.wildcard", "/endpoints/b/kind endpoint.tls_passthrough"}},
		{"endpoint extras", []string{"/endpoints/shop", `{ "host": "shop.test", "network": "edge", "kind": "https", "port": 8443, "redirect_http": false, "http3": true, "proxy_protocol": true,
			"backend": { "machine": "web", "port": 1, "protocol": "https", "tls": {} }, "routes": [ { "path_prefix": "/", "backends": [ { "machine": "web", "port": 1 } ] } ] }`},
			[]string{"/endpoints/shop/backend/protocol backend.https", "/endpoints/shop/backend/tls backend.https", "/endpoints/shop/http3 endpoint.http3", "/endpoints/shop/port endpoint.port",
				"/endpoints/shop/proxy_protocol endpoint.proxy_protocol", "/endpoints/shop/redirect_http endpoint.no_redirect", "/endpoints/shop/routes/0 endpoint.routes"}},
		{"h2c", []string{"/endpoints/shop/backend/protocol", `"h2c"`}, []string{"/endpoints/shop/backend/protocol backend.h2c"}},
		{"jitter", fault(`"jitter": { "distribution": "normal", "spread_millis": 1 }`), []string{"/faults/0/jitter fault.jitter"}},
		{"a partition", fault(`"partition": {}`), []string{"/faults/0/partition fault.partition"}},
		{"every nth", fault(`"loss": { "every_nth": 3 }`), []string{"/faults/0/loss/every_nth fault.loss.every_nth"}},
		{"a preset", fault(`"preset": "3g@1"`), []string{"/faults/0/preset fault.preset"}},
		{"a fault's frills", fault(`"latency": { "delay_millis": 1 }, "repeat": { "every_millis": 5000, "times": 2 }, "ramp": { "up_millis": 1 }, "match": { "ports": [ 1 ] }, "mode": "byte", "spare": [ "syn" ]`),
			[]string{"/faults/0/match fault.match", "/faults/0/mode fault.mode", "/faults/0/ramp fault.ramp", "/faults/0/repeat fault.repeat", "/faults/0/spare fault.spare"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			assert.Equal(t, test.want, refusals(Admit(admissible(t, test.edits...), linux)))
		})
	}
}

// No other host runs namespace Machines, and nothing is put in their place.
func TestAdmitElsewhere(t *testing.T) {
	for _, os := range []string{"darwin", "windows", "plan9", ""} {
		assert.Subset(t, refusals(Admit(admissible(t), Host{os, "arm64"})), []string{
			"/machines/db/isolation isolation.namespace", "/machines/db/target/image image.host", "/machines/web/target/os target.linux"}, os)
	}
}

func TestUnsupportedError(t *testing.T) {
	data := with(t, "/volumes", "", "/secrets", "", "/machines/db/isolation", `"vm"`)
	_, err := Check("some/vz.json", data, linux)
	require.Error(t, err)
	assert.ErrorIs(t, err, errors.ErrUnsupported)
	one, ok := errors.AsType[*UnsupportedError](err)
	require.True(t, ok)
	line, column := Locate(data, "/machines/db/isolation")
	require.NotZero(t, line)
	assert.Equal(t, "isolation.vm", one.Capability)
	assert.Equal(t, "linux/amd64", one.Host)
	assert.Equal(t, "linux", one.Target)
	assert.Equal(t, "developer", one.Profile)
	assert.Equal(t, Planned, one.Status)
	assert.Equal(t, "isolation.vm@linux/linux", one.Entry.ID)
	assert.Equal(t, "config.Admit", one.Entry.RejectedBy)
	assert.Equal(t, fmt.Sprintf("some/vz.json:%d:%d: /machines/db/isolation: isolation.vm is not supported for a linux developer Machine on linux/amd64 "+
		`(PLANNED, matrix entry isolation.vm@linux/linux): Virtual machines by QEMU are not built yet; "isolation": "namespace" works on Linux hosts.`, line, column), one.Error())

	// What is not valid is not looked up at all, in Go either.
	_, err = Check("", []byte("{"), linux)
	assert.ErrorContains(t, err, "vz.json:1:2: /: not JSON")
	assert.NotErrorIs(t, err, errors.ErrUnsupported)
	err = Admit(&Definition{}, linux)
	_, invalid := errors.AsType[Errors](err)
	assert.True(t, invalid)
	assert.NotContains(t, err.Error(), "vz.json")
}

// leaves are the schema's places: patterns as rules has them, each with the
// part of the schema that stands there.
func leaves(part *jsonschema.Schema, at string, found map[string]*jsonschema.Schema) {
	for part.Ref != nil {
		part = part.Ref
	}
	inner := false
	for key, property := range part.Properties {
		inner = true
		leaves(property, at+"/"+key, found)
	}
	if additional, ok := part.AdditionalProperties.(*jsonschema.Schema); ok {
		inner = true
		leaves(additional, at+"/*", found)
	}
	if part.Items2020 != nil {
		inner = true
		leaves(part.Items2020, at+"/*", found)
	}
	if !inner {
		found[at] = part
	}
}

// refusedWhole says whether no host, target, profile or isolation has any
// capability that the rule at pattern can ask for.
func refusedWhole(pattern string) bool {
	return strings.HasPrefix(pattern, "/zones/*") || strings.HasPrefix(pattern, "/volumes/*") || strings.HasPrefix(pattern, "/secrets/*") ||
		strings.HasPrefix(pattern, "/endpoints/*/routes/*") || strings.HasPrefix(pattern, "/endpoints/*/backend/tls") ||
		slices.ContainsFunc([]string{"projections", "volumes", "secrets", "host_imports", "host_exports", "egress/allow"}, func(field string) bool {
			return strings.HasPrefix(pattern, "/machines/*/"+field+"/*")
		}) ||
		strings.HasPrefix(pattern, "/faults/*/") && !slices.Contains([]string{"/faults/*/name", "/faults/*/path", "/faults/*/direction", "/faults/*/seed",
			"/faults/*/at_millis", "/faults/*/ttl_millis", "/faults/*/latency/delay_millis", "/faults/*/loss/probability"}, pattern)
}

// TestNothingIsIgnored goes through the schema: each leaf has a rule of its own
// or lies in something that is refused whole by a matrix entry; rules are for
// nothing but the schema's places.
func TestNothingIsIgnored(t *testing.T) {
	found := map[string]*jsonschema.Schema{}
	leaves(compiled().root, "", found)
	require.Greater(t, len(found), 150)
	for pattern := range found {
		if _, ruled := rules[pattern]; ruled {
			continue
		}
		above := pattern
		for {
			above = above[:max(0, strings.LastIndex(above, "/"))]
			if above == "" {
				assert.Fail(t, "no rule", pattern)
				break
			}
			if _, ruled := rules[above]; ruled && above != "/machines/*" {
				assert.True(t, refusedWhole(pattern), "%s lies in %s, which is not refused whole", pattern, above)
				break
			}
		}
	}
	for pattern := range rules {
		assert.True(t, slices.ContainsFunc(sortedKeys(found), func(leaf string) bool {
			return leaf == pattern || strings.HasPrefix(leaf, pattern+"/")
		}), "no such place in the schema: %s", pattern)
	}
}

// TestEachLeafOfTheWhole shows the same on a document that uses every property:
// each of its leaves is refused with a matrix entry or is of a place that this
// list admits.
func TestEachLeafOfTheWhole(t *testing.T) {
	def, _, err := Load("testdata/whole.json")
	require.NoError(t, err)
	text, err := os.ReadFile("testdata/whole.json")
	require.NoError(t, err)
	places := map[string]bool{}
	for pointer := range flatten(t, text) {
		places[pattern(pointer)] = true
	}
	schema := map[string]*jsonschema.Schema{}
	leaves(compiled().root, "", schema)
	for place := range schema {
		assert.True(t, places[place], "testdata/whole.json lacks %s", place)
	}

	err = Admit(def, linux)
	refused, ok := errors.AsType[Unsupported](err)
	require.True(t, ok)
	for _, one := range refused {
		entry, found := Matrix().Entry(one.Entry.ID)
		assert.True(t, found, one.Error())
		assert.Contains(t, []Status{Planned, NA}, entry.Status)
		assert.NotEmpty(t, entry.Note, entry.ID)
		assert.NotEqual(t, "definition.field", one.Capability, one.Pointer)
	}
	admitted := map[string]bool{}
	for pointer := range flatten(t, text) {
		if !slices.ContainsFunc(refused, func(one *UnsupportedError) bool {
			return one.Pointer == pointer || strings.HasPrefix(pointer, one.Pointer+"/")
		}) {
			admitted[pattern(pointer)] = true
		}
	}
	assert.Equal(t, strings.Fields(`
		/$schema /default_machine
		/endpoints/*/backend/machine /endpoints/*/backend/port /endpoints/*/host /endpoints/*/kind /endpoints/*/network /endpoints/*/port /endpoints/*/redirect_http
		/faults/*/at_millis /faults/*/direction /faults/*/latency/delay_millis /faults/*/loss/probability /faults/*/name /faults/*/path /faults/*/seed /faults/*/ttl_millis
		/groups/*/*
		/machines/*/capabilities/* /machines/*/driver /machines/*/isolation
		/machines/*/networks/*/address /machines/*/networks/*/name
		/machines/*/processes/*/command/* /machines/*/processes/*/cwd /machines/*/processes/*/env/* /machines/*/processes/*/ready/tcp_port /machines/*/processes/*/restart
		/machines/*/profile /machines/*/resources/cpus /machines/*/resources/memory_bytes
		/machines/*/target/arch /machines/*/target/image /machines/*/target/os
		/name
		/networks/*/cidr /networks/*/ipv6 /networks/*/kind /networks/*/mtu /networks/*/nat/filtering /networks/*/nat/mapping /networks/*/refuse
		/paths/*/from /paths/*/name /paths/*/network /paths/*/ports/* /paths/*/protocol /paths/*/to
		/project_id /schema_version`), sortedKeys(admitted))
}

// pattern is a pointer's place in the schema.
func pattern(pointer string) string {
	at := ""
	for _, token := range split(pointer) {
		if named[at] || token != "" && strings.Trim(token, "0123456789") == "" {
			token = "*"
		}
		at += "/" + token
	}
	return at
}

// Every value that an enumeration allows asks for a capability that the matrix
// knows.
func TestEnumerationsAreInTheMatrix(t *testing.T) {
	known := map[string]bool{}
	for _, entry := range Matrix().Entries {
		known[entry.Capability] = true
	}
	found := map[string]*jsonschema.Schema{}
	leaves(compiled().root, "", found)
	a := &admission{def: &Definition{}, host: linux}
	count := 0
	for pattern, part := range found {
		judge := rules[pattern]
		if judge == nil || part.Enum == nil {
			continue
		}
		for _, value := range part.Enum.Values {
			for _, capability := range judge(a, []string{"machines", "x"}, value) {
				assert.True(t, known[capability], "%s: %v asks for %s", pattern, value, capability)
				count++
			}
		}
	}
	assert.Greater(t, count, 30)
	for pattern, prefix := range map[string]string{
		"/machines/*/projections/*/mode": "projection.", "/volumes/*/kind": "volume.", "/machines/*/host_imports/*/protocol": "host_import.", "/machines/*/host_exports/*/protocol": "host_export.",
	} {
		for _, value := range found[pattern].Enum.Values {
			assert.True(t, known[prefix+value.(string)], "%s: %v", pattern, value)
		}
	}
	for _, kind := range []string{"host", "external", "macos", "debian", "tar", "oci"} {
		assert.True(t, known["image."+kind], kind)
	}
	for _, kind := range []string{"declared", "dns", "egress", "import", "export", "backend", "host"} {
		assert.True(t, known["fault.path."+kind], kind)
	}
}

// A field that nobody made a rule for is refused, not ignored.
func TestUnknownFieldIsRefused(t *testing.T) {
	a := &admission{def: &Definition{}, host: linux}
	var document any
	require.NoError(t, json.Unmarshal([]byte(`{ "name": "x", "novelty": { "deep": [ 1 ] } }`), &document))
	a.walk(nil, "", document)
	assert.Equal(t, []string{"/novelty/deep/0 definition.field"}, refusals(a.refused))
}
