//go:build linux

package agent

import (
	"bytes"
	"context"
	"io"
	"sync"
	"testing"
	"testing/synctest"

	"google.golang.org/protobuf/proto"

	"vz.test/vz/guest"
	"vz.test/vz/guest/wire"
)

// tape is a channel that brings these bytes and then ends.
type tape struct {
	io.Reader
	io.Writer
}

func (tape) Close() error { return nil }

// recorder keeps what a supervisor writes.
type recorder struct {
	io.ReadWriteCloser
	mu      sync.Mutex
	written bytes.Buffer
}

func (r *recorder) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.written.Write(p)
	return r.ReadWriteCloser.Write(p)
}

// FuzzChannel gives the agent any bytes for a supervisor's. Nothing may start
// from them: the agent says that it is shutting down.
func FuzzChannel(f *testing.F) {
	host, inside := pair(f)
	served := make(chan error, 1)
	go func() { served <- Serve(context.Background(), inside, Options{Root: f.TempDir()}) }()
	r := &recorder{ReadWriteCloser: host}
	s, err := guest.Connect(context.Background(), r, hello)
	if err != nil {
		f.Fatal(err)
	}
	s.Configure(context.Background(), &wire.ConfigureRequest{Hostname: "web"})
	s.SetProcesses(context.Background(), nil)
	execute(s, sh("cat"), []byte("x"))
	s.Close()
	<-served
	r.mu.Lock()
	f.Add(bytes.Clone(r.written.Bytes()))
	r.mu.Unlock()
	f.Add([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, bytesIn []byte) {
		root := t.TempDir()
		// In a bubble, because HTTP/2 waits a second after it has sent a GOAWAY.
		synctest.Test(t, func(t *testing.T) {
			a := newAgent(Options{Root: root})
			close(a.stopping)
			a.serve(context.Background(), tape{bytes.NewReader(bytesIn), io.Discard})
		})
	})
}

// FuzzExec gives an execution any messages, without starting what they ask for.
func FuzzExec(f *testing.F) {
	for _, m := range []*wire.ExecRequest{
		begin(&wire.ExecStart{Argv: []string{"true"}, Env: map[string]string{"PATH": ":/bin"}, Cwd: "/", Tty: &wire.WindowSize{Rows: 1}}),
		input([]byte("x")),
		{Input: &wire.ExecRequest_StdinEof{}},
		{Input: &wire.ExecRequest_Resize{Resize: &wire.WindowSize{Rows: 1 << 31}}},
		{Input: &wire.ExecRequest_Signal{Signal: -1}},
		{},
	} {
		p, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(p)
	}
	f.Fuzz(func(t *testing.T, message []byte) {
		m := &wire.ExecRequest{}
		if proto.Unmarshal(message, m) != nil {
			return
		}
		if s := m.GetStart(); s != nil {
			if c, failed := find(s.GetArgv(), s.GetEnv(), s.GetCwd(), s.GetTty() != nil); (c == nil) == (failed == nil) {
				t.Fatal("neither found nor failed, or both")
			}
		}
		done := make(chan struct{})
		close(done)
		for _, open := range []func() (*streams, *wire.ExecFailed){
			func() (*streams, *wire.ExecFailed) { return openStreams(true) },
			func() (*streams, *wire.ExecFailed) { return openTerminal(&wire.WindowSize{}) },
		} {
			s, failed := open()
			if failed != nil {
				t.Skip(failed.GetMessage())
			}
			e := &execution{queue: newQueue(), streams: s, terminal: s.stderr == nil, child: &child{pid: 1 << 30, done: done}}
			e.handle(m)
			e.queue.end()
			for {
				if p, ok := e.queue.take(); !ok {
					break
				} else {
					e.queue.release(len(p))
				}
			}
			s.closeTheirs()
			s.closeOurs()
		}
	})
}
