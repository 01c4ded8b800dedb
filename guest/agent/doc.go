// Package agent is what runs inside a Machine: it serves the messages of
// guest/wire to the supervisor over one byte stream, and as PID 1 it is the
// Machine's init.
//
//	err := agent.Serve(ctx, channel, agent.Options{Init: os.Getpid() == 1})
//
// It finds a root that is ready (proc, sys, dev, devpts, run and tmp mounted)
// and makes the Machine of it: links up by DHCP, resolver, host name, trusted
// certificate authority; it runs commands with or without a terminal, keeps
// declared processes going with their logs, and reaps every orphan.
//
// It does not mount, pivot or set limits (its driver did), hold policy, or
// trust the guest's users with the channel, which is on no network and in no
// descriptor that a child inherits. The supervisor in turn trusts nothing that
// it says. When the channel closes the agent ends, and as PID 1 so does the
// Machine.
package agent
