// SPDX-License-Identifier: GPL-2.0
/*
 * Does to device memory, at random, all that a program may do. It binds and unbinds a dma-buf while
 * data arrives, closes sockets that hold fragments, and forks processes that inherit them. Two
 * threads and all of those processes return fragments, some twice, some that were never reported.
 * Some of the sockets that hold fragments listen before they are closed.
 *
 * The test passes if it comes to its end. The kernel's sanitizers report errors.
 *
 *   devmem-stress SECONDS SEED
 *
 * "rounds N binds N told N returned N closed N forked N listened N"
 */
#include "devmem.h"

#define CONNECTIONS 8
#define KNOWN 4096
#define CHILDREN 16
/* A binding ends some time after the last process that inherited its socket. */
#define BIND_TRIES 400

static struct {
	unsigned long rounds, binds, told, returned, closed, forked, listened;
} *done;

/* The tokens that were reported last, each with the index of its connection. 0 is no token. */
static struct {
	uint32_t token;
	unsigned int at;
} known[KNOWN];
static int connection[CONNECTIONS];
static volatile bool stop;

static void count(unsigned long *what, unsigned long by)
{
	__atomic_fetch_add(what, by, __ATOMIC_RELAXED);
}

static uint32_t some(uint64_t *state, uint32_t below)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return (*state >> 16) % below;
}

static uint64_t milliseconds(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000ull + t.tv_nsec / 1000000;
}

/* Returns a few tokens in one call: known ones, for the first time or again, and guesses. */
static void return_some(uint64_t *state)
{
	struct dmabuf_token tokens[8];
	unsigned int used = 1 + some(state, 8), at = some(state, CONNECTIONS);
	int freed;

	for (unsigned int i = 0; i < used; i++) {
		unsigned int place = some(state, KNOWN);
		uint32_t token = known[place].token;

		if (token) {
			at = known[place].at;
			if (some(state, 4))
				known[place].token = 0;
		}
		if (!some(state, 16))
			token += some(state, 64);
		tokens[i] = (struct dmabuf_token){ token, some(state, 8) ? 1 : 1 + some(state, 100) };
	}
	freed = give_back(connection[at], tokens, used);
	if (freed > 0)
		count(&done->returned, freed);
}

static void *return_all_the_time(void *seed)
{
	uint64_t state = (uintptr_t)seed;

	while (!stop) {
		return_some(&state);
		/* The receiver needs processor time, too, on the slowest of kernels. */
		usleep(some(&state, 4000));
	}
	return NULL;
}

/* Receives the data that has arrived. False if the connection is of no more use. */
static bool take(unsigned int at)
{
	static uint32_t tokens[4096];
	static unsigned int next;
	struct msghdr message;
	ssize_t length = receive(connection[at], &message);
	unsigned int told;

	if (length <= 0)
		return length < 0 && errno == EAGAIN;
	told = tokens_of(&message, tokens, 4096);
	for (unsigned int i = 0; i < told; i++, next = (next + 1) % KNOWN) {
		known[next].at = at;
		known[next].token = tokens[i];
	}
	count(&done->told, told);
	return true;
}

/* The socket leaves its connection and listens. A connection to it begins as a copy of the socket. */
static void listen_and_accept(int fd)
{
	struct sockaddr nobody = { .sa_family = AF_UNSPEC };
	struct sockaddr_in here = server_address();
	socklen_t size = sizeof(here);
	int client, accepted;

	if (connect(fd, &nobody, sizeof(nobody)) || listen(fd, 1) ||
	    getsockname(fd, (void *)&here, &size))
		die("listen");
	here.sin_addr.s_addr = inet_addr(ADDRESS);
	client = socket(AF_INET, SOCK_STREAM, 0);
	if (connect(client, (void *)&here, sizeof(here)))
		die("connect");
	accepted = accept(fd, NULL, NULL);
	if (accepted < 0)
		die("accept");
	close(accepted);
	close(client);
	count(&done->listened, 1);
}

static void send_at_random(uint64_t state)
{
	static char data[256 * 1024];
	int fds[CONNECTIONS];
	unsigned int open = 0;

	while (true) {
		unsigned int at = some(&state, CONNECTIONS);

		if (at >= open && open < CONNECTIONS)
			fds[at = open++] = connect_from_peer();
		if (send(fds[at], data, 1 + some(&state, sizeof(data)), MSG_DONTWAIT | MSG_NOSIGNAL) < 0 &&
		    errno != EAGAIN) {
			close(fds[at]);
			fds[at] = fds[--open];
		}
		usleep(some(&state, 3000));
	}
}

/* Forks a process that has the sockets, too, and ends before or after they are closed. */
static pid_t inherit(uint64_t seed, struct ynl_sock *binding)
{
	pid_t child = fork();
	uint64_t until;

	if (child)
		return child;
	if (binding)
		close(binding->socket);
	until = milliseconds() + some(&seed, 400);
	while (milliseconds() < until) {
		return_some(&seed);
		if (!some(&seed, 8))
			take(some(&seed, CONNECTIONS));
		usleep(some(&seed, 4000));
	}
	_exit(0);
}

static struct ynl_sock *bind_again(uint64_t *state)
{
	for (int tries = 0; tries < BIND_TRIES; tries++) {
		struct ynl_sock *binding = try_bind_dmabuf((4ul + some(state, 13)) << 20, false);

		if (binding) {
			count(&done->binds, 1);
			return binding;
		}
		usleep(50000);
	}
	fprintf(stderr, "the queue is never free again\n");
	exit(1);
}

/* Runs for some seconds in a process of its own. Its end closes the sockets that are still open. */
static void round_of(uint64_t state)
{
	struct ynl_sock *binding = bind_again(&state);
	int listener = listen_here(), children = 0;
	pid_t child[CHILDREN], sender;
	pthread_t threads[2];
	uint64_t until;

	fcntl(listener, F_SETFL, O_NONBLOCK);
	for (unsigned int i = 0; i < CONNECTIONS; i++)
		connection[i] = -1;
	sender = fork();
	if (!sender) {
		close(binding->socket);
		close(listener);
		send_at_random(state ^ 0x5eed);
	}
	for (unsigned int i = 0; i < 2; i++)
		if (pthread_create(&threads[i], NULL, return_all_the_time, (void *)(uintptr_t)(state + i)))
			die("thread");
	until = milliseconds() + 1000 + some(&state, 3000);
	while (milliseconds() < until) {
		unsigned int at = some(&state, CONNECTIONS);

		if (connection[at] < 0)
			connection[at] = accept(listener, NULL, NULL);
		else if (!take(at) || !some(&state, 60)) {
			if (some(&state, 2))
				listen_and_accept(connection[at]);
			close(connection[at]);
			connection[at] = -1;
			count(&done->closed, 1);
		}
		if (!some(&state, 40) && children < CHILDREN) {
			child[children++] = inherit(state, binding);
			count(&done->forked, 1);
		}
		if (binding && !some(&state, 150)) {
			ynl_sock_destroy(binding);
			binding = NULL;
		} else if (!binding && !some(&state, 20)) {
			binding = bind_again(&state);
		}
		if (!some(&state, 4))
			usleep(some(&state, 2000));
	}
	stop = true;
	for (unsigned int i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
	kill(sender, SIGKILL);
	waitpid(sender, NULL, 0);
	while (children)
		waitpid(child[--children], NULL, 0);
	_exit(0);
}

int main(int argc, char **argv)
{
	uint64_t until, seed;

	if (argc != 3) {
		fprintf(stderr, "devmem-stress: want SECONDS SEED\n");
		return 2;
	}
	until = milliseconds() + atol(argv[1]) * 1000ull;
	seed = atoll(argv[2]);
	done = mmap(NULL, sizeof(*done), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (done == MAP_FAILED)
		die("mmap");
	while (milliseconds() < until) {
		pid_t child = fork();
		int status;

		if (!child)
			round_of((seed + done->rounds) * 0x9e3779b97f4a7c15ull | 1);
		if (waitpid(child, &status, 0) != child || status) {
			fprintf(stderr, "round %lu ended with %#x\n", done->rounds, status);
			return 1;
		}
		done->rounds++;
	}
	printf("rounds %lu binds %lu told %lu returned %lu closed %lu forked %lu listened %lu\n",
	       done->rounds, done->binds, done->told, done->returned, done->closed, done->forked,
	       done->listened);
	return 0;
}
