// Package receipt is an Environment's evidence: an append-only log of receipts,
// each chained to the one before by SHA-256 and signed with the Environment's
// Ed25519 key, and a signed head that says how many there are and how the last
// one hashes, so that a tail that was cut off is found too.
//
// Use: the supervisor Opens the log, Appends, and prints the final Head when
// the Environment is deleted. Anybody who has the log, a head and the public
// key checks them with Verify, without vz running.
//
//	receipts.ndjson   one receipt to a line
//	head.json         count, last hash, public key, signature
//	key.pem           PKCS #8, mode 0600
//	key.pub.pem       PKIX
//
// It does not say when something happened to anybody who does not trust the
// host: the key lies beside the log, and who has both can write another
// history. A head that was printed or sent elsewhere is what pins one.
package receipt

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// version of the forms of a receipt and of a head.
const version = 1

// MaxBody is the longest body of a receipt in bytes.
const MaxBody = 1 << 20

// maxLine bounds a line that is read: a body and what is around it.
const maxLine = MaxBody + 4096

// A Receipt is one piece of evidence. It is immutable.
type Receipt struct {
	Version       int             `json:"version"`
	EnvironmentID string          `json:"environment_id"`
	Sequence      uint64          `json:"sequence"` // from 1, without gaps
	Kind          string          `json:"kind"`     // lifecycle, fault, …
	At            time.Time       `json:"at"`
	Body          json.RawMessage `json:"body"`
	Previous      string          `json:"previous"` // hash of the one before; of the first: 64 zeros

	Hash      string `json:"-"` // SHA-256 in hexadecimal of all of the above, as it stands in the log
	Signature string `json:"-"` // Ed25519 in base64
}

// A Head says how many receipts there are. It is signed anew with each.
type Head struct {
	Version       int    `json:"version"`
	EnvironmentID string `json:"environment_id"`
	Count         uint64 `json:"count"`
	Hash          string `json:"hash"`       // of the last receipt; with none: 64 zeros
	PublicKey     string `json:"public_key"` // base64; says which key signed, not whom to trust
	Signature     string `json:"signature"`
}

// zero is what the first receipt is chained to.
var zero = strings.Repeat("0", 2*sha256.Size)

// A line of the log is an envelope of fixed form around the receipt's own text:
//
//	{"receipt":{…},"hash":"…","signature":"…"}
//
// The hash is over that text as it stands, so that nobody has to agree on how
// JSON is written, and the envelope has one form only, so that a changed bit
// anywhere is found.
const (
	lineStart     = `{"receipt":`
	lineHash      = `,"hash":"`
	lineSignature = `","signature":"`
	lineEnd       = `"}`
)

func line(text []byte, hash, signature string) []byte {
	var b bytes.Buffer
	b.WriteString(lineStart)
	b.Write(text)
	b.WriteString(lineHash + hash + lineSignature + signature + lineEnd + "\n")
	return b.Bytes()
}

// What is signed names what it is, so that no signature of one thing is one of
// another.
func receiptMessage(environment, hash string) []byte {
	return []byte("vz receipt v1\n" + environment + "\n" + hash)
}

func headMessage(h Head) []byte {
	return []byte("vz receipt head v1\n" + h.EnvironmentID + "\n" + strconv.FormatUint(h.Count, 10) + "\n" + h.Hash)
}

func sign(key ed25519.PrivateKey, message []byte) string {
	return base64.StdEncoding.EncodeToString(ed25519.Sign(key, message))
}

// signed says whether a signature is right, and written in the one way.
func signed(key ed25519.PublicKey, message []byte, signature string) bool {
	raw, err := base64.StdEncoding.Strict().DecodeString(signature)
	return err == nil && base64.StdEncoding.EncodeToString(raw) == signature && ed25519.Verify(key, message, raw)
}

// encode makes the line of a receipt, whose Hash and Signature it sets.
func encode(r *Receipt, key ed25519.PrivateKey) ([]byte, error) {
	text, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(text)
	r.Hash = hex.EncodeToString(sum[:])
	r.Signature = sign(key, receiptMessage(r.EnvironmentID, r.Hash))
	return line(text, r.Hash, r.Signature), nil
}

// decode reads a line, with its final newline, and checks all of it that does
// not depend on other lines. at is for errors.
func decode(at uint64, text []byte, environment string, key ed25519.PublicKey) (Receipt, error) {
	bad := func(p Problem, format string, a ...any) (Receipt, error) {
		return Receipt{}, &VerifyError{Line: at, Problem: p, Detail: fmt.Sprintf(format, a...)}
	}
	if !bytes.HasSuffix(text, []byte("\n")) {
		return bad(Torn, "the line has no end")
	}
	var outer struct {
		Receipt   json.RawMessage `json:"receipt"`
		Hash      string          `json:"hash"`
		Signature string          `json:"signature"`
	}
	if err := json.Unmarshal(text, &outer); err != nil {
		return bad(Malformed, "%v", err)
	}
	if !bytes.Equal(line(outer.Receipt, outer.Hash, outer.Signature), text) {
		return bad(Malformed, "the line is not in the form in which vz writes it")
	}
	sum := sha256.Sum256(outer.Receipt)
	if hex.EncodeToString(sum[:]) != outer.Hash {
		return bad(WrongHash, "the receipt hashes to %x, the line says %q", sum, outer.Hash)
	}
	var r Receipt
	if err := json.Unmarshal(outer.Receipt, &r); err != nil {
		return bad(Malformed, "%v", err)
	}
	if r.Version != version {
		return bad(Newer, "the receipt has version %d, this vz knows %d", r.Version, version)
	}
	if r.EnvironmentID != environment {
		return bad(WrongEnvironment, "the receipt is of %s, the head of %s", r.EnvironmentID, environment)
	}
	if !signed(key, receiptMessage(r.EnvironmentID, outer.Hash), outer.Signature) {
		return bad(WrongSignature, "the signature is not this key's over this receipt")
	}
	r.Hash, r.Signature = outer.Hash, outer.Signature
	return r, nil
}

// follows checks a receipt's place in the chain.
func follows(at uint64, r Receipt, count uint64, last string) error {
	if r.Sequence != count+1 {
		return &VerifyError{Line: at, Problem: WrongSequence,
			Detail: fmt.Sprintf("receipt %d stands where %d belongs: a line was taken out, put in or moved", r.Sequence, count+1)}
	}
	if r.Previous != last {
		return &VerifyError{Line: at, Problem: WrongPrevious,
			Detail: fmt.Sprintf("it follows a receipt that hashes to %q, the one before it hashes to %s", r.Previous, last)}
	}
	return nil
}

// checkHead checks a head's own signature.
func checkHead(h Head, key ed25519.PublicKey) error {
	switch {
	case h.Version != version:
		return &VerifyError{Problem: Newer, Detail: fmt.Sprintf("the head has version %d, this vz knows %d", h.Version, version)}
	case h.PublicKey != base64.StdEncoding.EncodeToString(key):
		return &VerifyError{Problem: ForeignKey, Detail: fmt.Sprintf("the head was signed with the key %q, the one to trust is %s", h.PublicKey, base64.StdEncoding.EncodeToString(key))}
	case !signed(key, headMessage(h), h.Signature):
		return &VerifyError{Problem: WrongSignature, Detail: "the head's signature is not this key's over this count and hash"}
	}
	return nil
}

func newHead(environment string, count uint64, hash string, key ed25519.PrivateKey) Head {
	h := Head{Version: version, EnvironmentID: environment, Count: count, Hash: hash,
		PublicKey: base64.StdEncoding.EncodeToString(key.Public().(ed25519.PublicKey))}
	h.Signature = sign(key, headMessage(h))
	return h
}
