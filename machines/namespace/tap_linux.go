package namespace

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"vz.test/vz/machines"
)

const tunDevice = "/dev/net/tun"

// virtioHeader is the size in bytes of virtio_net_hdr_v1 (virtio 1.2, 5.1.6),
// which precedes every frame of a TAP.
const virtioHeader = 12

// openTAPs makes the NICs in the network namespace of the process behind pidfd
// and returns their descriptors, in order. The links are left down; the agent
// raises them.
//
// A TAP belongs to the network namespace of the thread that opens the device,
// so a thread goes there. It does not come back: an ordinary user's launcher
// may not re-enter the host's network namespace. Its goroutine ends locked,
// which ends the thread.
func openTAPs(pidfd int, nics []machines.NIC) ([]*os.File, error) {
	type result struct {
		files []*os.File
		err   error
	}
	done := make(chan result, 1)
	go func() {
		runtime.LockOSThread()
		if err := unix.Setns(pidfd, unix.CLONE_NEWNET); err != nil {
			done <- result{err: fmt.Errorf("enter the Machine's network namespace: %w", err)}
			return
		}
		var files []*os.File
		for _, nic := range nics {
			file, err := openTAP(nic)
			if err != nil {
				closeAll(files)
				done <- result{err: fmt.Errorf("interface %s: %w", nic.Name, err)}
				return
			}
			files = append(files, file)
		}
		done <- result{files: files}
	}()
	r := <-done
	return r.files, r.err
}

// openTAP makes one TAP in the calling thread's network namespace.
func openTAP(nic machines.NIC) (*os.File, error) {
	fd, err := unix.Open(tunDevice, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, missingTUN(err)
	}
	file := os.NewFile(uintptr(fd), tunDevice)
	if err := setUpTAP(fd, nic); err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}

func setUpTAP(fd int, nic machines.NIC) error {
	request, err := unix.NewIfreq(nic.Name)
	if err != nil {
		return err
	}
	request.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
		return fmt.Errorf("TUNSETIFF: %w", err)
	}
	if err := unix.IoctlSetPointerInt(fd, unix.TUNSETVNETHDRSZ, virtioHeader); err != nil {
		return fmt.Errorf("TUNSETVNETHDRSZ: %w", err)
	}
	mac, err := net.ParseMAC(nic.MAC)
	if err != nil {
		return err
	}
	link, err := netlink.LinkByName(nic.Name)
	if err != nil {
		return err
	}
	if err := netlink.LinkSetHardwareAddr(link, mac); err != nil {
		return fmt.Errorf("set MAC %s: %w", mac, err)
	}
	if err := netlink.LinkSetMTU(link, nic.MTU); err != nil {
		return fmt.Errorf("set MTU %d: %w", nic.MTU, err)
	}
	return nil
}

func missingTUN(err error) error {
	missing := &machines.MissingError{What: tunDevice, Why: err.Error()}
	switch {
	case errors.Is(err, os.ErrPermission):
		missing.Remedy = "as root: chmod 0666 /dev/net/tun (what distributions ship; it grants nothing outside of namespaces)"
	case errors.Is(err, os.ErrNotExist), errors.Is(err, unix.ENODEV):
		missing.Remedy = "as root: modprobe tun; in a container, pass the device /dev/net/tun to it"
	default:
		return err
	}
	return missing
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}
