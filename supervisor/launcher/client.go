package launcher

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"vz.test/vz/machines"
	"vz.test/vz/machines/namespace"
)

// A Client is a supervisor's end. It satisfies namespace.Launcher. Its methods
// may be called by any number of goroutines; requests for different Machines
// do not wait for each other.
type Client struct {
	conn *net.UnixConn
	end  func()        // kills the launcher
	dead chan struct{} // closed when the launcher is reaped
	done chan struct{} // closed last: see Done

	mu      sync.Mutex
	last    uint64
	pending map[uint64]pending
	live    map[string]*live // by Machine ID
	gone    bool
}

type pending struct {
	spec   *machines.Spec // of a create
	answer chan answer
}

type answer struct {
	reply reply
	files []*os.File
	live  *live
}

// live is a created Machine, until its exit is told.
type live struct {
	incarnation string
	done        chan struct{}
	err         error // valid once done
}

// newClient takes over conn and waits for the launcher's hello.
func newClient(ctx context.Context, conn *net.UnixConn, end func(), dead chan struct{}) (*Client, error) {
	c := &Client{
		conn: conn, end: end, dead: dead,
		done:    make(chan struct{}),
		pending: map[uint64]pending{},
		live:    map[string]*live{},
	}
	stop := context.AfterFunc(ctx, func() { conn.SetReadDeadline(time.Unix(1, 0)) })
	r, files, err := receive(conn)
	stop()
	closeFiles(files)
	switch {
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case err != nil:
		err = fmt.Errorf("launcher ended before it was ready: %w", err)
	case r.Failed != "":
		err = r.err()
	case r.Hello == nil || r.Version != version:
		err = errors.New("launcher speaks another protocol; was vz replaced while it ran?")
	}
	if err != nil {
		conn.Close()
		end()
		<-dead
		return nil, err
	}
	go c.read()
	return c, nil
}

// receive takes one message.
func receive(conn *net.UnixConn) (reply, []*os.File, error) {
	data := make([]byte, maxMessage+1)
	oob := make([]byte, oobSize)
	n, oobn, flags, _, err := conn.ReadMsgUnix(data, oob)
	if err != nil {
		return reply{}, nil, err
	}
	files, err := filesOf(oob[:oobn], flags)
	if err != nil {
		return reply{}, nil, err
	}
	var r reply
	if err := json.Unmarshal(data[:n], &r); err != nil {
		closeFiles(files)
		return reply{}, nil, err
	}
	return r, files, nil
}

// read runs until the socket ends, and then ends the launcher.
func (c *Client) read() {
	for {
		r, files, err := receive(c.conn)
		if err != nil {
			break
		}
		c.take(r, files)
	}
	c.mu.Lock()
	c.gone = true
	c.mu.Unlock()
	c.conn.Close()
	c.end()
	<-c.dead

	c.mu.Lock()
	waiting, running := c.pending, c.live
	c.pending, c.live = nil, nil
	c.mu.Unlock()
	for _, p := range waiting {
		p.answer <- answer{reply: reply{Failed: ErrGone.Error()}}
	}
	for _, l := range running {
		l.err = ErrGone
		close(l.done)
	}
	close(c.done)
}

// take hands one message on. A created Machine is known before its exit can be
// told, because the launcher tells them in this order.
func (c *Client) take(r reply, files []*os.File) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.Exited != nil {
		l := c.live[r.Exited.MachineID]
		if l != nil && l.incarnation == r.Exited.Incarnation {
			delete(c.live, r.Exited.MachineID)
			l.err = errors.New(r.Exited.Why)
			close(l.done)
		}
		return
	}
	p, ok := c.pending[r.ID]
	if !ok {
		closeFiles(files)
		return
	}
	delete(c.pending, r.ID)
	a := answer{reply: r, files: files}
	if r.Created != nil && p.spec != nil {
		a.live = &live{incarnation: p.spec.Incarnation, done: make(chan struct{})}
		c.live[p.spec.MachineID] = a.live
	}
	p.answer <- a
}

// Done is closed when the launcher is gone and every Machine with it.
func (c *Client) Done() <-chan struct{} { return c.done }

// closeTimeout is how long a launcher may take to end its Machines and clear
// their cgroups away before it is killed, which ends the Machines as well.
const closeTimeout = 10 * time.Second

// Close ends the launcher and all its Machines, and returns when they are gone.
func (c *Client) Close() error {
	// Half a close: the launcher sees the end and clears away, then ends, and
	// with it the other half.
	c.mu.Lock()
	gone := c.gone
	c.mu.Unlock()
	if !gone {
		c.conn.CloseWrite()
	}
	late := time.AfterFunc(closeTimeout, c.end)
	defer late.Stop()
	<-c.done
	return nil
}

// call sends r and waits for its answer. When ctx ends first, what the request
// began is cancelled where it can be, and ctx's cause returned: for a create
// once the undoing is over.
func (c *Client) call(ctx context.Context, r request) (answer, error) {
	if err := ctx.Err(); err != nil {
		return answer{}, context.Cause(ctx)
	}
	p := pending{spec: r.Spec, answer: make(chan answer, 1)}
	c.mu.Lock()
	if c.gone {
		c.mu.Unlock()
		return answer{}, ErrGone
	}
	c.last++
	r.Version, r.ID = version, c.last
	c.pending[r.ID] = p
	c.mu.Unlock()
	if err := c.send(r); err != nil {
		c.drop(r.ID)
		return answer{}, err
	}
	select {
	case a := <-p.answer:
		return c.result(a)
	case <-ctx.Done():
	}
	if r.Op != opCreate {
		c.drop(r.ID)
		return answer{}, context.Cause(ctx)
	}
	c.send(request{Version: version, ID: r.ID, Op: opCancel, Of: r.ID})
	a := <-p.answer
	if a.reply.Created != nil {
		closeFiles(a.files)
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		c.Kill(undo, r.Spec.MachineID)
	}
	return answer{}, context.Cause(ctx)
}

func (c *Client) result(a answer) (answer, error) {
	if a.reply.Failed == ErrGone.Error() {
		return answer{}, ErrGone
	}
	if err := a.reply.err(); err != nil {
		closeFiles(a.files)
		return answer{}, err
	}
	return a, nil
}

// drop forgets a request; a late answer is thrown away.
func (c *Client) drop(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.pending, id)
}

func (c *Client) send(r request) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if len(data) > maxMessage {
		return fmt.Errorf("launcher: %s of %d bytes is too large", r.Op, len(data))
	}
	if _, _, err := c.conn.WriteMsgUnix(data, nil, nil); err != nil {
		return fmt.Errorf("%w: %w", ErrGone, err)
	}
	return nil
}

// Create implements namespace.Launcher.
func (c *Client) Create(ctx context.Context, spec machines.Spec) (*namespace.Created, error) {
	a, err := c.call(ctx, request{Op: opCreate, Spec: &spec})
	if err != nil {
		return nil, err
	}
	if a.live == nil || len(a.files) != len(spec.NICs)+1 {
		closeFiles(a.files)
		return nil, fmt.Errorf("launcher: %d descriptors came for %d interfaces", len(a.files), len(spec.NICs))
	}
	l := a.live
	return &namespace.Created{
		NICs:         a.files[:len(spec.NICs)],
		Agent:        a.files[len(spec.NICs)],
		Capabilities: a.reply.Created.Capabilities,
		Notes:        a.reply.Created.Notes,
		Done:         l.done,
		Err: func() error {
			select {
			case <-l.done:
				return l.err
			default:
				return nil
			}
		},
	}, nil
}

// Kill implements namespace.Launcher.
func (c *Client) Kill(ctx context.Context, machineID string) error {
	_, err := c.call(ctx, request{Op: opKill, MachineID: machineID})
	return err
}

// Clean implements namespace.Launcher.
func (c *Client) Clean(ctx context.Context, machineID string) error {
	_, err := c.call(ctx, request{Op: opClean, MachineID: machineID})
	return err
}

// Remove implements namespace.Launcher.
func (c *Client) Remove(ctx context.Context, machineID, dir string) error {
	_, err := c.call(ctx, request{Op: opRemove, MachineID: machineID, Dir: dir})
	return err
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}
