//go:build linux

package agent

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/server4"
	"github.com/insomniacslk/dhcp/rfc1035label"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"vz.test/vz/guest/wire"
)

func authority(t testing.TB, name pkix.Name) []byte {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: name, IsCA: true, BasicConstraintsValid: true,
		NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// with makes a root with these files; a content that starts with -> is a link.
func with(t *testing.T, files map[string]string) root {
	dir := t.TempDir()
	for name, content := range files {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		if target, ok := strings.CutPrefix(content, "->"); ok {
			require.NoError(t, os.Symlink(target, path))
		} else if !strings.HasSuffix(name, "/") {
			require.NoError(t, os.WriteFile(path, []byte(content), 0o644))
		}
	}
	return root(dir)
}

func read(t *testing.T, r root, name string) string {
	p, err := os.ReadFile(r.path(name))
	require.NoError(t, err)
	return string(p)
}

func TestTrust(t *testing.T) {
	ca := authority(t, pkix.Name{CommonName: "vz shop", Organization: []string{"vz"}})
	other := authority(t, pkix.Name{CommonName: "vz  Other "})
	const old = "-----BEGIN CERTIFICATE-----\nimage's\n-----END CERTIFICATE-----\n"
	for name, c := range map[string]struct {
		files   map[string]string
		bundles []string
	}{
		"debian": {map[string]string{
			"etc/ssl/certs/ca-certificates.crt": old, "usr/local/share/ca-certificates/x": "",
		}, []string{"etc/ssl/certs/ca-certificates.crt"}},
		"rhel": {map[string]string{
			"etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem": old, "etc/pki/ca-trust/source/anchors/x": "",
			"etc/pki/tls/certs/ca-bundle.crt": "->../../ca-trust/extracted/pem/tls-ca-bundle.pem", "etc/ssl/certs": "->../pki/tls/certs",
		}, []string{"etc/pki/tls/certs/ca-bundle.crt"}},
		"alpine": {map[string]string{
			"etc/ssl/certs/ca-certificates.crt": strings.TrimSuffix(old, "\n"), "etc/ssl/cert.pem": "->certs/ca-certificates.crt",
		}, []string{"etc/ssl/certs/ca-certificates.crt", "etc/ssl/cert.pem"}},
		"nothing": {nil, []string{"etc/ssl/certs/ca-certificates.crt"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := with(t, c.files)
			check := func(want []byte) {
				for _, bundle := range c.bundles {
					content := read(t, r, bundle)
					assert.Equal(t, 1, strings.Count(content, string(want)), "%s:\n%s", bundle, content)
					if c.files != nil {
						assert.True(t, strings.HasPrefix(content, old), content)
						assert.Equal(t, 2, strings.Count(content, "BEGIN"), content)
					}
				}
				assert.Equal(t, string(want), read(t, r, authorityPath))
				links, err := filepath.Glob(r.path("etc/ssl/certs/*.[0-9]"))
				require.NoError(t, err)
				if assert.Len(t, links, 1) {
					content, err := os.ReadFile(links[0])
					require.NoError(t, err)
					assert.Equal(t, string(want), string(content))
					assert.Equal(t, opensslHash(t, want)+".0", filepath.Base(links[0]))
				}
			}
			for range 2 {
				notes, err := r.trust(ca)
				require.NoError(t, err)
				assert.Empty(t, notes)
				check(ca)
			}
			notes, err := r.trust(other)
			require.NoError(t, err)
			assert.Empty(t, notes)
			check(other)
			if name == "debian" {
				assert.Equal(t, string(other), read(t, r, anchors[0]))
			}
			if name == "rhel" {
				assert.Equal(t, string(other), read(t, r, anchors[1]))
				assert.Equal(t, old, read(t, r, "etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem"), "the image's own is left alone")
			}
		})
	}
	for _, bad := range []string{"x", old, "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"} {
		_, err := with(t, nil).trust([]byte(bad))
		assert.Error(t, err, bad)
	}
	t.Run("a hash that is taken", func(t *testing.T) {
		taken := "etc/ssl/certs/" + opensslHash(t, ca) + ".0"
		r := with(t, map[string]string{taken: "other"})
		_, err := r.trust(ca)
		require.NoError(t, err)
		assert.Equal(t, "other", read(t, r, taken))
		assert.Equal(t, string(ca), read(t, r, strings.TrimSuffix(taken, "0")+"1"))
	})
	t.Run("what cannot be done is a note", func(t *testing.T) {
		r := with(t, map[string]string{debianBundle + "/x": ""}) // a directory
		notes, err := r.trust(ca)
		require.NoError(t, err)
		require.Len(t, notes, 1)
		assert.Contains(t, notes[0].GetReason(), "ca-certificates.crt")
	})
}

func opensslHash(t testing.TB, certificate []byte) string {
	if _, err := exec.LookPath("openssl"); err != nil {
		t.Skip("needs openssl")
	}
	cmd := exec.Command("openssl", "x509", "-noout", "-hash")
	cmd.Stdin = bytes.NewReader(certificate)
	out, err := cmd.Output()
	require.NoError(t, err)
	return strings.TrimSpace(string(out))
}

func TestNameHash(t *testing.T) {
	for _, name := range []pkix.Name{
		{CommonName: "vz"},
		{},
		{CommonName: " Two  SPACES\tand Ümläut ", Country: []string{"DE"}, Organization: []string{"B", "A"}},
		{ExtraNames: []pkix.AttributeTypeAndValue{
			{Type: asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 1}, Value: asn1.RawValue{Tag: asn1.TagIA5String, Bytes: []byte("A@Example.TEST")}},
			{Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: asn1.RawValue{Tag: asn1.TagPrintableString, Bytes: []byte("  ")}},
		}},
	} {
		ca := authority(t, name)
		certificates, err := parseCertificates(ca)
		require.NoError(t, err)
		hash, err := nameHash(certificates[0].RawSubject)
		require.NoError(t, err)
		assert.Equal(t, opensslHash(t, ca), fmt.Sprintf("%08x", hash), "%v", name)
	}
}

func FuzzNameHash(f *testing.F) {
	f.Add([]byte{0x30, 0})
	f.Add([]byte{0x30, 13, 0x31, 11, 0x30, 9, 6, 3, 0x55, 4, 3, 0x0c, 2, 'v', 'z'})
	f.Fuzz(func(t *testing.T, name []byte) { nameHash(name) })
}

func TestConfigureFiles(t *testing.T) {
	r := with(t, map[string]string{"etc/resolv.conf": "->../run/systemd/resolve/stub-resolv.conf"})
	s := session(t, Options{Root: string(r)})
	response, err := s.Configure(t.Context(), &wire.ConfigureRequest{Hostname: "web", SearchDomains: []string{"vz.internal"}, CaPem: authority(t, pkix.Name{CommonName: "vz"})})
	require.NoError(t, err)
	assert.Empty(t, response.GetNotes())
	assert.Equal(t, "web\n", read(t, r, "etc/hostname"))
	assert.Contains(t, read(t, r, "etc/hosts"), "127.0.1.1\tweb.vz.internal web\n")
	for name, request := range map[string]*wire.ConfigureRequest{
		"no name":     {},
		"two names":   {Hostname: "a b"},
		"line":        {Hostname: "a\nb"},
		"long":        {Hostname: strings.Repeat("a", 65)},
		"search":      {Hostname: "a", SearchDomains: []string{"a\nnameserver 1.1.1.1"}},
		"certificate": {Hostname: "a", CaPem: []byte("x")},
		"MAC":         {Hostname: "a", Interfaces: []*wire.Interface{{Name: "eth0", Mac: "x"}}},
		"link":        {Hostname: "a", Interfaces: []*wire.Interface{{Name: "eth0", Mac: "02:00:00:ff:ff:ff"}}},
	} {
		if name == "MAC" || name == "link" {
			continue // they touch the loopback: see TestNetwork
		}
		_, err := s.Configure(t.Context(), request)
		assert.ErrorContains(t, err, "invalid_argument", name)
	}
}

func TestResolverFile(t *testing.T) {
	a := netip.MustParseAddr
	assert.Equal(t, "# made by vz\nnameserver 10.0.0.1\nnameserver 10.0.0.2\nnameserver 10.0.0.3\nsearch a b\n", string(resolver{
		servers: []netip.Addr{a("10.0.0.1"), a("10.0.0.2"), a("10.0.0.3"), a("10.0.0.4")}, search: []string{"a", "b"}}.file()))
}

func TestRenewal(t *testing.T) {
	option := func(o ...dhcpv4.Option) *dhcpv4.DHCPv4 {
		m := &dhcpv4.DHCPv4{Options: dhcpv4.Options{}}
		for _, o := range o {
			m.UpdateOption(o)
		}
		return m
	}
	lease := dhcpv4.OptIPAddressLeaseTime
	pause, ends := renewal(option(lease(time.Hour)))
	assert.True(t, ends)
	assert.Equal(t, 30*time.Minute, pause)
	pause, _ = renewal(option(lease(time.Hour), dhcpv4.Option{Code: dhcpv4.OptionRenewTimeValue, Value: dhcpv4.Duration(time.Minute)}))
	assert.Equal(t, time.Minute, pause)
	pause, _ = renewal(option(lease(0)))
	assert.Equal(t, time.Second, pause, "never busily")
	_, ends = renewal(option())
	assert.False(t, ends)
	_, ends = renewal(option(lease((1<<32 - 1) * time.Second)))
	assert.False(t, ends)
}

// inside runs the calling test again, alone, in namespaces of its own, and says
// whether this is that run.
func inside(t *testing.T, flags uintptr) bool {
	if os.Getenv("VZ_TEST_INSIDE") == t.Name() {
		return true
	}
	if os.Getuid() != 0 {
		t.Skip("needs root for namespaces")
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), "VZ_TEST_INSIDE="+t.Name())
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flags}
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return false
}

// TestBind writes where the directory is read-only.
func TestBind(t *testing.T) {
	if !inside(t, unix.CLONE_NEWNS) {
		return
	}
	require.NoError(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	r := with(t, map[string]string{"etc/hosts": "old", "run/x": ""})
	etc := r.path("etc")
	require.NoError(t, unix.Mount(etc, etc, "", unix.MS_BIND, ""))
	require.NoError(t, unix.Mount("", etc, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	defer unix.Unmount(etc, unix.MNT_DETACH)
	for _, content := range []string{"one", "two", "two"} {
		require.NoError(t, r.write("/etc/hosts", []byte(content)))
		assert.Equal(t, content, read(t, r, "etc/hosts"))
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	require.NoError(t, err)
	assert.Equal(t, 1, strings.Count(string(mounts), r.path("etc/hosts")))
	assert.ErrorContains(t, r.write("/etc/missing", []byte("x")), "read-only")
}

// server answers DHCP on one end of a veth pair whose other end, in this
// network namespace, is the Machine's link.
type server struct {
	address atomic.Pointer[net.IPNet] // given out
	mac     string
	options []dhcpv4.Modifier
}

// serve makes the pair, with its far end in a network namespace of its own: in
// one namespace the kernel would not pass the far end's packets.
func (s *server) serve(t *testing.T, link string, gateway string) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	here, err := netns.Get()
	require.NoError(t, err)
	defer here.Close()
	there, err := netns.New()
	require.NoError(t, err)
	defer there.Close()
	defer netns.Set(here)
	require.NoError(t, netlink.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "far", MTU: 9000}, PeerName: link, PeerNamespace: netlink.NsFd(here),
	}))
	far, err := netlink.LinkByName("far")
	require.NoError(t, err)
	address, err := netlink.ParseAddr(gateway)
	require.NoError(t, err)
	require.NoError(t, netlink.AddrAdd(far, address))
	require.NoError(t, netlink.LinkSetUp(far))
	conn, err := server4.NewIPv4UDPConn("far", &net.UDPAddr{Port: 67})
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	go func() {
		buffer := make([]byte, 1500)
		for {
			n, _, err := conn.ReadFrom(buffer)
			if err != nil {
				return
			}
			query, err := dhcpv4.FromBytes(buffer[:n])
			if err != nil {
				continue
			}
			given := s.address.Load()
			kind := dhcpv4.MessageTypeOffer
			if query.MessageType() == dhcpv4.MessageTypeRequest {
				kind = dhcpv4.MessageTypeAck
			}
			reply, err := dhcpv4.NewReplyFromRequest(query, append([]dhcpv4.Modifier{
				dhcpv4.WithMessageType(kind), dhcpv4.WithServerIP(address.IP), dhcpv4.WithOption(dhcpv4.OptServerIdentifier(address.IP)),
				dhcpv4.WithYourIP(given.IP), dhcpv4.WithNetmask(given.Mask), dhcpv4.WithDNS(address.IP),
			}, s.options...)...)
			if err == nil {
				conn.WriteTo(reply.ToBytes(), &net.UDPAddr{IP: net.IPv4bcast, Port: 68})
			}
		}
	}()
	inner, err := netlink.NewHandleAt(here)
	require.NoError(t, err)
	defer inner.Close()
	near, err := inner.LinkByName(link)
	require.NoError(t, err)
	s.mac = near.Attrs().HardwareAddr.String()
}

func ipNet(t *testing.T, s string) *net.IPNet {
	ip, n, err := net.ParseCIDR(s)
	require.NoError(t, err)
	return &net.IPNet{IP: ip, Mask: n.Mask}
}

func TestNetwork(t *testing.T) {
	if !inside(t, unix.CLONE_NEWNET|unix.CLONE_NEWNS) {
		return
	}
	gateway := net.IPv4(203, 0, 113, 1)
	private := &server{options: []dhcpv4.Modifier{
		dhcpv4.WithLeaseTime(2), dhcpv4.WithGeneric(dhcpv4.OptionInterfaceMTU, []byte{0x05, 0xdc}),
		dhcpv4.WithOption(dhcpv4.OptDomainName("vz.internal")),
	}}
	edge := &server{options: []dhcpv4.Modifier{
		dhcpv4.WithLeaseTime(3600), dhcpv4.WithRouter(gateway),
		dhcpv4.WithOption(dhcpv4.OptDomainSearch(&rfc1035label.Labels{Labels: []string{"vz.internal", "bad name", "b.test"}})),
	}}
	private.address.Store(ipNet(t, "10.1.0.2/24"))
	edge.address.Store(ipNet(t, "203.0.113.9/24"))
	// The names are the wrong way round, so both have to change.
	private.serve(t, "eth1", "10.1.0.1/24")
	edge.serve(t, "eth0", "203.0.113.1/24")
	r := with(t, nil)
	s := session(t, Options{Root: string(r)})
	request := &wire.ConfigureRequest{Hostname: "web", SearchDomains: []string{"vz.internal"}, Interfaces: []*wire.Interface{
		{Name: "eth0", Mac: private.mac}, {Name: "eth1", Mac: strings.ToUpper(edge.mac)},
	}}
	for range 2 { // idempotent
		response, err := s.Configure(t.Context(), request)
		require.NoError(t, err)
		require.Len(t, response.GetInterfaces(), 2)
		assert.Equal(t, `name:"eth0" address:"10.1.0.2/24" mtu:1500`, strings.ReplaceAll(response.GetInterfaces()[0].String(), "  ", " "))
		assert.Equal(t, "203.0.113.9/24", response.GetInterfaces()[1].GetAddress())
		assert.Equal(t, "# made by vz\nnameserver 203.0.113.1\nnameserver 10.1.0.1\nsearch vz.internal b.test\n", read(t, r, "etc/resolv.conf"))
		assert.Contains(t, read(t, r, "etc/hosts"), "10.1.0.2\tweb.vz.internal web\n")
		eth0, err := netlink.LinkByName("eth0")
		require.NoError(t, err)
		assert.Equal(t, 1500, eth0.Attrs().MTU)
		routes, err := netlink.RouteGet(net.IPv4(198, 51, 100, 1))
		require.NoError(t, err)
		assert.Equal(t, gateway.To4(), routes[0].Gw.To4())
		lo, err := netlink.LinkByName("lo")
		require.NoError(t, err)
		assert.NotZero(t, lo.Attrs().Flags&net.FlagUp)
	}
	t.Run("renewal brings another address", func(t *testing.T) {
		private.address.Store(ipNet(t, "10.1.0.3/24")) // T1 is one second
		await(1<<62, func() bool {
			eth0, err := netlink.LinkByName("eth0")
			require.NoError(t, err)
			addresses, err := netlink.AddrList(eth0, netlink.FAMILY_V4)
			require.NoError(t, err)
			return len(addresses) == 1 && addresses[0].IP.Equal(net.IPv4(10, 1, 0, 3))
		})
	})
	t.Run("what makes no sense", func(t *testing.T) {
		for _, i := range []*wire.Interface{
			{Name: "eth0", Mac: "x"}, {Name: "eth0", Mac: "02:00:00:ff:ff:ff"}, {Name: "lo", Mac: edge.mac},
			{Name: "a b", Mac: edge.mac}, {Name: "", Mac: edge.mac}, {Name: "sixteen-letters-", Mac: edge.mac},
		} {
			_, err := s.Configure(t.Context(), &wire.ConfigureRequest{Hostname: "web", Interfaces: []*wire.Interface{i}})
			assert.ErrorContains(t, err, "invalid_argument", "%v", i)
		}
	})
}
