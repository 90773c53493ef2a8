/* A client that cannot be overtaken: it sends the first packet to an address the instant it has read the reply that holds it.
 *
 *   first_packet --server ADDRESS [--dns udp|tcp] [--first N] [--count N] [--types mixed|a|aaaa]
 *                [--send tcp|udp] [--port N] [--spin] [--gap-us N] [--settle-ms N] [--timeout-ms N] [--seconds N]
 *
 * Asks for n<i>.test, one name after the other, and then sends a SYN (non-blocking connect) or one datagram that holds the
 * number i to the first address of the type asked. Between reading the reply and sending there is nothing but the walk over
 * it: a row that the kernel does not hold by then is a lost packet. --types mixed asks A for even i and AAAA for odd ones.
 * With --spin it polls the DNS socket without sleeping, so that not even a wake-up stands between.
 *
 * Outcome of a name, judged --settle-ms after the last one:
 *   first-try    connected, and no segment was sent twice; or the datagram came back
 *   late         connected after a retransmission: the first SYN was lost
 *   refused      an error came back (reset, ICMP)
 *   lost         nothing came back
 *   no-address   the reply held none (see rcode)
 *   unanswered   no reply in --timeout-ms
 *   failed       a socket could not be had or used: the machine's fault, not the path's (counted apart)
 *
 * Prints one JSON object: {"summary": {outcome: count, ...}, "rcodes": {rcode: count}, "names": [[name, type, rcode, address,
 * outcome], ...]}. rcode is -1 where no reply was read. Ends by itself after --seconds, or with its parent.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { TYPE_A = 1, TYPE_AAAA = 28 };
enum outcome { PENDING, FIRST_TRY, LATE, REFUSED, LOST, NO_ADDRESS, UNANSWERED, FAILED, OUTCOMES };

static const char *const outcome_names[OUTCOMES] = {
	[PENDING] = "pending", [FIRST_TRY] = "first-try", [LATE] = "late", [REFUSED] = "refused", [LOST] = "lost",
	[NO_ADDRESS] = "no-address", [UNANSWERED] = "unanswered", [FAILED] = "failed",
};

struct target {
	int type, rcode, fd;
	enum outcome outcome;
	struct sockaddr_storage address;
};

static struct sockaddr_storage server;
static socklen_t server_length;
static int dns_over_tcp, send_tcp = 1, spin, first, count = 1, port = 7, gap_us, settle_ms = 400, timeout_ms = 2000, seconds = 300;
static const char *types = "mixed";

static void fail(const char *what)
{
	fprintf(stderr, "first_packet: %s: %s\n", what, strerror(errno));
	exit(1);
}

static int64_t now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

static socklen_t address_of(const char *text, int at_port, struct sockaddr_storage *out)
{
	struct sockaddr_in *v4 = (void *)out;
	struct sockaddr_in6 *v6 = (void *)out;

	memset(out, 0, sizeof(*out));
	if (inet_pton(AF_INET, text, &v4->sin_addr) == 1) {
		v4->sin_family = AF_INET;
		v4->sin_port = htons(at_port);
		return sizeof(*v4);
	}
	if (inet_pton(AF_INET6, text, &v6->sin6_addr) == 1) {
		v6->sin6_family = AF_INET6;
		v6->sin6_port = htons(at_port);
		return sizeof(*v6);
	}
	errno = EINVAL;
	fail(text);
	return 0;
}

/* The question of n<i>.test (RFC 1035, 4.1), two bytes of length in front as on TCP. Returns the message's length. */
static int write_question(unsigned char *out, int i, int type, uint16_t id)
{
	char label[16];
	int length = snprintf(label, sizeof(label), "n%d", i);
	unsigned char *p = out + 2;

	memcpy(p, "\0\0\1\0\0\1\0\0\0\0\0\0", 12);
	p[0] = id >> 8;
	p[1] = id;
	p += 12;
	*p++ = length;
	memcpy(p, label, length);
	p += length;
	memcpy(p, "\4test\0\0\0\0\1", 10);
	p[7] = type;
	p += 10;
	length = p - out - 2;
	out[0] = length >> 8;
	out[1] = length;
	return length;
}

/* Past a name, or -1. */
static int past_name(const unsigned char *m, int length, int at)
{
	while (at < length) {
		if ((m[at] & 0xc0) == 0xc0)
			return at + 2 <= length ? at + 2 : -1;
		if (!m[at])
			return at + 1;
		at += m[at] + 1;
	}
	return -1;
}

/* The first address of the type asked in the answer section. */
static int find_address(const unsigned char *m, int length, int question_length, int type, struct sockaddr_storage *out)
{
	int at = question_length, size = type == TYPE_A ? 4 : 16;

	memset(out, 0, sizeof(*out));
	for (int n = m[6] << 8 | m[7]; n > 0; n--) {
		at = past_name(m, length, at);
		if (at < 0 || at + 10 > length)
			return 0;
		int record = m[at] << 8 | m[at + 1], data = m[at + 8] << 8 | m[at + 9];

		at += 10;
		if (at + data > length)
			return 0;
		if (record == type && data == size) {
			struct sockaddr_in *v4 = (void *)out;
			struct sockaddr_in6 *v6 = (void *)out;

			if (type == TYPE_A) {
				v4->sin_family = AF_INET;
				v4->sin_port = htons(port);
				memcpy(&v4->sin_addr, m + at, 4);
			} else {
				v6->sin6_family = AF_INET6;
				v6->sin6_port = htons(port);
				memcpy(&v6->sin6_addr, m + at, 16);
			}
			return 1;
		}
		at += data;
	}
	return 0;
}

/* Like recv, but gives up at the deadline: 0 bytes read are -1 here, for a closed connection answers nothing either. */
static int receive(int fd, unsigned char *to, int room, int64_t deadline)
{
	for (;;) {
		int length = recv(fd, to, room, MSG_DONTWAIT);
		int64_t left = deadline - now_ms();

		if (length > 0)
			return length;
		if (length == 0 || (errno != EAGAIN && errno != EINTR) || left <= 0)
			return -1;
		if (!spin) {
			struct pollfd wait = { .fd = fd, .events = POLLIN };

			poll(&wait, 1, left);
		}
	}
}

static int ask_udp(int fd, const unsigned char *question, int length, unsigned char *reply, int room)
{
	int64_t deadline = now_ms() + timeout_ms;

	if (send(fd, question + 2, length, 0) < 0)
		return -1;
	for (;;) {
		int got = receive(fd, reply, room, deadline);

		/* A late reply to the question before is passed over. */
		if (got < 0 || (got >= length && !memcmp(reply, question + 2, 2)))
			return got;
	}
}

/* A connection for each question, as a stub resolver does it. The caller closes it, after the first packet is on its way. */
static int ask_tcp(int *stream_fd, const unsigned char *question, int length, unsigned char *reply, int room)
{
	int64_t deadline = now_ms() + timeout_ms;
	int fd = *stream_fd = socket(server.ss_family, SOCK_STREAM, 0), got = 0, wanted = 2, on = 1;
	struct timeval limit = { timeout_ms / 1000, timeout_ms % 1000 * 1000 };
	unsigned char stream[2 + 65535];

	if (fd < 0)
		return -1;
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	if (connect(fd, (void *)&server, server_length) || send(fd, question, length + 2, MSG_NOSIGNAL) != length + 2)
		wanted = 0;
	while (got < wanted) {
		int more = receive(fd, stream + got, sizeof(stream) - got, deadline);

		if (more < 0)
			break;
		got += more;
		if (got >= 2)
			wanted = 2 + (stream[0] << 8 | stream[1]);
	}
	got -= 2;
	if (got < 12 || got < length || got + 2 < wanted || got > room || memcmp(stream + 2, question + 2, 2))
		return -1;
	memcpy(reply, stream + 2, got);
	return got;
}

static void send_first(struct target *target, int i, const int *datagram_fds)
{
	int is_v6 = target->address.ss_family == AF_INET6;
	socklen_t length = is_v6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
	uint32_t number = htonl(i);

	if (send_tcp) {
		target->fd = socket(target->address.ss_family, SOCK_STREAM | SOCK_NONBLOCK, 0);
		if (target->fd < 0)
			target->outcome = FAILED;
		else if (connect(target->fd, (void *)&target->address, length) && errno != EINPROGRESS)
			target->outcome = errno == ECONNREFUSED || errno == EACCES ? REFUSED : FAILED;
	} else if (sendto(datagram_fds[is_v6], &number, sizeof(number), 0, (void *)&target->address, length) < 0) {
		target->outcome = FAILED;
	}
}

static void judge_connection(struct target *target)
{
	struct tcp_info info = { 0 };
	socklen_t length = sizeof(info), error_length = sizeof(int);
	struct linger reset = { 1, 0 };
	int error = 0;

	if (target->fd < 0)
		return;
	getsockopt(target->fd, SOL_SOCKET, SO_ERROR, &error, &error_length);
	getsockopt(target->fd, IPPROTO_TCP, TCP_INFO, &info, &length);
	if (target->outcome == PENDING) {
		if (error)
			target->outcome = REFUSED;
		else if (info.tcpi_state != TCP_ESTABLISHED && info.tcpi_state != TCP_CLOSE_WAIT)
			target->outcome = LOST;
		else
			target->outcome = info.tcpi_total_retrans ? LATE : FIRST_TRY;
	}
	setsockopt(target->fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
	close(target->fd);
	target->fd = -1;
}

static void judge_datagrams(struct target *targets, const int *fds)
{
	uint32_t number;

	for (int v6 = 0; v6 < 2; v6++)
		while (recv(fds[v6], &number, sizeof(number), MSG_DONTWAIT) == sizeof(number)) {
			uint32_t i = ntohl(number) - first;

			if (i < (uint32_t)count && targets[i].outcome == PENDING)
				targets[i].outcome = FIRST_TRY;
		}
	for (int i = 0; i < count; i++)
		if (targets[i].outcome == PENDING)
			targets[i].outcome = LOST;
}

static void print(const struct target *targets)
{
	int outcomes[OUTCOMES] = { 0 }, rcodes[17] = { 0 };

	for (int i = 0; i < count; i++) {
		outcomes[targets[i].outcome]++;
		rcodes[targets[i].rcode + 1]++;
	}
	printf("{\"summary\": {\"asked\": %d", count);
	for (int o = FIRST_TRY; o < OUTCOMES; o++)
		printf(", \"%s\": %d", outcome_names[o], outcomes[o]);
	printf("}, \"rcodes\": {");
	const char *comma = "";
	for (int r = 0; r < 17; r++)
		if (rcodes[r]) {
			printf("%s\"%d\": %d", comma, r - 1, rcodes[r]);
			comma = ", ";
		}
	printf("}, \"names\": [");
	for (int i = 0; i < count; i++) {
		const struct target *t = &targets[i];
		const void *raw = t->address.ss_family == AF_INET ? (const void *)&((struct sockaddr_in *)&t->address)->sin_addr
								  : (const void *)&((struct sockaddr_in6 *)&t->address)->sin6_addr;
		char text[INET6_ADDRSTRLEN] = "";

		if (t->address.ss_family)
			inet_ntop(t->address.ss_family, raw, text, sizeof(text));
		printf("%s[\"n%d.test.\", \"%s\", %d, \"%s\", \"%s\"]", i ? ", " : "", first + i, t->type == TYPE_A ? "A" : "AAAA",
		       t->rcode, text, outcome_names[t->outcome]);
	}
	printf("]}\n");
}

static int is_word(const char *given, const char *yes, const char *no)
{
	if (!strcmp(given, yes))
		return 1;
	if (strcmp(given, no)) {
		errno = EINVAL;
		fail(given);
	}
	return 0;
}

static void read_arguments(int argc, char **argv)
{
	static const struct option options[] = {
		{ "server", 1, 0, 's' }, { "dns", 1, 0, 'd' }, { "first", 1, 0, 'f' }, { "count", 1, 0, 'n' }, { "types", 1, 0, 't' },
		{ "send", 1, 0, 'S' }, { "port", 1, 0, 'p' }, { "spin", 0, 0, 'x' }, { "gap-us", 1, 0, 'g' }, { "settle-ms", 1, 0, 'e' },
		{ "timeout-ms", 1, 0, 'w' }, { "seconds", 1, 0, 'l' }, { 0 },
	};

	for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;)
		switch (c) {
		case 's': server_length = address_of(optarg, 53, &server); break;
		case 'd': dns_over_tcp = is_word(optarg, "tcp", "udp"); break;
		case 'f': first = atoi(optarg); break;
		case 'n': count = atoi(optarg); break;
		case 't': types = optarg; break;
		case 'S': send_tcp = is_word(optarg, "tcp", "udp"); break;
		case 'p': port = atoi(optarg); break;
		case 'x': spin = 1; break;
		case 'g': gap_us = atoi(optarg); break;
		case 'e': settle_ms = atoi(optarg); break;
		case 'w': timeout_ms = atoi(optarg); break;
		case 'l': seconds = atoi(optarg); break;
		default: exit(2);
		}
	if (!server_length || count < 1 || first < 0) {
		fprintf(stderr, "usage: first_packet --server ADDRESS [--count N] ...: see the head of first_packet.c\n");
		exit(2);
	}
}

int main(int argc, char **argv)
{
	struct rlimit files = { 1 << 17, 1 << 17 };
	unsigned char question[64], reply[65535];
	int dns_fd, stream_fd = -1, datagram_fds[2], buffer = 8 << 20;

	read_arguments(argc, argv);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	alarm(seconds);
	setrlimit(RLIMIT_NOFILE, &files);
	struct target *targets = calloc(count, sizeof(*targets));
	if (!targets)
		fail("calloc");
	dns_fd = socket(server.ss_family, SOCK_DGRAM, 0);
	if (dns_fd < 0 || connect(dns_fd, (void *)&server, server_length))
		fail("DNS socket");
	for (int v6 = 0; v6 < 2; v6++) {
		datagram_fds[v6] = socket(v6 ? AF_INET6 : AF_INET, SOCK_DGRAM, 0);
		if (datagram_fds[v6] < 0)
			fail("datagram socket");
		setsockopt(datagram_fds[v6], SOL_SOCKET, SO_RCVBUFFORCE, &buffer, sizeof(buffer));
	}
	for (int n = 0; n < count; n++) {
		struct target *target = &targets[n];
		int i = first + n;

		target->fd = -1;
		target->rcode = -1;
		target->type = !strcmp(types, "aaaa") || (!strcmp(types, "mixed") && i % 2) ? TYPE_AAAA : TYPE_A;
		int length = write_question(question, i, target->type, (uint16_t)(i * 7 + 1));
		int got = dns_over_tcp ? ask_tcp(&stream_fd, question, length, reply, sizeof(reply))
				       : ask_udp(dns_fd, question, length, reply, sizeof(reply));
		if (got < length) {
			target->outcome = UNANSWERED;
		} else {
			if (find_address(reply, got, length, target->type, &target->address))
				send_first(target, i, datagram_fds);
			else
				target->outcome = NO_ADDRESS;
			target->rcode = reply[3] & 15;
		}
		if (stream_fd >= 0)
			close(stream_fd);
		stream_fd = -1;
		if (gap_us)
			usleep(gap_us);
	}
	usleep(settle_ms * 1000);
	if (send_tcp)
		for (int n = 0; n < count; n++)
			judge_connection(&targets[n]);
	else
		judge_datagrams(targets, datagram_fds);
	print(targets);
	return 0;
}
