/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * From a frame to what is judged.
 *
 * Pure: the frame is read only through load_bytes(), which the including file defines: the kernel's function in the program,
 * a bounds-checked copy in the native build. Whatever cannot be read in full is dropped, never guessed; so is what says of its own
 * length what cannot be. Behind a packet's own end there is only padding, and nothing is read there.
 *
 * A segment that the card will cut up, or has put together (GSO, GRO), is one packet whose headers say its whole length. What is
 * too long for their field says 0 there (BIG TCP, RFC 2675).
 *
 * What a packet is decides how it is judged, so it is said once, here (enum kind). A later fragment carries no ports; the
 * verdict fills them in from its first.
 */
#ifndef NAMEGATE_PARSE_H
#define NAMEGATE_PARSE_H

#include "abi.h"

#ifdef __BYTE_ORDER__
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define TO_NET16(x) ((__be16)__builtin_bswap16((__u16)(x)))
#define TO_NET32(x) ((__be32)__builtin_bswap32((__u32)(x)))
#else
#define TO_NET16(x) ((__be16)(x))
#define TO_NET32(x) ((__be32)(x))
#endif
#endif
#define FROM_NET16(x) ((__u16)TO_NET16(x))

/* The verifier of Linux 5.15 follows a loop only as far as it can see its end; unrolled there is nothing to see. */
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL
#endif

#define VLANS_MAX 2
#define EXTENSION_HEADERS_MAX 8 /* DECISIONS 18; a sender has no honest use for more */
#define IPV4_OPTIONS_MAX 16 /* there is room for 40 that say nothing */
#define LENGTH_FIELD_MAX 0xffff

/* IANA numbers under our own names: <linux/in.h> and <linux/if_ether.h> differ between the two builds. */
#define ETHERTYPE_IPV4 0x0800
#define ETHERTYPE_ARP 0x0806
#define ETHERTYPE_VLAN 0x8100
#define ETHERTYPE_IPV6 0x86dd
#define ETHERTYPE_EAPOL 0x888e
#define ETHERTYPE_QINQ 0x88a8
#define ETHERTYPE_CANARY 0x88b5 /* IEEE 802: for experiments of one's own */
#define ETHERTYPE_LLDP 0x88cc

#define PROTOCOL_HOP_BY_HOP 0
#define PROTOCOL_ICMP 1
#define PROTOCOL_TCP 6
#define PROTOCOL_UDP 17
#define PROTOCOL_ROUTING 43
#define PROTOCOL_FRAGMENT 44
#define PROTOCOL_AUTHENTICATION 51
#define PROTOCOL_ICMPV6 58
#define PROTOCOL_NO_NEXT 59
#define PROTOCOL_DESTINATION 60
#define PROTOCOL_SCTP 132

#define IPV4_MORE_FRAGMENTS 0x2000
#define IPV4_FRAGMENT_OFFSET 0x1fff
#define IPV4_OPTION_END 0
#define IPV4_OPTION_NOTHING 1
#define IPV4_OPTION_LOOSE_ROUTE 131
#define IPV4_OPTION_STRICT_ROUTE 137

#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define TCP_ACK 0x10
#define TCP_BEGIN_OR_END (TCP_SYN | TCP_ACK | TCP_RST | TCP_FIN)

#define SCTP_ABORT 6
#define SCTP_SHUTDOWN_COMPLETE 14

enum kind {
	KIND_FLOW = 0,      /* belongs to a flow: ports, an echo, or a protocol without ports */
	KIND_SINGLE = 1,    /* any other ICMP message: judged alone */
	KIND_ERROR = 2,     /* ICMP error: judged by the flow it is about */
	KIND_ARP = 3,
	KIND_NEIGHBOUR = 4, /* neighbour discovery or MLD */
	KIND_ROUTER = 5,    /* a message only a router may send: advertisement, redirect */
	KIND_LINK = 6,      /* between the two ends of a cable: EAPOL, LLDP */
};

enum part {
	PART_WHOLE = 0,
	PART_FIRST = 1,
	PART_LATER = 2,
};

/* Who sent it, as far as the hook can tell. */
enum origin {
	ORIGIN_WIRE = 0,
	ORIGIN_AGENT = 1,  /* a socket of the agent's */
	ORIGIN_ANSWER = 2, /* a refusal this program turned round */
	ORIGIN_MARKED = 3, /* the agent's mark, and no socket of its own: the kernel in its name, or somebody who took the mark */
	ORIGIN_FORWARDED = 4, /* leaves an uplink, and came in somewhere */
};

struct tuple {
	struct address source;
	struct address destination;
	__be16 source_port;
	__be16 destination_port;
	__u8 protocol;
	__u8 pad[3];
};

struct packet {
	struct tuple tuple;
	struct tuple about;   /* KIND_ERROR: of the packet that caused it. ARP, neighbour: .source is the address claimed */
	__u32 transport;      /* where the transport header begins */
	__u32 fragment_id;
	__be16 policy_port;
	__u8 kind;
	__u8 family;          /* 4 or 6; 0 for ARP */
	__u8 part;
	__u8 next;            /* protocol field all fragments share */
	__u8 tcp_flags;
	__u8 vlans;
	__u8 origin;          /* set by the hook */
	__u16 place;          /* of a fragment, in units of 8 bytes */
	__u8 plain;           /* no VLAN, no IPv4 option, no extension header: its refusal is easy to build */
	__u8 hops;            /* IPv6: the hop limit, which says whether neighbour discovery comes from this link */
	__u8 is_end;          /* SCTP: the association is over for both sides */
	__u8 pad;
	__u32 length;         /* of the frame; set by the hook */
	__u32 end;            /* where the packet's own length says that it ends */
};

/* 0, or a part of it is not of this packet. */
static __always_inline int load_packet(void *ctx, const struct packet *p, __u32 offset, void *to, __u32 n)
{
	return offset + n > p->end || load_bytes(ctx, offset, to, n);
}

static __always_inline void map_address(struct address *to, __be32 v4)
{
	to->words[0] = 0;
	to->words[1] = 0;
	to->words[2] = TO_NET32(0xffff);
	to->words[3] = v4;
}

static __always_inline int is_mapped(const struct address *a)
{
	return !a->words[0] && !a->words[1] && a->words[2] == TO_NET32(0xffff);
}

static __always_inline int has_ports(__u8 protocol)
{
	return protocol == PROTOCOL_TCP || protocol == PROTOCOL_UDP || protocol == PROTOCOL_SCTP;
}

/* ICMP's echo and its errors; every other type of either family is a KIND_SINGLE, or below. RFC 792, RFC 4443. */
static __always_inline int is_echo(__u8 protocol, __u8 type)
{
	return protocol == PROTOCOL_ICMP ? type == 8 || type == 0 : type == 128 || type == 129;
}

static __always_inline int is_error(__u8 protocol, __u8 type)
{
	return protocol == PROTOCOL_ICMP ? type == 3 || type == 11 || type == 12 : type >= 1 && type <= 4;
}

/* Returns 0 or why it must be dropped. */
static __always_inline int parse_icmp(void *ctx, struct packet *p)
{
	__u8 header[8];
	__u8 type;

	if (load_packet(ctx, p, p->transport, header, sizeof(header)))
		return DROP_MALFORMED;
	type = header[0];
	p->policy_port = TO_NET16(type);
	if (is_echo(p->tuple.protocol, type)) {
		__builtin_memcpy(&p->tuple.source_port, header + 4, 2);
		p->tuple.destination_port = p->tuple.source_port;
		return 0;
	}
	p->kind = KIND_SINGLE;
	if (is_error(p->tuple.protocol, type))
		p->kind = KIND_ERROR;
	if (p->tuple.protocol != PROTOCOL_ICMPV6)
		return 0;
	if (type == 133 || type == 135 || (type >= 130 && type <= 132) || type == 143)
		p->kind = KIND_NEIGHBOUR;
	if (type == 134 || type == 137)
		p->kind = KIND_ROUTER;
	if (type == 136) { /* RFC 4861 4.4: the address advertised stands behind the flags */
		p->kind = KIND_NEIGHBOUR;
		if (load_packet(ctx, p, p->transport + 8, &p->about.source, 16))
			return DROP_MALFORMED;
	}
	return 0;
}

/* RFC 9293 3.1. All of the header is in the first fragment, or there is no telling what will stand in it (RFC 7112). */
static __always_inline int parse_tcp(void *ctx, struct packet *p)
{
	__u8 header[20];
	__u32 length;

	if (load_packet(ctx, p, p->transport, header, sizeof(header)))
		return DROP_MALFORMED;
	__builtin_memcpy(&p->tuple.source_port, header, 4);
	p->policy_port = p->tuple.destination_port;
	length = (header[12] >> 4) * 4;
	if (length < 20 || p->transport + length > p->end)
		return DROP_MALFORMED;
	p->tcp_flags = header[13];
	return 0;
}

/* RFC 9260 3.3: the type of the first chunk; what ends an association travels alone. */
static __always_inline int parse_sctp(void *ctx, struct packet *p)
{
	__u8 rest[4], chunk = 0;

	if (load_packet(ctx, p, p->transport + 8, rest, sizeof(rest)))
		return DROP_MALFORMED;
	if (!load_packet(ctx, p, p->transport + 12, &chunk, sizeof(chunk)))
		p->is_end = chunk == SCTP_ABORT || chunk == SCTP_SHUTDOWN_COMPLETE;
	return 0;
}

static __always_inline int parse_transport(void *ctx, struct packet *p)
{
	__u8 protocol = p->tuple.protocol;

	if (p->transport > p->end)
		return DROP_MALFORMED;
	if (p->part == PART_LATER) /* its ports are known from the first one, or it is dropped */
		return p->place * 8 + p->end - p->transport > LENGTH_FIELD_MAX ? DROP_MALFORMED : 0;
	if (protocol == PROTOCOL_TCP)
		return parse_tcp(ctx, p);
	if (has_ports(protocol)) {
		__be16 words[4]; /* UDP's whole header, and less than SCTP's */

		if (load_packet(ctx, p, p->transport, words, sizeof(words)))
			return DROP_MALFORMED;
		p->tuple.source_port = words[0];
		p->tuple.destination_port = words[1];
		p->policy_port = words[1];
		if (protocol == PROTOCOL_SCTP)
			return parse_sctp(ctx, p);
		if (FROM_NET16(words[2]) < 8 ||
		    (p->part == PART_WHOLE && p->transport + FROM_NET16(words[2]) > p->end))
			return DROP_MALFORMED;
		return 0;
	}
	if ((protocol == PROTOCOL_ICMP && p->family == 4) || (protocol == PROTOCOL_ICMPV6 && p->family == 6))
		return parse_icmp(ctx, p);
	return 0; /* a flow without ports */
}

/* What the embedded packet of an ICMP error was; only its first 8 transport bytes are promised (RFC 792). */
static __always_inline int parse_about_transport(void *ctx, const struct packet *p, __u32 offset, struct tuple *about)
{
	if (has_ports(about->protocol)) {
		if (load_packet(ctx, p, offset, &about->source_port, 4))
			return DROP_MALFORMED;
		return 0;
	}
	if (about->protocol == PROTOCOL_ICMP || about->protocol == PROTOCOL_ICMPV6) {
		__u8 header[8];

		if (load_packet(ctx, p, offset, header, sizeof(header)))
			return DROP_MALFORMED;
		if (!is_echo(about->protocol, header[0]))
			return DROP_UNRELATED;
		__builtin_memcpy(&about->source_port, header + 4, 2);
		about->destination_port = about->source_port;
	}
	return 0;
}

struct ipv4_fields {
	__u32 transport;
	__u16 total;
	__be16 id;
	__u16 fragment; /* flags and offset */
};

static __always_inline int parse_ipv4_header(void *ctx, const struct packet *p, __u32 offset, struct tuple *t,
					     struct ipv4_fields *fields)
{
	__u8 header[20];
	__be32 address;
	__be16 word;

	if (load_packet(ctx, p, offset, header, sizeof(header)))
		return DROP_MALFORMED;
	if (header[0] >> 4 != 4 || (header[0] & 15) < 5)
		return DROP_MALFORMED;
	__builtin_memcpy(&address, header + 12, 4);
	map_address(&t->source, address);
	__builtin_memcpy(&address, header + 16, 4);
	map_address(&t->destination, address);
	t->protocol = header[9];
	__builtin_memcpy(&word, header + 2, 2);
	fields->total = FROM_NET16(word);
	__builtin_memcpy(&fields->id, header + 4, 2);
	__builtin_memcpy(&word, header + 6, 2);
	fields->fragment = FROM_NET16(word);
	fields->transport = offset + (header[0] & 15) * 4;
	return 0;
}

/* RFC 791 3.1, RFC 7126: a packet that names the routers it wants to pass arrives elsewhere than its header says. */
static __always_inline int check_options(void *ctx, __u32 offset, __u32 end)
{
	UNROLL
	for (int i = 0; i < IPV4_OPTIONS_MAX; i++) {
		__u8 kind = IPV4_OPTION_END, length;

		if (offset >= end)
			return 0;
		if (load_bytes(ctx, offset, &kind, 1))
			return DROP_MALFORMED;
		if (kind == IPV4_OPTION_END)
			return 0;
		if (kind == IPV4_OPTION_NOTHING) {
			offset += 1;
			continue;
		}
		if (kind == IPV4_OPTION_LOOSE_ROUTE || kind == IPV4_OPTION_STRICT_ROUTE)
			return DROP_SOURCE_ROUTE;
		if (load_bytes(ctx, offset + 1, &length, 1) || length < 2 || offset + length > end)
			return DROP_MALFORMED;
		offset += length;
	}
	return offset < end ? DROP_EXTENSIONS : 0;
}

/* Where a packet ends whose payload begins here and has, by its field, this length. 0: it cannot be. */
static __always_inline __u32 end_of(const struct packet *p, __u32 offset, __u32 length)
{
	__u32 rest = p->length - offset;

	if (offset > p->length)
		return 0;
	if (!length && rest > LENGTH_FIELD_MAX)
		length = rest;
	return length > rest ? 0 : offset + length;
}

static __always_inline int parse_ipv4(void *ctx, __u32 offset, struct packet *p)
{
	struct ipv4_fields fields = {};
	int reason;

	p->end = p->length;
	reason = parse_ipv4_header(ctx, p, offset, &p->tuple, &fields);
	if (reason)
		return reason;
	p->family = 4;
	p->transport = fields.transport;
	p->end = end_of(p, offset, fields.total);
	if (p->end < p->transport)
		return DROP_MALFORMED;
	reason = check_options(ctx, offset + 20, p->transport);
	if (reason)
		return reason;
	p->plain = p->vlans == 0 && fields.transport == offset + 20;
	if (fields.fragment & (IPV4_MORE_FRAGMENTS | IPV4_FRAGMENT_OFFSET)) {
		p->place = fields.fragment & IPV4_FRAGMENT_OFFSET;
		p->part = p->place ? PART_LATER : PART_FIRST;
		p->fragment_id = fields.id;
		p->next = p->tuple.protocol;
	}
	return parse_transport(ctx, p);
}

struct ipv6_chain {
	__u32 offset;   /* in: of the first header behind the fixed one; out: of the transport header */
	__u32 fragment_id;
	__u8 protocol;  /* in: what the fixed header names; out: the transport protocol */
	__u8 part;
	__u8 next;
	__u8 walked;
	__u8 has_fragment;
	__u8 hops;
	__u16 place;
	__u16 payload;
};

static __always_inline int is_extension(__u8 protocol)
{
	return protocol == PROTOCOL_HOP_BY_HOP || protocol == PROTOCOL_ROUTING || protocol == PROTOCOL_FRAGMENT ||
	       protocol == PROTOCOL_AUTHENTICATION || protocol == PROTOCOL_DESTINATION;
}

/*
 * RFC 8200 section 4. Stops at a later fragment: what stands behind its fragment header is payload. A fragment has no extension
 * headers behind that header: they are for the end of the way, and whoever puts some there wants ports to be looked for where
 * the end will not find them (RFC 7112). A routing header with something left to do is the source route of IPv6 (RFC 5095).
 */
static __always_inline int walk_extensions(void *ctx, const struct packet *p, struct ipv6_chain *chain)
{
	UNROLL
	for (int i = 0; i < EXTENSION_HEADERS_MAX; i++) {
		__u8 header[8];

		if (!is_extension(chain->protocol))
			break;
		if (load_packet(ctx, p, chain->offset, header, sizeof(header)))
			return DROP_MALFORMED;
		chain->walked = 1;
		if (chain->protocol == PROTOCOL_ROUTING && header[3])
			return DROP_SOURCE_ROUTE;
		if (chain->protocol == PROTOCOL_FRAGMENT) {
			__u16 place = (__u16)(header[2] << 8 | header[3]);

			if (chain->has_fragment)
				return DROP_MALFORMED;
			chain->has_fragment = 1;
			chain->offset += 8;
			chain->protocol = header[0];
			chain->next = header[0];
			__builtin_memcpy(&chain->fragment_id, header + 4, 4);
			chain->place = place >> 3;
			if (!chain->place && !(place & 1)) /* an atomic fragment, RFC 6946, is a whole packet */
				continue;
			if (is_extension(chain->protocol))
				return DROP_FRAGMENT;
			chain->part = chain->place ? PART_LATER : PART_FIRST;
			if (chain->place)
				return 0;
			continue;
		}
		chain->offset += chain->protocol == PROTOCOL_AUTHENTICATION ? (header[1] + 2) * 4 : (header[1] + 1) * 8;
		chain->protocol = header[0];
	}
	if (is_extension(chain->protocol) || chain->protocol == PROTOCOL_NO_NEXT)
		return DROP_EXTENSIONS;
	return 0;
}

/* Without what follows: the caller knows first where that may end. */
static __always_inline int parse_ipv6_header(void *ctx, const struct packet *p, __u32 offset, struct tuple *t,
					     struct ipv6_chain *chain)
{
	__u8 start[8];
	__be16 word;

	if (load_packet(ctx, p, offset, start, sizeof(start)))
		return DROP_MALFORMED;
	if (start[0] >> 4 != 6)
		return DROP_MALFORMED;
	if (load_packet(ctx, p, offset + 8, &t->source, 32))
		return DROP_MALFORMED;
	/* On the wire nothing is v4-mapped (RFC 6890 table 20); in our keys it is IPv4, and must not be claimed from here. */
	if (is_mapped(&t->source) || is_mapped(&t->destination))
		return DROP_MALFORMED;
	__builtin_memcpy(&word, start + 4, 2);
	chain->payload = FROM_NET16(word);
	chain->protocol = start[6];
	chain->hops = start[7];
	chain->offset = offset + 40;
	return 0;
}

static __always_inline int parse_ipv6(void *ctx, __u32 offset, struct packet *p)
{
	struct ipv6_chain chain = {};
	int reason;

	p->end = p->length;
	reason = parse_ipv6_header(ctx, p, offset, &p->tuple, &chain);
	if (reason)
		return reason;
	p->family = 6;
	p->end = end_of(p, chain.offset, chain.payload);
	if (!p->end)
		return DROP_MALFORMED;
	reason = walk_extensions(ctx, p, &chain);
	if (reason)
		return reason;
	p->tuple.protocol = chain.protocol;
	p->transport = chain.offset;
	p->part = chain.part;
	p->fragment_id = chain.fragment_id;
	p->next = chain.next;
	p->place = chain.place;
	p->hops = chain.hops;
	p->plain = p->vlans == 0 && !chain.walked;
	return parse_transport(ctx, p);
}

/* Fills `about` of an ICMP error. A later fragment in it says nothing of ports, so it is about no flow we could name. */
static __always_inline int parse_about(void *ctx, struct packet *p)
{
	__u32 offset = p->transport + 8;
	struct tuple *about = &p->about;
	int reason;

	if (p->family == 4) {
		struct ipv4_fields fields = {};

		reason = parse_ipv4_header(ctx, p, offset, about, &fields);
		if (reason)
			return reason;
		if (fields.fragment & IPV4_FRAGMENT_OFFSET)
			return DROP_UNRELATED;
		offset = fields.transport;
	} else {
		struct ipv6_chain chain = {};

		reason = parse_ipv6_header(ctx, p, offset, about, &chain);
		if (!reason)
			reason = walk_extensions(ctx, p, &chain);
		if (reason)
			return reason;
		if (chain.part == PART_LATER)
			return DROP_UNRELATED;
		about->protocol = chain.protocol;
		offset = chain.offset;
	}
	return parse_about_transport(ctx, p, offset, about);
}

/* RFC 826 for Ethernet and IPv4, which is all there is. */
static __always_inline int parse_arp(void *ctx, __u32 offset, struct packet *p)
{
	__u8 header[28];
	__be32 sender;

	if (load_bytes(ctx, offset, header, sizeof(header)))
		return DROP_MALFORMED;
	if (header[0] || header[1] != 1 || header[2] != 8 || header[3] || header[4] != 6 || header[5] != 4)
		return DROP_MALFORMED;
	__builtin_memcpy(&sender, header + 14, 4);
	map_address(&p->tuple.source, sender);
	__builtin_memcpy(&sender, header + 24, 4);
	map_address(&p->tuple.destination, sender);
	p->kind = KIND_ARP;
	return 0;
}

/*
 * IEEE 802.1X and 802.1AB. Frames to 01-80-C2-00-00-0x are forwarded by no bridge (802.1Q table 8-1); on a radio link EAPOL goes to
 * the access point's own address.
 */
static __always_inline int parse_link(void *ctx, __be16 ethertype, struct packet *p)
{
	int is_not_bridged, is_link;
	__u8 to[6];

	if (load_bytes(ctx, 0, to, sizeof(to)))
		return DROP_MALFORMED;
	is_not_bridged = to[0] == 1 && to[1] == 0x80 && to[2] == 0xc2 && !to[3] && !to[4] && to[5] < 16;
	is_link = ethertype == TO_NET16(ETHERTYPE_EAPOL) ? is_not_bridged || !(to[0] & 1)
							 : ethertype == TO_NET16(ETHERTYPE_LLDP) && is_not_bridged;
	if (p->vlans || !is_link)
		return DROP_ETHERTYPE;
	p->kind = KIND_LINK;
	return 0;
}

/*
 * p must be zero but for length, origin and vlans (the tag the network card took off). Returns 0 or why it must be dropped; then
 * p holds as much as was read.
 */
static __always_inline int parse_frame(void *ctx, struct packet *p)
{
	__u32 offset = 12;
	__be16 ethertype;

	if (load_bytes(ctx, offset, &ethertype, 2))
		return DROP_MALFORMED;
	UNROLL
	for (int i = 0; i <= VLANS_MAX; i++) {
		if (ethertype != TO_NET16(ETHERTYPE_VLAN) && ethertype != TO_NET16(ETHERTYPE_QINQ))
			break;
		if (++p->vlans > VLANS_MAX)
			return DROP_VLAN;
		offset += 4;
		if (load_bytes(ctx, offset, &ethertype, 2))
			return DROP_MALFORMED;
	}
	offset += 2;
	if (ethertype == TO_NET16(ETHERTYPE_IPV4))
		return parse_ipv4(ctx, offset, p);
	if (ethertype == TO_NET16(ETHERTYPE_IPV6))
		return parse_ipv6(ctx, offset, p);
	if (ethertype == TO_NET16(ETHERTYPE_ARP))
		return parse_arp(ctx, offset, p);
	return parse_link(ctx, ethertype, p);
}

#endif
