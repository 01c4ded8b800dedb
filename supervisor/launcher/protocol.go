package launcher

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"path/filepath"
	"regexp"
	"strings"

	"vz.test/vz/machines"
	"vz.test/vz/machines/namespace"
)

// version of the protocol. Both ends are the same binary, unless somebody
// replaced it under a running supervisor.
const version = 1

// maxMessage is the largest message in bytes: a Spec with sixteen NICs has
// under 4 KiB, an error with an agent's last words as much.
const maxMessage = 32 << 10

// A request is one message to the launcher.
type request struct {
	Version int
	ID      uint64 // chosen by the client, echoed by the reply; not 0
	Op      op

	Spec      *machines.Spec `json:",omitempty"` // create
	MachineID string         `json:",omitempty"` // kill, clean, remove
	Dir       string         `json:",omitempty"` // remove
	Of        uint64         `json:",omitempty"` // cancel: the ID of a create; has no reply
}

type op string

const (
	opCreate op = "create"
	opKill   op = "kill"
	opClean  op = "clean"
	opRemove op = "remove"
	opCancel op = "cancel"
)

// A reply is one message from the launcher: the answer to the request of that
// ID, or with ID 0 a hello or an event. A created one carries the descriptors
// of the NICs, in order, and then the agent's.
type reply struct {
	Version int
	ID      uint64                 `json:",omitempty"`
	Hello   *hello                 `json:",omitempty"`
	Created *created               `json:",omitempty"`
	Exited  *exited                `json:",omitempty"`
	Failed  string                 `json:",omitempty"`
	Missing *machines.MissingError `json:",omitempty"`
}

// hello is the first message: the launcher is ready.
type hello struct{}

type created struct {
	Capabilities []string
	Notes        []machines.Note
}

// exited is sent once for every created Machine when nothing is left of it.
type exited struct {
	MachineID   string
	Incarnation string
	Why         string
}

func failed(id uint64, err error) reply {
	r := reply{Version: version, ID: id, Failed: err.Error()}
	errors.As(err, &r.Missing)
	return r
}

func (r reply) err() error {
	switch {
	case r.Failed == "":
		return nil
	case r.Missing != nil:
		return &missing{r.Failed, r.Missing}
	}
	return errors.New(r.Failed)
}

// missing is a MissingError with the text around it that it had in the launcher.
type missing struct {
	text  string
	cause *machines.MissingError
}

func (m *missing) Error() string { return m.text }
func (m *missing) Unwrap() error { return m.cause }

var (
	environmentID = regexp.MustCompile(`^env_[0-9A-Za-z]{1,40}$`)
	machineID     = regexp.MustCompile(`^mch_[0-9A-Za-z]{1,40}$`)
	incarnationID = regexp.MustCompile(`^inc_[0-9A-Za-z]{1,40}$`)
	machineName   = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	nicName       = regexp.MustCompile(`^[a-z][a-z0-9]{0,14}$`)
)

// decode reads one message from the supervisor and holds it to what the
// launcher was started for. Its errors are about the peer: a correct one never
// sends such a message.
func decode(data []byte, bounds Options) (request, error) {
	var r request
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil {
		return request{}, err
	}
	if _, err := d.Token(); err != io.EOF {
		return request{}, errors.New("more than one value")
	}
	if err := r.check(bounds); err != nil {
		return request{}, fmt.Errorf("%s: %w", r.Op, err)
	}
	return r, nil
}

func (r request) check(bounds Options) error {
	if r.Version != version {
		return fmt.Errorf("version %d, this is %d", r.Version, version)
	}
	if r.ID == 0 {
		return errors.New("no ID")
	}
	want := request{Version: r.Version, ID: r.ID, Op: r.Op}
	switch r.Op {
	case opCreate:
		if r.Spec == nil {
			return errors.New("no spec")
		}
		if err := checkSpec(*r.Spec, bounds); err != nil {
			return err
		}
		want.Spec = r.Spec
	case opRemove:
		if err := checkDir(r.Dir, bounds.StateDir); err != nil {
			return err
		}
		want.Dir = r.Dir
		fallthrough
	case opKill, opClean:
		if !machineID.MatchString(r.MachineID) {
			return fmt.Errorf("%q is no Machine ID", r.MachineID)
		}
		want.MachineID = r.MachineID
	case opCancel:
		want.Of = r.Of
	default:
		return errors.New("no such request")
	}
	if r != want {
		return errors.New("holds what is not its own")
	}
	return nil
}

func checkSpec(s machines.Spec, bounds Options) error {
	switch {
	case s.EnvironmentID != bounds.EnvironmentID:
		return fmt.Errorf("environment %q, this is %s", s.EnvironmentID, bounds.EnvironmentID)
	case !machineID.MatchString(s.MachineID):
		return fmt.Errorf("%q is no Machine ID", s.MachineID)
	case !incarnationID.MatchString(s.Incarnation):
		return fmt.Errorf("%q is no incarnation", s.Incarnation)
	case !machineName.MatchString(s.Name):
		return fmt.Errorf("%q is no Machine name", s.Name)
	case s.Image != "host":
		return fmt.Errorf("image %q", s.Image)
	case s.Profile != "developer" && s.Profile != "hardened":
		return fmt.Errorf("profile %q", s.Profile)
	case math.IsNaN(s.CPUs) || s.CPUs < 0 || s.CPUs > 4096:
		return fmt.Errorf("%v CPUs", s.CPUs)
	case s.MemoryBytes < 0:
		return fmt.Errorf("%d bytes of memory", s.MemoryBytes)
	case s.Agent != bounds.Agent:
		return fmt.Errorf("agent %q, this launcher has %s", s.Agent, bounds.Agent)
	case len(s.NICs) > namespace.MaxNICs:
		return fmt.Errorf("%d interfaces, at most %d", len(s.NICs), namespace.MaxNICs)
	}
	if err := checkDir(s.Dir, bounds.StateDir); err != nil {
		return err
	}
	names := map[string]bool{"lo": true}
	for _, nic := range s.NICs {
		mac, err := net.ParseMAC(nic.MAC)
		switch {
		case !nicName.MatchString(nic.Name) || names[nic.Name]:
			return fmt.Errorf("interface name %q", nic.Name)
		case err != nil || len(mac) != 6 || mac[0]&1 != 0:
			return fmt.Errorf("interface %s: MAC %q", nic.Name, nic.MAC)
		// IPv4's least (RFC 791), and what a TAP takes.
		case nic.MTU < 68 || nic.MTU > 65521:
			return fmt.Errorf("interface %s: MTU %d", nic.Name, nic.MTU)
		case len(nic.Network) > 255:
			return fmt.Errorf("interface %s: network's name", nic.Name)
		}
		names[nic.Name] = true
	}
	return nil
}

// checkDir is lexical; the walk itself does not leave the state directory
// either, whatever links lie in it.
func checkDir(dir, stateDir string) error {
	rel, ok := strings.CutPrefix(dir, strings.TrimSuffix(stateDir, "/")+"/")
	if !ok || rel == "" || filepath.Clean(dir) != dir || !filepath.IsLocal(rel) {
		return fmt.Errorf("%q is not below %s", dir, stateDir)
	}
	return nil
}
