package namespace

import (
	"os"

	"vz.test/vz/netstack/link"
)

func openPort(f *os.File, mtu int) (link.Port, error) { return link.NewTAP(f, mtu) }
