// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The driver's queue by itself, from the checkout that it is built with: the driver's own self-test,
 * those of kernel/queue, which know of order, freeing and interrupts too, and the benchmark.
 */
#include <linux/completion.h>
#include <linux/kthread.h>
#include <linux/module.h>
#include <linux/vmalloc.h>
#include "nv-kthread-q.h"

#define DESIGN KBUILD_MODNAME
#define nv_kthread_q_run_self_test our_self_test
#include "selftest.h"
#undef nv_kthread_q_run_self_test

static int both_self_tests(void)
{
	int failed = nv_kthread_q_run_self_test();

	tests_run++;
	tests_failed += failed != 0;
	pr_info(DESIGN ": the driver's own self-test: %s\n", failed ? "FAILED" : "passed");
	return our_self_test() || failed;
}

#include "bench.h"
#define nv_kthread_q_run_self_test both_self_tests
#include "module.h"
