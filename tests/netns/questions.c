/*
 * DNS questions at a steady pace from one socket, whatever becomes of the answers.
 *
 *   questions udp|tcp ADDRESS PORT PER_SECOND NAME      of each a random label below NAME, type A
 *   questions junk    ADDRESS PORT PER_SECOND LABEL     random octets instead, 1 to 64 of them; the last argument means nothing
 *
 * Over TCP, eight connections take turns, and what a connection does not take at once is not sent: the pace is the most. A
 * connection that is closed is opened again with the next millisecond.
 *
 * Says "ready"; with SIGTERM it prints how many were sent, and ends; after ten minutes it just ends. Time overslept is not made up
 * for: a burst would be lost in queues that have nothing to do with DNS.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { TICK_NS = 1000000, BATCH_MAX = 256, OCTETS_MAX = 320, CONNECTIONS = 8, LABEL = 16 };

static volatile sig_atomic_t is_ended;
static uint64_t sent, seed = 88172645463325252ULL;

static void end(int number)
{
	(void)number;
	is_ended = 1;
}

static void fail(const char *what)
{
	fprintf(stderr, "questions: %s: %s\n", what, strerror(errno));
	exit(1);
}

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ULL + t.tv_nsec;
}

/* xorshift64 */
static uint32_t chance(void)
{
	seed ^= seed << 13;
	seed ^= seed >> 7;
	seed ^= seed << 17;
	return seed >> 32;
}

static size_t put_question(uint8_t *message, const char *below)
{
	static const uint8_t header[12] = { 0, 0, 1, 0, 0, 1 };
	uint8_t *at = message + sizeof(header);

	memcpy(message, header, sizeof(header));
	message[0] = chance();
	message[1] = chance();
	*at++ = LABEL;
	for (int i = 0; i < LABEL; i++)
		*at++ = 'a' + chance() % 26;
	while (*below) {
		size_t length = strcspn(below, ".");

		*at++ = length;
		memcpy(at, below, length);
		at += length;
		below += length + (below[length] == '.');
	}
	memcpy(at, "\0\0\1\0\1", 5);
	return at + 5 - message;
}

static size_t put_junk(uint8_t *message)
{
	size_t length = 1 + chance() % 64;

	for (size_t i = 0; i < length; i++)
		message[i] = chance();
	return length;
}

static void send_datagrams(int fd, const char *below, int count)
{
	static uint8_t octets[BATCH_MAX][OCTETS_MAX];
	struct iovec parts[BATCH_MAX];
	struct mmsghdr messages[BATCH_MAX] = { 0 };
	uint8_t answer[65535];

	for (int i = 0; i < count; i++) {
		parts[i].iov_base = octets[i];
		parts[i].iov_len = below ? put_question(octets[i], below) : put_junk(octets[i]);
		messages[i].msg_hdr.msg_iov = &parts[i];
		messages[i].msg_hdr.msg_iovlen = 1;
	}
	/* Connected, and so told of refusals: each is one call that fails, and means nothing here. */
	for (int done = 0; done < count;) {
		int some = sendmmsg(fd, messages + done, count - done, 0);

		done += some > 0 ? some : 1;
		sent += some > 0 ? some : 0;
	}
	while (recv(fd, answer, sizeof(answer), MSG_DONTWAIT) > 0)
		;
}

struct connection {
	int fd;
	size_t unsent; /* the rest of a message */
	uint8_t rest[OCTETS_MAX];
};

static void open_connection(struct connection *c, const struct sockaddr_in *to)
{
	c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
	c->unsent = 0;
	if (c->fd < 0)
		fail("socket");
	connect(c->fd, (const void *)to, sizeof(*to));
}

static void ask_connection(struct connection *c, const struct sockaddr_in *to, const char *below, int count)
{
	uint8_t answers[65536], message[OCTETS_MAX];
	ssize_t some;

	while ((some = recv(c->fd, answers, sizeof(answers), 0)) > 0)
		;
	if (!some || (some < 0 && errno != EAGAIN && errno != ENOTCONN)) {
		close(c->fd);
		open_connection(c, to);
		return;
	}
	while (count--) {
		size_t length;

		if (c->unsent) {
			length = c->unsent;
			memcpy(message, c->rest, length);
		} else {
			length = put_question(message + 2, below);
			message[0] = length >> 8;
			message[1] = length;
			length += 2;
		}
		some = send(c->fd, message, length, MSG_NOSIGNAL);
		if (some < 0)
			return;
		c->unsent = length - some;
		memcpy(c->rest, message + some, c->unsent);
		sent += !c->unsent;
	}
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_handler = end };
	struct sockaddr_in to = { .sin_family = AF_INET };
	struct connection connections[CONNECTIONS];
	int fd = -1, per_tick, is_tcp = argc == 6 && !strcmp(argv[1], "tcp");
	const char *below = argc == 6 && strcmp(argv[1], "junk") ? argv[5] : NULL;
	uint64_t due;

	if (argc != 6 || inet_pton(AF_INET, argv[2], &to.sin_addr) != 1 || strlen(argv[5]) > 200) {
		fprintf(stderr, "usage: questions udp|tcp|junk ADDRESS PORT PER_SECOND NAME: see the head of questions.c\n");
		return 2;
	}
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	sigaction(SIGTERM, &action, NULL);
	alarm(600);
	to.sin_port = htons(atoi(argv[3]));
	per_tick = atoi(argv[4]) / (1000000000 / TICK_NS);
	if (per_tick < 1 || per_tick > BATCH_MAX) {
		errno = E2BIG;
		fail("pace");
	}
	for (int i = 0; is_tcp && i < CONNECTIONS; i++)
		open_connection(&connections[i], &to);
	if (!is_tcp && ((fd = socket(AF_INET, SOCK_DGRAM, 0)) < 0 || connect(fd, (void *)&to, sizeof(to))))
		fail("connect");
	puts("ready");
	fflush(stdout);
	due = now_ns();
	for (uint64_t tick = 0; !is_ended; tick++) {
		struct timespec at = { due / 1000000000, due % 1000000000 };

		if (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL))
			break;
		if (is_tcp)
			ask_connection(&connections[tick % CONNECTIONS], &to, below, per_tick);
		else
			send_datagrams(fd, below, per_tick);
		due += TICK_NS;
		if (due < now_ns())
			due = now_ns();
	}
	printf("%llu\n", (unsigned long long)sent);
	return 0;
}
