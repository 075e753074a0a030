//! Gives a store's memory back to its owner, chunk by chunk, and takes it again, while the pool
//! stays in use.
//!
//! First the chunks are closed: no lane claims slots of them any more. Then every page in them is
//! written to another slot. Once no lane can be reading a chunk's slots, its memory is released.
//! Readers and writers go on all the while. A page that is written during the move has left the
//! chunk, and need not be moved.

use crate::chunks::{ChunkState, extents};
use crate::{Pool, Tier};
use std::ops::Range;
use std::time::Duration;
use weir_core::{ByteSize, PAGE_SIZE, PageNo};
use weir_store::Fault;

/// Time that a task waits for the batches of other lanes, or for stores, before the task fails.
pub(crate) const LANES_WAIT: Duration = Duration::from_secs(10);

/// The reason why a chunk was not given back.
#[derive(Debug, thiserror::Error)]
pub enum GiveBackError {
    /// There is no such store or chunk.
    #[error("store {store} has no chunk {chunk}")]
    NoChunk {
        /// The store's index.
        store: usize,
        /// The chunk asked for.
        chunk: u32,
    },
    /// The chunk is being given back already, or was.
    #[error("chunk {chunk} of store {store} is being given back, or was")]
    NotHeld {
        /// The store's index.
        store: usize,
        /// The chunk asked for.
        chunk: u32,
    },
    /// The pool promises its size, and could not keep that promise without this chunk.
    #[error("the other stores are too small by {}: give the volume more backing first", ByteSize(u64::from(*.missing) * PAGE_SIZE as u64))]
    NoRoom {
        /// Number of slots that the other stores lack to keep the promise.
        missing: u32,
    },
    /// Some pages can neither be read nor moved. The chunk stays, so that they are not lost for
    /// good.
    #[error("page {} cannot be moved: {} ({} such pages were met)", .0[0].0.0, .0[0].1, .0.len())]
    Pages(
        /// The pages that could not be moved, each with the fault of its store. Pages that the task
        /// did not reach are not in the list.
        Vec<(PageNo, Fault)>,
    ),
    /// An earlier daemon's writes to the store may still be under way.
    #[error(
        "what the daemon before had begun to write is still under way; try again when the disk has done it"
    )]
    Settling,
    /// A lane, a store or a borrower has kept the task waiting for longer than any operation should
    /// take.
    #[error("a lane has been busy for {LANES_WAIT:?}")]
    Busy,
    /// [`Mover::stop`](crate::Mover::stop) ended the task.
    #[error("it was stopped")]
    Stopped,
    /// The store cannot release or take memory.
    #[error("the store cannot do it: {0}")]
    Store(Fault),
}

impl Pool {
    /// Closes chunks of store `store`, either all of them or none. A closed chunk takes no more
    /// pages. Then [`Task::GiveBack`](crate::Task::GiveBack) empties each, or
    /// [`cancel_give_back`](Pool::cancel_give_back) opens it again.
    ///
    /// # Errors
    /// Fails when a chunk cannot be given back, or when the pool could not keep its promised size
    /// without the chunks.
    pub fn begin_give_back(&self, store: usize, chunks: &[u32]) -> Result<(), GiveBackError> {
        // A slot in quarantine looks used and belongs to no page. So moving pages would never empty
        // its chunk.
        self.end_quarantines();
        if self.tiers.get(store).is_some_and(Tier::is_quarantined) {
            return Err(GiveBackError::Settling);
        }
        let mut closed = 0;
        let result = chunks.iter().try_for_each(|&chunk| {
            let (tier, slots) = self.find_chunk(store, chunk)?;
            if !tier.step(chunk, ChunkState::Held, ChunkState::Emptying) {
                return Err(GiveBackError::NotHeld { store, chunk });
            }
            closed += 1;
            tier.records.close(extents(&slots));
            Ok(())
        });
        // This lock keeps volumes from growing while their need is compared with the slots.
        let ranges = self.ranges();
        let needed = self.needed_slots(&ranges);
        let result = result.and_then(|()| match needed.saturating_sub(self.open_slots()) {
            0 => Ok(()),
            missing => Err(GiveBackError::NoRoom { missing }),
        });
        if result.is_err() {
            chunks[..closed].iter().for_each(|&chunk| self.cancel_give_back(store, chunk));
        }
        result
    }

    /// Opens a chunk again that [`begin_give_back`](Pool::begin_give_back) closed. Pages that
    /// have left it stay in their new slots.
    pub fn cancel_give_back(&self, store: usize, chunk: u32) {
        if let Ok((tier, slots)) = self.find_chunk(store, chunk)
            && tier.step(chunk, ChunkState::Emptying, ChunkState::Held)
        {
            tier.records.open(extents(&slots));
        }
    }

    pub(crate) fn find_chunk(&self, store: usize, chunk: u32) -> Result<(&Tier, Range<u32>), GiveBackError> {
        let tier = self.tiers.get(store).ok_or(GiveBackError::NoChunk { store, chunk })?;
        let slots = tier.chunk(chunk).ok_or(GiveBackError::NoChunk { store, chunk })?;
        Ok((tier, slots))
    }
}
