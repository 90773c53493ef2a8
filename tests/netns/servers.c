/* The internet's servers: TCP and UDP echo on every address of the namespace, IPv4 and IPv6.
 *
 *   servers SECONDS PORT...
 *
 * "On every address" counts the ranges that are local by route only (`ip route add local PREFIX dev lo`), so that tens of
 * thousands of addresses answer without being configured. A datagram is answered from the address it was sent to: a peer
 * that hears from another address would rightly ignore it.
 *
 * Prints "ready" when every socket listens, and ends by itself after SECONDS or with its parent.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#ifndef IPV6_FREEBIND
#define IPV6_FREEBIND 78
#endif

enum kind { LISTENER, DATAGRAM, CONNECTION };

struct source {
	enum kind kind;
	int fd;
};

static void fail(const char *what)
{
	fprintf(stderr, "servers: %s: %s\n", what, strerror(errno));
	exit(1);
}

static void set(int fd, int level, int option)
{
	int on = 1;

	if (setsockopt(fd, level, option, &on, sizeof(on)))
		fail("setsockopt");
}

static void watch(int poller, enum kind kind, int fd)
{
	struct source *source = malloc(sizeof(*source));
	struct epoll_event event = { .events = EPOLLIN, .data.ptr = source };

	if (!source)
		fail("malloc");
	*source = (struct source){ kind, fd };
	if (epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event))
		fail("epoll_ctl");
}

static int bound(int family, int type, int port)
{
	struct sockaddr_in v4 = { .sin_family = AF_INET, .sin_port = htons(port) };
	struct sockaddr_in6 v6 = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
	int fd = socket(family, type | SOCK_NONBLOCK, 0);

	if (fd < 0)
		fail("socket");
	set(fd, SOL_SOCKET, SO_REUSEADDR);
	if (family == AF_INET6)
		set(fd, IPPROTO_IPV6, IPV6_V6ONLY);
	if (family == AF_INET ? bind(fd, (void *)&v4, sizeof(v4)) : bind(fd, (void *)&v6, sizeof(v6)))
		fail("bind");
	return fd;
}

static void listen_on(int poller, int family, int port)
{
	int stream = bound(family, SOCK_STREAM, port), datagram = bound(family, SOCK_DGRAM, port), buffer = 8 << 20;

	if (listen(stream, 4096))
		fail("listen");
	watch(poller, LISTENER, stream);
	setsockopt(datagram, SOL_SOCKET, SO_RCVBUFFORCE, &buffer, sizeof(buffer));
	if (family == AF_INET) {
		set(datagram, IPPROTO_IP, IP_PKTINFO);
	} else {
		set(datagram, IPPROTO_IPV6, IPV6_RECVPKTINFO);
		/* An address that is local by route only may be a source only with this. */
		set(datagram, IPPROTO_IPV6, IPV6_FREEBIND);
	}
	watch(poller, DATAGRAM, datagram);
}

static void echo_datagrams(int fd)
{
	unsigned char payload[65536], control[256];
	struct sockaddr_storage peer;

	for (;;) {
		struct iovec part = { payload, sizeof(payload) };
		struct msghdr message = {
			.msg_name = &peer, .msg_namelen = sizeof(peer), .msg_iov = &part, .msg_iovlen = 1,
			.msg_control = control, .msg_controllen = sizeof(control),
		};
		ssize_t length = recvmsg(fd, &message, 0);

		if (length < 0)
			return;
		part.iov_len = length;
		for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
			/* What came in as "the address asked" goes out as "the source to use"; the interface is left to routing. */
			if (c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_PKTINFO) {
				((struct in_pktinfo *)CMSG_DATA(c))->ipi_ifindex = 0;
			} else if (c->cmsg_level == IPPROTO_IPV6 && c->cmsg_type == IPV6_PKTINFO) {
				((struct in6_pktinfo *)CMSG_DATA(c))->ipi6_ifindex = 0;
			}
		}
		sendmsg(fd, &message, 0);
	}
}

static void accept_all(int poller, int listener)
{
	int fd;

	while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0)
		watch(poller, CONNECTION, fd);
}

/* False when the peer is gone. A peer that does not read is cut off rather than waited for. */
static int echo_stream(int fd)
{
	unsigned char payload[65536];
	ssize_t length;

	while ((length = recv(fd, payload, sizeof(payload), 0)) > 0)
		if (send(fd, payload, length, MSG_NOSIGNAL) != length)
			return 0;
	return length < 0 && errno == EAGAIN;
}

int main(int argc, char **argv)
{
	struct rlimit files = { 1 << 16, 1 << 16 };
	struct epoll_event events[64];
	int poller = epoll_create1(0);

	if (argc < 3) {
		fprintf(stderr, "usage: servers SECONDS PORT...\n");
		return 2;
	}
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	alarm(atoi(argv[1]));
	setrlimit(RLIMIT_NOFILE, &files);
	for (int i = 2; i < argc; i++) {
		listen_on(poller, AF_INET, atoi(argv[i]));
		listen_on(poller, AF_INET6, atoi(argv[i]));
	}
	puts("ready");
	fflush(stdout);
	for (;;) {
		int n = epoll_wait(poller, events, 64, -1);

		if (n < 0 && errno != EINTR)
			fail("epoll_wait");
		for (int i = 0; i < n; i++) {
			struct source *source = events[i].data.ptr;

			if (source->kind == LISTENER) {
				accept_all(poller, source->fd);
			} else if (source->kind == DATAGRAM) {
				echo_datagrams(source->fd);
			} else if (!echo_stream(source->fd)) {
				close(source->fd);
				free(source);
			}
		}
	}
}
