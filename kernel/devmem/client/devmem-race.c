// SPDX-License-Identifier: GPL-2.0
/*
 * One thread receives fragments and returns each; another returns numbers that it guesses, all the
 * time. Whoever returns a fragment, nobody may be told less than all of them were returned.
 *
 *   devmem-race BURSTS    "told N by-receiver N by-guesser N lost N"
 */
#include "devmem.h"

#define BURST (64 * 1024)
#define GUESSES 40
#define MEMORY (32 << 20)

static int receiver;
static volatile bool stop;
static volatile uint32_t last;
static unsigned long guessed;

static void *guess(void *unused)
{
	while (!stop) {
		/* The numbers that a table begins with, and those that come next. */
		struct dmabuf_token tokens[] = { { 1, GUESSES }, { last + 1, GUESSES } };
		int freed = give_back(receiver, tokens, 2);

		if (freed > 0)
			guessed += freed;
	}
	return unused;
}

int main(int argc, char **argv)
{
	int bursts = argc > 1 ? atoi(argv[1]) : 400, listener;
	unsigned long told = 0, returned = 0;
	static uint32_t tokens[4096];
	pthread_t thread;
	pid_t sender;

	bind_dmabuf(MEMORY);
	listener = listen_here();
	sender = fork();
	if (!sender) {
		static char data[BURST];
		int fd = connect_from_peer();

		while (bursts--)
			send_all(fd, data, sizeof(data));
		_exit(0);
	}
	receiver = accept(listener, NULL, NULL);
	if (receiver < 0 || pthread_create(&thread, NULL, guess, NULL))
		die("accept or thread");
	for (;;) {
		struct msghdr message;
		unsigned int count;
		ssize_t length;

		wait_for_data(receiver);
		length = receive(receiver, &message);
		if (length < 0 && errno == EAGAIN)
			continue;
		if (length < 0)
			die("recvmsg");
		if (!length)
			break;
		count = tokens_of(&message, tokens, 4096);
		told += count;
		for (unsigned int i = 0; i < count; i++) {
			struct dmabuf_token token = { tokens[i], 1 };
			int freed = give_back(receiver, &token, 1);

			last = tokens[i];
			if (freed > 0)
				returned += freed;
		}
	}
	stop = true;
	pthread_join(thread, NULL);
	waitpid(sender, NULL, 0);
	printf("told %lu by-receiver %lu by-guesser %lu lost %ld\n", told, returned, guessed,
	       (long)(told - returned - guessed));
	return 0;
}
