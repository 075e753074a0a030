/* SPDX-License-Identifier: GPL-2.0 */
#ifndef WEIR_LEASE_SELFTEST_H
#define WEIR_LEASE_SELFTEST_H

#include <linux/types.h>

/* Runs every test, @trials forged tokens among them. Returns how many tests failed, each named in the log. */
int lease_selftest(u32 trials);

#endif
