//go:build linux

package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"vz.test/vz/guest/wire"
)

// maxNameservers is MAXNS of resolv.conf(5); more are not read.
const maxNameservers = 3

// Configure makes the Machine what the request says. Links come first: the
// resolver and the Machine's own address depend on their leases. What fails is
// a note, but for a link that has no address and a request that makes no sense.
func (a *agent) Configure(ctx context.Context, request *connect.Request[wire.ConfigureRequest]) (*connect.Response[wire.ConfigureResponse], error) {
	if err := a.begin(); err != nil {
		return nil, err
	}
	a.configuring.Lock()
	defer a.configuring.Unlock()
	name := request.Msg.GetHostname()
	if !hostname(name) {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%q is no host name", name))
	}
	for _, domain := range request.Msg.GetSearchDomains() {
		if !domainName(domain) {
			return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%q is no domain name", domain))
		}
	}
	response := &wire.ConfigureResponse{}
	note := func(capability string, err error) {
		if err != nil {
			response.Notes = append(response.Notes, &wire.Note{Capability: capability, Reason: err.Error()})
		}
	}
	if a.options.Init {
		note("hostname", unix.Sethostname([]byte(name)))
	}
	note("hostname", a.root.write("/etc/hostname", []byte(name+"\n")))

	a.network.searching(request.Msg.GetSearchDomains())
	var err error
	if response.Interfaces, err = a.network.up(ctx, name, request.Msg.GetInterfaces()); err != nil {
		if errors.Is(err, errInterface) {
			return nil, connect.NewError(connect.CodeInvalidArgument, err)
		}
		return nil, connect.NewError(connect.CodeUnavailable, err)
	}
	var own netip.Addr
	if len(response.Interfaces) > 0 {
		if prefix, err := netip.ParsePrefix(response.Interfaces[0].GetAddress()); err == nil {
			own = prefix.Addr()
		}
	}
	note("hosts", a.root.write("/etc/hosts", hosts(name, own, request.Msg.GetSearchDomains())))
	note("resolver", a.resolve(a.network.resolver()))

	if authority := request.Msg.GetCaPem(); len(authority) > 0 {
		notes, err := a.root.trust(authority)
		if err != nil {
			return nil, connect.NewError(connect.CodeInvalidArgument, err)
		}
		response.Notes = append(response.Notes, notes...)
	}
	return connect.NewResponse(response), nil
}

// resolver is what resolv.conf is made of.
type resolver struct {
	servers []netip.Addr
	search  []string
}

// resolve is also called when a renewed lease names other servers. Without any
// server the file is left alone.
func (a *agent) resolve(r resolver) error {
	if len(r.servers) == 0 {
		return nil
	}
	return a.root.write("/etc/resolv.conf", r.file())
}

func (r resolver) file() []byte {
	var b strings.Builder
	b.WriteString("# made by vz\n")
	for _, server := range r.servers[:min(len(r.servers), maxNameservers)] {
		fmt.Fprintf(&b, "nameserver %s\n", server)
	}
	if len(r.search) > 0 {
		fmt.Fprintf(&b, "search %s\n", strings.Join(r.search, " "))
	}
	return []byte(b.String())
}

// hosts names the Machine by its first address, so that a server that binds to
// its own name is reachable; by a loopback address when it has none, as Debian
// does.
func hosts(name string, own netip.Addr, search []string) []byte {
	if !own.IsValid() {
		own = netip.AddrFrom4([4]byte{127, 0, 1, 1})
	}
	names := name
	if len(search) > 0 && !strings.Contains(name, ".") {
		names = name + "." + search[0] + " " + name
	}
	return fmt.Appendf(nil, "# made by vz\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n%s\t%s\n", own, names)
}

// hostname keeps to sethostname's 64 bytes and RFC 1123's letters.
func hostname(name string) bool { return len(name) <= 64 && domainName(name) }

// domainName says whether each label is one by RFC 1123; names come from
// outside and go into files of lines and words.
func domainName(name string) bool {
	return len(name) <= 253 && !slices.ContainsFunc(strings.Split(strings.TrimSuffix(name, "."), "."), func(label string) bool {
		return label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' ||
			strings.ContainsFunc(label, func(r rune) bool {
				return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '_'
			})
	})
}
