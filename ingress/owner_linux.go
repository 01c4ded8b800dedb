package ingress

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strconv"
	"strings"
)

// SocketOwner looks the other end of a connection up in the kernel's tables of
// this network namespace.
func SocketOwner(local, remote netip.AddrPort) (uid int, err error) {
	// The tables are read in pieces while they change, so that a row may be
	// missed: look again before saying no.
	for range 3 {
		for _, path := range []string{"/proc/self/net/tcp", "/proc/self/net/tcp6"} { // a dual-stack client is in the second
			f, err := os.Open(path)
			if errors.Is(err, os.ErrNotExist) {
				continue // no IPv6
			}
			if err != nil {
				return 0, fmt.Errorf("ingress: owner of a connection: %w", err)
			}
			uid, err := findOwner(f, remote, local)
			f.Close()
			if !errors.Is(err, ErrNoOwner) {
				return uid, err
			}
		}
	}
	return 0, ErrNoOwner
}

// findOwner finds the socket with that address and peer. A socket that no
// process holds any more (TIME_WAIT, or closed with data left to send) is shown
// as root's, with inode 0: it is nobody's.
func findOwner(table io.Reader, address, peer netip.AddrPort) (uid int, err error) {
	address, peer = unmapped(address), unmapped(peer)
	lines := bufio.NewScanner(table)
	lines.Scan() // the head
	for lines.Scan() {
		// sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid timeout inode …
		fields := strings.Fields(lines.Text())
		if len(fields) < 10 || fields[9] == "0" {
			continue
		}
		if a, err := tableAddress(fields[1]); err != nil || a != address {
			continue
		}
		if p, err := tableAddress(fields[2]); err != nil || p != peer {
			continue
		}
		uid, err := strconv.ParseUint(fields[7], 10, 32)
		if err != nil {
			return 0, fmt.Errorf("ingress: owner of a connection: %w", err)
		}
		return int(uid), nil
	}
	if err := lines.Err(); err != nil {
		return 0, fmt.Errorf("ingress: owner of a connection: %w", err)
	}
	return 0, ErrNoOwner
}

// tableAddress reads "0100007F:1F90". The address stands there as numbers of 32
// bits in the machine's own order of bytes.
func tableAddress(text string) (netip.AddrPort, error) {
	address, port, _ := strings.Cut(text, ":")
	bytes, err := hex.DecodeString(address)
	if err != nil {
		return netip.AddrPort{}, err
	}
	if len(bytes)%4 != 0 {
		return netip.AddrPort{}, fmt.Errorf("an address of %d bytes", len(bytes))
	}
	for i := 0; i < len(bytes); i += 4 {
		binary.NativeEndian.PutUint32(bytes[i:], binary.BigEndian.Uint32(bytes[i:]))
	}
	a, ok := netip.AddrFromSlice(bytes)
	if !ok {
		return netip.AddrPort{}, fmt.Errorf("an address of %d bytes", len(bytes))
	}
	number, err := strconv.ParseUint(port, 16, 16)
	return netip.AddrPortFrom(a.Unmap(), uint16(number)), err
}
