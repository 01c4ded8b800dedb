package link

import "vz.test/vz/netstack/packet"

// Decode reads the frame's headers into info (see packet.Decode) and says
// there whether its transport checksum is partial, so that packet's rewriting
// keeps it so.
func (f *Frame) Decode(info *packet.Info) error {
	err := packet.Decode(f.Data, info)
	info.PartialChecksum = f.NeedsChecksum
	return err
}
