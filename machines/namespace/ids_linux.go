package namespace

import (
	"bufio"
	"bytes"
	"fmt"
	"hash/fnv"
	"os"
	"strconv"
	"strings"
	"syscall"

	"vz.test/vz/machines"
)

const (
	// idCount is how many IDs a Machine has: what Linux distributions use.
	idCount = 1 << 16
	// The ranges that are taken when /etc/subuid gives none lie where neither
	// shadow's defaults (from 100000, upwards) nor systemd-nspawn's
	// (0x80000–0x6fffffff, from the bottom by hash) are likely to meet them.
	defaultFirst = 0x40000000
	defaultSlots = 8192
)

// IDs is a Machine's range of user and group IDs as its launcher counts them:
// guest 0 is UID and GID outside.
type IDs struct {
	UID, GID, Count int
}

// Single says that there is only root inside.
func (ids IDs) Single() bool { return ids.Count == 1 }

func (ids IDs) uidMap() []syscall.SysProcIDMap {
	return []syscall.SysProcIDMap{{ContainerID: 0, HostID: ids.UID, Size: ids.Count}}
}

func (ids IDs) gidMap() []syscall.SysProcIDMap {
	return []syscall.SysProcIDMap{{ContainerID: 0, HostID: ids.GID, Size: ids.Count}}
}

// RootIDs is the range of an Environment whose launcher is root.
func RootIDs(environmentID string) (IDs, error) {
	for _, name := range []string{"vz", "root"} {
		ids, err := Subordinate(environmentID, name)
		if err == nil && available(ids) {
			return ids, nil
		}
	}
	first := defaultFirst + slot(environmentID, defaultSlots)*idCount
	ids := IDs{UID: first, GID: first, Count: idCount}
	if !available(ids) {
		return IDs{}, &machines.MissingError{
			What:   "subordinate user IDs",
			Why:    fmt.Sprintf("this user namespace has no IDs from %d on, and /etc/subuid names none for vz or root", first),
			Remedy: "add lines such as vz:100000:65536 to /etc/subuid and /etc/subgid with IDs that exist here",
		}
	}
	return ids, nil
}

// Subordinate is the Environment's part of the ranges that /etc/subuid and
// /etc/subgid give to any of names (a login name or a decimal ID).
func Subordinate(environmentID string, names ...string) (IDs, error) {
	uid, err := subordinate("/etc/subuid", environmentID, names)
	if err != nil {
		return IDs{}, err
	}
	gid, err := subordinate("/etc/subgid", environmentID, names)
	if err != nil {
		return IDs{}, err
	}
	return IDs{UID: uid, GID: gid, Count: idCount}, nil
}

func subordinate(file, environmentID string, names []string) (int, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	first, count := parseSubordinate(text, names)
	if count < idCount {
		return 0, fmt.Errorf("%s has no range of %d for %s", file, idCount, strings.Join(names, " or "))
	}
	return first + slot(environmentID, count/idCount)*idCount, nil
}

// parseSubordinate finds the largest range of any of names in a subuid(5) file.
func parseSubordinate(text []byte, names []string) (first, count int) {
	for line := range strings.Lines(string(text)) {
		fields := strings.Split(strings.TrimSpace(line), ":")
		if len(fields) != 3 {
			continue
		}
		for _, name := range names {
			if fields[0] != name {
				continue
			}
			f, err1 := strconv.ParseUint(fields[1], 10, 32)
			n, err2 := strconv.ParseUint(fields[2], 10, 32)
			// Never host root, nor the system's own accounts.
			if err1 != nil || err2 != nil || f < 1000 || f+n > 1<<32-2 {
				continue
			}
			if int(n) > count {
				first, count = int(f), int(n)
			}
		}
	}
	return first, count
}

// slot spreads Environments over n ranges. Two that meet share their outside
// IDs, which no permission depends on: each one's files lie in a directory that
// the other can't reach, each one's processes in a pid namespace of its own.
func slot(environmentID string, n int) int {
	h := fnv.New32a()
	h.Write([]byte(environmentID))
	return int(h.Sum32() % uint32(n))
}

// UserIDs is the range of every Machine whose launcher lives in a user
// namespace of its own: all IDs there but 0, which is the user outside; that
// single one if there are no others.
func UserIDs() IDs {
	ids := IDs{UID: 1, GID: 1, Count: idCount}
	if available(ids) {
		return ids
	}
	return IDs{Count: 1}
}

// available says whether this process's user namespace has all of ids.
func available(ids IDs) bool {
	return mapped("/proc/self/uid_map", ids.UID, ids.Count) && mapped("/proc/self/gid_map", ids.GID, ids.Count)
}

func mapped(file string, first, count int) bool {
	text, err := os.ReadFile(file)
	if err != nil {
		return false
	}
	lines := bufio.NewScanner(bytes.NewReader(text))
	for lines.Scan() {
		var inside, outside, n int
		if _, err := fmt.Sscan(lines.Text(), &inside, &outside, &n); err != nil {
			return false
		}
		if first >= inside && first+count <= inside+n {
			return true
		}
	}
	return false
}
