/*
 * The floor: what a DNS proxy that learns addresses costs at least. One thread, batches of 64, and nothing that is not needed.
 *
 *   dns_floor ADDRESS PORT UPSTREAM PORT
 *   dns_floor ADDRESS PORT               answers each question with itself: the cost of the sockets alone
 *
 * A question gets a random id that is free at a random socket of a pool, and goes upstream. A reply is matched by socket, id and
 * question; each address in it that was not seen before is written into an LPM map shaped like ipcache4; then the reply goes to the
 * client. No names are judged, nothing is forgotten, and a question without a reply keeps its slot.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <linux/bpf.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define BATCH 64
#define HEADER 12
#define UPSTREAMS 64
#define IDS 65536
#define SLOTS 8192
#define MESSAGE_MAX 2048
#define QUESTION_MAX 64
#define TYPE_A 1
#define MAP_ROWS (1 << 23)
#define SEEN_BITS 24 /* of a table that must not fill up */

struct ipcache_key {
	uint32_t prefixlen;
	uint32_t scope;
	uint32_t address;
};

struct pending {
	struct sockaddr_in client;
	uint16_t id;
	uint8_t length; /* of the question */
	uint8_t question[QUESTION_MAX];
};

/* Slot 0 is none. The one given back last is taken first: it is in the processor's cache. */
static struct pending pending[SLOTS];
static uint16_t free_slots[SLOTS], slot_by_id[UPSTREAMS][IDS];
static unsigned int free_count;
static uint32_t seen[1 << SEEN_BITS];
static int listener, upstreams[UPSTREAMS], map = -1;
static uint64_t chance;

static uint8_t room[BATCH][MESSAGE_MAX];
static struct sockaddr_in from[BATCH], to[BATCH];
static struct iovec in_parts[BATCH], out_parts[BATCH];
static struct mmsghdr in[BATCH], out[BATCH];

static uint32_t chosen(void)
{
	chance ^= chance << 13;
	chance ^= chance >> 7;
	chance ^= chance << 17;
	return (uint32_t)(chance >> 16);
}

static unsigned int read16(const uint8_t *at)
{
	return (unsigned int)at[0] << 8 | at[1];
}

static bool is_new(uint32_t address)
{
	for (uint32_t at = address * 2654435761u >> (32 - SEEN_BITS);; at = (at + 1) & ((1 << SEEN_BITS) - 1)) {
		if (seen[at] == address)
			return false;
		if (!seen[at]) {
			seen[at] = address;
			return true;
		}
	}
}

static long bpf(int command, union bpf_attr *attributes)
{
	return syscall(__NR_bpf, command, attributes, sizeof(*attributes));
}

static void make_map(void)
{
	union bpf_attr attributes = {0};

	attributes.map_type = BPF_MAP_TYPE_LPM_TRIE;
	attributes.key_size = sizeof(struct ipcache_key);
	attributes.value_size = sizeof(uint32_t);
	attributes.max_entries = MAP_ROWS;
	attributes.map_flags = BPF_F_NO_PREALLOC;
	map = (int)bpf(BPF_MAP_CREATE, &attributes);
	if (map < 0) {
		perror("dns_floor: map");
		exit(1);
	}
}

static void write_row(uint32_t address)
{
	struct ipcache_key key = {64, 0, address};
	uint32_t identity = 1 << 24;
	union bpf_attr attributes = {0};

	attributes.map_fd = (uint32_t)map;
	attributes.key = (uint64_t)(uintptr_t)&key;
	attributes.value = (uint64_t)(uintptr_t)&identity;
	if (bpf(BPF_MAP_UPDATE_ELEM, &attributes)) {
		perror("dns_floor: map write");
		exit(1);
	}
}

static int receive(int s)
{
	for (unsigned int i = 0; i < BATCH; i++) {
		in_parts[i] = (struct iovec){room[i], MESSAGE_MAX};
		in[i].msg_hdr =
			(struct msghdr){.msg_iov = &in_parts[i], .msg_iovlen = 1, .msg_name = &from[i], .msg_namelen = sizeof(from[i])};
	}
	return recvmmsg(s, in, BATCH, MSG_DONTWAIT, NULL);
}

/* The i-th message received is to leave as the n-th, to that client or by a connected socket. */
static void put_out(unsigned int n, int i, struct sockaddr_in *client)
{
	out_parts[n] = (struct iovec){room[i], in[i].msg_len};
	out[n].msg_hdr = (struct msghdr){
		.msg_iov = &out_parts[n], .msg_iovlen = 1, .msg_name = client, .msg_namelen = client ? sizeof(*client) : 0};
}

static void send_out(int s, unsigned int count)
{
	for (unsigned int sent = 0; sent < count;) {
		int done = sendmmsg(s, out + sent, count - sent, 0);

		sent += done > 0 ? (unsigned int)done : 1;
	}
}

/* Behind the question; 0 if there is none. */
static unsigned int question_end(const uint8_t *message, unsigned int size)
{
	unsigned int at = HEADER;

	while (at < size && message[at] && message[at] < 64)
		at += 1u + message[at];
	return at + 5 > size || message[at] || at + 5 - HEADER > QUESTION_MAX ? 0 : at + 5;
}

static void echo(int received)
{
	for (int i = 0; i < received; i++) {
		room[i][2] |= 0x80;
		put_out((unsigned int)i, i, &from[i]);
	}
	send_out(listener, (unsigned int)received);
}

static void forward(int received)
{
	unsigned int count = 0, upstream = chosen() % UPSTREAMS;

	for (int i = 0; i < received; i++) {
		uint8_t *message = room[i];
		unsigned int end = question_end(message, in[i].msg_len);
		struct pending *entry;
		uint16_t id;

		if (!end || !free_count)
			continue;
		do
			id = (uint16_t)chosen();
		while (slot_by_id[upstream][id]);
		slot_by_id[upstream][id] = free_slots[--free_count];
		entry = &pending[slot_by_id[upstream][id]];
		entry->client = from[i];
		entry->id = (uint16_t)read16(message);
		entry->length = (uint8_t)(end - HEADER);
		memcpy(entry->question, message + HEADER, entry->length);
		message[0] = (uint8_t)(id >> 8);
		message[1] = (uint8_t)id;
		put_out(count++, i, NULL);
	}
	send_out(upstreams[upstream], count);
}

/* False for a reply that cannot be read. */
static bool learn(const uint8_t *message, unsigned int size, unsigned int at)
{
	for (unsigned int records = read16(message + 6); records; records--) {
		unsigned int type, length;

		while (at < size && message[at] && message[at] < 0xc0)
			at += 1u + message[at];
		at += at < size && message[at] ? 2 : 1;
		if (at + 10 > size)
			return false;
		type = read16(message + at);
		length = read16(message + at + 8);
		at += 10;
		if (at + length > size)
			return false;
		if (type == TYPE_A && length == 4) {
			uint32_t address;

			memcpy(&address, message + at, 4);
			if (is_new(address))
				write_row(address);
		}
		at += length;
	}
	return true;
}

static void give_back(unsigned int upstream, int received)
{
	unsigned int count = 0;

	for (int i = 0; i < received; i++) {
		uint8_t *message = room[i];
		uint16_t *slot = &slot_by_id[upstream][read16(message)];
		struct pending *entry = &pending[*slot];
		unsigned int size = in[i].msg_len, end = HEADER + entry->length;

		if (!*slot || size < end || memcmp(message + HEADER, entry->question, entry->length) || !learn(message, size, end))
			continue;
		free_slots[free_count++] = *slot;
		*slot = 0;
		message[0] = (uint8_t)(entry->id >> 8);
		message[1] = (uint8_t)entry->id;
		to[count] = entry->client;
		put_out(count, i, &to[count]);
		count++;
	}
	send_out(listener, count);
}

static int opened(int poller, uint32_t number)
{
	int s = socket(AF_INET, SOCK_DGRAM, 0), size = 4 << 20;
	struct epoll_event event = {.events = EPOLLIN, .data.u32 = number};

	setsockopt(s, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof(size));
	setsockopt(s, SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof(size));
	epoll_ctl(poller, EPOLL_CTL_ADD, s, &event);
	return s;
}

int main(int argc, char **argv)
{
	struct sockaddr_in own = {.sin_family = AF_INET}, upstream = {.sin_family = AF_INET};
	struct epoll_event events[BATCH];
	int poller = epoll_create1(0);
	bool forwards = argc == 5;

	if ((argc != 3 && argc != 5) || inet_pton(AF_INET, argv[1], &own.sin_addr) != 1 ||
	    (forwards && inet_pton(AF_INET, argv[3], &upstream.sin_addr) != 1)) {
		fprintf(stderr, "usage: dns_floor ADDRESS PORT [UPSTREAM PORT]\n");
		return 2;
	}
	own.sin_port = htons((uint16_t)atoi(argv[2]));
	listener = opened(poller, UPSTREAMS);
	if (bind(listener, (struct sockaddr *)&own, sizeof(own)) || getrandom(&chance, sizeof(chance), 0) < 0) {
		perror("dns_floor");
		return 1;
	}
	for (uint16_t slot = 1; slot < SLOTS; slot++)
		free_slots[free_count++] = slot;
	if (forwards) {
		upstream.sin_port = htons((uint16_t)atoi(argv[4]));
		make_map();
		for (uint32_t i = 0; i < UPSTREAMS; i++) {
			upstreams[i] = opened(poller, i);
			if (connect(upstreams[i], (struct sockaddr *)&upstream, sizeof(upstream))) {
				perror("dns_floor: connect");
				return 1;
			}
		}
	}
	for (;;) {
		int ready = epoll_wait(poller, events, BATCH, -1);

		for (int i = 0; i < ready; i++) {
			uint32_t number = events[i].data.u32;
			int received;

			do {
				received = receive(number == UPSTREAMS ? listener : upstreams[number]);
				if (received <= 0)
					break;
				if (number != UPSTREAMS)
					give_back(number, received);
				else if (forwards)
					forward(received);
				else
					echo(received);
			} while (received == BATCH);
		}
	}
}
