package ingress

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"io/fs"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"syscall"
)

//go:embed problem.html
var problemHTML string

var problemPage = template.Must(template.New("problem").Parse(problemHTML))

// problem is an answer of our own in a backend's stead: what failed, why, and
// what to do next. Empty fields are left out.
type problem struct {
	Status      int      `json:"status"`
	Environment string   `json:"environment,omitempty"`
	Endpoint    string   `json:"endpoint,omitempty"`
	Host        string   `json:"host,omitempty"`
	Machine     string   `json:"machine,omitempty"`
	Port        int      `json:"port,omitempty"`
	Reason      string   `json:"reason"`
	Detail      string   `json:"detail"`
	Cause       string   `json:"error,omitempty"`
	Next        string   `json:"next,omitempty"`
	Names       []string `json:"names,omitempty"` // those that there are
}

// Title is for people.
func (p *problem) Title() string { return fmt.Sprintf("%d %s", p.Status, http.StatusText(p.Status)) }

// Error lets a problem pass where only errors do.
func (p *problem) Error() string { return p.Detail }

// dialError tells a backend that was not reached from one that broke off.
type dialError struct{ error }

func (e *dialError) Unwrap() error { return e.error }

// reasonOf tells errors apart, those of a dial first of all.
func reasonOf(err error) (status int, reason string) {
	timeout, ok := errors.AsType[interface {
		error
		Timeout() bool
	}](err)
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return http.StatusBadGateway, "refused"
	case errors.Is(err, fs.ErrPermission):
		return http.StatusServiceUnavailable, "refused by policy"
	case errors.Is(err, context.DeadlineExceeded), ok && timeout.Timeout():
		return http.StatusGatewayTimeout, "timeout"
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return http.StatusServiceUnavailable, "unreachable"
	}
	if _, ok := errors.AsType[*dialError](err); ok {
		return http.StatusServiceUnavailable, "unreachable"
	}
	return http.StatusBadGateway, "failed"
}

// backendProblem says that an endpoint's backend did not answer.
func backendProblem(environment string, e Endpoint, err error) *problem {
	p := &problem{Environment: environment, Endpoint: e.Name, Host: e.Host, Machine: e.Machine, Port: e.Port, Cause: err.Error()}
	p.Status, p.Reason = reasonOf(err)
	switch p.Reason {
	case "refused":
		p.Detail = fmt.Sprintf("Nothing listens on port %d of Machine %s.", e.Port, e.Machine)
		p.Next = fmt.Sprintf("Is the process up, and does it listen on every address? vz exec --machine %s -- ss -ltn", e.Machine)
	case "refused by policy":
		p.Detail = fmt.Sprintf("The edge may not reach port %d of Machine %s.", e.Port, e.Machine)
		p.Next = fmt.Sprintf("Is Machine %s attached to the endpoint's network? vz status --machine %s", e.Machine, e.Machine)
	case "timeout":
		p.Detail = fmt.Sprintf("Port %d of Machine %s did not answer in time.", e.Port, e.Machine)
		p.Next = fmt.Sprintf("Is the process stuck, or a fault armed on path backend:%s? vz status --machine %s", e.Name, e.Machine)
	case "unreachable":
		p.Detail = fmt.Sprintf("There is no way to Machine %s.", e.Machine)
		p.Next = fmt.Sprintf("Is the Machine up? vz status --machine %s", e.Machine)
	default:
		p.Detail = fmt.Sprintf("Port %d of Machine %s broke off, or did not speak HTTP.", e.Port, e.Machine)
		p.Next = fmt.Sprintf("See what the process logs, and that it speaks plain HTTP on port %d.", e.Port)
	}
	return p
}

// write answers in the form that the client likes best. p's text may come from
// outside.
func (p *problem) write(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Vary", "Accept")
	var body strings.Builder
	switch preferred(r.Header.Values("Accept")) {
	case "text/html":
		h.Set("Content-Type", "text/html; charset=utf-8")
		h.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'")
		problemPage.Execute(&body, p) // fails only where Builder does: never
	case "application/json":
		h.Set("Content-Type", "application/json")
		encoder := json.NewEncoder(&body)
		encoder.SetIndent("", "  ")
		encoder.Encode(p)
	default:
		h.Set("Content-Type", "text/plain; charset=utf-8")
		body.WriteString(p.text())
	}
	h.Set("Content-Length", strconv.Itoa(body.Len()))
	w.WriteHeader(p.Status)
	fmt.Fprint(w, body.String())
}

func (p *problem) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s\n\n", p.Title(), p.Detail)
	row := func(name, value string) {
		if value != "" {
			fmt.Fprintf(&b, "  %-12s %s\n", name, value)
		}
	}
	row("Environment", p.Environment)
	if p.Endpoint != "" {
		row("Endpoint", p.Endpoint+" ("+p.Host+")")
	}
	if p.Machine != "" {
		row("Machine", fmt.Sprintf("%s, port %d", p.Machine, p.Port))
	}
	row("Reason", p.Reason)
	row("Error", p.Cause)
	row("Names", strings.Join(p.Names, ", "))
	if p.Next != "" {
		fmt.Fprintf(&b, "\n%s\n", p.Next)
	}
	return b.String()
}

// preferred picks one of our forms by the Accept headers (RFC 9110, 12.5.1).
// Of two liked equally, the one named more precisely wins, then plain text.
func preferred(accept []string) string {
	type match struct {
		quality   float64
		precision int
	}
	forms := []string{"text/plain", "text/html", "application/json"}
	best := make([]match, len(forms))
	for part := range strings.SplitSeq(strings.Join(accept, ","), ",") {
		kind, parameters, err := mime.ParseMediaType(part)
		if err != nil {
			continue
		}
		quality := 1.0
		if text, ok := parameters["q"]; ok {
			if quality, err = strconv.ParseFloat(text, 64); err != nil {
				continue
			}
		}
		for i, form := range forms {
			precision := 0
			switch {
			case kind == form:
				precision = 3
			case kind == form[:strings.Index(form, "/")]+"/*":
				precision = 2
			case kind == "*/*":
				precision = 1
			}
			if precision > best[i].precision {
				best[i] = match{quality, precision}
			}
		}
	}
	chosen := 0
	for i := range forms {
		b, c := best[i], best[chosen]
		if b.quality > c.quality || b.quality == c.quality && b.precision > c.precision {
			chosen = i
		}
	}
	return forms[chosen]
}
