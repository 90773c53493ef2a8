/*
 * A flood of UDP datagrams as fast as the machine lets them go, and what they cost this process.
 *
 *   flood ADDRESS PORT COUNT DESTINATIONS
 *
 * The datagrams go to ADDRESS, ADDRESS + 1, ... in turn, DESTINATIONS of them, from one socket; 18 octets each. Over a veth the
 * kernel carries a datagram all the way to the other side's queue in the sender's own time, so that its CPU time is what one
 * forwarded packet costs. Prints one line: datagrams sent, nanoseconds of CPU time.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#define BATCH 64

static long long cpu_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
	return t.tv_sec * 1000000000LL + t.tv_nsec;
}

int main(int argc, char **argv)
{
	struct sockaddr_in to[BATCH] = {0};
	struct mmsghdr messages[BATCH] = {0};
	char payload[18] = "namegate";
	struct iovec part = {payload, sizeof(payload)};
	unsigned int first, next = 0, destinations;
	long long count, sent = 0, began;
	int s = socket(AF_INET, SOCK_DGRAM, 0), room = 1 << 22;

	if (argc != 5 || s < 0) {
		fprintf(stderr, "usage: flood ADDRESS PORT COUNT DESTINATIONS\n");
		return 2;
	}
	first = ntohl(inet_addr(argv[1]));
	count = atoll(argv[3]);
	destinations = (unsigned int)atoi(argv[4]);
	setsockopt(s, SOL_SOCKET, SO_SNDBUF, &room, sizeof(room));
	for (int i = 0; i < BATCH; i++) {
		to[i].sin_family = AF_INET;
		to[i].sin_port = htons((unsigned short)atoi(argv[2]));
		messages[i].msg_hdr = (struct msghdr){.msg_name = &to[i], .msg_namelen = sizeof(to[i]), .msg_iov = &part, .msg_iovlen = 1};
	}
	began = cpu_ns();
	while (sent < count) {
		int batch = count - sent < BATCH ? (int)(count - sent) : BATCH, done;

		for (int i = 0; i < batch; i++)
			to[i].sin_addr.s_addr = htonl(first + next++ % destinations);
		done = sendmmsg(s, messages, (unsigned int)batch, 0);
		if (done > 0)
			sent += done;
		else if (errno != ENOBUFS && errno != EPERM && errno != EACCES && errno != ECONNREFUSED)
			return 1;
	}
	printf("%lld %lld\n", sent, cpu_ns() - began);
	return 0;
}
