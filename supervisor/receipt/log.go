package receipt

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"vz.test/vz/internal/durable"
)

const (
	logName    = "receipts.ndjson"
	headName   = "head.json"
	keyName    = "key.pem"
	publicName = "key.pub.pem"
)

// KindRecovered is the kind of the receipt that Open makes when it had to cut
// off what a crash left at the end of the log.
const KindRecovered = "receipts.recovered"

// An Error is a failure of the log's files, or evidence that is not whole.
type Error struct {
	What string
	Path string
	Err  error
	Next string
}

// Explain says what failed, why, and the next thing to do.
func (e *Error) Explain() (what, why, next string) {
	return e.What + " " + e.Path, e.Err.Error(), e.Next
}
func (e *Error) Error() string {
	return fmt.Sprintf("%s %s: %v; %s", e.What, e.Path, e.Err, e.Next)
}
func (e *Error) Unwrap() error { return e.Err }

// A Log is one Environment's receipts, open for appending. One process has it
// open at a time: the holder of the Environment's owner lock. Its methods may
// be called from any goroutine.
type Log struct {
	dir         string
	environment string
	key         ed25519.PrivateKey
	now         func() time.Time

	mu      sync.Mutex
	file    *os.File
	offsets []int64 // where each receipt begins
	size    int64   // where the next one begins
	head    Head
	broken  error // set for good when the files can't be made to agree
}

// Open opens the log in dir, which it makes (mode 0700) with a key of its own
// if there is none.
//
// Append writes the receipt, then the head, each to the disk before it goes on.
// What a crash leaves is therefore told from what somebody did, by one rule:
// the head is what was promised.
//
//   - All the receipts that the head counts are there and verify, or Open fails:
//     promised evidence is missing or was changed, and is never written over.
//   - Behind them may stand one receipt that verifies: it was written, and its
//     head was not. It is genuine (it is signed), so the head moves up to it.
//   - Anything else behind them that is no whole genuine receipt was never
//     promised to anybody. It is cut off, and a receipt of kind KindRecovered
//     says how much that was and how it hashed.
//   - Two genuine receipts behind the head are not what a crash leaves: the
//     head was set back, and Open fails.
func Open(dir, environmentID string) (*Log, error) {
	return open(dir, environmentID, time.Now)
}

func open(dir, environmentID string, now func() time.Time) (_ *Log, err error) {
	const next = "see that its directory is yours, can be written to and the disk is not full"
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, &Error{"cannot make", dir, err, next}
	}
	l := &Log{dir: dir, environment: environmentID, now: now}
	path := l.path(logName)
	_, headErr := os.Lstat(l.path(headName))
	_, logErr := os.Lstat(path)
	fresh := errors.Is(headErr, fs.ErrNotExist) && errors.Is(logErr, fs.ErrNotExist)
	if l.key, err = loadKey(l.path(keyName), fresh); err != nil {
		return nil, err
	}
	if fresh {
		// Before the log: a log without a head is one whose head was taken.
		if err := l.saveHead(newHead(environmentID, 0, zero, l.key)); err != nil {
			return nil, &Error{"cannot write", l.path(headName), err, next}
		}
	} else if l.head, err = ReadHead(dir); err != nil {
		return nil, err
	}
	if err := checkHead(l.head, l.Public()); err != nil {
		return nil, evidence(l.path(headName), err)
	}
	if l.head.EnvironmentID != environmentID {
		return nil, evidence(l.path(headName), &VerifyError{Problem: WrongEnvironment, Detail: fmt.Sprintf("the head is of %s, not of %s", l.head.EnvironmentID, environmentID)})
	}
	if err := l.publish(); err != nil {
		return nil, err
	}
	flags := os.O_RDWR
	if l.head.Count == 0 {
		flags |= os.O_CREATE // a crash between head and log left none
	}
	if l.file, err = os.OpenFile(path, flags, 0o600); err != nil {
		return nil, &Error{"cannot open", path, err, "the head promises receipts: bring the log back from a copy, or `vz delete` the Environment"}
	}
	if err := l.recover(); err != nil {
		return nil, errors.Join(err, l.file.Close())
	}
	if err := durable.SyncDir(dir); err != nil {
		return nil, errors.Join(&Error{"cannot write", dir, err, next}, l.file.Close())
	}
	return l, nil
}

// evidence is an error about evidence that is not whole.
func evidence(path string, err error) error {
	return &Error{"the evidence is not whole:", path, err, "keep the directory " + filepath.Dir(path) + " for whoever is to look into it; `vz delete` removes it with the Environment"}
}

// recover reads the log and applies Open's rule.
func (l *Log) recover() error {
	path := l.path(logName)
	promised := l.head
	count, last := uint64(0), zero
	lines := newLines(l.file)
	var end error // why the lines end before the file does
	for end == nil {
		text, err := lines.next()
		if errors.Is(err, io.EOF) {
			break
		}
		at := count + 1
		var r Receipt
		if err != nil {
			err = atLine(at, err)
		} else if r, err = decode(at, text, l.environment, l.Public()); err == nil {
			err = follows(at, r, count, last)
		}
		if v := new(VerifyError); errors.As(err, &v) && v.Problem == Unreadable {
			return &Error{"cannot read", path, err, "see that the disk works"}
		}
		switch {
		case err != nil && count < promised.Count:
			return evidence(path, err)
		case err != nil:
			end = err
		case count > promised.Count:
			return evidence(path, &VerifyError{Line: at, Problem: Ahead,
				Detail: fmt.Sprintf("the head says that there are %d receipts, at least %d are there: the head was set back", promised.Count, at)})
		default:
			l.offsets = append(l.offsets, l.size)
			l.size += int64(len(text))
			count, last = r.Sequence, r.Hash
			if count == promised.Count && last != promised.Hash {
				return evidence(path, &VerifyError{Line: at, Problem: WrongHead, Detail: "the head is of another history"})
			}
		}
	}
	if count < promised.Count {
		return evidence(path, &VerifyError{Problem: CutOff, Detail: fmt.Sprintf("the head says that there are %d receipts, the log ends after %d", promised.Count, count)})
	}
	if promised.Count == 0 && promised.Hash != zero {
		return evidence(path, &VerifyError{Problem: WrongHead, Detail: "the head has no receipts and yet the hash of one"})
	}
	if count > promised.Count {
		if err := l.saveHead(newHead(l.environment, count, last, l.key)); err != nil {
			return &Error{"cannot write", l.path(headName), err, "see that the disk is not full"}
		}
	}
	if end == nil {
		return nil
	}
	if _, err := l.file.Seek(l.size, io.SeekStart); err != nil {
		return &Error{"cannot read", path, err, "see that the disk works"}
	}
	hash := sha256.New()
	cut, err := io.Copy(hash, l.file)
	if err == nil {
		if err = l.file.Truncate(l.size); err == nil {
			err = l.file.Sync()
		}
	}
	if err != nil {
		return &Error{"cannot cut off what a crash left in", path, err, "see that the disk works"}
	}
	_, err = l.append(KindRecovered, map[string]any{
		"cut_bytes": cut, "cut_sha256": hex.EncodeToString(hash.Sum(nil)), "why": end.(*VerifyError).Detail,
	})
	return err
}

// Append adds a receipt, whose body is what json.Marshal makes of it, at most
// MaxBody bytes; never with a secret in it. It returns when receipt and head
// are on the disk. A failure leaves the log as it was.
func (l *Log) Append(kind string, body any) (Receipt, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.append(kind, body)
}

func (l *Log) append(kind string, body any) (Receipt, error) {
	path := l.path(logName)
	failed := func(err error) (Receipt, error) {
		return Receipt{}, &Error{"cannot append a receipt to", path, err, "see that the disk is not full and works"}
	}
	if l.broken != nil {
		return failed(l.broken)
	}
	text, err := json.Marshal(body)
	if err == nil && len(text) > MaxBody {
		err = fmt.Errorf("its body has %d bytes, at most %d are allowed", len(text), MaxBody)
	}
	if err == nil && kind == "" {
		err = errors.New("it has no kind")
	}
	if err != nil {
		return Receipt{}, &Error{"cannot make a receipt for", path, err, "this is a bug in vz: please report it"}
	}
	r := Receipt{
		Version: version, EnvironmentID: l.environment, Sequence: l.head.Count + 1, Kind: kind,
		At: l.now().UTC().Round(0), Body: text, Previous: l.head.Hash,
	}
	encoded, err := encode(&r, l.key)
	if err != nil {
		return failed(err)
	}
	_, err = l.file.WriteAt(encoded, l.size)
	if err == nil {
		err = l.file.Sync()
	}
	old := l.head
	if err == nil {
		err = l.saveHead(newHead(l.environment, r.Sequence, r.Hash, l.key))
	}
	if err != nil {
		// Take it back, so that what was not promised is not there either and
		// the next one can be tried, as on a full disk. Where that fails too,
		// only Open can tell what is true.
		undone := l.file.Truncate(l.size)
		if undone == nil {
			undone = l.file.Sync()
		}
		if there, unread := ReadHead(l.dir); undone == nil && (unread != nil || there != old) {
			undone = l.saveHead(old)
		}
		if undone != nil {
			l.broken = fmt.Errorf("an earlier failure could not be undone: %w", errors.Join(err, undone))
		}
		return failed(err)
	}
	l.offsets = append(l.offsets, l.size)
	l.size += int64(len(encoded))
	return r, nil
}

// Head is the present head.
func (l *Log) Head() Head {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.head
}

// Public is the key to verify with. The caller does not change it.
func (l *Log) Public() ed25519.PublicKey { return l.key.Public().(ed25519.PublicKey) }

// List reads the receipts with a sequence greater than after, oldest first,
// from the disk. The head is that of the same moment.
func (l *Log) List(after uint64) ([]Receipt, Head, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if after >= uint64(len(l.offsets)) {
		return nil, l.head, nil
	}
	start := l.offsets[after]
	lines := newLines(io.NewSectionReader(l.file, start, l.size-start))
	all := make([]Receipt, 0, uint64(len(l.offsets))-after)
	for count := after; count < l.head.Count; count++ {
		text, err := lines.next()
		var r Receipt
		if err == nil {
			r, err = decode(count+1, text, l.environment, l.Public())
		}
		if err != nil {
			return nil, l.head, evidence(l.path(logName), err)
		}
		all = append(all, r)
	}
	return all, l.head, nil
}

// Close closes the log. What was appended is on the disk already.
func (l *Log) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.broken == nil {
		l.broken = fs.ErrClosed
	}
	return l.file.Close()
}

func (l *Log) path(name string) string { return filepath.Join(l.dir, name) }

func (l *Log) saveHead(h Head) error {
	text, err := json.Marshal(h)
	if err != nil {
		return err
	}
	if err := durable.Replace(l.path(headName), append(text, '\n'), 0o600); err != nil {
		return err
	}
	l.head = h
	return nil
}

// ReadHead reads the head of the log in dir, unchecked: Verify checks it.
func ReadHead(dir string) (Head, error) {
	path := filepath.Join(dir, headName)
	var h Head
	text, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(text, &h)
	}
	if err != nil {
		return Head{}, evidence(path, err)
	}
	return h, nil
}

// ReadPublicKey reads the public key that stands beside the log in dir. Who
// does not trust that directory takes the key from elsewhere.
func ReadPublicKey(dir string) (ed25519.PublicKey, error) {
	path := filepath.Join(dir, publicName)
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, &Error{"cannot read", path, err, "see that it is there and can be read"}
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, evidence(path, errors.New("it is not in PEM"))
	}
	any, err := x509.ParsePKIXPublicKey(block.Bytes)
	key, ok := any.(ed25519.PublicKey)
	if err == nil && !ok {
		err = fmt.Errorf("it has a %T, not an Ed25519 key", any)
	}
	if err != nil {
		return nil, evidence(path, err)
	}
	return key, nil
}

// VerifyDir verifies the log in dir with the head and the key beside it.
func VerifyDir(dir string) (Head, error) {
	key, err := ReadPublicKey(dir)
	if err != nil {
		return Head{}, err
	}
	head, err := ReadHead(dir)
	if err != nil {
		return Head{}, err
	}
	log, err := os.Open(filepath.Join(dir, logName))
	if err != nil {
		return head, &Error{"cannot read", filepath.Join(dir, logName), err, "see that it is there and can be read"}
	}
	defer log.Close()
	return head, Verify(log, head, key)
}

// loadKey reads the key, or makes it where there is no evidence yet that one
// has signed.
func loadKey(path string, fresh bool) (ed25519.PrivateKey, error) {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) && fresh {
		return makeKey(path)
	}
	if err != nil {
		return nil, evidence(path, err)
	}
	if !info.Mode().IsRegular() || info.Mode().Perm()&0o077 != 0 && filepath.Separator == '/' {
		return nil, evidence(path, fmt.Errorf("others may read the key (mode %v)", info.Mode()))
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, evidence(path, err)
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, evidence(path, errors.New("it is not in PEM"))
	}
	any, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	key, ok := any.(ed25519.PrivateKey)
	if err == nil && !ok {
		err = fmt.Errorf("it has a %T, not an Ed25519 key", any)
	}
	if err != nil {
		return nil, evidence(path, err)
	}
	return key, nil
}

func makeKey(path string) (ed25519.PrivateKey, error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err == nil {
		err = durable.Replace(path, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600)
	}
	if err != nil {
		return nil, &Error{"cannot make the key", path, err, "see that its directory can be written to and the disk is not full"}
	}
	return key, nil
}

// publish writes the public key beside the log, once.
func (l *Log) publish() error {
	path := l.path(publicName)
	key, err := ReadPublicKey(l.dir)
	switch {
	case err == nil && !key.Equal(l.Public()):
		return evidence(path, &VerifyError{Problem: ForeignKey, Detail: "it is not the public half of " + keyName})
	case err == nil || !errors.Is(err, fs.ErrNotExist):
		return err
	}
	der, err := x509.MarshalPKIXPublicKey(l.Public())
	if err == nil {
		err = durable.Replace(path, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), 0o600)
	}
	if err != nil {
		return &Error{"cannot write", path, err, "see that its directory can be written to and the disk is not full"}
	}
	return nil
}
