// SPDX-License-Identifier: GPL-2.0
/*
 * Measures the cost of a token. A burst of payload arrives, and recvmsg() takes it, a part in each
 * call. Tokens go back, 32 a call, so that OUTSTANDING of them stay with each connection. In a guest
 * whose clock counts instructions, a nanosecond is an instruction.
 *
 *   devmem-tokens CONNECTIONS OUTSTANDING TOKENS ordered|random single|ranges
 *
 * It prints "get N put N close N held N ranges N":
 *   get, put   instructions a token, in recvmsg() and in SO_DEVMEM_DONTNEED
 *   close      instructions of the close() of a connection that its peer has reset, which drops the
 *              connection's fragments in that call
 *   held       the number of fragments that this connection held
 *   ranges     the number of tokens in a range
 */
#include "devmem.h"

#define BURST (256 * 1024)
#define RETURN 32
/* Room for data that the sender is ahead, and for the fragments of each connection at most. */
#define MEMORY (32ul << 20)
#define MOST(outstanding) ((outstanding) + 96ul)

struct connection {
	int fd;
	/* Tokens that were received and not yet returned. */
	uint32_t *held;
	unsigned int count;
};

static uint64_t time_of(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static uint64_t now(void)
{
	return time_of(CLOCK_MONOTONIC);
}

static uint64_t nanoseconds_get, nanoseconds_put, nanoseconds_close;
static unsigned long got, returned, ranges, closed, held;
static bool at_random, merged;

/* Returns the oldest tokens, or some at random. Each of them must be accepted. */
static void return_some(struct connection *c)
{
	struct dmabuf_token tokens[RETURN];
	unsigned int used = 0, i;
	uint64_t start;
	int freed;

	for (i = 0; at_random && i < RETURN; i++) {
		unsigned int other = i + rand() % (c->count - i);
		uint32_t token = c->held[i];

		c->held[i] = c->held[other];
		c->held[other] = token;
	}
	for (i = 0; i < RETURN; i++) {
		struct dmabuf_token *last = &tokens[used - 1];

		if (merged && used && c->held[i] == last->token_start + last->token_count)
			last->token_count++;
		else
			tokens[used++] = (struct dmabuf_token){ c->held[i], 1 };
	}
	start = now();
	freed = give_back(c->fd, tokens, used);
	nanoseconds_put += now() - start;
	if (freed != RETURN) {
		fprintf(stderr, "%d of %d tokens accepted\n", freed, RETURN);
		exit(1);
	}
	c->count -= RETURN;
	memmove(c->held, c->held + RETURN, c->count * sizeof(*c->held));
	returned += RETURN;
	ranges += used;
}

static void take_burst(struct connection *c, unsigned int outstanding)
{
	size_t received = 0;

	while (received < BURST) {
		struct msghdr message;
		uint64_t start;
		ssize_t length;
		unsigned int count;

		wait_for_data(c->fd);
		start = now();
		length = receive(c->fd, &message);
		nanoseconds_get += now() - start;
		if (length < 0 && errno == EAGAIN)
			continue;
		if (length <= 0)
			die("recvmsg");
		received += length;
		count = tokens_of(&message, c->held + c->count, 4096);
		c->count += count;
		got += count;
		while (c->count >= outstanding + RETURN)
			return_some(c);
	}
}

int main(int argc, char **argv)
{
	unsigned int connections, outstanding, i;
	struct connection *all;
	struct rlimit files;
	unsigned long want;
	uint64_t start;
	int listener, go[2];
	pid_t sender;

	if (argc != 6) {
		fprintf(stderr, "devmem-tokens: want CONNECTIONS OUTSTANDING TOKENS ORDER RANGES\n");
		return 2;
	}
	connections = atoi(argv[1]);
	outstanding = atoi(argv[2]);
	want = atol(argv[3]);
	at_random = !strcmp(argv[4], "random");
	merged = !strcmp(argv[5], "ranges");
	files = (struct rlimit){ connections + 100, connections + 100 };
	setrlimit(RLIMIT_NOFILE, &files);
	bind_dmabuf(MEMORY + connections * MOST(outstanding) * getpagesize());
	listener = listen_here();
	if (pipe(go))
		die("pipe");
	sender = fork();
	if (!sender) {
		int *fds = calloc(connections, sizeof(*fds));
		static char data[BURST];
		char word;

		close(go[1]);
		for (i = 0; i < connections; i++)
			fds[i] = connect_from_peer();
		for (i = 0; read(go[0], &word, 1) == 1; i = (i + 1) % connections)
			send_all(fds[i], data, BURST);
		for (i = 0; i < connections; i++) {
			struct linger reset = { .l_onoff = 1 };

			setsockopt(fds[i], SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
			close(fds[i]);
		}
		_exit(0);
	}
	all = calloc(connections, sizeof(*all));
	for (i = 0; i < connections; i++) {
		all[i].fd = accept(listener, NULL, NULL);
		all[i].held = malloc((outstanding + 8192) * sizeof(*all[i].held));
		if (all[i].fd < 0 || !all[i].held)
			die("accept");
	}
	for (i = 0; got < want; i = (i + 1) % connections) {
		if (write(go[1], "x", 1) != 1)
			die("write");
		/* By then the burst has arrived, so that recvmsg() alone is counted. */
		usleep(20000);
		take_burst(&all[i], outstanding);
	}
	close(go[1]);
	waitpid(sender, NULL, 0);
	/* By then the last reset has arrived. */
	usleep(100000);
	for (i = 0; i < connections; i++) {
		if (!all[i].count)
			continue;
		/* This thread's clock: another process that runs meanwhile would weigh too much. */
		start = time_of(CLOCK_THREAD_CPUTIME_ID);
		close(all[i].fd);
		nanoseconds_close += time_of(CLOCK_THREAD_CPUTIME_ID) - start;
		closed++;
		held += all[i].count;
	}
	printf("get %.1f put %.1f close %.0f held %.0f ranges %.2f\n", (double)nanoseconds_get / got,
	       (double)nanoseconds_put / returned, (double)nanoseconds_close / closed,
	       (double)held / closed, (double)returned / ranges);
	return 0;
}
