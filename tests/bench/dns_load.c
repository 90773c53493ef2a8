/*
 * DNS questions over UDP, so many outstanding at a time, and a check of every reply.
 *
 *   dns_load SERVER PORT KIND FIRST NAMES COUNT OUTSTANDING SILENCE_MS [echo]
 *
 * Asks COUNT questions for the A records of KIND<number>.bench.test, the numbers beginning with FIRST: NAMES of them in turn, or
 * with NAMES 0 each question a new one. dns_upstream.c says what the names stand for; that is known here by itself, so that neither
 * what answers nor what forwards is its own judge. A reply is right if it has the id and the question of one that is outstanding at
 * this socket, no error, and exactly the records the name stands for; with `echo` if it has the id and the question. A reply to
 * nothing outstanding is wrong. A question is lost if nothing at all has come for SILENCE_MS.
 *
 * Prints one line of JSON; times are from a question's sendmmsg to its reply's recvmmsg.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define BATCH 64
#define HEADER 12
#define SOCKETS_MAX 8
#define IDS 65536
#define QUESTION_MAX 64
#define REPLY_MAX 4096

#define TYPE_A 1
#define TYPE_CNAME 5
/* A name whose answers rotate has so many addresses; an answer holds one of each eighth. */
#define ROTATING 4096
#define ROTATING_SHOWN 8

struct kind {
	char letter;
	unsigned int cnames, addresses, step;
	uint32_t first;
};

static const struct kind kinds[] = {
	{'o', 0, 1, 1, 0x0a000000},
	{'c', 2, 2, 2, 0x0a400000},
	{'t', 0, 20, 20, 0x0a500000},
	{'r', 0, ROTATING_SHOWN, ROTATING, 0x0a600000},
};

struct question {
	uint64_t sent_at;
	uint32_t number;
	bool outstanding;
};

struct source {
	int fd;
	uint16_t next_id;
	unsigned int outstanding;
	struct question questions[IDS];
};

static struct source sources[SOCKETS_MAX];
static const struct kind *kind;
static bool echo;
static uint64_t asked, answered, lost, wrong;
static uint32_t *times_ns;

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static unsigned int read16(const uint8_t *at)
{
	return (unsigned int)at[0] << 8 | at[1];
}

static unsigned int build(uint8_t *message, uint16_t id, uint32_t number)
{
	static const uint8_t rest[] = "\x05" "bench" "\x04" "test" "\0" "\0\x01" "\0\x01";
	static const uint8_t flags_and_counts[] = "\x01\0" "\0\x01" "\0\0\0\0\0\0";
	char label[16];
	unsigned int length = (unsigned int)snprintf(label, sizeof(label), "%c%u", kind->letter, number);

	message[0] = (uint8_t)(id >> 8);
	message[1] = (uint8_t)id;
	memcpy(message + 2, flags_and_counts, 10);
	message[HEADER] = (uint8_t)length;
	memcpy(message + HEADER + 1, label, length);
	memcpy(message + HEADER + 1 + length, rest, sizeof(rest) - 1);
	return HEADER + 1 + length + (unsigned int)sizeof(rest) - 1;
}

/* The index of an address among those the name may show, each at most once; false if it is none of them. */
static bool belongs(uint32_t address, uint32_t number, uint32_t *seen)
{
	uint32_t index = address - kind->first - number * kind->step;

	if (index >= kind->step)
		return false;
	if (kind->step == ROTATING)
		index /= ROTATING / ROTATING_SHOWN;
	if (*seen & 1u << index)
		return false;
	*seen |= 1u << index;
	return true;
}

static bool is_right(const uint8_t *reply, unsigned int size, uint32_t number)
{
	uint8_t question[QUESTION_MAX];
	unsigned int at = build(question, 0, number), cnames = 0, addresses = 0;
	uint32_t seen = 0;

	if (size < at || !(reply[2] & 0x80) || memcmp(reply + HEADER, question + HEADER, at - HEADER))
		return false;
	if (echo)
		return true;
	if ((reply[2] & 0x02) || (reply[3] & 0x0f))
		return false;
	for (unsigned int records = read16(reply + 6); records; records--) {
		unsigned int type, length;

		while (at < size && reply[at] && reply[at] < 0xc0)
			at += 1u + reply[at];
		at += at < size && reply[at] ? 2 : 1;
		if (at + 10 > size)
			return false;
		type = read16(reply + at);
		length = read16(reply + at + 8);
		at += 10;
		if (at + length > size)
			return false;
		if (type == TYPE_A && length == 4) {
			if (!belongs((uint32_t)read16(reply + at) << 16 | read16(reply + at + 2), number, &seen))
				return false;
			addresses++;
		} else if (type == TYPE_CNAME) {
			cnames++;
		} else {
			return false;
		}
		at += length;
	}
	return cnames == kind->cnames && addresses == kind->addresses;
}

static void ask(struct source *source, unsigned int wanted, uint32_t first, uint32_t names)
{
	static uint8_t room[BATCH][QUESTION_MAX];
	struct iovec parts[BATCH];
	struct mmsghdr messages[BATCH] = {0};
	uint64_t now = now_ns();
	unsigned int sent = 0;

	for (unsigned int i = 0; i < wanted; i++) {
		struct question *question;

		while (source->questions[source->next_id].outstanding)
			source->next_id++;
		question = &source->questions[source->next_id];
		*question = (struct question){now, first + (uint32_t)(names ? asked % names : asked), true};
		asked++;
		parts[i] = (struct iovec){room[i], build(room[i], source->next_id++, question->number)};
		messages[i].msg_hdr = (struct msghdr){.msg_iov = &parts[i], .msg_iovlen = 1};
	}
	source->outstanding += wanted;
	/* ECONNREFUSED is about an earlier one; what could not be sent will be missed. */
	while (sent < wanted) {
		int done = sendmmsg(source->fd, messages + sent, wanted - sent, 0);

		sent += done > 0 ? (unsigned int)done : 1;
	}
}

static void hear(struct source *source)
{
	static uint8_t room[BATCH][REPLY_MAX];
	struct iovec parts[BATCH];
	struct mmsghdr messages[BATCH] = {0};
	int heard;

	for (unsigned int i = 0; i < BATCH; i++) {
		parts[i] = (struct iovec){room[i], REPLY_MAX};
		messages[i].msg_hdr = (struct msghdr){.msg_iov = &parts[i], .msg_iovlen = 1};
	}
	heard = recvmmsg(source->fd, messages, BATCH, MSG_DONTWAIT, NULL);
	for (int i = 0; i < heard; i++) {
		unsigned int size = messages[i].msg_len;
		struct question *question = &source->questions[read16(room[i])];

		if (size < HEADER || !question->outstanding) {
			wrong++;
			continue;
		}
		if (!is_right(room[i], size, question->number))
			wrong++;
		question->outstanding = false;
		source->outstanding--;
		times_ns[answered++] = (uint32_t)(now_ns() - question->sent_at);
	}
}

static unsigned int give_up(struct source *source)
{
	unsigned int given_up = source->outstanding;

	for (unsigned int id = 0; id < IDS; id++)
		source->questions[id].outstanding = false;
	source->outstanding = 0;
	return given_up;
}

static int by_size(const void *a, const void *b)
{
	uint32_t one = *(const uint32_t *)a, other = *(const uint32_t *)b;

	return (one > other) - (one < other);
}

static double percentile_us(double share)
{
	return answered ? times_ns[(uint64_t)((double)(answered - 1) * share)] / 1e3 : 0;
}

int main(int argc, char **argv)
{
	struct sockaddr_in server = {.sin_family = AF_INET};
	struct pollfd polls[SOCKETS_MAX];
	uint32_t first, names;
	uint64_t count, began, ended;
	unsigned int outstanding, sockets, room = 4 << 20;
	int silence_ms;

	for (unsigned int i = 0; argc >= 9 && i < sizeof(kinds) / sizeof(kinds[0]); i++)
		if (kinds[i].letter == argv[3][0])
			kind = &kinds[i];
	if (!kind || inet_pton(AF_INET, argv[1], &server.sin_addr) != 1) {
		fprintf(stderr, "usage: dns_load SERVER PORT o|c|t|r FIRST NAMES COUNT OUTSTANDING SILENCE_MS [echo]\n");
		return 2;
	}
	server.sin_port = htons((uint16_t)atoi(argv[2]));
	first = (uint32_t)strtoul(argv[4], NULL, 10);
	names = (uint32_t)strtoul(argv[5], NULL, 10);
	count = strtoull(argv[6], NULL, 10);
	outstanding = (unsigned int)atoi(argv[7]);
	silence_ms = atoi(argv[8]);
	echo = argc > 9;
	times_ns = malloc(count * sizeof(*times_ns));
	sockets = outstanding < SOCKETS_MAX ? outstanding : SOCKETS_MAX;
	for (unsigned int i = 0; i < sockets; i++) {
		sources[i].fd = socket(AF_INET, SOCK_DGRAM, 0);
		setsockopt(sources[i].fd, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof(room));
		setsockopt(sources[i].fd, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof(room));
		if (connect(sources[i].fd, (struct sockaddr *)&server, sizeof(server))) {
			perror("dns_load: connect");
			return 1;
		}
		sources[i].next_id = (uint16_t)(getpid() * 7919 + (int)i);
		polls[i] = (struct pollfd){sources[i].fd, POLLIN, 0};
	}
	began = ended = now_ns();
	while (answered + lost < count) {
		int ready;

		for (unsigned int i = 0; i < sockets; i++) {
			unsigned int wanted = outstanding / sockets - sources[i].outstanding;

			if (wanted > count - asked)
				wanted = (unsigned int)(count - asked);
			if (wanted)
				ask(&sources[i], wanted < BATCH ? wanted : BATCH, first, names);
		}
		ready = poll(polls, sockets, silence_ms);
		if (ready < 0 && errno != EINTR) {
			perror("dns_load: poll");
			return 1;
		}
		for (unsigned int i = 0; i < sockets; i++) {
			if (ready == 0)
				lost += give_up(&sources[i]);
			else if (polls[i].revents)
				hear(&sources[i]);
		}
		if (ready > 0)
			ended = now_ns();
	}
	qsort(times_ns, answered, sizeof(*times_ns), by_size);
	printf("{\"asked\": %lu, \"lost\": %lu, \"wrong\": %lu, \"seconds\": %.6f, \"p50_us\": %.1f, \"p99_us\": %.1f}\n", asked, lost,
	       wrong, (double)(ended - began) / 1e9, percentile_us(0.5), percentile_us(0.99));
	return 0;
}
