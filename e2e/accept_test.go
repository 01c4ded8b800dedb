//go:build linux && accept

package e2e

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestAcceptTimes reports what things take on this machine: the median of
// repeated, serial runs. A median says nothing about a busy machine, so it is
// printed, not judged; what must hold anywhere is asserted by the other tests.
func TestAcceptTimes(t *testing.T) {
	w := newWorld(t, shop(t))
	var rows []string
	row := func(what, unit string, values []float64) {
		slices.Sort(values)
		rows = append(rows, fmt.Sprintf("%-48s %9.2f %-3s  (%.2f to %.2f, %d runs)", what,
			values[len(values)/2], unit, values[0], values[len(values)-1], len(values)))
	}
	times := func(n int, run func()) (all []float64) {
		for range n {
			began := time.Now()
			run()
			all = append(all, float64(time.Since(began).Microseconds())/1000)
		}
		return all
	}

	var up, again, stop, booted, gone []float64
	for range 5 {
		up = append(up, times(1, func() { w.vz("up", "--environment", "blue") })...)
		again = append(again, times(1, func() { w.vz("up") })...)
		stop = append(stop, times(1, func() { w.vz("stop") })...)
		booted = append(booted, times(1, func() { w.vz("up") })...)
		w.observe()
		gone = append(gone, times(1, func() { w.vz("delete") })...)
		require.Empty(t, w.awaitNothing())
	}
	row("up of examples/shop, from nothing", "ms", up)
	row("up again, nothing changed", "ms", again)
	row("up of what was stopped", "ms", booted)
	row("stop", "ms", stop)
	row("delete", "ms", gone)

	w.vz("up", "--environment", "blue")
	e := w.status()
	db := address(t, e, "db", "back")
	row("status", "ms", times(20, func() { w.status() }))
	row("exec of true, there and back", "ms", times(20, func() { w.exec("web", "true") }))

	// Inside, so that nothing but the network is measured.
	const inside = `
import json, socket, sys, time
host, port, n = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
all = []
for _ in range(n):
    began = time.monotonic()
    try:
        socket.create_connection((host, port), timeout=30).close()
    except OSError:
        pass
    all.append((time.monotonic() - began) * 1000)
    time.sleep(0.01)  # the server's backlog holds five
print(json.dumps(all))`
	connects := func(machine, host, port string, n int) (all []float64) {
		require.NoError(t, json.Unmarshal([]byte(w.python(machine, inside, host, port, itoa(n))), &all))
		return all
	}
	row("connect, web to db", "ms", connects("web", db, "5432", 50))
	row("connect refused, client to db (no path)", "ms", connects("client", db, "5432", 50))

	w.must("vz-runtime-probe", "fault", "start", "slow", "--path", "web-db", "--latency", "100ms", "--seed", "42", "--ttl", "1m")
	late := connects("web", db, "5432", 20)
	for i := range late {
		late[i] -= 200
	}
	row("100 ms latency: connect beyond 2 x 100 ms", "ms", late)
	w.must("vz-runtime-probe", "fault", "heal", "slow")

	row("https from client, one request", "ms", times(10, func() {
		w.exec("client", "curl", "-sS", "--fail", "-o", "/dev/null", "https://shop.test/")
	}))
	row("https from the host by the proxy, one request", "ms", times(10, func() {
		w.must("curl", "-sS", "--fail", "-o", "/dev/null", "--proxy", e.GetProxy().GetUrl(), "--cacert", e.GetProxy().GetCaPath(), "https://shop.test/")
	}))
	const size = 256 << 20
	var rates []float64
	for _, ms := range times(5, func() { w.exec("web", "head", "-c", itoa(size), "/dev/zero") }) {
		rates = append(rates, size/1048.576/ms)
	}
	row("exec, 256 MiB through stdout", "MiB/s", rates)
	t.Logf("medians:\n%s", strings.Join(rows, "\n"))
}
