/* A mock engine: one epoll loop that answers every POST with an SSE stream of fixed pace.
 *
 *   mock_engine PORT
 *   GET /configure?chunks=N&interval_us=U    N events (then [DONE]), U microseconds apart, from the next request on
 *
 * It is cheap on purpose, so that the proxy before it dominates the measurement. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_FDS = 65536, IN_BYTES = 16384, WHEEL = 8192 /* milliseconds round */ };

struct conn {
    int fd, used, left;
    int64_t due_us;
    struct conn *next_due;
    unsigned generation; /* outdates wheel entries once a descriptor is reused */
    char in[IN_BYTES];
};

struct due { struct conn *conn; unsigned generation; struct due *next; };

static struct conn *conns[MAX_FDS];
static struct due *wheel[WHEEL];
static int64_t wheel_ms;
static int num_chunks = 1;
static int64_t interval_us = 0;
static char event[512], last[600];
static int event_len, last_len;
static const char HEAD[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

static int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

static void put(int fd, const char *data, int len) {
    while (len > 0) {
        ssize_t sent = send(fd, data, len, MSG_NOSIGNAL);
        if (sent < 0 && errno == EAGAIN) { usleep(20); continue; }
        if (sent < 0) return;
        data += sent;
        len -= (int)sent;
    }
}

static void schedule(struct conn *c) {
    struct due *d = malloc(sizeof *d);
    int64_t ms = c->due_us / 1000 + 1;
    if (ms < wheel_ms) ms = wheel_ms;
    if (ms >= wheel_ms + WHEEL) ms = wheel_ms + WHEEL - 1;
    *d = (struct due){c, c->generation, wheel[ms % WHEEL]};
    wheel[ms % WHEEL] = d;
}

/* Send the events that are due; the last one goes with [DONE] and the end of the chunked body in one packet. */
static void step(struct conn *c, int64_t now) {
    while (c->left > 0 && c->due_us <= now) {
        if (--c->left == 0) { put(c->fd, last, last_len); return; }
        put(c->fd, event, event_len);
        c->due_us += interval_us;
    }
    if (c->left > 0) schedule(c);
}

static void answer(struct conn *c, char *head) {
    if (!strncmp(head, "POST", 4)) {
        put(c->fd, HEAD, sizeof HEAD - 1);
        c->left = num_chunks;
        c->due_us = now_us() + interval_us;
        step(c, now_us());
        return;
    }
    int n;
    long us;
    if (sscanf(head, "GET /configure?chunks=%d&interval_us=%ld", &n, &us) == 2) { num_chunks = n; interval_us = us; }
    static const char OK[] = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";
    put(c->fd, OK, sizeof OK - 1);
}

/* Whole requests out of the buffer; clients send content-length. */
static void read_requests(struct conn *c) {
    char *end;
    while ((end = memmem(c->in, c->used, "\r\n\r\n", 4))) {
        int head_len = (int)(end - c->in) + 4;
        end[2] = 0;
        char *field = strcasestr(c->in, "\ncontent-length:");
        int total = head_len + (field ? atoi(field + 16) : 0);
        end[2] = '\r';
        if (c->used < total) return;
        answer(c, c->in);
        memmove(c->in, c->in + total, c->used - total);
        c->used -= total;
    }
}

static void forget(struct conn *c) {
    close(c->fd);
    c->left = 0;
    c->generation++;
}

static void run_wheel(void) {
    int64_t now = now_us(), ms = now / 1000;
    for (; wheel_ms <= ms; wheel_ms++) {
        struct due *d = wheel[wheel_ms % WHEEL];
        wheel[wheel_ms % WHEEL] = NULL;
        while (d) {
            struct due *next = d->next;
            if (d->generation == d->conn->generation) step(d->conn, now);
            free(d);
            d = next;
        }
    }
}

static int listen_on(int port) {
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (void *)&a, sizeof a) || listen(fd, 4096)) { perror("mock_engine"); exit(1); }
    return fd;
}

static void accept_one(int ep, int server) {
    int one = 1, fd = accept4(server, NULL, NULL, SOCK_NONBLOCK);
    if (fd < 0 || fd >= MAX_FDS) return;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (!conns[fd]) conns[fd] = calloc(1, sizeof(struct conn));
    conns[fd]->fd = fd;
    conns[fd]->used = conns[fd]->left = 0;
    epoll_ctl(ep, EPOLL_CTL_ADD, fd, &(struct epoll_event){.events = EPOLLIN, .data.fd = fd});
}

int main(int argc, char **argv) {
    if (argc != 2) { fprintf(stderr, "usage: mock_engine PORT\n"); return 2; }
    const char *text = "data: {\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,"
                       "\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" token\"},\"finish_reason\":null}]}\n\n";
    event_len = sprintf(event, "%zx\r\n%s\r\n", strlen(text), text);
    last_len = sprintf(last, "%se\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", event);
    int server = listen_on(atoi(argv[1])), ep = epoll_create1(0);
    epoll_ctl(ep, EPOLL_CTL_ADD, server, &(struct epoll_event){.events = EPOLLIN, .data.fd = server});
    struct epoll_event events[512];
    wheel_ms = now_us() / 1000;
    for (;;) {
        int n = epoll_wait(ep, events, 512, 1);
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            if (fd == server) { accept_one(ep, server); continue; }
            struct conn *c = conns[fd];
            ssize_t got = recv(fd, c->in + c->used, sizeof c->in - c->used, 0);
            if (got < 0 && errno == EAGAIN) continue;
            if (got <= 0) { forget(c); continue; }
            c->used += (int)got;
            read_requests(c);
        }
        run_wheel();
    }
}
