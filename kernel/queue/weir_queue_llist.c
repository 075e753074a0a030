// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Our design: a lock-free list that is taken whole by one exchange and turned
 * round. Its worker is woken only by the item that finds the list empty.
 * Nothing spins, so an interrupt may schedule on top of any other context.
 *
 * It breaks one promise of the contract, the place of an item that is refused:
 * an item is pending before it is on the list. And if the task that found the
 * list empty is preempted before it wakes the worker, all others wait for it.
 * So the patch for the driver keeps the lock. Crate weir-queue, whose flush may
 * wait, counts the items that refused somebody before they were on the list.
 */
#define WEIR_QUEUE_LLIST
#define DESIGN "llist"
#include "nv-kthread-q.h"

static int queue_main(void *args);

static void queue_setup(nv_kthread_q_t *q)
{
	init_llist_head(&q->q_incoming);
}

static void queue_wake(nv_kthread_q_t *q)
{
	wake_up_process(q->q_kthread);
}

static int queue_end(void);

static int queue_main(void *args)
{
	nv_kthread_q_t *q = args;
	nv_kthread_q_item_t *item, *next;
	struct llist_node *taken;

	for (;;) {
		set_current_state(TASK_IDLE);
		/* A barrier: whoever adds after this look sees the state, and wakes. */
		if (llist_empty(&q->q_incoming)) {
			if (atomic_read(&q->main_loop_should_exit))
				break;
			schedule();
			continue;
		}
		__set_current_state(TASK_RUNNING);
		taken = llist_reverse_order(llist_del_all(&q->q_incoming));
		llist_for_each_entry_safe(item, next, taken, q_node) {
			nv_q_func_t function = item->function_to_run;
			void *function_args = item->function_args;

			/* A full barrier: see the contract on what a run sees. */
			atomic_xchg(&item->pending, 0);
			function(function_args);
		}
		cond_resched();
	}
	return queue_end();
}

void nv_kthread_q_item_init(nv_kthread_q_item_t *q_item,
			    nv_q_func_t function_to_run, void *function_args)
{
	atomic_set(&q_item->pending, 0);
	q_item->function_to_run = function_to_run;
	q_item->function_args = function_args;
}

#include "common.h"

int nv_kthread_q_schedule_q_item(nv_kthread_q_t *q,
				 nv_kthread_q_item_t *q_item)
{
	if (unlikely(!queue_is_running(q)))
		return 0;
	if (atomic_xchg(&q_item->pending, 1))
		return 0;
	if (llist_add(&q_item->q_node, &q->q_incoming))
		queue_wake(q);
	return 1;
}

#include "selftest.h"
#include "bench.h"
#include "module.h"
