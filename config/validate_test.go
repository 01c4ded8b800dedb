package config

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const vm = `"target": { "os": "linux", "arch": "host", "image": "host" }, "profile": "developer", "docker": false, "isolation": "namespace"`

// TestValidate makes one mistake a row in the base and expects exactly what is
// said of it; a row that expects nothing shows where a rule ends.
func TestValidate(t *testing.T) {
	for _, test := range []struct {
		name  string
		edits []string
		want  []string
	}{
		{"the base", nil, nil},

		// Identity and names.
		{"an upper-case project ID", []string{"/project_id", `"prj_01KBCDEFGHJKMNPQRSTVWXYZ01"`}, []string{`/project_id: "prj_01KBCDEFGHJKMNPQRSTVWXYZ01" does not fit; want prj_ and 26 lower-case characters of a ULID, made once and kept`}},
		{"a ULID beyond 128 bits", []string{"/project_id", `"prj_81kbcdefghjkmnpqrstvwxyz01"`}, []string{`/project_id: "prj_81kbcdefghjkmnpqrstvwxyz01" does not fit; want prj_ and 26 lower-case characters of a ULID, made once and kept`}},
		{"letters that Crockford left out", []string{"/project_id", `"prj_01kbcdefghijklmnopqrstuv01"`}, []string{`/project_id: "prj_01kbcdefghijklmnopqrstuv01" does not fit; want prj_ and 26 lower-case characters of a ULID, made once and kept`}},
		{"a default Machine", []string{"/default_machine", `"db"`}, nil},
		{"an unknown default Machine", []string{"/default_machine", `"bd"`}, []string{`/default_machine: no Machine "bd" is declared; did you mean "db"?`}},
		{"a reserved Machine", []string{"/machines/gateway", `{ ` + vm + ` }`}, []string{`/machines/gateway: "gateway" is a reserved name; want another name; edge, gateway, host, localhost mean something else in paths and DNS`}},
		{"a reserved network", []string{"/networks/test", `{ "kind": "private", "cidr": "10.30.0.0/24" }`}, []string{`/networks/test: "test" is a reserved name; want another name; internal, local, localhost, test are names of DNS already`}},
		{"no Machines", []string{"/machines", `{}`, "/groups", "", "/paths", "", "/endpoints", "", "/faults", ""}, []string{`/machines: 0 entries; want at least 1`}},
		{"a group's unknown member", []string{"/groups/all/-", `"wbe"`}, []string{`/groups/all/2: no Machine "wbe" is declared; did you mean "web"?`}},
		{"a group's member twice", []string{"/groups/all/-", `"web"`}, []string{`/groups/all: entries 0 and 2 are the same; want each once`}},

		// Networks.
		{"no range", []string{"/networks/front/cidr", ""}, []string{`/networks/front: "cidr" is missing; want a range such as 10.10.0.0/24; only an edge takes one by itself`}},
		{"overlap", []string{"/networks/wide", `{ "kind": "private", "cidr": "10.0.0.0/8" }`}, []string{
			`/networks/wide/cidr: 10.0.0.0/8 overlaps 10.20.0.0/24 of network "back"; want ranges that don't overlap inside one definition`,
			`/networks/wide/cidr: 10.0.0.0/8 overlaps 10.10.0.0/24 of network "front"; want ranges that don't overlap inside one definition`}},
		{"overlap with an edge", []string{"/networks/edge/cidr", `"10.20.0.128/25"`}, []string{`/networks/edge/cidr: 10.20.0.128/25 overlaps 10.20.0.0/24 of network "back"; want ranges that don't overlap inside one definition`}},
		{"an edge's own range", []string{"/networks/edge/cidr", `"100.64.7.0/24"`}, nil},
		{"TEST-NET-2", []string{"/networks/front/cidr", `"198.51.100.128/25"`}, []string{`/networks/front/cidr: 198.51.100.128/25 is reserved for the edges' public addresses (198.51.100.0/24); want another range, such as 10.20.0.0/24`}},
		{"around TEST-NET-3", []string{"/networks/edge/cidr", `"203.0.0.0/16"`}, []string{`/networks/edge/cidr: 203.0.0.0/16 is reserved for the edges' public addresses (203.0.113.0/24); want another range, such as 10.20.0.0/24`}},
		{"documentation, IPv6", []string{"/networks/front/cidr6", `"2001:db8:1::/48"`}, []string{`/networks/front/cidr6: 2001:db8:1::/48 is reserved for the edges' public addresses (2001:db8::/32); want another range, such as 10.20.0.0/24`}},
		{"loopback", []string{"/networks/front/cidr", `"127.0.1.0/24"`}, []string{`/networks/front/cidr: 127.0.1.0/24 lies in 127.0.0.0/8, which no network can have; want a private range, such as 10.20.0.0/24`}},
		{"multicast", []string{"/networks/front/cidr6", `"ff02::/64"`}, []string{`/networks/front/cidr6: ff02::/64 lies in ff00::/8, which no network can have; want a private range, such as 10.20.0.0/24`}},
		{"no address", []string{"/networks/front/cidr", `"10.10.0.999/24"`}, []string{`/networks/front/cidr: "10.10.0.999/24" is not a range; want an IPv4 range, such as 10.20.0.0/24`}},
		{"too small", []string{"/networks/front/cidr", `"10.10.0.0/31"`}, []string{`/networks/front/cidr: a length of 31 is out of range; want /8 to /30`}},
		{"NAT without edge", []string{"/networks/front/nat", `{}`}, []string{`/networks/front/nat: a private network has no NAT; want nat on simulated_public networks only`}},
		{"IPv6 at MTU 576", []string{"/networks/front/mtu", `576`, "/networks/front/ipv6", "true"}, []string{`/networks/front/mtu: IPv6 needs an MTU of 1280 (RFC 8200); want at least 1280, or "ipv6": false`}},
		{"IPv6 refused and given", []string{"/networks/front/ipv6", "false", "/networks/front/cidr6", `"fd00::/64"`}, []string{`/networks/front/cidr6: the network says "ipv6": false; want one of the two`}},
		{"MTU", []string{"/networks/front/mtu", `65521`}, []string{`/networks/front/mtu: 65521 is too large; want at most 65520`}},
		{"room", []string{"/networks/front/cidr", `"10.10.0.0/30"`, "/machines/db/networks/-", `{ "name": "front" }`}, []string{`/networks/front/cidr: 10.10.0.0/30 has room for 1 and 2 Machines are attached; want a larger range`}},

		// Attachments.
		{"an address", []string{"/machines/web/networks/1/address", `"10.20.0.2"`, "/machines/db/networks/0/address", `"10.20.0.254"`}, nil},
		{"an address elsewhere", []string{"/machines/web/networks/1/address", `"10.10.0.2"`}, []string{`/machines/web/networks/1/address: 10.10.0.2 is not in 10.20.0.0/24, the range of network "back"; want an address in it`}},
		{"the gateway's", []string{"/machines/web/networks/1/address", `"10.20.0.1"`}, []string{`/machines/web/networks/1/address: 10.20.0.1 is the gateway's address of 10.20.0.0/24; want another address in it`}},
		{"the network's", []string{"/machines/web/networks/1/address", `"10.20.0.0"`}, []string{`/machines/web/networks/1/address: 10.20.0.0 is the network's own address of 10.20.0.0/24; want another address in it`}},
		{"broadcast", []string{"/machines/web/networks/1/address", `"10.20.0.255"`}, []string{`/machines/web/networks/1/address: 10.20.0.255 is the broadcast address of 10.20.0.0/24; want another address in it`}},
		{"the same twice", []string{"/machines/web/networks/1/address", `"10.20.0.9"`, "/machines/db/networks/0/address", `"10.20.0.9"`}, []string{`/machines/web/networks/1/address: 10.20.0.9 is Machine "db"'s address; want an address of its own`}},
		{"on an edge without a range", []string{"/machines/web/networks/2/address", `"100.64.0.9"`}, []string{`/machines/web/networks/2/address: network "edge" declares no range to take it from; want a range on the network, or no address here`}},
		{"a leading zero", []string{"/machines/web/networks/1/address", `"10.20.0.09"`}, []string{`/machines/web/networks/1/address: "10.20.0.09" is not an address`}},
		{"attached twice", []string{"/machines/db/networks/-", `{ "name": "back" }`}, []string{`/machines/db/networks/1/name: attached to "back" twice; want one attachment to a network`}},

		// Profile, target, driver.
		{"hardened with everything", []string{"/machines/db/profile", `"hardened"`, "/machines/db/docker", "true",
			"/machines/db/projections/-", `{ "source_path": ".", "mount_path": "/w", "mode": "snapshot" }`, "/machines/db/volumes/-", `{ "name": "disk", "mount_path": "/d" }`}, []string{
			`/machines/db/docker: a hardened Machine has no docker; want it left out, or profile developer`,
			`/machines/db/projections: a hardened Machine has no projections; want it left out, or profile developer`,
			`/machines/db/volumes: a hardened Machine has no volumes; want it left out, or profile developer`}},
		{"no profile", []string{"/machines/db/profile", ""}, []string{`/machines/db: "profile" is missing; want developer or hardened`}},
		{"macOS in namespaces with Docker", []string{"/machines/db/target", `{ "os": "macos", "arch": "arm64", "image": "host" }`, "/machines/db/docker", "true"}, []string{
			`/machines/db/docker: a macOS Machine has no Docker; want it left out`,
			`/machines/db/isolation: namespaces are Linux's; want vm`,
			`/machines/db/target/image: "host" is no macOS template; want clean or xcode`}},
		{"a macOS template on Linux", []string{"/machines/db/target/image", `"xcode"`}, []string{`/machines/db/target/image: "xcode" is a macOS template; want an image of Linux, such as host`}},
		{"driver and isolation", []string{"/machines/db/driver", `"qemu"`}, []string{`/machines/db/driver: driver "qemu" with isolation "namespace"; want driver namespace for isolation namespace, another for vm`}},
		{"external", []string{"/machines/db/driver", `"external"`, "/machines/db/isolation", `"vm"`, "/machines/db/target/image", `"external"`}, nil},
		{"external's image alone", []string{"/machines/db/target/image", `"external"`}, []string{`/machines/db/target/image: image external without its driver; want "driver": "external"`}},
		{"external's driver alone", []string{"/machines/db/driver", `"external"`, "/machines/db/isolation", `"vm"`}, []string{`/machines/db/target/image: image "host" with driver "external"; want image external with driver external, and only there`}},
		{"images", []string{"/machines/db/target/image", `"debian:bookworm+postgresql+git"`, "/machines/web/target/image", `"docker.io/library/alpine:3.20@sha256:00"`}, nil},

		// Storage.
		{"one source read-only in two Machines", []string{"/machines/web/projections/-", `{ "source_path": "src", "mount_path": "/w", "mode": "read_only" }`, "/machines/db/projections/-", `{ "source_path": "./src/", "mount_path": "/w", "mode": "snapshot" }`}, nil},
		{"writable in one of two", []string{"/machines/web/projections/-", `{ "source_path": "src", "mount_path": "/w", "mode": "read_write" }`, "/machines/db/projections/-", `{ "source_path": "./src/", "mount_path": "/w", "mode": "read_only" }`}, []string{
			`/machines/web/projections/0/source_path: Machines "db" and "web" share it, and "web" may write; want a source that is projected writable in no other Machine`}},
		{"writable above", []string{"/machines/web/projections/-", `{ "source_path": "src/a", "mount_path": "/w", "mode": "snapshot" }`, "/machines/db/projections/-", `{ "source_path": ".", "mount_path": "/w", "mode": "read_write" }`}, []string{
			`/machines/web/projections/0/source_path: Machines "db" and "web" share it, and "db" may write; want a source that is projected writable in no other Machine`}},
		{"a neighbour of the same beginning", []string{"/machines/web/projections/-", `{ "source_path": "src", "mount_path": "/w", "mode": "read_write" }`, "/machines/db/projections/-", `{ "source_path": "src2", "mount_path": "/w", "mode": "read_write" }`}, nil},
		{"the same Machine twice", []string{"/machines/web/projections", `[ { "source_path": "src", "mount_path": "/w", "mode": "read_write" }, { "source_path": "src", "mount_path": "/r", "mode": "read_only" } ]`}, nil},
		{"leaving the worktree", []string{"/machines/web/projections", `[ { "source_path": "../x", "mount_path": "/a", "mode": "read_only" }, { "source_path": "a/../..", "mount_path": "/b", "mode": "read_only" }, { "source_path": "/etc", "mount_path": "/c", "mode": "read_only" } ]`}, []string{
			`/machines/web/projections/0/source_path: "../x" leaves the worktree; want a path relative to the worktree's root and inside it`,
			`/machines/web/projections/1/source_path: "a/../.." leaves the worktree; want a path relative to the worktree's root and inside it`,
			`/machines/web/projections/2/source_path: "/etc" leaves the worktree; want a path relative to the worktree's root and inside it`}},
		{"mount places", []string{"/machines/web/projections", `[ { "source_path": "a", "mount_path": "/", "mode": "read_only" }, { "source_path": "a", "mount_path": "/proc/x", "mode": "read_only" }, { "source_path": "a", "mount_path": "/a/../b", "mode": "read_only" }, { "source_path": "a", "mount_path": "relative", "mode": "read_only" } ]`}, []string{
			`/machines/web/projections/0/mount_path: "/" belongs to the Machine itself; want another place, such as /srv/data`,
			`/machines/web/projections/1/mount_path: "/proc/x" belongs to the Machine itself; want another place, such as /srv/data`,
			`/machines/web/projections/2/mount_path: "/a/../b" is not in its shortest form; did you mean "/b"?`,
			`/machines/web/projections/3/mount_path: "relative" does not fit; want an absolute path inside the Machine, such as /srv/data`}},
		{"one place twice", []string{"/machines/web/projections/-", `{ "source_path": "a", "mount_path": "/w", "mode": "read_only" }`, "/machines/web/volumes/-", `{ "name": "disk", "mount_path": "/w" }`}, []string{`/machines/web/volumes/0/mount_path: "/w" is taken by a projection; want a place of its own`}},
		{"a block volume read-only in two", []string{"/machines/web/volumes/-", `{ "name": "disk", "mount_path": "/d", "read_only": true }`, "/machines/db/volumes/-", `{ "name": "disk", "mount_path": "/d", "read_only": true }`}, nil},
		{"a block volume writable in two", []string{"/machines/web/volumes/-", `{ "name": "disk", "mount_path": "/d" }`, "/machines/db/volumes/-", `{ "name": "disk", "mount_path": "/d" }`}, []string{
			`/machines/web/volumes/0/name: block volume "disk" is mounted in Machine "db" as well, and not read-only in both; want one Machine that may write, or "read_only": true in all, or a shared_cache`}},
		{"a shared cache in two", []string{"/machines/web/volumes/-", `{ "name": "cache", "mount_path": "/d" }`, "/machines/db/volumes/-", `{ "name": "cache", "mount_path": "/d" }`}, nil},
		{"a volume twice", []string{"/machines/web/volumes", `[ { "name": "cache", "mount_path": "/d" }, { "name": "cache", "mount_path": "/e" } ]`}, []string{`/machines/web/volumes/1/name: volume "cache" is mounted twice; want one mount in a Machine`}},
		{"an unknown volume", []string{"/machines/web/volumes/-", `{ "name": "cahce", "mount_path": "/d" }`}, []string{`/machines/web/volumes/0/name: no volume "cahce" is declared; did you mean "cache"?`}},
		{"volumes that lack and have too much", []string{"/volumes", `{ "a": { "kind": "block" }, "b": { "kind": "shared_cache", "size_bytes": 1048576 }, "c": { "kind": "block", "size_bytes": 1048576, "consistency": { "model": "bounded_staleness", "staleness_bound_millis": 1 } } }`}, []string{
			`/volumes/a: "size_bytes" is missing; want a block volume's size`,
			`/volumes/b: "consistency" is missing; want { "model": "bounded_staleness", "staleness_bound_millis": … }`,
			`/volumes/b/size_bytes: a shared_cache has no size; want it with block only`,
			`/volumes/c/consistency: a block volume is on one Machine and always consistent; want it with shared_cache only`}},
		{"a secret from nowhere and from two places", []string{"/secrets", `{ "a": {}, "b": { "from_env": "A", "from_file": "b" } }`}, []string{
			`/secrets/a: none of from_env, from_file is said; want exactly one of them`,
			`/secrets/b: from_env and from_file are said together; want exactly one of from_env or from_file`}},
		{"an unknown secret", []string{"/machines/web/secrets/-", `{ "name": "kye", "env": "A" }`}, []string{`/machines/web/secrets/0/name: no secret "kye" is declared; did you mean "key"?`}},
		{"a variable twice", []string{"/machines/web/secrets", `[ { "name": "key", "env": "A" }, { "name": "key", "env": "A" } ]`}, []string{`/machines/web/secrets/1/env: variable A is given twice; want one secret for a variable`}},
		{"secret files", []string{"/machines/web/secrets", `[ { "name": "key", "file": "/run/secrets/key" }, { "name": "key", "file": "/etc" } ]`}, nil},

		// The border.
		{"egress", []string{"/machines/web/egress", `{ "mode": "offline", "host_proxy": true, "allow": [ { "cidr": "192.0.2.1/24" }, { "cidr": "x::y::z/1" }, { "domain": "a.example", "protocol": "icmp", "ports": [ 1 ] }, {} ] }`}, []string{
			`/machines/web/egress/allow: offline allows nothing; want mode allowlist`,
			`/machines/web/egress/allow/0/cidr: "192.0.2.1/24" has bits beyond its length; did you mean "192.0.2.0/24"?`,
			`/machines/web/egress/allow/1/cidr: "x::y::z/1" does not fit; want an address range, such as 192.0.2.0/24`,
			`/machines/web/egress/allow/2/ports: protocol icmp has no ports here; want ports with tcp or udp only`,
			`/machines/web/egress/allow/3: none of domain, cidr is said; want exactly one of them`,
			`/machines/web/egress/host_proxy: offline goes through no proxy; want mode allowed or allowlist`}},
		{"exports of one port", []string{"/machines/web/host_exports/-", `{ "name": "a", "protocol": "tcp", "port": 1, "host_port": 8080 }`, "/machines/db/host_exports", `[ { "name": "a", "protocol": "tcp", "port": 2, "host_port": 8080 }, { "name": "b", "protocol": "udp", "port": 2, "host_port": 8080 }, { "name": "a", "protocol": "tcp", "port": 2, "host_port": 0 }, { "name": "c", "protocol": "tcp", "port": 2 } ]`}, []string{
			`/machines/db/host_exports/2/name: another export is called "a"; want names that are unique`,
			`/machines/web/host_exports/0/host_port: tcp port 8080 of the host is Machine "db"'s already; want another port, or 0 for any`}},

		// Paths.
		{"a path's name twice", []string{"/paths/-", `{ "name": "web-db", "from": "db", "to": "web", "network": "back", "protocol": "icmp" }`}, []string{`/paths/1/name: another path is called "web-db"; want names that are unique`}},
		{"an implicit path's name", []string{"/paths/0/name", `"dns:web"`, "/faults", ""}, []string{`/paths/0/name: "dns:web" does not fit; want a name of 1 to 63 lower-case letters, digits, hyphens and underscores that begins and ends with a letter or digit`}},
		{"from a stranger", []string{"/paths/0/from", `"webb"`}, []string{`/paths/0/from: no Machine "webb" is declared; did you mean "web"?`}},
		{"to an unknown group", []string{"/paths/0/to", `"group:al"`}, []string{`/paths/0/to: no group "al" is declared; did you mean "all"?`}},
		{"a group of which one is elsewhere", []string{"/paths/0/network", `"front"`, "/paths/0/to", `"group:all"`}, []string{`/paths/0/to: Machine "db" is not attached to network "front"; want an attachment in /machines/db/networks`}},
		{"within a group", []string{"/paths/0/from", `"group:all"`, "/paths/0/to", `"group:all"`}, nil},
		{"to itself", []string{"/paths/0/to", `"web"`}, []string{`/paths/0/to: the path leads from "web" to itself; want another Machine`}},
		{"ports missing", []string{"/paths/0/ports", ""}, []string{`/paths/0: "ports" is missing; want a list of ports; [ "1-65535" ] for every one`}},
		{"ports with icmp", []string{"/paths/0/protocol", `"icmp"`}, []string{`/paths/0/ports: protocol icmp has no ports here; want ports with tcp or udp only`}},
		{"ports twice", []string{"/paths/0/ports", `[ "5000-6000", 5432, 65535 ]`}, []string{`/paths/0/ports/1: 5432 is in entry 0 already; want each port once`}},
		{"a range too far", []string{"/paths/0/ports", `[ "1-65536" ]`}, []string{`/paths/0/ports/0: "1-65536" does not fit; want a port number, or a range such as "8000-8100"`}},
		{"the host on a private network", []string{"/paths/0/from", `"host"`}, []string{`/paths/0/from: the host is on no private network; want a path to an endpoint on a simulated_public network`}},
		{"to an endpoint", []string{"/paths/-", `{ "name": "p", "from": "web", "to": "endpoint:shop", "network": "edge", "protocol": "tcp", "ports": [ "80-443" ] }`}, nil},
		{"to an endpoint from elsewhere", []string{"/paths/-", `{ "name": "p", "from": "db", "to": "endpoint:shop", "network": "edge", "protocol": "tcp", "ports": [ 443 ] }`}, []string{`/paths/1/from: Machine "db" is not attached to network "edge"; want an attachment in /machines/db/networks`}},
		{"to an endpoint by another network", []string{"/paths/-", `{ "name": "p", "from": "web", "to": "endpoint:shop", "network": "front", "protocol": "tcp", "ports": [ 443 ] }`}, []string{`/paths/1/network: endpoint "shop" is on network "edge"; did you mean "edge"?`}},
		{"to an endpoint's silent port", []string{"/paths/-", `{ "name": "p", "from": "web", "to": "endpoint:shop", "network": "edge", "protocol": "tcp", "ports": [ 8443 ] }`}, []string{`/paths/1/ports: endpoint "shop" answers on none of these ports; want 443 or 80`}},
		{"udp to an https endpoint", []string{"/paths/-", `{ "name": "p", "from": "web", "to": "endpoint:shop", "network": "edge", "protocol": "udp", "ports": [ 443 ] }`}, []string{`/paths/1/protocol: endpoint "shop" (https) answers tcp; did you mean "tcp"?`}},
		{"udp to HTTP/3", []string{"/endpoints/shop/http3", "true", "/paths/-", `{ "name": "p", "from": "web", "to": "endpoint:shop", "network": "edge", "protocol": "udp", "ports": [ 443 ] }`}, nil},
		{"to an unknown endpoint", []string{"/paths/-", `{ "name": "p", "from": "web", "to": "endpoint:shp", "network": "edge", "protocol": "any" }`}, []string{`/paths/1/to: no endpoint "shp" is declared; did you mean "shop"?`}},

		// Endpoints.
		{"an endpoint on a private network", []string{"/endpoints/shop/network", `"back"`}, []string{`/endpoints/shop/network: network "back" is private; want a simulated_public network`}},
		{"a host elsewhere", []string{"/endpoints/shop/host", `"shop.example.com"`}, []string{`/endpoints/shop/host: "shop.example.com" does not fit; want a lower-case name below .test, such as shop.test`}},
		{"the zone itself", []string{"/endpoints/shop/host", `"test"`}, []string{`/endpoints/shop/host: "test" does not fit; want a lower-case name below .test, such as shop.test`}},
		{"an upper-case host", []string{"/endpoints/shop/host", `"Shop.test"`}, []string{`/endpoints/shop/host: "Shop.test" does not fit; want a lower-case name below .test, such as shop.test`}},
		{"one host twice", []string{"/endpoints/store", `{ "host": "shop.test", "network": "edge", "kind": "http", "backend": { "machine": "web", "port": 1 } }`}, []string{`/endpoints/store/host: endpoint "shop" answers shop.test port 80 already; want another host or port`}},
		{"one host, another port", []string{"/endpoints/store", `{ "host": "shop.test", "network": "edge", "kind": "tcp", "port": 5432, "backend": { "machine": "web", "port": 1 } }`}, nil},
		{"a backend elsewhere", []string{"/endpoints/shop/backend/machine", `"db"`}, []string{`/endpoints/shop/backend/machine: Machine "db" is not attached to the endpoint's network "edge"; want an attachment in /machines/db/networks`}},
		{"what does not go together", []string{"/endpoints/raw", `{ "host": "raw.test", "network": "edge", "kind": "tcp", "redirect_http": true, "http3": true, "routes": [ { "path_prefix": "/", "backends": [ { "machine": "web", "port": 1 } ] } ], "backend": { "machine": "web", "port": 1, "protocol": "h2c", "tls": { "ca_file": "../ca.pem" } } }`}, []string{
			`/endpoints/raw: "port" is missing; want a port; only https, http and tls_passthrough have one of their own`,
			`/endpoints/raw/backend/protocol: kind tcp forwards bytes as they are; want it left out`,
			`/endpoints/raw/backend/tls: the backend speaks no TLS; want "protocol": "https"`,
			`/endpoints/raw/backend/tls/ca_file: "../ca.pem" leaves the worktree; want a path inside it`,
			`/endpoints/raw/http3: kind tcp has no HTTP/3; want it with https only`,
			`/endpoints/raw/redirect_http: kind tcp redirects nothing; want it with https only`,
			`/endpoints/raw/routes: kind tcp has no routes; want them with https and http only`}},

		// Zones.
		{"zones", []string{"/zones", `{ "vz.internal": { "records": [ { "name": "@", "type": "A", "values": [ "10.0.0.1" ] } ] }, "x.example": { "records": [
			{ "name": "@", "type": "CNAME", "values": [ "a.example" ] }, { "name": "a", "type": "A", "values": [ "::1" ] }, { "name": "a", "type": "A", "values": [ "10.0.0.1" ] },
			{ "name": "b", "type": "AAAA", "values": [ "10.0.0.1" ] }, { "name": "b", "type": "CNAME", "values": [ "a.example", "B" ] }, { "name": "c", "type": "SRV", "values": [ "0 5 70000 a", "0 5 80 a" ] } ] } }`}, []string{
			`/zones/vz.internal: "vz.internal" is vz's own zone; want another name`,
			`/zones/x.example/records/0/type: a zone itself can't be a CNAME; want A or AAAA`,
			`/zones/x.example/records/1/values/0: "::1" is no A; want an IPv4 address`,
			`/zones/x.example/records/2: a has its A record already; want one with all values`,
			`/zones/x.example/records/3/values/0: "10.0.0.1" is no AAAA; want an IPv6 address`,
			`/zones/x.example/records/4: "b" is a CNAME and something else; want a CNAME alone (RFC 1034)`,
			`/zones/x.example/records/4/values: a CNAME has one value; want one`,
			`/zones/x.example/records/4/values/1: "B" is no CNAME; want a lower-case DNS name without a final dot`,
			`/zones/x.example/records/5/values/0: "0 5 70000 a" is no SRV; want PRIORITY WEIGHT PORT TARGET`}},

		{"a record of an endpoint's name", []string{"/zones", `{ "test": { "records": [ { "name": "shop", "type": "TXT", "values": [ "x" ] } ] }, "shop.test": { "records": [ { "name": "@", "type": "TXT", "values": [ "x" ] }, { "name": "a", "type": "TXT", "values": [ "x" ] } ] } }`}, []string{
			`/zones/shop.test/records/0/name: shop.test is the host of endpoint "shop"; want another name`,
			`/zones/test/records/0/name: shop.test is the host of endpoint "shop"; want another name`}},

		// Faults.
		{"a fault on nothing", []string{"/faults/0/path", `"web-bd"`}, []string{`/faults/0/path: no path "web-bd" is declared or implied; did you mean "web-db"?`}},
		{"faults on implicit paths", []string{"/faults/-", `{ "name": "a", "path": "dns:db", "seed": 0, "ttl_millis": 1, "loss": { "probability": 1 } }`, "/faults/-", `{ "name": "b", "path": "backend:shop", "seed": 0, "ttl_millis": 1, "loss": { "probability": 1 } }`, "/faults/-", `{ "name": "c", "path": "host:shop", "seed": 0, "ttl_millis": 1, "loss": { "probability": 1 } }`}, nil},
		{"an egress path of an offline Machine", []string{"/faults/0/path", `"egress:web"`}, []string{`/faults/0/path: no path "egress:web" is declared or implied; want web-db, backend:shop, dns:db, dns:web or host:shop`}},
		{"no kind", []string{"/faults/0/latency", ""}, []string{`/faults/0: none of latency, jitter, loss, duplication, corruption, reordering, bandwidth, reset, partition, path_mtu, dns, tls, http, preset is said; want exactly one of them`}},
		{"two kinds", []string{"/faults/0/loss", `{ "probability": 0.5 }`}, []string{`/faults/0: latency and loss are said together; want exactly one of latency, jitter, loss, duplication, corruption, reordering, bandwidth, reset, partition, path_mtu, dns, tls, …`}},
		{"no seed", []string{"/faults/0/seed", ""}, []string{`/faults/0: "seed" is missing; want an integer`}},
		{"no TTL", []string{"/faults/0/ttl_millis", ""}, []string{`/faults/0: "ttl_millis" is missing; want an integer`}},
		{"an hour", []string{"/faults/0/ttl_millis", "3600000"}, nil},
		{"more than an hour", []string{"/faults/0/ttl_millis", "3600001"}, []string{`/faults/0/ttl_millis: 3600001 is too large; want at most 3600000`}},
		{"a direction", []string{"/faults/0/direction", `"reqest"`}, []string{`/faults/0/direction: "reqest" is not known here; did you mean "request"?`}},
		{"a name twice", []string{"/faults/-", `{ "name": "slow", "path": "web-db", "seed": 0, "ttl_millis": 1, "loss": { "probability": 1 } }`}, []string{`/faults/1/name: another fault is called "slow"; want names that are unique`}},
		{"a certain loss and none", []string{"/faults/0/latency", "", "/faults/0/loss", `{ "probability": 0 }`}, []string{`/faults/0/loss/probability: 0 is too small; want a probability above 0 and at most 1`}},
		{"repeat and ramp", []string{"/faults/0/repeat", `{ "every_millis": 1000, "times": 2 }`, "/faults/0/ramp", `{ "up_millis": 20000, "down_millis": 20000 }`}, []string{
			`/faults/0/ramp: the ramps are longer than the fault; want at most ttl_millis, 30000`,
			`/faults/0/repeat/every_millis: it begins again before it ends; want at least ttl_millis, 30000`}},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := Parse(with(t, test.edits...))
			assert.ElementsMatch(t, test.want, mistakes(err))
		})
	}
}

func TestValidateFaultKinds(t *testing.T) {
	for kind, want := range map[string]string{
		`"jitter": { "distribution": "normal" }`:                                                `/jitter: "spread_millis" is missing; want the width of the distribution`,
		`"jitter": { "distribution": "table" }`:                                                 `/jitter: "table_millis" is missing; want the delays to draw from`,
		`"jitter": { "distribution": "uniform", "mean_millis": 5, "spread_millis": 10 }`:        `/jitter/spread_millis: some delays would be negative; want at most mean_millis, 5`,
		`"bandwidth": { "bits_per_second": 1000, "queue_bytes": 1500, "queue_millis": 1 }`:      `/bandwidth: the queue is bounded twice; want queue_bytes or queue_millis`,
		`"partition": { "shape": "halves" }`:                                                    `/partition: "group" is missing; want the group that halves divides`,
		`"partition": { "shape": "bridge", "group": "all" }`:                                    `/partition: "machine" is missing; want the Machine that bridge means`,
		`"partition": { "shape": "isolate_one", "group": "all", "machine": "wbe" }`:             `/partition/machine: no Machine "wbe" is declared; did you mean "web"?`,
		`"dns": { "failure": "delay" }`:                                                         `/dns: "delay_millis" is missing; want how long answers are held back`,
		`"dns": { "failure": "wrong_address" }`:                                                 `/dns: "address" is missing; want the address to answer with`,
		`"dns": { "failure": "wrong_address", "address": "1.2.3" }`:                             `/dns/address: "1.2.3" is not an address`,
		`"http": { "path_prefix": "/x" }`:                                                       `/http: nothing is to happen; want delay_millis, status or abort`,
		`"loss": {}`:                                                                            `/loss: none of probability, gilbert_elliott, every_nth, indexes, bytes is said; want exactly one of them`,
		`"preset": "4g@1"`:                                                                      `/preset: "4g@1" is not known here; did you mean "3g@1"?`,
		`"reset": {}`:                                                                           "",
		`"tls": { "failure": "expired" }, "match": { "ports": [ 443 ], "names": [ "*.test" ] }`: "",
	} {
		_, err := Parse(with(t, "/faults", `[ { "name": "f", "path": "web-db", "seed": 0, "ttl_millis": 1000, `+kind+` } ]`))
		if want == "" {
			assert.NoError(t, err, kind)
			continue
		}
		assert.Equal(t, []string{"/faults/0" + want}, mistakes(err), kind)
	}
}

func TestEdgeHasRoomForItsAddresses(t *testing.T) {
	def := Definition{SchemaVersion: 1, ProjectID: "prj_01kbcdefghjkmnpqrstvwxyz01", Name: "many",
		Networks: map[string]Network{"a": {Kind: NetworkSimulatedPublic}, "b": {Kind: NetworkSimulatedPublic}}, Machines: map[string]Machine{}}
	for i := range 128 {
		def.Machines[fmt.Sprintf("m%03d", i)] = Machine{Target: Target{OS: "linux", Arch: "host", Image: "host"}, Profile: "hardened", Isolation: "namespace",
			Networks: []Attachment{{Name: "a"}, {Name: "b"}}}
	}
	assert.Equal(t, []string{"/machines/m120/networks/0: more than 240 attachments to simulated_public networks; want fewer; each takes a public address"}, mistakes(def.Validate()))
}

func TestNames(t *testing.T) {
	def, err := Parse([]byte(base))
	require.NoError(t, err)
	assert.Equal(t, []string{"db", "web"}, def.MachineNames())
	assert.Equal(t, []string{"back", "edge", "front"}, def.NetworkNames())
	assert.Equal(t, []string{"shop"}, def.EndpointNames())
	assert.Equal(t, []string{"db", "web"}, def.Members("group:all"))
	assert.Equal(t, []string{"web", "db"}, def.Groups["all"], "the definition is left alone")
	assert.Equal(t, []string{"db"}, def.Members("db"))
	for _, none := range []string{"host", "endpoint:shop", "group:none", "none", ""} {
		assert.Empty(t, def.Members(none), none)
	}
	assert.Equal(t, []string{"web-db", "backend:shop", "dns:db", "dns:web", "host:shop"}, def.PathNames())
	assert.Equal(t, "latency", def.Faults[0].Kind())
	assert.Empty(t, Fault{}.Kind())
	assert.Equal(t, "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", Digest(nil))
}

func TestPrefixes(t *testing.T) {
	def := &Definition{Networks: map[string]Network{
		"a": {Kind: NetworkSimulatedPublic}, "b": {Kind: NetworkSimulatedPublic, CIDR: "100.64.0.0/23"}, "c": {Kind: NetworkSimulatedPublic},
		"d": {Kind: NetworkPrivate, CIDR: "10.0.0.0/8"},
	}}
	texts := map[string]string{}
	for name, prefix := range def.Prefixes() {
		texts[name] = prefix.String()
	}
	assert.Equal(t, map[string]string{"a": "100.64.2.0/24", "b": "100.64.0.0/23", "c": "100.64.3.0/24", "d": "10.0.0.0/8"}, texts)
}

func TestEndpointPorts(t *testing.T) {
	no := false
	for _, test := range []struct {
		endpoint Endpoint
		want     []uint16
	}{
		{Endpoint{Kind: "https"}, []uint16{443, 80}},
		{Endpoint{Kind: "https", RedirectHTTP: &no}, []uint16{443}},
		{Endpoint{Kind: "https", Port: 8443}, []uint16{8443, 80}},
		{Endpoint{Kind: "https", Port: 80}, []uint16{80}},
		{Endpoint{Kind: "http"}, []uint16{80}},
		{Endpoint{Kind: "tls_passthrough"}, []uint16{443}},
		{Endpoint{Kind: "tcp", Port: 5432}, []uint16{5432}},
		{Endpoint{Kind: "tcp"}, nil},
	} {
		assert.Equal(t, test.want, test.endpoint.Ports(), test.endpoint)
	}
}
