// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The driver's design, for comparison: a list under a lock, and a semaphore
 * that is raised once and lowered once for every item.
 */
#define WEIR_QUEUE_SEMAPHORE
#define DESIGN "semaphore"
#include "nv-kthread-q.h"

static int queue_end(void);

static void queue_setup(nv_kthread_q_t *q)
{
	INIT_LIST_HEAD(&q->q_list_head);
	spin_lock_init(&q->q_lock);
	sema_init(&q->q_sem, 0);
}

static void queue_wake(nv_kthread_q_t *q)
{
	up(&q->q_sem);
}

static int queue_main(void *args)
{
	nv_kthread_q_t *q = args;
	nv_kthread_q_item_t *item;
	unsigned long flags;

	for (;;) {
		/* Interrupted only by a stop, which raises the semaphore too. */
		while (down_interruptible(&q->q_sem))
			;
		spin_lock_irqsave(&q->q_lock, flags);
		item = list_first_entry_or_null(&q->q_list_head,
						nv_kthread_q_item_t, q_list_node);
		if (item)
			list_del_init(&item->q_list_node);
		spin_unlock_irqrestore(&q->q_lock, flags);
		if (item)
			item->function_to_run(item->function_args);
		else if (atomic_read(&q->main_loop_should_exit))
			break;
		cond_resched();
	}
	return queue_end();
}

void nv_kthread_q_item_init(nv_kthread_q_item_t *q_item,
			    nv_q_func_t function_to_run, void *function_args)
{
	INIT_LIST_HEAD(&q_item->q_list_node);
	q_item->function_to_run = function_to_run;
	q_item->function_args = function_args;
}

#include "common.h"

int nv_kthread_q_schedule_q_item(nv_kthread_q_t *q,
				 nv_kthread_q_item_t *q_item)
{
	unsigned long flags;
	int queued = 0;

	if (unlikely(!queue_is_running(q)))
		return 0;
	spin_lock_irqsave(&q->q_lock, flags);
	if (list_empty(&q_item->q_list_node)) {
		list_add_tail(&q_item->q_list_node, &q->q_list_head);
		queued = 1;
	}
	spin_unlock_irqrestore(&q->q_lock, flags);
	if (queued)
		queue_wake(q);
	return queued;
}

#include "selftest.h"
#include "bench.h"
#include "module.h"
