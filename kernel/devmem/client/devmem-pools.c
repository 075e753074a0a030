// SPDX-License-Identifier: GPL-2.0
/*
 * Prints the number of page pools that hold device memory or wait for fragments, and the number of
 * those fragments.
 */
#include "devmem.h"

int main(void)
{
	struct ynl_error error;
	struct ynl_sock *ys = ynl_sock_create(&ynl_netdev_family, &error);
	unsigned long pools = 0, fragments = 0;
	struct netdev_page_pool_get_list *list;

	if (!ys)
		die("ynl");
	list = netdev_page_pool_get_dump(ys, calloc(1, sizeof(struct netdev_page_pool_get_req_dump)));
	if (!list)
		refused("page-pool-get", ys);
	ynl_dump_foreach(list, pool) {
		if (!pool->_present.detach_time && !pool->_present.dmabuf)
			continue;
		pools++;
		fragments += pool->_present.inflight ? pool->inflight : 0;
	}
	printf("%lu %lu\n", pools, fragments);
	return 0;
}
