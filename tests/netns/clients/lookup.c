/* Looks a name up as an ordinary program does and connects at once to port 443 of what it was told.
 *
 *   lookup NAME
 *
 * Compiled for glibc by gcc, for musl by musl-gcc, and with -DCARES for c-ares; each asks what its library's defaults say.
 * What it prints is drawn in ../test_clients.py. Exit code 2: used wrongly.
 */
#define _POSIX_C_SOURCE 200809L
#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#ifdef CARES
#include <ares.h>
#endif

#define ADDRESSES_MAX 512
#define CONNECT_MS_MAX 3000

static struct sockaddr_storage addresses[ADDRESSES_MAX];
static int address_count;
static const char *failure;

static double now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

static socklen_t size_of(const struct sockaddr *address)
{
    return address->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
}

static void take(const struct sockaddr *address)
{
    if (address_count < ADDRESSES_MAX)
        memcpy(&addresses[address_count++], address, size_of(address));
}

#ifdef CARES
static void take_all(void *unused, int status, int timeouts, struct ares_addrinfo *found)
{
    (void)unused, (void)timeouts;
    if (status != ARES_SUCCESS) {
        failure = ares_strerror(status);
        return;
    }
    for (struct ares_addrinfo_node *each = found->nodes; each; each = each->ai_next)
        take(each->ai_addr);
    ares_freeaddrinfo(found);
}

static void look_up(const char *name)
{
    struct ares_addrinfo_hints hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    ares_channel channel;
    if (ares_library_init(ARES_LIB_INIT_ALL) || ares_init(&channel)) {
        failure = "c-ares does not start";
        return;
    }
    ares_getaddrinfo(channel, name, NULL, &hints, take_all, NULL);
    for (;;) {
        fd_set readable, writable;
        struct timeval left;
        FD_ZERO(&readable);
        FD_ZERO(&writable);
        int above = ares_fds(channel, &readable, &writable);
        if (!above)
            break;
        select(above, &readable, &writable, NULL, ares_timeout(channel, NULL, &left));
        ares_process(channel, &readable, &writable);
    }
}
#else
static void look_up(const char *name)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM}, *found;
    int status = getaddrinfo(name, NULL, &hints, &found);
    if (status) {
        failure = gai_strerror(status);
        return;
    }
    for (struct addrinfo *each = found; each; each = each->ai_next)
        take(each->ai_addr);
    freeaddrinfo(found);
}
#endif

static const char *text_of(const struct sockaddr_storage *address)
{
    static char text[INET6_ADDRSTRLEN];
    const void *octets = address->ss_family == AF_INET ? (const void *)&((const struct sockaddr_in *)address)->sin_addr
                                                       : (const void *)&((const struct sockaddr_in6 *)address)->sin6_addr;
    return inet_ntop(address->ss_family, octets, text, sizeof(text));
}

static const char *connect_to(struct sockaddr_storage *address)
{
    if (address->ss_family == AF_INET)
        ((struct sockaddr_in *)address)->sin_port = htons(443);
    else
        ((struct sockaddr_in6 *)address)->sin6_port = htons(443);
    int fd = socket(address->ss_family, SOCK_STREAM | SOCK_NONBLOCK, 0), error = 0;
    if (connect(fd, (struct sockaddr *)address, size_of((struct sockaddr *)address)) && errno != EINPROGRESS) {
        error = errno;
    } else {
        struct pollfd done = {.fd = fd, .events = POLLOUT};
        socklen_t size = sizeof(error);
        if (poll(&done, 1, CONNECT_MS_MAX) != 1)
            error = ETIMEDOUT;
        else
            getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
    }
    close(fd);
    return error ? strerror(error) : "connected";
}

int main(int count, char **arguments)
{
    if (count != 2) {
        fprintf(stderr, "usage: lookup NAME\n");
        return 2;
    }
    double begun = now_ms();
    look_up(arguments[1]);
    double looked_up = now_ms();
    if (failure) {
        printf("failed %.1f %s\n", looked_up - begun, failure);
        return 0;
    }
    const sa_family_t families[] = {AF_INET, AF_INET6};
    for (int family = 0; family < 2; family++)
        for (int i = 0; i < address_count; i++)
            if (addresses[i].ss_family == families[family]) {
                double connecting = now_ms();
                const char *outcome = connect_to(&addresses[i]);
                printf("connection %.1f %s %s\n", now_ms() - connecting, text_of(&addresses[i]), outcome);
                break;
            }
    printf("addresses %.1f", looked_up - begun);
    for (int i = 0; i < address_count; i++)
        printf(" %s", text_of(&addresses[i]));
    printf("\n");
    return 0;
}
