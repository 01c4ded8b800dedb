package ingress

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// clock is set by hand.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time { c.mu.Lock(); defer c.mu.Unlock(); return c.now }

func (c *clock) Add(d time.Duration) { c.mu.Lock(); defer c.mu.Unlock(); c.now = c.now.Add(d) }

func TestCAIsMadeOnce(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ingress")
	made, err := LoadOrCreateCA(dir, "shop")
	require.NoError(t, err)
	loaded, err := LoadOrCreateCA(dir, "another name")
	require.NoError(t, err)
	assert.Equal(t, made.PEM(), loaded.PEM())
	assert.Equal(t, filepath.Join(dir, "ca.pem"), made.Path())

	cert := made.Certificate()
	assert.Equal(t, "CN=vz Environment shop,O=vz", cert.Subject.String())
	assert.Equal(t, elliptic.P256(), cert.PublicKey.(*ecdsa.PublicKey).Curve)
	assert.True(t, cert.IsCA)
	assert.True(t, cert.MaxPathLenZero)
	assert.Equal(t, x509.KeyUsageCertSign|x509.KeyUsageCRLSign, cert.KeyUsage)
	assert.True(t, cert.PermittedDNSDomainsCritical)
	assert.Equal(t, []string{"test"}, cert.PermittedDNSDomains)
	assert.Len(t, cert.ExcludedIPRanges, 2)

	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, files, 2, "nothing is left of the writing")
	for _, f := range files {
		info, err := f.Info()
		require.NoError(t, err)
		assert.EqualValues(t, 0o600, info.Mode().Perm(), f.Name())
	}
}

func TestCAIsRenewedAtALoadNearItsEnd(t *testing.T) {
	dir := t.TempDir()
	c := &clock{now: time.Now()}
	first, err := loadOrCreateCA(dir, "shop", c.Now)
	require.NoError(t, err)
	c.Add(caValidity - caRenewal - time.Minute)
	second, err := loadOrCreateCA(dir, "shop", c.Now)
	require.NoError(t, err)
	assert.Equal(t, first.PEM(), second.PEM())
	c.Add(2 * time.Minute)
	third, err := loadOrCreateCA(dir, "shop", c.Now)
	require.NoError(t, err)
	assert.NotEqual(t, first.PEM(), third.PEM())
}

func TestCASpoilt(t *testing.T) {
	other := t.TempDir()
	_, err := LoadOrCreateCA(other, "other")
	require.NoError(t, err)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{SerialNumber: serial(), IsCA: true, BasicConstraintsValid: true, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	unconstrained := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})

	for _, test := range []struct {
		name  string
		spoil func(t *testing.T, cert, key string)
		want  string
	}{
		{"empty certificate", func(t *testing.T, cert, key string) { require.NoError(t, os.Truncate(cert, 0)) }, "is not one PEM certificate"},
		{"cut certificate", func(t *testing.T, cert, key string) { require.NoError(t, os.Truncate(cert, 100)) }, "is not one PEM certificate"},
		{"no DER", func(t *testing.T, cert, key string) {
			require.NoError(t, os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("x")}), 0o600))
		}, "is not a certificate"},
		{"unconstrained", func(t *testing.T, cert, key string) { require.NoError(t, os.WriteFile(cert, unconstrained, 0o600)) }, "not constrained"},
		{"key gone", func(t *testing.T, cert, key string) { require.NoError(t, os.Remove(key)) }, "cannot be read"},
		{"key cut", func(t *testing.T, cert, key string) { require.NoError(t, os.Truncate(key, 50)) }, "is not a PEM private key"},
		{"key of another", func(t *testing.T, cert, key string) {
			text, err := os.ReadFile(filepath.Join(other, keyFile))
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(key, text, 0o600))
		}, "is not the key of the certificate"},
		{"key readable by others", func(t *testing.T, cert, key string) { require.NoError(t, os.Chmod(key, 0o644)) }, "has mode 0644"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			_, err := LoadOrCreateCA(dir, "shop")
			require.NoError(t, err)
			test.spoil(t, filepath.Join(dir, caFile), filepath.Join(dir, keyFile))
			_, err = LoadOrCreateCA(dir, "shop")
			var typed *CAError
			require.ErrorAs(t, err, &typed)
			assert.Contains(t, err.Error(), test.want)
			assert.Contains(t, err.Error(), dir)
			assert.Contains(t, err.Error(), "remove ca.pem and ca-key.pem")
		})
	}
	t.Run("killed between the two files", func(t *testing.T) {
		dir := t.TempDir()
		_, err := LoadOrCreateCA(dir, "shop")
		require.NoError(t, err)
		require.NoError(t, os.Remove(filepath.Join(dir, caFile)))
		_, err = LoadOrCreateCA(dir, "shop")
		assert.NoError(t, err)
	})
}

// What the constraints let pass, by Go's verifier and by OpenSSL's.
func TestNameConstraints(t *testing.T) {
	dir := t.TempDir()
	ca, err := LoadOrCreateCA(dir, "shop")
	require.NoError(t, err)
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(ca.PEM()))
	uri := func(s string) []*url.URL {
		u, err := url.Parse(s)
		require.NoError(t, err)
		return []*url.URL{u}
	}
	for _, test := range []struct {
		name     string
		template x509.Certificate
		valid    bool
	}{
		{"shop.test", x509.Certificate{DNSNames: []string{"shop.test"}}, true},
		{"deep under test", x509.Certificate{DNSNames: []string{"a.b.shop.test"}}, true},
		{"wildcard under test", x509.Certificate{DNSNames: []string{"*.shop.test"}}, true},
		{"example.com", x509.Certificate{DNSNames: []string{"example.com"}}, false},
		{"a name that ends like test", x509.Certificate{DNSNames: []string{"notatest"}}, false},
		{"one of two", x509.Certificate{DNSNames: []string{"shop.test", "example.com"}}, false},
		{"v4", x509.Certificate{DNSNames: []string{"shop.test"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1).To4()}}, false},
		{"v6", x509.Certificate{DNSNames: []string{"shop.test"}, IPAddresses: []net.IP{net.IPv6loopback}}, false},
		{"e-mail", x509.Certificate{DNSNames: []string{"shop.test"}, EmailAddresses: []string{"me@shop.test"}}, false},
		{"e-mail at the permitted place", x509.Certificate{DNSNames: []string{"shop.test"}, EmailAddresses: []string{"me@x.invalid"}}, false},
		{"URI", x509.Certificate{DNSNames: []string{"shop.test"}, URIs: uri("https://shop.test/")}, false},
		{"URI at the permitted place", x509.Certificate{DNSNames: []string{"shop.test"}, URIs: uri("https://x.invalid/")}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
			require.NoError(t, err)
			template := test.template
			template.SerialNumber, template.NotBefore, template.NotAfter = serial(), time.Now().Add(-time.Minute), time.Now().Add(time.Hour)
			template.Subject = pkix.Name{Organization: []string{"vz"}}
			template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
			leaf, err := ca.sign(&template, key)
			require.NoError(t, err)
			_, err = leaf.Leaf.Verify(x509.VerifyOptions{Roots: roots})
			assert.Equal(t, test.valid, err == nil, "Go: %v", err)

			if _, err := exec.LookPath("openssl"); err != nil {
				t.Skip("openssl is not installed")
			}
			file := filepath.Join(t.TempDir(), "leaf.pem")
			require.NoError(t, os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leaf.Certificate[0]}), 0o600))
			out, err := exec.Command("openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", ca.Path(), file).CombinedOutput()
			assert.Equal(t, test.valid, err == nil, "OpenSSL: %s", out)
		})
	}
}

func TestNoCABelow(t *testing.T) {
	ca, err := LoadOrCreateCA(t.TempDir(), "shop")
	require.NoError(t, err)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	middle, err := ca.sign(&x509.Certificate{SerialNumber: serial(), Subject: pkix.Name{CommonName: "middle"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign}, key)
	require.NoError(t, err)
	below := &CA{cert: middle.Leaf, key: key, now: time.Now, leaves: map[string]*leaf{}}
	leaf, err := below.leaf("shop.test")
	require.NoError(t, err)
	roots, between := x509.NewCertPool(), x509.NewCertPool()
	roots.AddCert(ca.Certificate())
	between.AddCert(middle.Leaf)
	_, err = leaf.Leaf.Verify(x509.VerifyOptions{Roots: roots, Intermediates: between})
	assert.Error(t, err)
}

func TestLeaf(t *testing.T) {
	c := &clock{now: time.Now()}
	ca, err := loadOrCreateCA(t.TempDir(), "shop", c.Now)
	require.NoError(t, err)
	first, err := ca.leaf("shop.test")
	require.NoError(t, err)
	assert.Equal(t, []string{"shop.test"}, first.Leaf.DNSNames)
	assert.Equal(t, x509.KeyUsageDigitalSignature, first.Leaf.KeyUsage)
	assert.Equal(t, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, first.Leaf.ExtKeyUsage)
	assert.False(t, first.Leaf.IsCA)
	assert.Equal(t, ca.cert.SubjectKeyId, first.Leaf.AuthorityKeyId)

	same := func() bool {
		next, err := ca.leaf("shop.test")
		require.NoError(t, err)
		assert.False(t, c.Now().Before(next.Leaf.NotBefore))
		assert.True(t, c.Now().Before(next.Leaf.NotAfter))
		was := first
		first = next
		return next == was
	}
	assert.True(t, same())
	c.Add(leafValidity - leafRenewal - time.Minute)
	assert.True(t, same(), "good for a while yet")
	c.Add(2 * time.Minute)
	assert.False(t, same(), "renewed ahead")
	c.Add(30 * 24 * time.Hour)
	assert.False(t, same(), "the host has slept for a month")
	c.Add(-7 * 24 * time.Hour)
	assert.False(t, same(), "the clock was set back")

	ca.forget(func(host string) bool { return false })
	assert.False(t, same())
}

func TestABurstOfHandshakesMakesOneLeaf(t *testing.T) {
	ca, err := LoadOrCreateCA(t.TempDir(), "shop")
	require.NoError(t, err)
	serials := make([]string, 32)
	var all sync.WaitGroup
	for i := range serials {
		all.Go(func() {
			leaf, err := ca.leaf("shop.test")
			if assert.NoError(t, err) {
				serials[i] = leaf.Leaf.SerialNumber.String()
			}
		})
	}
	all.Wait()
	for _, s := range serials {
		assert.Equal(t, serials[0], s)
	}
}

func TestLongNames(t *testing.T) {
	ca, err := LoadOrCreateCA(t.TempDir(), strings.Repeat("é", 100))
	require.NoError(t, err)
	assert.LessOrEqual(t, len(ca.Certificate().Subject.CommonName), 64)
	host := strings.Repeat(strings.Repeat("a", 60)+".", 3) + "test"
	leaf, err := ca.leaf(host)
	require.NoError(t, err)
	assert.NoError(t, leaf.Leaf.VerifyHostname(host))
}
