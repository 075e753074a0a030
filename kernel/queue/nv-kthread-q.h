/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * The interface of the NVIDIA driver's deferred-work queue, nv_kthread_q, as
 * its callers use it, over one of three designs:
 *
 *   WEIR_QUEUE_LLIST      ours: lock-free list, taken whole by one exchange
 *   WEIR_QUEUE_SEMAPHORE  as in the driver: lock, list, one semaphore count an item
 *   WEIR_QUEUE_BATCH      as in pull request 1050: lock, list spliced whole,
 *                         woken when the count of pending items leaves 0
 *
 * With none defined it is ours. Written from the interface's contract, so that
 * a caller of the driver's header compiles against this one unchanged.
 *
 * The contract, for every design:
 *  - items belong to the caller and lie in the caller's data; nothing is
 *    allocated once a queue is initialised;
 *  - an item that is pending is not queued twice, and the run to come sees all
 *    that its scheduler did before it was told so;
 *  - what that scheduler queues then runs after the item, a flush's end too
 *    (WEIR_QUEUE_LLIST does not keep this one);
 *  - an item is out of the queue before its function runs: the function may
 *    schedule it again, initialise it again, or free it;
 *  - items of one scheduling context run in its order, on one thread;
 *  - scheduling is allowed in any context, hard interrupts included.
 */
#ifndef __NV_KTHREAD_QUEUE_H__
#define __NV_KTHREAD_QUEUE_H__

#include <linux/atomic.h>
#include <linux/list.h>
#include <linux/llist.h>
#include <linux/numa.h>
#include <linux/sched.h>
#include <linux/semaphore.h>
#include <linux/spinlock.h>
#include <linux/types.h>
#include <linux/wait.h>

typedef struct nv_kthread_q nv_kthread_q_t;
typedef struct nv_kthread_q_item nv_kthread_q_item_t;
typedef void (*nv_q_func_t)(void *args);

struct nv_kthread_q {
#if defined(WEIR_QUEUE_SEMAPHORE)
	struct list_head q_list_head;
	spinlock_t q_lock;
	struct semaphore q_sem;
#elif defined(WEIR_QUEUE_BATCH)
	struct list_head q_list_head;
	spinlock_t q_lock;
	wait_queue_head_t q_wait_queue;
	atomic_t pending_count;
#else
	struct llist_head q_incoming;
#endif
	atomic_t main_loop_should_exit;
	struct task_struct *q_kthread;
};

struct nv_kthread_q_item {
#if defined(WEIR_QUEUE_SEMAPHORE)
	struct list_head q_list_node;
#elif defined(WEIR_QUEUE_BATCH)
	struct list_head q_list_node;
	atomic_t pending;
#else
	struct llist_node q_node;
	atomic_t pending;
#endif
	nv_q_func_t function_to_run;
	void *function_args;
};

#define NV_KTHREAD_Q_SUPPORTS_AFFINITY() 1
#define NV_KTHREAD_NO_NODE NUMA_NO_NODE

/*
 * Starts a queue's thread, its stack preferably on @preferred_node. 0, or a
 * negative errno; a queue that failed to start may be stopped.
 */
int nv_kthread_q_init_on_node(nv_kthread_q_t *q, const char *qname,
			      int preferred_node);

static inline int nv_kthread_q_init(nv_kthread_q_t *q, const char *qname)
{
	return nv_kthread_q_init_on_node(q, qname, NV_KTHREAD_NO_NODE);
}

/*
 * Flushes, then ends the thread. Nothing may be scheduled from then on. On a
 * queue of zeros, or one that was stopped already, it does nothing.
 */
void nv_kthread_q_stop(nv_kthread_q_t *q);

/*
 * Returns once all items scheduled before have run, and all that those
 * scheduled. Not to be called by the queue's own items.
 */
void nv_kthread_q_flush(nv_kthread_q_t *q);

void nv_kthread_q_item_init(nv_kthread_q_item_t *q_item,
			    nv_q_func_t function_to_run, void *function_args);

/* 1 if the item was queued; 0 if it is pending, or the queue is not running. */
int nv_kthread_q_schedule_q_item(nv_kthread_q_t *q,
				 nv_kthread_q_item_t *q_item);

/* 0, or -1 if any of the tests failed; what failed is in the kernel's log. */
int nv_kthread_q_run_self_test(void);

#endif /* __NV_KTHREAD_QUEUE_H__ */
