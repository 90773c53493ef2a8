/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Verdict of a packet. The same numbers stand in agent/datapath/model.py.
 *
 *  1. The interface names the endpoint, the endpoint its group. Neither is guessed: without a row the packet is dropped.
 *  2. What cannot be read is dropped (parse.h), and what says itself by which way it goes.
 *  3. ARP, neighbour discovery and MLD pass toward the endpoint. From it they pass when they claim no address but its own
 *     (link-local ones are its own) or none, and no router's part.
 *     Neighbour discovery and MLD do not leave the link: a router would carry them, and whatever they hold, anywhere.
 *     a. DHCP of an uplink, and of an endpoint that may, passes: questions to everybody on the link, and answers to its port.
 *        A question to one server needs a rule; without one a lease is renewed from everybody (RFC 2131 4.4.5, RFC 8415 18.2.5).
 *     b. EAPOL and LLDP of an uplink pass: without them its switch may take the link down, and they reach nobody behind it.
 *     c. An uplink may answer for what this host routes on by another interface (proxy ARP, RFC 1027; RFC 4389).
 *  4. Toward the endpoint: what the agent's own sockets send, and our own refusals, pass. Under load the kernel answers a SYN
 *     by a cookie and without a socket: a SYN-ACK made on this host under the agent's mark alone passes too, and opens nothing.
 *     What the agent sends is for who asked: to an address that is not the endpoint's it is judged like any other packet. A bridge
 *     brings it to who took its receiver's Ethernet address.
 *     a. From an uplink: what the agent's own sockets send passes, and what this host only forwards, which its own endpoint is to
 *        police. Replies come back to the agent, and to what leaves under the host's address (masqueraded): both leave a flow.
 *     b. Toward an uplink: what this host routes on passes. What goes to many is the host's.
 *     c. The host's own ICMP error about a packet that was not to the host is about what it forwards.
 *  5. From the endpoint: the source is one of its addresses. Neither end is an address that is on no wire.
 *  6. A later fragment is judged as its first one was; it never opens a flow. Without a first that passed it is dropped, and
 *     where it would write over what the first one holds (RFC 3128, RFC 5722).
 *  7. A packet of a live flow of the present set passes.
 *     a. A flow too long without a packet, and a connection (TCP, SCTP) that is over and opened anew, is no flow. A TCP connection
 *        in use that its opener opens anew is none to that SYN: who keeps one has no way to others at what the address is now.
 *     b. A TCP SYN against the direction of a live flow is not of that flow: judged as new, the flow is left as it is.
 *     c. An ICMP error goes to the sender of what it is about. It has the verdict of that flow, and changes nothing in it. About
 *        no flow, or to somebody else: dropped.
 *     d. Of an ended flow nothing passes but what opens a new one by 8 to 10: the endpoint's SYN or datagram; the peer's
 *        SYN where it was the peer who had opened it. What the proxy must get it gets.
 *     e. A flow of 4a is never judged again. It is none for what the host's own sockets send, but for the end of a TCP
 *        connection: the kernel acknowledges and resets in the agent's name when its socket is gone.
 *  8. Address -> identity: in the endpoint's scope, else in the static one, else world.
 *  9. Identity x direction x protocol x port -> the stronger of the identity's row and the row for any identity: deny,
 *     redirect, allow. No row: the direction's default.
 *     a. What is redirected is counted where it begins a question (a datagram, a SYN); what is over the endpoint's limit is
 *        dropped.
 * 10. Allowed: a flow is opened. Not by a reset, and toward the endpoint not by TCP other than a SYN.
 * 11. A live flow of another set is judged again by 8 and 9 in the direction in which it was opened, by the address's
 *     present identity and by the remembered one. A denial of either ends it, then a redirect of either, an allow of either
 *     keeps it; neither: the direction's default.
 * 12. Under audit what would be dropped passes, and its flow with it for as long as the audit lasts.
 * 13. Every packet leaves with a reason.
 *
 * Pure. The tables are reached through functions that the including file defines:
 *
 *   find_identity(scope, address, family)   -> identity, 0 on a miss
 *   find_policy(set, identity, direction, protocol, port) -> row or NULL
 *   find_flow(key) -> row, also of an ended flow, or NULL
 *   put_flow(key, value) in place of an ended one, if there was; put_ended(key, value)
 *   find_fragment(key) -> row or NULL; put_fragment(key, value)
 *   put_last_seen(scope, address, now)
 *   is_own_address(endpoint, address)
 *   is_routed_on(ctx, packet): whether this host's routing leads it to somebody else
 *   is_proxied(ctx, address): whether it leads what comes in for that address on by another interface
 *   is_led_away(ctx, tuple): whether it leads to the destination by another interface than to the source
 *   find_question_due(endpoint) -> row or NULL; put_question_due(endpoint, due)
 */
#ifndef NAMEGATE_VERDICT_H
#define NAMEGATE_VERDICT_H

#include "abi.h"
#include "parse.h"

#define SECOND_NS 1000000000ULL

/* A peer that lost our reset keeps retransmitting for minutes; a port is rarely used again within two. */
#define FLOW_ENDED_NS (120 * SECOND_NS)
#define FLOW_CONNECTIONLESS_NS (60 * SECOND_NS)
#define FLOW_OPENING_NS (60 * SECOND_NS)
#define FLOW_SETTLED_NS (21600 * SECOND_NS)
#define FLOW_CLOSED_NS (10 * SECOND_NS)
/* RFC 8200: a receiver gives a datagram up after 60 s. */
#define FRAGMENT_NS (60 * SECOND_NS)
/* Whoever asks when an address was last seen asks about minutes. */
#define LAST_SEEN_STEP_NS SECOND_NS

/* DECISIONS 21; of each endpoint. 0 questions a second are any number. */
#ifndef QUESTIONS_PER_SECOND
#define QUESTIONS_PER_SECOND 2000
#endif
#ifndef QUESTION_BURST
#define QUESTION_BURST 500
#endif
#define QUESTION_NS (SECOND_NS / (QUESTIONS_PER_SECOND ? QUESTIONS_PER_SECOND : 1))

#define PORT_DHCP_SERVER TO_NET16(67)
#define PORT_DHCP_CLIENT TO_NET16(68)
#define PORT_DHCPV6_CLIENT TO_NET16(546)
#define PORT_DHCPV6_SERVER TO_NET16(547)

#define CLOSED_BY_BOTH ((1 << DIRECTION_EGRESS) | (1 << DIRECTION_INGRESS))

struct decision {
	__u32 identity;
	__u32 cookie;
	__u8 reason;
	__u8 audited; /* passes although `reason` would drop it */
	__u8 pad[2];
};

struct finding {
	__u32 cookie;
	__u8 verdict;
	__u8 significant_bits;
	__u8 pad[2];
};

/* The clock of another processor may be a little ahead. */
static __always_inline __u64 time_since(__u64 then, __u64 now)
{
	return now > then ? now - then : 0;
}

static __always_inline int is_link_local(const struct address *a)
{
	return (a->words[0] & TO_NET32(0xffc00000)) == TO_NET32(0xfe800000);
}

static __always_inline int is_unspecified(const struct address *a)
{
	return !a->words[3] && (is_mapped(a) || (!a->words[0] && !a->words[1] && !a->words[2]));
}

/* Of IPv4, multicast and the limited broadcast; whether an address is the broadcast of its network only routing knows. */
static __always_inline int is_to_many(const struct address *a)
{
	if (!is_mapped(a))
		return (a->words[0] & TO_NET32(0xff000000)) == TO_NET32(0xff000000);
	return (a->words[3] & TO_NET32(0xf0000000)) == TO_NET32(0xe0000000) || a->words[3] == TO_NET32(0xffffffff);
}

static __always_inline int is_loopback(const struct address *a)
{
	if (!is_mapped(a))
		return !a->words[0] && !a->words[1] && !a->words[2] && a->words[3] == TO_NET32(1);
	return (a->words[3] & TO_NET32(0xff000000)) == TO_NET32(0x7f000000);
}

/* RFC 1122 3.2.1.3, RFC 4291 2.5: what no router carries and no stack takes from a wire. */
static __always_inline int is_martian(const struct tuple *t)
{
	return is_loopback(&t->source) || is_loopback(&t->destination) || is_unspecified(&t->source) ||
	       is_unspecified(&t->destination) || is_to_many(&t->source);
}

static __always_inline int may_claim(__u32 endpoint, const struct address *a)
{
	return is_unspecified(a) || is_link_local(a) || is_own_address(endpoint, a);
}

static __always_inline int is_same_address(const struct address *a, const struct address *b)
{
	return a->words[0] == b->words[0] && a->words[1] == b->words[1] && a->words[2] == b->words[2] &&
	       a->words[3] == b->words[3];
}

/*
 * Do both ends stand on this link? A router carries neighbour discovery on like any other packet; only its receiver looks at the
 * hop limit (RFC 4861 6.1, 7.1). Link-local addresses stay, link scope stays, a hop limit of 1 stays (MLD, RFC 3810 5); a neighbour
 * with a global address is in the sender's own /64, and of an endpoint behind this host where routing does not part the two: many
 * links may share one /64. What comes with 255 was never carried on.
 */
static __always_inline int is_on_link(void *ctx, const struct endpoint_value *e, const struct packet *p, __u8 direction)
{
	const struct address *to = &p->tuple.destination, *from = &p->tuple.source;

	if (p->kind == KIND_ARP)
		return 1;
	if (is_link_local(direction == DIRECTION_EGRESS ? to : from))
		return 1;
	if (is_to_many(to))
		return p->hops == 1 || (to->words[0] & TO_NET32(0x000f0000)) == TO_NET32(0x00020000);
	if (direction == DIRECTION_INGRESS && p->hops == 255)
		return 1;
	if (to->words[0] != from->words[0] || to->words[1] != from->words[1])
		return 0;
	return direction == DIRECTION_INGRESS || e->orientation == ORIENTATION_UPLINK || !is_led_away(ctx, &p->tuple);
}

/* 3c. ARP and advertisements; the source of these is the proxy's own address, or the one it answers for. */
static __always_inline int may_answer_for(void *ctx, const struct endpoint_value *e, const struct packet *p)
{
	const struct address *claim = p->kind == KIND_ARP ? &p->tuple.source : &p->about.source;

	if (e->orientation != ORIENTATION_UPLINK || is_unspecified(claim))
		return 0;
	if (!may_claim(e->endpoint, &p->tuple.source) && !is_same_address(&p->tuple.source, claim))
		return 0;
	return is_proxied(ctx, claim);
}

static __always_inline __u8 judge_neighbour(void *ctx, const struct endpoint_value *e, const struct packet *p, __u8 direction)
{
	if (p->part != PART_WHOLE) /* RFC 6980: neighbour discovery is never fragmented */
		return DROP_FRAGMENT;
	if (!is_on_link(ctx, e, p, direction))
		return DROP_NEIGHBOUR_CLAIM;
	if (direction == DIRECTION_INGRESS)
		return PASS_NEIGHBOUR;
	if (p->kind == KIND_ROUTER)
		return DROP_NEIGHBOUR_CLAIM;
	if (may_claim(e->endpoint, &p->tuple.source) && may_claim(e->endpoint, &p->about.source))
		return PASS_NEIGHBOUR;
	return may_answer_for(ctx, e, p) ? PASS_NEIGHBOUR : DROP_NEIGHBOUR_CLAIM;
}

/* ff02::1:2, all relays and servers on the link */
static __always_inline int is_dhcp_servers(const struct address *a)
{
	return a->words[0] == TO_NET32(0xff020000) && !a->words[1] && !a->words[2] && a->words[3] == TO_NET32(0x00010002);
}

/* 3a. RFC 2131 4.1, RFC 8415 7.2 and 13. Who has no address yet asks from none, and is answered at the one he is to have. */
static __always_inline int is_dhcp(const struct endpoint_value *e, const struct packet *p, __u8 direction)
{
	const struct tuple *t = &p->tuple;

	if (!e->dhcp && e->orientation != ORIENTATION_UPLINK)
		return 0;
	if (t->protocol != PROTOCOL_UDP || p->part != PART_WHOLE)
		return 0;
	if (p->family == 4) {
		if (direction == DIRECTION_INGRESS)
			return t->source_port == PORT_DHCP_SERVER && t->destination_port == PORT_DHCP_CLIENT;
		return t->source_port == PORT_DHCP_CLIENT && t->destination_port == PORT_DHCP_SERVER &&
		       t->destination.words[3] == TO_NET32(0xffffffff) &&
		       (is_unspecified(&t->source) || is_own_address(e->endpoint, &t->source));
	}
	if (direction == DIRECTION_INGRESS)
		return t->source_port == PORT_DHCPV6_SERVER && t->destination_port == PORT_DHCPV6_CLIENT &&
		       is_link_local(&t->destination);
	return t->source_port == PORT_DHCPV6_CLIENT && t->destination_port == PORT_DHCPV6_SERVER &&
	       is_link_local(&t->source) && (is_link_local(&t->destination) || is_dhcp_servers(&t->destination));
}

static __always_inline void fragment_key_of(const struct packet *p, __u32 endpoint, __u8 direction, struct fragment_key *key)
{
	key->endpoint = endpoint;
	key->source = p->tuple.source;
	key->destination = p->tuple.destination;
	key->id = p->fragment_id;
	key->next = p->next;
	key->direction = direction;
}

/* Returns 0 or DROP_FRAGMENT. */
static __always_inline __u8 follow_first_fragment(struct packet *p, __u32 endpoint, __u8 direction, __u64 now)
{
	struct fragment_key key = {};
	const struct fragment_value *first;

	fragment_key_of(p, endpoint, direction, &key);
	first = find_fragment(&key);
	if (!first || time_since(first->at, now) > FRAGMENT_NS || p->place < first->end)
		return DROP_FRAGMENT;
	p->tuple.source_port = first->source_port;
	p->tuple.destination_port = first->destination_port;
	p->tuple.protocol = first->protocol;
	p->policy_port = first->policy_port;
	p->kind = first->kind;
	return 0;
}

static __always_inline void remember_first_fragment(const struct packet *p, __u32 endpoint, __u8 direction, __u64 now)
{
	struct fragment_key key = {};
	struct fragment_value value = {};

	fragment_key_of(p, endpoint, direction, &key);
	value.at = now;
	value.source_port = p->tuple.source_port;
	value.destination_port = p->tuple.destination_port;
	value.policy_port = p->policy_port;
	value.end = (__u16)((p->end - p->transport + 7) / 8);
	value.protocol = p->tuple.protocol;
	value.kind = p->kind;
	put_fragment(&key, &value);
}

static __always_inline void flow_key_of(const struct tuple *t, __u32 endpoint, int is_source_local, struct flow_key *key)
{
	key->endpoint = endpoint;
	key->local = is_source_local ? t->source : t->destination;
	key->remote = is_source_local ? t->destination : t->source;
	key->local_port = is_source_local ? t->source_port : t->destination_port;
	key->remote_port = is_source_local ? t->destination_port : t->source_port;
	key->protocol = t->protocol;
}

/* The first packet of a connection; of protocols without one, any packet. */
static __always_inline int is_opening(const struct packet *p)
{
	if (p->part == PART_LATER)
		return 0;
	return p->tuple.protocol != PROTOCOL_TCP ||
	       (p->tcp_flags & TCP_BEGIN_OR_END) == TCP_SYN;
}

/* 7a */
static __always_inline int is_over(const struct flow_value *flow, __u8 protocol, int is_opened_anew, __u8 direction, __u64 now)
{
	__u64 life = FLOW_CONNECTIONLESS_NS;

	if (flow->state == FLOW_ENDED) {
		life = FLOW_ENDED_NS;
	} else if (protocol == PROTOCOL_TCP || protocol == PROTOCOL_SCTP) {
		int is_closed = flow->closing == CLOSED_BY_BOTH;

		if (is_opened_anew && (is_closed || (protocol == PROTOCOL_TCP && flow->settled && direction == flow->direction)))
			return 1;
		life = is_closed ? FLOW_CLOSED_NS : flow->settled ? FLOW_SETTLED_NS : FLOW_OPENING_NS;
	}
	return time_since(flow->last, now) > life;
}

/* Writes down that a packet of the flow went by. What both sides have closed does not live longer for what comes after. */
static __always_inline void note_packet(struct flow_value *flow, const struct flow_key *key, const struct packet *p,
					__u32 scope, __u8 direction, __u64 now)
{
	if (flow->closing != CLOSED_BY_BOTH)
		flow->last = now;
	if (p->tuple.protocol == PROTOCOL_TCP && p->part != PART_LATER) {
		if (!(p->tcp_flags & TCP_SYN))
			flow->settled = 1;
		if (p->tcp_flags & (TCP_FIN | TCP_RST))
			flow->closing |= (__u8)(1 << direction);
	}
	if (p->tuple.protocol == PROTOCOL_SCTP) {
		flow->settled |= direction != flow->direction;
		if (p->is_end)
			flow->closing = CLOSED_BY_BOTH;
	}
	if (!flow->exempt && time_since(flow->noted, now) >= LAST_SEEN_STEP_NS) {
		flow->noted = now;
		put_last_seen(scope, &key->remote, now);
	}
}

/* 8 */
static __always_inline __u32 identity_of(__u32 scope, const struct address *address, __u8 family)
{
	__u32 identity = find_identity(scope, address, family);

	if (!identity && scope != SCOPE_STATIC)
		identity = find_identity(SCOPE_STATIC, address, family);
	return identity ? identity : IDENTITY_WORLD;
}

/* Of two rows with one verdict the longer match is the rule to name; of equal ones, the identity's own, which comes first. */
static __always_inline void take_stronger(struct finding *finding, const struct policy_value *row)
{
	if (!row || row->verdict < finding->verdict)
		return;
	if (row->verdict == finding->verdict && row->significant_bits <= finding->significant_bits)
		return;
	finding->verdict = row->verdict;
	finding->significant_bits = row->significant_bits;
	finding->cookie = row->cookie;
}

/* 9, but for the default */
static __always_inline void look_up(struct finding *finding, __u32 set, __u32 identity, __u8 direction, __u8 protocol,
				    __be16 port)
{
	take_stronger(finding, find_policy(set, identity, direction, protocol, port));
	take_stronger(finding, find_policy(set, IDENTITY_ANY, direction, protocol, port));
}

static __always_inline int is_default_deny(const struct group_value *g, __u8 direction)
{
	return direction == DIRECTION_EGRESS ? g->default_deny_egress : g->default_deny_ingress;
}

/* The end of 9: the verdict in words. Only what the endpoint sends can be redirected. */
static __always_inline __u8 reason_of(const struct finding *finding, const struct group_value *g, __u8 direction)
{
	if (finding->verdict == VERDICT_ALLOW)
		return PASS_POLICY;
	if (finding->verdict == VERDICT_REDIRECT)
		return direction == DIRECTION_EGRESS ? PASS_REDIRECT : DROP_POLICY;
	if (finding->verdict == VERDICT_NONE)
		return is_default_deny(g, direction) ? DROP_POLICY : PASS_POLICY;
	return DROP_DENY;
}

/*
 * 9a. The row says when the endpoint's next question is due if all come evenly spread; one that comes so much earlier that a whole
 * burst is between is too many (ITU-T I.371, virtual scheduling). One number, so that two processors cannot tear it apart.
 */
static __always_inline int may_ask(__u32 endpoint, __u64 now)
{
	const __u64 *row;
	__u64 due = now;

	if (QUESTIONS_PER_SECOND == 0)
		return 1;
	row = find_question_due(endpoint);
	if (row && *row > now)
		due = *row;
	if (due - now + QUESTION_NS > QUESTION_BURST * QUESTION_NS)
		return 0;
	put_question_due(endpoint, due + QUESTION_NS);
	return 1;
}

/* A redirected packet is reassembled and untagged nowhere on its way to the proxy, which has sockets of two kinds. */
static __always_inline __u8 redirect_or_not(const struct packet *p, __u32 endpoint, __u64 now)
{
	if (p->tuple.protocol != PROTOCOL_TCP && p->tuple.protocol != PROTOCOL_UDP)
		return DROP_NOT_FOR_GATE;
	if (p->vlans)
		return DROP_VLAN_REDIRECT;
	if (p->part != PART_WHOLE)
		return DROP_FRAGMENT;
	if (is_opening(p) && !may_ask(endpoint, now))
		return DROP_QUESTION_LIMIT;
	return PASS_REDIRECT;
}

/* 11. Returns what the packet at hand gets. */
static __always_inline __u8 judge_again(struct flow_value *flow, const struct flow_key *key, const struct packet *p,
					const struct endpoint_value *e, const struct group_value *g, __u8 direction,
					__u64 now, struct decision *d)
{
	__u32 present = identity_of(e->scope, &key->remote, p->family);
	struct finding finding = {}, remembered = {};
	int is_of_flow = p->kind == KIND_FLOW;
	__u8 reason;

	look_up(&finding, g->set, present, flow->direction, key->protocol, flow->policy_port);
	if (flow->identity != present)
		look_up(&remembered, g->set, flow->identity, flow->direction, key->protocol, flow->policy_port);
	d->identity = present;
	if (remembered.verdict > finding.verdict) {
		finding = remembered;
		d->identity = flow->identity;
	}
	d->cookie = finding.cookie;
	reason = reason_of(&finding, g, flow->direction);
	if (reason == PASS_POLICY || g->audit) {
		flow->audited = reason != PASS_POLICY;
		flow->set = g->set;
		flow->cookie = finding.cookie;
		flow->identity = d->identity;
		if (is_of_flow)
			note_packet(flow, key, p, e->scope, direction, now);
		if (reason == PASS_POLICY)
			return is_of_flow ? PASS_FLOW : PASS_RELATED;
	} else {
		flow->last = now;
		flow->state = FLOW_ENDED;
		put_ended(key, flow);
	}
	if (reason == PASS_REDIRECT)
		return is_of_flow && direction == DIRECTION_EGRESS ? redirect_or_not(p, e->endpoint, now) : DROP_FLOW_ENDED;
	return reason;
}

/* 10. What may follow passes by it. */
static __always_inline void open_flow(const struct flow_key *key, const struct packet *p, const struct endpoint_value *e,
				      const struct group_value *g, __u8 direction, __u64 now, const struct decision *d,
				      __u8 audited, __u8 exempt)
{
	struct flow_value opened = {};

	opened.last = now;
	opened.identity = d->identity;
	opened.set = g->set;
	opened.cookie = d->cookie;
	opened.policy_port = p->policy_port;
	opened.direction = direction;
	opened.audited = audited;
	opened.exempt = exempt;
	note_packet(&opened, key, p, e->scope, direction, now);
	put_flow(key, &opened);
}

/* Does this packet leave a flow where it passes? */
static __always_inline int may_open(const struct packet *p, __u8 direction)
{
	if (p->kind != KIND_FLOW || p->part == PART_LATER)
		return 0;
	if (direction == DIRECTION_EGRESS)
		return p->tuple.protocol != PROTOCOL_TCP || !(p->tcp_flags & TCP_RST);
	return is_opening(p);
}

/* 3 to 11; `audit` is dealt with by the caller, but for flows. */
static __always_inline __u8 judge(void *ctx, struct packet *p, const struct endpoint_value *e, const struct group_value *g,
				  __u8 direction, __u64 now, struct decision *d)
{
	struct flow_key key = {};
	struct flow_value *flow = 0;
	struct finding finding = {};
	int is_barred = 0, is_alone = 0;
	__u8 reason;

	if (p->kind == KIND_LINK) /* 3b. */
		return e->orientation == ORIENTATION_UPLINK ? PASS_NEIGHBOUR : DROP_ETHERTYPE;
	if (p->kind >= KIND_ARP) /* 3. */
		return judge_neighbour(ctx, e, p, direction);
	if (is_dhcp(e, p, direction)) /* 3a. */
		return PASS_DHCP;
	if (direction == DIRECTION_INGRESS) { /* 4. */
		if (p->origin == ORIGIN_ANSWER)
			return PASS_ANSWER;
		if ((p->origin == ORIGIN_AGENT ||
		     (p->origin == ORIGIN_MARKED && (p->tcp_flags & TCP_BEGIN_OR_END) == (TCP_SYN | TCP_ACK))) &&
		    (e->orientation == ORIENTATION_UPLINK || is_own_address(e->endpoint, &p->tuple.destination)))
			return PASS_AGENT;
	} else if (e->orientation == ORIENTATION_UPLINK &&
		   (p->origin == ORIGIN_AGENT || p->origin == ORIGIN_FORWARDED)) { /* 4a. */
		reason = p->origin == ORIGIN_AGENT ? PASS_AGENT : PASS_FORWARDED;
		if (!may_open(p, direction) ||
		    (reason == PASS_FORWARDED && !is_own_address(e->endpoint, &p->tuple.source)))
			return reason;
		flow_key_of(&p->tuple, e->endpoint, 1, &key);
		flow = find_flow(&key);
		if (flow && flow->exempt && !is_over(flow, key.protocol, is_opening(p), direction, now))
			note_packet(flow, &key, p, e->scope, direction, now);
		else
			open_flow(&key, p, e, g, direction, now, d, 0, 1);
		return reason;
	} else if (!is_own_address(e->endpoint, &p->tuple.source)) { /* 5. */
		return DROP_SOURCE;
	}
	if (is_martian(&p->tuple))
		return DROP_MARTIAN;
	if (direction == DIRECTION_INGRESS && e->orientation == ORIENTATION_UPLINK &&
	    !is_own_address(e->endpoint, &p->tuple.destination) && !is_to_many(&p->tuple.destination) &&
	    is_routed_on(ctx, p)) /* 4b. */
		return PASS_FORWARDED;
	if (p->part == PART_LATER) { /* 6. */
		reason = follow_first_fragment(p, e->endpoint, direction, now);
		if (reason)
			return reason;
	}

	if (p->kind == KIND_ERROR) { /* 7c. what it is about went the other way */
		if (p->part != PART_WHOLE)
			return DROP_FRAGMENT;
		reason = (__u8)parse_about(ctx, p);
		if (reason)
			return reason;
		if (!is_same_address(&p->tuple.destination, &p->about.source))
			return DROP_UNRELATED;
		if (direction == DIRECTION_EGRESS && e->orientation == ORIENTATION_UPLINK &&
		    !is_own_address(e->endpoint, &p->about.destination) && !is_to_many(&p->about.destination)) /* 4c. */
			return PASS_FORWARDED;
		flow_key_of(&p->about, e->endpoint, direction == DIRECTION_INGRESS, &key);
	} else {
		flow_key_of(&p->tuple, e->endpoint, direction == DIRECTION_EGRESS, &key);
	}
	if (p->kind != KIND_SINGLE)
		flow = find_flow(&key);
	if (flow && is_over(flow, key.protocol, p->kind == KIND_FLOW && is_opening(p), direction, now)) /* 7a. */
		flow = 0;
	if (flow && flow->exempt && direction == DIRECTION_EGRESS && p->kind == KIND_FLOW &&
	    (p->origin != ORIGIN_MARKED || p->tuple.protocol != PROTOCOL_TCP || is_opening(p))) /* 7e. */
		flow = 0;

	if (flow && flow->state == FLOW_ENDED) { /* 7d. */
		if (p->kind == KIND_ERROR)
			return DROP_FLOW_ENDED;
		is_barred = !is_opening(p);
		if (direction == DIRECTION_INGRESS)
			is_barred |= p->tuple.protocol != PROTOCOL_TCP || flow->direction != DIRECTION_INGRESS;
		flow->last = now;
		put_ended(&key, flow);
		if (is_barred && direction == DIRECTION_INGRESS)
			return DROP_FLOW_ENDED;
	} else if (flow && p->kind == KIND_FLOW && p->tuple.protocol == PROTOCOL_TCP && is_opening(p) &&
		   direction != flow->direction) { /* 7b. */
		is_alone = 1;
	} else if (flow) {
		d->identity = flow->identity;
		d->cookie = flow->cookie;
		if (!flow->exempt && (flow->set != g->set || (flow->audited && !g->audit)))
			return judge_again(flow, &key, p, e, g, direction, now, d); /* 11. */
		if (p->kind == KIND_ERROR)
			return flow->audited ? PASS_AUDIT : PASS_RELATED;
		note_packet(flow, &key, p, e->scope, direction, now);
		return flow->audited ? PASS_AUDIT : PASS_FLOW; /* 7. */
	}
	if (p->kind == KIND_ERROR)
		return DROP_UNRELATED;

	d->identity = identity_of(e->scope, &key.remote, p->family); /* 8. */
	look_up(&finding, g->set, d->identity, direction, p->tuple.protocol, p->policy_port); /* 9. */
	d->cookie = finding.cookie;
	reason = reason_of(&finding, g, direction);
	if (reason == PASS_REDIRECT)
		return redirect_or_not(p, e->endpoint, now);
	if (reason == PASS_POLICY && is_barred)
		return DROP_FLOW_ENDED;
	if (reason != PASS_POLICY && !g->audit)
		return reason;

	if (!is_alone && !is_barred && may_open(p, direction)) /* 10. */
		open_flow(&key, p, e, g, direction, now, d, reason != PASS_POLICY, 0);
	return reason;
}

/* 2 to 13 for an endpoint that is known. */
static __always_inline void decide(void *ctx, struct packet *p, const struct endpoint_value *e, const struct group_value *g,
				   __u8 direction, __u64 now, struct decision *d)
{
	int unread = parse_frame(ctx, p); /* 2. */

	d->reason = unread ? (__u8)unread : judge(ctx, p, e, g, direction, now, d);
	d->audited = d->reason >= DROP_FIRST && g->audit; /* 12. */
	if (!unread && (d->reason < DROP_FIRST || d->audited) && p->part == PART_FIRST)
		remember_first_fragment(p, e->endpoint, direction, now);
}

#endif
