/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * Self-tests, equivalent to those that the driver runs on its own queue, and
 * beyond them order, freeing, flushing under load and hard interrupts. Written
 * against nv-kthread-q.h only, so they judge any design behind it.
 */
#include <linux/delay.h>
#include <linux/hrtimer.h>
#include <linux/irq_work.h>
#include <linux/kthread.h>
#include <linux/module.h>
#include <linux/preempt.h>
#include <linux/slab.h>
#include <linux/version.h>
#include <linux/vmalloc.h>

#define THREADS		8
#define ITEMS		100000
#define INTERRUPTS	2000
#define INTERVAL_NS	(100 * NSEC_PER_USEC)

/* Leaves the calling test, which returns how many checks failed. */
#define CHECK(condition)                                                      \
	do {                                                                  \
		if (!(condition)) {                                           \
			pr_err("weir_queue %s: %s: not so: %s\n", DESIGN,     \
			       __func__, #condition);                         \
			return 1;                                             \
		}                                                             \
	} while (0)

static void count_run(void *args)
{
	atomic_inc(args);
}

static int starts_and_stops(void)
{
	nv_kthread_q_item_t items[6];
	nv_kthread_q_t q;
	atomic_t runs = ATOMIC_INIT(0);
	int i;

	memset(&q, 0, sizeof(q));
	nv_kthread_q_stop(&q);
	CHECK(nv_kthread_q_init(&q, "weir_start") == 0);
	nv_kthread_q_stop(&q);
	nv_kthread_q_stop(&q);
	CHECK(nv_kthread_q_init_on_node(&q, "weir_again", numa_node_id()) == 0);
	for (i = 0; i < 3; i++) {
		nv_kthread_q_item_init(&items[i], count_run, &runs);
		CHECK(nv_kthread_q_schedule_q_item(&q, &items[i]) == 1);
	}
	nv_kthread_q_flush(&q);
	nv_kthread_q_flush(&q);
	CHECK(atomic_read(&runs) == 3);
	for (; i < 6; i++) {
		nv_kthread_q_item_init(&items[i], count_run, &runs);
		CHECK(nv_kthread_q_schedule_q_item(&q, &items[i]) == 1);
	}
	nv_kthread_q_stop(&q);
	CHECK(atomic_read(&runs) == 6);
	CHECK(nv_kthread_q_schedule_q_item(&q, &items[0]) == 0);
	return 0;
}

/* One thread's numbered items; their runs check the order. */
struct series {
	nv_kthread_q_t *q;
	struct numbered *items;
	struct task_struct *thread;
	int last;
	int disorder;
	int refused;
};

struct numbered {
	nv_kthread_q_item_t item;
	struct series *series;
	int number;
};

static void check_order(void *args)
{
	struct numbered *numbered = args;

	if (numbered->series->last + 1 != numbered->number)
		numbered->series->disorder++;
	numbered->series->last = numbered->number;
}

static int schedule_series(void *args)
{
	struct series *series = args;
	int i;

	for (i = 0; i < ITEMS; i++) {
		struct numbered *numbered = &series->items[i];

		numbered->series = series;
		numbered->number = i + 1;
		nv_kthread_q_item_init(&numbered->item, check_order, numbered);
		if (!nv_kthread_q_schedule_q_item(series->q, &numbered->item))
			series->refused++;
	}
	nv_kthread_q_flush(series->q);
	/* A kthread waits for its stop. */
	while (!kthread_should_stop())
		msleep(1);
	return series->last == ITEMS ? 0 : 1;
}

static int many_threads_keep_their_order(void)
{
	static struct series series[THREADS];
	nv_kthread_q_t q;
	int i, failed = 0;

	memset(series, 0, sizeof(series));
	CHECK(nv_kthread_q_init(&q, "weir_many") == 0);
	for (i = 0; i < THREADS; i++) {
		series[i].q = &q;
		series[i].items = vmalloc(array_size(ITEMS, sizeof(struct numbered)));
		CHECK(series[i].items);
		series[i].thread = kthread_run(schedule_series, &series[i], "weir_series");
		CHECK(!IS_ERR(series[i].thread));
	}
	for (i = 0; i < THREADS; i++)
		failed |= kthread_stop(series[i].thread);
	nv_kthread_q_stop(&q);
	for (i = 0; i < THREADS; i++) {
		failed |= series[i].disorder | series[i].refused;
		vfree(series[i].items);
	}
	CHECK(!failed);
	return 0;
}

struct again {
	nv_kthread_q_t q;
	nv_kthread_q_item_t item;
	atomic_t runs;
	atomic_t enough;
	atomic_t refused;
};

static void schedule_itself(void *args)
{
	struct again *again = args;

	atomic_inc(&again->runs);
	if (atomic_read(&again->enough))
		return;
	/* As a driver's callback may: initialised anew, then scheduled. */
	nv_kthread_q_item_init(&again->item, schedule_itself, again);
	if (!nv_kthread_q_schedule_q_item(&again->q, &again->item))
		atomic_inc(&again->refused);
}

static int an_item_schedules_itself(void)
{
	static struct again again;
	int runs;

	memset(&again, 0, sizeof(again));
	CHECK(nv_kthread_q_init(&again.q, "weir_again") == 0);
	nv_kthread_q_item_init(&again.item, schedule_itself, &again);
	CHECK(nv_kthread_q_schedule_q_item(&again.q, &again.item) == 1);
	while (atomic_read(&again.runs) < 1000)
		usleep_range(50, 100);
	/* One flush waits for a run that missed the flag, and for what it queued. */
	atomic_set(&again.enough, 1);
	nv_kthread_q_flush(&again.q);
	runs = atomic_read(&again.runs);
	msleep(5);
	CHECK(atomic_read(&again.runs) == runs);
	nv_kthread_q_stop(&again.q);
	CHECK(atomic_read(&again.refused) == 0);
	return 0;
}

static int one_item_runs_once_for_each_success(void)
{
	nv_kthread_q_t q;
	nv_kthread_q_item_t item;
	atomic_t runs = ATOMIC_INIT(0);
	int i, queued = 0;

	CHECK(nv_kthread_q_init(&q, "weir_same") == 0);
	nv_kthread_q_item_init(&item, count_run, &runs);
	for (i = 0; i < 1000; i++)
		queued += nv_kthread_q_schedule_q_item(&q, &item);
	nv_kthread_q_stop(&q);
	CHECK(queued >= 1);
	CHECK(atomic_read(&runs) == queued);
	return 0;
}

static void wait_for_gate(void *args)
{
	wait_for_completion(args);
}

static int a_pending_item_is_refused_until_it_runs(void)
{
	nv_kthread_q_t q;
	nv_kthread_q_item_t gate_item, item;
	struct completion gate;
	atomic_t runs = ATOMIC_INIT(0);

	init_completion(&gate);
	CHECK(nv_kthread_q_init(&q, "weir_gate") == 0);
	nv_kthread_q_item_init(&gate_item, wait_for_gate, &gate);
	nv_kthread_q_item_init(&item, count_run, &runs);
	CHECK(nv_kthread_q_schedule_q_item(&q, &gate_item) == 1);
	/* Both in one batch, or in two: the answer must be the same. */
	CHECK(nv_kthread_q_schedule_q_item(&q, &item) == 1);
	CHECK(nv_kthread_q_schedule_q_item(&q, &item) == 0);
	msleep(2);
	CHECK(nv_kthread_q_schedule_q_item(&q, &item) == 0);
	complete(&gate);
	nv_kthread_q_flush(&q);
	CHECK(atomic_read(&runs) == 1);
	CHECK(nv_kthread_q_schedule_q_item(&q, &item) == 1);
	nv_kthread_q_stop(&q);
	CHECK(atomic_read(&runs) == 2);
	return 0;
}

struct mortal {
	nv_kthread_q_item_t item;
	atomic_t *deaths;
};

static void free_itself(void *args)
{
	struct mortal *mortal = args;

	atomic_inc(mortal->deaths);
	/* Poisoned before it goes: a queue that still looks at it will stumble. */
	memset(mortal, 0x6b, sizeof(*mortal));
	kfree(mortal);
}

static int items_free_themselves(void)
{
	nv_kthread_q_t q;
	atomic_t deaths = ATOMIC_INIT(0);
	int i;

	CHECK(nv_kthread_q_init(&q, "weir_mortal") == 0);
	for (i = 0; i < 20000; i++) {
		struct mortal *mortal = kmalloc(sizeof(*mortal), GFP_KERNEL);

		CHECK(mortal);
		mortal->deaths = &deaths;
		nv_kthread_q_item_init(&mortal->item, free_itself, mortal);
		CHECK(nv_kthread_q_schedule_q_item(&q, &mortal->item) == 1);
	}
	nv_kthread_q_stop(&q);
	CHECK(atomic_read(&deaths) == 20000);
	return 0;
}

struct load {
	nv_kthread_q_t *q;
	nv_kthread_q_item_t items[16];
	atomic_t runs;
	int queued;
	struct task_struct *thread;
};

static int schedule_for_ever(void *args)
{
	struct load *load = args;
	int i = 0;

	while (!kthread_should_stop()) {
		load->queued += nv_kthread_q_schedule_q_item(load->q, &load->items[i++ % 16]);
		cond_resched();
	}
	return 0;
}

static int flush_and_stop_work_under_load(void)
{
	static struct load loads[4];
	nv_kthread_q_item_t item;
	nv_kthread_q_t q;
	atomic_t runs = ATOMIC_INIT(0);
	int i, j;

	memset(loads, 0, sizeof(loads));
	CHECK(nv_kthread_q_init(&q, "weir_load") == 0);
	for (i = 0; i < 4; i++) {
		loads[i].q = &q;
		for (j = 0; j < 16; j++)
			nv_kthread_q_item_init(&loads[i].items[j], count_run, &loads[i].runs);
		loads[i].thread = kthread_run(schedule_for_ever, &loads[i], "weir_load");
		CHECK(!IS_ERR(loads[i].thread));
	}
	/* A kthread that is stopped before it ran once never runs. */
	for (i = 0; i < 4; i++)
		while (!READ_ONCE(loads[i].queued))
			msleep(1);
	nv_kthread_q_item_init(&item, count_run, &runs);
	for (i = 1; i <= 50; i++) {
		CHECK(nv_kthread_q_schedule_q_item(&q, &item) == 1);
		nv_kthread_q_flush(&q);
		CHECK(atomic_read(&runs) == i);
	}
	for (i = 0; i < 4; i++)
		kthread_stop(loads[i].thread);
	nv_kthread_q_stop(&q);
	for (i = 0; i < 4; i++) {
		CHECK(loads[i].queued > 0);
		CHECK(atomic_read(&loads[i].runs) == loads[i].queued);
	}
	return 0;
}

static void start_interrupts(struct hrtimer *timer, enum hrtimer_restart (*function)(struct hrtimer *))
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 15, 0)
	hrtimer_setup(timer, function, CLOCK_MONOTONIC, HRTIMER_MODE_REL_HARD);
#else
	hrtimer_init(timer, CLOCK_MONOTONIC, HRTIMER_MODE_REL_HARD);
	timer->function = function;
#endif
	hrtimer_start(timer, ns_to_ktime(INTERVAL_NS), HRTIMER_MODE_REL_HARD);
}

/* Hard interrupts: a timer's and an irq_work's, each with an item of its own. */
struct interrupts {
	nv_kthread_q_t q;
	struct hrtimer timer;
	struct irq_work work;
	nv_kthread_q_item_t timer_item, work_item;
	atomic_t timer_runs, work_runs;
	int timer_fired, timer_queued, not_hard;
	atomic_t work_queued;
};

static void work_interrupt(struct irq_work *work)
{
	struct interrupts *it = container_of(work, struct interrupts, work);

	it->not_hard += !in_hardirq();
	atomic_add(nv_kthread_q_schedule_q_item(&it->q, &it->work_item), &it->work_queued);
}

static enum hrtimer_restart timer_interrupt(struct hrtimer *timer)
{
	struct interrupts *it = container_of(timer, struct interrupts, timer);

	it->not_hard += !in_hardirq();
	it->timer_queued += nv_kthread_q_schedule_q_item(&it->q, &it->timer_item);
	if (++it->timer_fired == INTERRUPTS)
		return HRTIMER_NORESTART;
	hrtimer_forward_now(timer, ns_to_ktime(INTERVAL_NS));
	return HRTIMER_RESTART;
}

static int hard_interrupts_schedule(void)
{
	static struct interrupts it;
	int i;

	memset(&it, 0, sizeof(it));
	CHECK(nv_kthread_q_init(&it.q, "weir_irq") == 0);
	nv_kthread_q_item_init(&it.timer_item, count_run, &it.timer_runs);
	nv_kthread_q_item_init(&it.work_item, count_run, &it.work_runs);
	it.work = IRQ_WORK_INIT_HARD(work_interrupt);
	start_interrupts(&it.timer, timer_interrupt);
	/* While the timer interrupts this very code, on this very queue. */
	for (i = 0; i < INTERRUPTS; i++) {
		irq_work_queue(&it.work);
		irq_work_sync(&it.work);
	}
	while (READ_ONCE(it.timer_fired) < INTERRUPTS)
		msleep(1);
	hrtimer_cancel(&it.timer);
	nv_kthread_q_stop(&it.q);
	CHECK(it.not_hard == 0);
	CHECK(it.timer_queued >= 1 && atomic_read(&it.work_queued) >= 1);
	CHECK(atomic_read(&it.timer_runs) == it.timer_queued);
	CHECK(atomic_read(&it.work_runs) == atomic_read(&it.work_queued));
	return 0;
}

/*
 * An interrupt schedules the very item that the code below it is scheduling. If it is refused, the
 * item is in the queue, so the marker that the interrupt schedules then must run after it.
 */
struct target {
	nv_kthread_q_item_t item;
	atomic_t runs;
};

struct overtaking {
	nv_kthread_q_t q;
	nv_kthread_q_item_t marker;
	struct hrtimer timer;
	struct target *targets, *now, *marked;
	int runs, fired, refused, overtaken;
};

static void look_at_target(void *args)
{
	struct overtaking *o = args;

	o->overtaken += atomic_read(&o->marked->runs) == o->runs;
	smp_store_release(&o->marked, NULL);
}

static enum hrtimer_restart overtake(struct hrtimer *timer)
{
	struct overtaking *o = container_of(timer, struct overtaking, timer);
	struct target *target = READ_ONCE(o->now);
	int runs = atomic_read(&target->runs);

	if (!smp_load_acquire(&o->marked) && !nv_kthread_q_schedule_q_item(&o->q, &target->item)) {
		o->refused++;
		o->runs = runs;
		o->marked = target;
		nv_kthread_q_schedule_q_item(&o->q, &o->marker);
	}
	if (++o->fired >= INTERRUPTS)
		return HRTIMER_NORESTART;
	hrtimer_forward_now(timer, ns_to_ktime(INTERVAL_NS));
	return HRTIMER_RESTART;
}

static int nothing_overtakes_an_item_that_was_refused(void)
{
	static struct overtaking o;
	int i;

	memset(&o, 0, sizeof(o));
	o.targets = vzalloc(array_size(ITEMS, sizeof(*o.targets)));
	CHECK(o.targets);
	CHECK(nv_kthread_q_init(&o.q, "weir_overtake") == 0);
	nv_kthread_q_item_init(&o.marker, look_at_target, &o);
	for (i = 0; i < ITEMS; i++)
		nv_kthread_q_item_init(&o.targets[i].item, count_run, &o.targets[i].runs);
	o.now = o.targets;
	start_interrupts(&o.timer, overtake);
	while (READ_ONCE(o.fired) < INTERRUPTS) {
		for (i = 0; i < ITEMS; i++) {
			WRITE_ONCE(o.now, &o.targets[i]);
			nv_kthread_q_schedule_q_item(&o.q, &o.targets[i].item);
		}
		nv_kthread_q_flush(&o.q);
	}
	hrtimer_cancel(&o.timer);
	nv_kthread_q_stop(&o.q);
	vfree(o.targets);
	pr_info("weir_queue %s: %d refusals, %d overtaken\n", DESIGN, o.refused, o.overtaken);
	CHECK(o.refused && !o.overtaken);
	return 0;
}

/* How many tests there are, and how many of them failed. */
static int tests_run, tests_failed;

static void test(int (*check)(void), const char *name)
{
	int failed = check();

	tests_run++;
	tests_failed += failed;
	pr_info("weir_queue %s: %s: %s\n", DESIGN, name, failed ? "FAILED" : "passed");
}

#define TEST(check) test(check, #check)

int nv_kthread_q_run_self_test(void)
{
	TEST(starts_and_stops);
	TEST(many_threads_keep_their_order);
	TEST(an_item_schedules_itself);
	TEST(one_item_runs_once_for_each_success);
	TEST(a_pending_item_is_refused_until_it_runs);
	TEST(items_free_themselves);
	TEST(flush_and_stop_work_under_load);
	TEST(hard_interrupts_schedule);
#ifndef WEIR_QUEUE_LLIST
	TEST(nothing_overtakes_an_item_that_was_refused);
#endif
	return tests_failed ? -1 : 0;
}
