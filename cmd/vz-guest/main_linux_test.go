package main

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"vz.test/vz/guest"
)

// TestBinary is the program as a driver starts it: static, with the channel at
// descriptor 3.
func TestBinary(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "vz-guest")
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w -X main.version=v1.2.3", "-o", binary, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)

	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	file := os.NewFile(uintptr(fds[0]), "channel")
	host, err := net.FileConn(file)
	require.NoError(t, err)
	file.Close()
	inside := os.NewFile(uintptr(fds[1]), "channel")
	cmd := exec.Command(binary, "agent", "--fd", "3")
	cmd.ExtraFiles = []*os.File{inside}
	cmd.Stderr = os.Stderr
	require.NoError(t, cmd.Start())
	inside.Close()

	s, err := guest.Connect(context.Background(), host, guest.Hello{MachineID: "mch_1", Incarnation: "inc_1"})
	require.NoError(t, err)
	assert.Equal(t, "v1.2.3", s.AgentVersion())
	require.NoError(t, s.Shutdown(context.Background(), time.Second))
	assert.NoError(t, cmd.Wait())
	<-s.Done()
	s.Close()

	var exit *exec.ExitError
	require.ErrorAs(t, exec.Command(binary).Run(), &exit)
	assert.Equal(t, 2, exit.ExitCode(), "usage")
	require.ErrorAs(t, exec.Command(binary, "agent", "--fd", "9").Run(), &exit)
	assert.Equal(t, 1, exit.ExitCode(), "no channel")
}
