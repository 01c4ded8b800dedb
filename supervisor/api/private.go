package api

import (
	"net"
)

// Private wraps a unix socket's listener so that only processes of the given
// user are served: the kernel says who the peer is (SO_PEERCRED), the socket's
// mode alone would not survive a careless chmod. Others are closed at once.
// refused, which may be nil, is told their user ID.
func Private(l *net.UnixListener, uid int, refused func(uid int)) net.Listener {
	return &private{l, uid, refused}
}

type private struct {
	*net.UnixListener
	uid     int
	refused func(uid int)
}

func (p *private) Accept() (net.Conn, error) {
	for {
		conn, err := p.AcceptUnix()
		if err != nil {
			return nil, err
		}
		peer, err := peerUID(conn)
		if err == nil && peer == p.uid {
			return conn, nil
		}
		conn.Close()
		if p.refused != nil {
			p.refused(peer)
		}
	}
}
