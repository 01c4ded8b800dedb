package ingress

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"vz.test/vz/internal/durable"
)

const (
	caFile  = "ca.pem"
	keyFile = "ca-key.pem"

	// caValidity bounds what a key that got out is good for. The CA is made
	// anew at a load within the last caRenewal of it: that is when the
	// supervisor starts, and with it every Machine that is to trust the new one.
	caValidity = 365 * 24 * time.Hour
	caRenewal  = 30 * 24 * time.Hour

	leafValidity = 24 * time.Hour
	leafRenewal  = 8 * time.Hour // what a leaf has left when another takes its place

	// backdate is for the peer whose clock is behind: a VM that has slept.
	backdate = time.Hour
)

// A CA is an Environment's own certificate authority. It signs for names under
// test and for nothing else: its name constraints are critical, and leave no
// address, e-mail or URI name. Safe for concurrent use.
type CA struct {
	path string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
	now  func() time.Time

	mu     sync.Mutex
	leaves map[string]*leaf // by host; only declared hosts are ever asked for
}

// leaf is one host's certificate. Its lock is held while it is issued, so that
// a burst of handshakes makes one.
type leaf struct {
	mu   sync.Mutex
	cert *tls.Certificate
}

// A CAError says that what is kept of a CA can't be used. Nothing is put in its
// place silently: there may be Machines and browsers that trust the one that was.
type CAError struct {
	Path    string
	Problem string
	Err     error // may be nil
}

func (e *CAError) Error() string {
	text := "ingress: " + e.Path + ": " + e.Problem
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return fmt.Sprintf("%s; to have a new CA made, remove %s and %s beside it", text, caFile, keyFile)
}

func (e *CAError) Unwrap() error { return e.Err }

// LoadOrCreateCA reads dir/ca.pem and dir/ca-key.pem, or makes both, mode 0600,
// dir too. environment names the Environment to people. The caller sees to it
// that there is one at a time for a directory.
func LoadOrCreateCA(dir, environment string) (*CA, error) {
	return loadOrCreateCA(dir, environment, time.Now)
}

func loadOrCreateCA(dir, environment string, now func() time.Time) (*CA, error) {
	ca, err := loadCA(dir, now)
	// The certificate is written last: without it, nobody was ever given it.
	if errors.Is(err, errNoCA) || err == nil && now().After(ca.cert.NotAfter.Add(-caRenewal)) {
		if err := createCA(dir, environment, now()); err != nil {
			return nil, fmt.Errorf("ingress: making a CA in %s: %w", dir, err)
		}
		return loadCA(dir, now)
	}
	return ca, err
}

var errNoCA = errors.New("no CA yet")

func loadCA(dir string, now func() time.Time) (*CA, error) {
	path := filepath.Join(dir, caFile)
	text, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, errNoCA
	case err != nil:
		return nil, &CAError{path, "cannot be read", err}
	}
	block, rest := pem.Decode(text)
	if block == nil || block.Type != "CERTIFICATE" || len(bytes.TrimSpace(rest)) > 0 {
		return nil, &CAError{path, "is not one PEM certificate", nil}
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, &CAError{path, "is not a certificate", err}
	}
	if !cert.IsCA || !cert.PermittedDNSDomainsCritical || !slices.Equal(cert.PermittedDNSDomains, []string{"test"}) {
		return nil, &CAError{path, "is not a CA that vz made: it is not constrained to names under test", nil}
	}

	keyPath := filepath.Join(dir, keyFile)
	info, err := os.Stat(keyPath)
	if err != nil {
		return nil, &CAError{keyPath, "cannot be read", err}
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, &CAError{keyPath, fmt.Sprintf("has mode %04o, and others could have read it", info.Mode().Perm()), nil}
	}
	keyText, err := os.ReadFile(keyPath)
	if err != nil {
		return nil, &CAError{keyPath, "cannot be read", err}
	}
	block, _ = pem.Decode(keyText)
	if block == nil || block.Type != "PRIVATE KEY" {
		return nil, &CAError{keyPath, "is not a PEM private key", nil}
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, &CAError{keyPath, "is not a private key", err}
	}
	key, ok := parsed.(*ecdsa.PrivateKey)
	if !ok || !key.PublicKey.Equal(cert.PublicKey) {
		return nil, &CAError{keyPath, "is not the key of the certificate", nil}
	}
	return &CA{path: path, cert: cert, key: key, pem: text, now: now, leaves: map[string]*leaf{}}, nil
}

func createCA(dir, environment string, now time.Time) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	// Nobody agrees on how to write "every e-mail name" or "every URI name":
	// the empty constraint matches all in Go and NSS, none in OpenSSL, and Java
	// refuses the certificate. So what is permitted is .invalid (RFC 6761), and
	// that is excluded again.
	nowhere, noneOfIt := []string{".invalid"}, []string{".invalid", "invalid"}
	template := &x509.Certificate{
		SerialNumber:          serial(),
		Subject:               pkix.Name{Organization: []string{"vz"}, CommonName: commonName("vz Environment " + environment)},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(caValidity),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true,

		PermittedDNSDomainsCritical: true, // that of the whole extension
		PermittedDNSDomains:         []string{"test"},
		ExcludedIPRanges: []*net.IPNet{
			{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)},
			{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)},
		},
		PermittedEmailAddresses: nowhere, ExcludedEmailAddresses: noneOfIt,
		PermittedURIDomains: nowhere, ExcludedURIDomains: noneOfIt,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := durable.Replace(filepath.Join(dir, keyFile), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}), 0o600); err != nil {
		return err
	}
	return durable.Replace(filepath.Join(dir, caFile), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600)
}

// Path of the certificate, PEM.
func (c *CA) Path() string { return c.path }

// PEM is the certificate, for those who are to trust it.
func (c *CA) PEM() []byte { return bytes.Clone(c.pem) }

// Certificate is the CA's own. The caller must not change it.
func (c *CA) Certificate() *x509.Certificate { return c.cert }

// leaf is a certificate for host that is valid now, for a while yet.
func (c *CA) leaf(host string) (*tls.Certificate, error) {
	c.mu.Lock()
	l := c.leaves[host]
	if l == nil {
		l = &leaf{}
		c.leaves[host] = l
	}
	c.mu.Unlock()

	l.mu.Lock()
	defer l.mu.Unlock()
	now := c.now()
	if l.cert == nil || now.Before(l.cert.Leaf.NotBefore) || now.After(l.cert.Leaf.NotAfter.Add(-leafRenewal)) {
		cert, err := c.issue(host, now)
		if err != nil {
			return nil, fmt.Errorf("ingress: certificate of %s: %w", host, err)
		}
		l.cert = cert
	}
	return l.cert, nil
}

// forget drops the leaves of all hosts but those that are kept.
func (c *CA) forget(kept func(host string) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for host := range c.leaves {
		if !kept(host) {
			delete(c.leaves, host)
		}
	}
}

func (c *CA) issue(host string, now time.Time) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial(),
		Subject:      pkix.Name{Organization: []string{"vz"}, CommonName: commonName(host)},
		DNSNames:     []string{host},
		NotBefore:    now.Add(-backdate),
		NotAfter:     now.Add(leafValidity),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},

		BasicConstraintsValid: true,
	}
	return c.sign(template, key)
}

func (c *CA) sign(template *x509.Certificate, key crypto.Signer) (*tls.Certificate, error) {
	der, err := x509.CreateCertificate(rand.Reader, template, c.cert, key.Public(), c.key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: cert}, nil
}

// serial is 128 random bits, the first of them 0 and the second 1: positive,
// and of one length.
func serial() *big.Int {
	var b [16]byte
	rand.Read(b[:]) // never fails
	b[0] = b[0]&0x3f | 0x40
	return new(big.Int).SetBytes(b[:])
}

// commonName cuts to the 64 characters that X.520 allows.
func commonName(s string) string {
	if len(s) <= 64 {
		return s
	}
	return strings.ToValidUTF8(s[:64], "")
}
