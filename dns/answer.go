package dns

import (
	"net/netip"
	"strings"

	wire "github.com/miekg/dns"
)

const (
	// ttl of positive answers, in seconds. Addresses outlive it by far; what
	// may change at any time is which paths there are, so it is short.
	ttl = 5
	// negativeTTL of NXDOMAIN and NODATA (RFC 2308), in seconds: the next
	// question after a path was declared is to be answered anew.
	negativeTTL = 1
	// maxUDP is the largest UDP answer in bytes, whatever the client offers:
	// it passes any path unfragmented (DNS Flag Day 2020).
	maxUDP = 1232
	// maxReason bounds the text of an extended error, so that a negative answer
	// to the longest name still fits into 512 bytes and needs no TCP.
	maxReason = 128
)

// answer is the reply to one message in wire form, nil when there is none to
// be given, and what the log says of it. It has no effects. With a nil view,
// or busy, the question is refused.
func answer(view *View, busy bool, transport string, message []byte) ([]byte, Query) {
	var request wire.Msg
	if len(message) < 12 || message[2]&0x80 != 0 { // not even a header, or a response: silence ends loops
		return nil, Query{Reason: "not a query"}
	}
	malformed := request.Unpack(message)
	reply := &wire.Msg{MsgHdr: wire.MsgHdr{
		Id: request.Id, Response: true, Opcode: request.Opcode,
		RecursionDesired: request.RecursionDesired, RecursionAvailable: true, CheckingDisabled: request.CheckingDisabled,
	}}
	q := Query{Transport: transport}
	size := wire.MinMsgSize
	var opt *wire.OPT // of the reply

	switch {
	case request.Opcode != wire.OpcodeQuery:
		reply.Rcode, q.Reason = wire.RcodeNotImplemented, "an opcode other than QUERY"
	case malformed != nil:
		reply.Rcode, q.Reason = wire.RcodeFormatError, "malformed"
	case len(request.Question) != 1:
		reply.Rcode, q.Reason = wire.RcodeFormatError, "not exactly one question"
	default:
		question := request.Question[0]
		reply.Question = request.Question // as it was spelt (draft-vixie-dnsext-dns0x20)
		q.Name, q.Type = fold(question.Name), wire.Type(question.Qtype).String()

		offered, ok := edns(&request)
		if offered != nil {
			opt = &wire.OPT{Hdr: wire.RR_Header{Name: ".", Rrtype: wire.TypeOPT}}
			opt.SetUDPSize(maxUDP)
			opt.SetDo(offered.Do()) // RFC 3225, 3
			reply.Extra = []wire.RR{opt}
			size = min(max(size, int(offered.UDPSize())), maxUDP)
		}
		switch {
		case !ok:
			reply.Rcode, q.Reason = wire.RcodeFormatError, "more than one OPT, or a named one"
		case offered != nil && offered.Version() != 0:
			reply.Rcode, q.Reason = wire.RcodeBadVers, "an EDNS version other than 0"
		case busy:
			reply.Rcode, q.Reason = wire.RcodeRefused, "too many questions at once"
		case view == nil:
			reply.Rcode, q.Reason = wire.RcodeRefused, "unknown client"
		default:
			resolve(view, question, reply, opt, &q)
		}
	}
	if transport == TCP {
		size = wire.MaxMsgSize
	}
	reply.Truncate(size)
	reply.Compress = true
	packed, err := reply.Pack()
	if err != nil {
		// Only the question is the client's: a name that can be read and not
		// written again.
		reply = reply.SetRcodeFormatError(&wire.Msg{MsgHdr: request.MsgHdr})
		q.Reason = "malformed"
		if packed, err = reply.Pack(); err != nil {
			return nil, q
		}
	}
	q.Rcode = wire.RcodeToString[reply.Rcode]
	return packed, q
}

// edns finds the client's OPT; not ok says that it breaks RFC 6891, 6.1.1.
func edns(request *wire.Msg) (opt *wire.OPT, ok bool) {
	for _, rr := range request.Extra {
		if o, is := rr.(*wire.OPT); is {
			if opt != nil || o.Hdr.Name != "." {
				return o, false
			}
			opt = o
		}
	}
	return opt, true
}

// resolve fills in the reply to a well-formed question.
func resolve(view *View, question wire.Question, reply *wire.Msg, opt *wire.OPT, q *Query) {
	switch question.Qtype {
	case wire.TypeAXFR, wire.TypeIXFR:
		reply.Rcode, q.Reason = wire.RcodeRefused, "zone transfer"
		return
	case wire.TypeOPT, wire.TypeTKEY, wire.TypeTSIG, wire.TypeMAILA, wire.TypeMAILB:
		reply.Rcode, q.Reason = wire.RcodeNotImplemented, "a meta type"
		return
	}
	if question.Qclass != wire.ClassINET {
		reply.Rcode, q.Reason = wire.RcodeRefused, "a class other than IN"
		return
	}
	reply.Authoritative = true
	n, ok := view.lookup(q.Name)
	if !ok {
		reply.Rcode, q.Reason = wire.RcodeNameError, "no such name"
	}
	if n.denied != "" {
		reply.Rcode, q.Reason = wire.RcodeNameError, n.denied
		if opt != nil {
			text := strings.ToValidUTF8(n.denied[:min(len(n.denied), maxReason)], "")
			opt.Option = append(opt.Option, &wire.EDNS0_EDE{InfoCode: wire.ExtendedErrorCodeBlocked, ExtraText: text})
		}
	}
	if reply.Rcode == wire.RcodeSuccess {
		reply.Answer, q.Answers = records(n, question)
	}
	if len(reply.Answer) == 0 {
		reply.Ns = []wire.RR{soa()}
	}
}

// records are the answers that a name has for a question. A name that has any
// answers ANY with the least there is (RFC 8482, 4.2).
func records(n name, question wire.Question) (answers []wire.RR, texts []string) {
	header := wire.RR_Header{Name: question.Name, Rrtype: question.Qtype, Class: wire.ClassINET, Ttl: ttl}
	switch question.Qtype {
	case wire.TypeANY:
		if len(n.addrs) > 0 || n.ptr != "" {
			header.Rrtype = wire.TypeHINFO
			return []wire.RR{&wire.HINFO{Hdr: header, Cpu: "RFC8482"}}, []string{"RFC8482"}
		}
	case wire.TypePTR:
		if n.ptr != "" {
			return []wire.RR{&wire.PTR{Hdr: header, Ptr: wire.Fqdn(n.ptr)}}, []string{n.ptr}
		}
	case wire.TypeA, wire.TypeAAAA:
		for _, a := range n.addrs {
			if a.Is4() != (question.Qtype == wire.TypeA) {
				continue
			}
			answers = append(answers, address(header, a))
			texts = append(texts, a.String())
		}
	}
	return answers, texts
}

func address(header wire.RR_Header, a netip.Addr) wire.RR {
	if a.Is4() {
		return &wire.A{Hdr: header, A: a.AsSlice()}
	}
	return &wire.AAAA{Hdr: header, AAAA: a.AsSlice()}
}

// soa is that of every negative answer. Its owner is the root, the one zone
// that holds bare names, endpoints' hosts and reverse names alike.
func soa() wire.RR {
	return &wire.SOA{
		Hdr: wire.RR_Header{Name: ".", Rrtype: wire.TypeSOA, Class: wire.ClassINET, Ttl: negativeTTL},
		Ns:  "gateway.vz.internal.", Mbox: "nobody.invalid.",
		Serial: 1, Refresh: 3600, Retry: 600, Expire: 86400, Minttl: negativeTTL,
	}
}
