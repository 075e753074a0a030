/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * The benchmark: rounds of many items from one producer and from several, as
 * pull request 1050's user-space model takes them, in a live kernel. Time is
 * from the first producer's start to the end of the last item; wakes are the
 * worker's voluntary context switches.
 */
#include <linux/delay.h>
#include <linux/ktime.h>
#include <linux/math64.h>
#include <linux/sort.h>

#define PRODUCERS_MAX	64
#define ROUNDS_MAX	200

struct bench_item {
	nv_kthread_q_item_t item;
	struct bench_round *round;
};

struct bench_producer {
	struct bench_round *round;
	struct bench_item *items;
	unsigned int count;
	u64 began;
};

struct bench_round {
	nv_kthread_q_t q;
	struct completion go, done;
	unsigned int left;
	u64 ended;
	unsigned long switches;
	struct bench_producer producers[PRODUCERS_MAX];
};

/* The figures of a number of producers: medians over the rounds. */
struct bench_result {
	u64 ps_per_item;
	u64 ps_per_item_min;
	u64 wakes_per_million;
};

static void bench_run(void *args)
{
	struct bench_item *item = args;
	struct bench_round *round = item->round;

	if (--round->left)
		return;
	round->ended = ktime_get_ns();
	round->switches = current->nvcsw;
	complete(&round->done);
}

static int bench_produce(void *args)
{
	struct bench_producer *producer = args;
	nv_kthread_q_t *q = &producer->round->q;
	unsigned int i;

	wait_for_completion(&producer->round->go);
	producer->began = ktime_get_ns();
	for (i = 0; i < producer->count; i++)
		nv_kthread_q_schedule_q_item(q, &producer->items[i].item);
	while (!kthread_should_stop())
		msleep(1);
	return 0;
}

static int bench_round(struct bench_round *round, struct bench_item *items,
		       unsigned int count, unsigned int producers,
		       u64 *ps, u64 *wakes)
{
	struct task_struct *threads[PRODUCERS_MAX];
	u64 began = U64_MAX;
	unsigned int i;
	int error;

	memset(round, 0, sizeof(*round));
	init_completion(&round->go);
	init_completion(&round->done);
	round->left = count;
	error = nv_kthread_q_init(&round->q, "weir_bench");
	if (error)
		return error;
	for (i = 0; i < count; i++) {
		items[i].round = round;
		nv_kthread_q_item_init(&items[i].item, bench_run, &items[i]);
	}
	for (i = 0; i < producers; i++) {
		struct bench_producer *producer = &round->producers[i];
		unsigned int first = div_u64((u64)i * count, producers);

		producer->round = round;
		producer->items = items + first;
		producer->count = div_u64((u64)(i + 1) * count, producers) - first;
		threads[i] = kthread_run(bench_produce, producer, "weir_produce");
		if (IS_ERR(threads[i])) {
			error = PTR_ERR(threads[i]);
			producers = i;
			break;
		}
	}
	complete_all(&round->go);
	if (!error)
		wait_for_completion(&round->done);
	for (i = 0; i < producers; i++) {
		kthread_stop(threads[i]);
		began = min(began, round->producers[i].began);
	}
	nv_kthread_q_stop(&round->q);
	if (error)
		return error;
	*ps = div64_u64((round->ended - began) * 1000, count);
	*wakes = div64_u64((u64)round->switches * 1000000, count);
	return 0;
}

static int bench_compare(const void *a, const void *b)
{
	u64 left = *(const u64 *)a, right = *(const u64 *)b;

	return left < right ? -1 : left > right;
}

static int bench(unsigned int count, unsigned int producers,
		 unsigned int rounds, struct bench_result *result)
{
	static u64 ps[ROUNDS_MAX], wakes[ROUNDS_MAX];
	static struct bench_round round;
	struct bench_item *items;
	unsigned int i;
	int error = 0;

	if (!count || !producers || producers > PRODUCERS_MAX || producers > count ||
	    !rounds || rounds > ROUNDS_MAX)
		return -EINVAL;
	items = vzalloc(array_size(count, sizeof(*items)));
	if (!items)
		return -ENOMEM;
	for (i = 0; i < rounds && !error; i++)
		error = bench_round(&round, items, count, producers, &ps[i], &wakes[i]);
	vfree(items);
	if (error)
		return error;
	sort(ps, rounds, sizeof(u64), bench_compare, NULL);
	sort(wakes, rounds, sizeof(u64), bench_compare, NULL);
	result->ps_per_item = ps[rounds / 2];
	result->ps_per_item_min = ps[0];
	result->wakes_per_million = wakes[rounds / 2];
	pr_info("weir_queue %s: %u items, %u producers: %llu ps an item (at least %llu), %llu wakes a million\n",
		DESIGN, count, producers, result->ps_per_item,
		result->ps_per_item_min, result->wakes_per_million);
	return 0;
}
