/* A load generator: streaming chat requests over keep-alive connections, one epoll loop.
 *
 *   load PORT CONNECTIONS SECONDS EXPECTED_EVENTS SPREAD_MS RATE [NUM_KEYS]
 *
 * RATE 0: a closed loop, each connection begun within SPREAD_MS. Else RATE requests a second at equal times, each over
 * an idle connection; one that finds none comes as soon as one is idle.
 * With NUM_KEYS each request carries the next of so many keys: gp-k0000000-sss..., gp-k0000001-sss..., and so on.
 *
 * Every answer is checked: status 200, chunked framing to its end, EXPECTED_EVENTS events of data and one [DONE].
 * Anything else is an error. Prints one line of JSON; times in microseconds. */
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
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum phase { IN_HEAD, IN_SIZE, IN_DATA, IN_DATA_END, IN_TRAILER };
enum { MAX_SAMPLES = 4000000, HEAD_BYTES = 4096 };

struct conn {
    int fd, started, head_len, num_events, num_done, ok;
    enum phase phase;
    long size;
    unsigned window; /* the last bytes of data, so that "data:" is found across reads */
    int64_t sent_us, heard_us, start_at_us;
    char head[HEAD_BYTES];
};

static struct sockaddr_in target;
static char request[4096];
static int request_len, expected, ep, num_keys, next_key;
static char *key_number; /* the seven digits within the request */
static long num_streams, num_events, num_errors, num_open, most_open;
static int *ttft, *gap;
static long num_ttft, num_gap;
static struct conn **idle; /* of a paced load */
static long num_idle, num_due;

static int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

static void dial(struct conn *c) {
    int one = 1;
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(c->fd, (void *)&target, sizeof target)) { perror("connect"); exit(1); }
    epoll_ctl(ep, EPOLL_CTL_ADD, c->fd, &(struct epoll_event){.events = EPOLLIN, .data.ptr = c});
}

static void ask(struct conn *c) {
    c->phase = IN_HEAD;
    c->head_len = c->num_events = c->num_done = c->ok = 0;
    c->window = 0;
    c->started = 1;
    c->sent_us = now_us();
    c->heard_us = 0;
    if (++num_open > most_open) most_open = num_open;
    if (num_keys) {
        char digits[16];
        snprintf(digits, sizeof digits, "%07d", next_key++ % num_keys);
        memcpy(key_number, digits, 7);
    }
    if (send(c->fd, request, request_len, MSG_NOSIGNAL) != request_len) num_errors++;
}

static void next_or_rest(struct conn *c) {
    if (!idle) ask(c);
    else idle[num_idle++] = c;
}

static void fail(struct conn *c, const char *why) {
    if (num_errors++ < 5) fprintf(stderr, "load: %s: %.200s\n", why, c->head_len ? c->head : "");
    num_open--;
    close(c->fd);
    usleep(1000);
    dial(c);
    next_or_rest(c);
}

static void heard(struct conn *c, int64_t now) {
    if (!c->heard_us) {
        if (num_ttft < MAX_SAMPLES) ttft[num_ttft++] = (int)(now - c->sent_us);
    } else if (num_gap < MAX_SAMPLES) {
        gap[num_gap++] = (int)(now - c->heard_us);
    }
    c->heard_us = now;
}

/* Count "data:" and "[DONE" in data that may be cut anywhere, by a window of four bytes. */
static void count(struct conn *c, const char *data, long len) {
    for (long i = 0; i < len; i++) {
        if (data[i] == ':' && c->window == 0x64617461u) c->num_events++;
        if (data[i] == 'E' && c->window == 0x5b444f4eu) c->num_done++;
        c->window = c->window << 8 | (unsigned char)data[i];
    }
}

/* Returns 1 when the answer is complete, -1 when it is wrong, else 0. */
static int feed(struct conn *c, const char *p, long len, int64_t now) {
    const char *end = p + len;
    while (p < end) {
        switch (c->phase) {
        case IN_HEAD:
            if (c->head_len >= HEAD_BYTES - 1) return -1;
            c->head[c->head_len++] = *p++;
            c->head[c->head_len] = 0;
            if (c->head_len >= 4 && !memcmp(c->head + c->head_len - 4, "\r\n\r\n", 4)) {
                if (strncmp(c->head, "HTTP/1.1 200", 12) || !strcasestr(c->head, "transfer-encoding: chunked")) return -1;
                c->phase = IN_SIZE;
                c->size = 0;
            }
            break;
        case IN_SIZE:
            if (*p == '\n') {
                c->phase = c->size ? IN_DATA : IN_TRAILER;
            } else if (*p != '\r') {
                int digit = *p <= '9' ? *p - '0' : (*p | 32) - 'a' + 10;
                c->size = c->size * 16 + digit;
            }
            p++;
            break;
        case IN_DATA: {
            long take = end - p < c->size ? end - p : c->size;
            int before = c->num_events;
            count(c, p, take);
            if (c->num_events > before) heard(c, now);
            p += take;
            c->size -= take;
            if (!c->size) c->phase = IN_DATA_END;
            break;
        }
        case IN_DATA_END:
            if (*p++ == '\n') c->phase = IN_SIZE;
            break;
        case IN_TRAILER:
            if (*p++ == '\n') return c->num_events == expected + 1 && c->num_done == 1 ? 1 : -1;
            break;
        }
    }
    return 0;
}

static int by_value(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

static int quantile(int *samples, long n, double q) {
    return n ? samples[(long)((n - 1) * q)] : -1;
}

static void make_request(int port) {
    char pad[701], body[1024];
    memset(pad, 'a', 700);
    pad[700] = 0;
    int len = sprintf(body, "{\"model\":\"m\",\"stream\":true,\"max_tokens\":128,\"temperature\":0.7,\"messages\":["
                            "{\"role\":\"system\",\"content\":\"Be brief.\"},{\"role\":\"user\",\"content\":\"%s\"}]}", pad);
    char key[128] = "", secret[44];
    memset(secret, 's', 43);
    secret[43] = 0;
    if (num_keys) sprintf(key, "authorization: Bearer gp-k0000000-%s\r\n", secret);
    request_len = sprintf(request, "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nuser-agent: load\r\n%s"
                                   "content-type: application/json\r\naccept: text/event-stream\r\ncontent-length: %d\r\n\r\n%s",
                          port, key, len, body);
    if (num_keys) key_number = strstr(request, "gp-k") + 4;
}

int main(int argc, char **argv) {
    if (argc != 7 && argc != 8) {
        fprintf(stderr, "usage: load PORT CONNECTIONS SECONDS EXPECTED_EVENTS SPREAD_MS RATE [NUM_KEYS]\n");
        return 2;
    }
    int port = atoi(argv[1]), n = atoi(argv[2]);
    double seconds = atof(argv[3]);
    expected = atoi(argv[4]);
    target = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    long rate = atol(argv[6]);
    num_keys = argc > 7 ? atoi(argv[7]) : 0;
    make_request(port);
    ep = epoll_create1(0);
    ttft = malloc(MAX_SAMPLES * sizeof(int));
    gap = malloc(MAX_SAMPLES * sizeof(int));
    struct conn *conns = calloc(n, sizeof *conns);
    int64_t start = now_us(), end = start + (int64_t)(seconds * 1e6);
    for (int i = 0; i < n; i++) {
        dial(&conns[i]);
        conns[i].start_at_us = start + atol(argv[5]) * 1000LL * i / n;
    }
    struct epoll_event events[512];
    static char in[262144];
    int next = 0, timer = -1;
    if (rate) {
        idle = malloc(n * sizeof *idle);
        for (next = 0; next < n; next++) idle[num_idle++] = &conns[next];
        timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
        struct timespec each = {.tv_sec = rate == 1, .tv_nsec = 1000000000L / rate % 1000000000L};
        timerfd_settime(timer, 0, &(struct itimerspec){.it_interval = each, .it_value = each}, NULL);
        epoll_ctl(ep, EPOLL_CTL_ADD, timer, &(struct epoll_event){.events = EPOLLIN, .data.ptr = NULL});
    }
    while (now_us() < end) {
        int64_t now = now_us();
        while (next < n && conns[next].start_at_us <= now) ask(&conns[next++]);
        int k = epoll_wait(ep, events, 512, next < n ? 1 : 20);
        now = now_us();
        for (int i = 0; i < k; i++) {
            struct conn *c = events[i].data.ptr;
            if (!c) {
                uint64_t passed;
                if (read(timer, &passed, sizeof passed) == sizeof passed) num_due += (long)passed;
                continue;
            }
            ssize_t got = recv(c->fd, in, sizeof in, MSG_DONTWAIT);
            if (got < 0 && errno == EAGAIN) continue;
            if (got <= 0) { fail(c, "closed"); continue; }
            int before = c->num_events, state = feed(c, in, got, now);
            num_events += c->num_events - before;
            if (state < 0) { fail(c, "wrong answer"); continue; }
            if (state > 0) { num_streams++; num_open--; next_or_rest(c); }
        }
        for (; num_due && num_idle; num_due--) ask(idle[--num_idle]);
    }
    double elapsed = (now_us() - start) / 1e6;
    qsort(ttft, num_ttft, sizeof(int), by_value);
    qsort(gap, num_gap, sizeof(int), by_value);
    printf("{\"elapsed_s\":%.3f,\"streams\":%ld,\"events\":%ld,\"errors\":%ld,\"most_open\":%ld,\"ttft_us_p50\":%d,"
           "\"ttft_us_p99\":%d,\"gap_us_p50\":%d,\"gap_us_p99\":%d}\n",
           elapsed, num_streams, num_events, num_errors, most_open, quantile(ttft, num_ttft, 0.5),
           quantile(ttft, num_ttft, 0.99), quantile(gap, num_gap, 0.5), quantile(gap, num_gap, 0.99));
    return 0;
}
