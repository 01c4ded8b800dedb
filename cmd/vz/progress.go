package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"
	"google.golang.org/protobuf/encoding/protojson"

	"vz.test/vz/supervisor/api/vzv1"
)

// A progress shows the steps of long work as they come. Results never pass
// through it; they go to stdout.
type progress interface {
	event(*vzv1.Event)
	close()
}

// newProgress is the one that mode names; auto is tty on a terminal, else plain.
func newProgress(mode string, w *os.File) progress {
	terminal := term.IsTerminal(int(w.Fd())) && os.Getenv("TERM") != "dumb"
	switch mode {
	case "json":
		return jsonProgress{w}
	case "quiet":
		return quietProgress{}
	case "plain":
		return &plainProgress{w: w}
	case "tty":
		return newTTYProgress(w, os.Getenv("NO_COLOR") == "")
	}
	if terminal {
		return newTTYProgress(w, os.Getenv("NO_COLOR") == "")
	}
	return &plainProgress{w: w}
}

// jsonProgress writes each event as a line of JSON.
type jsonProgress struct{ w io.Writer }

func (p jsonProgress) event(e *vzv1.Event) {
	line, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(e)
	if err == nil {
		fmt.Fprintf(p.w, "%s\n", line)
	}
}
func (jsonProgress) close() {}

type quietProgress struct{}

func (quietProgress) event(*vzv1.Event) {}
func (quietProgress) close()            {}

// plainProgress writes one line for each step that ended.
type plainProgress struct{ w io.Writer }

func (p *plainProgress) event(e *vzv1.Event) {
	if s := e.GetProgress(); s != nil && !s.GetTerminal() && s.GetStatus() != vzv1.Progress_STATUS_STARTED {
		fmt.Fprintf(p.w, "%s %s\n", mark(s.GetStatus()), describe(s))
	}
}
func (*plainProgress) close() {}

// ttyProgress keeps the steps under way on the last line and lets the ended
// ones scroll by above it.
type ttyProgress struct {
	w     *os.File
	color bool

	mu      sync.Mutex
	running []*vzv1.Progress
	drawn   bool // the last line is ours; else it is a command's output
	began   time.Time
	stop    chan struct{}
	stopped sync.WaitGroup
}

func newTTYProgress(w *os.File, color bool) *ttyProgress {
	p := &ttyProgress{w: w, color: color, began: time.Now(), stop: make(chan struct{})}
	p.stopped.Go(p.tick)
	return p
}

// tick redraws the last line, so that a long step is seen to be alive.
func (p *ttyProgress) tick() {
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for {
		select {
		case <-p.stop:
			return
		case <-ticker.C:
			p.mu.Lock()
			p.draw()
			p.mu.Unlock()
		}
	}
}

func (p *ttyProgress) event(e *vzv1.Event) {
	s := e.GetProgress()
	if s == nil || s.GetTerminal() {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if s.GetStatus() == vzv1.Progress_STATUS_STARTED {
		p.running = append(p.running, s)
		p.draw()
		return
	}
	for i, r := range p.running {
		if r.GetStep() == s.GetStep() && r.GetSubject() == s.GetSubject() {
			p.running = append(p.running[:i], p.running[i+1:]...)
			break
		}
	}
	p.clear()
	fmt.Fprintf(p.w, "%s %s\n", p.paint(s.GetStatus()), describe(s))
	p.draw()
}

func (p *ttyProgress) draw() {
	p.clear()
	if len(p.running) == 0 {
		return
	}
	p.drawn = true
	names := make([]string, 0, len(p.running))
	for _, r := range p.running {
		names = append(names, title(r))
	}
	line := []rune(fmt.Sprintf("… %.1fs  %s", time.Since(p.began).Seconds(), strings.Join(names, ", ")))
	// A line that wraps could not be taken back.
	if columns, _, err := term.GetSize(int(p.w.Fd())); err == nil && columns > 1 && len(line) >= columns {
		line = append(line[:columns-2], '…')
	}
	fmt.Fprint(p.w, string(line))
}

// clear takes our line away, and nobody else's.
func (p *ttyProgress) clear() {
	if p.drawn {
		fmt.Fprint(p.w, "\r\x1b[K")
		p.drawn = false
	}
}

func (p *ttyProgress) close() {
	close(p.stop)
	p.stopped.Wait()
	p.clear()
}

func (p *ttyProgress) paint(s vzv1.Progress_Status) string {
	if !p.color {
		return mark(s)
	}
	switch s {
	case vzv1.Progress_STATUS_DONE:
		return "\x1b[32m" + mark(s) + "\x1b[0m"
	case vzv1.Progress_STATUS_FAILED:
		return "\x1b[31m" + mark(s) + "\x1b[0m"
	}
	return mark(s)
}

func mark(s vzv1.Progress_Status) string {
	switch s {
	case vzv1.Progress_STATUS_DONE:
		return "✓"
	case vzv1.Progress_STATUS_FAILED:
		return "✗"
	case vzv1.Progress_STATUS_SKIPPED:
		return "-"
	}
	return "…"
}

// title is the step and what it is about.
func title(s *vzv1.Progress) string {
	if s.GetSubject() == "" {
		return s.GetStep()
	}
	return s.GetStep() + " " + s.GetSubject()
}

// describe is one step that ended, as a line.
func describe(s *vzv1.Progress) string {
	line := title(s)
	if s.GetMessage() != "" {
		line += ": " + s.GetMessage()
	}
	if s.GetElapsedMillis() >= 100 {
		line += fmt.Sprintf(" (%.1fs)", float64(s.GetElapsedMillis())/1000)
	}
	return line
}
