package launcher

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"vz.test/vz/machines"
)

var bounds = Options{EnvironmentID: "env_1", StateDir: "/state/env_1", Agent: "/usr/bin/vz-guest"}

func goodSpec() machines.Spec {
	return machines.Spec{
		EnvironmentID: "env_1", MachineID: "mch_1", Incarnation: "inc_1", Name: "web",
		Image: "host", Profile: "developer", CPUs: 1.5, MemoryBytes: 1 << 30,
		NICs:  []machines.NIC{{Network: "back", Name: "eth0", MAC: "02:00:5e:00:00:01", MTU: 1500}},
		Dir:   "/state/env_1/machines/mch_1",
		Agent: "/usr/bin/vz-guest",
	}
}

func encode(t testing.TB, r request) []byte {
	data, err := json.Marshal(r)
	require.NoError(t, err)
	return data
}

func TestDecode(t *testing.T) {
	spec := goodSpec()
	for _, r := range []request{
		{Version: 1, ID: 1, Op: opCreate, Spec: &spec},
		{Version: 1, ID: 1, Op: opKill, MachineID: "mch_1"},
		{Version: 1, ID: 1, Op: opClean, MachineID: "mch_1"},
		{Version: 1, ID: 1, Op: opRemove, MachineID: "mch_1", Dir: "/state/env_1/machines/mch_1"},
		{Version: 1, ID: 2, Op: opCancel, Of: 1},
	} {
		got, err := decode(encode(t, r), bounds)
		require.NoError(t, err, r.Op)
		assert.Equal(t, r, got)
	}
	for _, r := range []request{
		{Version: 2, ID: 1, Op: opKill, MachineID: "mch_1"},
		{Version: 1, Op: opKill, MachineID: "mch_1"},
		{Version: 1, ID: 1, Op: "run", MachineID: "mch_1"},
		{Version: 1, ID: 1, Op: opKill},
		{Version: 1, ID: 1, Op: opKill, MachineID: "mch_../.."},
		{Version: 1, ID: 1, Op: opKill, MachineID: "mch_1", Dir: "/state/env_1/x"},
		{Version: 1, ID: 1, Op: opKill, MachineID: "mch_1", Spec: &spec},
		{Version: 1, ID: 1, Op: opCreate},
		{Version: 1, ID: 1, Op: opRemove, MachineID: "mch_1"},
		{Version: 1, ID: 1, Op: opRemove, MachineID: "mch_1", Dir: "/state/env_1"},
		{Version: 1, ID: 1, Op: opRemove, MachineID: "mch_1", Dir: "/state/env_1/"},
		{Version: 1, ID: 1, Op: opRemove, MachineID: "mch_1", Dir: "/state/env_1/../env_2"},
		{Version: 1, ID: 1, Op: opRemove, MachineID: "mch_1", Dir: "/state/env_10/x"},
		{Version: 1, ID: 1, Op: opRemove, MachineID: "mch_1", Dir: "state/env_1/x"},
	} {
		_, err := decode(encode(t, r), bounds)
		assert.Error(t, err, "%+v", r)
	}
	for _, text := range []string{
		"", "null", "[]", "{}", `{"Version":1,"ID":1,"Op":"kill","MachineID":"mch_1","Extra":1}`,
		`{"Version":1,"ID":1,"Op":"kill","MachineID":"mch_1"} {}`,
	} {
		_, err := decode([]byte(text), bounds)
		assert.Error(t, err, text)
	}
}

func TestDecodeSpec(t *testing.T) {
	for name, spoil := range map[string]func(*machines.Spec){
		"another environment": func(s *machines.Spec) { s.EnvironmentID = "env_2" },
		"machine ID":          func(s *machines.Spec) { s.MachineID = "mch_/" },
		"no incarnation":      func(s *machines.Spec) { s.Incarnation = "" },
		"name":                func(s *machines.Spec) { s.Name = "a b" },
		"long name":           func(s *machines.Spec) { s.Name = strings.Repeat("a", 64) },
		"image":               func(s *machines.Spec) { s.Image = "debian" },
		"profile":             func(s *machines.Spec) { s.Profile = "" },
		"CPUs":                func(s *machines.Spec) { s.CPUs = -1 },
		"memory":              func(s *machines.Spec) { s.MemoryBytes = -1 },
		"another agent":       func(s *machines.Spec) { s.Agent = "/etc/shadow" },
		"a dir elsewhere":     func(s *machines.Spec) { s.Dir = "/etc" },
		"the state directory": func(s *machines.Spec) { s.Dir = "/state/env_1" },
		"lo":                  func(s *machines.Spec) { s.NICs[0].Name = "lo" },
		"interface name":      func(s *machines.Spec) { s.NICs[0].Name = "eth0/../x" },
		"long interface name": func(s *machines.Spec) { s.NICs[0].Name = "abcdefghijklmnop" },
		"twice":               func(s *machines.Spec) { s.NICs = append(s.NICs, s.NICs[0]) },
		"multicast MAC":       func(s *machines.Spec) { s.NICs[0].MAC = "01:00:00:00:00:00" },
		"MAC of 8 bytes":      func(s *machines.Spec) { s.NICs[0].MAC = "02:00:00:00:00:00:00:00" },
		"no MAC":              func(s *machines.Spec) { s.NICs[0].MAC = "" },
		"MTU":                 func(s *machines.Spec) { s.NICs[0].MTU = 67 },
		"large MTU":           func(s *machines.Spec) { s.NICs[0].MTU = 65522 },
		"many": func(s *machines.Spec) {
			s.NICs = make([]machines.NIC, 17)
		},
	} {
		spec := goodSpec()
		spoil(&spec)
		_, err := decode(encode(t, request{Version: 1, ID: 1, Op: opCreate, Spec: &spec}), bounds)
		assert.Error(t, err, name)
	}
}

// FuzzRequest looks for a message that gets past decode and asks for something
// outside the bounds.
func FuzzRequest(f *testing.F) {
	spec := goodSpec()
	f.Add(encode(f, request{Version: 1, ID: 1, Op: opCreate, Spec: &spec}))
	f.Add(encode(f, request{Version: 1, ID: 1, Op: opRemove, MachineID: "mch_1", Dir: "/state/env_1/machines/mch_1"}))
	f.Add(encode(f, request{Version: 1, ID: 2, Op: opCancel, Of: 1}))
	f.Add([]byte(`{"Version":1,"ID":1,"Op":"remove","MachineID":"mch_1","Dir":"/state/env_1/../../etc"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := decode(data, bounds)
		if err != nil {
			return
		}
		dir := r.Dir
		if r.Op == opCreate {
			dir = r.Spec.Dir
			assert.Equal(t, "env_1", r.Spec.EnvironmentID)
			assert.Equal(t, bounds.Agent, r.Spec.Agent)
			assert.NotContains(t, r.Spec.MachineID, "/")
			assert.LessOrEqual(t, len(r.Spec.NICs), 16)
		}
		if r.Op == opCreate || r.Op == opRemove {
			assert.True(t, strings.HasPrefix(dir, "/state/env_1/"), dir)
			assert.NotContains(t, strings.Split(dir, "/"), "..") // dots in a name are a name
		}
		again, err := decode(encode(t, r), bounds)
		require.NoError(t, err)
		assert.Equal(t, r, again)
	})
}

func TestErrorsCross(t *testing.T) {
	cause := &machines.MissingError{What: "/dev/net/tun", Why: "permission denied", Remedy: "chmod"}
	data, err := json.Marshal(failed(1, cause))
	require.NoError(t, err)
	var r reply
	require.NoError(t, json.Unmarshal(data, &r))
	got := (*machines.MissingError)(nil)
	require.ErrorAs(t, r.err(), &got)
	assert.Equal(t, cause, got)
	assert.Equal(t, cause.Error(), r.err().Error())
	assert.NoError(t, reply{}.err())
}
