/* SPDX-License-Identifier: GPL-2.0 */
/*
 * References to pages, handed out to one socket as 32-bit tokens.
 *
 * The C form of crate weir-lease for the kernel: a token names a slot (12 bits) and the lap over the slots in
 * which it was taken (20 bits); the slot, 8 bytes, names binding and page. One owner at a time (the socket lock,
 * as SO_DEVMEM_DONTNEED and recvmsg hold it), so there are no atomics. A stale, repeated or forged token is
 * refused, which an xarray index cannot do: it is valid again as soon as it is used again.
 */
#ifndef WEIR_LEASE_TABLE_H
#define WEIR_LEASE_TABLE_H

#include <linux/types.h>

#define LEASE_CHUNK_SLOTS 64
#define LEASE_CHUNKS_MAX 64
#define LEASE_QUOTA_MAX (LEASE_CHUNK_SLOTS * LEASE_CHUNKS_MAX)

struct lease_chunk;

/* The table of one socket: 48 bytes while nothing is out. */
struct lease_table {
	u64 present; /* positions that have a chunk */
	u64 open; /* positions whose chunk has a free slot */
	struct lease_chunk *only; /* the chunk, while there is one */
	struct lease_chunk **directory; /* by position, once there are several */
	u32 lap;
	u16 cursor; /* first slot that this lap has not passed */
	u16 held;
	u16 quota;
};

/* The place that a reference points to: binding in bits 26 to 33, page in bits 0 to 25. */
typedef u64 lease_place;

static inline lease_place lease_place_of(u8 binding, u32 page)
{
	return (u64)binding << 26 | page;
}

/* Told of each reference that comes back. */
typedef void (*lease_returned)(void *context, lease_place place);

int lease_init(void);
void lease_exit(void);

void lease_table_init(struct lease_table *table, u16 quota);

/*
 * Takes a reference for each of @count places and writes the tokens. Returns how many were taken: fewer when the
 * quota is reached; -ENOSPC or -ENOMEM when none could be.
 */
int lease_take(struct lease_table *table, const lease_place *places, u32 *tokens, int count);

/* Gives @count references back and writes where they pointed. Returns how many; the others were refused. */
int lease_give(struct lease_table *table, const u32 *tokens, lease_place *places, int count);

/* Gives back all that is out, and frees what the table had. Returns how many references that were. */
int lease_close(struct lease_table *table, lease_returned returned, void *context);

#endif
