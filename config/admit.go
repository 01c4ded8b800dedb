package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// UnsupportedError is one declared thing that this host and version can't do,
// and the matrix entry that says so. errors.Is(err, errors.ErrUnsupported).
type UnsupportedError struct {
	Capability string
	Host       string // OS/ARCH
	Target     string // linux, macos, or any
	Profile    string // developer, hardened, or any
	Status     Status
	Pointer    string // JSON pointer into the definition
	Entry      Entry

	File         string // set by Check
	Line, Column int    // set by Check
}

func (e *UnsupportedError) Error() string {
	what := "on " + e.Host
	if e.Target != Any {
		what = fmt.Sprintf("for a %s %s Machine on %s", e.Target, e.Profile, e.Host)
	}
	text := fmt.Sprintf("%s is not supported %s (%s, matrix entry %s)", e.Capability, what, e.Status, e.Entry.ID)
	if e.Entry.Note != "" {
		text += ": " + e.Entry.Note
	}
	return place(e.File, e.Line, e.Column, e.Pointer) + text
}

// Is makes it an errors.ErrUnsupported.
func (e *UnsupportedError) Is(target error) bool { return target == errors.ErrUnsupported }

// Unsupported is everything in a definition that is refused.
type Unsupported []*UnsupportedError

func (u Unsupported) Error() string {
	lines := make([]string, len(u))
	for i, one := range u {
		lines[i] = one.Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap lets errors.As find an *UnsupportedError.
func (u Unsupported) Unwrap() []error {
	all := make([]error, len(u))
	for i, one := range u {
		all[i] = one
	}
	return all
}

// Admit says whether host can have what def declares. A definition that is not
// valid is an Errors; one that is, and asks for what is not to be had, an
// Unsupported that names every such thing. It changes nothing and allocates
// nothing: nil means that an Environment may be made.
//
// It goes through the document value by value, and each must have a rule: a
// field that nobody thought of is refused, never ignored.
func Admit(def *Definition, host Host) error {
	if err := def.Validate(); err != nil {
		return err
	}
	text, err := def.JSON()
	if err != nil {
		return err
	}
	var document any
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	if err := decoder.Decode(&document); err != nil {
		return err
	}
	a := &admission{def: def, host: host}
	a.walk(nil, "", document)
	if len(a.refused) == 0 {
		return nil
	}
	return a.refused
}

type admission struct {
	def     *Definition
	host    Host
	refused Unsupported
}

// walk judges the value at tokens, whose place in the schema is pattern, and
// what is in it.
func (a *admission) walk(tokens []string, pattern string, value any) {
	judge, found := rules[pattern]
	_, isObject := value.(map[string]any)
	_, isArray := value.([]any)
	switch {
	case found:
		for _, capability := range judge(a, tokens, value) {
			if !a.allow(tokens, capability) {
				return // what is in it falls with it
			}
		}
	case !isObject && !isArray:
		a.allow(tokens, "definition.field")
		return
	}
	switch value := value.(type) {
	case map[string]any:
		for _, key := range sortedKeys(value) {
			step := key
			if named[pattern] {
				step = "*"
			}
			a.walk(append(tokens[:len(tokens):len(tokens)], key), pattern+"/"+step, value[key])
		}
	case []any:
		for i, item := range value {
			a.walk(append(tokens[:len(tokens):len(tokens)], strconv.Itoa(i)), pattern+"/*", item)
		}
	}
}

// allow looks a capability up for the Machine that tokens lead into, if any,
// and notes a refusal.
func (a *admission) allow(tokens []string, capability string) bool {
	target, profile, isolation := Any, Any, Any
	if len(tokens) > 1 && tokens[0] == "machines" {
		m := a.def.Machines[tokens[1]]
		target, profile, isolation = m.Target.OS, m.Profile, m.Isolation
	}
	entry := Matrix().Find(capability, a.host.OS, target, profile, isolation)
	if entry.Admitted() {
		return true
	}
	a.refused = append(a.refused, &UnsupportedError{
		Capability: capability, Host: a.host.String(), Target: target, Profile: profile,
		Status: entry.Status, Pointer: pointer(tokens...), Entry: entry,
	})
	return false
}

// named are the objects whose keys are names of the document's own.
var named = map[string]bool{
	"/networks": true, "/groups": true, "/machines": true, "/endpoints": true, "/zones": true,
	"/volumes": true, "/secrets": true, "/machines/*/processes": true, "/machines/*/processes/*/env": true,
}

// A rule says which capabilities a value asks for; none when it only belongs
// to something that asked already.
type rule func(a *admission, tokens []string, value any) []string

// part is a value that belongs to what is around it.
func part(*admission, []string, any) []string { return nil }

// is asks for a capability by being there.
func is(capability string) rule {
	return func(*admission, []string, any) []string { return []string{capability} }
}

// by asks for the capability that its value names.
func by(prefix string) rule {
	return func(_ *admission, _ []string, value any) []string { return []string{prefix + fmt.Sprint(value)} }
}

// when asks for a capability by being true.
func when(capability string) rule {
	return func(_ *admission, _ []string, value any) []string {
		if value == true {
			return []string{capability}
		}
		return nil
	}
}

// rules has a rule for each place of the schema, or for one above it that is
// refused whole.
var rules = map[string]rule{
	"/$schema":         part,
	"/schema_version":  part,
	"/project_id":      part,
	"/name":            part,
	"/default_machine": part,

	"/networks/*/kind":          by("network."),
	"/networks/*/cidr":          part,
	"/networks/*/cidr6":         is("network.ipv6"),
	"/networks/*/mtu":           is("network.mtu"),
	"/networks/*/refuse":        by("network.refuse."),
	"/networks/*/ipv6":          when("network.ipv6"),
	"/networks/*/nat/mapping":   by("nat.mapping."),
	"/networks/*/nat/filtering": by("nat.filtering."),
	"/networks/*/nat/hairpin":   is("nat.hairpin"),

	"/groups/*/*": part,

	"/machines/*":                            implicitDocker,
	"/machines/*/target/os":                  by("target."),
	"/machines/*/target/arch":                architecture,
	"/machines/*/target/image":               image,
	"/machines/*/profile":                    by("profile."),
	"/machines/*/docker":                     when("docker.engine"),
	"/machines/*/isolation":                  by("isolation."),
	"/machines/*/driver":                     by("driver."),
	"/machines/*/capabilities/*":             requested,
	"/machines/*/resources/cpus":             is("resources.cpus"),
	"/machines/*/resources/memory_bytes":     is("resources.memory"),
	"/machines/*/resources/disk_bytes":       is("resources.disk"),
	"/machines/*/networks/*/name":            part,
	"/machines/*/networks/*/address":         part,
	"/machines/*/networks/*/address6":        is("network.ipv6"),
	"/machines/*/projections/*":              of("mode", "projection."),
	"/machines/*/volumes/*":                  mount,
	"/machines/*/secrets/*":                  is("secret"),
	"/machines/*/processes/*":                is("process"),
	"/machines/*/processes/*/command/*":      part,
	"/machines/*/processes/*/env/*":          part,
	"/machines/*/processes/*/cwd":            part,
	"/machines/*/processes/*/restart":        is("process.restart"),
	"/machines/*/processes/*/ready/tcp_port": is("process.ready"),
	"/machines/*/egress/mode":                by("egress."),
	"/machines/*/egress/allow/*":             is("egress.allowlist"),
	"/machines/*/egress/host_proxy":          when("egress.host_proxy"),
	"/machines/*/host_imports/*":             of("protocol", "host_import."),
	"/machines/*/host_exports/*":             of("protocol", "host_export."),

	"/paths/*/name":     part,
	"/paths/*/from":     end,
	"/paths/*/to":       end,
	"/paths/*/network":  part,
	"/paths/*/protocol": by("path."),
	"/paths/*/ports/*":  part,

	"/endpoints/*/host":             host,
	"/endpoints/*/network":          part,
	"/endpoints/*/kind":             by("endpoint."),
	"/endpoints/*/port":             publicPort,
	"/endpoints/*/redirect_http":    redirect,
	"/endpoints/*/http3":            when("endpoint.http3"),
	"/endpoints/*/proxy_protocol":   when("endpoint.proxy_protocol"),
	"/endpoints/*/backend/machine":  part,
	"/endpoints/*/backend/port":     part,
	"/endpoints/*/backend/protocol": by("backend."),
	"/endpoints/*/backend/tls":      is("backend.https"),
	"/endpoints/*/routes/*":         is("endpoint.routes"),

	"/zones/*":   is("dns.zones"),
	"/volumes/*": of("kind", "volume."),
	"/secrets/*": is("secret"),

	"/faults/*/name":                 part,
	"/faults/*/path":                 faultPath,
	"/faults/*/direction":            part,
	"/faults/*/seed":                 part,
	"/faults/*/at_millis":            part,
	"/faults/*/ttl_millis":           part,
	"/faults/*/repeat":               is("fault.repeat"),
	"/faults/*/ramp":                 is("fault.ramp"),
	"/faults/*/match":                is("fault.match"),
	"/faults/*/mode":                 is("fault.mode"),
	"/faults/*/spare":                is("fault.spare"),
	"/faults/*/latency/delay_millis": is("fault.latency"),
	"/faults/*/jitter":               is("fault.jitter"),
	"/faults/*/loss/probability":     is("fault.loss.probability"),
	"/faults/*/loss/gilbert_elliott": is("fault.loss.gilbert_elliott"),
	"/faults/*/loss/every_nth":       is("fault.loss.every_nth"),
	"/faults/*/loss/indexes":         is("fault.loss.indexes"),
	"/faults/*/loss/bytes":           is("fault.loss.bytes"),
	"/faults/*/duplication":          is("fault.duplication"),
	"/faults/*/corruption":           is("fault.corruption"),
	"/faults/*/reordering":           is("fault.reordering"),
	"/faults/*/bandwidth":            is("fault.bandwidth"),
	"/faults/*/reset":                is("fault.reset"),
	"/faults/*/partition":            is("fault.partition"),
	"/faults/*/path_mtu":             is("fault.path_mtu"),
	"/faults/*/dns":                  is("fault.dns"),
	"/faults/*/tls":                  is("fault.tls"),
	"/faults/*/http":                 is("fault.http"),
	"/faults/*/preset":               is("fault.preset"),
}

// of asks for the capability that one of an object's fields names.
func of(field, prefix string) rule {
	return func(_ *admission, _ []string, value any) []string {
		return []string{prefix + fmt.Sprint(value.(map[string]any)[field])}
	}
}

// implicitDocker is the engine that a Linux developer Machine has without
// saying so.
func implicitDocker(a *admission, tokens []string, _ any) []string {
	if m := a.def.Machines[tokens[1]]; m.Docker == nil && m.WantsDocker() {
		a.allow(tokens, "docker.engine") // and the Machine is looked at further
	}
	return nil
}

func architecture(a *admission, _ []string, value any) []string {
	if value == "host" || value == a.host.Arch {
		return []string{"target.arch.native"}
	}
	return []string{"target.arch.foreign"}
}

func image(_ *admission, _ []string, value any) []string {
	return []string{"image." + ImageKind(value.(string))}
}

// ImageKind is what an image's text means: host, external, macos (a template's
// channel), debian, tar or oci.
func ImageKind(image string) string {
	switch image {
	case "host", "external":
		return image
	case "clean", "xcode":
		return "macos"
	}
	if scheme, _, found := strings.Cut(image, ":"); found && (scheme == "debian" || scheme == "tar") {
		return scheme
	}
	return "oci"
}

func requested(_ *admission, _ []string, value any) []string {
	capability := "machine." + value.(string)
	for _, entry := range Matrix().Entries {
		if entry.Capability == capability {
			return []string{capability}
		}
	}
	return []string{"machine.unknown"}
}

func mount(a *admission, _ []string, value any) []string {
	name, _ := value.(map[string]any)["name"].(string)
	return []string{"volume." + a.def.Volumes[name].Kind}
}

func end(_ *admission, _ []string, value any) []string {
	switch kind, _, qualified := strings.Cut(value.(string), ":"); {
	case qualified && kind == "group":
		return []string{"path.group"}
	case qualified:
		return []string{"path.to_endpoint"}
	case kind == "host":
		return []string{"path.from_host"}
	}
	return nil
}

func host(_ *admission, _ []string, value any) []string {
	if strings.HasPrefix(value.(string), "*.") {
		return []string{"endpoint.wildcard"}
	}
	return nil
}

func publicPort(a *admission, tokens []string, _ any) []string {
	e := a.def.Endpoints[tokens[1]]
	if usual := (Endpoint{Kind: e.Kind}).Ports(); len(usual) > 0 && int(usual[0]) == e.Port {
		return nil
	}
	return []string{"endpoint.port"}
}

func redirect(_ *admission, _ []string, value any) []string {
	if value == true {
		return []string{"endpoint.redirect"}
	}
	return []string{"endpoint.no_redirect"}
}

func faultPath(_ *admission, _ []string, value any) []string {
	if kind, _, implicit := strings.Cut(value.(string), ":"); implicit {
		return []string{"fault.path." + kind}
	}
	return []string{"fault.path.declared"}
}
