package config

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// FuzzParse: no text makes Parse panic or go on for ever; a mistake always has
// a place; what parses reads back equal, and Admit has an answer to it.
func FuzzParse(f *testing.F) {
	// Small seeds: the fuzzer spends its time on shortening long ones.
	small := `{"schema_version":1,"project_id":"prj_01kbcdefghjkmnpqrstvwxyz01","name":"a","machines":{"m":{"target":{"os":"linux","arch":"host","image":"host"},"profile":"developer","isolation":"vm"%s}}%s}`
	for _, parts := range [][2]string{
		{``, ``},
		{`,"networks":[{"name":"n","address":"10.0.0.9"}]`, `,"networks":{"n":{"kind":"private","cidr":"10.0.0.0/8","mtu":1500}},"paths":[{"name":"p","from":"group:g","to":"group:g","network":"n","protocol":"tcp","ports":[1,"2-3"]}],"groups":{"g":["m"]}`},
		{`,"networks":[{"name":"e"}]`, `,"networks":{"e":{"kind":"simulated_public"}},"endpoints":{"s":{"host":"s.test","network":"e","kind":"https","backend":{"machine":"m","port":80}}},"faults":[{"name":"f","path":"host:s","seed":1,"ttl_millis":1,"loss":{"probability":1e-3}}]`},
		{`,"egress":{"mode":"allowlist","allow":[{"domain":"*.a.b","ports":[1]},{"cidr":"10.0.0.0/8"}]},"volumes":[{"name":"v","mount_path":"/v"}]`, `,"volumes":{"v":{"kind":"block","size_bytes":1e9}}`},
		{`,"projections":[{"source_path":".","mount_path":"/w","mode":"snapshot"}],"resources":{"cpus":0.5}`, `,"zones":{"z":{"records":[{"name":"@","type":"A","values":["1.2.3.4"]}]}},"secrets":{"s":{"from_env":"A"}}`},
	} {
		text := fmt.Sprintf(small, parts[0], parts[1])
		_, err := Parse([]byte(text))
		require.NoError(f, err, text)
		f.Add([]byte(text))
	}
	for _, text := range []string{
		``, `{`, `[]`, `null`, `{"a":1,"a":2}`, "{\"\xff\":0}", `{"name":1e999999999}`, `{"machines":{"a":{"networks":[{}]}}}`,
		`{"paths":[{"ports":["65535-1"]}],"faults":[{"loss":{}}]}`, `{"networks":{"\u0000":{"cidr":"10.0.0.0/0"}}}`, `{"~/":{"~1":[]}}`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		def, err := Parse(data)
		if err != nil {
			all, ok := errors.AsType[Errors](err)
			require.True(t, ok, "%T", err)
			for _, one := range all {
				require.Positive(t, one.Line)
				require.Positive(t, one.Column)
				require.NotEmpty(t, one.Problem)
			}
			require.NotEmpty(t, err.Error())
			return
		}
		text, err := def.JSON()
		require.NoError(t, err)
		again, err := Parse(text)
		require.NoError(t, err, string(text))
		require.Equal(t, def, again)
		second, err := again.JSON()
		require.NoError(t, err)
		require.Equal(t, string(text), string(second), "one definition has one canonical text")
		if err := Admit(def, linux); err != nil {
			require.ErrorIs(t, err, errors.ErrUnsupported)
		}
	})
}

// Definitions made in Go, of every size and shape, are read back equal.
func TestRoundTripGenerated(t *testing.T) {
	for seed := range uint64(200) {
		def := generate(rand.New(rand.NewPCG(seed, 0)))
		text, err := def.JSON()
		require.NoError(t, err)
		again, err := Parse(text)
		require.NoError(t, err, "seed %d\n%s", seed, text)
		assert.Equal(t, def, again, "seed %d", seed)
	}
}

func generate(r *rand.Rand) *Definition {
	chance := func() bool { return r.IntN(2) == 0 }
	flag := func() *bool { v := chance(); return &v }
	port := func() int { return 1 + r.IntN(65535) }
	d := &Definition{SchemaVersion: 1, ProjectID: fmt.Sprintf("prj_01kbcdefghjkmnpqrstvwxyz%02d", r.IntN(100)), Name: "generated",
		Networks: map[string]Network{}, Machines: map[string]Machine{}}
	networks := 1 + r.IntN(4)
	for i := range networks {
		n := Network{Kind: NetworkPrivate, CIDR: fmt.Sprintf("10.%d.0.0/24", i)}
		if i == 0 {
			n = Network{Kind: NetworkSimulatedPublic}
		}
		if chance() {
			n.MTU, n.Refuse, n.IPv6 = 1280+r.IntN(60000), []string{"reset", "prohibited", "drop"}[r.IntN(3)], flag()
		}
		d.Networks[fmt.Sprintf("net%d", i)] = n
	}
	machines := 1 + r.IntN(5)
	for i := range machines {
		m := Machine{Target: Target{"linux", "host", "host"}, Profile: "developer", Docker: flag(), Isolation: "namespace"}
		for j := range networks {
			m.Networks = append(m.Networks, Attachment{Name: fmt.Sprintf("net%d", j)})
			if j > 0 && chance() {
				m.Networks[j].Address = fmt.Sprintf("10.%d.0.%d", j, 10+i)
			}
		}
		if chance() {
			m.Resources = Resources{CPUs: float64(1+r.IntN(64)) / 8, MemoryBytes: 1 << (25 + r.IntN(8))}
			m.Processes = map[string]Process{"p": {Command: []string{"sh", "-c", "echo \"é\" <&>\u2028\n"}, Env: map[string]string{"A": ""}, Ready: &Ready{TCPPort: port()}}}
			m.HostExports = []HostExport{{Name: "e", Protocol: "tcp", Port: port()}}
			m.Egress = &Egress{Mode: "allowlist", Allow: []EgressRule{{Domain: "*.example.com", Ports: []Port{{1, 1}, {2, 65535}}}}}
		}
		d.Machines[fmt.Sprintf("m%d", i)] = m
	}
	d.Endpoints = map[string]Endpoint{"e": {Host: "e.test", Network: "net0", Kind: "https", RedirectHTTP: flag(), Backend: Backend{Machine: "m0", Port: port()}}}
	for i := range r.IntN(10) {
		p := Path{Name: fmt.Sprintf("p%d", i), From: "m0", To: "endpoint:e", Network: "net0", Protocol: "tcp", Ports: []Port{{443, 443}}}
		if machines > 1 && chance() {
			first := uint16(port())
			p = Path{Name: p.Name, From: "m0", To: "m1", Network: "net0", Protocol: "udp", Ports: []Port{{first, first + uint16(r.IntN(65536-int(first)))}}}
		}
		d.Paths = append(d.Paths, p)
	}
	for i := range r.IntN(5) {
		f := Fault{Name: fmt.Sprintf("f%d", i), Path: "host:e", Seed: r.Uint64(), AtMillis: r.Int64N(1000), TTLMillis: 1 + r.Int64N(3600000)}
		if chance() {
			f.Latency = &LatencyFault{DelayMillis: 1 + r.Int64N(10000)}
		} else {
			f.Loss = &LossFault{Probability: 1 - r.Float64()}
		}
		d.Faults = append(d.Faults, f)
	}
	return d
}
