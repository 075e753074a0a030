/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* The part of the driver that the self-test of its queue calls. */
#include <linux/nodemask.h>
#include "nv-kthread-q.h"

static inline bool nv_numa_node_has_memory(int node)
{
	return node_state(node, N_MEMORY);
}
