/*
 * The name server that every contestant asks: what a name stands for follows from the name.
 *
 *   dns_upstream ADDRESS PORT TTL LOSE WRONG
 *
 *   o<n>.bench.test     one A: 10.0.0.0 + n                                    n below 2^22
 *   c<n>.bench.test     CNAME a<n>.cdn.test, CNAME b<n>.edge.test, two A: 10.64.0.0 + 2n and the next
 *   t<n>.bench.test     twenty A: 10.80.0.0 + 20n and the next
 *   r<n>.bench.test     eight A of the 4,096 that begin at 10.96.0.0 + 4096n, one at random of each eighth
 *
 * Whatever else is asked for does not exist. LOSE and WRONG, for the test of the checker: one of so many questions is not answered,
 * one of so many gets an address that is not the name's; 0 is never.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define BATCH 64
#define HEADER 12
#define QUESTION_MAX 512
#define REPLY_MAX 1500

#define TYPE_A 1
#define TYPE_CNAME 5

/* Where a reply is being written; owner: the place of the name that the next record is of. */
struct reply {
	uint8_t *message;
	unsigned int size, owner, records;
};

static uint32_t ttl;
static uint64_t chance = 88172645463325252u;

static uint32_t chosen_below(uint32_t limit)
{
	chance ^= chance << 13;
	chance ^= chance >> 7;
	chance ^= chance << 17;
	return (uint32_t)(chance >> 20) % limit;
}

static void put16(uint8_t *at, unsigned int value)
{
	at[0] = (uint8_t)(value >> 8);
	at[1] = (uint8_t)value;
}

static void put32(uint8_t *at, uint32_t value)
{
	put16(at, value >> 16);
	put16(at + 2, value & 0xffff);
}

static void add(struct reply *reply, unsigned int type, const uint8_t *data, unsigned int length)
{
	uint8_t *at = reply->message + reply->size;

	put16(at, 0xc000 | reply->owner);
	put16(at + 2, type);
	put16(at + 4, 1);
	put32(at + 6, ttl);
	put16(at + 10, length);
	memcpy(at + 12, data, length);
	reply->size += 12 + length;
	reply->records++;
}

static void add_address(struct reply *reply, uint32_t address)
{
	uint8_t data[4];

	put32(data, address);
	add(reply, TYPE_A, data, sizeof(data));
}

/* What follows is of the name this one leads to. */
static void add_cname(struct reply *reply, char letter, uint32_t number, const char *zone, unsigned int zone_length)
{
	uint8_t data[64];
	char label[16];
	unsigned int length = (unsigned int)snprintf(label, sizeof(label), "%c%u", letter, number);

	data[0] = (uint8_t)length;
	memcpy(data + 1, label, length);
	memcpy(data + 1 + length, zone, zone_length);
	add(reply, TYPE_CNAME, data, 1 + length + zone_length);
	reply->owner = reply->size - 1 - length - zone_length;
}

static void add_records(struct reply *reply, char letter, uint32_t number)
{
	switch (letter) {
	case 'o':
		add_address(reply, 0x0a000000 + number);
		break;
	case 'c':
		add_cname(reply, 'a', number, "\x03" "cdn" "\x04" "test", 10);
		/* fallthrough */
	case 'a':
		add_cname(reply, 'b', number, "\x04" "edge" "\x04" "test", 11);
		/* fallthrough */
	case 'b':
		for (uint32_t i = 0; i < 2; i++)
			add_address(reply, 0x0a400000 + number * 2 + i);
		break;
	case 't':
		for (uint32_t i = 0; i < 20; i++)
			add_address(reply, 0x0a500000 + number * 20 + i);
		break;
	case 'r':
		for (uint32_t i = 0; i < 8; i++)
			add_address(reply, 0x0a600000 + number * 4096 + i * 512 + chosen_below(512));
		break;
	}
}

/* The size of the answer; 0 for what is no question. */
static unsigned int answer(const uint8_t *question, unsigned int size, uint8_t *message)
{
	struct reply reply = {message, 0, HEADER, 0};
	unsigned int at = HEADER;
	char *end, label[16] = "";

	while (at < size && question[at] && question[at] < 64)
		at += 1u + question[at];
	if (at + 5 > size || question[at] || (question[2] & 0x80))
		return 0;
	reply.size = at + 5;
	memcpy(message, question, reply.size);
	if (question[HEADER] > 1 && question[HEADER] < sizeof(label) && question[at + 2] == TYPE_A) {
		memcpy(label, question + HEADER + 1, question[HEADER]);
		uint32_t number = (uint32_t)strtoul(label + 1, &end, 10);
		if (!*end)
			add_records(&reply, (char)(label[0] | 0x20), number);
	}
	/* An answer: authoritative, and recursion is to be had, or a forwarder would not take it. */
	message[2] = (uint8_t)(0x84 | (question[2] & 0x01));
	message[3] = reply.records ? 0x80 : 0x83;
	put16(message + 6, reply.records);
	memset(message + 8, 0, 4);
	return reply.size;
}

int main(int argc, char **argv)
{
	static uint8_t questions[BATCH][QUESTION_MAX], replies[BATCH][REPLY_MAX];
	static struct sockaddr_in from[BATCH];
	struct iovec in_parts[BATCH], out_parts[BATCH];
	struct mmsghdr in[BATCH], out[BATCH];
	struct sockaddr_in own = {.sin_family = AF_INET};
	uint64_t heard = 0, lose, wrong;
	int s = socket(AF_INET, SOCK_DGRAM, 0), room = 4 << 20;

	if (argc != 6 || inet_pton(AF_INET, argv[1], &own.sin_addr) != 1) {
		fprintf(stderr, "usage: dns_upstream ADDRESS PORT TTL LOSE WRONG\n");
		return 2;
	}
	own.sin_port = htons((uint16_t)atoi(argv[2]));
	ttl = (uint32_t)atoi(argv[3]);
	lose = strtoull(argv[4], NULL, 10);
	wrong = strtoull(argv[5], NULL, 10);
	setsockopt(s, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof(room));
	setsockopt(s, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof(room));
	if (bind(s, (struct sockaddr *)&own, sizeof(own))) {
		perror("dns_upstream: bind");
		return 1;
	}
	for (;;) {
		unsigned int count = 0, sent = 0;
		int received;

		for (unsigned int i = 0; i < BATCH; i++) {
			in_parts[i] = (struct iovec){questions[i], QUESTION_MAX};
			in[i].msg_hdr = (struct msghdr){
				.msg_iov = &in_parts[i], .msg_iovlen = 1, .msg_name = &from[i], .msg_namelen = sizeof(from[i])};
		}
		received = recvmmsg(s, in, BATCH, MSG_WAITFORONE, NULL);
		for (int i = 0; i < received; i++) {
			unsigned int size = answer(questions[i], in[i].msg_len, replies[count]);

			heard++;
			if (!size || (lose && heard % lose == 0))
				continue;
			/* The first octet of the last address. */
			if (wrong && heard % wrong == 0)
				replies[count][size - 4] ^= 0x80;
			out_parts[count] = (struct iovec){replies[count], size};
			out[count].msg_hdr = (struct msghdr){
				.msg_iov = &out_parts[count], .msg_iovlen = 1, .msg_name = &from[i], .msg_namelen = sizeof(from[i])};
			count++;
		}
		while (sent < count) {
			int done = sendmmsg(s, out + sent, count - sent, 0);

			sent += done > 0 ? (unsigned int)done : 1;
		}
	}
}
