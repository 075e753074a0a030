// SPDX-License-Identifier: GPL-2.0
/*
 * Looks for fragments that are lost because they are returned too early.
 *
 * One thread receives fragments and returns each. A second thread returns numbers that it guesses,
 * all the time. A third thread guesses while recvmsg() waits for a page of its control buffer. At
 * that moment recvmsg() has chosen a token and not yet stored its fragment. Together the threads
 * must be told that they returned all fragments.
 *
 *   devmem-race BURSTS    "told N by-receiver N by-guesser N lost N held N"
 *
 * "held" is the number of times that recvmsg() waited.
 */
#include "devmem.h"
#include <linux/userfaultfd.h>
#include <sys/syscall.h>

#define BURST (64 * 1024)
#define GUESSES 40
#define MEMORY (32 << 20)

static int receiver;
static volatile bool stop;
static volatile uint32_t last;
static unsigned long guessed, held;
static int faults;

static void guess_once(void)
{
	/* The first numbers of an xarray, and the numbers after the last token. */
	struct dmabuf_token tokens[] = { { 1, GUESSES }, { last + 1, GUESSES } };
	int freed = give_back(receiver, tokens, 2);

	if (freed > 0)
		__atomic_fetch_add(&guessed, freed, __ATOMIC_RELAXED);
}

static void *guess(void *unused)
{
	while (!stop)
		guess_once();
	return unused;
}

/* recvmsg() waits where it first writes to a page, until this thread has guessed and gives the page. */
static void *guess_while_it_waits(void *unused)
{
	struct uffd_msg fault;

	while (read(faults, &fault, sizeof(fault)) == sizeof(fault)) {
		struct uffdio_zeropage page = {
			.range.start = fault.arg.pagefault.address & ~(getpagesize() - 1ull),
			.range.len = getpagesize(),
		};

		guess_once();
		held++;
		ioctl(faults, UFFDIO_ZEROPAGE, &page);
	}
	return unused;
}

static void hold_receiver_back(void)
{
	struct uffdio_register all = {
		.range = { (uintptr_t)control, sizeof(control) },
		.mode = UFFDIO_REGISTER_MODE_MISSING,
	};
	struct uffdio_api api = { .api = UFFD_API };
	pthread_t thread;

	faults = syscall(__NR_userfaultfd, O_CLOEXEC);
	if (faults < 0 || ioctl(faults, UFFDIO_API, &api) || ioctl(faults, UFFDIO_REGISTER, &all) ||
	    pthread_create(&thread, NULL, guess_while_it_waits, NULL))
		die("userfaultfd");
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
	hold_receiver_back();
	for (;;) {
		struct msghdr message;
		unsigned int count;
		ssize_t length;

		wait_for_data(receiver);
		if (madvise(control, sizeof(control), MADV_DONTNEED))
			die("madvise");
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
	printf("told %lu by-receiver %lu by-guesser %lu lost %ld held %lu\n", told, returned, guessed,
	       (long)(told - returned - guessed), held);
	return 0;
}
