/* SPDX-License-Identifier: GPL-2.0 */
/* The ways to remember references, behind one face, so that all are measured alike. */
#ifndef WEIR_LEASE_DESIGNS_H
#define WEIR_LEASE_DESIGNS_H

#include <linux/types.h>

/* MAX_SKB_FRAGS: what one refill of mainline's token pool takes. */
#define LEASE_BURST_MAX 17

struct lease_design {
	const char *name;
	/* Makes what @connections sockets and @pages pages need; NULL when there is no memory. */
	void *(*make)(u32 connections, u32 pages);
	void (*take)(void *state, u32 connection, const u32 *pages, u32 *tokens, int count);
	/* Returns how many came back. */
	int (*give)(void *state, u32 connection, const u32 *tokens, int count);
	void (*destroy)(void *state);
};

extern const struct lease_design lease_nothing;
extern const struct lease_design lease_xarray;
extern const struct lease_design lease_binding;
extern const struct lease_design lease_slots;
extern const struct lease_design lease_slots_counted;

#endif
