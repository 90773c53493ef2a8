/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * parse.h and verdict.h as an ordinary program, under sanitizers: the tables are arrays that are searched from one end to the
 * other, the frame is a buffer whose every read is checked.
 *
 * Reads orders from standard input until it ends; each is one letter and what follows, in the bytes of abi.h.
 *   P table key value           put a row            D table key                 delete one
 *   J order frame               judge a frame        F                           write down all flows
 *   A nanoseconds               so much time passes for flows and fragments
 */
#include <linux/types.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"

struct frame {
	const __u8 *bytes;
	__u32 length;
	__u8 origin;
};

static inline int load_bytes(void *ctx, __u32 offset, void *to, __u32 n)
{
	const struct frame *frame = ctx;

	if (offset > frame->length || n > frame->length - offset)
		return 1;
	memcpy(to, frame->bytes + offset, n);
	return 0;
}

#define ROWS_MAX 4096
#define KEY_MAX 48
#define VALUE_MAX 48

struct table {
	const char *name;
	size_t key_size, value_size, count;
	__u8 keys[ROWS_MAX][KEY_MAX];
	__u8 values[ROWS_MAX][VALUE_MAX] __attribute__((aligned(8)));
};

enum table_number {
	ENDPOINTS, GROUPS, OWN_ADDRESSES, POLICY, IPCACHE4, IPCACHE6, FLOWS, ENDED, FRAGMENTS, LAST_SEEN, QUESTIONS, TABLE_COUNT
};

static struct table tables[TABLE_COUNT] = {
	[ENDPOINTS] = { .name = "endpoints", .key_size = 4, .value_size = sizeof(struct endpoint_value) },
	[GROUPS] = { .name = "groups", .key_size = 4, .value_size = sizeof(struct group_value) },
	[OWN_ADDRESSES] = { .name = "own_addresses", .key_size = sizeof(struct own_address_key), .value_size = 1 },
	[POLICY] = { .name = "policy", .key_size = sizeof(struct policy_key), .value_size = sizeof(struct policy_value) },
	[IPCACHE4] = { .name = "ipcache4", .key_size = sizeof(struct ipcache4_key), .value_size = 4 },
	[IPCACHE6] = { .name = "ipcache6", .key_size = sizeof(struct ipcache6_key), .value_size = 4 },
	[FLOWS] = { .name = "flows", .key_size = sizeof(struct flow_key), .value_size = sizeof(struct flow_value) },
	[ENDED] = { .name = "ended", .key_size = sizeof(struct flow_key), .value_size = sizeof(struct flow_value) },
	[FRAGMENTS] = { .name = "fragments", .key_size = sizeof(struct fragment_key),
			.value_size = sizeof(struct fragment_value) },
	[LAST_SEEN] = { .name = "last_seen", .key_size = sizeof(struct last_seen_key), .value_size = 8 },
	[QUESTIONS] = { .name = "questions", .key_size = 4, .value_size = 8 },
};

static void *find(struct table *t, const void *key)
{
	for (size_t i = 0; i < t->count; i++)
		if (!memcmp(t->keys[i], key, t->key_size))
			return t->values[i];
	return NULL;
}

static void put(struct table *t, const void *key, const void *value)
{
	void *there = find(t, key);

	if (!there) {
		if (t->count == ROWS_MAX) {
			fprintf(stderr, "table %s is full\n", t->name);
			exit(2);
		}
		memcpy(t->keys[t->count], key, t->key_size);
		there = t->values[t->count++];
	}
	memcpy(there, value, t->value_size);
}

static void delete(struct table *t, const void *key)
{
	for (size_t i = 0; i < t->count; i++)
		if (!memcmp(t->keys[i], key, t->key_size)) {
			t->count--;
			memcpy(t->keys[i], t->keys[t->count], KEY_MAX);
			memcpy(t->values[i], t->values[t->count], VALUE_MAX);
			return;
		}
}

static int bit(const __u8 *bytes, __u32 i)
{
	return bytes[i / 8] >> (7 - i % 8) & 1;
}

/* The longest prefix that the key begins with, compared bit by bit. */
static void *find_longest(struct table *t, const void *key)
{
	void *best = NULL;
	long best_length = -1;

	for (size_t i = 0; i < t->count; i++) {
		__u32 length, j = 0;

		memcpy(&length, t->keys[i], 4);
		while (j < length && bit(t->keys[i] + 4, j) == bit((const __u8 *)key + 4, j))
			j++;
		if (j == length && (long)length > best_length) {
			best = t->values[i];
			best_length = length;
		}
	}
	return best;
}

#include "parse.h"

static __u32 find_identity(__u32 scope, const struct address *address, __u8 family)
{
	__u32 *found;

	if (family == 4) {
		struct ipcache4_key key = { IPCACHE_PREFIX_FIXED + 32, scope, address->words[3] };

		found = find_longest(&tables[IPCACHE4], &key);
	} else {
		struct ipcache6_key key = { IPCACHE_PREFIX_FIXED + 128, scope, *address };

		found = find_longest(&tables[IPCACHE6], &key);
	}
	return found ? *found : 0;
}

static const struct policy_value *find_policy(__u32 set, __u32 identity, __u8 direction, __u8 protocol, __be16 port)
{
	struct policy_key key = { POLICY_PREFIX_FULL, set, identity, direction, protocol, port };

	return find_longest(&tables[POLICY], &key);
}

static struct flow_value *find_flow(const struct flow_key *key)
{
	struct flow_value *flow = find(&tables[FLOWS], key);

	return flow ? flow : find(&tables[ENDED], key);
}

static void put_flow(const struct flow_key *key, const struct flow_value *value)
{
	delete(&tables[ENDED], key);
	put(&tables[FLOWS], key, value);
}

static void put_ended(const struct flow_key *key, const struct flow_value *value)
{
	struct flow_value copy = *value; /* it may be the row itself */

	put(&tables[ENDED], key, &copy);
}

static const __u64 *find_question_due(__u32 endpoint)
{
	return find(&tables[QUESTIONS], &endpoint);
}

static void put_question_due(__u32 endpoint, __u64 due)
{
	put(&tables[QUESTIONS], &endpoint, &due);
}

static const struct fragment_value *find_fragment(const struct fragment_key *key)
{
	return find(&tables[FRAGMENTS], key);
}

static void put_fragment(const struct fragment_key *key, const struct fragment_value *value)
{
	put(&tables[FRAGMENTS], key, value);
}

static void put_last_seen(__u32 scope, const struct address *address, __u64 now)
{
	struct last_seen_key key = { scope, *address };

	put(&tables[LAST_SEEN], &key, &now);
}

static int is_own_address(__u32 endpoint, const struct address *address)
{
	struct own_address_key key = { endpoint, *address };

	return find(&tables[OWN_ADDRESSES], &key) != NULL;
}

/* Here nothing is routed; the order says what routing would. */
static int is_routed_on(void *ctx, const struct packet *p)
{
	(void)p;
	return ((const struct frame *)ctx)->origin == ORIGIN_FORWARDED;
}

static int is_proxied(void *ctx, const struct address *address)
{
	(void)address;
	return ((const struct frame *)ctx)->origin == ORIGIN_FORWARDED;
}

static int is_led_away(void *ctx, const struct tuple *t)
{
	(void)t;
	return ((const struct frame *)ctx)->origin == ORIGIN_FORWARDED;
}

#include "verdict.h"

static void take(void *to, size_t n)
{
	if (n && fread(to, n, 1, stdin) != 1) {
		fprintf(stderr, "an order ends too early\n");
		exit(2);
	}
}

static struct table *take_table(void)
{
	__u8 number;

	take(&number, 1);
	return &tables[number % TABLE_COUNT];
}

struct judge_order {
	__u64 now;
	__u32 ifindex;
	__u32 length;
	__u8 direction;
	__u8 origin;
	__u8 vlans;
	__u8 pad[5];
};

static void judge_frame(void)
{
	struct judge_order order;
	struct frame frame = {};
	struct packet p = {};
	struct decision d = {};
	struct endpoint_value *e;
	struct group_value *g;
	__u8 *bytes;

	take(&order, sizeof(order));
	bytes = malloc(order.length ? order.length : 1); /* to the byte: the address sanitizer watches its end */
	take(bytes, order.length);
	frame.bytes = bytes;
	frame.length = order.length;
	frame.origin = order.origin;
	p.length = order.length;
	p.origin = order.origin;
	p.vlans = order.vlans;
	e = find(&tables[ENDPOINTS], &order.ifindex);
	g = e ? find(&tables[GROUPS], &e->group) : NULL;
	if (!g)
		d.reason = e ? DROP_NO_GROUP : DROP_NO_ENDPOINT;
	else
		decide(&frame, &p, e, g, order.direction, order.now, &d);
	fwrite(&d, sizeof(d), 1, stdout);
	free(bytes);
}

static void age(void)
{
	__u64 passed;

	take(&passed, sizeof(passed));
	for (size_t i = 0; i < tables[FLOWS].count; i++) {
		struct flow_value *flow = (void *)tables[FLOWS].values[i];

		flow->last -= passed;
		flow->noted -= passed;
	}
	for (size_t i = 0; i < tables[ENDED].count; i++)
		((struct flow_value *)(void *)tables[ENDED].values[i])->last -= passed;
	for (size_t i = 0; i < tables[FRAGMENTS].count; i++)
		((struct fragment_value *)(void *)tables[FRAGMENTS].values[i])->at -= passed;
	for (size_t i = 0; i < tables[QUESTIONS].count; i++)
		*(__u64 *)(void *)tables[QUESTIONS].values[i] -= passed;
}

int main(void)
{
	int order;

	while ((order = getchar()) != EOF) {
		__u8 key[KEY_MAX], value[VALUE_MAX];
		struct table *t;

		switch (order) {
		case 'P':
			t = take_table();
			take(key, t->key_size);
			take(value, t->value_size);
			put(t, key, value);
			break;
		case 'D':
			t = take_table();
			take(key, t->key_size);
			delete(t, key);
			break;
		case 'J':
			judge_frame();
			break;
		case 'A':
			age();
			break;
		case 'F': {
			__u32 count = (__u32)tables[FLOWS].count;

			fwrite(&count, sizeof(count), 1, stdout);
			for (size_t i = 0; i < count; i++) {
				fwrite(tables[FLOWS].keys[i], tables[FLOWS].key_size, 1, stdout);
				fwrite(tables[FLOWS].values[i], tables[FLOWS].value_size, 1, stdout);
			}
			break;
		}
		default:
			fprintf(stderr, "unknown order %d\n", order);
			return 2;
		}
		fflush(stdout);
	}
	return 0;
}
