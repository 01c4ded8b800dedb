// Package config is what a vz.json says: the ProjectDefinition as immutable Go
// values, the parser that finds every mistake of a document at once with its
// place in the text, the admission that refuses by name what a host and this
// version cannot do, and the matrix of capabilities that it names.
//
// Use: Load or Parse a document, Admit what they return. To write a definition
// in Go, fill in a Definition, Validate it, and keep what JSON returns.
//
// Non-goals: nothing here makes an ID, reads a worktree beyond the one file it
// is given, or knows how a Machine or a network is made; project IDs are only
// checked for their form.
package config

// Definition is a ProjectDefinition: what vz.json says. A Definition that Parse
// returned is valid and immutable; nobody writes to it again.
// Built in Go it is the authoring API: JSON writes the document that Parse
// reads back.
type Definition struct {
	Schema         string              `json:"$schema,omitempty"`
	SchemaVersion  int                 `json:"schema_version"`
	ProjectID      string              `json:"project_id"`
	Name           string              `json:"name"`
	DefaultMachine string              `json:"default_machine,omitempty"`
	Networks       map[string]Network  `json:"networks,omitempty"`
	Groups         map[string][]string `json:"groups,omitempty"` // name → Machines
	Machines       map[string]Machine  `json:"machines"`
	Paths          []Path              `json:"paths,omitempty"`
	Endpoints      map[string]Endpoint `json:"endpoints,omitempty"`
	Zones          map[string]Zone     `json:"zones,omitempty"` // extra DNS zones by name
	Volumes        map[string]Volume   `json:"volumes,omitempty"`
	Secrets        map[string]Secret   `json:"secrets,omitempty"`
	Faults         []Fault             `json:"faults,omitempty"`
}

// Network kinds.
const (
	NetworkPrivate         = "private"
	NetworkSimulatedPublic = "simulated_public"
)

// Network is a named L3 network. On a simulated_public one, CIDR is the inside
// range of the Machines' attachments; left out, one of 100.64.0.0/10 (RFC 6598)
// is taken.
type Network struct {
	Kind   string `json:"kind"`
	CIDR   string `json:"cidr,omitempty"`
	CIDR6  string `json:"cidr6,omitempty"`  // empty: one of fd00::/8
	MTU    int    `json:"mtu,omitempty"`    // bytes of an IP packet; 0: 1500
	Refuse string `json:"refuse,omitempty"` // reset, prohibited, drop; empty: reset
	IPv6   *bool  `json:"ipv6,omitempty"`
	NAT    *NAT   `json:"nat,omitempty"`
}

// NAT is the edge's behaviour in the terms of RFC 4787 and RFC 5382.
type NAT struct {
	Mapping   string `json:"mapping,omitempty"`   // endpoint_independent, address_dependent, address_and_port_dependent
	Filtering string `json:"filtering,omitempty"` // the same
	Hairpin   *bool  `json:"hairpin,omitempty"`
}

// Machine is a target-native computer.
type Machine struct {
	Target       Target             `json:"target"`
	Profile      string             `json:"profile"` // developer, hardened
	Docker       *bool              `json:"docker,omitempty"`
	Isolation    string             `json:"isolation"` // vm, namespace
	Driver       string             `json:"driver,omitempty"`
	Capabilities []string           `json:"capabilities,omitempty"` // requested
	Resources    Resources          `json:"resources,omitzero"`
	Networks     []Attachment       `json:"networks,omitempty"`
	Projections  []Projection       `json:"projections,omitempty"`
	Volumes      []VolumeMount      `json:"volumes,omitempty"`
	Secrets      []SecretDelivery   `json:"secrets,omitempty"`
	Processes    map[string]Process `json:"processes,omitempty"`
	Egress       *Egress            `json:"egress,omitempty"` // nil: offline
	HostImports  []HostImport       `json:"host_imports,omitempty"`
	HostExports  []HostExport       `json:"host_exports,omitempty"`
}

// Target is what a Machine is a computer of.
type Target struct {
	OS    string `json:"os"`
	Arch  string `json:"arch"` // host, amd64, arm64
	Image string `json:"image"`
}

// Resources are limits; zero means the driver's default.
type Resources struct {
	CPUs        float64 `json:"cpus,omitempty"`
	MemoryBytes int64   `json:"memory_bytes,omitempty"`
	DiskBytes   int64   `json:"disk_bytes,omitempty"`
}

// Attachment joins a Machine to a network by a segment of its own.
type Attachment struct {
	Name     string `json:"name"`
	Address  string `json:"address,omitempty"` // empty: allocated
	Address6 string `json:"address6,omitempty"`
}

// Projection mounts a part of the worktree into a Machine.
type Projection struct {
	SourcePath string `json:"source_path"` // relative to the worktree's root
	MountPath  string `json:"mount_path"`
	Mode       string `json:"mode"` // read_write, read_only, snapshot
}

// VolumeMount mounts one of the Environment's volumes.
type VolumeMount struct {
	Name      string `json:"name"`
	MountPath string `json:"mount_path"`
	ReadOnly  bool   `json:"read_only,omitempty"`
}

// SecretDelivery brings a secret into a Machine: as a variable or as a file.
type SecretDelivery struct {
	Name string `json:"name"`
	Env  string `json:"env,omitempty"`  // variable of declared processes
	File string `json:"file,omitempty"` // path on a tmpfs
}

// Process is a declared, supervised program.
type Process struct {
	Command []string          `json:"command"`
	Env     map[string]string `json:"env,omitempty"`
	Cwd     string            `json:"cwd,omitempty"`
	Restart string            `json:"restart,omitempty"` // never, on_failure, always; empty: never
	Ready   *Ready            `json:"ready,omitempty"`
}

// Ready says when a process is ready: when TCPPort of the Machine's loopback
// answers.
type Ready struct {
	TCPPort int `json:"tcp_port,omitempty"`
}

// Egress is what a Machine may reach outside its Environment.
type Egress struct {
	Mode      string       `json:"mode"` // offline, allowed, allowlist
	Allow     []EgressRule `json:"allow,omitempty"`
	HostProxy bool         `json:"host_proxy,omitempty"` // by way of the host's HTTPS_PROXY
}

// EgressRule allows a domain or a range, not both.
type EgressRule struct {
	Domain   string `json:"domain,omitempty"`
	CIDR     string `json:"cidr,omitempty"`
	Protocol string `json:"protocol,omitempty"`
	Ports    []Port `json:"ports,omitempty"`
}

// HostImport gives one port of the host's loopback to one Machine.
type HostImport struct {
	Name     string `json:"name"`
	Protocol string `json:"protocol"`
	HostPort int    `json:"host_port"`
	Family   string `json:"family,omitempty"` // ipv4, ipv6; empty: both are tried
}

// HostExport gives one port of a Machine to the host's loopback.
type HostExport struct {
	Name          string `json:"name"`
	Protocol      string `json:"protocol"`
	Port          int    `json:"port"`
	HostPort      int    `json:"host_port"` // 0: picked, reported and kept
	ProxyProtocol bool   `json:"proxy_protocol,omitempty"`
}

// Path is a declared service path. From is MACHINE, group:NAME or host; To is
// MACHINE, group:NAME or endpoint:NAME.
type Path struct {
	Name     string `json:"name"`
	From     string `json:"from"`
	To       string `json:"to"`
	Network  string `json:"network"`
	Protocol string `json:"protocol"` // tcp, udp, icmp, any
	Ports    []Port `json:"ports,omitempty"`
}

// Port is one port or an inclusive range; in JSON a number or "FIRST-LAST".
type Port struct {
	First, Last uint16
}

// Endpoint is a synthetic public name and what answers behind it.
type Endpoint struct {
	Host          string  `json:"host"`
	Network       string  `json:"network"`
	Kind          string  `json:"kind"`                    // https, http, tls_passthrough, tcp, udp
	Port          int     `json:"port,omitempty"`          // 0: the kind's own; see Ports
	RedirectHTTP  *bool   `json:"redirect_http,omitempty"` // https: port 80 answers with a redirect; nil: true
	HTTP3         bool    `json:"http3,omitempty"`
	ProxyProtocol bool    `json:"proxy_protocol,omitempty"`
	Backend       Backend `json:"backend"`
	Routes        []Route `json:"routes,omitempty"`
}

// Backend is a Machine's port that an endpoint forwards to.
type Backend struct {
	Machine  string      `json:"machine"`
	Port     int         `json:"port"`
	Protocol string      `json:"protocol,omitempty"` // http, h2c, https; empty: http
	TLS      *BackendTLS `json:"tls,omitempty"`      // with https
}

// BackendTLS says how a backend proves who it is.
type BackendTLS struct {
	CAFile     string `json:"ca_file,omitempty"` // empty: the Environment's own authority
	ServerName string `json:"server_name,omitempty"`
}

// Route takes the requests whose path begins with PathPrefix; of several, the
// longest wins.
type Route struct {
	PathPrefix string            `json:"path_prefix"`
	Backends   []WeightedBackend `json:"backends"`
}

// WeightedBackend is one of a route's backends.
type WeightedBackend struct {
	Backend
	Weight int `json:"weight,omitempty"` // 0: 1
}

// Zone is an extra DNS zone.
type Zone struct {
	Records []Record `json:"records"`
}

// Record is one name's answers of one type.
type Record struct {
	Name       string   `json:"name"` // below the zone, or @
	Type       string   `json:"type"` // A, AAAA, CNAME, TXT, SRV
	Values     []string `json:"values"`
	TTLSeconds *int     `json:"ttl_seconds,omitempty"` // nil: 60
}

// Volume is storage of the Environment.
type Volume struct {
	Kind        string       `json:"kind"` // block, shared_cache
	SizeBytes   int64        `json:"size_bytes,omitempty"`
	Consistency *Consistency `json:"consistency,omitempty"`
}

// Consistency is what readers of a shared_cache are promised.
type Consistency struct {
	Model                string `json:"model"` // bounded_staleness
	StalenessBoundMillis int64  `json:"staleness_bound_millis"`
}

// Secret says where a secret comes from: a variable or a file of the host.
type Secret struct {
	FromEnv  string `json:"from_env,omitempty"`
	FromFile string `json:"from_file,omitempty"`
}

// Fault is one declared fault: exactly one kind, on one path and direction,
// from At until TTL later on the timeline that up starts.
type Fault struct {
	Name      string  `json:"name"`
	Path      string  `json:"path"`
	Direction string  `json:"direction,omitempty"` // request, response, both; empty: both
	Seed      uint64  `json:"seed"`
	AtMillis  int64   `json:"at_millis,omitempty"`
	TTLMillis int64   `json:"ttl_millis"`
	Repeat    *Repeat `json:"repeat,omitempty"`
	Ramp      *Ramp   `json:"ramp,omitempty"`

	Match *Match   `json:"match,omitempty"`
	Mode  string   `json:"mode,omitempty"`  // packet, byte
	Spare []string `json:"spare,omitempty"` // syn, fin, rst, ack

	Latency     *LatencyFault     `json:"latency,omitempty"`
	Jitter      *JitterFault      `json:"jitter,omitempty"`
	Loss        *LossFault        `json:"loss,omitempty"`
	Duplication *DuplicationFault `json:"duplication,omitempty"`
	Corruption  *CorruptionFault  `json:"corruption,omitempty"`
	Reordering  *ReorderingFault  `json:"reordering,omitempty"`
	Bandwidth   *BandwidthFault   `json:"bandwidth,omitempty"`
	Reset       *ResetFault       `json:"reset,omitempty"`
	Partition   *PartitionFault   `json:"partition,omitempty"`
	PathMTU     *PathMTUFault     `json:"path_mtu,omitempty"`
	DNS         *DNSFault         `json:"dns,omitempty"`
	TLS         *TLSFault         `json:"tls,omitempty"`
	HTTP        *HTTPFault        `json:"http,omitempty"`
	Preset      string            `json:"preset,omitempty"` // such as 3g@1
}

// Repeat begins a fault again: Times times in all, one beginning after another.
type Repeat struct {
	EveryMillis int64 `json:"every_millis"`
	Times       int   `json:"times"`
}

// Ramp lets a fault grow and fade.
type Ramp struct {
	UpMillis   int64 `json:"up_millis,omitempty"`
	DownMillis int64 `json:"down_millis,omitempty"`
}

// Match narrows a fault to a part of its path's traffic.
type Match struct {
	Ports []Port   `json:"ports,omitempty"`
	Names []string `json:"names,omitempty"`
}

// LatencyFault delays each packet.
type LatencyFault struct {
	DelayMillis int64 `json:"delay_millis"`
}

// JitterFault delays each packet by a draw, and keeps their order.
type JitterFault struct {
	Distribution string  `json:"distribution"` // uniform, normal, pareto, table
	MeanMillis   int64   `json:"mean_millis,omitempty"`
	SpreadMillis int64   `json:"spread_millis,omitempty"`
	TableMillis  []int64 `json:"table_millis,omitempty"`
}

// LossFault drops each packet with the given probability, 0..1; or by one of
// the other models.
type LossFault struct {
	Probability    float64         `json:"probability,omitempty"`
	GilbertElliott *GilbertElliott `json:"gilbert_elliott,omitempty"`
	EveryNth       int64           `json:"every_nth,omitempty"`
	Indexes        []int64         `json:"indexes,omitempty"`
	Bytes          []int64         `json:"bytes,omitempty"`
}

// GilbertElliott is the two-state loss model, all values 0..1.
type GilbertElliott struct {
	Enter    float64  `json:"enter"`
	Leave    float64  `json:"leave"`
	LossBad  *float64 `json:"loss_bad,omitempty"`  // nil: 1
	LossGood *float64 `json:"loss_good,omitempty"` // nil: 0
}

// DuplicationFault sends a packet more than once.
type DuplicationFault struct {
	Probability float64 `json:"probability"`
	Copies      int     `json:"copies,omitempty"` // further ones; 0: 1
}

// CorruptionFault flips bits.
type CorruptionFault struct {
	Probability float64 `json:"probability"`
	Bits        int     `json:"bits,omitempty"` // 0: 1
}

// ReorderingFault holds chosen packets back while others pass.
type ReorderingFault struct {
	Probability float64 `json:"probability"`
	DelayMillis int64   `json:"delay_millis"`
}

// BandwidthFault is a token bucket and its queue.
type BandwidthFault struct {
	BitsPerSecond int64  `json:"bits_per_second"`
	QueueBytes    int64  `json:"queue_bytes,omitempty"`
	QueueMillis   int64  `json:"queue_millis,omitempty"`
	Discipline    string `json:"discipline,omitempty"` // drop_tail, codel
	Accounting    string `json:"accounting,omitempty"` // l1, l2, l3
}

// ResetFault ends TCP connections, both peers'.
type ResetFault struct {
	AfterBytes  int64 `json:"after_bytes,omitempty"`
	AfterMillis int64 `json:"after_millis,omitempty"`
	RefuseNew   bool  `json:"refuse_new,omitempty"`
	Existing    *bool `json:"existing,omitempty"` // nil: true
}

// PartitionFault lets nothing pass.
type PartitionFault struct {
	Action  string `json:"action,omitempty"` // drop, reject
	NewOnly bool   `json:"new_only,omitempty"`
	Shape   string `json:"shape,omitempty"` // all, halves, isolate_one, bridge, majorities_ring
	Group   string `json:"group,omitempty"`
	Machine string `json:"machine,omitempty"`
}

// PathMTUFault narrows a path; without ICMP it is a black hole.
type PathMTUFault struct {
	Bytes int  `json:"bytes"`
	ICMP  bool `json:"icmp"`
}

// DNSFault spoils answers.
type DNSFault struct {
	Failure     string   `json:"failure"` // nxdomain, servfail, refused, timeout, delay, truncation, wrong_address, stale_ttl
	Types       []string `json:"types,omitempty"`
	DelayMillis int64    `json:"delay_millis,omitempty"`
	Address     string   `json:"address,omitempty"`
}

// TLSFault spoils handshakes at the edge.
type TLSFault struct {
	Failure string `json:"failure"` // expired, wrong_name, untrusted_issuer, handshake_stall
}

// HTTPFault spoils requests at the edge.
type HTTPFault struct {
	DelayMillis int64   `json:"delay_millis,omitempty"`
	Status      int     `json:"status,omitempty"`
	Abort       string  `json:"abort,omitempty"` // before_body, inside_body
	PathPrefix  string  `json:"path_prefix,omitempty"`
	Probability float64 `json:"probability,omitempty"` // 0: always
}
