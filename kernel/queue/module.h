/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * The module: self-tests and benchmark as it loads, their outcome in the
 * kernel's log and in /sys/module/NAME/parameters. Loading fails if a test did.
 */
static unsigned int single = 300000;
module_param(single, uint, 0444);
MODULE_PARM_DESC(single, "items in a round of one producer");
static unsigned int multi = 600000;
module_param(multi, uint, 0444);
MODULE_PARM_DESC(multi, "items in a round of several producers");
static unsigned int producers = 8;
module_param(producers, uint, 0444);
MODULE_PARM_DESC(producers, "how many several is");
static unsigned int rounds = 10;
module_param(rounds, uint, 0444);
MODULE_PARM_DESC(rounds, "rounds of the benchmark; 0 leaves it out");
static bool selftest = true;
module_param(selftest, bool, 0444);
MODULE_PARM_DESC(selftest, "run the self-tests");

static struct bench_result single_result, multi_result;
module_param_named(tests_run, tests_run, int, 0444);
module_param_named(tests_failed, tests_failed, int, 0444);
module_param_named(single_ps, single_result.ps_per_item, ullong, 0444);
module_param_named(single_min_ps, single_result.ps_per_item_min, ullong, 0444);
module_param_named(single_wakes_per_million, single_result.wakes_per_million, ullong, 0444);
module_param_named(multi_ps, multi_result.ps_per_item, ullong, 0444);
module_param_named(multi_min_ps, multi_result.ps_per_item_min, ullong, 0444);
module_param_named(multi_wakes_per_million, multi_result.wakes_per_million, ullong, 0444);

static int __init weir_queue_init(void)
{
	int error;

	if (selftest && nv_kthread_q_run_self_test())
		return -EIO;
	if (!rounds)
		return 0;
	error = bench(single, 1, rounds, &single_result);
	if (!error)
		error = bench(multi, producers, rounds, &multi_result);
	return error;
}

static void __exit weir_queue_exit(void)
{
}

module_init(weir_queue_init);
module_exit(weir_queue_exit);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_DESCRIPTION("nv_kthread_q over the " DESIGN " design: self-tests and benchmark");
