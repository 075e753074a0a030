/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The parts that all clients have: a dma-buf bound to a queue of the fake NIC, a sender behind the
 * other device, and the tokens of one recvmsg(). Built as one file with each client.
 */
#define _GNU_SOURCE
#define __EXPORTED_HEADERS__
#include <linux/uio.h>
#define __iovec_defined
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <linux/ethtool_netlink.h>
#include <linux/netdev.h>
#include <linux/udmabuf.h>
#include "ethtool-user.h"
#include "netdev-user.h"
#include <ynl.h>

#ifndef MSG_SOCK_DEVMEM
#define MSG_SOCK_DEVMEM 0x2000000
#endif

/* As the scenarios set the devices up. */
#define DEVICE "fnic0"
#define QUEUE 3
#define ADDRESS "192.0.2.1"
#define PEER "/run/netns/peer"
#define PORT 5900
/* Longer than any wait for data that the sender has sent. */
#define STALL_MS 20000

static void die(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, strerror(errno));
	exit(1);
}

static void refused(const char *what, struct ynl_sock *ys)
{
	fprintf(stderr, "%s: %s\n", what, ys->err.msg);
	exit(1);
}

#define HUGE_PAGE (2ul << 20)

/*
 * Binds a dma-buf of system memory to QUEUE. The binding lasts until the returned socket is destroyed,
 * or until this process and all that inherited the socket have ended. NULL if the kernel refuses it.
 */
static struct ynl_sock *try_bind_dmabuf(size_t size, bool huge)
{
	struct udmabuf_create create = { .size = size };
	struct ethtool_rings_set_req *rings = ethtool_rings_set_req_alloc();
	struct netdev_bind_rx_req *bind = netdev_bind_rx_req_alloc();
	struct netdev_queue_id *queue = netdev_queue_id_alloc(1);
	int device = open("/dev/udmabuf", O_RDWR), ifindex = if_nametoindex(DEVICE), fd;
	struct netdev_bind_rx_rsp *bound;
	struct ynl_error error;
	struct ynl_sock *ys;

	ys = ynl_sock_create(&ynl_ethtool_family, &error);
	if (!ys || device < 0)
		die("ynl or /dev/udmabuf");
	ethtool_rings_set_req_set_header_dev_index(rings, ifindex);
	ethtool_rings_set_req_set_tcp_data_split(rings, ETHTOOL_TCP_DATA_SPLIT_ENABLED);
	ethtool_rings_set_req_set_hds_thresh(rings, 0);
	if (ethtool_rings_set(ys, rings) < 0)
		refused("header split", ys);
	ethtool_rings_set_req_free(rings);
	ynl_sock_destroy(ys);
	create.memfd = memfd_create("devmem", MFD_ALLOW_SEALING | (huge ? MFD_HUGETLB : 0));
	if (fcntl(create.memfd, F_ADD_SEALS, F_SEAL_SHRINK) || ftruncate(create.memfd, size))
		die("memfd");
	fd = ioctl(device, UDMABUF_CREATE, &create);
	if (fd < 0)
		die("UDMABUF_CREATE");
	ys = ynl_sock_create(&ynl_netdev_family, &error);
	if (!ys)
		die("ynl");
	netdev_queue_id_set_type(queue, NETDEV_QUEUE_TYPE_RX);
	netdev_queue_id_set_id(queue, QUEUE);
	netdev_bind_rx_req_set_ifindex(bind, ifindex);
	netdev_bind_rx_req_set_fd(bind, fd);
	__netdev_bind_rx_req_set_queues(bind, queue, 1);
	bound = netdev_bind_rx(ys, bind);
	netdev_bind_rx_req_free(bind);
	close(fd);
	close(create.memfd);
	close(device);
	if (!bound) {
		fprintf(stderr, "bind-rx: %s\n", ys->err.msg);
		ynl_sock_destroy(ys);
		return NULL;
	}
	netdev_bind_rx_rsp_free(bound);
	return ys;
}

/* Binds a dma-buf for as long as this process lives. */
static void bind_dmabuf(size_t size)
{
	if (!try_bind_dmabuf(size, false))
		exit(1);
}

static struct sockaddr_in server_address(void)
{
	return (struct sockaddr_in){
		.sin_family = AF_INET,
		.sin_port = htons(PORT),
		.sin_addr.s_addr = inet_addr(ADDRESS),
	};
}

static int listen_here(void)
{
	int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1, room = 4 << 20;
	struct sockaddr_in address = server_address();

	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof(room));
	if (bind(fd, (void *)&address, sizeof(address)) || listen(fd, 4096))
		die("listen");
	return fd;
}

/* Connects from behind the other device. For the sender, in a process of its own. */
static int connect_from_peer(void)
{
	int ns = open(PEER, O_RDONLY), room = 8 << 20, fd;
	struct sockaddr_in address = server_address();

	if (ns < 0 || setns(ns, CLONE_NEWNET))
		die(PEER);
	close(ns);
	fd = socket(AF_INET, SOCK_STREAM, 0);
	setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof(room));
	if (connect(fd, (void *)&address, sizeof(address)))
		die("connect");
	return fd;
}

static void send_all(int fd, const char *data, size_t length)
{
	while (length) {
		ssize_t sent = write(fd, data, length);

		if (sent <= 0)
			die("write");
		data += sent;
		length -= sent;
	}
}

static void wait_for_data(int fd)
{
	struct pollfd poll_fd = { .fd = fd, .events = POLLIN };

	if (poll(&poll_fd, 1, STALL_MS) != 1) {
		fprintf(stderr, "no data for %d ms\n", STALL_MS);
		exit(1);
	}
}

static int give_back(int fd, const struct dmabuf_token *tokens, unsigned int count)
{
	return setsockopt(fd, SOL_SOCKET, SO_DEVMEM_DONTNEED, tokens, count * sizeof(*tokens));
}

/* Whole pages, for a client that takes them away. */
static char control[64 * 1024] __attribute__((aligned(4096)));
static char linear[1 << 20];

static ssize_t receive(int fd, struct msghdr *message)
{
	static struct iovec iov = { linear, sizeof(linear) };

	*message = (struct msghdr){
		.msg_iov = &iov,
		.msg_iovlen = 1,
		.msg_control = control,
		.msg_controllen = sizeof(control),
	};
	return recvmsg(fd, message, MSG_SOCK_DEVMEM | MSG_DONTWAIT);
}

/* The tokens of a message, at most `room` of them. */
static unsigned int tokens_of(struct msghdr *message, uint32_t *tokens, unsigned int room)
{
	unsigned int count = 0;

	for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_DEVMEM_DMABUF)
			continue;
		if (count == room) {
			fprintf(stderr, "more than %u tokens in one message\n", room);
			exit(1);
		}
		tokens[count++] = ((struct dmabuf_cmsg *)CMSG_DATA(c))->frag_token;
	}
	return count;
}
