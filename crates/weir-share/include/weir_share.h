/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A client of Weir's share transport in one header: pages of a volume, used where they lie. docs/share.md has the
 * format. One thread at a time may use a struct weir_share. Functions return 0 or a negative errno.
 *
 *     struct weir_share share;
 *     struct weir_lease lease;
 *     if (weir_share_connect(&share, "/run/weir/share.sock", 64, 64, 0) == 0 &&
 *         weir_share_read(&share, 42, &lease) == 0) {
 *             use(weir_share_page(&share, &lease));
 *             weir_share_give(&share, &lease);
 *     }
 *     weir_share_close(&share);
 */
#ifndef WEIR_SHARE_H
#define WEIR_SHARE_H

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define WEIR_SHARE_VERSION 2
#define WEIR_SHARE_PAGE 4096
#define WEIR_SHARE_NO_FRAME UINT32_MAX
#define WEIR_SHARE_WINDOWS_MAX 4
#define WEIR_SHARE_NAME_MAX 255
/* For weir_share_connect(): pages where the stores keep them, if the server lends them so. */
#define WEIR_SHARE_IN_PLACE 1u
/* Looks at the completion ring before sleeping. */
#define WEIR_SHARE_SPINS 2000

enum weir_share_op {
	WEIR_READ = 1,
	WEIR_WRITE = 2,
	WEIR_RESERVE = 3,
	WEIR_GIVE = 4,
	WEIR_DISCARD = 5,
	WEIR_READ_RUN = 6,
	WEIR_WRITE_RUN = 7,
};

/* Byte offsets of the indices in an area; each is a uint32_t on a cache line of its own. */
enum {
	WEIR_AT_SUBMITTED = 64,
	WEIR_AT_TAKEN = 128,
	WEIR_AT_COMPLETED = 192,
	WEIR_AT_SEEN = 256,
	WEIR_AT_SERVER_ASLEEP = 320,
	WEIR_AT_CLIENT_ASLEEP = 384,
};

/* A connection. */
struct weir_share {
	int socket, server_bell;
	unsigned char *area;
	uint64_t area_bytes;
	uint64_t pages; /* of the volume */
	uint32_t frames, entries;
	uint32_t submitted, seen;
	uint32_t windows;
	const unsigned char *window[WEIR_SHARE_WINDOWS_MAX];
	uint64_t window_bytes[WEIR_SHARE_WINDOWS_MAX];
};

/* A page that this client holds, until it gives it back: in a frame, or else in a slot of window - 1, to be read only. */
struct weir_lease {
	uint32_t token, frame, window, slot;
};

/* A request that has ended. */
struct weir_completion {
	uint32_t tag;
	int32_t status;
	struct weir_lease lease; /* frame WEIR_SHARE_NO_FRAME and window 0 where there is none */
};

static inline uint32_t *weir_share_index(const struct weir_share *share, int at)
{
	return (uint32_t *)(share->area + at);
}

static inline uint64_t weir_share_frames_at(uint32_t entries)
{
	uint64_t rings = WEIR_SHARE_PAGE + 2ull * entries * 32;

	return (rings + WEIR_SHARE_PAGE - 1) / WEIR_SHARE_PAGE * WEIR_SHARE_PAGE;
}

static inline void weir_share_close(struct weir_share *share)
{
	int *fds[] = { &share->socket, &share->server_bell };
	unsigned i;

	if (share->area)
		munmap(share->area, share->area_bytes);
	share->area = NULL;
	for (i = 0; i < WEIR_SHARE_WINDOWS_MAX; i++) {
		if (share->window[i])
			munmap((void *)share->window[i], share->window_bytes[i]);
		share->window[i] = NULL;
	}
	for (i = 0; i < 2; i++) {
		if (*fds[i] >= 0)
			close(*fds[i]);
		*fds[i] = -1;
	}
}

/* Maps a window and closes its descriptor. */
static inline int weir_share_open_window(struct weir_share *share, unsigned number, int fd)
{
	struct stat found;
	void *mapped = MAP_FAILED;
	int error = 0;

	if (fstat(fd, &found) == 0)
		mapped = mmap(NULL, (size_t)found.st_size, PROT_READ, MAP_SHARED, fd, 0);
	if (mapped == MAP_FAILED) {
		error = -errno;
	} else {
		share->window[number] = (const unsigned char *)mapped;
		share->window_bytes[number] = (uint64_t)found.st_size;
	}
	close(fd);
	return error;
}

/* Receives the welcome and its descriptors. */
static inline int weir_share_greet(struct weir_share *share, int *area)
{
	unsigned char text[64];
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE((2 + WEIR_SHARE_WINDOWS_MAX) * sizeof(int))];
	} control;
	struct iovec part = { text, sizeof(text) };
	struct msghdr message;
	struct cmsghdr *header;
	int fds[2 + WEIR_SHARE_WINDOWS_MAX], count = 0, i, error = 0;
	ssize_t received;
	int32_t status;
	uint32_t version;

	memset(&message, 0, sizeof(message));
	message.msg_iov = &part;
	message.msg_iovlen = 1;
	message.msg_control = &control;
	message.msg_controllen = sizeof(control);
	received = recvmsg(share->socket, &message, MSG_CMSG_CLOEXEC);
	/* Closed before our hello was read: the kernel says so once, before the refusal that it still holds. */
	if (received < 0 && errno == ECONNRESET)
		received = recvmsg(share->socket, &message, MSG_CMSG_CLOEXEC);
	if (received != sizeof(text))
		return received < 0 ? -errno : -EPROTO;
	for (header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
		if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
			count = (int)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
			memcpy(fds, CMSG_DATA(header), (size_t)count * sizeof(int));
		}
	}
	memcpy(&version, text + 8, 4);
	memcpy(&status, text + 12, 4);
	memcpy(&share->frames, text + 16, 4);
	memcpy(&share->entries, text + 20, 4);
	memcpy(&share->pages, text + 24, 8);
	memcpy(&share->windows, text + 32, 4);
	if (count >= 2) {
		*area = fds[0];
		share->server_bell = fds[1];
	}
	for (i = 2; i < count; i++) {
		int failed = weir_share_open_window(share, (unsigned)i - 2, fds[i]);

		error = error ? error : failed;
	}
	if (error != 0)
		return error;
	if (memcmp(text, "weirshar", 8) != 0)
		return -EPROTO;
	if (status != 0)
		return status < 0 ? status : -EPROTO;
	if (version != WEIR_SHARE_VERSION || count < 2 || share->windows != (uint32_t)count - 2 || share->entries < 2 || share->entries > 4096 ||
	    share->frames < 1 || share->frames > 4096)
		return -EPROTO;
	return 0;
}

/*
 * Connects to the volume of this name; "" is the daemon's own. The server may give fewer frames and entries (a power
 * of two) than asked for. Flags: WEIR_SHARE_IN_PLACE. -ENOENT: there is no such volume. -EPROTO: the server is of an
 * earlier version, which knows no names.
 */
static inline int weir_share_connect_to(struct weir_share *share, const char *path, const char *volume,
					uint32_t frames, uint32_t entries, uint32_t flags)
{
	struct sockaddr_un address;
	unsigned char hello[32 + WEIR_SHARE_NAME_MAX] = "weirshar";
	uint32_t version = WEIR_SHARE_VERSION;
	uint32_t name = (uint32_t)strlen(volume);
	struct stat found;
	int area = -1, error;
	void *mapped;

	memset(share, 0, sizeof(*share));
	share->socket = share->server_bell = -1;
	if (strlen(path) >= sizeof(address.sun_path) || strlen(volume) > WEIR_SHARE_NAME_MAX)
		return -ENAMETOOLONG;
	memset(&address, 0, sizeof(address));
	address.sun_family = AF_UNIX;
	strcpy(address.sun_path, path);
	memcpy(hello + 8, &version, 4);
	memcpy(hello + 12, &frames, 4);
	memcpy(hello + 16, &entries, 4);
	memcpy(hello + 20, &flags, 4);
	memcpy(hello + 24, &name, 4);
	memcpy(hello + 32, volume, name);
	share->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (share->socket < 0 || connect(share->socket, (struct sockaddr *)&address, sizeof(address)) != 0) {
		error = -errno;
		weir_share_close(share);
		return error;
	}
	/* A server without a free seat says so and closes before it has heard anything: hear it out. */
	if (send(share->socket, hello, 32 + name, MSG_NOSIGNAL) < 0 && errno != EPIPE)
		error = -errno;
	else
		error = weir_share_greet(share, &area);
	if (error == 0) {
		share->area_bytes = weir_share_frames_at(share->entries) + (uint64_t)share->frames * WEIR_SHARE_PAGE;
		if (fstat(area, &found) != 0)
			error = -errno;
		else if ((uint64_t)found.st_size < share->area_bytes)
			error = -EPROTO;
	}
	if (error == 0) {
		mapped = mmap(NULL, share->area_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, area, 0);
		if (mapped == MAP_FAILED)
			error = -errno;
		else
			share->area = (unsigned char *)mapped;
	}
	if (area >= 0)
		close(area);
	if (error != 0)
		weir_share_close(share);
	return error;
}

/* Connects to the daemon's own volume. */
static inline int weir_share_connect(struct weir_share *share, const char *path, uint32_t frames, uint32_t entries,
				     uint32_t flags)
{
	return weir_share_connect_to(share, path, "", frames, entries, flags);
}

/* The content of a frame that is held, to write; NULL for a page in a window. */
static inline void *weir_share_frame(const struct weir_share *share, const struct weir_lease *lease)
{
	if (lease->frame >= share->frames)
		return NULL;
	return share->area + weir_share_frames_at(share->entries) + (uint64_t)lease->frame * WEIR_SHARE_PAGE;
}

/* The content of a page that is held. */
static inline const void *weir_share_page(const struct weir_share *share, const struct weir_lease *lease)
{
	if (lease->window != 0)
		return share->window[lease->window - 1] + (uint64_t)lease->slot * WEIR_SHARE_PAGE;
	return weir_share_frame(share, lease);
}

/* Queues a request; weir_share_submit() sends it off. -EAGAIN when the ring is full. */
static inline int weir_share_ask(struct weir_share *share, enum weir_share_op op, uint32_t tag, uint64_t page,
				 uint32_t token, uint32_t count)
{
	uint32_t taken = __atomic_load_n(weir_share_index(share, WEIR_AT_TAKEN), __ATOMIC_ACQUIRE);
	uint64_t *entry;

	if (share->submitted - taken >= share->entries)
		return -EAGAIN;
	entry = (uint64_t *)(share->area + WEIR_SHARE_PAGE + (share->submitted % share->entries) * 32ull);
	entry[0] = (uint64_t)tag << 32 | (uint64_t)op;
	entry[1] = page;
	entry[2] = (uint64_t)count << 32 | token;
	entry[3] = 0;
	share->submitted++;
	return 0;
}

/* Sends off what was asked, and wakes the server if it sleeps. */
static inline int weir_share_submit(struct weir_share *share)
{
	uint32_t *asleep = weir_share_index(share, WEIR_AT_SERVER_ASLEEP);
	uint64_t one = 1;

	__atomic_store_n(weir_share_index(share, WEIR_AT_SUBMITTED), share->submitted, __ATOMIC_RELEASE);
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	if (__atomic_load_n(asleep, __ATOMIC_RELAXED) != 0) {
		__atomic_store_n(asleep, 0, __ATOMIC_RELAXED);
		if (write(share->server_bell, &one, sizeof(one)) != sizeof(one) && errno != EAGAIN)
			return -errno;
	}
	return 0;
}

/* Takes a completion if there is one: 1, or 0 if there is none. */
static inline int weir_share_poll(struct weir_share *share, struct weir_completion *done)
{
	const uint64_t *entry;

	if (__atomic_load_n(weir_share_index(share, WEIR_AT_COMPLETED), __ATOMIC_ACQUIRE) == share->seen)
		return 0;
	entry = (const uint64_t *)(share->area + WEIR_SHARE_PAGE +
				   (share->entries + share->seen % share->entries) * 32ull);
	done->tag = (uint32_t)entry[0];
	done->status = (int32_t)(entry[0] >> 32);
	done->lease.token = (uint32_t)entry[1];
	done->lease.frame = (uint32_t)(entry[1] >> 32);
	done->lease.window = (uint32_t)entry[2];
	done->lease.slot = (uint32_t)(entry[2] >> 32);
	share->seen++;
	__atomic_store_n(weir_share_index(share, WEIR_AT_SEEN), share->seen, __ATOMIC_RELEASE);
	if (done->status == 0 && done->lease.frame != WEIR_SHARE_NO_FRAME && done->lease.frame >= share->frames)
		return -EPROTO;
	if (done->lease.window > share->windows ||
	    (done->lease.window != 0 &&
	     (uint64_t)done->lease.slot * WEIR_SHARE_PAGE >= share->window_bytes[done->lease.window - 1]))
		return -EPROTO;
	return 1;
}

/* Waits for a completion. -EPIPE when the server has gone. */
static inline int weir_share_wait(struct weir_share *share, struct weir_completion *done)
{
	uint32_t *asleep = weir_share_index(share, WEIR_AT_CLIENT_ASLEEP);
	int spins, found;

	for (spins = 0; spins < WEIR_SHARE_SPINS; spins++) {
		found = weir_share_poll(share, done);
		if (found != 0)
			return found < 0 ? found : 0;
		/* The server may wait for this very CPU. */
		if (spins % 8 == 7)
			sched_yield();
	}
	for (;;) {
		struct pollfd fd = { share->socket, POLLIN, 0 };
		char rings[1];
		ssize_t received;

		__atomic_store_n(asleep, 1, __ATOMIC_RELAXED);
		__atomic_thread_fence(__ATOMIC_SEQ_CST);
		found = weir_share_poll(share, done);
		if (found != 0) {
			__atomic_store_n(asleep, 0, __ATOMIC_RELAXED);
			return found < 0 ? found : 0;
		}
		if (poll(&fd, 1, -1) < 0 && errno != EINTR)
			return -errno;
		do {
			received = recv(share->socket, rings, sizeof(rings), MSG_DONTWAIT);
		} while (received > 0 || (received < 0 && errno == EINTR));
		if (received < 0 && errno == EAGAIN)
			continue;
		if (received < 0 && errno != ECONNRESET)
			return -errno;
		/* The server has gone. What it completed before counts. */
		found = weir_share_poll(share, done);
		if (found != 0)
			return found < 0 ? found : 0;
		return -EPIPE;
	}
}

/* One request from beginning to end, while nothing else is under way. */
static inline int weir_share_do(struct weir_share *share, enum weir_share_op op, uint64_t page, uint32_t token,
				struct weir_lease *lease)
{
	struct weir_completion done;
	int error = weir_share_ask(share, op, 0, page, token, 0);

	memset(&done, 0, sizeof(done));
	if (error == 0)
		error = weir_share_submit(share);
	if (error == 0)
		error = weir_share_wait(share, &done);
	if (error == 0)
		error = done.status;
	if (error == 0 && lease)
		*lease = done.lease;
	return error;
}

/* Reads a page into a frame of the server's choice. */
static inline int weir_share_read(struct weir_share *share, uint64_t page, struct weir_lease *lease)
{
	return weir_share_do(share, WEIR_READ, page, 0, lease);
}

/* Gets an empty frame to write from. */
static inline int weir_share_reserve(struct weir_share *share, struct weir_lease *lease)
{
	return weir_share_do(share, WEIR_RESERVE, 0, 0, lease);
}

/* Makes the content of a frame the page's; the frame stays held. */
static inline int weir_share_write(struct weir_share *share, uint64_t page, const struct weir_lease *lease)
{
	return weir_share_do(share, WEIR_WRITE, page, lease->token, NULL);
}

/* Gives a frame back. */
static inline int weir_share_give(struct weir_share *share, const struct weir_lease *lease)
{
	int error = weir_share_ask(share, WEIR_GIVE, 0, 0, lease->token, 1);

	return error ? error : weir_share_submit(share);
}

#endif
