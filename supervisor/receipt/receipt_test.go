package receipt

import (
	"bytes"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const environment = "env_01kbcdefghjkmnpqrstvwxyz01"

// clock is a moment that every receipt of a test is of.
func clock() time.Time { return time.Date(2026, 7, 1, 12, 0, 0, 123456789, time.UTC) }

func mustOpen(t *testing.T, dir string) *Log {
	t.Helper()
	l, err := open(dir, environment, clock)
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	return l
}

// written is a closed log of n receipts: its directory, text, head and key.
func written(t *testing.T, n int) (dir string, log []byte, head Head, key ed25519.PublicKey) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "receipts")
	l := mustOpen(t, dir)
	for i := range n {
		_, err := l.Append("lifecycle", map[string]any{"step": i, "html": "<&>"})
		require.NoError(t, err)
	}
	require.NoError(t, l.Close())
	log, err := os.ReadFile(filepath.Join(dir, logName))
	require.NoError(t, err)
	return dir, log, l.Head(), l.Public()
}

func problem(t *testing.T, err error) Problem {
	t.Helper()
	var v *VerifyError
	require.ErrorAs(t, err, &v)
	what, why, next := v.Explain()
	assert.NotEmpty(t, what)
	assert.NotEmpty(t, why)
	assert.NotEmpty(t, next)
	return v.Problem
}

func TestAppendListVerify(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "receipts")
	l := mustOpen(t, dir)
	assert.Equal(t, uint64(0), l.Head().Count)
	_, err := VerifyDir(dir)
	require.NoError(t, err, "an empty log verifies")

	first, err := l.Append("lifecycle", map[string]string{"operation": "up"})
	require.NoError(t, err)
	second, err := l.Append("fault", json.RawMessage(`{ "seed" : 42 }`))
	require.NoError(t, err)
	assert.Equal(t, zero, first.Previous)
	assert.Equal(t, first.Hash, second.Previous)
	assert.Equal(t, uint64(2), second.Sequence)
	assert.True(t, second.At.Equal(clock()))

	head, err := VerifyDir(dir)
	require.NoError(t, err)
	assert.Equal(t, l.Head(), head)
	assert.Equal(t, second.Hash, head.Hash)

	all, at, err := l.List(0)
	require.NoError(t, err)
	assert.Equal(t, head, at)
	require.Len(t, all, 2)
	assert.Equal(t, first, all[0])
	assert.JSONEq(t, `{"seed":42}`, string(all[1].Body))
	later, _, err := l.List(1)
	require.NoError(t, err)
	assert.Equal(t, all[1:], later)
	none, _, err := l.List(2)
	require.NoError(t, err)
	assert.Empty(t, none)

	require.NoError(t, l.Close())
	_, err = l.Append("late", nil)
	require.ErrorIs(t, err, os.ErrClosed)

	again := mustOpen(t, dir)
	third, err := again.Append("lifecycle", nil)
	require.NoError(t, err)
	assert.Equal(t, second.Hash, third.Previous, "the chain goes on")
	_, err = VerifyDir(dir)
	require.NoError(t, err)

	for name, mode := range map[string]os.FileMode{keyName: 0o600, headName: 0o600, logName: 0o600} {
		info, err := os.Stat(filepath.Join(dir, name))
		require.NoError(t, err)
		assert.Equal(t, mode, info.Mode().Perm(), name)
	}
}

func TestAppendInParallel(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "receipts")
	l := mustOpen(t, dir)
	var group sync.WaitGroup
	for i := range 20 {
		group.Go(func() {
			_, err := l.Append("fault", i)
			assert.NoError(t, err)
			_, _, err = l.List(0)
			assert.NoError(t, err)
		})
	}
	group.Wait()
	head, err := VerifyDir(dir)
	require.NoError(t, err)
	assert.Equal(t, uint64(20), head.Count)
}

func TestAppendRefuses(t *testing.T) {
	l := mustOpen(t, filepath.Join(t.TempDir(), "receipts"))
	for name, try := range map[string]func() error{
		"no kind":   func() error { _, err := l.Append("", 1); return err },
		"no JSON":   func() error { _, err := l.Append("x", func() {}); return err },
		"too large": func() error { _, err := l.Append("x", strings.Repeat("a", MaxBody)); return err },
	} {
		var e *Error
		require.ErrorAs(t, try(), &e, name)
		_, why, next := e.Explain()
		assert.NotEmpty(t, why)
		assert.NotEmpty(t, next)
	}
	largest, err := l.Append("x", strings.Repeat("a", MaxBody-2))
	require.NoError(t, err)
	all, _, err := l.List(0)
	require.NoError(t, err)
	assert.Equal(t, []Receipt{largest}, all)
}

func splitLines(log []byte) [][]byte {
	return bytes.SplitAfter(bytes.TrimSuffix(log, nil), []byte("\n"))
}

func TestVerifyFinds(t *testing.T) {
	_, log, head, key := written(t, 5)
	_, foreignLog, foreignHead, foreignKey := written(t, 5)
	line := splitLines(log)[:5]
	join := func(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
	early := head
	early.Count = 3
	older, _, olderHead, olderKey := written(t, 2)
	_ = older

	for name, c := range map[string]struct {
		log  []byte
		head Head
		key  ed25519.PublicKey
		line uint64
		want Problem
	}{
		"dropped line":         {join(line[0], line[1], line[3], line[4]), head, key, 3, WrongSequence},
		"first line dropped":   {join(line[1:]...), head, key, 1, WrongSequence},
		"swapped lines":        {join(line[0], line[2], line[1], line[3], line[4]), head, key, 2, WrongSequence},
		"doubled line":         {join(line[0], line[0], line[1], line[2], line[3], line[4]), head, key, 2, WrongSequence},
		"cut-off tail":         {join(line[:4]...), head, key, 0, CutOff},
		"nothing left":         {nil, head, key, 0, CutOff},
		"torn last line":       {log[:len(log)-7], head, key, 5, Torn},
		"last newline gone":    {log[:len(log)-1], head, key, 5, Torn},
		"more than the head":   {join(log, line[4]), head, key, 6, Ahead},
		"head counts less":     {log, early, key, 0, WrongSignature},
		"empty line":           {join(line[0], []byte("\n"), line[1]), head, key, 2, Malformed},
		"no JSON":              {join(line[0], []byte("what\n")), head, key, 2, Malformed},
		"blanks":               {bytes.Replace(log, []byte(`,"hash"`), []byte(`, "hash"`), 1), head, key, 1, Malformed},
		"endless line":         {bytes.Repeat([]byte("x"), 3*maxLine), head, key, 1, Malformed},
		"foreign log":          {foreignLog, head, key, 1, WrongSignature},
		"foreign head":         {log, foreignHead, key, 0, ForeignKey},
		"foreign key":          {log, head, foreignKey, 0, ForeignKey},
		"no key":               {log, head, nil, 0, ForeignKey},
		"another's whole":      {foreignLog, foreignHead, key, 0, ForeignKey},
		"another head's claim": {log, olderHead, olderKey, 1, WrongSignature},
		"head of nothing":      {log, Head{}, key, 0, Newer},
	} {
		t.Run(name, func(t *testing.T) {
			err := Verify(bytes.NewReader(c.log), c.head, c.key)
			assert.Equal(t, c.want, problem(t, err), "%v", err)
			var v *VerifyError
			require.ErrorAs(t, err, &v)
			assert.Equal(t, c.line, v.Line, "%v", err)
		})
	}
	require.NoError(t, Verify(bytes.NewReader(log), head, key))
	require.NoError(t, Verify(iotest.OneByteReader(bytes.NewReader(log)), head, key))
	assert.Equal(t, Unreadable, problem(t, Verify(iotest.ErrReader(io.ErrUnexpectedEOF), head, key)))
}

// A holder of the key can't make two histories with one head, nor pass a
// receipt of one Environment off as another's.
func TestVerifyFindsForks(t *testing.T) {
	dir, log, head, key := written(t, 3)
	private, err := loadKey(filepath.Join(dir, keyName), false)
	require.NoError(t, err)
	var second Receipt
	second, err = decode(2, splitLines(log)[1], environment, key)
	require.NoError(t, err)

	forged := second
	forged.Body = json.RawMessage(`{"step":"forged"}`)
	text, err := encode(&forged, private)
	require.NoError(t, err)
	lines := splitLines(log)
	assert.Equal(t, WrongPrevious, problem(t, Verify(bytes.NewReader(bytes.Join([][]byte{lines[0], text, lines[2]}, nil)), head, key)))
	short := newHead(environment, 2, second.Hash, private)
	assert.Equal(t, WrongHead, problem(t, Verify(bytes.NewReader(bytes.Join([][]byte{lines[0], text}, nil)), short, key)))

	other := second
	other.EnvironmentID = "env_01kbcdefghjkmnpqrstvwxyz02"
	text, err = encode(&other, private)
	require.NoError(t, err)
	assert.Equal(t, WrongEnvironment, problem(t, Verify(bytes.NewReader(bytes.Join([][]byte{lines[0], text}, nil)), head, key)))

	newer := second
	newer.Version = 2
	text, err = encode(&newer, private)
	require.NoError(t, err)
	assert.Equal(t, Newer, problem(t, Verify(bytes.NewReader(bytes.Join([][]byte{lines[0], text}, nil)), head, key)))
}

// Every bit of the log and of the head counts.
func TestVerifyFindsEveryFlippedBit(t *testing.T) {
	_, log, head, key := written(t, 2)
	for i := range log {
		for bit := range 8 {
			log[i] ^= 1 << bit
			if Verify(bytes.NewReader(log), head, key) == nil {
				t.Errorf("bit %d of byte %d (%q) does not count", bit, i, log[i])
			}
			log[i] ^= 1 << bit
		}
	}
	for name, change := range map[string]func(h *Head){
		"environment": func(h *Head) { h.EnvironmentID = "env_01kbcdefghjkmnpqrstvwxyz02" },
		"count":       func(h *Head) { h.Count++ },
		"hash":        func(h *Head) { h.Hash = zero },
		"key":         func(h *Head) { h.PublicKey = "" },
		"signature":   func(h *Head) { h.Signature = strings.Replace(h.Signature, "=", "", 1) },
		"version":     func(h *Head) { h.Version = 2 },
	} {
		changed := head
		change(&changed)
		assert.Error(t, Verify(bytes.NewReader(log), changed, key), name)
	}
	require.NoError(t, Verify(bytes.NewReader(log), head, key))
}

// What each crash leaves, and what somebody does that no crash leaves.
func TestOpenRecovers(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(t *testing.T, dir string, log []byte, earlier Head)
		count uint64  // afterwards
		kind  string  // of the last receipt
		want  Problem // refused with
	}{
		"nothing happened":           {func(*testing.T, string, []byte, Head) {}, 3, "lifecycle", ""},
		"crash before the head":      {func(t *testing.T, dir string, _ []byte, h Head) { writeHead(t, dir, h) }, 3, "lifecycle", ""},
		"crash in the line":          {func(t *testing.T, dir string, log []byte, h Head) { writeHead(t, dir, h); cut(t, dir, log, 9) }, 3, KindRecovered, ""},
		"crash before its newline":   {func(t *testing.T, dir string, log []byte, h Head) { writeHead(t, dir, h); cut(t, dir, log, 1) }, 3, KindRecovered, ""},
		"torn line after the head":   {func(t *testing.T, dir string, log []byte, _ Head) { add(t, dir, `{"receipt":{"ver`) }, 4, KindRecovered, ""},
		"blocks of zeros":            {func(t *testing.T, dir string, log []byte, _ Head) { add(t, dir, strings.Repeat("\x00", 9000)+"\n") }, 4, KindRecovered, ""},
		"one ahead, and a torn one":  {func(t *testing.T, dir string, _ []byte, h Head) { writeHead(t, dir, h); add(t, dir, "{") }, 4, KindRecovered, ""},
		"forged line after the head": {func(t *testing.T, dir string, log []byte, _ Head) { add(t, dir, string(splitLines(log)[0])) }, 4, KindRecovered, ""},
		"half-written new head":      {func(t *testing.T, dir string, _ []byte, _ Head) { write(t, dir, headName+".new", "{") }, 3, "lifecycle", ""},
		"public key missing":         {func(t *testing.T, dir string, _ []byte, _ Head) { remove(t, dir, publicName) }, 3, "lifecycle", ""},

		"promised line torn": {func(t *testing.T, dir string, log []byte, _ Head) { cut(t, dir, log, 9) }, 0, "", Torn},
		"promised line gone": {func(t *testing.T, dir string, log []byte, _ Head) { cut(t, dir, log, len(splitLines(log)[2])) }, 0, "", CutOff},
		"promised bit flipped": {func(t *testing.T, dir string, log []byte, _ Head) {
			log[bytes.Index(log, []byte("lifecycle"))] ^= 1
			write(t, dir, logName, string(log))
		}, 0, "", WrongHash},
		"head set back by two": {func(t *testing.T, dir string, log []byte, _ Head) {
			key, err := loadKey(filepath.Join(dir, keyName), false)
			require.NoError(t, err)
			first, err := decode(1, splitLines(log)[0], environment, key.Public().(ed25519.PublicKey))
			require.NoError(t, err)
			writeHead(t, dir, newHead(environment, 1, first.Hash, key))
		}, 0, "", Ahead},
		"head unsigned": {func(t *testing.T, dir string, _ []byte, h Head) { h.Count--; writeHead(t, dir, h) }, 0, "", WrongSignature},
		"head of another Environment": {func(t *testing.T, dir string, _ []byte, h Head) {
			key, err := loadKey(filepath.Join(dir, keyName), false)
			require.NoError(t, err)
			writeHead(t, dir, newHead("env_01kbcdefghjkmnpqrstvwxyz02", 3, h.Hash, key))
		}, 0, "", WrongEnvironment},
		"foreign key": {func(t *testing.T, dir string, _ []byte, _ Head) {
			require.NoError(t, os.Remove(filepath.Join(dir, keyName)))
			_, err := makeKey(filepath.Join(dir, keyName))
			require.NoError(t, err)
		}, 0, "", ForeignKey},
		"foreign public key": {func(t *testing.T, dir string, _ []byte, _ Head) {
			other, _, _, _ := written(t, 0)
			text, err := os.ReadFile(filepath.Join(other, publicName))
			require.NoError(t, err)
			write(t, dir, publicName, string(text))
		}, 0, "", ForeignKey},
		"head gone": {func(t *testing.T, dir string, _ []byte, _ Head) { remove(t, dir, headName) }, 0, "", "error"},
		"head torn": {func(t *testing.T, dir string, _ []byte, _ Head) { write(t, dir, headName, "{") }, 0, "", "error"},
		"key gone":  {func(t *testing.T, dir string, _ []byte, _ Head) { remove(t, dir, keyName) }, 0, "", "error"},
		"log gone":  {func(t *testing.T, dir string, _ []byte, _ Head) { remove(t, dir, logName) }, 0, "", "error"},
		"key for everyone": {func(t *testing.T, dir string, _ []byte, _ Head) {
			require.NoError(t, os.Chmod(filepath.Join(dir, keyName), 0o644))
		}, 0, "", "error"},
		"key is none": {func(t *testing.T, dir string, _ []byte, _ Head) { write(t, dir, keyName, "?") }, 0, "", "error"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "receipts")
			l := mustOpen(t, dir)
			var earlier Head
			for i := range 3 {
				earlier = l.Head()
				_, err := l.Append("lifecycle", map[string]int{"step": i})
				require.NoError(t, err)
			}
			require.NoError(t, l.Close())
			log, err := os.ReadFile(filepath.Join(dir, logName))
			require.NoError(t, err)
			c.spoil(t, dir, log, earlier)
			spoilt, _ := os.ReadFile(filepath.Join(dir, logName))

			again, err := open(dir, environment, clock)
			if c.want != "" {
				require.Error(t, err)
				var e *Error
				require.ErrorAs(t, err, &e)
				assert.NotEmpty(t, e.Next)
				if c.want != "error" {
					assert.Equal(t, c.want, problem(t, err), "%v", err)
				}
				kept, _ := os.ReadFile(filepath.Join(dir, logName))
				assert.Equal(t, spoilt, kept, "evidence that is not whole is left as it was found")
				return
			}
			require.NoError(t, err)
			defer again.Close()
			assert.Equal(t, c.count, again.Head().Count)
			all, _, err := again.List(0)
			require.NoError(t, err)
			assert.Equal(t, c.kind, all[len(all)-1].Kind)
			_, err = again.Append("lifecycle", "goes on")
			require.NoError(t, err)
			head, err := VerifyDir(dir)
			require.NoError(t, err)
			assert.Equal(t, c.count+1, head.Count)
		})
	}
}

// A crash while the log is made leaves a key, or a key and a head.
func TestOpenAfterACrashAtTheBeginning(t *testing.T) {
	for _, left := range []int{1, 2} {
		dir, _, _, key := written(t, 0)
		remove(t, dir, logName)
		if left == 1 {
			remove(t, dir, headName)
			remove(t, dir, publicName)
		}
		l := mustOpen(t, dir)
		assert.Equal(t, key, l.Public(), "the key is made once")
		_, err := l.Append("lifecycle", nil)
		require.NoError(t, err)
		_, err = VerifyDir(dir)
		require.NoError(t, err)
	}
}

// A head that can't be written takes the receipt back with it.
func TestAppendTakesBack(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "receipts")
	l := mustOpen(t, dir)
	_, err := l.Append("lifecycle", 1)
	require.NoError(t, err)
	before := l.Head()
	// A directory in the way of the head's replacement, as a full disk would be.
	blocked := filepath.Join(dir, headName+".new")
	require.NoError(t, os.MkdirAll(filepath.Join(blocked, "x"), 0o700))
	_, err = l.Append("lifecycle", 2)
	require.Error(t, err)
	assert.Equal(t, before, l.Head())
	all, _, err := l.List(0)
	require.NoError(t, err)
	assert.Len(t, all, 1)
	require.NoError(t, os.RemoveAll(blocked))
	_, err = l.Append("lifecycle", 3)
	require.NoError(t, err, "the next one goes through")
	_, err = VerifyDir(dir)
	require.NoError(t, err)

	// If the head can neither be written nor set back, only Open can tell.
	before = l.Head()
	require.NoError(t, os.MkdirAll(filepath.Join(blocked, "x"), 0o700))
	remove(t, dir, headName)
	_, err = l.Append("lifecycle", 4)
	require.Error(t, err)
	_, err = l.Append("lifecycle", 5)
	require.ErrorContains(t, err, "could not be undone")
	require.NoError(t, os.RemoveAll(blocked))
	writeHead(t, dir, before)
	require.NoError(t, l.Close())
	again := mustOpen(t, dir)
	assert.Equal(t, before, again.Head())
}

func write(t *testing.T, dir, name, text string) {
	t.Helper()
	require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
}

func remove(t *testing.T, dir, name string) {
	t.Helper()
	require.NoError(t, os.Remove(filepath.Join(dir, name)))
}

func add(t *testing.T, dir, text string) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, logName), os.O_APPEND|os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = f.WriteString(text)
	require.NoError(t, errors.Join(err, f.Close()))
}

func cut(t *testing.T, dir string, log []byte, n int) {
	t.Helper()
	write(t, dir, logName, string(log[:len(log)-n]))
}

func writeHead(t *testing.T, dir string, h Head) {
	t.Helper()
	text, err := json.Marshal(h)
	require.NoError(t, err)
	write(t, dir, headName, string(text))
}

// Verify never panics, and accepts nothing but what was written.
func FuzzVerify(f *testing.F) {
	dir := filepath.Join(f.TempDir(), "receipts")
	l, err := open(dir, environment, clock)
	require.NoError(f, err)
	for i := range 3 {
		_, err := l.Append("fault", map[string]int{"seed": i})
		require.NoError(f, err)
	}
	require.NoError(f, l.Close())
	log, err := os.ReadFile(filepath.Join(dir, logName))
	require.NoError(f, err)
	head, err := json.Marshal(l.Head())
	require.NoError(f, err)
	f.Add(log, head)
	f.Add(log[:len(log)-1], head)
	f.Add([]byte(nil), head)
	f.Add([]byte(`{"receipt":{},"hash":"","signature":""}`+"\n"), []byte(`{"version":1}`))
	f.Add([]byte(fmt.Sprintf(`{"receipt":null,"hash":%q,"signature":"=="}`+"\n", zero)), head)
	f.Fuzz(func(t *testing.T, text, headText []byte) {
		var h Head
		if json.Unmarshal(headText, &h) != nil {
			return
		}
		if Verify(bytes.NewReader(text), h, l.Public()) == nil {
			assert.Equal(t, log, text)
			assert.Equal(t, l.Head(), h)
		}
	})
}
