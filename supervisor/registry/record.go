package registry

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"vz.test/vz/config"
	"vz.test/vz/guest/wire"
	"vz.test/vz/internal/durable"
	"vz.test/vz/supervisor/api/vzv1"
)

// State is that of an Environment, as recorded. It is what the last writer saw;
// whether a supervisor lives is the owner lock's to say.
type State string

const (
	Created     State = "created"     // identity only; never up
	Reconciling State = "reconciling" // an up is under way
	Ready       State = "ready"
	Degraded    State = "degraded" // up, but something declared is not
	Failed      State = "failed"   // the last up failed
	Stopping    State = "stopping"
	Stopped     State = "stopped"
	Deleting    State = "deleting"
)

// MachineState is that of a Machine, as recorded.
type MachineState string

const (
	MachineDeclared MachineState = "declared" // has an identity, never booted
	MachineStarting MachineState = "starting"
	MachineReady    MachineState = "ready"
	MachineStopping MachineState = "stopping"
	MachineStopped  MachineState = "stopped"
	MachineFailed   MachineState = "failed"
)

// message is the state as the API has it; UNSPECIFIED when it is unknown.
func (s State) message() vzv1.EnvironmentState {
	return vzv1.EnvironmentState(vzv1.EnvironmentState_value["ENVIRONMENT_STATE_"+strings.ToUpper(string(s))])
}

func (s MachineState) message() vzv1.MachineState {
	return vzv1.MachineState(vzv1.MachineState_value["MACHINE_STATE_"+strings.ToUpper(string(s))])
}

// A Record is what is persisted of one Environment. What it has for Machines,
// attachments and endpoints are also the allocations that outlive every up,
// stop and rebuild: names to IDs, addresses, public addresses and MACs.
//
// The holder of the owner lock is its only writer, except at creation.
type Record struct {
	Version       int       `json:"version"`
	ProjectID     string    `json:"project_id"`
	ProjectName   string    `json:"project_name"`
	EnvironmentID string    `json:"environment_id"`
	Name          string    `json:"name"`
	OwnerUID      int       `json:"owner_uid"`
	CreatedAt     time.Time `json:"created_at"`
	UpdatedAt     time.Time `json:"updated_at"`
	State         State     `json:"state"`
	Message       string    `json:"message,omitempty"` // why the state is not Ready
	Worktree      string    `json:"worktree,omitempty"`
	// DefinitionDigest is that of the text that Definition reads.
	DefinitionDigest string `json:"definition_digest,omitempty"`
	// Revision counts the definitions that the Environment was reconciled to.
	Revision       uint64      `json:"revision"`
	DefaultMachine string      `json:"default_machine,omitempty"`
	Machines       []Machine   `json:"machines,omitempty"`
	Networks       []Network   `json:"networks,omitempty"`
	Endpoints      []Endpoint  `json:"endpoints,omitempty"`
	Proxy          Proxy       `json:"proxy,omitzero"`
	Supervisor     *Supervisor `json:"supervisor,omitempty"` // the last one; Alive says whether it lives
}

type Machine struct {
	MachineID   string       `json:"machine_id"`
	Name        string       `json:"name"`
	State       MachineState `json:"state"`
	Incarnation string       `json:"incarnation,omitempty"`
	Message     string       `json:"message,omitempty"`
	OS          string       `json:"os,omitempty"`
	Arch        string       `json:"arch,omitempty"` // resolved: never "host"
	Image       string       `json:"image,omitempty"`
	Profile     string       `json:"profile,omitempty"`
	Isolation   string       `json:"isolation,omitempty"`
	Driver      string       `json:"driver,omitempty"`
	Accelerator string       `json:"accelerator,omitempty"`
	Requested   []string     `json:"requested,omitempty"` // capabilities
	Negotiated  []string     `json:"negotiated,omitempty"`
	Notes       []Note       `json:"notes,omitempty"`
	Attachments []Attachment `json:"attachments,omitempty"`
	ReadyAt     time.Time    `json:"ready_at,omitzero"`
}

// Note says which capability could not be had, and why.
type Note struct {
	Capability string `json:"capability"`
	Reason     string `json:"reason"`
}

type Attachment struct {
	Network       string `json:"network"`
	Address       string `json:"address"`
	PublicAddress string `json:"public_address,omitempty"` // on an edge
	MAC           string `json:"mac"`
	Interface     string `json:"interface"`
}

type Network struct {
	Name    string `json:"name"`
	Kind    string `json:"kind"`
	CIDR    string `json:"cidr"`
	Gateway string `json:"gateway"`
	MTU     int    `json:"mtu"` // bytes of an IP packet
	Refuse  string `json:"refuse"`
}

type Endpoint struct {
	Name           string `json:"name"`
	Host           string `json:"host"`
	Network        string `json:"network"`
	Kind           string `json:"kind"`
	Address        string `json:"address"` // synthetic public address
	BackendMachine string `json:"backend_machine"`
	BackendPort    int    `json:"backend_port"`
	URL            string `json:"url"`
}

// Proxy is the host's way to the endpoints. Port is asked for again by the next
// supervisor, so that what was configured with it goes on working.
type Proxy struct {
	Port     int    `json:"port,omitempty"`
	URL      string `json:"url,omitempty"`
	SocksURL string `json:"socks_url,omitempty"`
	PACURL   string `json:"pac_url,omitempty"`
	CAPath   string `json:"ca_path,omitempty"`
}

// Supervisor is who wrote the record last.
type Supervisor struct {
	PID       int       `json:"pid"`
	Process   string    `json:"process"` // tells this life of the PID from later ones
	Socket    string    `json:"socket"`
	Version   string    `json:"version"`
	StartedAt time.Time `json:"started_at"`
}

// Self is the calling process as a supervisor that listens on socket.
func Self(socket, version string) (*Supervisor, error) {
	pid := os.Getpid()
	process, err := processIdentity(pid)
	if err != nil {
		return nil, &FileError{"cannot tell when the process started:", fmt.Sprint(pid), err, "see that /proc is mounted"}
	}
	return &Supervisor{PID: pid, Process: process, Socket: socket, Version: version, StartedAt: time.Now().UTC()}, nil
}

// Alive says whether that very process still runs. It is a hint for messages
// and for whom to signal; who owns the Environment is the lock's to say.
func (s *Supervisor) Alive() bool {
	if s == nil || s.PID <= 0 {
		return false
	}
	process, err := processIdentity(s.PID)
	return err == nil && process == s.Process
}

// Machine finds a Machine by name or ID; nil when there is none. The result
// points into the record.
func (r *Record) Machine(nameOrID string) *Machine {
	i := slices.IndexFunc(r.Machines, func(m Machine) bool { return m.Name == nameOrID || m.MachineID == nameOrID })
	if i < 0 {
		return nil
	}
	return &r.Machines[i]
}

// Clone is a copy that shares nothing with r.
func (r *Record) Clone() *Record {
	c := *r
	c.Machines = slices.Clone(r.Machines)
	for i := range c.Machines {
		m := &c.Machines[i]
		m.Requested, m.Negotiated = slices.Clone(m.Requested), slices.Clone(m.Negotiated)
		m.Notes, m.Attachments = slices.Clone(m.Notes), slices.Clone(m.Attachments)
	}
	c.Networks, c.Endpoints = slices.Clone(r.Networks), slices.Clone(r.Endpoints)
	if r.Supervisor != nil {
		s := *r.Supervisor
		c.Supervisor = &s
	}
	return &c
}

func (r *Record) validate() error {
	if err := CheckID(r.ProjectID, KindProject); err != nil {
		return err
	}
	if err := CheckID(r.EnvironmentID, KindEnvironment); err != nil {
		return err
	}
	if err := CheckName(r.Name); err != nil {
		return err
	}
	if r.State.message() == vzv1.EnvironmentState_ENVIRONMENT_STATE_UNSPECIFIED {
		return fmt.Errorf("%q is no state of an Environment", r.State)
	}
	for i, m := range r.Machines {
		if err := CheckID(m.MachineID, KindMachine); err != nil {
			return err
		}
		if m.Incarnation != "" {
			if err := CheckID(m.Incarnation, KindIncarnation); err != nil {
				return err
			}
		}
		if m.State.message() == vzv1.MachineState_MACHINE_STATE_UNSPECIFIED {
			return fmt.Errorf("%q is no state of a Machine", m.State)
		}
		for _, other := range r.Machines[:i] {
			if other.MachineID == m.MachineID || other.Name == m.Name {
				return fmt.Errorf("Machine %s (%s) stands in it twice", m.Name, m.MachineID)
			}
		}
	}
	return nil
}

func newRecord() *Record { return new(Record) }

// Record reads what is recorded of an Environment. Errors are *MissingError,
// *NewerVersionError, *CorruptError, *FileError.
func (r *Registry) Record(environment string) (*Record, error) {
	if err := CheckID(environment, KindEnvironment); err != nil {
		return nil, err
	}
	if err := r.check(r.root); err != nil {
		return nil, err
	}
	path := r.RecordPath(environment)
	record, err := readDocument(r, path, newRecord,
		"`vz delete --environment "+environment+"` takes away what there is of it")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, &MissingError{environment}
	}
	if err == nil && record.EnvironmentID != environment {
		return nil, &CorruptError{path, fmt.Errorf("it is the record of %s", record.EnvironmentID), "move it out of the way"}
	}
	return record, err
}

// Save persists a record; it sets Version and UpdatedAt. The caller holds the
// Environment's owner lock.
func (r *Registry) Save(record *Record) error {
	if !r.exists(record.EnvironmentID) {
		return &MissingError{record.EnvironmentID} // deleted meanwhile; not to be made again
	}
	record.Version = version
	record.UpdatedAt = r.now().UTC()
	return writeDocument(r.RecordPath(record.EnvironmentID), record, newRecord)
}

// SaveDefinition persists the text of vz.json and sets record's digest; the
// caller saves the record next. A crash in between leaves the earlier text to
// be read, which the persisted record still names. The caller holds the owner
// lock.
func (r *Registry) SaveDefinition(record *Record, text []byte) error {
	path := r.DefinitionPath(record.EnvironmentID)
	digest := config.Digest(text)
	old, err := readFile(path)
	switch {
	case err == nil && config.Digest(old) == digest:
		record.DefinitionDigest = digest
		return nil
	case err == nil && config.Digest(old) == record.DefinitionDigest:
		err = keepPrevious(path, old)
	case errors.Is(err, fs.ErrNotExist):
		err = nil
	}
	if err == nil {
		err = durable.Replace(path, text, 0o600)
	}
	if err != nil {
		return &FileError{"cannot write", path, err, "see that its directory can be written to and the disk is not full"}
	}
	record.DefinitionDigest = digest
	return nil
}

// Definition is the text of vz.json that record names by its digest. An
// Environment that was never up has none: fs.ErrNotExist.
func (r *Registry) Definition(record *Record) ([]byte, error) {
	path := r.DefinitionPath(record.EnvironmentID)
	if record.DefinitionDigest == "" {
		return nil, &FileError{"cannot read", path, fs.ErrNotExist, "`vz up` writes it"}
	}
	text, err := readFile(path)
	if err == nil && config.Digest(text) == record.DefinitionDigest {
		return text, nil
	}
	damage := err
	if damage == nil {
		damage = errors.New("it is not the text that the record names")
	}
	if text, err = readFile(path + previousSuffix); err == nil && config.Digest(text) == record.DefinitionDigest {
		r.warn(&RestoredError{path, damage})
		return text, nil
	}
	return nil, &CorruptError{path, damage, "`vz up` takes it from the project's " + DefinitionName + " again"}
}

// LockState is what is known of an Environment's supervisor when its record is
// projected.
type LockState int

const (
	// LockFree: no supervisor lives.
	LockFree LockState = iota
	// LockSilent: one lives and does not answer.
	LockSilent
	// LockSelf: the caller is the supervisor. It fills in health and all that
	// is live.
	LockSelf
)

// Project is a record as the API's aggregate. Paths, processes, faults and
// counters are left empty: they are a living supervisor's to tell.
func Project(r *Record, lock LockState) *vzv1.Environment {
	e := &vzv1.Environment{
		ProjectId: r.ProjectID, ProjectName: r.ProjectName, EnvironmentId: r.EnvironmentID, Name: r.Name,
		State: r.State.message(), Message: r.Message, DefinitionDigest: r.DefinitionDigest,
		CreatedAt: timestamp(r.CreatedAt), UpdatedAt: timestamp(r.UpdatedAt),
		Worktree: r.Worktree, DefaultMachine: r.DefaultMachine,
	}
	if lock == LockFree {
		switch r.State {
		case Ready, Degraded, Reconciling, Stopping, Deleting:
			e.Message = strings.TrimPrefix(e.Message+"; ", "; ") +
				"its supervisor is gone: run `vz up` to bring it back, or `vz stop` or `vz delete` to clear it away"
		}
	}
	if s := r.Supervisor; s != nil && lock != LockFree {
		e.Supervisor = &vzv1.Supervisor{Pid: int32(s.PID), Version: s.Version, Socket: s.Socket, StartedAt: timestamp(s.StartedAt)}
	}
	if p := r.Proxy; p != (Proxy{}) {
		e.Proxy = &vzv1.Proxy{CaPath: p.CAPath}
		if lock != LockFree { // nobody listens otherwise
			e.Proxy.Url, e.Proxy.SocksUrl, e.Proxy.PacUrl = p.URL, p.SocksURL, p.PACURL
		}
	}
	for i := range r.Machines {
		m := ProjectMachine(&r.Machines[i])
		switch lock {
		case LockFree:
			m.Health, m.HealthReason = Health(&r.Machines[i], SessionView{})
		case LockSilent:
			m.Health = vzv1.Health_HEALTH_UNOBSERVABLE
			m.HealthReason = "the supervisor holds the Environment and does not answer"
		}
		e.Machines = append(e.Machines, m)
	}
	for _, n := range r.Networks {
		e.Networks = append(e.Networks, &vzv1.Network{
			Name: n.Name, Kind: n.Kind, Cidr: n.CIDR, Gateway: n.Gateway, Mtu: uint32(n.MTU), Refuse: n.Refuse,
		})
	}
	for _, p := range r.Endpoints {
		e.Endpoints = append(e.Endpoints, &vzv1.Endpoint{
			Name: p.Name, Host: p.Host, Network: p.Network, Kind: p.Kind, Address: p.Address,
			BackendMachine: p.BackendMachine, BackendPort: uint32(p.BackendPort), Url: p.URL,
		})
	}
	return e
}

// ProjectMachine is a Machine's part of the record as the API has it, without
// its health and all that is live.
func ProjectMachine(m *Machine) *vzv1.Machine {
	p := &vzv1.Machine{
		MachineId: m.MachineID, Name: m.Name, State: m.State.message(), Message: m.Message,
		Incarnation: m.Incarnation, Os: m.OS, Arch: m.Arch, Image: m.Image, Profile: m.Profile,
		Isolation: m.Isolation, Driver: m.Driver, Accelerator: m.Accelerator,
		Capabilities: &vzv1.Capabilities{Requested: slices.Clone(m.Requested), Negotiated: slices.Clone(m.Negotiated)},
		ReadyAt:      timestamp(m.ReadyAt),
	}
	for _, n := range m.Notes {
		p.Capabilities.Notes = append(p.Capabilities.Notes, &wire.Note{Capability: n.Capability, Reason: n.Reason})
	}
	for _, a := range m.Attachments {
		p.Attachments = append(p.Attachments, &vzv1.Attachment{
			Network: a.Network, Address: a.Address, PublicAddress: a.PublicAddress, Mac: a.MAC, Interface: a.Interface,
		})
	}
	return p
}

func timestamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}
