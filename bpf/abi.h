/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Every byte that crosses between the kernel and the agent.
 *
 * Rule 1: nothing shared is described anywhere else in C; agent/datapath/abi.py is its twin, and a test compares the two.
 * Rule 2: numbers are in host order unless their type says __be; padding is explicit and zero; no bitfields, no holes.
 * Rule 3: enumerations are dense. Tables are kept under the digest of this file, so that a number written under one edition of
 *         it is never read under another; within one that was released no member changes its number.
 *
 * An address is always 16 bytes in network order; IPv4 is written v4-mapped (::ffff:a.b.c.d), so that one key serves both
 * families. Only the two ipcache tries keep IPv4 apart: shorter keys, shorter walks.
 */
#ifndef NAMEGATE_ABI_H
#define NAMEGATE_ABI_H

#define SAME_SIZE(type, bytes) _Static_assert(sizeof(struct type) == (bytes), #type " has another size than abi.py says")
#define SAME_PLACE(type, field, offset) \
	_Static_assert(__builtin_offsetof(struct type, field) == (offset), #type "." #field " has moved")

/* Seen from the endpoint, whatever the hook: egress is what it sends. */
enum direction {
	DIRECTION_EGRESS = 0,
	DIRECTION_INGRESS = 1,
};

/* Ordered by strength: where several rows apply the largest verdict holds. */
enum verdict {
	VERDICT_NONE = 0,
	VERDICT_ALLOW = 1,
	VERDICT_REDIRECT = 2,
	VERDICT_DENY = 3,
};

/* Which hook of the interface sees what the endpoint sends. */
enum orientation {
	ORIENTATION_BEHIND = 0, /* host side of a veth, tap: ingress */
	ORIENTATION_UPLINK = 1, /* the host's own interface: egress */
};

enum flow_state {
	FLOW_LIVE = 0,
	FLOW_ENDED = 1,
};

/* Why a packet passed or was dropped; each is a counter. People read the names in lower case, those of drops without DROP_. */
enum reason {
	PASS_POLICY = 0,          /* judged and allowed */
	PASS_FLOW = 1,            /* of a known flow */
	PASS_RELATED = 2,         /* ICMP error about a known flow */
	PASS_NEIGHBOUR = 3,       /* ARP, neighbour discovery, MLD; of an uplink EAPOL and LLDP */
	PASS_AGENT = 4,           /* from the agent to the endpoint */
	PASS_REDIRECT = 5,        /* handed to the DNS proxy */
	PASS_AUDIT = 6,           /* would have been dropped */
	PASS_ANSWER = 7,          /* our own refusal on its way back to the endpoint */
	PASS_DHCP = 8,            /* asks for an address, or answers that */
	PASS_FORWARDED = 9,       /* of an uplink: somebody else's, that this host carries on */
	DROP_NO_ENDPOINT = 10,    /* the interface has no row */
	DROP_NO_GROUP = 11,       /* its group has none */
	DROP_SOURCE = 12,         /* the source address is not the endpoint's */
	DROP_NEIGHBOUR_CLAIM = 13, /* claims another's address, or to be a router */
	DROP_ETHERTYPE = 14,      /* neither ARP nor IP, nor what keeps an uplink's link */
	DROP_VLAN = 15,           /* more than two tags */
	DROP_VLAN_REDIRECT = 16,  /* DNS inside a tag */
	DROP_MALFORMED = 17,      /* cannot be read */
	DROP_EXTENSIONS = 18,     /* too many extension headers or IPv4 options, or nothing behind them */
	DROP_FRAGMENT = 19,       /* a later fragment without its first, or over it; a fragment where none is taken */
	DROP_POLICY = 20,         /* no rule allows it */
	DROP_DENY = 21,           /* a rule denies it */
	DROP_FLOW_ENDED = 22,     /* its flow was ended by a policy change */
	DROP_UNRELATED = 23,      /* ICMP error about no known flow */
	DROP_NO_GATE = 24,        /* the interception device is missing */
	DROP_NO_SOCKET = 25,      /* nobody listens behind the interception device */
	DROP_NOT_ASSIGNED = 26,   /* the kernel refused to hand the packet to the socket */
	DROP_NOT_FOR_GATE = 27,   /* would go, or went, to the interception device but is neither UDP nor TCP */
	DROP_CANARY = 28,         /* put through the hook by the agent, to see that it judges; no packet of anybody */
	DROP_SOURCE_ROUTE = 29,   /* says itself by which way it goes */
	DROP_MARTIAN = 30,        /* an address that is on no wire */
	DROP_QUESTION_LIMIT = 31, /* more questions than its endpoint may ask */
	REASON_COUNT = 32,
};
#define DROP_FIRST DROP_NO_ENDPOINT

/* What the program itself could not write down; index of `lost`. */
enum loss {
	LOST_EVENT = 0,
	LOST_COUNTER = 1,
	LOST_FLOW = 2,
	LOSS_COUNT = 3,
};

enum setting {
	SETTING_GATE_IFINDEX = 0,
	SETTING_TELL_OPENED = 1, /* not 0: somebody hears of each flow that is judged and allowed */
	SETTING_COUNT = 2,
};

#define ENDPOINT_NONE 0xffffffffU
#define IDENTITY_ANY 0
#define IDENTITY_WORLD 2
#define SCOPE_STATIC 0

struct address {
	__be32 words[4];
};
SAME_SIZE(address, 16);

/* endpoints: ifindex -> */
struct endpoint_value {
	__u32 endpoint;
	__u32 group;
	__u32 scope;
	__u8 orientation;
	__u8 dhcp;    /* it may ask for an address; an uplink may always */
	__u8 silent;  /* what is denied it gets no answer */
	__u8 pad;
};
SAME_SIZE(endpoint_value, 16);
SAME_PLACE(endpoint_value, group, 4);
SAME_PLACE(endpoint_value, scope, 8);
SAME_PLACE(endpoint_value, orientation, 12);
SAME_PLACE(endpoint_value, dhcp, 13);
SAME_PLACE(endpoint_value, silent, 14);

/* groups: group -> */
struct group_value {
	__u32 set;
	__u8 default_deny_egress;
	__u8 default_deny_ingress;
	__u8 audit;
	__u8 pad;
};
SAME_SIZE(group_value, 8);
SAME_PLACE(group_value, default_deny_egress, 4);
SAME_PLACE(group_value, default_deny_ingress, 5);
SAME_PLACE(group_value, audit, 6);

/*
 * policy:
 *
 *   0           4       8          12          13         14        16
 *   | prefixlen | set   | identity | direction | protocol | port    |
 *     never wildcarded ------------------------| may be wildcarded from the right
 *
 * prefixlen = 72 + significant bits: 0 every protocol, 8 every port of one, 24 one port, between: an aligned block of ports.
 * The port comes in network order because a trie compares bits from the left. For ICMP it is the type.
 */
struct policy_key {
	__u32 prefixlen;
	__u32 set;
	__u32 identity;
	__u8 direction;
	__u8 protocol;
	__be16 port;
};
SAME_SIZE(policy_key, 16);
SAME_PLACE(policy_key, set, 4);
SAME_PLACE(policy_key, identity, 8);
SAME_PLACE(policy_key, direction, 12);
SAME_PLACE(policy_key, protocol, 13);
SAME_PLACE(policy_key, port, 14);
#define POLICY_PREFIX_FIXED 72
#define POLICY_PREFIX_FULL 96

struct policy_value {
	__u8 verdict;
	__u8 significant_bits;
	__u16 pad;
	__u32 cookie;
};
SAME_SIZE(policy_value, 8);
SAME_PLACE(policy_value, significant_bits, 1);
SAME_PLACE(policy_value, cookie, 4);

/* ipcache4, ipcache6: -> identity. prefixlen = 32 (the scope, never wildcarded) + bits of the prefix. */
struct ipcache4_key {
	__u32 prefixlen;
	__u32 scope;
	__be32 address;
};
SAME_SIZE(ipcache4_key, 12);
SAME_PLACE(ipcache4_key, scope, 4);
SAME_PLACE(ipcache4_key, address, 8);

struct ipcache6_key {
	__u32 prefixlen;
	__u32 scope;
	struct address address;
};
SAME_SIZE(ipcache6_key, 24);
SAME_PLACE(ipcache6_key, scope, 4);
SAME_PLACE(ipcache6_key, address, 8);
#define IPCACHE_PREFIX_FIXED 32

/* own_addresses: -> 1 */
struct own_address_key {
	__u32 endpoint;
	struct address address;
};
SAME_SIZE(own_address_key, 20);
SAME_PLACE(own_address_key, address, 4);

/* flows, ended: one row for both directions, seen from the endpoint. An ICMP echo has its identifier in both ports. */
struct flow_key {
	__u32 endpoint;
	struct address local;
	struct address remote;
	__be16 local_port;
	__be16 remote_port;
	__u8 protocol;
	__u8 pad[3];
};
SAME_SIZE(flow_key, 44);
SAME_PLACE(flow_key, local, 4);
SAME_PLACE(flow_key, remote, 20);
SAME_PLACE(flow_key, local_port, 36);
SAME_PLACE(flow_key, remote_port, 38);
SAME_PLACE(flow_key, protocol, 40);

struct flow_value {
	__u64 last;          /* its last packet; of a TCP flow closed by both sides, the one that closed it */
	__u64 noted;         /* when last_seen was written for it */
	__u32 identity;      /* of the remote, when it was allowed */
	__u32 set;           /* that allowed it */
	__u32 cookie;        /* of the rule that allowed it */
	__be16 policy_port;  /* by which it is judged: the opener's destination port, or ICMP type */
	__u8 direction;      /* in which it was opened */
	__u8 state;
	__u8 settled;        /* TCP: something other than a SYN was seen; SCTP: both sides have spoken */
	__u8 closing;        /* bit 1 << direction: TCP, once that side sent FIN or RST; SCTP, both once the association ended */
	__u8 audited;        /* passes only as long as its group is audited */
	__u8 exempt;         /* of an uplink: the agent's own, or somebody else's that leaves under the host's address */
	__u8 pad[4];
};
SAME_SIZE(flow_value, 40);
SAME_PLACE(flow_value, noted, 8);
SAME_PLACE(flow_value, identity, 16);
SAME_PLACE(flow_value, set, 20);
SAME_PLACE(flow_value, cookie, 24);
SAME_PLACE(flow_value, policy_port, 28);
SAME_PLACE(flow_value, direction, 30);
SAME_PLACE(flow_value, state, 31);
SAME_PLACE(flow_value, settled, 32);
SAME_PLACE(flow_value, closing, 33);
SAME_PLACE(flow_value, audited, 34);
SAME_PLACE(flow_value, exempt, 35);

/* last_seen: -> boottime in ns, exact to a second */
struct last_seen_key {
	__u32 scope;
	struct address address;
};
SAME_SIZE(last_seen_key, 20);
SAME_PLACE(last_seen_key, address, 4);

/* fragments: a datagram whose first fragment passed -> what its later ones do not carry. `next` is the protocol field of
 * the (IPv6: fragment) header, which all fragments share; `protocol` is what the first one turned out to carry. */
struct fragment_key {
	__u32 endpoint;
	struct address source;
	struct address destination;
	__u32 id;
	__u8 next;
	__u8 direction;
	__u8 pad[2];
};
SAME_SIZE(fragment_key, 44);
SAME_PLACE(fragment_key, source, 4);
SAME_PLACE(fragment_key, destination, 20);
SAME_PLACE(fragment_key, id, 36);
SAME_PLACE(fragment_key, next, 40);
SAME_PLACE(fragment_key, direction, 41);

struct fragment_value {
	__u64 at;
	__be16 source_port;
	__be16 destination_port;
	__be16 policy_port;
	__u16 end;           /* of what the first one holds, in units of 8 bytes */
	__u8 protocol;
	__u8 kind;
	__u8 pad[6];
};
SAME_SIZE(fragment_value, 24);
SAME_PLACE(fragment_value, source_port, 8);
SAME_PLACE(fragment_value, destination_port, 10);
SAME_PLACE(fragment_value, policy_port, 12);
SAME_PLACE(fragment_value, end, 14);
SAME_PLACE(fragment_value, protocol, 16);
SAME_PLACE(fragment_value, kind, 17);

/* counters: -> counter_value; packets that no endpoint is known for are counted under ENDPOINT_NONE */
struct counter_key {
	__u32 endpoint;
	__u32 reason;
};
SAME_SIZE(counter_key, 8);
SAME_PLACE(counter_key, reason, 4);

/* rules: cookie -> */
struct counter_value {
	__u64 packets;
	__u64 bytes;
};
SAME_SIZE(counter_value, 16);
SAME_PLACE(counter_value, bytes, 8);

/* questions: endpoint -> when its next question is due, in ns of boottime: see verdict.h 9a */

/* answers: endpoint -> refusals sent in the second that began at `since` */
struct answer_value {
	__u64 since;
	__u64 sent;
};
SAME_SIZE(answer_value, 16);
SAME_PLACE(answer_value, sent, 8);

/* events: one for each dropped packet, for each that audit let pass, and for each judged and allowed while that is told */
struct event {
	__u64 at;
	__u32 endpoint;
	__u32 ifindex;
	__u32 identity;
	__u32 cookie;
	__u32 length;
	__be16 policy_port;
	__u8 reason;        /* a DROP_*, under audit too, or PASS_POLICY */
	__u8 audited;
	struct address source;
	struct address destination;
	__be16 source_port;
	__be16 destination_port;
	__u8 protocol;
	__u8 direction;
	__u8 pad[2];
};
SAME_SIZE(event, 72);
SAME_PLACE(event, endpoint, 8);
SAME_PLACE(event, ifindex, 12);
SAME_PLACE(event, identity, 16);
SAME_PLACE(event, cookie, 20);
SAME_PLACE(event, length, 24);
SAME_PLACE(event, policy_port, 28);
SAME_PLACE(event, reason, 30);
SAME_PLACE(event, audited, 31);
SAME_PLACE(event, source, 32);
SAME_PLACE(event, destination, 48);
SAME_PLACE(event, source_port, 64);
SAME_PLACE(event, destination_port, 66);
SAME_PLACE(event, protocol, 68);
SAME_PLACE(event, direction, 69);

#endif
