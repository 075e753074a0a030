// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The design of pull request 1050, for comparison: a count of pending items
 * that wakes the worker when it leaves 0, and the list spliced out whole.
 * Once items are spliced, the list cannot say any more which are pending: that
 * is a flag of its own here.
 */
#define WEIR_QUEUE_BATCH
#define DESIGN "batch"
#include "nv-kthread-q.h"

static int queue_end(void);

static void queue_setup(nv_kthread_q_t *q)
{
	INIT_LIST_HEAD(&q->q_list_head);
	spin_lock_init(&q->q_lock);
	init_waitqueue_head(&q->q_wait_queue);
	atomic_set(&q->pending_count, 0);
}

static void queue_wake(nv_kthread_q_t *q)
{
	wake_up(&q->q_wait_queue);
}

static int queue_main(void *args)
{
	nv_kthread_q_t *q = args;
	nv_kthread_q_item_t *item, *next;
	unsigned long flags;
	LIST_HEAD(batch);
	int ran;

	for (;;) {
		wait_event_idle(q->q_wait_queue,
				atomic_read(&q->pending_count) ||
				atomic_read(&q->main_loop_should_exit));
		spin_lock_irqsave(&q->q_lock, flags);
		list_splice_init(&q->q_list_head, &batch);
		spin_unlock_irqrestore(&q->q_lock, flags);
		if (list_empty(&batch) && atomic_read(&q->main_loop_should_exit))
			break;
		ran = 0;
		list_for_each_entry_safe(item, next, &batch, q_list_node) {
			nv_q_func_t function = item->function_to_run;
			void *function_args = item->function_args;

			atomic_xchg(&item->pending, 0);
			function(function_args);
			ran++;
		}
		INIT_LIST_HEAD(&batch);
		atomic_sub(ran, &q->pending_count);
		cond_resched();
	}
	return queue_end();
}

void nv_kthread_q_item_init(nv_kthread_q_item_t *q_item,
			    nv_q_func_t function_to_run, void *function_args)
{
	INIT_LIST_HEAD(&q_item->q_list_node);
	atomic_set(&q_item->pending, 0);
	q_item->function_to_run = function_to_run;
	q_item->function_args = function_args;
}

#include "common.h"

int nv_kthread_q_schedule_q_item(nv_kthread_q_t *q,
				 nv_kthread_q_item_t *q_item)
{
	unsigned long flags;

	if (unlikely(!queue_is_running(q)))
		return 0;
	/* With the lock held: who is refused may rely on the item's place. */
	spin_lock_irqsave(&q->q_lock, flags);
	if (atomic_xchg(&q_item->pending, 1)) {
		spin_unlock_irqrestore(&q->q_lock, flags);
		return 0;
	}
	list_add_tail(&q_item->q_list_node, &q->q_list_head);
	spin_unlock_irqrestore(&q->q_lock, flags);
	if (atomic_inc_return(&q->pending_count) == 1)
		queue_wake(q);
	return 1;
}

#include "selftest.h"
#include "bench.h"
#include "module.h"
