package main

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"vz.test/vz/supervisor/api/vzv1"
)

// word is an enum's value as people read it: MACHINE_STATE_READY is ready.
func word(value fmt.Stringer) string {
	text := value.String()
	for _, prefix := range []string{"ENVIRONMENT_STATE_", "MACHINE_STATE_", "HEALTH_"} {
		text = strings.TrimPrefix(text, prefix)
	}
	return strings.ToLower(text)
}

func table(w io.Writer, heads ...string) (row func(...any), done func()) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, strings.Join(heads, "\t"))
	row = func(cells ...any) {
		for i, c := range cells {
			if i > 0 {
				fmt.Fprint(t, "\t")
			}
			fmt.Fprint(t, c)
		}
		fmt.Fprintln(t)
	}
	return row, func() { t.Flush() }
}

func printStatus(w io.Writer, e *vzv1.Environment) {
	fmt.Fprintf(w, "%s (%s) of %s: %s\n", e.GetName(), e.GetEnvironmentId(), e.GetProjectName(), word(e.GetState()))
	if e.GetMessage() != "" {
		fmt.Fprintf(w, "  %s\n", e.GetMessage())
	}
	if s := e.GetSupervisor(); s != nil {
		fmt.Fprintf(w, "  supervisor %d, %s\n", s.GetPid(), s.GetSocket())
	}
	if len(e.GetMachines()) > 0 {
		fmt.Fprintln(w)
		row, done := table(w, "MACHINE", "STATE", "HEALTH", "ADDRESSES", "PROCESSES")
		for _, m := range e.GetMachines() {
			row(m.GetName(), word(m.GetState()), word(m.GetHealth()), addresses(m), processes(m))
		}
		done()
	}
	for _, m := range e.GetMachines() {
		if m.GetMessage() != "" {
			fmt.Fprintf(w, "  %s: %s\n", m.GetName(), m.GetMessage())
		}
		if m.GetHealthReason() != "" {
			fmt.Fprintf(w, "  %s: %s\n", m.GetName(), m.GetHealthReason())
		}
	}
	if len(e.GetNetworks()) > 0 {
		fmt.Fprintln(w)
		row, done := table(w, "NETWORK", "KIND", "CIDR", "MTU", "CONNECTED")
		for _, n := range e.GetNetworks() {
			row(n.GetName(), n.GetKind(), n.GetCidr(), n.GetMtu(), dash(strings.Join(n.GetMachines(), ", ")))
		}
		done()
	}
	if len(e.GetEndpoints()) > 0 {
		fmt.Fprintln(w)
		row, done := table(w, "ENDPOINT", "URL", "ADDRESS", "BACKEND")
		for _, p := range e.GetEndpoints() {
			row(p.GetName(), p.GetUrl(), p.GetAddress(), fmt.Sprintf("%s:%d", p.GetBackendMachine(), p.GetBackendPort()))
		}
		done()
	}
	if p := e.GetProxy(); p.GetUrl() != "" {
		fmt.Fprintf(w, "\nfrom the host: proxy %s, %s, PAC %s\n               CA %s\n", p.GetUrl(), p.GetSocksUrl(), p.GetPacUrl(), p.GetCaPath())
	}
	if len(e.GetFaults()) > 0 {
		fmt.Fprintln(w)
		row, done := table(w, "FAULT", "PATH", "DIRECTION", "STATE", "LEFT", "APPLIED")
		for _, f := range e.GetFaults() {
			state := f.GetState()
			if f.GetHealedWhy() != "" {
				state += " (" + f.GetHealedWhy() + ")"
			}
			row(f.GetName(), f.GetSpec().GetPath(), f.GetSpec().GetDirection(), state,
				fmt.Sprintf("%.1fs", float64(f.GetRemainingMillis())/1000), f.GetEffect().GetApplied())
		}
		done()
	}
	notes := false
	for _, m := range e.GetMachines() {
		for _, n := range m.GetCapabilities().GetNotes() {
			if !notes {
				fmt.Fprintln(w, "\nnot to be had:")
				notes = true
			}
			fmt.Fprintf(w, "  %s: %s: %s\n", m.GetName(), n.GetCapability(), n.GetReason())
		}
	}
}

func printMachine(w io.Writer, m *vzv1.Machine) {
	fmt.Fprintf(w, "%s (%s): %s, %s\n", m.GetName(), m.GetMachineId(), word(m.GetState()), word(m.GetHealth()))
	for _, line := range []string{m.GetMessage(), m.GetHealthReason()} {
		if line != "" {
			fmt.Fprintf(w, "  %s\n", line)
		}
	}
	fmt.Fprintf(w, "  %s/%s, image %s, profile %s, isolation %s, driver %s\n", m.GetOs(), m.GetArch(), m.GetImage(), m.GetProfile(), m.GetIsolation(), m.GetDriver())
	fmt.Fprintf(w, "  incarnation %s\n", dash(m.GetIncarnation()))
	fmt.Fprintf(w, "  capabilities: %s\n", dash(strings.Join(m.GetCapabilities().GetNegotiated(), ", ")))
	for _, n := range m.GetCapabilities().GetNotes() {
		fmt.Fprintf(w, "  not to be had: %s: %s\n", n.GetCapability(), n.GetReason())
	}
	for _, a := range m.GetAttachments() {
		fmt.Fprintf(w, "  %s: %s, %s %s", a.GetInterface(), a.GetNetwork(), a.GetAddress(), a.GetMac())
		if a.GetPublicAddress() != "" {
			fmt.Fprintf(w, ", public %s", a.GetPublicAddress())
		}
		fmt.Fprintln(w)
	}
	for _, p := range m.GetProcesses() {
		fmt.Fprintf(w, "  process %s: %s, pid %d, restarts %d", p.GetName(), p.GetState(), p.GetPid(), p.GetRestarts())
		if p.GetMessage() != "" {
			fmt.Fprintf(w, ", %s", p.GetMessage())
		}
		fmt.Fprintln(w)
	}
}

func printList(w io.Writer, all []*vzv1.Environment) {
	if len(all) == 0 {
		fmt.Fprintln(w, "no Environments; vz up makes one")
		return
	}
	row, done := table(w, "PROJECT", "ENVIRONMENT", "ID", "STATE", "MACHINES", "WORKTREE")
	for _, e := range all {
		supervised := 0
		for _, m := range e.GetMachines() {
			if m.GetHealth() == vzv1.Health_HEALTH_SUPERVISED {
				supervised++
			}
		}
		state := word(e.GetState())
		if e.GetState() == vzv1.EnvironmentState_ENVIRONMENT_STATE_UNSPECIFIED {
			state = e.GetMessage()
		}
		row(dash(e.GetProjectName()), dash(e.GetName()), e.GetEnvironmentId(), state,
			fmt.Sprintf("%d/%d supervised", supervised, len(e.GetMachines())), dash(e.GetWorktree()))
	}
	done()
}

func addresses(m *vzv1.Machine) string {
	var all []string
	for _, a := range m.GetAttachments() {
		all = append(all, a.GetNetwork()+" "+a.GetAddress())
	}
	return dash(strings.Join(all, ", "))
}

func processes(m *vzv1.Machine) string {
	var all []string
	for _, p := range m.GetProcesses() {
		all = append(all, p.GetName()+" "+p.GetState())
	}
	return dash(strings.Join(all, ", "))
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
