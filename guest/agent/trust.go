//go:build linux

package agent

import (
	"bytes"
	"crypto/sha1"
	"crypto/x509"
	"encoding/asn1"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"

	"vz.test/vz/guest/wire"
)

const (
	// authorityPath has the Environment's authority alone. /run is always
	// writable.
	authorityPath = "/run/vz/ca.pem"
	debianBundle  = "/etc/ssl/certs/ca-certificates.crt"
	blockBegin    = "# vz: the Environment's certificate authority\n"
	blockEnd      = "# vz: end\n"
)

var (
	// bundles are where TLS libraries look, whoever made the image; one that is
	// a link to another finds it done already.
	bundles = []string{debianBundle, "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"}
	// hashed are directories that OpenSSL looks up by a name's hash.
	hashed = []string{"/etc/ssl/certs", "/etc/pki/tls/certs"}
	// anchors are what the distributions' own tools make their bundles from, so
	// that the authority outlives a run of update-ca-certificates.
	anchors = []string{"/usr/local/share/ca-certificates/vz.crt", "/etc/pki/ca-trust/source/anchors/vz.pem"}
)

// trust installs the authority wherever programs look for one. It is
// idempotent, and another authority takes the place of an earlier one. Notes
// name what could not be done; an error says that there is no authority in
// what was given, or no place for it at all.
func (r root) trust(authority []byte) (notes []*wire.Note, err error) {
	certificates, err := parseCertificates(authority)
	if err != nil {
		return nil, err
	}
	if err := r.write(authorityPath, authority); err != nil {
		return nil, err
	}
	note := func(place string, err error) {
		if err != nil {
			notes = append(notes, &wire.Note{Capability: "ca", Reason: fmt.Sprintf("%s: %v", place, err)})
		}
	}
	block := blockBegin + strings.TrimRight(string(authority), "\n") + "\n" + blockEnd
	found := false
	for _, bundle := range bundles {
		content, err := os.ReadFile(r.path(bundle))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		found = true
		if err == nil {
			err = r.write(bundle, withBlock(content, block))
		}
		note(bundle, err)
	}
	if !found {
		note(debianBundle, r.write(debianBundle, []byte(block)))
	}
	for _, dir := range hashed {
		if info, err := os.Stat(r.path(dir)); err == nil && info.IsDir() {
			note(dir, r.link(dir, authority, certificates))
		}
	}
	for _, anchor := range anchors {
		if info, err := os.Stat(r.path(path.Dir(anchor))); err == nil && info.IsDir() {
			note(anchor, r.write(anchor, authority))
		}
	}
	return notes, nil
}

func parseCertificates(authority []byte) ([]*x509.Certificate, error) {
	var certificates []*x509.Certificate
	for rest := authority; ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("the certificate authority has a %s in it", block.Type)
		}
		certificate, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("the certificate authority: %w", err)
		}
		certificates = append(certificates, certificate)
	}
	if len(certificates) == 0 {
		return nil, errors.New("the certificate authority has no certificate in it")
	}
	return certificates, nil
}

// withBlock puts block at the end of content, in place of an earlier one.
// Readers of PEM skip what stands between certificates.
func withBlock(content []byte, block string) []byte {
	if begin := bytes.Index(content, []byte(blockBegin)); begin >= 0 {
		if n := bytes.Index(content[begin:], []byte(blockEnd)); n >= 0 {
			content = append(content[:begin:begin], content[begin+n+len(blockEnd):]...)
		}
	}
	if len(content) > 0 && content[len(content)-1] != '\n' {
		content = append(content[:len(content):len(content)], '\n')
	}
	return append(content[:len(content):len(content)], block...)
}

// link puts the authority into a directory in the way of c_rehash(1): a file,
// and for each name in it a link HASH.n, n being the first that is free.
func (r root) link(dir string, authority []byte, certificates []*x509.Certificate) error {
	const name = "vz-ca.pem"
	if err := r.write(path.Join(dir, name), authority); err != nil {
		return err
	}
	entries, err := os.ReadDir(r.path(dir))
	if err != nil {
		return err
	}
	for _, entry := range entries { // an earlier authority's, or these
		if entry.Type() != fs.ModeSymlink {
			continue
		}
		link := r.path(path.Join(dir, entry.Name()))
		if target, err := os.Readlink(link); err == nil && target == name {
			if err := os.Remove(link); err != nil {
				return err
			}
		}
	}
	for _, certificate := range certificates {
		hash, err := nameHash(certificate.RawSubject)
		if err != nil {
			return err
		}
		for n := 0; ; n++ {
			err := os.Symlink(name, r.path(path.Join(dir, fmt.Sprintf("%08x.%d", hash, n))))
			if errors.Is(err, fs.ErrExist) {
				continue
			}
			if err != nil {
				return err
			}
			break
		}
	}
	return nil
}

type attribute struct {
	Type  asn1.ObjectIdentifier
	Value asn1.RawValue
}

// attributeSET is a relative distinguished name; encoding/asn1 goes by the
// suffix, and sorts when it writes.
type attributeSET []attribute

// nameHash is OpenSSL's X509_NAME_hash of a DER-encoded name: the first four
// bytes, little-endian, of the SHA-1 of its canonical form. That is the
// sequence's content (without its header), with each text a UTF8String in
// lower case whose runs of spaces are one and whose ends are trimmed.
func nameHash(name []byte) (uint32, error) {
	var sets []attributeSET
	if rest, err := asn1.Unmarshal(name, &sets); err != nil {
		return 0, fmt.Errorf("certificate name: %w", err)
	} else if len(rest) > 0 {
		return 0, errors.New("certificate name: trailing bytes")
	}
	var canonical []byte
	for _, set := range sets {
		for i := range set {
			value := &set[i].Value
			if value.Class != asn1.ClassUniversal {
				continue
			}
			switch value.Tag {
			case asn1.TagUTF8String, asn1.TagPrintableString, asn1.TagIA5String, 26: // VisibleString
				*value = asn1.RawValue{Tag: asn1.TagUTF8String, Bytes: canonicalText(value.Bytes)}
			case asn1.TagT61String, asn1.TagBMPString, 28: // UniversalString: none is made these days
				return 0, fmt.Errorf("certificate name: text of ASN.1 type %d", value.Tag)
			}
		}
		encoded, err := asn1.Marshal(set)
		if err != nil {
			return 0, fmt.Errorf("certificate name: %w", err)
		}
		canonical = append(canonical, encoded...)
	}
	sum := sha1.Sum(canonical)
	return binary.LittleEndian.Uint32(sum[:]), nil
}

// canonicalText knows ASCII only, as OpenSSL does.
func canonicalText(text []byte) []byte {
	space := func(r rune) bool { return r == ' ' || r >= '\t' && r <= '\r' }
	joined := bytes.Join(bytes.FieldsFunc(text, space), []byte(" "))
	for i, b := range joined {
		if b >= 'A' && b <= 'Z' {
			joined[i] = b + 'a' - 'A'
		}
	}
	return joined
}
