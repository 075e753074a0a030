/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* What the driver's self-test of its queue takes from the driver. */
#include <linux/nodemask.h>
#include "nv-kthread-q.h"

static inline bool nv_numa_node_has_memory(int node)
{
	return node_state(node, N_MEMORY);
}
