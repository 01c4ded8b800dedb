package supervisor

import (
	"context"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"vz.test/vz/supervisor/api/vzv1"
)

const (
	// replayed is how many events a late watcher can still see: a whole up of
	// a dozen Machines, about 200 bytes each.
	replayed = 512
	// watcherQueue bounds what a slow watcher holds back. A watcher that falls
	// further behind is cut off; it is told so and can watch again.
	watcherQueue = 1024
)

// events is the Environment's event stream: numbered, kept for a while, sent
// to every watcher. A slow watcher costs only itself.
type events struct {
	environment string

	mu       sync.Mutex
	closed   bool
	sequence uint64
	recent   []*vzv1.Event // at most replayed, oldest first
	watchers map[chan *vzv1.Event]struct{}
}

func newEvents(environment string) *events {
	return &events{environment: environment, watchers: map[chan *vzv1.Event]struct{}{}}
}

// publish numbers an event, keeps it and sends it to the watchers. It returns
// what was sent, which nobody changes any more.
func (e *events) publish(event *vzv1.Event) *vzv1.Event {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.sequence++
	event.Sequence = e.sequence
	event.EnvironmentId = e.environment
	event.At = timestamppb.New(time.Now())
	if len(e.recent) == replayed {
		e.recent = slices.Delete(e.recent, 0, 1)
	}
	e.recent = append(e.recent, event)
	for watcher := range e.watchers {
		select {
		case watcher <- event:
		default:
			delete(e.watchers, watcher)
			close(watcher)
		}
	}
	return event
}

// close ends every watch. Events are kept and numbered as before.
func (e *events) close() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.closed = true
	for watcher := range e.watchers {
		delete(e.watchers, watcher)
		close(watcher)
	}
}

// watch sends events until ctx ends or a send fails: with replay, those that
// are still kept first, none twice and none left out.
func (e *events) watch(ctx context.Context, replay bool, send func(*vzv1.Event) error) error {
	watcher := make(chan *vzv1.Event, watcherQueue)
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return nil
	}
	var recent []*vzv1.Event
	if replay {
		recent = slices.Clone(e.recent)
	}
	e.watchers[watcher] = struct{}{}
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		delete(e.watchers, watcher)
		e.mu.Unlock()
	}()
	for _, event := range recent {
		if err := send(event); err != nil {
			return err
		}
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case event, ok := <-watcher:
			if !ok {
				e.mu.Lock()
				defer e.mu.Unlock()
				if e.closed {
					return nil
				}
				return errFellBehind
			}
			if err := send(event); err != nil {
				return err
			}
		}
	}
}

// operation reports the steps of one long piece of work: to whoever asked for
// it and to the event stream.
type operation struct {
	name   string
	events *events
	began  time.Time

	mu   sync.Mutex
	send func(*vzv1.Event) error // nil: nobody listens any more
}

// step reports that a step begins and returns what reports its end. The
// message of a step that ended well says what came of it.
func (o *operation) step(step, subject string) func(message string, err error) error {
	began := time.Now()
	o.report(&vzv1.Progress{Step: step, Subject: subject, Status: vzv1.Progress_STATUS_STARTED})
	return func(message string, err error) error {
		p := &vzv1.Progress{Step: step, Subject: subject, Status: vzv1.Progress_STATUS_DONE, Message: message,
			ElapsedMillis: uint64(time.Since(began).Milliseconds())}
		if err != nil {
			p.Status = vzv1.Progress_STATUS_FAILED
			p.Message = err.Error()
		}
		o.report(p)
		return err
	}
}

func (o *operation) report(p *vzv1.Progress) {
	p.Operation = o.name
	event := o.events.publish(&vzv1.Event{Event: &vzv1.Event_Progress{Progress: p}})
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.send != nil && o.send(proto.CloneOf(event)) != nil {
		o.send = nil
	}
}

// end reports the terminal event.
func (o *operation) end(p *vzv1.Progress) {
	p.Terminal = true
	p.Step = o.name
	p.ElapsedMillis = uint64(time.Since(o.began).Milliseconds())
	o.report(p)
}
