// SPDX-License-Identifier: GPL-2.0
#include <linux/bitops.h>
#include <linux/err.h>
#include <linux/gfp.h>
#include <linux/slab.h>

#include "table.h"

#define INDEX_BITS 12
#define LAP_MASK ((1U << (32 - INDEX_BITS)) - 1)
#define IN_USE (1ULL << 63)
#define LAP_AT 40
#define PLACE_MASK ((1ULL << 34) - 1)

struct lease_chunk {
	u64 free;
	u64 slots[LEASE_CHUNK_SLOTS];
};

static struct kmem_cache *chunks;

int lease_init(void)
{
	chunks = KMEM_CACHE(lease_chunk, 0);
	return chunks ? 0 : -ENOMEM;
}

void lease_exit(void)
{
	kmem_cache_destroy(chunks);
}

void lease_table_init(struct lease_table *table, u16 quota)
{
	memset(table, 0, sizeof(*table));
	table->quota = min_t(u16, quota, LEASE_QUOTA_MAX);
}

static inline struct lease_chunk *chunk_at(const struct lease_table *table, u32 position)
{
	return table->directory ? table->directory[position] : table->only;
}

static void next_lap(struct lease_table *table)
{
	table->lap = (table->lap + 1) & LAP_MASK;
	table->cursor = 0;
}

/* Gives a table whose slots are all taken one more chunk, at the first position that has none. */
static int attach(struct lease_table *table)
{
	struct lease_chunk *chunk = kmem_cache_alloc(chunks, GFP_ATOMIC);
	u32 position = table->present ? ffz(table->present) : 0;

	if (!chunk)
		return -ENOMEM;
	if (table->present && !table->directory) {
		table->directory = kcalloc(LEASE_CHUNKS_MAX, sizeof(chunk), GFP_ATOMIC);
		if (!table->directory) {
			kmem_cache_free(chunks, chunk);
			return -ENOMEM;
		}
		table->directory[__ffs64(table->present)] = table->only;
	}
	chunk->free = ~0ULL;
	memset(chunk->slots, 0, sizeof(chunk->slots));
	if (table->directory)
		table->directory[position] = chunk;
	else
		table->only = chunk;
	table->present |= 1ULL << position;
	table->open |= 1ULL << position;
	/* This lap may have passed the position with a chunk that it had before. */
	if (position < table->cursor / LEASE_CHUNK_SLOTS)
		next_lap(table);
	return position;
}

static void detach(struct lease_table *table, u32 position, struct lease_chunk *chunk)
{
	table->present &= ~(1ULL << position);
	table->open &= ~(1ULL << position);
	kmem_cache_free(chunks, chunk);
	if (table->directory && hweight64(table->present) == 1) {
		table->only = table->directory[__ffs64(table->present)];
		kfree(table->directory);
		table->directory = NULL;
	}
}

/* The position of the chunk from which the next slots come, and which of them are free in this lap. */
static int find(struct lease_table *table, u64 *free)
{
	u32 position = table->cursor / LEASE_CHUNK_SLOTS;
	u64 ahead = ~0ULL << (table->cursor % LEASE_CHUNK_SLOTS);
	u64 later = table->open & (~0ULL << position << 1);
	int found;

	if (table->open >> position & 1) {
		*free = chunk_at(table, position)->free & ahead;
		if (*free)
			return position;
	}
	if (later) {
		found = __ffs64(later);
	} else if (table->open) {
		next_lap(table);
		found = __ffs64(table->open);
	} else {
		found = attach(table);
		if (found < 0)
			return found;
	}
	*free = chunk_at(table, found)->free;
	if (found == table->cursor / LEASE_CHUNK_SLOTS)
		*free &= ~0ULL << (table->cursor % LEASE_CHUNK_SLOTS);
	return found;
}

int lease_take(struct lease_table *table, const lease_place *places, u32 *tokens, int count)
{
	int limit = min_t(int, count, table->quota - table->held);
	int taken = 0;

	if (!limit && count)
		return -ENOSPC;
	while (taken < limit) {
		struct lease_chunk *chunk;
		u64 free, before;
		u32 index = 0;
		int position = find(table, &free);

		if (position < 0)
			return taken ? taken : position;
		chunk = chunk_at(table, position);
		before = free;
		for (; taken < limit && free; taken++, free &= free - 1) {
			u32 bit = __ffs64(free);

			chunk->slots[bit] = IN_USE | (u64)table->lap << LAP_AT | (places[taken] & PLACE_MASK);
			index = position * LEASE_CHUNK_SLOTS + bit;
			tokens[taken] = table->lap << INDEX_BITS | index;
		}
		table->held += hweight64(before ^ free);
		chunk->free &= ~(before ^ free);
		if (!chunk->free)
			table->open &= ~(1ULL << position);
		table->cursor = index + 1;
		if (table->cursor == LEASE_QUOTA_MAX)
			next_lap(table);
	}
	return taken;
}

/* Notes that slots of a chunk are free. */
static void put_back(struct lease_table *table, u32 position, struct lease_chunk *chunk, u64 freed)
{
	table->held -= hweight64(freed);
	table->open |= 1ULL << position;
	chunk->free |= freed;
	if (chunk->free == ~0ULL)
		detach(table, position, chunk);
}

int lease_give(struct lease_table *table, const u32 *tokens, lease_place *places, int count)
{
	struct lease_chunk *chunk = NULL;
	u32 current_position = U32_MAX;
	u64 freed = 0;
	int back = 0;
	int i;

	for (i = 0; i < count; i++) {
		u32 index = tokens[i] & (LEASE_QUOTA_MAX - 1);
		u32 position = index / LEASE_CHUNK_SLOTS;
		u32 bit = index % LEASE_CHUNK_SLOTS;
		u64 word;

		if (position != current_position) {
			if (freed)
				put_back(table, current_position, chunk, freed);
			freed = 0;
			current_position = U32_MAX;
			if (!(table->present >> position & 1))
				continue;
			current_position = position;
			chunk = chunk_at(table, position);
		}
		word = chunk->slots[bit];
		if (word >> LAP_AT != (IN_USE >> LAP_AT | tokens[i] >> INDEX_BITS))
			continue;
		chunk->slots[bit] = word & ~IN_USE;
		freed |= 1ULL << bit;
		places[back++] = word & PLACE_MASK;
	}
	if (freed)
		put_back(table, current_position, chunk, freed);
	return back;
}

int lease_close(struct lease_table *table, lease_returned returned, void *context)
{
	int held = table->held;

	while (table->present) {
		u32 position = __ffs64(table->present);
		struct lease_chunk *chunk = chunk_at(table, position);
		u64 taken;

		for (taken = ~chunk->free; taken; taken &= taken - 1)
			returned(context, chunk->slots[__ffs64(taken)] & PLACE_MASK);
		detach(table, position, chunk);
	}
	kfree(table->directory);
	/* The lap goes on, so that old tokens stay refused should the table be used again. */
	table->directory = NULL;
	table->open = 0;
	table->held = 0;
	return held;
}
