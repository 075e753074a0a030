// SPDX-License-Identifier: GPL-2.0
#define pr_fmt(fmt) "weir_lease: " fmt

#include <linux/kernel.h>
#include <linux/sched.h>
#include <linux/slab.h>

#include "selftest.h"
#include "table.h"

#define check(condition)                                                              \
	do {                                                                          \
		if (!(condition)) {                                                   \
			pr_err("%s: line %d: %s\n", __func__, __LINE__, #condition); \
			return false;                                                 \
		}                                                                     \
	} while (0)

static void count(void *context, lease_place place)
{
	++*(u32 *)context;
}

static bool tokens_in_order_are_one_apart(void)
{
	struct lease_table table;
	lease_place places[64] = {};
	u32 tokens[64], returned = 0;
	int lap, i;

	lease_table_init(&table, 64);
	for (lap = 0; lap < 3; lap++) {
		check(lease_take(&table, places, tokens, 64) == 64);
		for (i = 1; i < 64; i++)
			check(tokens[i] == tokens[0] + i);
		check(lease_take(&table, places, tokens, 1) == -ENOSPC);
		check(lease_give(&table, tokens, places, 64) == 64);
	}
	check(lease_close(&table, count, &returned) == 0 && returned == 0);
	return true;
}

static bool stale_repeated_and_forged_tokens_are_refused(void)
{
	struct lease_table table;
	lease_place place = lease_place_of(255, (1U << 26) - 1), back;
	u32 first, second, returned = 0;
	int i;

	lease_table_init(&table, 64);
	check(lease_give(&table, &(u32){ 7 }, &back, 1) == 0);
	check(lease_take(&table, &place, &first, 1) == 1);
	check(lease_take(&table, &place, &second, 1) == 1);
	check(lease_give(&table, &second, &back, 1) == 1 && back == place);
	check(lease_give(&table, &second, &back, 1) == 0);
	for (i = 0; i < 64; i++) {
		u32 other;

		check(lease_take(&table, &place, &other, 1) == 1 && other != second);
		check(lease_give(&table, &other, &back, 1) == 1);
	}
	check(lease_give(&table, &second, &back, 1) == 0);
	check(lease_give(&table, &(u32){ first ^ 1U << 31 }, &back, 1) == 0);
	check(lease_close(&table, count, &returned) == 1 && returned == 1);
	check(lease_give(&table, &first, &back, 1) == 0);
	return true;
}

static bool a_table_grows_to_its_quota_and_shrinks_to_nothing(void)
{
	struct lease_table table;
	lease_place place = 0;
	u32 *tokens = kvmalloc_array(LEASE_QUOTA_MAX, sizeof(*tokens), GFP_KERNEL);
	u32 returned = 0;
	int round, i;

	check(tokens);
	lease_table_init(&table, LEASE_QUOTA_MAX);
	for (round = 0; round < 3; round++) {
		for (i = 0; i < LEASE_QUOTA_MAX; i++)
			check(lease_take(&table, &place, &tokens[i], 1) == 1);
		check(lease_take(&table, &place, tokens, 1) == -ENOSPC);
		for (i = 0; i < LEASE_QUOTA_MAX; i++)
			check(lease_give(&table, &tokens[(i * 1237) % LEASE_QUOTA_MAX], &place, 1) == 1);
		check(!table.present && !table.directory && !table.held);
	}
	kvfree(tokens);
	check(lease_close(&table, count, &returned) == 0);
	return true;
}

/* Tokens near held ones, old ones and any numbers, against a shadow of what is held. */
static bool no_token_that_is_not_held_is_accepted(u32 trials)
{
	enum { OUT = 192, OLD = 1024 };
	static u32 held[OUT], old[OLD];
	struct lease_table table;
	lease_place place = 5, back;
	u64 random = 88172645463325252ULL;
	u32 tried = 0, returned = 0;
	int i;

	lease_table_init(&table, OUT);
	for (i = 0; i < OUT; i++)
		check(lease_take(&table, &place, &held[i], 1) == 1);
	while (tried < trials) {
		u32 slot, token;
		bool is_held = false;

		random ^= random << 13;
		random ^= random >> 7;
		random ^= random << 17;
		slot = (u32)(random >> 32) % OUT;
		switch (random % 4) {
		case 0:
			token = (u32)(random >> 8);
			break;
		case 1:
			token = held[slot] ^ 1U << (random >> 8) % 32;
			break;
		case 2:
			token = old[(random >> 8) % OLD];
			break;
		default:
			/* A real return, a real take, and the returned one once more. */
			token = held[slot];
			check(lease_give(&table, &token, &back, 1) == 1 && back == 5);
			check(lease_take(&table, &place, &held[slot], 1) == 1);
			old[(random >> 8) % OLD] = token;
		}
		for (i = 0; i < OUT && !is_held; i++)
			is_held = held[i] == token;
		if (is_held)
			continue;
		check(lease_give(&table, &token, &back, 1) == 0);
		if (++tried % 65536 == 0)
			cond_resched();
	}
	check(lease_close(&table, count, &returned) == OUT && returned == OUT);
	return true;
}

int lease_selftest(u32 trials)
{
	int failed = !tokens_in_order_are_one_apart() + !stale_repeated_and_forged_tokens_are_refused() +
		     !a_table_grows_to_its_quota_and_shrinks_to_nothing() +
		     !no_token_that_is_not_held_is_accepted(trials);

	pr_info("selftest: %d of 4 failed, %u tokens forged\n", failed, trials);
	return failed;
}
