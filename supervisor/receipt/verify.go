package receipt

import (
	"bufio"
	"bytes"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io"
)

// Problem is what is wrong with a log or its head.
type Problem string

const (
	Malformed        Problem = "malformed"         // no receipt in the form in which vz writes it
	Torn             Problem = "torn"              // the last line is cut off in the middle
	WrongHash        Problem = "wrong hash"        // a receipt was changed
	WrongSignature   Problem = "wrong signature"   // not made by the key
	WrongSequence    Problem = "wrong sequence"    // a line is missing, moved or put in
	WrongPrevious    Problem = "wrong previous"    // the chain is broken
	WrongEnvironment Problem = "wrong environment" // a receipt of another Environment
	ForeignKey       Problem = "foreign key"       // the head is of another key
	CutOff           Problem = "cut off"           // fewer receipts than the head says
	Ahead            Problem = "ahead"             // more receipts than the head says
	WrongHead        Problem = "wrong head"        // the head is of another history
	Newer            Problem = "newer version"
	Unreadable       Problem = "unreadable"
)

// A VerifyError says where evidence does not hold, and why.
type VerifyError struct {
	Line    uint64 // from 1; 0 is the head or the log as a whole
	Problem Problem
	Detail  string
	Err     error // of the reader, with Unreadable
}

// Explain says what failed, why, and the next thing to do.
func (e *VerifyError) Explain() (what, why, next string) {
	what = "the receipts do not verify (" + string(e.Problem) + ")"
	if e.Line > 0 {
		what = fmt.Sprintf("the receipts do not verify at line %d (%s)", e.Line, e.Problem)
	}
	next = "do not rely on this line or on any after it; compare with a copy made earlier"
	switch e.Problem {
	case ForeignKey:
		next = "verify with the public key of this Environment"
	case Newer:
		next = "verify with a newer vz"
	case Ahead, CutOff, Torn:
		next = "verify the log with the head of the same moment; if this is that head, compare with a copy made earlier"
	case Unreadable:
		next = "see that the log can be read"
	}
	return what, e.Detail, next
}

func (e *VerifyError) Error() string {
	what, why, next := e.Explain()
	return what + ": " + why + "; " + next
}
func (e *VerifyError) Unwrap() error { return e.Err }

// Verify checks a log against a head and the public key that the reader
// trusts, which must not be taken from the head. It reads the log once, from
// its beginning, and holds one line at a time. Errors are *VerifyError: the
// first thing that is wrong.
func Verify(log io.Reader, head Head, key ed25519.PublicKey) error {
	if len(key) != ed25519.PublicKeySize {
		return &VerifyError{Problem: ForeignKey, Detail: fmt.Sprintf("an Ed25519 public key has %d bytes, this one %d", ed25519.PublicKeySize, len(key))}
	}
	if err := checkHead(head, key); err != nil {
		return err
	}
	count, last := uint64(0), zero
	lines := newLines(log)
	for {
		text, err := lines.next()
		if errors.Is(err, io.EOF) {
			break
		}
		at := count + 1
		if err != nil {
			return atLine(at, err)
		}
		if count == head.Count {
			return &VerifyError{Line: at, Problem: Ahead, Detail: fmt.Sprintf("the head says that there are %d receipts, more follow", head.Count)}
		}
		r, err := decode(at, text, head.EnvironmentID, key)
		if err != nil {
			return err
		}
		if err := follows(at, r, count, last); err != nil {
			return err
		}
		count, last = r.Sequence, r.Hash
	}
	switch {
	case count < head.Count:
		return &VerifyError{Problem: CutOff, Detail: fmt.Sprintf("the head says that there are %d receipts, the log ends after %d", head.Count, count)}
	case last != head.Hash:
		return &VerifyError{Problem: WrongHead, Detail: fmt.Sprintf("the head says that the last receipt hashes to %q, it hashes to %s", head.Hash, last)}
	}
	return nil
}

// atLine is a reader's error as one about a line.
func atLine(at uint64, err error) error {
	if v := new(VerifyError); errors.As(err, &v) {
		v.Line = at
		return v
	}
	return &VerifyError{Line: at, Problem: Unreadable, Detail: err.Error(), Err: err}
}

// lines reads a log line by line, each with its newline but perhaps the last;
// a line is good until the next. No line is longer than maxLine.
type lines struct {
	reader *bufio.Reader
}

func newLines(r io.Reader) lines { return lines{bufio.NewReaderSize(r, 64<<10)} }

func (l lines) next() ([]byte, error) {
	text, err := l.reader.ReadSlice('\n')
	if err == nil {
		return text, nil
	}
	long := bytes.Clone(text)
	for errors.Is(err, bufio.ErrBufferFull) {
		if len(long) > maxLine {
			return nil, &VerifyError{Problem: Malformed, Detail: fmt.Sprintf("the line is longer than %d bytes", maxLine)}
		}
		text, err = l.reader.ReadSlice('\n')
		long = append(long, text...)
	}
	if errors.Is(err, io.EOF) && len(long) > 0 {
		err = nil // the last line; that it has no end is decode's to find
	}
	return long, err
}
