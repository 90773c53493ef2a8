/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A denied packet of the endpoint, turned round in place into its refusal, so that the client fails at once (DECISIONS 19):
 * TCP gets a reset, RFC 9293 section 3.10.7.1; UDP "administratively prohibited", RFC 1812 5.2.7.1 and RFC 4443 3.1.
 *
 * Only plain packets (struct packet) get here: Ethernet, IP without options or extension headers, whole. The refusal seems to
 * come from the address that was asked, as from a host that refuses.
 *
 * The one difficulty is the checksum. A packet of a local sender usually has none yet: the stack left a seed in the field and
 * noted that whoever sends it on adds the rest (CHECKSUM_PARTIAL). The note stays with the packet, so the refusal must leave a
 * seed in the same place. Whether it is so can only be tried: bpf_l4_csum_replace() without BPF_F_PSEUDO_HDR leaves such a
 * field alone. An ICMP message has "unused" octets where UDP has its checksum; what is added there makes its own sum right.
 */
#ifndef NAMEGATE_ANSWER_H
#define NAMEGATE_ANSWER_H

#include <uapi/linux/if_ether.h>
#include <uapi/linux/icmp.h>
#include <uapi/linux/icmpv6.h>
#include <uapi/linux/ip.h>
#include <uapi/linux/ipv6.h>
#include <uapi/linux/tcp.h>
#include <uapi/linux/udp.h>

#include "verdict.h"

#define ANSWER_HOPS 64
#define IPV4_DO_NOT_FRAGMENT 0x4000
#define ICMP_QUOTE_TRANSPORT 8 /* RFC 792: the IP header and 8 octets */

#define CHECKSUM_END_TCP 18 /* of the header; SCTP's is behind UDP's */
#define CHECKSUM_END_UDP 8
#define INVALID 22 /* EINVAL */

#ifndef ICMP_PKT_FILTERED
#define ICMP_PKT_FILTERED 13
#endif

static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return (__u16)sum;
}

/* 1: a checksum of this packet is still to be completed; 0: none is; below: an error. What stands at the offset it leaves. */
static __always_inline int is_partial(struct __sk_buff *skb, __u32 offset)
{
	__u16 before = 0, after = 0;

	if (bpf_skb_load_bytes(skb, offset, &before, sizeof(before)) < 0)
		return -1;
	if (bpf_l4_csum_replace(skb, offset, 0, 1, sizeof(before)) < 0)
		return -1;
	if (bpf_skb_load_bytes(skb, offset, &after, sizeof(after)) < 0)
		return -1;
	if (after == before)
		return 1;
	return bpf_skb_store_bytes(skb, offset, &before, sizeof(before), 0) < 0 ? -1 : 0;
}

/*
 * Would the last device on the way write a checksum over what was judged? Where it goes the sender says, who may be a virtual
 * machine or hold a packet socket (virtio 5.1.6.2, PACKET_VNET_HDR), and the kernel takes any place behind the first octets of the IP
 * header: the destination's. A classifier is told nothing of it, but no packet may be cut before the end of that field. So this cut
 * is refused where the field is where it belongs, or further on, as inside a tunnel; where it is made, the packet is dropped.
 */
static __always_inline int is_overwritten(struct __sk_buff *skb, const struct packet *p)
{
	__u32 end = p->transport + CHECKSUM_END_UDP;
	int partial = is_partial(skb, 0);

	if (partial <= 0)
		return partial;
	if (p->kind >= KIND_ARP) /* nobody leaves these to a device */
		return 1;
	if (p->tuple.protocol == PROTOCOL_TCP)
		end = p->transport + CHECKSUM_END_TCP;
	return bpf_skb_change_tail(skb, end - 1, 0) != -INVALID;
}

static __always_inline int turn_ethernet(struct __sk_buff *skb)
{
	__u8 from_to[2 * ETH_ALEN], to_from[2 * ETH_ALEN];

	if (bpf_skb_load_bytes(skb, 0, from_to, sizeof(from_to)) < 0)
		return -1;
	__builtin_memcpy(to_from, from_to + ETH_ALEN, ETH_ALEN);
	__builtin_memcpy(to_from + ETH_ALEN, from_to, ETH_ALEN);
	return bpf_skb_store_bytes(skb, 0, to_from, sizeof(to_from), 0);
}

/* Writes the IP header of an answer whose transport part is so long; gives the sum of its pseudo header. Below 0: an error. */
static __always_inline __s64 write_ip(struct __sk_buff *skb, const struct packet *p, __u8 protocol, __u16 length)
{
	__u64 sum = TO_NET16(protocol) + (__u64)TO_NET16(length);

	if (p->family == 6) {
		struct ipv6hdr header = {};

		header.version = 6;
		header.payload_len = TO_NET16(length);
		header.nexthdr = protocol;
		header.hop_limit = ANSWER_HOPS;
		__builtin_memcpy(&header.saddr, &p->tuple.destination, 16);
		__builtin_memcpy(&header.daddr, &p->tuple.source, 16);
		sum += (__u32)bpf_csum_diff(0, 0, (void *)&header.saddr, 32, 0);
		if (bpf_skb_store_bytes(skb, ETH_HLEN, &header, sizeof(header), 0) < 0)
			return -1;
	} else {
		struct iphdr header = {};

		header.version = 4;
		header.ihl = 5;
		header.tot_len = TO_NET16(sizeof(header) + length);
		header.frag_off = TO_NET16(IPV4_DO_NOT_FRAGMENT);
		header.ttl = ANSWER_HOPS;
		header.protocol = protocol;
		header.saddr = p->tuple.destination.words[3];
		header.daddr = p->tuple.source.words[3];
		header.check = ~fold((__u32)bpf_csum_diff(0, 0, (void *)&header, sizeof(header), 0));
		sum += (__u64)header.saddr + header.daddr;
		if (bpf_skb_store_bytes(skb, ETH_HLEN, &header, sizeof(header), 0) < 0)
			return -1;
	}
	return (__s64)sum;
}

static __always_inline int answer_tcp(struct __sk_buff *skb, const struct packet *p)
{
	struct tcphdr asked, reset = {};
	__u32 length = p->end - p->transport; /* of the segment, header included */
	__s64 sum;
	int partial;

	if (bpf_skb_load_bytes(skb, p->transport, &asked, sizeof(asked)) < 0)
		return -1;
	partial = is_partial(skb, p->transport + __builtin_offsetof(struct tcphdr, check));
	if (partial < 0 || bpf_skb_change_tail(skb, p->transport + sizeof(reset), 0) < 0)
		return -1;
	sum = write_ip(skb, p, PROTOCOL_TCP, sizeof(reset));
	if (sum < 0)
		return -1;
	reset.source = asked.dest;
	reset.dest = asked.source;
	reset.doff = sizeof(reset) / 4;
	reset.rst = 1;
	if (asked.ack) {
		reset.seq = asked.ack_seq;
	} else {
		reset.ack = 1;
		reset.ack_seq = TO_NET32(TO_NET32(asked.seq) + length - asked.doff * 4 + asked.syn + asked.fin);
	}
	if (partial)
		reset.check = fold(sum);
	else
		reset.check = ~fold(sum + (__u32)bpf_csum_diff(0, 0, (void *)&reset, sizeof(reset), 0));
	if (bpf_skb_store_bytes(skb, p->transport, &reset, sizeof(reset), 0) < 0)
		return -1;
	return turn_ethernet(skb);
}

/* The message without what it quotes: type and code, checksum, and two words without use, of which UDP's checksum was one. */
struct unreachable {
	__u8 type;
	__u8 code;
	__sum16 check;
	__be16 unused;
	__be16 seed;
};

/* quote_size: of the IP header and 8 octets of what is refused. */
static __always_inline int answer_udp(struct __sk_buff *skb, const struct packet *p, __u32 quote_size)
{
	__u8 quote[sizeof(struct ipv6hdr) + ICMP_QUOTE_TRANSPORT];
	struct unreachable message = {};
	__u16 length = sizeof(message) + quote_size;
	__s64 sum;
	int partial;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, quote, quote_size) < 0)
		return -1;
	partial = is_partial(skb, p->transport + __builtin_offsetof(struct udphdr, check));
	if (partial < 0 || bpf_skb_change_tail(skb, p->transport + length, 0) < 0)
		return -1;
	sum = write_ip(skb, p, p->family == 6 ? PROTOCOL_ICMPV6 : PROTOCOL_ICMP, length);
	if (sum < 0)
		return -1;
	if (p->family == 6) {
		message.type = ICMPV6_DEST_UNREACH;
		message.code = ICMPV6_ADM_PROHIBITED;
	} else {
		message.type = ICMP_DEST_UNREACH;
		message.code = ICMP_PKT_FILTERED;
		sum = 0; /* ICMP's checksum has no pseudo header, ICMPv6's has */
	}
	if (partial)
		message.seed = fold(sum);
	sum += (__u32)bpf_csum_diff(0, 0, (void *)&message, sizeof(message), 0);
	sum += (__u32)bpf_csum_diff(0, 0, (void *)quote, quote_size, 0);
	message.check = ~fold(sum);
	if (bpf_skb_store_bytes(skb, p->transport, &message, sizeof(message), 0) < 0)
		return -1;
	if (bpf_skb_store_bytes(skb, p->transport + sizeof(message), quote, quote_size, 0) < 0)
		return -1;
	return turn_ethernet(skb);
}

/* RFC 1122 3.2.2, RFC 4443 2.4: nothing is answered that went to many; a reset is not answered with one. */
static __always_inline int is_answerable(const struct packet *p)
{
	if (!p->plain || p->part != PART_WHOLE || is_to_many(&p->tuple.destination))
		return 0;
	return p->tuple.protocol == PROTOCOL_UDP || (p->tuple.protocol == PROTOCOL_TCP && !(p->tcp_flags & TCP_RST));
}

/* Turns the packet round; not 0: it could not be, and must be dropped. */
static __always_inline int answer(struct __sk_buff *skb, const struct packet *p)
{
	if (p->tuple.protocol == PROTOCOL_TCP)
		return answer_tcp(skb, p);
	if (p->family == 6)
		return answer_udp(skb, p, sizeof(struct ipv6hdr) + ICMP_QUOTE_TRANSPORT);
	return answer_udp(skb, p, sizeof(struct iphdr) + ICMP_QUOTE_TRANSPORT);
}

#endif
