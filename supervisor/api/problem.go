package api

import (
	"errors"
	"strings"

	"connectrpc.com/connect"

	"vz.test/vz/supervisor/api/vzv1"
)

// A Problem is an error as people are to read it: what failed, why, and the
// next thing to do. It crosses the API as the detail of a connect error.
type Problem struct {
	Code    connect.Code
	What    string
	Why     string
	Next    string
	LogPath string // where more is to be read; may be empty

	Unsupported *vzv1.UnsupportedCapability // set when capabilities are missing: the first
}

func (p *Problem) Error() string {
	var b strings.Builder
	b.WriteString(p.What)
	if p.Why != "" {
		b.WriteString(": " + p.Why)
	}
	if p.Next != "" {
		b.WriteString("; " + p.Next)
	}
	return b.String()
}

// NewProblem is a Problem without a log.
func NewProblem(code connect.Code, what, why, next string) *Problem {
	return &Problem{Code: code, What: what, Why: why, Next: next}
}

// Ending says that a stop or a delete was carried out and the supervisor is
// about to end. Whoever is told waits for that and asks the next one.
var Ending = NewProblem(connect.CodeAborted, "the supervisor is ending", "a stop or a delete came first", "run the command again")

// IsEnding says whether a supervisor answered Ending.
func IsEnding(err error) bool {
	var p *Problem
	return errors.As(FromConnect(err), &p) && p.Code == Ending.Code
}

// Message is the problem as the API carries it.
func (p *Problem) Message() *vzv1.Error {
	return &vzv1.Error{What: p.What, Why: p.Why, Next: p.Next, LogPath: p.LogPath, Unsupported: p.Unsupported}
}

// AsMessage turns any error into what the API carries.
func AsMessage(err error) *vzv1.Error {
	var p *Problem
	if errors.As(err, &p) {
		return p.Message()
	}
	return &vzv1.Error{What: err.Error()}
}

// toConnect puts a Problem behind a connect error, as its detail.
func toConnect(err error) error {
	if err == nil {
		return nil
	}
	var ce *connect.Error
	if errors.As(err, &ce) {
		return err
	}
	var p *Problem
	if !errors.As(err, &p) {
		return connect.NewError(connect.CodeOf(err), err)
	}
	ce = connect.NewError(p.Code, errors.New(p.Error()))
	if detail, err := connect.NewErrorDetail(p.Message()); err == nil {
		ce.AddDetail(detail)
	}
	return ce
}

// FromConnect is the inverse of what a server does to a Problem: the client's
// side. Errors without a detail come back as they are.
func FromConnect(err error) error {
	var ce *connect.Error
	if !errors.As(err, &ce) {
		return err
	}
	for _, detail := range ce.Details() {
		value, err := detail.Value()
		if err != nil {
			continue
		}
		if m, ok := value.(*vzv1.Error); ok {
			return FromMessage(ce.Code(), m)
		}
	}
	return err
}

// FromMessage turns what the API carried back into a Problem.
func FromMessage(code connect.Code, m *vzv1.Error) *Problem {
	return &Problem{Code: code, What: m.GetWhat(), Why: m.GetWhy(), Next: m.GetNext(),
		LogPath: m.GetLogPath(), Unsupported: m.GetUnsupported()}
}
