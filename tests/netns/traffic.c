/* Numbered datagrams at a steady pace, and which of them arrived.
 *
 *   traffic send SECONDS PER_SECOND ADDRESS,PORT...
 *   traffic receive SECONDS PORT...
 *
 * Destination d of the sender is stream d of the receiver: each gets its own numbers from 0, in turn with the others. What was
 * sent and never received is lost; only this direction is judged, and nobody answers. Even numbers of a stream are one long flow;
 * odd ones come from a port that is another one ten times a second, so that flows begin all the time. Refusals (ICMP) do not
 * reach the sender: its sockets are not connected and do not ask for errors.
 *
 * The pace is kept by real-time scheduling where that is allowed, and time overslept is not made up for: a burst would be lost in
 * the kernel's queues and prove nothing. What the receiver's own sockets lost is counted apart.
 *
 * Both say "ready". With SIGTERM they end and print one JSON object; after SECONDS, or with their parent, they just end:
 *   send      {"sent": [of each stream], "overslept_us": the longest that a wake-up was late}
 *   receive   {"streams": [{"received", "twice", "gap_us": the longest between two arrivals, "delay_us": the longest way}, ...],
 *              "gap_us": the longest between two arrivals of whichever streams, "overflowed": by the receiver's own fault}
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { STREAMS_MAX = 64, PORTS_MAX = 16, BATCH_MAX = 128, TICK_NS = 1000000, FLOW_TICKS = 100, SILENCE_MS = 200 };
/* Most of an hour of a single stream at 20,000 a second; memory is touched as far as numbers go. */
#define NUMBERS_MAX (1U << 26)

struct datagram {
	uint32_t stream;
	uint32_t number;
	uint64_t sent_at; /* ns of CLOCK_REALTIME, which the kernel's stamps are of */
};

static volatile sig_atomic_t is_ended;

static void end(int number)
{
	(void)number;
	is_ended = 1;
}

static void fail(const char *what)
{
	fprintf(stderr, "traffic: %s: %s\n", what, strerror(errno));
	exit(1);
}

static uint64_t ns(const struct timespec *t)
{
	return t->tv_sec * 1000000000ULL + t->tv_nsec;
}

static uint64_t clock_ns(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return ns(&t);
}

static void ready(void)
{
	puts("ready");
	fflush(stdout);
}

/* --- sending ------------------------------------------------------------------------------------------------------- */

/* IPv4 is sent to through the mapped address: one socket does both. */
static struct sockaddr_in6 destination_of(char *text)
{
	struct sockaddr_in6 to = { .sin6_family = AF_INET6 };
	char *comma = strchr(text, ','), mapped[64];

	if (!comma) {
		errno = EINVAL;
		fail(text);
	}
	*comma = 0;
	snprintf(mapped, sizeof(mapped), "%s%s", strchr(text, ':') ? "" : "::ffff:", text);
	if (inet_pton(AF_INET6, mapped, &to.sin6_addr) != 1) {
		errno = EINVAL;
		fail(text);
	}
	to.sin6_port = htons(atoi(comma + 1));
	return to;
}

static int sending_socket(void)
{
	int fd = socket(AF_INET6, SOCK_DGRAM, 0), room = 4 << 20;

	if (fd < 0)
		fail("socket");
	setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof(room));
	return fd;
}

static void send_all(int fd, struct mmsghdr *messages, unsigned int count)
{
	for (unsigned int done = 0; done < count;) {
		int sent = sendmmsg(fd, messages + done, count - done, 0);

		if (sent < 0 && errno != EINTR)
			fail("sendmmsg");
		done += sent < 0 ? 0 : sent;
	}
}

static int send_traffic(int per_second, int streams, char **destinations)
{
	struct sockaddr_in6 to[STREAMS_MAX];
	uint32_t sent[STREAMS_MAX] = { 0 };
	struct datagram datagrams[2][BATCH_MAX];
	struct iovec parts[2][BATCH_MAX];
	struct mmsghdr messages[2][BATCH_MAX];
	struct sched_param priority = { .sched_priority = 1 };
	int fds[2] = { sending_socket(), sending_socket() }, per_tick = per_second / (1000000000 / TICK_NS), next = 0;
	uint64_t due, overslept = 0;

	if (streams > STREAMS_MAX || per_tick < 1 || per_tick > BATCH_MAX) {
		errno = E2BIG;
		fail("send");
	}
	for (int s = 0; s < streams; s++)
		to[s] = destination_of(destinations[s]);
	sched_setscheduler(0, SCHED_FIFO, &priority);
	ready();
	due = clock_ns(CLOCK_MONOTONIC);
	for (uint64_t tick = 0; !is_ended; tick++) {
		struct timespec at = { due / 1000000000, due % 1000000000 };
		unsigned int counts[2] = { 0 };
		uint64_t now;

		if (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL))
			break;
		now = clock_ns(CLOCK_MONOTONIC);
		if (now - due > overslept)
			overslept = now - due;
		if (tick % FLOW_TICKS == 0) {
			close(fds[1]);
			fds[1] = sending_socket();
		}
		for (int i = 0; i < per_tick; i++, next = (next + 1) % streams) {
			int way = sent[next] % 2;
			unsigned int n = counts[way]++;

			datagrams[way][n] = (struct datagram){ next, sent[next]++, clock_ns(CLOCK_REALTIME) };
			parts[way][n] = (struct iovec){ &datagrams[way][n], sizeof(struct datagram) };
			messages[way][n].msg_hdr = (struct msghdr){
				.msg_name = &to[next], .msg_namelen = sizeof(to[next]), .msg_iov = &parts[way][n], .msg_iovlen = 1,
			};
		}
		for (int way = 0; way < 2; way++)
			send_all(fds[way], messages[way], counts[way]);
		/* What the kernel made us wait for in sending is no oversleeping: it shows as delay. */
		now = clock_ns(CLOCK_MONOTONIC);
		due = due + TICK_NS > now ? due + TICK_NS : now;
	}
	printf("{\"sent\": [");
	for (int s = 0; s < streams; s++)
		printf("%s%u", s ? ", " : "", sent[s]);
	printf("], \"overslept_us\": %llu}\n", (unsigned long long)overslept / 1000);
	return 0;
}

/* --- receiving ----------------------------------------------------------------------------------------------------- */

struct stream {
	uint8_t *seen; /* a bit for each number */
	uint64_t received, twice, last_at, gap, delay;
};

static struct stream streams[STREAMS_MAX];
static uint64_t last_at, longest_gap;

static void take(const struct datagram *d, uint64_t at)
{
	struct stream *s = &streams[d->stream];

	if (!s->seen && !(s->seen = calloc(NUMBERS_MAX / 8, 1)))
		fail("calloc");
	if (s->seen[d->number / 8] & 1 << d->number % 8)
		s->twice++;
	else
		s->received++;
	s->seen[d->number / 8] |= 1 << d->number % 8;
	if (s->last_at && at > s->last_at + s->gap)
		s->gap = at - s->last_at;
	if (last_at && at > last_at + longest_gap)
		longest_gap = at - last_at;
	if (at > d->sent_at + s->delay)
		s->delay = at - d->sent_at;
	s->last_at = at;
	last_at = at;
}

/* Until it is empty; *overflowed is what the kernel has counted for this socket in all. */
static void read_socket(int fd, uint32_t *overflowed)
{
	struct datagram datagrams[BATCH_MAX];
	struct iovec parts[BATCH_MAX];
	struct mmsghdr messages[BATCH_MAX];
	unsigned char control[BATCH_MAX][128];
	int got;

	do {
		for (int i = 0; i < BATCH_MAX; i++) {
			parts[i] = (struct iovec){ &datagrams[i], sizeof(datagrams[i]) };
			messages[i].msg_hdr = (struct msghdr){
				.msg_iov = &parts[i], .msg_iovlen = 1, .msg_control = control[i], .msg_controllen = sizeof(control[i]),
			};
		}
		got = recvmmsg(fd, messages, BATCH_MAX, MSG_DONTWAIT, NULL);
		for (int i = 0; i < got; i++) {
			struct msghdr *header = &messages[i].msg_hdr;
			uint64_t at = 0;

			for (struct cmsghdr *c = CMSG_FIRSTHDR(header); c; c = CMSG_NXTHDR(header, c)) {
				if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SO_TIMESTAMPNS)
					at = ns((struct timespec *)CMSG_DATA(c));
				else if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SO_RXQ_OVFL)
					memcpy(overflowed, CMSG_DATA(c), sizeof(*overflowed));
			}
			if (messages[i].msg_len != sizeof(struct datagram) || datagrams[i].stream >= STREAMS_MAX ||
			    datagrams[i].number >= NUMBERS_MAX) {
				errno = EBADMSG;
				fail("datagram");
			}
			take(&datagrams[i], at);
		}
	} while (got == BATCH_MAX);
}

static int receiving_socket(int port)
{
	struct sockaddr_in6 any = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
	int fd = socket(AF_INET6, SOCK_DGRAM, 0), room = 64 << 20, on = 1;

	if (fd < 0 || bind(fd, (void *)&any, sizeof(any)))
		fail("bind");
	if (setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof(room)) ||
	    setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof(on)) ||
	    setsockopt(fd, SOL_SOCKET, SO_RXQ_OVFL, &on, sizeof(on)))
		fail("setsockopt");
	return fd;
}

static int receive_traffic(int ports, char **numbers)
{
	struct pollfd polled[PORTS_MAX];
	uint32_t overflowed[PORTS_MAX] = { 0 }, overflowed_in_all = 0;
	int last = 0;

	if (ports > PORTS_MAX) {
		errno = E2BIG;
		fail("receive");
	}
	for (int p = 0; p < ports; p++)
		polled[p] = (struct pollfd){ .fd = receiving_socket(atoi(numbers[p])), .events = POLLIN };
	ready();
	/* The end was called for after the last datagram had been sent; it has arrived when nothing more comes. */
	for (int found = 1; found || !is_ended;) {
		found = poll(polled, ports, SILENCE_MS);
		if (found < 0 && errno != EINTR)
			fail("poll");
		for (int p = 0; p < ports; p++)
			if (found > 0 && polled[p].revents)
				read_socket(polled[p].fd, &overflowed[p]);
	}
	for (int s = 0; s < STREAMS_MAX; s++)
		last = streams[s].seen ? s : last;
	for (int p = 0; p < ports; p++)
		overflowed_in_all += overflowed[p];
	printf("{\"streams\": [");
	for (int s = 0; s <= last; s++)
		printf("%s{\"received\": %llu, \"twice\": %llu, \"gap_us\": %llu, \"delay_us\": %llu}", s ? ", " : "",
		       (unsigned long long)streams[s].received, (unsigned long long)streams[s].twice,
		       (unsigned long long)streams[s].gap / 1000, (unsigned long long)streams[s].delay / 1000);
	printf("], \"gap_us\": %llu, \"overflowed\": %u}\n", (unsigned long long)longest_gap / 1000, overflowed_in_all);
	return 0;
}

int main(int argc, char **argv)
{
	int is_sending = argc > 4 && !strcmp(argv[1], "send"), is_receiving = argc > 3 && !strcmp(argv[1], "receive");
	struct sigaction action = { .sa_handler = end };

	if (!is_sending && !is_receiving) {
		fprintf(stderr, "usage: traffic send|receive SECONDS ...: see the head of traffic.c\n");
		return 2;
	}
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	sigaction(SIGTERM, &action, NULL);
	alarm(atoi(argv[2]));
	return is_sending ? send_traffic(atoi(argv[3]), argc - 4, argv + 4) : receive_traffic(argc - 3, argv + 3);
}
