/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The three programs.
 *
 *   from_endpoint   where the interface sees what the endpoint sends (ingress of a veth's host side, egress of an uplink)
 *   to_endpoint     the other hook of the same interface
 *   gate            ingress of the interception device: hands what was redirected there to the proxy's sockets
 *
 * A packet that may go on leaves with TC_ACT_UNSPEC: TC_ACT_OK would end the chain and hide every program behind ours.
 * A dropped one leaves with TC_ACT_SHOT or as a refusal on its way back. There is no third way out.
 *
 * This file is the edge: all map access is here (BCC rewrites nothing in headers), what is decided from it is in verdict.h.
 * BCC 0.26 relocates neither globals nor functions, so everything is inlined and nothing is static data.
 */
#include <uapi/linux/bpf.h>
#include <uapi/linux/pkt_cls.h>

#include "abi.h"
#include "maps.h"

/* The bits of the packet mark that are ours, and what they say. The loader passes what is free on this host. */
#ifndef MARK_MASK
#define MARK_MASK 0xf00
#endif
#ifndef MARK_AGENT
#define MARK_AGENT 0xa00
#endif
#ifndef MARK_ANSWER
#define MARK_ANSWER 0xb00
#endif

/* Refusals a second and endpoint (DECISIONS 19); what is over it is dropped silently, 0 answers nothing. */
#ifndef ANSWERS_PER_SECOND
#define ANSWERS_PER_SECOND 100
#endif

static __always_inline int load_bytes(void *ctx, __u32 offset, void *to, __u32 n)
{
	return bpf_skb_load_bytes(ctx, offset, to, n) < 0;
}

#include "parse.h"

#define FAMILY_IPV4 2 /* AF_INET, AF_INET6: the kernel's own headers for them do not go with BCC's */
#define FAMILY_IPV6 10

/* --- the tables, as verdict.h wants them -------------------------------------------------------------------------- */

static __always_inline __u32 find_identity(__u32 scope, const struct address *address, __u8 family)
{
	u32 *identity;

	if (family == 4) {
		struct ipcache4_key key = {};

		key.prefixlen = IPCACHE_PREFIX_FIXED + 32;
		key.scope = scope;
		key.address = address->words[3];
		identity = ipcache4.lookup(&key);
	} else {
		struct ipcache6_key key = {};

		key.prefixlen = IPCACHE_PREFIX_FIXED + 128;
		key.scope = scope;
		key.address = *address;
		identity = ipcache6.lookup(&key);
	}
	return identity ? *identity : 0;
}

static __always_inline const struct policy_value *find_policy(__u32 set, __u32 identity, __u8 direction, __u8 protocol,
							      __be16 port)
{
	struct policy_key key = {};

	key.prefixlen = POLICY_PREFIX_FULL;
	key.set = set;
	key.identity = identity;
	key.direction = direction;
	key.protocol = protocol;
	key.port = port;
	return policy.lookup(&key);
}

static __always_inline struct flow_value *find_flow(const struct flow_key *key)
{
	struct flow_value *flow = flows.lookup((struct flow_key *)key);

	return flow ? flow : ended.lookup((struct flow_key *)key);
}

static __always_inline void note_loss(__u32 loss)
{
	u64 *times = lost.lookup(&loss);

	if (times)
		*times += 1;
}

static __always_inline void put_flow(const struct flow_key *key, struct flow_value *value)
{
	ended.delete((struct flow_key *)key);
	if (flows.update((struct flow_key *)key, value))
		note_loss(LOST_FLOW);
}

static __always_inline void put_ended(const struct flow_key *key, struct flow_value *value)
{
	if (ended.update((struct flow_key *)key, value))
		note_loss(LOST_FLOW);
}

static __always_inline const struct fragment_value *find_fragment(struct fragment_key *key)
{
	return fragments.lookup(key);
}

static __always_inline void put_fragment(struct fragment_key *key, struct fragment_value *value)
{
	fragments.update(key, value);
}

static __always_inline void put_last_seen(__u32 scope, const struct address *address, __u64 now)
{
	struct last_seen_key key = {};

	key.scope = scope;
	key.address = *address;
	last_seen.update(&key, &now);
}

static __always_inline int is_own_address(__u32 endpoint, const struct address *address)
{
	struct own_address_key key = {};

	key.endpoint = endpoint;
	key.address = *address;
	return own_addresses.lookup(&key) != 0;
}

static __always_inline const __u64 *find_question_due(__u32 endpoint)
{
	return questions.lookup(&endpoint);
}

static __always_inline void put_question_due(__u32 endpoint, __u64 due)
{
	questions.update(&endpoint, &due);
}

/* By which interface what comes in here goes on, 0: by none. Asked of the kernel's own routing, which alone knows broadcasts and
 * the addresses of other interfaces. Where forwarding is off nothing is routed on. */
static __always_inline u32 find_way_on(struct __sk_buff *skb, const struct address *from, const struct address *to)
{
	struct bpf_fib_lookup route = {};
	long found;

	route.ifindex = skb->ifindex;
	if (is_mapped(to)) {
		route.family = FAMILY_IPV4;
		route.ipv4_src = from->words[3];
		route.ipv4_dst = to->words[3];
	} else {
		route.family = FAMILY_IPV6;
		__builtin_memcpy(route.ipv6_src, from, 16);
		__builtin_memcpy(route.ipv6_dst, to, 16);
	}
	found = bpf_fib_lookup(skb, &route, sizeof(route), 0);
	return found == BPF_FIB_LKUP_RET_SUCCESS || found == BPF_FIB_LKUP_RET_NO_NEIGH ? route.ifindex : 0;
}

static __always_inline int is_routed_on(struct __sk_buff *skb, const struct packet *p)
{
	return find_way_on(skb, &p->tuple.source, &p->tuple.destination) != 0;
}

/* From nobody in particular: of what comes from a link-local address the kernel says that it is not routed on. */
static __always_inline int is_proxied(struct __sk_buff *skb, const struct address *address)
{
	struct address anybody = {};
	u32 way_on = find_way_on(skb, &anybody, address);

	return way_on && way_on != skb->ifindex;
}

static __always_inline int is_led_away(struct __sk_buff *skb, const struct tuple *t)
{
	struct address anybody = {};
	u32 way_on = find_way_on(skb, &anybody, &t->destination);

	return way_on && way_on != find_way_on(skb, &anybody, &t->source);
}

#include "verdict.h"
#include "answer.h"

/*
 * The packet at hand. In a map rather than on the stack, which is small; and because the verifier forgets what is written to a
 * map: however many ways lead through the parser, the verdict is verified once, not once for each. A program runs with
 * softirqs off, so its processor's copy is its own.
 */
BPF_PERCPU_ARRAY(scratch, struct packet, 1);

static __always_inline struct packet *blank_packet(u32 length)
{
	u32 index = 0;
	struct packet *p = scratch.lookup(&index);

	if (p) {
		__builtin_memset(p, 0, sizeof(*p));
		p->length = length;
	}
	return p;
}

/* --- counting and telling ----------------------------------------------------------------------------------------- */

/* One of two processors that meet a new key at once loses the race to insert it, and finds it then. */
static __always_inline void count(__u32 endpoint, __u32 reason, __u32 bytes)
{
	struct counter_key key = {};
	struct counter_value *value, zero = {};

	key.endpoint = endpoint;
	key.reason = reason;
	value = counters.lookup(&key);
	if (!value) {
		counters.insert(&key, &zero);
		value = counters.lookup(&key);
	}
	if (!value) {
		note_loss(LOST_COUNTER);
		return;
	}
	value->packets += 1;
	value->bytes += bytes;
}

static __always_inline void count_rule(__u32 cookie, __u32 bytes)
{
	struct counter_value *value, zero = {};

	if (!cookie)
		return;
	value = rules.lookup(&cookie);
	if (!value) {
		rules.insert(&cookie, &zero);
		value = rules.lookup(&cookie);
	}
	if (!value) {
		note_loss(LOST_COUNTER);
		return;
	}
	value->packets += 1;
	value->bytes += bytes;
}

static __always_inline void tell(struct __sk_buff *skb, const struct packet *p, __u32 endpoint, __u8 direction,
				 const struct decision *d)
{
	struct event *event = events.ringbuf_reserve(sizeof(*event));

	if (!event) {
		note_loss(LOST_EVENT);
		return;
	}
	event->at = bpf_ktime_get_boot_ns();
	event->endpoint = endpoint;
	event->ifindex = skb->ifindex;
	event->identity = d->identity;
	event->cookie = d->cookie;
	event->length = skb->len;
	event->policy_port = p->policy_port;
	event->reason = d->reason;
	event->audited = d->audited;
	event->source = p->tuple.source;
	event->destination = p->tuple.destination;
	event->source_port = p->tuple.source_port;
	event->destination_port = p->tuple.destination_port;
	event->protocol = p->tuple.protocol;
	event->direction = direction;
	event->pad[0] = 0;
	event->pad[1] = 0;
	events.ringbuf_submit(event, 0);
}

static __always_inline bool are_openings_told(void)
{
	u32 index = SETTING_TELL_OPENED, *is_told = settings.lookup(&index);

	return is_told && *is_told;
}

/* --- from and to an endpoint -------------------------------------------------------------------------------------- */

static __always_inline __u32 socket_key(const struct packet *p)
{
	return (p->family == 6 ? 2 : 0) | (p->tuple.protocol == PROTOCOL_TCP ? 1 : 0);
}

/*
 * Hands the packet to the interception device, where gate() finds its socket. Not here: at egress the kernel refuses
 * bpf_sk_assign, and at a bridge port br_netfilter would take the socket away again.
 *
 * Looking for the listener first makes a question nobody can answer fail like any denied packet, at once, instead of
 * vanishing behind the device. Returns the reason, and the action where the packet goes.
 */
static __always_inline __u8 redirect(struct __sk_buff *skb, const struct packet *p, int *action)
{
	u32 key = socket_key(p), index = SETTING_GATE_IFINDEX;
	struct bpf_sock *listener;
	u32 *gate_ifindex;

	gate_ifindex = settings.lookup(&index);
	if (!gate_ifindex || !*gate_ifindex)
		return DROP_NO_GATE;
	listener = (struct bpf_sock *)dns_sockets.lookup(&key);
	if (!listener)
		return DROP_NO_SOCKET;
	bpf_sk_release(listener);
	bpf_skb_change_type(skb, 0); /* PACKET_HOST, or the stack would not look at it */
	*action = bpf_redirect(*gate_ifindex, BPF_F_INGRESS);
	return PASS_REDIRECT;
}

/*
 * Is the packet's socket one of this network namespace, and marked like the agent's? A container whose macvlan or VLAN device
 * stands on an uplink sends through the uplink's hook too, packets of its own sockets under any mark (SO_MARK asks for no more
 * than CAP_NET_RAW, which containers have). Linux 6.1 tells a classifier nothing of a socket's namespace, so the socket is looked up
 * in ours by its own addresses (the packet's may have been translated), and what is found must be the very same one.
 * Once a connection is closed its socket is not found any more: see 7e.
 */
static __always_inline int is_agents_socket(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk, *found;
	struct bpf_sock_tuple t = {};
	u32 size = sizeof(t.ipv4);
	int is_it;

	sk = sk ? bpf_sk_fullsock(sk) : 0;
	if (!sk || (sk->mark & MARK_MASK) != MARK_AGENT)
		return 0;
	if (sk->family == FAMILY_IPV4) {
		t.ipv4.saddr = sk->dst_ip4;
		t.ipv4.daddr = sk->src_ip4;
		t.ipv4.sport = (__be16)sk->dst_port;
		t.ipv4.dport = TO_NET16(sk->src_port);
	} else if (sk->family == FAMILY_IPV6) {
		size = sizeof(t.ipv6);
		UNROLL
		for (int i = 0; i < 4; i++) {
			t.ipv6.saddr[i] = sk->dst_ip6[i];
			t.ipv6.daddr[i] = sk->src_ip6[i];
		}
		t.ipv6.sport = (__be16)sk->dst_port;
		t.ipv6.dport = TO_NET16(sk->src_port);
	} else {
		return 0;
	}
	if (sk->protocol == PROTOCOL_TCP)
		found = bpf_skc_lookup_tcp(skb, &t, size, BPF_F_CURRENT_NETNS, 0);
	else if (sk->protocol == PROTOCOL_UDP)
		found = bpf_sk_lookup_udp(skb, &t, size, BPF_F_CURRENT_NETNS, 0);
	else
		return 0;
	if (!found)
		return 0;
	is_it = found == sk;
	bpf_sk_release(found);
	return is_it;
}

/*
 * Who sent it. The mark alone proves nothing: a packet that is forwarded may have been given any. Toward an endpoint a mark and a
 * socket are those of somebody with CAP_NET_ADMIN on this host: what came in by any interface has no socket, and what came through
 * a veth from another namespace has lost its mark as well (a device given away that stands on the endpoint's own keeps both: the
 * agent's replies leave by raw sockets, which cannot be looked up). One that goes back out of the interface it came in by, under a
 * mark that the other side of a veth cannot set, was turned round by us. What came in nowhere was made on this host.
 */
static __always_inline __u8 origin_of(struct __sk_buff *skb, __u8 direction)
{
	u32 mark = skb->mark & MARK_MASK;

	if (direction == DIRECTION_EGRESS) {
		if (mark == MARK_AGENT && is_agents_socket(skb))
			return ORIGIN_AGENT;
		if (skb->ingress_ifindex)
			return ORIGIN_FORWARDED;
		return mark == MARK_AGENT ? ORIGIN_MARKED : ORIGIN_WIRE;
	}
	if (mark == MARK_AGENT && skb->sk)
		return ORIGIN_AGENT;
	if (mark == MARK_AGENT && !skb->ingress_ifindex)
		return ORIGIN_MARKED;
	if (mark == MARK_ANSWER && skb->ingress_ifindex == skb->ifindex)
		return ORIGIN_ANSWER;
	return ORIGIN_WIRE;
}

/* Whether one more refusal is due to this endpoint. Two processors that count at once may let one too many go. */
static __always_inline int may_answer(__u32 endpoint, __u64 now)
{
	struct answer_value *value, first = {};

	if (ANSWERS_PER_SECOND == 0)
		return 0;
	value = answers.lookup(&endpoint);
	if (!value || time_since(value->since, now) >= SECOND_NS) {
		first.since = now;
		first.sent = 1;
		answers.update(&endpoint, &first);
		return 1;
	}
	value->sent += 1;
	return value->sent <= ANSWERS_PER_SECOND;
}

/* What policy refuses is refused aloud; what is no honest packet is not answered at all. */
static __always_inline int is_refused(__u8 reason)
{
	return reason == DROP_POLICY || reason == DROP_DENY || reason == DROP_FLOW_ENDED || reason == DROP_NO_GATE ||
	       reason == DROP_NO_SOCKET || reason == DROP_QUESTION_LIMIT;
}

/* The last thing that happens to a packet that must not go on. Back to where it came from means out of a veth's host side, but
 * into an uplink, whose other end is this host. The other hook knows it by the mark. */
static __always_inline int drop(struct __sk_buff *skb, const struct packet *p, const struct endpoint_value *e, __u8 direction,
				__u8 reason, __u64 now)
{
	if (direction != DIRECTION_EGRESS || e->silent || !is_refused(reason) || !is_answerable(p) || !may_answer(e->endpoint, now))
		return TC_ACT_SHOT;
	if (answer(skb, p))
		return TC_ACT_SHOT;
	skb->mark = (skb->mark & ~MARK_MASK) | MARK_ANSWER;
	return bpf_redirect(skb->ifindex, e->orientation == ORIENTATION_UPLINK ? BPF_F_INGRESS : 0);
}

/*
 * A frame that the agent puts through an ingress hook to see it counted and gone. Nobody else can make one: what comes in from a
 * wire, or from another network namespace, carries no mark. Dropped under audit too, so it needs no policy and reaches no stack.
 */
static __always_inline int is_canary(struct __sk_buff *skb)
{
	return skb->protocol == TO_NET16(ETHERTYPE_CANARY) && (skb->mark & MARK_MASK) == MARK_ANSWER &&
	       skb->ingress_ifindex == skb->ifindex;
}

static __always_inline int police(struct __sk_buff *skb, __u8 direction)
{
	u32 ifindex = skb->ifindex, length = skb->len;
	struct packet *p = blank_packet(length);
	struct decision d = {};
	struct endpoint_value *endpoint_row, e = {};
	struct group_value *group_row, g = {};
	u64 now = bpf_ktime_get_boot_ns();
	int action = TC_ACT_UNSPEC;

	if (!p)
		return TC_ACT_SHOT; /* cannot be: the array has this one row */
	if (is_canary(skb)) {
		count(ENDPOINT_NONE, DROP_CANARY, length);
		return TC_ACT_SHOT;
	}
	/* 1. Read at once: a row that is replaced may be used for another key a moment later. */
	endpoint_row = endpoints.lookup(&ifindex);
	if (!endpoint_row) {
		d.reason = DROP_NO_ENDPOINT;
		count(ENDPOINT_NONE, d.reason, length);
		tell(skb, p, ENDPOINT_NONE, direction, &d);
		return TC_ACT_SHOT;
	}
	e = *endpoint_row;
	group_row = groups.lookup(&e.group);
	if (!group_row) {
		d.reason = DROP_NO_GROUP;
		count(e.endpoint, d.reason, length);
		tell(skb, p, e.endpoint, direction, &d);
		return TC_ACT_SHOT;
	}
	g = *group_row;

	/* What comes through a veth has lost its mark, but for what the other side put here by bpf_redirect_peer(). Nobody after us
	 * is to take it for ours: at the next port of a bridge it would be the agent's as soon as it had a socket. */
	if (direction == DIRECTION_EGRESS && e.orientation != ORIENTATION_UPLINK)
		skb->mark &= ~MARK_MASK;
	p->vlans = skb->vlan_present ? 1 : 0;
	p->origin = origin_of(skb, direction);
	decide(skb, p, &e, &g, direction, now, &d);
	if (d.reason == PASS_REDIRECT) {
		d.reason = redirect(skb, p, &action);
		d.audited = d.reason >= DROP_FIRST && g.audit;
	}
	if (direction == DIRECTION_EGRESS && d.reason < DROP_FIRST && action == TC_ACT_UNSPEC && is_overwritten(skb, p)) {
		d.reason = DROP_MALFORMED;
		d.audited = g.audit;
	}
	count(e.endpoint, d.audited ? PASS_AUDIT : d.reason, length);
	count_rule(d.cookie, length);
	if (d.reason == PASS_ANSWER)
		skb->mark &= ~MARK_MASK; /* it has done its work */
	if (d.reason < DROP_FIRST) {
		if (d.reason == PASS_POLICY && are_openings_told())
			tell(skb, p, e.endpoint, direction, &d);
		return action;
	}
	tell(skb, p, e.endpoint, direction, &d);
	if (d.audited)
		return TC_ACT_UNSPEC;
	return drop(skb, p, &e, direction, d.reason, now);
}

int from_endpoint(struct __sk_buff *skb)
{
	return police(skb, DIRECTION_EGRESS);
}

int to_endpoint(struct __sk_buff *skb)
{
	return police(skb, DIRECTION_INGRESS);
}

/* --- the interception device -------------------------------------------------------------------------------------- */

/*
 * An established connection gets its own socket, as the stack would find it; a new one, and every datagram, the listener.
 * A SYN for a connection in TIME_WAIT opens a new one (RFC 6191).
 */
static __always_inline __u8 assign_socket(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_sock *sk = 0;
	u32 key = socket_key(p);
	long failed;

	if (p->tuple.protocol == PROTOCOL_TCP) {
		struct bpf_sock_tuple t = {};

		if (p->family == 6) {
			__builtin_memcpy(t.ipv6.saddr, &p->tuple.source, 16);
			__builtin_memcpy(t.ipv6.daddr, &p->tuple.destination, 16);
			t.ipv6.sport = p->tuple.source_port;
			t.ipv6.dport = p->tuple.destination_port;
			sk = bpf_skc_lookup_tcp(skb, &t, sizeof(t.ipv6), BPF_F_CURRENT_NETNS, 0);
		} else {
			t.ipv4.saddr = p->tuple.source.words[3];
			t.ipv4.daddr = p->tuple.destination.words[3];
			t.ipv4.sport = p->tuple.source_port;
			t.ipv4.dport = p->tuple.destination_port;
			sk = bpf_skc_lookup_tcp(skb, &t, sizeof(t.ipv4), BPF_F_CURRENT_NETNS, 0);
		}
		if (sk && (sk->state == BPF_TCP_LISTEN || (sk->state == BPF_TCP_TIME_WAIT && is_opening(p)))) {
			bpf_sk_release(sk);
			sk = 0;
		}
		/* A connection from before the attachment, to a resolver of this host: only ours carry our mark. Its packets get
		 * the listener, which resets it. */
		if (sk) {
			struct bpf_sock *full = bpf_sk_fullsock(sk);

			if (full && (full->mark & MARK_MASK) != MARK_AGENT) {
				bpf_sk_release(sk);
				sk = 0;
			}
		}
	}
	if (!sk)
		sk = (struct bpf_sock *)dns_sockets.lookup(&key);
	if (!sk)
		return DROP_NO_SOCKET;
	failed = bpf_sk_assign(skb, sk, 0);
	bpf_sk_release(sk);
	return failed ? DROP_NOT_ASSIGNED : PASS_REDIRECT;
}

int gate(struct __sk_buff *skb)
{
	u32 length = skb->len;
	struct packet *p = blank_packet(length);
	struct decision d = {};

	if (!p)
		return TC_ACT_SHOT;
	if (is_canary(skb)) {
		count(ENDPOINT_NONE, DROP_CANARY, length);
		return TC_ACT_SHOT;
	}
	bpf_skb_change_type(skb, 0); /* the frame is addressed to whoever the endpoint takes for its router */
	d.reason = (__u8)parse_frame(skb, p);
	if (!d.reason && (p->part != PART_WHOLE || (p->tuple.protocol != PROTOCOL_TCP && p->tuple.protocol != PROTOCOL_UDP)))
		d.reason = DROP_NOT_FOR_GATE;
	if (!d.reason)
		d.reason = assign_socket(skb, p);
	if (d.reason == PASS_REDIRECT)
		return TC_ACT_UNSPEC;
	count(ENDPOINT_NONE, d.reason, length);
	tell(skb, p, ENDPOINT_NONE, DIRECTION_EGRESS, &d);
	return TC_ACT_SHOT;
}
