//! A store's chunks, whose memory can be given back to its owner, and the state of each.

use crate::ranges::Ranges;
use crate::records::EXTENT_SLOTS;
use crate::{Pool, Tier};
use std::ops::Range;
use std::sync::atomic::Ordering;
use weir_core::PAGE_SIZE;
use weir_store::{Fault, Reclaim, Store};

/// The state of a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ChunkState {
    /// The chunk has its memory, and takes pages.
    Held,
    /// The chunk takes no more pages, and its pages move out.
    Emptying,
    /// The chunk's memory was given back to its owner.
    GivenBack,
}

/// Numbers of a store's chunks by state.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ChunkCounts {
    /// Number of slots of a whole chunk.
    pub slots: u32,
    /// Number of chunks that hold pages.
    pub held: u32,
    /// Number of chunks that have their memory and no page in it.
    pub reserve: u32,
    /// Number of chunks whose pages are moving out.
    pub emptying: u32,
    /// Number of chunks whose memory was given back.
    pub given_back: u32,
}

/// A chunk of a pool's store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChunkStatus {
    /// The chunk's number in the store.
    pub chunk: u32,
    /// The chunk's state.
    pub state: ChunkState,
    /// Number of the chunk's slots; the last chunk of a store may have fewer than the others.
    pub slots: u32,
    /// Number of slots that hold a page.
    pub used: u32,
    /// The reason why the chunk's memory was given back, if it was.
    pub note: Note,
}

impl ChunkStatus {
    /// Bytes of the chunk's memory.
    pub fn bytes(&self) -> u64 {
        u64::from(self.slots) * PAGE_SIZE as u64
    }
}

/// The reason why a chunk's memory was given back. The default: a client asked for the memory. See
/// [`Pool::note`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Note {
    /// Whether the governor gave the chunk back, and not a client.
    pub unasked: bool,
    /// Whether the chunk was given back because the machine sleeps, or is about to.
    pub asleep: bool,
}

/// The states of a chunk, as its word of shared memory has them, behind the slot records. From this
/// word the next daemon learns which chunks the last one gave back.
const HELD: u64 = 0;
const EMPTYING: u64 = 1;
const GIVEN_BACK: u64 = 2;
/// The bits of a chunk's word that hold its state.
const STATE: u64 = 0xff;
/// The bit of a [`Note`] in a chunk's word: the chunk was given back because the governor asked for
/// it.
const UNASKED: u64 = 0x100;
/// The bit of a [`Note`] in a chunk's word: the chunk was given back because the machine sleeps.
const ASLEEP: u64 = 0x200;

/// Number of slots of one chunk. A store that cannot give memory back is one chunk.
fn slots_of_chunk(store: &dyn Store) -> u32 {
    store.reclaim().map_or_else(|| store.slots(), Reclaim::chunk_slots).max(1)
}

/// The number of a store's chunks.
pub(crate) fn count(store: &dyn Store) -> u32 {
    store.slots().div_ceil(slots_of_chunk(store))
}

impl Tier {
    pub fn chunk_state(&self, chunk: u32) -> ChunkState {
        match self.records.chunk_word(chunk).load(Ordering::Acquire) & STATE {
            HELD => ChunkState::Held,
            EMPTYING => ChunkState::Emptying,
            _ => ChunkState::GivenBack,
        }
    }

    /// Changes a chunk's state from `from` to `to`. Returns false, and changes nothing, if the
    /// chunk is in another state.
    pub fn step(&self, chunk: u32, from: ChunkState, to: ChunkState) -> bool {
        let code = |state| match state {
            ChunkState::Held => HELD,
            ChunkState::Emptying => EMPTYING,
            ChunkState::GivenBack => GIVEN_BACK,
        };
        let kept = if to == ChunkState::Held { 0 } else { UNASKED | ASLEEP };
        let word = self.records.chunk_word(chunk);
        let next = |now: u64| (now & STATE == code(from)).then_some(code(to) | now & kept);
        word.fetch_update(Ordering::AcqRel, Ordering::Acquire, next).is_ok()
    }

    /// Notes why a chunk's memory was given back.
    fn note(&self, chunk: u32, note: Note) {
        let next = |now: u64| {
            let unasked = if note.unasked { UNASKED } else { 0 };
            let asleep = if note.asleep { ASLEEP } else { 0 };
            (now & STATE != HELD).then_some(now & !(UNASKED | ASLEEP) | unasked | asleep)
        };
        // A chunk that has its memory gets no note.
        let _ = self.records.chunk_word(chunk).fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
    }

    /// Takes the chunks over from an earlier daemon. A chunk that the daemon gave back stays given
    /// back, and a chunk that it was emptying is open again.
    pub fn adopt_chunks(&self) {
        for chunk in 0..count(&*self.store) {
            let Some(slots) = self.chunk(chunk) else { continue };
            match self.chunk_state(chunk) {
                ChunkState::Held => {}
                ChunkState::Emptying => {
                    self.step(chunk, ChunkState::Emptying, ChunkState::Held);
                }
                ChunkState::GivenBack => {
                    self.records.close(extents(&slots));
                    // The next daemon's store may hold memory for this chunk again. If the store
                    // cannot release that memory, the memory stays unused.
                    let _ = self.release(chunk);
                }
            }
        }
    }

    /// A chunk's slots; `None` if there is no such chunk, or chunks do not consist of whole
    /// extents.
    pub fn chunk(&self, chunk: u32) -> Option<Range<u32>> {
        let (slots, chunk_slots) = (self.records.slots(), slots_of_chunk(&*self.store));
        let first = chunk.checked_mul(chunk_slots).filter(|&first| first < slots)?;
        let end = first.saturating_add(chunk_slots).min(slots);
        (first.is_multiple_of(EXTENT_SLOTS) && (end.is_multiple_of(EXTENT_SLOTS) || end == slots))
            .then_some(first..end)
    }

    /// Gives a chunk's memory back to its owner.
    pub fn release(&self, chunk: u32) -> Result<(), Fault> {
        self.store.reclaim().map_or(Err(Fault::Unsupported), |store| store.release(chunk))
    }

    fn chunk_status(&self, chunk: u32) -> Option<ChunkStatus> {
        let slots = self.chunk(chunk)?;
        let free = self.records.free_in(extents(&slots));
        let slots = slots.len() as u32;
        let word = self.records.chunk_word(chunk).load(Ordering::Acquire);
        let note = Note { unasked: word & UNASKED != 0, asleep: word & ASLEEP != 0 };
        let used = slots.saturating_sub(free);
        Some(ChunkStatus { chunk, state: self.chunk_state(chunk), slots, used, note })
    }

    fn chunk_statuses(&self) -> impl Iterator<Item = ChunkStatus> {
        (0..count(&*self.store)).filter_map(|chunk| self.chunk_status(chunk))
    }

    pub fn chunk_counts(&self) -> ChunkCounts {
        let mut counts = ChunkCounts { slots: slots_of_chunk(&*self.store), ..ChunkCounts::default() };
        for chunk in self.chunk_statuses() {
            let count = match chunk.state {
                ChunkState::Held if chunk.used == 0 => &mut counts.reserve,
                ChunkState::Held => &mut counts.held,
                ChunkState::Emptying => &mut counts.emptying,
                ChunkState::GivenBack => &mut counts.given_back,
            };
            *count += 1;
        }
        counts
    }
}

/// The extents that the slots of a chunk fill.
pub(crate) fn extents(slots: &Range<u32>) -> Range<u32> {
    slots.start / EXTENT_SLOTS..slots.end.div_ceil(EXTENT_SLOTS)
}

impl Pool {
    /// The chunks of store `store` that can be given back; none where there is no such store.
    pub fn chunks(&self, store: usize) -> impl Iterator<Item = ChunkStatus> {
        self.tiers.get(store).into_iter().flat_map(Tier::chunk_statuses)
    }

    /// Notes why these chunks are given back, or are about to be. So the governor can take the
    /// chunks again that it gave back itself, even after the daemon has died. Taking a chunk
    /// deletes its note.
    pub fn note(&self, store: usize, chunks: &[u32], note: Note) {
        let Some(tier) = self.tiers.get(store) else { return };
        chunks.iter().filter(|&&chunk| tier.chunk(chunk).is_some()).for_each(|&chunk| tier.note(chunk, note));
    }

    /// Number of slots that the stores have beyond those for the volumes' pages and the slack. That
    /// many can be given back. Slots of lost members do not count.
    pub fn spare_slots(&self) -> u32 {
        let needed = self.needed_slots(&self.ranges());
        self.open_slots().saturating_sub(needed)
    }

    /// Number of slots that were promised: to volumes, and to writes under way. Vacant pages need
    /// none. If all pages are vacant, nobody writes.
    pub(crate) fn needed_slots(&self, ranges: &Ranges) -> u32 {
        let (pages, vacant) = (ranges.pages(), self.vacant.load(Ordering::Acquire));
        match pages.saturating_sub(vacant) {
            0 if vacant > 0 => 0,
            occupied => occupied.saturating_add(self.config.slack()),
        }
    }

    /// Sets the number of vacant pages. A vacant page belongs to a volume and has no content, and
    /// the volume's owner does not write it for now. The pool promises no slot for a vacant page,
    /// so more chunks can be given back. Only the owner of all volumes of the pool may call this
    /// function. To lower the number, the owner must first take as many slots again.
    pub fn set_vacant(&self, pages: u32) {
        self.vacant.store(pages, Ordering::Release);
    }

    /// Number of slots in all chunks that have their memory and take pages. Slots of lost members
    /// do not count.
    pub fn open_slots(&self) -> u32 {
        self.tiers.iter().map(Tier::open_slots).fold(0, u32::saturating_add)
    }
}
