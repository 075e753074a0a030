//! The tool by which a worker moves pages: one task at a time, a step at a time.
//!
//! A task takes milliseconds to seconds, and waits for stores and for other lanes. So it is a state
//! machine. Each [`step`](Mover::step) does a bounded piece of work and says what the task needs
//! next. A mover neither sleeps nor reads a clock: the worker that drives it does, or a simulator.

use crate::chunks::{ChunkState, extents};
use crate::entry::Place;
use crate::give_back::LANES_WAIT;
use crate::lane::OPENED_MAX;
use crate::{GiveBackError, Lane, PAGES_MAX, Pool, Removal, Sparse, Tier, Volume};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;
use weir_core::{PageNo, Slot};
use weir_store::{Fault, OpenError, Progress};

/// Largest number of slots or pages that one task of promotion or compaction looks at, since a
/// store may be large and empty.
const SEARCH: u32 = 1 << 16;
/// Largest number of slots or pages that one step looks at.
const LOOKS: u32 = 1 << 12;

/// The work of a [`Mover`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Task {
    /// Empties a chunk that [`Pool::begin_give_back`] has closed: moves its pages to other slots of
    /// the pool, and releases its memory. Several movers may work at once, each on a chunk of its
    /// own. If the task fails, the whole chunk is open again. Each page then lies in the chunk, or
    /// in its new slot.
    GiveBack {
        /// The store's index among the pool's stores.
        store: usize,
        /// The chunk's number in the store.
        chunk: u32,
    },
    /// Moves pages out of one part of a closed chunk. The chunk is divided into equal parts, so
    /// that several movers can empty it together. Pages that stay are left to [`Task::GiveBack`],
    /// which follows all parts.
    MoveOut {
        /// The store's index among the pool's stores.
        store: usize,
        /// The chunk's number in the store.
        chunk: u32,
        /// The part of the chunk to empty, counted from 0, and the number of the chunk's parts.
        part: (u32, u32),
    },
    /// Promotes pages of a store, as many as one batch takes and the faster stores have room for.
    /// The faster stores keep the room that writes under way need.
    MoveUp {
        /// The store's index among the pool's stores.
        from: usize,
        /// The first slot that the task looks at, or the first page if the store has packs: 0 at
        /// first, then [`Mover::next`].
        next: u32,
    },
    /// Empties sparse packs, as many as one batch takes. A page that cannot be moved stays in its
    /// slot, and [`Mover::failed`] names it.
    Compact {
        /// The store's index among the pool's stores.
        store: usize,
        /// The first slot that the task looks at: 0 at first, then [`Mover::next`].
        next: u32,
        /// Which packs to empty.
        sparse: Sparse,
    },
}

/// The outcome of one step of a task.
#[derive(Debug)]
#[must_use]
pub enum Step {
    /// The task goes on at the next step, and waits for nothing.
    More {
        /// Number of pages that were moved since the last step that returned `More`.
        moved: u32,
    },
    /// The next step has nothing to do before this event. The task fails if the event has not come
    /// by this time.
    Waits(Awaited, Instant),
    /// The task has ended. After an error each page lies in its old slot or in its new one.
    Ended(Result<Moved, GiveBackError>),
}

/// The event without which a [`Mover`]'s next step would do nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Awaited {
    /// Answers of stores, which take microseconds to milliseconds.
    Stores,
    /// The ends of batches that other lanes have begun, which mostly take microseconds.
    Lanes,
    /// The return of lent slots by programs that read these slots in place. A program may keep a
    /// slot as long as it likes. A search for slots that are still lent goes through the whole
    /// chunk.
    Loans,
}

/// The result of a task.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Moved {
    /// Number of pages that the task moved.
    pub pages: u32,
    /// Whether there is more to do, from [`Mover::next`] on.
    pub more: bool,
}

/// A lane that moves pages, as many at a time as [`Config::depth`](crate::Config::depth) says. It
/// gives memory back, takes it again, promotes pages, and compacts packs.
pub struct Mover {
    lane: Lane,
    job: Option<Job>,
    failed: Vec<(PageNo, Fault)>,
    next: u32,
}

/// The task that a mover is doing, and its state.
struct Job {
    task: Task,
    phase: Phase,
    /// The slots, or the page numbers, that the task still has to look at.
    range: Range<u32>,
    /// Largest number of moves in a batch.
    batch: u32,
    /// Number of moves begun in this batch, and in this pass over a chunk.
    queued: u32,
    passed: u32,
    /// Number of pages moved in this batch, and by the whole task.
    moved: u32,
    total: u32,
    /// Whether this pass over the chunk has met a slot in use.
    left: bool,
    /// A page of an opened pack, and its slot. The lane was full when the page was to be moved.
    held: Option<(PageNo, Slot)>,
    /// The time of the task's first step.
    began: Option<Instant>,
    /// The time when the present wait began.
    since: Option<Instant>,
    stops: bool,
}

/// The state of a task. When a batch is full, the task [settles](Phase::Settle) it before it goes
/// on to the next state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// Waits until every lane has ended its batch. Holds the epoch in which the wait began.
    Lanes(Option<u64>),
    /// Waits as [`Phase::Lanes`] does, once no page is left in the chunk.
    LastLanes(Option<u64>),
    /// Moves the pages of slots, from this slot on.
    Slots(u32),
    /// Moves the pages that lie in the task's slots. The search goes on at this page number.
    Pages(u32),
    /// Packs in slots from this one on are opened. The second number counts those opened so far.
    Open(u32, u32),
    /// Moves the pages of opened packs.
    Gather,
    /// Waits until no operation is in flight.
    Settle(Next),
    /// Marks the chunk as given back, and releases its memory.
    Release,
}

/// The phase that follows once a batch has settled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Next {
    Slots(u32),
    Pages(u32),
    EndOfSlots,
    EndOfPass,
    Gather,
    End,
}

impl Pool {
    /// Opens a mover for a worker.
    ///
    /// # Errors
    /// Fails as [`lane`](Volume::lane) does.
    pub fn mover(self: &Arc<Self>) -> Result<Mover, OpenError> {
        Ok(Mover {
            lane: Lane::open(Volume::whole(self), self.config.depth.max(1), 0)?,
            job: None,
            failed: Vec::new(),
            next: 0,
        })
    }
}

impl Mover {
    /// The pool whose pages this mover moves.
    pub fn pool(&self) -> &Arc<Pool> {
        self.lane.volume().pool()
    }

    /// Goes on with a removal: discards the next pages, at most `most`. Returns whether the removal
    /// has ended, so that another volume may take the range.
    pub fn remove(&mut self, removal: &mut Removal, most: u32) -> bool {
        debug_assert!(Arc::ptr_eq(self.pool(), removal.pool()), "the mover is of another pool");
        let (first, count) = removal.next(most);
        self.lane.discard(first, count);
        self.lane.submit();
        removal.advance(count)
    }

    /// Discards pages `first..first + count` of the pool.
    pub fn discard(&mut self, first: PageNo, count: u32) {
        self.lane.discard(first, count);
        self.lane.submit();
    }

    /// Abandons the mover as [`Lane::abandon`] does.
    pub fn abandon(self) {
        self.lane.abandon();
    }

    /// Begins a task; [`step`](Mover::step) does it.
    ///
    /// # Errors
    /// Fails when there is no such store or chunk.
    ///
    /// # Panics
    /// Panics when another task is under way.
    pub fn begin(&mut self, task: Task) -> Result<(), GiveBackError> {
        assert!(self.job.is_none(), "a mover has one task at a time");
        let job = self.job(task)?;
        self.failed.clear();
        self.lane.forget_slot_wait();
        if let Task::MoveUp { from, .. } = task {
            self.lane.reach = from;
        }
        self.job = Some(job);
        Ok(())
    }

    /// Ends the task under way after its present batch. The task fails with
    /// [`GiveBackError::Stopped`], unless that batch completes it.
    pub fn stop(&mut self) {
        if let Some(job) = &mut self.job {
            job.stops = true;
        }
    }

    /// The pages that the last task could not move, with the faults of their stores. For a pack
    /// that could not be read, the slot's number stands in place of a page.
    pub fn failed(&self) -> &[(PageNo, Fault)] {
        &self.failed
    }

    /// The slot or page at which the last task of promotion or compaction has stopped.
    pub fn next(&self) -> u32 {
        self.next
    }

    /// Does a bounded piece of the task. Returns [`Step::Ended`] if there is no task.
    pub fn step(&mut self, now: Instant) -> Step {
        let Some(mut job) = self.job.take() else { return Step::Ended(Ok(Moved::default())) };
        match self.advance(&mut job, now) {
            Ok(Step::Ended(result)) => self.end(&job, result),
            Err(error) => self.end(&job, Err(error)),
            Ok(step) => {
                self.job = Some(job);
                step
            }
        }
    }

    /// Takes memory for a chunk that was given back, and uses the chunk again. Does nothing for a
    /// chunk that has its memory.
    ///
    /// # Errors
    /// Fails when the store cannot get the memory now.
    pub fn take(&mut self, store: usize, chunk: u32) -> Result<(), GiveBackError> {
        let pool = Arc::clone(self.pool());
        let (tier, slots) = pool.find_chunk(store, chunk)?;
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

    fn job(&self, task: Task) -> Result<Job, GiveBackError> {
        let pool = self.pool();
        let depth = pool.config.depth.max(1) as u32;
        let (phase, range, batch) = match task {
            Task::GiveBack { store, chunk } => (Phase::Lanes(None), pool.find_chunk(store, chunk)?.1, depth),
            Task::MoveOut { store, chunk, part: (part, parts) } => {
                let slots = pool.find_chunk(store, chunk)?.1;
                let size = (slots.end - slots.start).div_ceil(parts.max(1));
                let start = slots.start.saturating_add(size.saturating_mul(part)).min(slots.end);
                let slots = start..start.saturating_add(size).min(slots.end);
                (Phase::Slots(slots.start), slots, depth)
            }
            Task::MoveUp { from, next } => {
                let tier = pool.tiers.get(from).ok_or(GiveBackError::NoChunk { store: from, chunk: 0 })?;
                let room = pool.tiers[..from].iter().map(Tier::free_online).fold(0, u32::saturating_add);
                let batch = depth.min(room.saturating_sub(pool.config.slack()));
                // A pack's record does not name the pack's pages; only the page map does. So the
                // map is searched, one volume at a time.
                let packs = tier.records.has_packs();
                let volume = if packs { pool.ranges().from(next) } else { None };
                let (next, end) =
                    volume.map_or((next, end_of(pool, tier)), |it| (next.max(it.start), it.end));
                let range = next..next.saturating_add(SEARCH).min(end);
                (if packs { Phase::Pages(next) } else { Phase::Slots(next) }, range, batch)
            }
            Task::Compact { store, next, .. } => {
                let tier = pool.tiers.get(store).ok_or(GiveBackError::NoChunk { store, chunk: 0 })?;
                // A batch frees slots only at its end. So if few slots are free, a batch opens only
                // a few packs.
                let room = pool.tiers[..=store].iter().map(|tier| tier.records.open_free(|_| true));
                let batch = (room.fold(0, u32::saturating_add) / 2).clamp(2, OPENED_MAX as u32);
                (Phase::Open(next, 0), next..next.saturating_add(SEARCH).min(tier.records.slots()), batch)
            }
        };
        Ok(Job {
            task,
            phase,
            range,
            batch,
            queued: 0,
            passed: 0,
            moved: 0,
            total: 0,
            left: false,
            held: None,
            began: None,
            since: None,
            stops: false,
        })
    }

    fn end(&mut self, job: &Job, result: Result<Moved, GiveBackError>) -> Step {
        self.lane.submit();
        self.lane.reach = self.pool().tiers.len();
        self.next = job.range.start;
        // Pages of opened packs that were not moved stay where they are.
        while self.lane.opened().is_some() {}
        if let (Task::GiveBack { store, chunk }, Err(_)) = (job.task, &result) {
            self.pool().cancel_give_back(store, chunk);
        }
        Step::Ended(result)
    }

    fn advance(&mut self, job: &mut Job, now: Instant) -> Result<Step, GiveBackError> {
        job.began.get_or_insert(now);
        if job.stops && job.phase != Phase::Release {
            if self.lane.in_flight() == 0 {
                return Err(GiveBackError::Stopped);
            }
            let opening = matches!(job.phase, Phase::Open(..) | Phase::Settle(Next::Gather));
            job.phase = Phase::Settle(if opening { Next::Gather } else { Next::End });
        }
        match job.phase {
            Phase::Lanes(_) | Phase::LastLanes(_) => self.await_lanes(job, now),
            Phase::Slots(at) => self.move_slots(job, at, now),
            Phase::Pages(at) => self.move_pages(job, at, now),
            Phase::Open(at, found) => self.open_packs(job, (at, found), now),
            Phase::Gather => self.gather(job, now),
            Phase::Settle(next) => self.settle(job, next, now),
            Phase::Release => self.release(job),
        }
    }

    /// Waits until every lane has ended the batch that it was in when the wait began.
    fn await_lanes(&mut self, job: &mut Job, now: Instant) -> Result<Step, GiveBackError> {
        let (Phase::Lanes(begun) | Phase::LastLanes(begun)) = job.phase else { unreachable!("it waits") };
        let is_last = matches!(job.phase, Phase::LastLanes(_));
        // End this mover's own batch first. Otherwise the mover would wait for its own pin too.
        self.lane.submit();
        let pool = Arc::clone(self.pool());
        let epoch = begun.unwrap_or_else(|| pool.epochs.now());
        // A dropped lane may hold slots of the chunk without a pin, so take care of dropped lanes
        // first.
        pool.close_lanes(now);
        if pool.epochs.safe() <= epoch {
            job.phase = if is_last { Phase::LastLanes(Some(epoch)) } else { Phase::Lanes(Some(epoch)) };
            return job.waits(Awaited::Lanes, now);
        }
        job.since = None;
        if is_last {
            // Mark the chunk before its memory is released. A daemon that is killed in between
            // leaves a chunk that nobody uses. The other way round it would leave a chunk that
            // takes pages and has no memory.
            job.step_chunk(&pool, ChunkState::Emptying, ChunkState::GivenBack);
            job.phase = Phase::Release;
        } else {
            (job.left, job.passed, job.phase) = (false, 0, Phase::Slots(job.range.start));
        }
        Ok(Step::More { moved: 0 })
    }

    /// Moves the pages in slots from `at` on.
    fn move_slots(&mut self, job: &mut Job, mut at: u32, now: Instant) -> Result<Step, GiveBackError> {
        let pool = Arc::clone(self.pool());
        let store = job.task.store();
        let (tier, until) = (&pool.tiers[store], at.saturating_add(LOOKS).min(job.range.end));
        while at < until && job.queued < job.batch {
            let (slot, here) = (Slot(at), Place::Stored { store, slot: Slot(at) });
            let occupant = tier.records.occupant(slot);
            job.left |= occupant.is_some();
            let page = occupant.filter(|it| !it.is_pack()).map(|it| it.page);
            let there = |page: &PageNo| pool.entry(*page).is_some_and(|entry| entry.place() == here);
            if let Some(page) = page.filter(there)
                && !self.begin_move(job, page, here)
            {
                job.phase = Phase::Slots(at);
                return self.await_room(job, now);
            }
            at += 1;
        }
        job.phase = match () {
            () if at >= job.range.end => Phase::Settle(Next::EndOfSlots),
            () if job.queued >= job.batch => Phase::Settle(Next::Slots(at)),
            () => Phase::Slots(at),
        };
        if job.is_upwards() && !matches!(job.phase, Phase::Slots(_)) {
            (job.range.start, job.phase) = (at, Phase::Settle(Next::End));
        }
        self.go_on(job, now)
    }

    /// Moves pages with numbers from `at` on that lie in the chunk's slots. A promotion instead
    /// moves those that lie in the store from which it promotes.
    fn move_pages(&mut self, job: &mut Job, mut at: u32, now: Instant) -> Result<Step, GiveBackError> {
        let pool = Arc::clone(self.pool());
        let store = job.task.store();
        let (slots, end) = if job.is_upwards() {
            (0..pool.tiers[store].records.slots(), job.range.end)
        } else {
            (job.range.clone(), PAGES_MAX)
        };
        let until = at.saturating_add(LOOKS).min(end);
        let lies_there = |here| matches!(here, Place::Stored { store: it, slot } if it == store && slots.contains(&slot.0));
        while at < until && job.queued < job.batch {
            match pool.find(at..until, lies_there) {
                Ok((page, here)) if self.begin_move(job, page, here) => at = page.0 + 1,
                Ok((page, _)) => {
                    job.phase = Phase::Pages(page.0);
                    return self.await_room(job, now);
                }
                // None of these pages lies in the task's slots: the search goes on behind them.
                // Numbers up to the next volume count as searched.
                Err(next) => at = next,
            }
        }
        job.phase = match () {
            () if at >= end => Phase::Settle(Next::EndOfPass),
            () if job.queued >= job.batch => Phase::Settle(Next::Pages(at)),
            () => Phase::Pages(at),
        };
        if job.is_upwards() && !matches!(job.phase, Phase::Pages(_)) {
            (job.range.start, job.phase) = (at, Phase::Settle(Next::End));
        }
        self.go_on(job, now)
    }

    /// Reads sparse packs in slots from `at` on. `found` is the number of packs read before.
    fn open_packs(
        &mut self,
        job: &mut Job,
        (mut at, mut found): (u32, u32),
        now: Instant,
    ) -> Result<Step, GiveBackError> {
        let Task::Compact { store, sparse, .. } = job.task else { unreachable!("packs are compacted") };
        let pool = Arc::clone(self.pool());
        let until = at.saturating_add(LOOKS).min(job.range.end);
        while at < until && found < job.batch {
            let slot = Slot(at);
            if sparse.has(pool.tiers[store].records.occupant(slot)) {
                if self.lane.in_flight() == 0 {
                    self.lane.plan(job.batch as usize, job.batch as usize);
                }
                match self.lane.open_up(slot.0, store, slot) {
                    Progress::Done(result) => self.note(job, PageNo(slot.0), result),
                    Progress::Queued => {}
                    Progress::Full => {
                        job.phase = Phase::Open(at, found);
                        return self.await_room(job, now);
                    }
                }
                (found, job.since) = (found + 1, None);
            }
            at += 1;
        }
        job.range.start = at;
        job.phase = if at < until || at >= job.range.end || found >= job.batch {
            Phase::Settle(Next::Gather)
        } else {
            Phase::Open(at, found)
        };
        self.go_on(job, now)
    }

    /// Moves the pages of the packs that were opened.
    fn gather(&mut self, job: &mut Job, now: Instant) -> Result<Step, GiveBackError> {
        // A pack's pages may all have left it since it was read. Then there is nothing to move.
        while let Some((page, slot)) = job.held.take().or_else(|| self.lane.opened()) {
            let here = Place::Stored { store: job.task.store(), slot };
            if !self.begin_move(job, page, here) {
                job.held = Some((page, slot));
                return self.await_room(job, now);
            }
        }
        job.phase = Phase::Settle(Next::End);
        Ok(Step::More { moved: 0 })
    }

    /// Begins to move a page from its present place. Returns false if the lane is full.
    fn begin_move(&mut self, job: &mut Job, page: PageNo, here: Place) -> bool {
        if self.lane.in_flight() == 0 {
            self.lane.plan(job.batch as usize, job.batch as usize);
        }
        match self.lane.move_page(page.0, page, here) {
            Progress::Done(result) => self.note(job, page, result),
            Progress::Queued => {}
            Progress::Full => return false,
        }
        job.queued += 1;
        job.passed += 1;
        job.since = None;
        true
    }

    fn note(&mut self, job: &mut Job, page: PageNo, result: Result<(), Fault>) {
        match result {
            Ok(()) => job.moved += 1,
            Err(fault) => self.failed.push((page, fault)),
        }
    }

    /// Polls a lane that is full, and waits for an answer of a store if it stays full.
    fn await_room(&mut self, job: &mut Job, now: Instant) -> Result<Step, GiveBackError> {
        self.poll(job, now);
        job.waits(Awaited::Stores, now)
    }

    fn poll(&mut self, job: &mut Job, now: Instant) {
        let Mover { lane, failed, .. } = self;
        lane.submit();
        lane.poll(now, &mut |done| match done.result {
            Ok(()) => job.moved += 1,
            Err(fault) => failed.push((PageNo(done.ticket), fault)),
        });
    }

    fn go_on(&mut self, job: &mut Job, now: Instant) -> Result<Step, GiveBackError> {
        match job.phase {
            Phase::Settle(next) => self.settle(job, next, now),
            _ => Ok(Step::More { moved: 0 }),
        }
    }

    /// Waits for the operations in flight, and counts their results.
    fn settle(&mut self, job: &mut Job, next: Next, now: Instant) -> Result<Step, GiveBackError> {
        if self.lane.in_flight() > 0 {
            self.poll(job, now);
            if self.lane.in_flight() > 0 {
                return job.waits(Awaited::Stores, now);
            }
        }
        self.lane.submit();
        let moved = std::mem::take(&mut job.moved);
        (job.queued, job.since) = (0, None);
        if next == Next::Gather {
            // Packs were read, and nothing moved yet.
            if job.stops {
                return Err(GiveBackError::Stopped);
            }
            job.phase = Phase::Gather;
            return Ok(Step::More { moved: 0 });
        }
        job.total += moved;
        let metrics = self.lane.metrics();
        let count = match job.task {
            Task::GiveBack { .. } | Task::MoveOut { .. } => &metrics.moved_out,
            Task::MoveUp { .. } => &metrics.moved_up,
            Task::Compact { .. } => &metrics.compacted,
        };
        count.add(u64::from(moved));
        let stays = matches!(job.task, Task::GiveBack { .. } | Task::MoveOut { .. });
        if stays && !self.failed.is_empty() {
            return Err(GiveBackError::Pages(self.failed.clone()));
        }
        if job.stops {
            return Err(GiveBackError::Stopped);
        }
        let chunk = matches!(job.task, Task::GiveBack { .. });
        job.phase = match next {
            Next::Slots(at) => Phase::Slots(at),
            Next::Pages(at) => Phase::Pages(at),
            Next::EndOfSlots
                if chunk && job.left && self.pool().tiers[job.task.store()].records.has_packs() =>
            {
                Phase::Pages(0)
            }
            Next::EndOfSlots | Next::EndOfPass if chunk => return job.end_pass(moved, now),
            _ => return self.result(job).map(|moved| Step::Ended(Ok(moved))),
        };
        Ok(Step::More { moved })
    }

    /// The result of a task whose last batch has settled.
    fn result(&mut self, job: &Job) -> Result<Moved, GiveBackError> {
        let (pool, next) = (self.lane.volume().pool(), job.range.start);
        let more = match job.task {
            Task::GiveBack { .. } | Task::MoveOut { .. } => false,
            Task::MoveUp { .. } => {
                let is_full = self.failed.iter().any(|&(_, fault)| fault == Fault::Full);
                self.failed.retain(|&(_, fault)| fault != Fault::Full);
                if !self.failed.is_empty() {
                    return Err(GiveBackError::Pages(self.failed.clone()));
                }
                job.batch > 0 && !is_full && next < end_of(pool, &pool.tiers[job.task.store()])
            }
            Task::Compact { store, .. } => next < pool.tiers[store].records.slots(),
        };
        Ok(Moved { pages: job.total, more })
    }

    /// Releases the memory of a chunk that nobody uses any more.
    fn release(&mut self, job: &mut Job) -> Result<Step, GiveBackError> {
        let Task::GiveBack { store, chunk } = job.task else { unreachable!("a chunk is released") };
        let pool = Arc::clone(self.pool());
        let (tier, _) = pool.find_chunk(store, chunk)?;
        if let Err(fault) = tier.release(chunk) {
            job.step_chunk(&pool, ChunkState::GivenBack, ChunkState::Emptying);
            return Err(GiveBackError::Store(fault));
        }
        Ok(Step::Ended(Ok(Moved { pages: job.total, ..Moved::default() })))
    }
}

/// The end of the slots, or of the page numbers, that a promotion looks at.
fn end_of(pool: &Pool, tier: &Tier) -> u32 {
    if tier.records.has_packs() { pool.ranges().end() } else { tier.records.slots() }
}

impl Task {
    fn store(&self) -> usize {
        match *self {
            Task::GiveBack { store, .. } | Task::MoveOut { store, .. } | Task::Compact { store, .. } => store,
            Task::MoveUp { from, .. } => from,
        }
    }
}

impl Job {
    fn is_upwards(&self) -> bool {
        matches!(self.task, Task::MoveUp { .. })
    }

    /// Makes the task wait for an event. Fails if the task has waited longer than [`LANES_WAIT`].
    fn waits(&mut self, awaited: Awaited, now: Instant) -> Result<Step, GiveBackError> {
        let until = *self.since.get_or_insert(now) + LANES_WAIT;
        if now > until { Err(GiveBackError::Busy) } else { Ok(Step::Waits(awaited, until)) }
    }

    /// Decides what follows a pass over a chunk.
    fn end_pass(&mut self, moved: u32, now: Instant) -> Result<Step, GiveBackError> {
        if !self.left {
            // Since the last wait, lanes may have freed slots of the chunk that other lanes still
            // read. So wait once more.
            self.phase = Phase::LastLanes(None);
            return Ok(Step::More { moved });
        }
        // A lane may have claimed a slot of the chunk before the chunk was closed. It publishes or
        // frees the slot before its pin ends. So wait until all present pins have ended, and then
        // go through the chunk once more.
        self.phase = Phase::Lanes(None);
        if self.passed > 0 {
            return Ok(Step::More { moved });
        }
        // Only lent slots are left. Their pages have moved, and programs still read the slots in
        // place.
        let until = self.began.unwrap_or(now) + LANES_WAIT;
        if now > until { Err(GiveBackError::Busy) } else { Ok(Step::Waits(Awaited::Loans, until)) }
    }

    fn step_chunk(&self, pool: &Pool, from: ChunkState, to: ChunkState) {
        let Task::GiveBack { store, chunk } = self.task else { return };
        let stepped = pool.tiers[store].step(chunk, from, to);
        debug_assert!(stepped, "only whoever closed a chunk moves it on");
    }
}
