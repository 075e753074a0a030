// SPDX-License-Identifier: GPL-2.0
#include <linux/atomic.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>
#include <linux/xarray.h>

#include "designs.h"
#include "table.h"

/* Nothing: what remains is the harness. */

static void *nothing_make(u32 connections, u32 pages)
{
	return ZERO_SIZE_PTR;
}

static noinline void nothing_take(void *state, u32 connection, const u32 *pages, u32 *tokens, int count)
{
	memcpy(tokens, pages, count * sizeof(*tokens));
}

static noinline int nothing_give(void *state, u32 connection, const u32 *tokens, int count)
{
	return count;
}

static void nothing_destroy(void *state)
{
}

const struct lease_design lease_nothing = {
	.name = "harness", .make = nothing_make, .take = nothing_take, .give = nothing_give, .destroy = nothing_destroy,
};

/*
 * Mainline: an xarray per socket. Indices are reserved under one lock and filled under another, as
 * tcp_xa_pool_refill() and tcp_xa_pool_commit() do; a batch is erased under one, as sock_devmem_dontneed() does.
 */

struct arrays {
	u32 connections;
	struct xarray arrays[];
};

static void *xarray_make(u32 connections, u32 pages)
{
	struct arrays *state = kvzalloc(struct_size(state, arrays, connections), GFP_KERNEL);
	u32 i;

	if (!state)
		return NULL;
	state->connections = connections;
	for (i = 0; i < connections; i++)
		xa_init_flags(&state->arrays[i], XA_FLAGS_ALLOC1);
	return state;
}

static noinline void xarray_take(void *context, u32 connection, const u32 *pages, u32 *tokens, int count)
{
	struct xarray *array = &((struct arrays *)context)->arrays[connection];
	int i;

	xa_lock_bh(array);
	for (i = 0; i < count; i++)
		if (__xa_alloc(array, &tokens[i], XA_ZERO_ENTRY, xa_limit_31b, GFP_KERNEL))
			tokens[i] = 0;
	xa_unlock_bh(array);
	xa_lock_bh(array);
	for (i = 0; i < count; i++)
		__xa_cmpxchg(array, tokens[i], XA_ZERO_ENTRY, xa_mk_value(pages[i]), GFP_KERNEL);
	xa_unlock_bh(array);
}

static noinline int xarray_give(void *context, u32 connection, const u32 *tokens, int count)
{
	struct xarray *array = &((struct arrays *)context)->arrays[connection];
	int back = 0;
	int i;

	xa_lock_bh(array);
	for (i = 0; i < count; i++)
		back += __xa_erase(array, tokens[i]) != NULL;
	xa_unlock_bh(array);
	return back;
}

static void xarray_destroy(void *context)
{
	struct arrays *state = context;
	u32 i;

	for (i = 0; i < state->connections; i++)
		xa_destroy(&state->arrays[i]);
	kvfree(state);
}

const struct lease_design lease_xarray = {
	.name = "xarray", .make = xarray_make, .take = xarray_take, .give = xarray_give, .destroy = xarray_destroy,
};

/* Versions 3 to 10 of the series: an atomic counter a page, for all sockets of the binding. No reclaim on close. */

static void *binding_make(u32 connections, u32 pages)
{
	return kvcalloc(pages, sizeof(atomic_t), GFP_KERNEL);
}

static noinline void binding_take(void *context, u32 connection, const u32 *pages, u32 *tokens, int count)
{
	atomic_t *counts = context;
	int i;

	for (i = 0; i < count; i++) {
		atomic_inc(&counts[pages[i]]);
		tokens[i] = pages[i];
	}
}

static noinline int binding_give(void *context, u32 connection, const u32 *tokens, int count)
{
	atomic_t *counts = context;
	int i;

	for (i = 0; i < count; i++)
		if (atomic_dec_and_test(&counts[tokens[i]]))
			barrier();
	return count;
}

const struct lease_design lease_binding = {
	.name = "binding", .make = binding_make, .take = binding_take, .give = binding_give, .destroy = (void (*)(void *))kvfree,
};

/* The table, alone and with a count of each page (a byte, spilling is left to the crate). */

struct tables {
	u32 connections;
	u8 *counts;
	struct lease_table tables[];
};

static void slots_destroy(void *context);

static void *slots_make(u32 connections, u32 pages)
{
	struct tables *state = kvzalloc(struct_size(state, tables, connections), GFP_KERNEL);
	u32 i;

	if (!state)
		return NULL;
	state->connections = connections;
	for (i = 0; i < connections; i++)
		lease_table_init(&state->tables[i], LEASE_QUOTA_MAX);
	return state;
}

static void *slots_counted_make(u32 connections, u32 pages)
{
	struct tables *state = slots_make(connections, pages);

	if (!state)
		return NULL;
	state->counts = kvcalloc(pages, 1, GFP_KERNEL);
	if (!state->counts) {
		slots_destroy(state);
		return NULL;
	}
	return state;
}

static noinline void slots_take(void *context, u32 connection, const u32 *pages, u32 *tokens, int count)
{
	struct tables *state = context;
	lease_place places[LEASE_BURST_MAX];
	int i;

	for (i = 0; i < count; i++)
		places[i] = lease_place_of(0, pages[i]);
	lease_take(&state->tables[connection], places, tokens, count);
}

static noinline int slots_give(void *context, u32 connection, const u32 *tokens, int count)
{
	struct tables *state = context;
	lease_place places[LEASE_BURST_MAX];

	return lease_give(&state->tables[connection], tokens, places, count);
}

static noinline void slots_counted_take(void *context, u32 connection, const u32 *pages, u32 *tokens, int count)
{
	struct tables *state = context;
	int i;

	for (i = 0; i < count; i++)
		state->counts[pages[i]]++;
	slots_take(context, connection, pages, tokens, count);
}

static noinline int slots_counted_give(void *context, u32 connection, const u32 *tokens, int count)
{
	struct tables *state = context;
	lease_place places[LEASE_BURST_MAX];
	int back = lease_give(&state->tables[connection], tokens, places, count);
	int i;

	for (i = 0; i < back; i++)
		if (!--state->counts[places[i]])
			barrier();
	return back;
}

static void ignore(void *context, lease_place place)
{
}

static void slots_destroy(void *context)
{
	struct tables *state = context;
	u32 i;

	for (i = 0; i < state->connections; i++)
		lease_close(&state->tables[i], ignore, NULL);
	kvfree(state->counts);
	kvfree(state);
}

const struct lease_design lease_slots = {
	.name = "table", .make = slots_make, .take = slots_take, .give = slots_give, .destroy = slots_destroy,
};

const struct lease_design lease_slots_counted = {
	.name = "table-counted", .make = slots_counted_make, .take = slots_counted_take, .give = slots_counted_give,
	.destroy = slots_destroy,
};
