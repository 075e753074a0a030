// SPDX-License-Identifier: GPL-2.0
/*
 * Measures the memory that the tokens of many sockets take. It reads the kernel's slabs once all
 * sockets are connected and none has received anything. It reads them again once each socket holds
 * so many fragments.
 *
 *   devmem-many CONNECTIONS FRAGMENTS [ROUNDS]
 *
 * In each of ROUNDS further rounds every connection receives as many fragments again, and returns as
 * many of all that it holds, one by one and at random.
 *
 * It prints a line "CACHE OBJECTS BYTES" for each slab cache that grew or shrank by a page or more.
 * The line "all 0 BYTES" is the sum.
 */
#include "devmem.h"

#define CACHES 512
/* Room beyond the fragments that sockets hold: for data on its way, and for the queue itself. */
#define SPARE (64ul << 20)

struct cache {
	char name[64];
	long objects, bytes;
};

/* Reads the bytes of all slabs that hold an object. Slabs without an object are given back first. */
static unsigned int read_caches(struct cache *caches)
{
	unsigned int count = 0;
	char line[512];
	FILE *file;

	if (system("for cache in /sys/kernel/slab/*/shrink; do echo 1 >$cache; done"))
		die("shrink");
	file = fopen("/proc/slabinfo", "r");
	if (!file)
		die("/proc/slabinfo");
	while (fgets(line, sizeof(line), file)) {
		struct cache *c = &caches[count];
		long pages, slabs;

		if (sscanf(line, "%63s %ld %*d %*d %*d %ld : tunables %*d %*d %*d : slabdata %*d %ld",
			   c->name, &c->objects, &pages, &slabs) != 4)
			continue;
		c->bytes = slabs * pages * getpagesize();
		if (++count == CACHES) {
			fprintf(stderr, "more than %u slab caches\n", CACHES);
			exit(1);
		}
	}
	fclose(file);
	return count;
}

/* The fragments that a connection holds. */
struct holding {
	unsigned int held;
	uint32_t *tokens;
};

/*
 * Receives all that was sent, keeps `fragments` fragments, and returns the others: the last ones, or
 * some at random.
 */
static void hold(int fd, struct holding *holding, size_t length, unsigned int fragments, bool random_order)
{
	static uint32_t tokens[4096];
	unsigned int held = holding->held;
	size_t received = 0;

	memcpy(tokens, holding->tokens, held * sizeof(*tokens));

	while (received < length) {
		struct msghdr message;
		ssize_t more;

		wait_for_data(fd);
		more = receive(fd, &message);
		if (more < 0 && errno == EAGAIN)
			continue;
		if (more <= 0)
			die("recvmsg");
		received += more;
		held += tokens_of(&message, tokens + held, 4096 - held);
	}
	for (; held > fragments; held--) {
		unsigned int which = random_order ? random() % held : held - 1;
		struct dmabuf_token returned = { tokens[which], 1 };

		if (give_back(fd, &returned, 1) != 1)
			die("a token was refused");
		tokens[which] = tokens[held - 1];
	}
	if (held != fragments) {
		fprintf(stderr, "%zu bytes came as %u fragments, want %u\n", length, held, fragments);
		exit(1);
	}
	holding->held = held;
	memcpy(holding->tokens, tokens, held * sizeof(*tokens));
}

int main(int argc, char **argv)
{
	static struct cache before[CACHES], after[CACHES];
	unsigned int connections, fragments, rounds = 0, round, i, j, count;
	struct holding *holdings;
	size_t length, size;
	struct rlimit files;
	int listener, go[2], *fds;
	pid_t sender;
	long all = 0;
	char word;

	if (argc != 3 && argc != 4) {
		fprintf(stderr, "devmem-many: want CONNECTIONS FRAGMENTS [ROUNDS]\n");
		return 2;
	}
	if (argc == 4)
		rounds = atoi(argv[3]);
	connections = atoi(argv[1]);
	fragments = atoi(argv[2]);
	length = (size_t)fragments * getpagesize();
	size = (connections * length + SPARE + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
	files = (struct rlimit){ connections + 100, connections + 100 };
	setrlimit(RLIMIT_NOFILE, &files);
	/* Huge pages make few pieces. The kernel looks for a free page in each piece. */
	if (!try_bind_dmabuf(size, true))
		return 1;
	fds = calloc(connections, sizeof(*fds));
	holdings = calloc(connections, sizeof(*holdings));
	listener = listen_here();
	if (pipe(go))
		die("pipe");
	sender = fork();
	if (!sender) {
		char *data = calloc(1, length);

		close(go[1]);
		for (i = 0; i < connections; i++)
			fds[i] = connect_from_peer();
		for (i = 0; read(go[0], &word, 1) == 1; i++)
			send_all(fds[i % connections], data, length);
		_exit(0);
	}
	for (i = 0; i < connections; i++) {
		fds[i] = accept(listener, NULL, NULL);
		if (fds[i] < 0)
			die("accept");
		holdings[i].tokens = calloc(fragments, sizeof(*holdings[i].tokens));
	}
	read_caches(before);
	for (round = 0; round <= rounds; round++) {
		for (i = 0; i < connections; i++) {
			if (write(go[1], "x", 1) != 1)
				die("write");
			hold(fds[i], &holdings[i], length, fragments, round > 0);
		}
	}
	/* By then the last acknowledgements and the received packets are gone. */
	sleep(2);
	count = read_caches(after);
	for (i = 0; i < count; i++) {
		for (j = 0; j < CACHES && strcmp(before[j].name, after[i].name); j++)
			;
		if (j < CACHES) {
			after[i].objects -= before[j].objects;
			after[i].bytes -= before[j].bytes;
		}
		all += after[i].bytes;
		if (after[i].bytes)
			printf("%s %ld %ld\n", after[i].name, after[i].objects, after[i].bytes);
	}
	printf("all 0 %ld\n", all);
	close(go[1]);
	waitpid(sender, NULL, 0);
	return 0;
}
