/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * The parts that the three designs have in common: starting the thread, flushing and stopping.
 * A design includes this after its own main loop, queue_main(), and its
 * set-up, queue_setup().
 */
#include <linux/completion.h>
#include <linux/err.h>
#include <linux/kthread.h>
#include <linux/string.h>

int nv_kthread_q_init_on_node(nv_kthread_q_t *q, const char *qname,
			      int preferred_node)
{
	struct task_struct *thread;

	memset(q, 0, sizeof(*q));
	atomic_set(&q->main_loop_should_exit, 0);
	queue_setup(q);
	thread = kthread_create_on_node(queue_main, q, preferred_node, "%s",
					qname);
	if (IS_ERR(thread))
		return PTR_ERR(thread);
	q->q_kthread = thread;
	wake_up_process(thread);
	return 0;
}

struct flush_marker {
	nv_kthread_q_item_t item;
	struct completion passed;
};

static void flush_marker_run(void *args)
{
	complete(args);
}

static void flush_once(nv_kthread_q_t *q)
{
	struct flush_marker marker;

	init_completion(&marker.passed);
	nv_kthread_q_item_init(&marker.item, flush_marker_run, &marker.passed);
	if (nv_kthread_q_schedule_q_item(q, &marker.item))
		wait_for_completion(&marker.passed);
}

void nv_kthread_q_flush(nv_kthread_q_t *q)
{
	/* Once for the items that are queued, once for the items that those queue. */
	flush_once(q);
	flush_once(q);
}

void nv_kthread_q_stop(nv_kthread_q_t *q)
{
	if (!q->q_kthread)
		return;
	nv_kthread_q_flush(q);
	atomic_set(&q->main_loop_should_exit, 1);
	queue_wake(q);
	kthread_stop(q->q_kthread);
	q->q_kthread = NULL;
}

static __always_inline bool queue_is_running(nv_kthread_q_t *q)
{
	return q->q_kthread && !atomic_read(&q->main_loop_should_exit);
}

/* After the loop: a kthread waits for its stop, so that none is missed. */
static int queue_end(void)
{
	set_current_state(TASK_IDLE);
	while (!kthread_should_stop()) {
		schedule();
		set_current_state(TASK_IDLE);
	}
	__set_current_state(TASK_RUNNING);
	return 0;
}
