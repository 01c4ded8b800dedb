package supervisor

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"vz.test/vz/config"
	"vz.test/vz/netstack"
	"vz.test/vz/supervisor/registry"
)

// shop is the example's definition, changed by edit.
func shop(t *testing.T, edit func(*config.Definition)) *config.Definition {
	t.Helper()
	text, err := os.ReadFile("../examples/shop/vz.json")
	require.NoError(t, err)
	definition, err := config.Check("vz.json", text, config.Host{OS: "linux", Arch: "amd64"})
	require.NoError(t, err)
	if edit != nil {
		edit(definition)
	}
	return definition
}

func newRecord() *registry.Record {
	return &registry.Record{EnvironmentID: registry.NewID(registry.KindEnvironment), Name: "test"}
}

func address(r *registry.Record, machine, network string) registry.Attachment {
	for _, a := range r.Machine(machine).Attachments {
		if a.Network == network {
			return a
		}
	}
	return registry.Attachment{}
}

func TestAllocateGivesEverythingAnAddressOfItsOwn(t *testing.T) {
	r := newRecord()
	require.NoError(t, allocate(shop(t, nil), "namespace", r))
	seen := map[string]string{}
	for _, m := range r.Machines {
		require.NoError(t, registry.CheckID(m.MachineID, registry.KindMachine))
		for _, a := range m.Attachments {
			require.Empty(t, seen[a.Address])
			seen[a.Address] = m.Name
			require.Empty(t, seen[a.MAC])
			seen[a.MAC] = m.Name
			require.Equal(t, a.Network == "edge", a.PublicAddress != "", "a public address on the edge and nowhere else")
		}
	}
	require.Equal(t, "10.20.0.20", address(r, "db", "back").Address, "a declared address is taken")
	require.Len(t, r.Endpoints, 1)
	require.Contains(t, r.Endpoints[0].Address, "198.51.100.")
}

func TestAllocateKeepsWhatItGave(t *testing.T) {
	r := newRecord()
	require.NoError(t, allocate(shop(t, nil), "namespace", r))
	before := r.Clone()

	require.NoError(t, allocate(shop(t, nil), "namespace", r))
	require.Equal(t, before, r, "the same definition changes nothing")

	// A Machine whose name sorts first takes nobody's address.
	require.NoError(t, allocate(shop(t, func(d *config.Definition) {
		d.Machines["a"] = d.Machines["client"]
	}), "namespace", r))
	for _, m := range before.Machines {
		require.Equal(t, m, *r.Machine(m.Name))
	}

	// One that leaves and comes back is another one.
	require.NoError(t, allocate(shop(t, func(d *config.Definition) { delete(d.Machines, "client"); d.Paths = d.Paths[:1] }), "namespace", r))
	require.Nil(t, r.Machine("client"))
	require.NoError(t, allocate(shop(t, nil), "namespace", r))
	require.NotEqual(t, before.Machine("client").MachineID, r.Machine("client").MachineID)
}

func TestAllocateMovesWhatADeclaredAddressTakes(t *testing.T) {
	r := newRecord()
	require.NoError(t, allocate(shop(t, nil), "namespace", r))
	taken := address(r, "web", "front").Address
	require.NoError(t, allocate(shop(t, func(d *config.Definition) {
		client := d.Machines["client"]
		client.Networks = []config.Attachment{{Name: "front", Address: taken}, {Name: "edge"}}
		d.Machines["client"] = client
	}), "namespace", r))
	require.Equal(t, taken, address(r, "client", "front").Address)
	require.NotEqual(t, taken, address(r, "web", "front").Address)
}

func TestAllocateSaysWhenANetworkIsFull(t *testing.T) {
	err := allocate(shop(t, func(d *config.Definition) {
		d.Networks["front"] = config.Network{Kind: config.NetworkPrivate, CIDR: "10.10.0.0/30"}
	}), "namespace", newRecord())
	require.ErrorContains(t, err, "every address of 10.10.0.0/30 is taken")
}

func TestPlanNamesEveryPath(t *testing.T) {
	definition, r := shop(t, nil), newRecord()
	require.NoError(t, allocate(definition, "namespace", r))
	topology, err := plan(definition, r)
	require.NoError(t, err)
	var names []string
	for _, p := range topology.domain.Paths {
		names = append(names, p.Name)
	}
	require.ElementsMatch(t, definition.PathNames(), names, "the domain has the paths that a fault may name")
	d, err := netstack.New(topology.domain, netstack.Options{})
	require.NoError(t, err, "the domain takes it")
	require.NoError(t, d.Close())
}

func TestViewHasWhatAPathReaches(t *testing.T) {
	definition, r := shop(t, nil), newRecord()
	require.NoError(t, allocate(definition, "namespace", r))
	topology, err := plan(definition, r)
	require.NoError(t, err)
	for _, test := range []struct {
		machine, name string
		denied        bool
	}{
		{"web", "db", false}, {"web", "db.back", false}, {"web", "db.back.vz.internal", false}, {"web", "web", false},
		{"web", "client", true}, {"web", "client.front", true}, {"web", "shop.test", true},
		{"client", "db", true}, {"client", "db.back", true}, {"client", "shop.test", false}, {"client", "web", true},
		{"db", "web", true}, {"db", "shop.test", true},
	} {
		record, ok := topology.views[test.machine].Records[test.name]
		require.True(t, ok, "%s asks for %s", test.machine, test.name)
		require.Equal(t, test.denied, record.Denied != "", "%s asks for %s: %q", test.machine, test.name, record.Denied)
		require.Equal(t, test.denied, len(record.Addrs) == 0)
	}
}
