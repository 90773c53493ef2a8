/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The kernel's tables. Only declared here: BCC rewrites map access in the main file alone.
 *
 * Sizes are set by the loader; the defaults are those of the design. What a workload can fill is an LRU, which forgets the
 * longest unused instead of refusing; what only the agent fills is not, because a row of it must never vanish.
 */
#ifndef NAMEGATE_MAPS_H
#define NAMEGATE_MAPS_H

#include "abi.h"

#ifndef ENDPOINTS_MAX
#define ENDPOINTS_MAX 4096
#endif
#ifndef OWN_ADDRESSES_MAX
#define OWN_ADDRESSES_MAX 16384
#endif
#ifndef POLICY_MAX
#define POLICY_MAX 262144
#endif
#ifndef IPCACHE_MAX
#define IPCACHE_MAX 524288
#endif
#ifndef FLOWS_MAX
#define FLOWS_MAX 262144
#endif
/* Only a policy that changes under running flows fills it, and only with those. */
#ifndef ENDED_MAX
#define ENDED_MAX ((FLOWS_MAX) / 4)
#endif
#ifndef LAST_SEEN_MAX
#define LAST_SEEN_MAX 524288
#endif
#ifndef FRAGMENTS_MAX
#define FRAGMENTS_MAX 8192
#endif
#ifndef COUNTERS_MAX
#define COUNTERS_MAX 32768
#endif
#ifndef RULES_MAX
#define RULES_MAX 16384
#endif
#ifndef EVENT_PAGES
#define EVENT_PAGES 64
#endif

BPF_F_TABLE("hash", u32, struct endpoint_value, endpoints, ENDPOINTS_MAX, 0);
BPF_F_TABLE("hash", u32, struct group_value, groups, ENDPOINTS_MAX, 0);
BPF_F_TABLE("hash", struct own_address_key, u8, own_addresses, OWN_ADDRESSES_MAX, 0);
BPF_F_TABLE("lpm_trie", struct policy_key, struct policy_value, policy, POLICY_MAX, BPF_F_NO_PREALLOC);
BPF_F_TABLE("lpm_trie", struct ipcache4_key, u32, ipcache4, IPCACHE_MAX, BPF_F_NO_PREALLOC);
BPF_F_TABLE("lpm_trie", struct ipcache6_key, u32, ipcache6, IPCACHE_MAX, BPF_F_NO_PREALLOC);

BPF_F_TABLE("lru_hash", struct flow_key, struct flow_value, flows, FLOWS_MAX, 0);
/* Not in `flows`, where every new flow pushes out an old one: whoever could push out an ended one could open it again. */
BPF_F_TABLE("lru_hash", struct flow_key, struct flow_value, ended, ENDED_MAX, 0);
BPF_F_TABLE("lru_hash", struct fragment_key, struct fragment_value, fragments, FRAGMENTS_MAX, 0);
/* An LRU although an address forgotten too early may be closed under its user: a full hash would forget the newest. */
BPF_F_TABLE("lru_hash", struct last_seen_key, u64, last_seen, LAST_SEEN_MAX, 0);

BPF_F_TABLE("percpu_hash", struct counter_key, struct counter_value, counters, COUNTERS_MAX, 0);
BPF_F_TABLE("percpu_hash", u32, struct counter_value, rules, RULES_MAX, 0);
BPF_F_TABLE("percpu_array", u32, u64, lost, LOSS_COUNT, 0);
BPF_RINGBUF_OUTPUT(events, EVENT_PAGES);
BPF_F_TABLE("lru_hash", u32, struct answer_value, answers, ENDPOINTS_MAX, 0);
BPF_F_TABLE("lru_hash", u32, u64, questions, ENDPOINTS_MAX, 0);

BPF_F_TABLE("array", u32, u32, settings, SETTING_COUNT, 0);
/* Key: (IPv6 ? 2 : 0) | (TCP ? 1 : 0). The row of a socket that is closed vanishes by itself. */
BPF_F_TABLE("sockmap", u32, u64, dns_sockets, 4, 0);

#endif
