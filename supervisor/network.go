package supervisor

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"vz.test/vz/config"
	"vz.test/vz/dns"
	"vz.test/vz/faults"
	"vz.test/vz/ingress"
	"vz.test/vz/netstack"
	"vz.test/vz/supervisor/registry"
)

// network joins the rooms that make one Environment's network: the route
// domain, its names, its edge and the host's door to it. It lives from the
// first up to the stop.
type network struct {
	domain  *netstack.Domain
	dns     *dns.Server
	ingress *ingress.Server
	proxy   *ingress.Proxy
	faults  *faults.Engine

	topology   atomic.Pointer[topology]
	definition string // digest of the one that it was made for; written by the holder of work
	serving    sync.WaitGroup

	served map[opening]chan struct{} // closed when the server there has ended
}

// openNetwork makes the network of a topology. proxyPort is the host's port to
// take if it is free; 0 takes any.
func (s *Supervisor) openNetwork(t *topology, proxyPort int) (*network, error) {
	domain, err := netstack.New(t.domain, netstack.Options{OnRefusal: s.refused})
	if err != nil {
		return nil, err
	}
	n := &network{domain: domain, served: map[opening]chan struct{}{}}
	n.topology.Store(t)
	if err := n.open(s, proxyPort); err != nil {
		n.close(s, faults.WhyOwnerExit)
		return nil, err
	}
	return n, nil
}

// open makes what serves in the domain and on the host, and records where the
// host's door is.
func (n *network) open(s *Supervisor, proxyPort int) error {
	name := s.snapshot().Name
	n.dns = dns.NewServer(dns.Config{View: n.view, Log: s.queried})
	n.ingress = ingress.NewServer(ingress.Config{
		Environment: name, Endpoints: n.topology.Load().endpoints, CA: s.ca, Dial: n.domain.DialBackend, Log: s.log,
	})
	n.faults = faults.New(faults.Options{Impair: n.impair, OnChange: s.faultChanged, Journal: s.faultJournal()})
	n.proxy = ingress.NewProxy(ingress.ProxyConfig{Environment: name, Resolve: n.resolve, Hosts: n.hosts, Dial: n.domain.DialHost, OwnerUID: s.registry.UID(), Log: s.log})
	listener, err := listenLoopback(proxyPort)
	if err != nil {
		return fmt.Errorf("the proxy's port on the host: %w", err)
	}
	n.serving.Go(func() { s.report("proxy", n.proxy.Serve(listener)) })
	if err := n.listen(s); err != nil {
		return err
	}
	port := listener.Addr().(*net.TCPAddr).Port
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	return s.update(func(r *registry.Record) {
		r.Proxy = registry.Proxy{
			Port: port, URL: "http://" + address, SocksURL: "socks5h://" + address,
			PACURL: "http://" + address + "/proxy.pac", CAPath: s.ca.Path(),
		}
	})
}

// listenLoopback takes the port that the Environment had before, so that what
// was configured with it goes on working, or any other when that is taken.
func listenLoopback(port int) (net.Listener, error) {
	if port != 0 {
		if l, err := net.Listen("tcp4", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			return l, nil
		}
	}
	return net.Listen("tcp4", "127.0.0.1:0")
}

// An opening is where somebody serves inside the domain.
type opening struct {
	network string // udp or tcp
	address netip.AddrPort
}

// listen serves what the topology has and nobody serves yet. Listeners of
// addresses that are gone were closed by the domain. The holder of work calls it.
func (n *network) listen(s *Supervisor) error {
	t := n.topology.Load()
	wanted := map[opening]func() (serve func() error, err error){}
	for _, network := range t.domain.Networks {
		address := netip.AddrPortFrom(network.Gateway, 53)
		wanted[opening{"udp", address}] = func() (func() error, error) {
			packets, err := n.domain.ListenPacket(address)
			return func() error { return n.dns.ServePacket(packets) }, err
		}
		wanted[opening{"tcp", address}] = func() (func() error, error) {
			stream, err := n.domain.Listen(address)
			return func() error { return n.dns.Serve(stream) }, err
		}
	}
	for _, d := range t.doors {
		wanted[opening{"tcp", d.address}] = func() (func() error, error) {
			l, err := n.domain.Listen(d.address)
			if d.tls {
				return func() error { return n.ingress.ServeTLS(l) }, err
			}
			return func() error { return n.ingress.ServeHTTP(l) }, err
		}
	}
	for at, ended := range n.served {
		if wanted[at] == nil {
			<-ended
			delete(n.served, at)
		}
	}
	for at, open := range wanted {
		if ended := n.served[at]; ended != nil {
			select {
			case <-ended: // by an error, which was logged
			default:
				continue
			}
		}
		serve, err := open()
		if err != nil {
			return fmt.Errorf("listening on %s %s: %w", at.network, at.address, err)
		}
		ended := make(chan struct{})
		n.served[at] = ended
		n.serving.Go(func() {
			defer close(ended)
			s.report(at.network+" "+at.address.String(), serve())
		})
	}
	return nil
}

// report logs why a server ended, unless it was told to.
func (s *Supervisor) report(what string, err error) {
	if err != nil && !errors.Is(err, net.ErrClosed) {
		s.log.Error("a server ended", "server", what, "error", err)
	}
}

// update makes the network that of another topology.
func (n *network) update(s *Supervisor, t *topology) error {
	if err := n.domain.Update(t.domain); err != nil {
		return err
	}
	n.topology.Store(t)
	for _, f := range n.faults.List() {
		if !slices.ContainsFunc(t.domain.Paths, func(p netstack.Path) bool { return p.Name == f.Spec.Path }) {
			n.faults.Heal(f.ID, faults.WhyReconcile) // its path is gone; one of that name may come back without it
		}
	}
	n.ingress.Update(t.endpoints)
	return n.listen(s)
}

// view is the names that a client of the resolver sees.
func (n *network) view(client netip.Addr) (string, *dns.View) {
	machine, ok := n.domain.Machine(client)
	if !ok {
		return "", nil
	}
	return machine, n.topology.Load().views[machine]
}

// resolve finds the endpoint of a host name for the host's proxy.
func (n *network) resolve(host string) (endpoint string, ok bool) {
	for _, e := range n.topology.Load().endpoints {
		if e.Host == host {
			return e.Name, true
		}
	}
	return "", false
}

func (n *network) hosts() []string {
	var hosts []string
	for _, e := range n.topology.Load().endpoints {
		hosts = append(hosts, e.Host)
	}
	return hosts
}

// impair hands a path's conditioner to the domain; the two rooms do not know
// each other.
func (n *network) impair(path string, c *faults.Conditioner) error {
	if c == nil {
		return n.domain.Impair(path, nil)
	}
	return n.domain.Impair(path, c)
}

// close takes the network down. Order: faults first, so that what they hold
// is let go while ports still take it; then the doors, then the domain, whose
// end closes what is left.
func (n *network) close(s *Supervisor, why string) {
	if err := n.faults.Close(why); err != nil {
		s.log.Error("closing the faults", "error", err)
	}
	n.proxy.Close()
	n.ingress.Close()
	n.dns.Close()
	n.domain.Close()
	n.serving.Wait()
}

// faultSpecs are the declared faults on the timeline that begins now.
func faultSpecs(definition *config.Definition) []faults.Spec {
	var specs []faults.Spec
	for _, f := range definition.Faults {
		spec := faults.Spec{
			Name: f.Name, Path: f.Path, Direction: f.Direction, Seed: f.Seed,
			At:  time.Duration(f.AtMillis) * time.Millisecond,
			TTL: time.Duration(f.TTLMillis) * time.Millisecond,
		}
		if f.Latency != nil {
			spec.Latency = &faults.Latency{Delay: time.Duration(f.Latency.DelayMillis) * time.Millisecond}
		}
		if f.Loss != nil {
			spec.Loss = &faults.Loss{Probability: f.Loss.Probability}
		}
		specs = append(specs, spec)
	}
	return specs
}
