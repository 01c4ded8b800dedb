package policy

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestEvaluate(t *testing.T) {
	table, err := Compile([]Rule{
		{Path: "web-db", From: "web", To: "db", Network: "back", Protocol: TCP, Ports: []Range{{5432, 5432}, {6000, 6010}}},
		{Path: "late", From: "web", To: "db", Network: "back", Protocol: TCP, Ports: []Range{{5000, 6005}}},
		{Path: "ping", From: "web", To: "db", Network: "back", Protocol: ICMP},
		{Path: "any", From: "a", To: "b", Network: "n", Protocol: Any},
		{Path: "some", From: "c", To: "b", Network: "n", Protocol: Any, Ports: []Range{{1, 9}}},
		{Path: "dns", From: "web", To: "gateway", Protocol: UDP, Ports: []Range{{53, 53}}},
		{Path: "web-gateway", From: "web", To: "gateway", Network: "back", Protocol: TCP, Ports: []Range{{80, 80}}},
	})
	require.NoError(t, err)
	for _, test := range []struct {
		key  Key
		path string
		why  Reason
	}{
		{Key{"web", "db", "back", TCP, 5432}, "web-db", Allowed},
		{Key{"web", "db", "back", TCP, 5431}, "late", Allowed},
		{Key{"web", "db", "back", TCP, 5433}, "late", Allowed},
		{Key{"web", "db", "back", TCP, 6000}, "web-db", Allowed},
		{Key{"web", "db", "back", TCP, 5999}, "late", Allowed},
		{Key{"web", "db", "back", TCP, 6010}, "web-db", Allowed},
		{Key{"web", "db", "back", TCP, 4999}, "", PortNotDeclared},
		{Key{"web", "db", "back", TCP, 6011}, "", PortNotDeclared},
		{Key{"web", "db", "back", UDP, 5432}, "", ProtocolNotDeclared},
		{Key{"web", "db", "back", ICMP, 0}, "ping", Allowed},
		{Key{"web", "db", "back", 132, 0}, "", ProtocolNotDeclared},
		{Key{"web", "db", "front", TCP, 5432}, "", OtherNetwork},
		{Key{"db", "web", "back", TCP, 5432}, "", NoPath},
		{Key{"web", "nobody", "back", TCP, 5432}, "", NoPath},
		{Key{"a", "b", "n", TCP, 0}, "any", Allowed},
		{Key{"a", "b", "n", UDP, 65535}, "any", Allowed},
		{Key{"a", "b", "n", ICMP, 0}, "any", Allowed},
		{Key{"a", "b", "n", 132, 0}, "any", Allowed},
		{Key{"c", "b", "n", UDP, 9}, "some", Allowed},
		{Key{"c", "b", "n", UDP, 10}, "", PortNotDeclared},
		{Key{"web", "gateway", "front", UDP, 53}, "dns", Allowed},
		{Key{"web", "gateway", "back", UDP, 53}, "dns", Allowed},
		{Key{"web", "gateway", "back", UDP, 54}, "", PortNotDeclared},
		{Key{"web", "gateway", "back", TCP, 80}, "web-gateway", Allowed},
		{Key{"web", "gateway", "front", TCP, 80}, "", ProtocolNotDeclared},
	} {
		path, why := table.Evaluate(test.key)
		assert.Equal(t, test.path, path, "%+v", test.key)
		assert.Equal(t, test.why, why, "%+v", test.key)
	}
	assert.Zero(t, testing.AllocsPerRun(100, func() { table.Evaluate(Key{"web", "db", "back", TCP, 5433}) }))
}

func TestCompileRefuses(t *testing.T) {
	for _, r := range []Rule{
		{From: "a", To: "b"},
		{Path: "p", To: "b"},
		{Path: "p", From: "a"},
		{Path: "p", From: "a", To: "b", Protocol: TCP, Ports: []Range{{2, 1}}},
	} {
		_, err := Compile([]Rule{r})
		assert.Error(t, err, "%+v", r)
	}
}

// The list of reasons is closed and documented.
func TestReasons(t *testing.T) {
	seen := map[string]Reason{}
	for r := range Reason(Reasons) {
		name := r.String()
		require.NotEmpty(t, name, "reason %d", r)
		require.NotEmpty(t, r.Explain(), name)
		require.Regexp(t, `^[a-z]+(_[a-z]+)*$`, name)
		require.NotContains(t, seen, name)
		seen[name] = r
	}
	assert.Equal(t, "reason(200)", Reason(200).String())
	for _, r := range []Reason{NoPath, OtherNetwork, PortNotDeclared, NoFlow, NATFiltered, EgressOffline} {
		assert.True(t, r.Refusal(), r.String())
	}
	for _, r := range []Reason{Allowed, SpoofedMAC, TooBig, FaultLost} {
		assert.False(t, r.Refusal(), r.String())
	}
}

// Overlapping ranges give each port to the first rule that has it, however
// they are cut.
func FuzzCompile(f *testing.F) {
	f.Add([]byte{0, 10, 5, 20, 3, 3, 0, 255})
	f.Fuzz(func(t *testing.T, edges []byte) {
		var rules []Rule
		for i := 0; i+1 < len(edges) && i < 64; i += 2 {
			first, last := uint16(min(edges[i], edges[i+1])), uint16(max(edges[i], edges[i+1]))
			rules = append(rules, Rule{Path: fmt.Sprint(i), From: "a", To: "b", Protocol: TCP, Ports: []Range{{first, last}}})
		}
		table, err := Compile(rules)
		require.NoError(t, err)
		for port := range uint16(300) {
			want := ""
			for _, r := range rules {
				if r.Ports[0].First <= port && port <= r.Ports[0].Last {
					want = r.Path
					break
				}
			}
			got, _ := table.Evaluate(Key{"a", "b", "n", TCP, port})
			require.Equal(t, want, got, "port %d", port)
		}
	})
}

func BenchmarkEvaluate(b *testing.B) {
	for _, paths := range []int{2, 1000} {
		b.Run(fmt.Sprintf("paths=%d", paths), func(b *testing.B) {
			var rules []Rule
			for i := range paths {
				rules = append(rules, Rule{Path: fmt.Sprintf("path-%d", i), From: fmt.Sprintf("machine-%d", i/4), To: "db",
					Network: "back", Protocol: TCP, Ports: []Range{{uint16(1000 + i), uint16(1000 + i)}}})
			}
			table, err := Compile(rules)
			require.NoError(b, err)
			key := Key{"machine-0", "db", "back", TCP, 1001}
			for b.Loop() {
				table.Evaluate(key)
			}
		})
	}
}
