package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"

	"io"

	"golang.org/x/sys/unix"

	"vz.test/vz/guest/agent"
)

func run(fd int) error {
	channel, err := open(fd)
	if err != nil {
		return fmt.Errorf("channel at descriptor %d: %w", fd, err)
	}
	init := os.Getpid() == 1
	if init {
		// What a guest sends to PID 1 is no reason to end the Machine. Caught,
		// not ignored: children would inherit that.
		signal.Notify(make(chan os.Signal, 1), unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGPIPE)
	}
	return agent.Serve(context.Background(), channel, agent.Options{
		Init:    init,
		Version: version,
		Log:     slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
}

// open takes a socket or a character device off the hands of every child.
func open(fd int) (io.ReadWriteCloser, error) {
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), "channel")
	conn, err := net.FileConn(file)
	if err != nil {
		return file, nil // not a socket
	}
	return conn, file.Close()
}
