//go:build linux

package link_test

import (
	"os/exec"
	"testing"
	"time"
)

func TestZZIperf(t *testing.T) {
	p := newPair(t, 1500, whatItHas)
	cmd := exec.Command("iperf3", "-s", "-1")
	if err := p.spaces[1].Start(cmd); err != nil {
		t.Fatal(err)
	}
	time.Sleep(300 * time.Millisecond)
	out, err := p.spaces[0].Run("iperf3", "-c", "10.9.0.2", "-t", "4", "-C", "cubic")
	t.Log(out, err)
	_ = cmd.Wait()
	for _, port := range p.ports {
		t.Log(port.Drops())
	}
}
