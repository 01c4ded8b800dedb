//go:build linux

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"vz.test/vz/guest/wire"
)

const (
	// leaseWait bounds how long a link may be without an answer. The server is
	// the Environment's gateway on the other end of the link; only a supervisor
	// that attaches the port late is waited for.
	leaseWait = 10 * time.Second
	// askEvery is the pause between unanswered questions: the gateway answers
	// in under a millisecond, so RFC 2131's 4 s would only delay a boot.
	askEvery = 200 * time.Millisecond
	// renewEvery bounds how often a renewal is asked for once it is due.
	renewEvery = 30 * time.Second
)

// errInterface marks a request that makes no sense for this Machine.
var errInterface = errors.New("interface")

// network keeps the Machine's links up and their leases renewed.
type network struct {
	log    *slog.Logger
	change func(resolver) error // called when a renewal changed the resolver

	mu     sync.Mutex // of all below
	search []string   // asked for by name, before what leases bring
	leases []*lease   // in the order of the request
	cancel context.CancelFunc
	keep   sync.WaitGroup
}

func newNetwork(log *slog.Logger, change func(resolver) error) *network {
	return &network{log: log, change: change, cancel: func() {}}
}

// close ends the renewals; addresses stay.
func (n *network) close() {
	n.mu.Lock()
	n.cancel()
	n.mu.Unlock()
	n.keep.Wait()
}

func (n *network) searching(domains []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.search = domains
}

// up brings the loopback and each of the links up, under the name it is to
// have, with address, MTU and routes by DHCP. A link that has them already
// asks again and keeps them, with the connections on it, when the answer is the
// same. Callers take turns.
func (n *network) up(ctx context.Context, hostname string, interfaces []*wire.Interface) ([]*wire.InterfaceStatus, error) {
	if len(interfaces) == 0 {
		return nil, nil
	}
	n.close()
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		return nil, fmt.Errorf("lo: %w", err)
	}
	leases, err := claim(interfaces)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, leaseWait)
	defer cancel()
	problems := make([]error, len(leases))
	var all sync.WaitGroup
	for i, l := range leases {
		all.Go(func() {
			if err := l.acquire(ctx, hostname); err != nil {
				problems[i] = fmt.Errorf("%s (%s): %w", l.name, l.mac, err)
			}
		})
	}
	all.Wait()
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	background, stop := context.WithCancel(context.Background())
	n.mu.Lock()
	n.leases, n.cancel = leases, stop
	n.mu.Unlock()
	var statuses []*wire.InterfaceStatus
	for _, l := range leases {
		statuses = append(statuses, l.status)
		n.keep.Go(func() { n.renew(background, l, hostname) })
	}
	return statuses, nil
}

// claim finds each link by its MAC and gives it its name. A name taken by a
// link that is to have another, or that nobody asked for, is freed first.
func claim(interfaces []*wire.Interface) ([]*lease, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("listing links: %w", err)
	}
	var leases []*lease
	names := map[string]*lease{}
	for _, wanted := range interfaces {
		mac, err := net.ParseMAC(wanted.GetMac())
		if err != nil || len(mac) != 6 {
			return nil, fmt.Errorf("%w %q: %q is no MAC address", errInterface, wanted.GetName(), wanted.GetMac())
		}
		name := wanted.GetName()
		if name == "" || len(name) >= unix.IFNAMSIZ || strings.ContainsAny(name, "/ \t\n:%") || name == "." || name == ".." || name == "lo" || names[name] != nil {
			return nil, fmt.Errorf("%w %q: not a name for a link, or one used twice", errInterface, name)
		}
		i := slices.IndexFunc(links, func(l netlink.Link) bool { return l.Attrs().HardwareAddr.String() == mac.String() })
		if i < 0 {
			return nil, fmt.Errorf("%w %q: no link has MAC %s", errInterface, name, mac)
		}
		l := &lease{name: name, mac: mac, index: links[i].Attrs().Index}
		names[name] = l
		leases = append(leases, l)
	}
	for _, link := range links {
		if l := names[link.Attrs().Name]; l != nil && l.index != link.Attrs().Index {
			if err := rename(link.Attrs().Index, fmt.Sprintf("vz-%d", link.Attrs().Index)); err != nil {
				return nil, err
			}
		}
	}
	for _, l := range leases {
		if err := rename(l.index, l.name); err != nil {
			return nil, err
		}
	}
	return leases, nil
}

// rename takes the link down, which kernels before 6.2 ask for.
func rename(index int, name string) error {
	link, err := netlink.LinkByIndex(index)
	if err != nil {
		return fmt.Errorf("link %d: %w", index, err)
	}
	if link.Attrs().Name == name {
		return nil
	}
	if err := netlink.LinkSetDown(link); err != nil {
		return fmt.Errorf("%s: down: %w", link.Attrs().Name, err)
	}
	if err := netlink.LinkSetName(link, name); err != nil {
		return fmt.Errorf("%s: renaming to %s: %w", link.Attrs().Name, name, err)
	}
	return nil
}

// lease is one link and what DHCP says of it.
type lease struct {
	name   string
	mac    net.HardwareAddr
	index  int
	got    *nclient4.Lease // written by acquire and renew under network.mu, once shared
	status *wire.InterfaceStatus
}

// acquire brings the link up and asks until there is an answer or ctx ends.
func (l *lease) acquire(ctx context.Context, hostname string) error {
	link, err := netlink.LinkByIndex(l.index)
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("up: %w", err)
	}
	for {
		got, err := l.ask(ctx, func(c *nclient4.Client) (*nclient4.Lease, error) {
			return c.Request(ctx, request(hostname)...)
		})
		if err == nil {
			l.status, err = l.apply(got)
			l.got = got
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("no lease by DHCP: %w", err)
		case <-time.After(askEvery):
		}
	}
}

// ask opens the packet socket for one exchange only: it is copied everything
// that arrives on the link.
func (l *lease) ask(ctx context.Context, exchange func(*nclient4.Client) (*nclient4.Lease, error)) (*nclient4.Lease, error) {
	client, err := nclient4.New(l.name, nclient4.WithHWAddr(l.mac), nclient4.WithTimeout(askEvery), nclient4.WithRetry(1))
	if err != nil {
		return nil, err
	}
	defer client.Close()
	return exchange(client)
}

func request(hostname string) []dhcpv4.Modifier {
	return []dhcpv4.Modifier{
		dhcpv4.WithOption(dhcpv4.OptHostName(hostname)),
		dhcpv4.WithRequestedOptions(dhcpv4.OptionInterfaceMTU, dhcpv4.OptionDNSDomainSearchList,
			dhcpv4.OptionRenewTimeValue, dhcpv4.OptionRebindingTimeValue),
	}
}

// apply makes the link what the lease says and changes nothing that is so.
func (l *lease) apply(got *nclient4.Lease) (*wire.InterfaceStatus, error) {
	ack := got.ACK
	link, err := netlink.LinkByIndex(l.index)
	if err != nil {
		return nil, err
	}
	mask := ack.SubnetMask()
	if ones, bits := mask.Size(); ack.YourIPAddr.To4() == nil || ack.YourIPAddr.IsUnspecified() || bits != 32 || ones == 0 {
		return nil, fmt.Errorf("the lease has no usable address: %v mask %v", ack.YourIPAddr, mask)
	}
	// RFC 2132, 5.1: an MTU is at least 68.
	mtu := link.Attrs().MTU
	if m, err := dhcpv4.GetUint16(dhcpv4.OptionInterfaceMTU, ack.Options); err == nil && m >= 68 && int(m) != mtu {
		if err := netlink.LinkSetMTU(link, int(m)); err != nil {
			return nil, fmt.Errorf("MTU %d: %w", m, err)
		}
		mtu = int(m)
	}
	address := &net.IPNet{IP: ack.YourIPAddr.To4(), Mask: mask}
	if err := netlink.AddrReplace(link, &netlink.Addr{IPNet: address}); err != nil {
		return nil, fmt.Errorf("address %s: %w", address, err)
	}
	others, err := netlink.AddrList(link, netlink.FAMILY_V4)
	if err != nil {
		return nil, fmt.Errorf("listing addresses: %w", err)
	}
	for _, other := range others {
		if other.IPNet.String() != address.String() {
			netlink.AddrDel(link, &other)
		}
	}
	if routers := ack.Router(); len(routers) > 0 {
		route := &netlink.Route{LinkIndex: l.index, Gw: routers[0], Protocol: unix.RTPROT_DHCP}
		if err := netlink.RouteReplace(route); err != nil {
			return nil, fmt.Errorf("default route by %s: %w", routers[0], err)
		}
	} else {
		routes, _ := netlink.RouteList(link, netlink.FAMILY_V4)
		for _, route := range routes {
			if route.Gw != nil && route.Protocol == unix.RTPROT_DHCP { // of an earlier lease
				netlink.RouteDel(&route)
			}
		}
	}
	return &wire.InterfaceStatus{Name: l.name, Address: address.String(), Mtu: uint32(mtu)}, nil
}

// renew asks again when T1 of RFC 2131, 4.4.5 has passed, and then until there
// is an answer. A lease that ends without one is kept: the port on the other
// end lets no other address pass, and none but this Machine has it.
func (n *network) renew(ctx context.Context, l *lease, hostname string) {
	for {
		pause, ends := renewal(l.got.ACK)
		if !ends {
			return
		}
		for {
			select {
			case <-ctx.Done():
				return
			case <-time.After(pause):
			}
			got, err := l.ask(ctx, func(c *nclient4.Client) (*nclient4.Lease, error) {
				got, err := c.Renew(ctx, l.got)
				if err != nil { // refused, or the server has forgotten: from the beginning
					got, err = c.Request(ctx, request(hostname)...)
				}
				return got, err
			})
			if err == nil {
				err = n.renewed(l, got)
			}
			if err == nil {
				break
			}
			if ctx.Err() == nil {
				n.log.Warn("renewing a lease", "link", l.name, "error", err)
			}
			pause = min(max(pause/2, time.Second), renewEvery)
		}
	}
}

func (n *network) renewed(l *lease, got *nclient4.Lease) error {
	if _, err := l.apply(got); err != nil {
		return err
	}
	n.mu.Lock()
	l.got = got
	n.mu.Unlock()
	return n.change(n.resolver())
}

// renewal is how long after its acknowledgement a lease is to be renewed; a
// lease without end is not.
func renewal(ack *dhcpv4.DHCPv4) (time.Duration, bool) {
	const infinite = (1<<32 - 1) * time.Second
	total := ack.IPAddressLeaseTime(infinite)
	if total >= infinite {
		return 0, false
	}
	return max(ack.IPAddressRenewalTime(total/2), time.Second), true
}

// resolver has one server for each link, first that of the link with the
// default route.
func (n *network) resolver() resolver {
	n.mu.Lock()
	defer n.mu.Unlock()
	r := resolver{search: slices.Clone(n.search)}
	add := func(l *lease) {
		for _, ip := range l.got.ACK.DNS() {
			if server, ok := netip.AddrFromSlice(ip.To4()); ok && !slices.Contains(r.servers, server) {
				r.servers = append(r.servers, server)
				break
			}
		}
		domains := []string{l.got.ACK.DomainName()}
		if labels := l.got.ACK.DomainSearch(); labels != nil {
			domains = append(domains, labels.Labels...)
		}
		for _, domain := range domains {
			if domainName(domain) && !slices.Contains(r.search, domain) {
				r.search = append(r.search, domain)
			}
		}
	}
	for _, first := range []bool{true, false} {
		for _, l := range n.leases {
			if (len(l.got.ACK.Router()) > 0) == first {
				add(l)
			}
		}
	}
	return r
}
