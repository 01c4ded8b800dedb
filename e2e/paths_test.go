//go:build linux

package e2e

import (
	"crypto/sha256"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"vz.test/vz/supervisor/api/vzv1"
)

// hostConfiguration is what on this machine decides how names resolve, whom
// TLS trusts and where packets go.
func hostConfiguration(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, path := range []string{"/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl/certs/ca-certificates.crt", "/etc/environment"} {
		text, err := os.ReadFile(path)
		if err != nil && !os.IsNotExist(err) {
			require.NoError(t, err)
		}
		info, err := os.Lstat(path)
		if err == nil {
			all[path] = fmt.Sprintf("%x %v", sha256.Sum256(text), info.ModTime())
		}
	}
	for _, argv := range [][]string{{"ip", "route", "show", "default"}, {"ip", "rule"}} {
		out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
		require.NoError(t, err, string(out))
		all[strings.Join(argv, " ")] = string(out)
	}
	return all
}

// refusal is the most recent one that a Machine met on its way to a
// destination.
func (w *world) refusal(machine, destination string) *vzv1.Refusal {
	w.t.Helper()
	for _, r := range slices.Backward(probe[vzv1.Refusal](w, "refusals")) {
		if r.GetMachine() == machine && r.GetDestination() == destination {
			return r
		}
	}
	require.Failf(w.t, "no such refusal", "%s to %s in\n%s", machine, destination, w.must("vz-runtime-probe", "refusals"))
	return nil
}

func TestPaths(t *testing.T) {
	t.Parallel()
	before := hostConfiguration(t)
	w := newWorld(t, shop(t))
	w.vz("up", "--environment", "blue")
	e := w.status()
	db := address(t, e, "db", "back")
	public := e.GetEndpoints()[0].GetAddress()
	proxy, ca := e.GetProxy().GetUrl(), e.GetProxy().GetCaPath()
	const page = "The shop is open"

	w.sub("a path carries its traffic, by name", func(t *testing.T) {
		for _, name := range []string{"db", "db.back", "db.vz.internal", "db.back.vz.internal", db} {
			assert.Equal(t, "db ready", w.python("web", hear, name, "5432"), name)
		}
		counted := probe[vzv1.Path](w, "paths")
		i := slices.IndexFunc(counted, func(p *vzv1.Path) bool { return p.GetName() == "web-db" })
		require.GreaterOrEqual(t, i, 0)
		assert.GreaterOrEqual(t, counted[i].GetFlows(), uint64(5))
		assert.Greater(t, counted[i].GetBytes(), uint64(0))
	})

	w.sub("a path carries much, and half-close survives", func(t *testing.T) {
		assert.Equal(t, "same 8388608", w.python("web", `
import hashlib, os, socket, threading
s = socket.create_connection(("db", 5432), timeout=60)
f = s.makefile("rb")
f.readline()
data = os.urandom(6 << 20).hex().encode()[:(8 << 20) - 1] + b"\n"
def send():
    s.sendall(data)
    s.shutdown(socket.SHUT_WR)
t = threading.Thread(target=send)
t.start()
back = f.read()
t.join()
print("same" if back == data else "different", len(back))
`))
	})

	w.sub("what no path joins is refused, and counted with the reason", func(t *testing.T) {
		for _, c := range []struct{ from, to, port, says, reason string }{
			{"client", db, "5432", "", "no_path"},
			{"client", address(t, e, "web", "front"), "8080", "Connection refused", "no_path"}, // front says reset
			{"web", db, "5433", "No route to host", "port_not_declared"},                       // back says prohibited
			{"db", address(t, e, "web", "back"), "8080", "No route to host", "no_path"},        // a path has one direction
			{"web", "8.8.8.8", "53", "", "egress_offline"},
			{"client", public, "8443", "", "port_not_declared"},
			{"web", public, "443", "", "no_path"},
		} {
			said := w.python(c.from, hear, c.to, c.port)
			if c.says != "" {
				assert.Equal(t, c.says, said, "%v", c)
			} else {
				assert.Contains(t, []string{"Connection refused", "No route to host", "Network is unreachable"}, said, "%v", c)
			}
			r := w.refusal(c.from, net.JoinHostPort(c.to, c.port))
			assert.Equal(t, c.reason, r.GetReason(), "%v", c)
			assert.NotEmpty(t, r.GetExplanation())
			assert.GreaterOrEqual(t, r.GetCount(), uint64(1))
			assert.Equal(t, "tcp", r.GetProtocol())
		}
		drops := probe[vzv1.DropCount](w, "refusals")
		assert.True(t, slices.ContainsFunc(drops, func(d *vzv1.DropCount) bool {
			return d.GetMachine() == "client" && d.GetReason() == "no_path" && d.GetPackets() > 0
		}), "%v", drops)
	})

	w.sub("another protocol is refused too", func(t *testing.T) {
		assert.Equal(t, "No route to host", w.python("web", `
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(20)
s.connect((sys.argv[1], 5432))
s.send(b"x")
try:
    s.recv(1)
except OSError as e:
    print(e.strerror or e)
`, db))
		assert.Equal(t, "protocol_not_declared", w.refusal("web", db+":5432").GetReason())
	})

	w.sub("a name that no path reaches does not exist, and the log says why", func(t *testing.T) {
		assert.Equal(t, "EAI_NONAME", w.python("client", `
import socket
try:
    socket.getaddrinfo("db", 5432)
except socket.gaierror as e:
    print("EAI_NONAME" if e.errno == socket.EAI_NONAME else e)
`))
		queries := probe[vzv1.DNSQuery](w, "queries")
		i := slices.IndexFunc(queries, func(q *vzv1.DNSQuery) bool {
			return q.GetMachine() == "client" && strings.HasPrefix(q.GetName(), "db.vz.internal") && q.GetRcode() == "NXDOMAIN"
		})
		require.GreaterOrEqual(t, i, 0, "%v", queries)
		assert.Equal(t, "no path lets client reach db", queries[i].GetReason())
	})

	w.sub("DNS as dig sees it", func(t *testing.T) {
		dig := func(machine string, args ...string) string {
			return w.exec(machine, append([]string{"dig", "+tries=1", "+time=10"}, args...)...)
		}
		assert.Equal(t, db, strings.TrimSpace(dig("web", "+short", "db.vz.internal")))
		assert.Equal(t, db, strings.TrimSpace(dig("web", "+short", "dB.vZ.InTeRnAl")), "case does not matter")
		assert.Equal(t, db, strings.TrimSpace(dig("web", "+short", "+tcp", "db.vz.internal")))
		assert.Equal(t, public, strings.TrimSpace(dig("client", "+short", "shop.test")))
		for name, want := range map[string][]string{
			"db.vz.internal": {"status: NOERROR", "ANSWER: 0", "SOA"}, // NODATA: it has IPv4 only
			"example.com":    {"status: NXDOMAIN", "SOA"},             // there is no upstream
		} {
			answer := dig("web", "AAAA", name)
			for _, part := range want {
				assert.Contains(t, answer, part, name)
			}
		}
		denied := dig("client", "db.vz.internal")
		assert.Contains(t, denied, "status: NXDOMAIN")
		assert.Contains(t, denied, "EDE: 15")
		assert.Contains(t, dig("web", "shop.test"), "status: NXDOMAIN", "no path lets web reach the endpoint")
	})

	w.sub("the gateway answers pings, and says where a packet's life ended", func(t *testing.T) {
		for _, network := range e.GetNetworks() {
			for _, name := range network.GetMachines() {
				assert.Contains(t, w.exec(name, "ping", "-c", "2", "-i", "0.2", "-W", "10", network.GetGateway()), " 0% packet loss", "%s on %s", name, network.GetName())
			}
		}
		assert.Equal(t, "Time to live exceeded by 10.20.0.1", w.python("web", `
import socket, struct, sys
s = socket.socket()
s.settimeout(20)
s.setsockopt(socket.IPPROTO_IP, 11, 1)  # IP_RECVERR
s.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, 1)
# The kernel queues the ICMP error before it sets the socket's, so that a quick
# poll sees an event and no error: what counts is the queue.
try:
    s.connect((sys.argv[1], 5432))
    said = "connected"
except OSError as e:
    said = e.strerror
try:
    control = s.recvmsg(512, 512, socket.MSG_ERRQUEUE)[1]
except BlockingIOError:
    control = []
for level, kind, data in control:
    if (level, kind) == (socket.IPPROTO_IP, 11):
        errno, origin, icmp, code = struct.unpack("=IBBB", data[:7])
        by = socket.inet_ntoa(data[20:24])
        said = f"Time to live exceeded by {by}" if (icmp, code) == (11, 0) else f"ICMP {icmp}/{code} by {by}"
print(said)
`, db))
	})

	w.sub("an endpoint is one origin with one chain for every client", func(t *testing.T) {
		assert.Contains(t, w.exec("client", "curl", "-sS", "--fail", "https://shop.test/"), page)
		assert.Equal(t, "2 0", w.exec("client", "curl", "-sS", "-o", "/dev/null", "-w", "%{http_version} %{ssl_verify_result}", "https://shop.test/"))
		assert.Equal(t, "1.1 200", w.exec("client", "curl", "-sS", "-o", "/dev/null", "--http1.1", "-w", "%{http_version} %{http_code}", "https://shop.test/"))
		assert.Regexp(t, `^30[1278] https://shop\.test/where\?x=1$`,
			w.exec("client", "curl", "-sS", "-o", "/dev/null", "-w", "%{http_code} %{redirect_url}", "http://shop.test/where?x=1"))
		assert.Contains(t, w.exec("client", "sh", "-c", "openssl s_client -connect shop.test:443 -servername shop.test -verify_return_error -verify_hostname shop.test </dev/null 2>&1"),
			"Verify return code: 0 (ok)")
		assert.Contains(t, w.python("client", `
import urllib.request
print(urllib.request.urlopen("https://shop.test/", timeout=20).read().decode())`), page)
	})

	w.sub("the host is a client by the proxy", func(t *testing.T) {
		curl := func(args ...string) result {
			return w.run("curl", append([]string{"-sS", "--max-time", "60"}, args...)...)
		}
		for _, door := range [][]string{{"--proxy", proxy}, {"--socks5-hostname", strings.TrimPrefix(e.GetProxy().GetSocksUrl(), "socks5h://")}} {
			r := curl(append(door, "--fail", "--cacert", ca, "https://shop.test/")...)
			assert.Zero(t, r.code, r.String())
			assert.Contains(t, r.out, page)
			assert.Equal(t, "2", curl(append(door, "-o", "/dev/null", "-w", "%{http_version}", "--cacert", ca, "https://shop.test/")...).out)
			assert.Equal(t, 60, curl(append(door, "https://shop.test/")...).code, "nobody else on this machine trusts the Environment's authority")
			for _, other := range []string{"https://other.test/", "https://example.com/", "https://db.vz.internal:5432/", "https://127.0.0.1/", "https://localhost/", "https://" + db + ":5432/"} {
				r := curl(append(door, "--cacert", ca, other)...)
				assert.NotZero(t, r.code, "%s by %v: %s", other, door, r)
				assert.NotContains(t, []int{28, 60}, r.code, "%s by %v is refused, at once and by the proxy: %s", other, door, r)
			}
		}
		pac := curl("--fail", e.GetProxy().GetPacUrl())
		for _, part := range []string{"FindProxyForURL", "shop.test", "PROXY " + strings.TrimPrefix(proxy, "http://"), "DIRECT"} {
			assert.Contains(t, pac.out, part)
		}
	})

	w.sub("the flows that are open are told", func(t *testing.T) {
		cmd := w.command("vz", "exec", "--machine", "web", "-i", "--", "python3", "-c", `
import socket, sys
s = socket.create_connection(("db", 5432))
print(s.makefile().readline(), flush=True)
sys.stdin.read()`)
		in, err := cmd.StdinPipe()
		require.NoError(t, err)
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		_, err = out.Read(make([]byte, 1))
		require.NoError(t, err)
		flows := probe[vzv1.Flow](w, "flows")
		assert.True(t, slices.ContainsFunc(flows, func(f *vzv1.Flow) bool {
			return f.GetPath() == "web-db" && f.GetSourceMachine() == "web" && f.GetDestinationMachine() == "db" && f.GetDestination() == db+":5432"
		}), "%v", flows)
		in.Close()
		require.NoError(t, cmd.Wait())
	})

	w.vz("delete")
	assert.Equal(t, before, hostConfiguration(t), "the host's own configuration is untouched")
}
