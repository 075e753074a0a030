//! Giving a store's memory back to its owner, chunk by chunk, while the volume stays in use.
//!
//! A chunk is closed (no slot of it is claimed any more), every page in it is written anew elsewhere, and when no lane can
//! be looking at its slots its memory is released. Readers and writers go on all the while: a page that is written during the
//! move is simply no longer there to be moved.

use crate::entry::Place;
use crate::records::EXTENT_SLOTS;
use crate::{Lane, Tier, Volume};
use std::ops::Range;
use std::time::{Duration, Instant};
use weir_core::{ByteSize, PAGE_SIZE, PageNo, Slot};
use weir_store::{Fault, Progress, State};

/// How long giving back waits for lanes that are in the middle of something before it gives up.
const LANES_WAIT: Duration = Duration::from_secs(10);

/// Why a chunk stays.
#[derive(Debug, thiserror::Error)]
pub enum GiveBackError {
    /// There is no such store or chunk.
    #[error("store {store} has no chunk {chunk}")]
    NoChunk {
        /// The store's place in the order.
        store: usize,
        /// The chunk asked for.
        chunk: u32,
    },
    /// The volume promises its size; without this chunk it could not keep the promise.
    #[error("the other stores are too small by {}: give the volume more backing first", ByteSize(u64::from(*.missing) * PAGE_SIZE as u64))]
    NoRoom {
        /// Slots that would be missing.
        missing: u32,
    },
    /// A page in it can neither be read nor moved; the chunk stays, so that it is not lost for good.
    #[error("page {} cannot be moved: {fault}", .page.0)]
    Page {
        /// The page.
        page: PageNo,
        /// What its store said.
        fault: Fault,
    },
    /// A lane has been busy for longer than any operation should take.
    #[error("a lane has been busy for {LANES_WAIT:?}")]
    Busy,
    /// The store cannot release or take memory.
    #[error("the store cannot do it: {0}")]
    Store(Fault),
}

impl Lane {
    /// Empties chunk `chunk` of store `store` into the other slots of the volume and releases its memory. Returns how many pages
    /// were moved. Takes milliseconds to seconds; for a worker with a lane of its own.
    ///
    /// # Errors
    /// The chunk stays in use, whole, with every page in it or safely elsewhere.
    pub fn give_back(&mut self, store: usize, chunk: u32) -> Result<u32, GiveBackError> {
        let volume = std::sync::Arc::clone(self.volume());
        let tier = volume.tiers.get(store).ok_or(GiveBackError::NoChunk { store, chunk })?;
        let slots = tier.chunk(chunk).ok_or(GiveBackError::NoChunk { store, chunk })?;
        let extents = extents(&slots);
        tier.records.close(extents.clone());
        let moved = volume.room().and_then(|()| self.empty(tier, store, slots));
        match moved.and_then(|moved| tier.store.release(chunk).map(|()| moved).map_err(GiveBackError::Store))
        {
            Ok(moved) => Ok(moved),
            Err(error) => {
                tier.records.open(extents);
                Err(error)
            }
        }
    }

    /// Takes memory for a chunk that was given back, and uses it again.
    ///
    /// # Errors
    /// When the store has none now.
    pub fn take(&mut self, store: usize, chunk: u32) -> Result<(), GiveBackError> {
        let volume = std::sync::Arc::clone(self.volume());
        let tier = volume.tiers.get(store).ok_or(GiveBackError::NoChunk { store, chunk })?;
        let slots = tier.chunk(chunk).ok_or(GiveBackError::NoChunk { store, chunk })?;
        tier.store.take(chunk).map_err(GiveBackError::Store)?;
        tier.records.open(extents(&slots));
        Ok(())
    }

    fn empty(&mut self, tier: &Tier, store: usize, slots: Range<u32>) -> Result<u32, GiveBackError> {
        let mut moved = 0;
        loop {
            // Lanes that claimed a slot here before it was closed publish it, or free it, before their pin ends.
            self.wait_for_lanes()?;
            let occupants =
                slots.clone().filter_map(|slot| Some((Slot(slot), tier.records.occupant(Slot(slot))?)));
            let mut left = 0;
            for (slot, occupant) in occupants {
                let here = Place::Stored { store, slot };
                if self.volume().map.load(occupant.page).place() == here {
                    self.rewrite(occupant.page)
                        .map_err(|fault| GiveBackError::Page { page: occupant.page, fault })?;
                    moved += 1;
                }
                left += 1;
            }
            if left == 0 {
                return Ok(moved);
            }
        }
    }

    /// Writes a page anew with the content that it has. A partial write of nothing is just that: it lands in a new slot, and
    /// steps back if somebody else writes the page meanwhile.
    fn rewrite(&mut self, page: PageNo) -> Result<(), Fault> {
        let mut outcome = match self.write_part(0, page, 0, &[]) {
            Progress::Done(result) => Some(result),
            Progress::Queued => None,
            Progress::Full => Some(Err(Fault::Full)),
        };
        self.submit();
        let started = Instant::now();
        while outcome.is_none() {
            self.poll(&mut |done| outcome = Some(done.result));
            if started.elapsed() > LANES_WAIT {
                return Err(Fault::Timeout);
            }
        }
        self.submit();
        outcome.expect("the loop ends with an outcome")
    }

    /// Waits until every lane has ended the batch it was in.
    fn wait_for_lanes(&mut self) -> Result<(), GiveBackError> {
        self.submit();
        let epochs = &self.volume().epochs;
        let (now, started) = (epochs.now(), Instant::now());
        while epochs.safe() <= now {
            if started.elapsed() > LANES_WAIT {
                return Err(GiveBackError::Busy);
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }
}

impl Volume {
    /// Whether the open slots, of stores that still take pages, suffice for the volume's size.
    fn room(&self) -> Result<(), GiveBackError> {
        let online = self.tiers.iter().filter(|tier| tier.store.state() == State::Online);
        let open: u32 = online.map(|tier| tier.records.open_slots()).fold(0, u32::saturating_add);
        match self.config.slots().saturating_sub(open) {
            0 => Ok(()),
            missing => Err(GiveBackError::NoRoom { missing }),
        }
    }
}

impl Tier {
    /// A chunk's slots; `None` if there is no such chunk, or chunks do not consist of whole extents.
    fn chunk(&self, chunk: u32) -> Option<Range<u32>> {
        let size = self.store.chunk_slots();
        let first = chunk.checked_mul(size).filter(|&first| first < self.records.slots())?;
        let end = first.saturating_add(size).min(self.records.slots());
        (first.is_multiple_of(EXTENT_SLOTS)
            && (end.is_multiple_of(EXTENT_SLOTS) || end == self.records.slots()))
        .then_some(first..end)
    }
}

fn extents(slots: &Range<u32>) -> Range<u32> {
    slots.start / EXTENT_SLOTS..slots.end.div_ceil(EXTENT_SLOTS)
}
