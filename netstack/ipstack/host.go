package ipstack

import (
	"sync"

	"vz.test/vz/netstack/link"
	"vz.test/vz/netstack/packet"
)

// A Host is a Stack at the end of a link.Port.
type Host struct {
	*Stack
	port  link.Port
	loop  sync.WaitGroup
	fit   sync.Pool // *fitter
	close sync.Once
}

type fitter struct {
	link.Fitter
	info packet.Info
}

// Attach starts a Host that owns port: it reads it until Close. The MTU is the
// port's; config.MTU and config.Output are set here.
func Attach(port link.Port, config Config) (*Host, error) {
	h := &Host{port: port}
	h.fit.New = func() any { return new(fitter) }
	config.MTU = port.MTU()
	config.Output = h.output
	s, err := New(config)
	if err != nil {
		return nil, err
	}
	h.Stack = s
	h.loop.Go(h.read)
	return h, nil
}

func (h *Host) read() {
	var frames [32]link.Frame
	var info packet.Info
	var in link.Fitter
	for {
		n, err := h.port.ReadFrames(frames[:])
		if err != nil {
			return
		}
		for i := range frames[:n] {
			f := &frames[i]
			if f.Decode(&info) != nil || info.EtherType != packet.EtherTypeIPv4 {
				continue
			}
			if f.Segmentation != link.GSOUDP {
				h.Input(f.Data, &info)
				continue
			}
			segments, err := in.Fit(f, &info, link.Offload{}, link.MaxFrame)
			for j := range segments {
				if err == nil && segments[j].Decode(&info) == nil {
					h.Input(segments[j].Data, &info)
				}
			}
		}
	}
}

func (h *Host) output(frames []link.Frame) {
	t := h.fit.Get().(*fitter)
	defer h.fit.Put(t)
	for i := range frames {
		if frames[i].Decode(&t.info) != nil {
			continue
		}
		fitting, err := t.Fit(&frames[i], &t.info, h.port.Offload(), h.port.MTU())
		if err == nil {
			_, _ = h.port.WriteFrames(fitting)
		}
	}
}

// Close ends the stack, closes the port and waits for the goroutines.
func (h *Host) Close() error {
	var err error
	h.close.Do(func() {
		h.Stack.Close() // first: its resets still go out
		err = h.port.Close()
		h.loop.Wait()
	})
	return err
}
