// SPDX-License-Identifier: GPL-2.0
/*
 * weir_lease: the table against the kernel's own xarray, in the kernel that loads it. Every connection holds 64
 * references; they take turns, and in its turn a connection gives 16 back and takes 16 new ones. The module prints
 * the nanoseconds of a reference taken and given back, net of the harness, and unloads.
 */
#define pr_fmt(fmt) "weir_lease: " fmt

#include <linux/ktime.h>
#include <linux/module.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/sort.h>

#include "designs.h"
#include "selftest.h"
#include "table.h"

static uint connections = 1000;
module_param(connections, uint, 0444);
MODULE_PARM_DESC(connections, "sockets, each with 64 references out");
static uint pages = 524288;
module_param(pages, uint, 0444);
MODULE_PARM_DESC(pages, "pages of the binding (524288: 2 GiB)");
static uint rounds = 7;
module_param(rounds, uint, 0444);
MODULE_PARM_DESC(rounds, "rounds, of which the median counts; at most 101");
static uint steps = 20000;
module_param(steps, uint, 0444);
MODULE_PARM_DESC(steps, "bursts given and taken in a round");
static uint trials = 1000000;
module_param(trials, uint, 0444);
MODULE_PARM_DESC(trials, "forged tokens in the self-test");

enum { OUTSTANDING = 64, BURST = 16, ROUNDS_MAX = 101 };

static const struct lease_design *const designs[] = {
	&lease_nothing, &lease_slots, &lease_slots_counted, &lease_xarray, &lease_binding,
};

struct run {
	void *state;
	u32 *tokens; /* OUTSTANDING for each connection, oldest first from head */
	u8 *heads;
	u32 turn;
	u64 random;
	u64 nanos[ROUNDS_MAX];
};

static struct run runs[ARRAY_SIZE(designs)];

static void choose(struct run *run, u32 *chosen)
{
	int i;

	for (i = 0; i < BURST; i++) {
		run->random ^= run->random << 13;
		run->random ^= run->random >> 7;
		run->random ^= run->random << 17;
		chosen[i] = ((run->random >> 32) * pages) >> 32;
	}
}

static int prepare(const struct lease_design *design, struct run *run)
{
	u32 chosen[BURST];
	u32 connection, first;

	run->random = 88172645463325252ULL;
	run->state = design->make(connections, pages);
	run->tokens = kvcalloc(connections, OUTSTANDING * sizeof(u32), GFP_KERNEL);
	run->heads = kvcalloc(connections, 1, GFP_KERNEL);
	if (!run->state || !run->tokens || !run->heads)
		return -ENOMEM;
	for (connection = 0; connection < connections; connection++) {
		for (first = 0; first < OUTSTANDING; first += BURST) {
			choose(run, chosen);
			design->take(run->state, connection, chosen, &run->tokens[connection * OUTSTANDING + first], BURST);
		}
		cond_resched();
	}
	return 0;
}

static int measure(const struct lease_design *design, struct run *run, u32 round)
{
	u32 chosen[BURST];
	u32 back = 0;
	u64 start = ktime_get_ns();
	u32 step;

	for (step = 0; step < steps; step++) {
		u32 connection = run->turn;
		u32 *tokens = &run->tokens[connection * OUTSTANDING + run->heads[connection]];

		run->turn = connection + 1 == connections ? 0 : connection + 1;
		run->heads[connection] = (run->heads[connection] + BURST) % OUTSTANDING;
		choose(run, chosen);
		back += design->give(run->state, connection, tokens, BURST);
		design->take(run->state, connection, chosen, tokens, BURST);
	}
	run->nanos[round] = ktime_get_ns() - start;
	cond_resched();
	return back == steps * BURST ? 0 : -EBADMSG;
}

static int ascending(const void *left, const void *right)
{
	u64 a = *(const u64 *)left, b = *(const u64 *)right;

	return a < b ? -1 : a > b;
}

/* Hundredths of a nanosecond for one reference taken and given back. */
static u64 median(struct run *run)
{
	sort(run->nanos, rounds, sizeof(u64), ascending, NULL);
	return div_u64(run->nanos[rounds / 2] * 100, steps * BURST);
}

static int bench(void)
{
	u64 harness;
	int error = 0;
	u32 round;
	int i;

	for (i = 0; i < ARRAY_SIZE(designs) && !error; i++)
		error = prepare(designs[i], &runs[i]);
	/* The first round is for caches, and is measured again. */
	for (round = 0; round <= rounds && !error; round++)
		for (i = 0; i < ARRAY_SIZE(designs) && !error; i++)
			error = measure(designs[i], &runs[i], round ? round - 1 : 0);
	harness = error ? 0 : median(&runs[0]);
	for (i = 0; i < ARRAY_SIZE(designs); i++) {
		u64 gross = error ? 0 : median(&runs[i]);
		u64 net = gross > harness ? gross - harness : 0;

		if (!error)
			pr_info("%ux%d %s %llu.%02llu ns net, %llu.%02llu gross\n", connections, OUTSTANDING,
				designs[i]->name, net / 100, net % 100, gross / 100, gross % 100);
		if (runs[i].state)
			designs[i]->destroy(runs[i].state);
		kvfree(runs[i].tokens);
		kvfree(runs[i].heads);
	}
	return error;
}

static int __init weir_lease_init(void)
{
	int error;

	if (!connections || connections > 1000000 || !pages || pages > 1U << 26 || !rounds || rounds > ROUNDS_MAX ||
	    !steps || steps > 100000000) {
		pr_err("connections 1 to 1000000, pages 1 to 2^26, rounds 1 to %d, steps 1 to 10^8\n", ROUNDS_MAX);
		return -EINVAL;
	}
	error = lease_init();
	if (error)
		return error;
	error = lease_selftest(trials) ? -EBADMSG : bench();
	if (error)
		lease_exit();
	return error;
}

static void __exit weir_lease_exit(void)
{
	lease_exit();
}

module_init(weir_lease_init);
module_exit(weir_lease_exit);
MODULE_DESCRIPTION("Page references by token: the slot table against the kernel's xarray");
MODULE_LICENSE("GPL");
