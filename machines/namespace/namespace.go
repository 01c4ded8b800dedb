// Package namespace runs Machines as Linux namespaces: user, mount, pid, uts,
// ipc, net and cgroup, over a root file system that shows the host's own tools
// beneath the Machine's private writes (image "host").
//
// It has two halves. [Driver] is the supervisor's: unprivileged, it asks a
// [Launcher] and wraps the descriptors that come back. [Host] is the
// launcher's: it makes directories, cgroups, TAPs and the process. Between
// host and guest stands [Init], the body of a re-executed child that builds the
// root inside the new namespaces and then becomes the agent, PID 1.
//
//	        Create                     order            exec vz-guest
//	Driver ───────► Host ── clone ──► Init ──────────────────────────► agent
//	   ▲              │ ids, cgroup, TAPs │ overlays, masks, /dev, /proc   │
//	   └── TAPs, agent's channel ◄────────┘ pivot_root, old root gone      │
//	   └── Done ◄───────────────────────────────── exit ◄──────────────────┘
//
// # Who guest root is
//
// Guest root is never host root. Made by root, a Machine's user namespace maps
// 0–65535 onto a subordinate range: from /etc/subuid and /etc/subgid of "vz" or
// "root" when there, else one of 8192 ranges above 0x40000000 that the
// Environment's ID picks. Made by an ordinary user, it maps onto that user's
// subordinate range, or without one onto the single ID of the user (a Note
// says so): inside there is only root then, and what belongs to the user
// outside of his home could be read; the masks below hide the usual places.
//
// The overlays are mounted inside the user namespace, so the kernel reads the
// host's files as guest root's outside ID, which owns nothing: what is not
// world-readable stays closed, whoever asks inside. The price is that the
// host's files belong to nobody (65534) inside: setuid programs of the host are
// plain ones there, and a package manager can't replace the host's files.
//
// # What a Machine sees
//
// An overlay each for /usr, /etc, /opt, /nix, /gnu and (when they are no
// links) /bin, /sbin, /lib*, whose upper directories stay in the Machine's Dir
// over a stop; under /var only the databases that tools read ([toolState]),
// all else in /var being the host's state and no tool. Everything not listed
// is the Machine's own and starts empty: /home, /root, /srv, /mnt, /media, /var
// persist, /tmp, /run and /dev do not. Places that are known to hold
// credentials ([masked]) are absent even when world-readable. Where a host
// directory has mounts below it, an overlay can't be laid over the whole
// (locked submounts), so it is laid over each entry instead.
//
// A mask is a whiteout in the overlay's upper directory, which guest root can't
// reach, not a mount, which it could undo.
//
// # What it does not do
//
// It knows no images but "host", speaks no agent protocol, and filters no
// system calls. Profile "hardened" takes away new user namespaces, privileges
// gained by exec, and the capabilities in [hardenedDrops]; it is not a VM.
package namespace

import (
	"context"
	"os"

	"vz.test/vz/machines"
)

// InitArg is the first argument by which the launcher's binary, re-executed,
// knows that it is to run Init.
const InitArg = "namespace-init"

// MaxNICs is the largest number of network attachments of one Machine; their
// descriptors travel in one message.
const MaxNICs = 16

// A Launcher is the privileged side as the Driver needs it.
type Launcher interface {
	// Create makes and boots a Machine. Cancelling ctx undoes what was begun.
	Create(ctx context.Context, spec machines.Spec) (*Created, error)
	// Kill ends a Machine and returns when it is gone. One that isn't there
	// is no error.
	Kill(ctx context.Context, machineID string) error
	// Clean ends whatever is left of a Machine but its Dir.
	Clean(ctx context.Context, machineID string) error
	// Remove is Clean and takes the Dir away.
	Remove(ctx context.Context, machineID, dir string) error
}

// Created is a booted Machine as the launcher hands it over. The receiver owns
// the files.
type Created struct {
	NICs         []*os.File // TAP descriptors in the order of Spec.NICs
	Agent        *os.File   // stream socket to the agent
	Capabilities []string
	Notes        []machines.Note
	Done         <-chan struct{} // closed when the Machine is gone
	Err          func() error    // why, once Done is closed
}
