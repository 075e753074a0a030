//! Gives a store's memory back to its owner, chunk by chunk, and takes it again, while the volume
//! stays in use.
//!
//! First the chunks are closed: no slot of them is claimed any more. Then every page in them is
//! written to another slot. Once no lane can be reading a chunk's slots, its memory is released.
//! Readers and writers go on all the while. A page that is written during the move has left the
//! chunk, and need not be moved.

use crate::chunks::{ChunkState, extents};
use crate::entry::Place;
use crate::mover::{Awaited, Driver, Mover};
use crate::{Tier, Volume};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use weir_core::{ByteSize, PAGE_SIZE, PageNo, Slot};
use weir_store::{Fault, Progress};

/// Longest time that a give-back waits for lanes that are within a batch, before it gives up.
pub(crate) const LANES_WAIT: Duration = Duration::from_secs(10);

/// The reason why a chunk stays.
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
    /// The volume promises its size, and could not keep that promise without this chunk.
    #[error("the other stores are too small by {}: give the volume more backing first", ByteSize(u64::from(*.missing) * PAGE_SIZE as u64))]
    NoRoom {
        /// Slots that would be missing.
        missing: u32,
    },
    /// Some pages can neither be read nor moved. The chunk stays, so that they are not lost for
    /// good.
    #[error("page {} cannot be moved: {} ({} such pages were met)", .0[0].0.0, .0[0].1, .0.len())]
    Pages(
        /// The failed pages that were met before the work ended, with the faults of their stores.
        Vec<(PageNo, Fault)>,
    ),
    /// An earlier daemon's writes to the store may still be under way.
    #[error(
        "what the daemon before had begun to write is still under way; try again when the disk has done it"
    )]
    Settling,
    /// A lane has been busy for longer than any operation should take.
    #[error("a lane has been busy for {LANES_WAIT:?}")]
    Busy,
    /// The mover's driver stopped the move.
    #[error("it was stopped")]
    Stopped,
    /// The store cannot release or take memory.
    #[error("the store cannot do it: {0}")]
    Store(Fault),
}

/// The outcome of promoting pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MovedUp {
    /// Number of pages moved.
    pub pages: u32,
    /// Whether there is more to do: the faster stores have room, and the slower one may still hold
    /// pages.
    pub more: bool,
}

impl Volume {
    /// Closes chunks of store `store`, either all of them or none. A closed chunk takes no more
    /// pages. Then [`Mover::finish_give_back`] empties each, or [`keep`](Volume::keep) opens it
    /// again.
    ///
    /// # Errors
    /// Fails when a chunk cannot be given back, or the volume's size needs the chunks.
    pub fn begin_give_back(&self, store: usize, chunks: &[u32]) -> Result<(), GiveBackError> {
        // A slot in quarantine belongs to no page, so no move would ever empty it.
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
        let result = result.and_then(|()| match self.config.slots().saturating_sub(self.open_slots()) {
            0 => Ok(()),
            missing => Err(GiveBackError::NoRoom { missing }),
        });
        if result.is_err() {
            chunks[..closed].iter().for_each(|&chunk| self.keep(store, chunk));
        }
        result
    }

    /// Opens a chunk again that [`begin_give_back`](Volume::begin_give_back) closed. Pages that
    /// have left it stay in their new slots.
    pub fn keep(&self, store: usize, chunk: u32) {
        if let Ok((tier, slots)) = self.find_chunk(store, chunk)
            && tier.step(chunk, ChunkState::Emptying, ChunkState::Held)
        {
            tier.records.open(extents(&slots));
        }
    }

    fn find_chunk(&self, store: usize, chunk: u32) -> Result<(&Tier, Range<u32>), GiveBackError> {
        let tier = self.tiers.get(store).ok_or(GiveBackError::NoChunk { store, chunk })?;
        let slots = tier.chunk(chunk).ok_or(GiveBackError::NoChunk { store, chunk })?;
        Ok((tier, slots))
    }
}

impl Mover {
    /// Moves the pages of chunk `chunk` of store `store` to other slots of the volume, and releases
    /// its memory. Returns the number of pages moved. Takes milliseconds to seconds.
    ///
    /// # Errors
    /// On failure the whole chunk stays in use. Every page is in it or safely in another slot.
    pub fn give_back(
        &mut self,
        store: usize,
        chunk: u32,
        driver: &mut dyn Driver,
    ) -> Result<u32, GiveBackError> {
        self.volume().begin_give_back(store, &[chunk])?;
        self.finish_give_back(store, chunk, driver)
    }

    /// Does the same for a chunk that [`Volume::begin_give_back`] has closed. Several movers may do
    /// so at once, each with chunks of its own.
    ///
    /// # Errors
    /// On failure the whole chunk is open again. Every page is in it or safely in another slot.
    pub fn finish_give_back(
        &mut self,
        store: usize,
        chunk: u32,
        driver: &mut dyn Driver,
    ) -> Result<u32, GiveBackError> {
        self.lane.forget_slot_wait();
        let volume = Arc::clone(self.volume());
        let (tier, slots) = volume.find_chunk(store, chunk)?;
        let emptied = self.empty(tier, store, slots.clone(), driver);
        self.lane.submit();
        if emptied.is_err() {
            volume.keep(store, chunk);
            return emptied;
        }
        // Record the release before doing it. If the daemon is killed in between, the chunk has
        // memory and takes no pages. In the other order it would take pages without memory.
        let stepped = tier.step(chunk, ChunkState::Emptying, ChunkState::GivenBack);
        debug_assert!(stepped, "only whoever closed a chunk moves it on");
        if let Err(fault) = tier.release(chunk) {
            tier.step(chunk, ChunkState::GivenBack, ChunkState::Held);
            tier.records.open(extents(&slots));
            return Err(GiveBackError::Store(fault));
        }
        emptied
    }

    /// Moves pages out of one of `parts` equal parts of a closed chunk, so that several movers can
    /// empty it together. Pages that stay are left to
    /// [`finish_give_back`](Mover::finish_give_back), which is called after all of them.
    ///
    /// # Errors
    /// Fails when a page cannot be moved, or `driver` stops the move. The chunk stays as it was,
    /// without the pages that were moved.
    pub fn move_out(
        &mut self,
        store: usize,
        chunk: u32,
        (part, parts): (u32, u32),
        driver: &mut dyn Driver,
    ) -> Result<u32, GiveBackError> {
        self.lane.forget_slot_wait();
        let volume = Arc::clone(self.volume());
        let (tier, slots) = volume.find_chunk(store, chunk)?;
        let size = (slots.end - slots.start).div_ceil(parts.max(1));
        let start = slots.start.saturating_add(size.saturating_mul(part)).min(slots.end);
        let slots = start..start.saturating_add(size).min(slots.end);
        let size = volume.config.depth.max(1) as u32;
        let mut moved = 0;
        let mut batches = Batches { size, queued: 0, queued_in_all: 0, moved: &mut moved };
        let outcome = self.move_slots(tier, store, slots, &mut batches, &mut Outcome::default(), driver);
        self.lane.submit();
        outcome.map(|_| moved)
    }

    /// Takes memory for a chunk that was given back, and uses the chunk again. Does nothing for
    /// another chunk.
    ///
    /// # Errors
    /// Fails when the store cannot get the memory now.
    pub fn take(&mut self, store: usize, chunk: u32) -> Result<(), GiveBackError> {
        let volume = Arc::clone(self.volume());
        let (tier, slots) = volume.find_chunk(store, chunk)?;
        match tier.chunk_state(chunk) {
            ChunkState::Held => return Ok(()),
            ChunkState::Emptying => return Err(GiveBackError::NotHeld { store, chunk }),
            ChunkState::GivenBack => {}
        }
        let taken = tier.store.reclaim().map_or(Err(Fault::Unsupported), |store| store.take(chunk));
        taken.map_err(GiveBackError::Store)?;
        if tier.step(chunk, ChunkState::GivenBack, ChunkState::Held) {
            tier.records.open(extents(&slots));
        }
        Ok(())
    }

    /// Promotes pages of store `from` into faster stores, as long as these have room: one batch.
    /// Looks at slots from `*next` on (0 at first), or at pages if the store has packs. The faster
    /// stores keep the room that writes under way need.
    ///
    /// # Errors
    /// Fails when a page cannot be read.
    pub fn move_up(
        &mut self,
        from: usize,
        next: &mut u32,
        driver: &mut dyn Driver,
    ) -> Result<MovedUp, GiveBackError> {
        self.lane.forget_slot_wait();
        let volume = Arc::clone(self.volume());
        let Some(tier) = volume.tiers.get(from) else { return Ok(MovedUp { pages: 0, more: false }) };
        let batch = volume.config.depth.max(1) as u32;
        let room = volume.tiers[..from].iter().map(Tier::free_online).fold(0, u32::saturating_add);
        let batch = batch.min(room.saturating_sub(volume.config.slack()));
        let (mut found, mut looked) = (0, 0);
        self.lane.reach = from;
        let mut outcome = Outcome::default();
        // A pack's record does not name its pages; only the map does.
        let by_page = tier.records.has_packs();
        let end = if by_page { volume.pages() } else { tier.records.slots() };
        while found < batch && *next < end && looked < SEARCH {
            let at = *next;
            *next += 1;
            looked += 1;
            found += u32::from(if by_page {
                self.start_move_of(PageNo(at), from, 0..tier.records.slots(), batch, &mut outcome, driver)
            } else {
                self.start_move(tier, from, Slot(at), batch, &mut outcome, driver).1
            });
        }
        let ended = self.settle(&mut outcome, driver);
        self.lane.reach = volume.tiers.len();
        self.lane.submit();
        self.lane.metrics().moved_up.add(u64::from(outcome.moved));
        ended?;
        let is_full = outcome.failed.iter().any(|&(_, fault)| fault == Fault::Full);
        outcome.failed.retain(|&(_, fault)| fault != Fault::Full);
        if !outcome.failed.is_empty() {
            return Err(GiveBackError::Pages(outcome.failed));
        }
        let more = batch > 0 && !is_full && *next < end;
        Ok(MovedUp { pages: outcome.moved, more })
    }

    /// Moves every page out of slots that are closed.
    fn empty(
        &mut self,
        tier: &Tier,
        store: usize,
        slots: Range<u32>,
        driver: &mut dyn Driver,
    ) -> Result<u32, GiveBackError> {
        let batch = self.volume().config.depth.max(1) as u32;
        let (mut moved, began) = (0, driver.now());
        loop {
            // Lanes that claimed a slot here before it was closed publish it, or free it, before
            // their pin ends.
            self.wait_for_lanes(driver)?;
            let mut left = false;
            let mut batches = Batches { size: batch, queued: 0, queued_in_all: 0, moved: &mut moved };
            let mut outcome = Outcome::default();
            left |= self.move_slots(tier, store, slots.clone(), &mut batches, &mut outcome, driver)?;
            if left && tier.records.has_packs() {
                let pages = self.volume().pages();
                for page in (0..pages).map(PageNo) {
                    let started = self.start_move_of(page, store, slots.clone(), batch, &mut outcome, driver);
                    batches.count(started);
                    self.end_batch(&mut batches, &mut outcome, driver, page.0 + 1 == pages)?;
                }
            }
            let queued_in_all = batches.queued_in_all;
            if !left {
                // A lane may have freed slots since the wait above while another lane still reads a
                // page there.
                self.wait_for_lanes(driver)?;
                return Ok(moved);
            }
            if queued_in_all == 0 {
                // Pages that are lent: the map does not name their slots any more, and a borrower
                // still reads them in place.
                if driver.now() > began + LANES_WAIT {
                    return Err(GiveBackError::Busy);
                }
                driver.rest(Awaited::Loans);
            }
        }
    }

    /// Moves the pages in these slots. Returns whether any slot was in use.
    fn move_slots(
        &mut self,
        tier: &Tier,
        store: usize,
        slots: Range<u32>,
        batches: &mut Batches<'_>,
        outcome: &mut Outcome,
        driver: &mut dyn Driver,
    ) -> Result<bool, GiveBackError> {
        let (batch, mut left) = (batches.size, false);
        for slot in slots.clone().map(Slot) {
            let (occupied, started) = self.start_move(tier, store, slot, batch, outcome, driver);
            left |= occupied;
            batches.count(started);
            self.end_batch(batches, outcome, driver, slot.0 + 1 == slots.end)?;
        }
        Ok(left)
    }

    /// Starts to move the page in a slot, if the map names the slot. Returns whether the slot is in
    /// use, and whether a move was started.
    fn start_move(
        &mut self,
        tier: &Tier,
        store: usize,
        slot: Slot,
        batch: u32,
        outcome: &mut Outcome,
        driver: &mut dyn Driver,
    ) -> (bool, bool) {
        let Some(occupant) = tier.records.occupant(slot) else { return (false, false) };
        let (page, here) = (occupant.page, Place::Stored { store, slot });
        if page.0 >= self.volume().pages() || self.volume().map.load(page).place() != here {
            return (true, false);
        }
        self.queue_move(page, here, batch, outcome, driver);
        (true, true)
    }

    /// Starts to move a page, if it lies in one of these slots of store `store`. Returns whether it
    /// did.
    fn start_move_of(
        &mut self,
        page: PageNo,
        store: usize,
        slots: Range<u32>,
        batch: u32,
        outcome: &mut Outcome,
        driver: &mut dyn Driver,
    ) -> bool {
        let here = self.volume().map.load(page).place();
        let lies_there =
            matches!(here, Place::Stored { store: at, slot } if at == store && slots.contains(&slot.0));
        if lies_there {
            self.queue_move(page, here, batch, outcome, driver);
        }
        lies_there
    }

    fn queue_move(
        &mut self,
        page: PageNo,
        here: Place,
        batch: u32,
        outcome: &mut Outcome,
        driver: &mut dyn Driver,
    ) {
        if self.lane.in_flight() == 0 {
            self.lane.plan(batch as usize, batch as usize);
        }
        loop {
            match self.lane.move_page(page.0, page, here) {
                Progress::Done(result) => outcome.note(page, result),
                Progress::Queued => {}
                Progress::Full => {
                    self.lane.submit();
                    self.lane.poll(driver.now(), &mut |done| outcome.note(PageNo(done.ticket), done.result));
                    driver.rest(Awaited::Stores);
                    continue;
                }
            }
            return;
        }
    }

    /// Waits for a batch of moves, if it is full or the `last`, and counts its outcome.
    fn end_batch(
        &mut self,
        batches: &mut Batches<'_>,
        outcome: &mut Outcome,
        driver: &mut dyn Driver,
        last: bool,
    ) -> Result<(), GiveBackError> {
        if batches.queued < batches.size && !last {
            return Ok(());
        }
        self.settle(outcome, driver)?;
        self.lane.submit();
        self.lane.metrics().moved_out.add(u64::from(outcome.moved));
        *batches.moved += outcome.moved;
        let outcome = std::mem::take(outcome);
        if !outcome.failed.is_empty() {
            return Err(GiveBackError::Pages(outcome.failed));
        }
        let queued = std::mem::take(&mut batches.queued);
        if queued > 0 && !driver.goes_on(outcome.moved) {
            return Err(GiveBackError::Stopped);
        }
        Ok(())
    }

    /// Waits until nothing is in flight.
    fn settle(&mut self, outcome: &mut Outcome, driver: &mut dyn Driver) -> Result<(), GiveBackError> {
        self.drain(driver, &mut |_, done| outcome.note(PageNo(done.ticket), done.result))
    }

    /// Waits until every lane has ended the batch that it was in.
    fn wait_for_lanes(&mut self, driver: &mut dyn Driver) -> Result<(), GiveBackError> {
        self.lane.submit();
        let volume = Arc::clone(self.volume());
        let (epoch, began) = (volume.epochs.now(), driver.now());
        // A dropped lane may hold slots here without a pin.
        volume.close_lanes(began);
        while volume.epochs.safe() <= epoch {
            let now = driver.now();
            if now > began + LANES_WAIT {
                return Err(GiveBackError::Busy);
            }
            volume.close_lanes(now);
            driver.rest(Awaited::Lanes);
        }
        Ok(())
    }
}

/// Most slots that one step of promotion looks at: a store may be large and empty.
const SEARCH: u32 = 1 << 16;

/// The batches of moves in one pass over a chunk.
struct Batches<'a> {
    size: u32,
    queued: u32,
    queued_in_all: u32,
    moved: &'a mut u32,
}

impl Batches<'_> {
    fn count(&mut self, started: bool) {
        self.queued += u32::from(started);
        self.queued_in_all += u32::from(started);
    }
}

/// The outcome of a batch of moves.
#[derive(Default)]
struct Outcome {
    moved: u32,
    failed: Vec<(PageNo, Fault)>,
}

impl Outcome {
    fn note(&mut self, page: PageNo, result: Result<(), Fault>) {
        match result {
            Ok(()) => self.moved += 1,
            Err(fault) => self.failed.push((page, fault)),
        }
    }
}
