//! Gives chunks of a cache's store back to their owner, and takes them again, while the cache is in
//! use.
//!
//! A frame is a page of the cache's volume, and can lie in any chunk. So memory is given back in
//! two halves. First, as many frames as the chunks have slots are closed: their pages go home or
//! are dropped, and the volume promises no slot for them any more. Then the volume empties and
//! releases chunks. The other frames keep their pages.
//!
//! A cache whose frames are all closed still works as a device. Each page then goes between the
//! client and the home. Meanwhile the lane holds a closed frame's entry exclusively, so that no
//! other lane uses the page.
//!
//! [`Reclaimer::step`] does a bounded piece of work and says what it needs next.

use crate::directory::{Closing, Frame, Outcome};
use crate::{Cache, CacheError};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use weir_core::{ByteSize, PAGE_SIZE, PageNo};
use weir_volume::{ChunkState, ChunkStatus, GiveBackError, Mover, Task};

/// Number of frames that one step looks at.
const LOOK: u32 = 1 << 16;
/// Time between two looks at frames whose pages are still on their way home.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Time between two steps while the volume waits for its store or its lanes.
const STEP_AGAIN: Duration = Duration::from_millis(1);
/// A give-back fails if no page has left its frame for this long. It is twice the time limit of an
/// operation at the home.
const PATIENCE: Duration = Duration::from_secs(60);

/// The reason why memory was not given back or taken.
#[derive(Debug, thiserror::Error)]
pub enum ReclaimError {
    /// A chunk could not be emptied, released or taken.
    #[error("chunk {chunk}: {error}")]
    Chunk {
        /// The chunk's number.
        chunk: u32,
        /// The reason.
        #[source]
        error: GiveBackError,
    },
    /// Some pages did not leave the cache: the home does not take them, or clients use them without
    /// a break.
    #[error("{} of pages do not leave the cache", ByteSize(u64::from(*.pages) * PAGE_SIZE as u64))]
    Stuck {
        /// Number of pages that have not left the cache.
        pages: u32,
    },
    /// [`Reclaimer::stop`] ended the job.
    #[error("it was stopped")]
    Stopped,
}

/// The progress of a job, or its outcome.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Reclaimed {
    /// Bytes of memory that were given back, or taken.
    pub bytes: u64,
    /// Number of pages that were moved within the cache's store. Pages that went home do not count.
    pub pages: u64,
}

/// The outcome of one step of a job.
#[derive(Debug)]
#[must_use]
pub enum Reclaim {
    /// The job goes on at the next step.
    More,
    /// The next step has nothing to do before this time.
    Waits(Instant),
    /// The job has ended. After an error, chunks that were given back or taken before stay so.
    Ended(Result<(), ReclaimError>),
}

/// Gives a cache's memory back and takes it again. Each cache has one.
pub struct Reclaimer {
    cache: Arc<Cache>,
    mover: Mover,
    job: Option<Job>,
    /// Number of frames that are vacant. All of them are behind the directory's limit.
    vacant: u32,
    done: Reclaimed,
}

struct Job {
    /// The chunks that are still to be given back or taken, in this order.
    wanted: Vec<ChunkStatus>,
    /// The chunks that the volume has closed. The first one is being emptied.
    closed: Vec<ChunkStatus>,
    phase: Phase,
    /// Number of frames in use that the present pass over the frames has found.
    waits: u32,
    /// For a resize: the cache's size afterwards, in bytes of its store.
    size: Option<u64>,
    /// The time since which no page has left its frame.
    since: Option<Instant>,
    stops: bool,
}

enum Phase {
    /// Closes frames, from this one on.
    Look(Frame),
    /// Closes chunks, as many as the vacant frames allow.
    Close,
    /// The volume's mover empties the first closed chunk.
    Move,
    /// Takes memory for the next chunk.
    Take,
    /// Opens frames before the new limit, from this one on. Then the job ends.
    Open { at: Frame, limit: u32, outcome: Result<(), ReclaimError> },
}

impl Cache {
    /// The chunks of the cache's store in this state, those with the fewest pages first. A store
    /// that cannot give memory back has none.
    pub fn chunks(&self, state: ChunkState) -> Vec<ChunkStatus> {
        if self.frames.stores().any(|store| store.reclaim().is_none()) {
            return Vec::new();
        }
        let mut chunks: Vec<_> = self.frames.chunks(0).filter(|chunk| chunk.state == state).collect();
        chunks.sort_by_key(|chunk| chunk.used);
        chunks
    }
}

impl Reclaimer {
    /// Opens the reclaimer of a cache.
    ///
    /// # Errors
    /// Fails when the cache's volume gives no lane.
    pub fn open(cache: &Arc<Cache>) -> Result<Self, CacheError> {
        let mover = cache.frames.mover()?;
        Ok(Reclaimer { cache: Arc::clone(cache), mover, job: None, vacant: 0, done: Reclaimed::default() })
    }

    /// Begins to give back these chunks, all of which are held. [`step`](Reclaimer::step) does it.
    ///
    /// # Panics
    /// Panics when another job is under way.
    pub fn give_back(&mut self, chunks: Vec<ChunkStatus>) {
        let slots: u32 = chunks.iter().map(|chunk| chunk.slots).sum();
        let limit = self.room_for(self.cache.frames.open_slots().saturating_sub(slots));
        let directory = &self.cache.directory;
        directory.set_limit(limit.min(directory.limit()));
        directory.set_leaves(true);
        self.cache.ring();
        self.begin(chunks, Phase::Look(0));
    }

    /// Begins to take these chunks again, all of which were given back. [`step`](Reclaimer::step)
    /// does it.
    ///
    /// # Panics
    /// Panics when another job is under way.
    pub fn take(&mut self, chunks: Vec<ChunkStatus>) {
        self.begin(chunks, Phase::Take);
    }

    /// Begins to make the cache smaller or larger, to `bytes` of its store. The number is rounded
    /// up to whole chunks, and the store's size is the maximum. A later take of memory does not
    /// exceed the new size: see [`fitting`](Reclaimer::fitting). A resize does not undo an earlier
    /// give-back. Returns the number of bytes that [`step`](Reclaimer::step) will give back or
    /// take.
    ///
    /// If the job fails, the cache keeps the size that it has reached.
    ///
    /// # Panics
    /// Panics when another job is under way.
    pub fn resize(&mut self, bytes: u64) -> u64 {
        let (mut held, mut away) =
            (self.cache.chunks(ChunkState::Held), self.cache.chunks(ChunkState::GivenBack));
        let sum = |chunks: &[ChunkStatus]| chunks.iter().map(ChunkStatus::bytes).sum::<u64>();
        let (there, size) = (sum(&held), self.cache.size.load(Ordering::Relaxed));
        let unit = held.iter().chain(&away).map(ChunkStatus::bytes).max().unwrap_or(1);
        let new = bytes.div_ceil(unit).saturating_mul(unit).min(there + sum(&away));
        let mut left = there;
        let moved = if new > size {
            // The last chunk of a store may be smaller. It is chosen only if no other chunk fits.
            away.sort_by_key(|chunk| std::cmp::Reverse(chunk.slots));
            away.retain(|chunk| {
                let fits = left + chunk.bytes() <= there + (new - size);
                left += if fits { chunk.bytes() } else { 0 };
                fits
            });
            self.take(away);
            left - there
        } else {
            held.retain(|chunk| {
                let fits = left >= new + chunk.bytes();
                left -= if fits { chunk.bytes() } else { 0 };
                fits
            });
            match held.is_empty() {
                true => self.take(held),
                false => self.give_back(held),
            }
            there - left
        };
        self.job.as_mut().expect("it has just begun").size = Some(new);
        moved
    }

    /// Chooses chunks to take from `chunks`, all of which were given back. Together with the held
    /// chunks, they do not exceed the cache's size.
    pub fn fitting(&self, mut chunks: Vec<ChunkStatus>) -> Vec<ChunkStatus> {
        let held = self.cache.chunks(ChunkState::Held).iter().map(ChunkStatus::bytes).sum::<u64>();
        let mut room = self.cache.size.load(Ordering::Relaxed).saturating_sub(held);
        chunks.retain(|chunk| {
            let fits = chunk.bytes() <= room;
            room -= if fits { chunk.bytes() } else { 0 };
            fits
        });
        chunks
    }

    /// Notes the cache's size at the end of a resize.
    fn end_resize(&self, new: u64, is_done: bool) {
        let held = self.cache.chunks(ChunkState::Held).iter().map(ChunkStatus::bytes).sum::<u64>();
        let before = self.cache.size.load(Ordering::Relaxed);
        let size = match (is_done, new < before) {
            (true, _) => new,
            (false, true) => held.clamp(new, before),
            (false, false) => before + self.done.bytes,
        };
        self.cache.size.store(size, Ordering::Relaxed);
    }

    fn begin(&mut self, wanted: Vec<ChunkStatus>, phase: Phase) {
        assert!(self.job.is_none(), "a reclaimer has one job at a time");
        self.done = Reclaimed::default();
        let job = Job { wanted, closed: Vec::new(), phase, waits: 0, size: None, since: None, stops: false };
        self.job = Some(job);
    }

    /// Ends the job under way soon. It fails with [`ReclaimError::Stopped`], unless it is about to
    /// succeed.
    pub fn stop(&mut self) {
        if let Some(job) = &mut self.job {
            job.stops = true;
            self.mover.stop();
        }
    }

    /// The progress of the present job, or the outcome of the last one.
    pub fn done(&self) -> Reclaimed {
        self.done
    }

    /// Does a bounded piece of the job. Returns [`Reclaim::Ended`] if there is no job.
    pub fn step(&mut self, now: Instant) -> Reclaim {
        let Some(mut job) = self.job.take() else { return Reclaim::Ended(Ok(())) };
        let step = self.advance(&mut job, now).unwrap_or_else(|error| {
            self.give_up(&mut job, error);
            Reclaim::More
        });
        if !matches!(step, Reclaim::Ended(_)) {
            self.job = Some(job);
        }
        step
    }

    fn advance(&mut self, job: &mut Job, now: Instant) -> Result<Reclaim, ReclaimError> {
        let since = *job.since.get_or_insert(now);
        match &mut job.phase {
            Phase::Look(_) | Phase::Close | Phase::Take if job.stops => Err(ReclaimError::Stopped),
            Phase::Look(at) => {
                let at = std::mem::take(at);
                self.look(job, at, now);
                Ok(Reclaim::More)
            }
            Phase::Close => {
                self.close_chunks(job)?;
                if !job.closed.is_empty() {
                    self.begin_move(job)?;
                    return Ok(Reclaim::More);
                }
                let Some(chunk) = job.wanted.first() else {
                    let limit = self.cache.directory.limit();
                    job.phase = Phase::Open { at: 0, limit, outcome: Ok(()) };
                    return Ok(Reclaim::More);
                };
                if job.waits == 0 {
                    // A member of the store is lost. So the other chunks have too few slots for the
                    // pages.
                    let missing = chunk.slots.saturating_sub(self.cache.frames.spare_slots());
                    return Err(failed(chunk.chunk, GiveBackError::NoRoom { missing }));
                }
                if now > since + PATIENCE {
                    return Err(ReclaimError::Stuck { pages: job.waits });
                }
                job.phase = Phase::Look(0);
                Ok(Reclaim::Waits(now + LOOK_AGAIN))
            }
            Phase::Move => self.step_mover(job, now),
            Phase::Take => {
                if job.wanted.is_empty() {
                    let (limit, outcome) = (self.limit(), Ok(()));
                    job.phase = Phase::Open { at: 0, limit, outcome };
                    return Ok(Reclaim::More);
                }
                let chunk = job.wanted.remove(0);
                self.mover.take(0, chunk.chunk).map_err(|error| failed(chunk.chunk, error))?;
                self.done.bytes += chunk.bytes();
                Ok(Reclaim::More)
            }
            Phase::Open { at, limit, outcome } => {
                let (first, limit) = (*at, *limit);
                *at = self.cache.directory.frames().min(first + LOOK);
                (first..*at).for_each(|frame| self.open_frame(frame, limit));
                self.cache.frames.set_vacant(self.vacant);
                if *at < self.cache.directory.frames() {
                    return Ok(Reclaim::More);
                }
                self.cache.directory.set_limit(limit);
                self.cache.directory.set_leaves(false);
                let outcome = std::mem::replace(outcome, Ok(()));
                if let Some(size) = job.size {
                    self.end_resize(size, outcome.is_ok());
                }
                Ok(Reclaim::Ended(outcome))
            }
        }
    }

    /// Ends a job that fails. Closed chunks are opened again, and then as many frames as the memory
    /// allows.
    fn give_up(&mut self, job: &mut Job, error: ReclaimError) {
        for chunk in job.closed.drain(..) {
            self.cache.frames.cancel_give_back(0, chunk.chunk);
        }
        job.phase = Phase::Open { at: 0, limit: self.limit(), outcome: Err(error) };
    }

    /// Closes the next frames behind the limit, and drops the pages that the home has.
    fn look(&mut self, job: &mut Job, at: Frame, now: Instant) {
        let cache = Arc::clone(&self.cache);
        let directory = &cache.directory;
        if at == 0 {
            job.waits = 0;
        }
        let end = directory.frames().min(at + LOOK);
        let (mut run, before) = (at..at, self.vacant);
        for frame in at..end {
            let state = if directory.is_behind(frame) { directory.close(frame) } else { Closing::Vacant };
            job.waits += u32::from(state == Closing::Waits);
            if state == Closing::Empty && run.end == frame {
                run.end += 1;
                continue;
            }
            self.vacate(std::mem::replace(&mut run, frame + 1..frame + 1));
            if state == Closing::Empty {
                run.start = frame;
            }
        }
        self.vacate(run);
        if self.vacant > before {
            job.since = Some(now);
        }
        cache.frames.set_vacant(self.vacant);
        job.phase = if end < directory.frames() { Phase::Look(end) } else { Phase::Close };
        if job.waits > 0 {
            cache.ring();
        }
    }

    /// Discards the volume's pages of closed frames that have no page.
    fn vacate(&mut self, frames: std::ops::Range<Frame>) {
        if frames.is_empty() {
            return;
        }
        self.discard(frames.start, frames.len() as u32);
        self.vacant += frames.len() as u32;
        frames.for_each(|frame| self.cache.directory.vacate(frame));
    }

    fn discard(&mut self, first: Frame, count: u32) {
        let base = self.cache.frames.range().start;
        self.mover.discard(PageNo(base + first), count);
    }

    /// Has the volume close chunks, as long as its other chunks have enough slots for its pages.
    fn close_chunks(&self, job: &mut Job) -> Result<(), ReclaimError> {
        let volume = &self.cache.frames;
        while let Some(chunk) = job.wanted.first().copied() {
            if chunk.slots > volume.spare_slots() {
                break;
            }
            volume.begin_give_back(0, &[chunk.chunk]).map_err(|error| failed(chunk.chunk, error))?;
            job.closed.push(job.wanted.remove(0));
        }
        Ok(())
    }

    fn begin_move(&mut self, job: &mut Job) -> Result<(), ReclaimError> {
        let chunk = job.closed[0].chunk;
        self.mover.begin(Task::GiveBack { store: 0, chunk }).map_err(|error| failed(chunk, error))?;
        job.phase = Phase::Move;
        Ok(())
    }

    fn step_mover(&mut self, job: &mut Job, now: Instant) -> Result<Reclaim, ReclaimError> {
        let result = match self.mover.step(now) {
            weir_volume::Step::More { .. } => return Ok(Reclaim::More),
            weir_volume::Step::Waits(..) => return Ok(Reclaim::Waits(now + STEP_AGAIN)),
            weir_volume::Step::Ended(result) => result,
        };
        let chunk = job.closed.remove(0);
        match result {
            Ok(moved) => {
                self.done.bytes += chunk.bytes();
                self.done.pages += u64::from(moved.pages);
                job.since = Some(now);
                if job.stops && !(job.closed.is_empty() && job.wanted.is_empty()) {
                    return Err(ReclaimError::Stopped);
                }
                if job.closed.is_empty() {
                    job.phase = if job.wanted.is_empty() { Phase::Close } else { Phase::Look(0) };
                } else {
                    self.begin_move(job)?;
                }
                Ok(Reclaim::More)
            }
            Err(GiveBackError::Pages(pages)) if self.drop_unreadable(&pages) > 0 => {
                // The chunk is open again. It is closed and emptied once more.
                job.wanted.insert(0, chunk);
                if job.closed.is_empty() {
                    job.phase = Phase::Close;
                } else {
                    self.begin_move(job)?;
                }
                Ok(Reclaim::More)
            }
            Err(GiveBackError::Stopped) => Err(ReclaimError::Stopped),
            Err(error) => Err(failed(chunk.chunk, error)),
        }
    }

    /// Drops pages that cannot be read in the cache's store, if the home has them. Returns their
    /// number.
    fn drop_unreadable(&mut self, pages: &[(PageNo, weir_device::Fault)]) -> usize {
        let base = self.cache.frames.range().start;
        let cache = Arc::clone(&self.cache);
        let taken = pages.iter().filter_map(|(page, _)| cache.directory.seize(page.0.checked_sub(base)?));
        let taken: Vec<_> = taken.collect();
        for held in &taken {
            self.discard(held.frame, 1);
            cache.directory.let_go(*held, Outcome::Nothing);
        }
        taken.len()
    }

    /// The new limit: the number of frames that the present memory has slots for. Some pages may
    /// still be in frames above the old limit: their slots are subtracted first. The new limit is
    /// never lower than the old one.
    fn limit(&self) -> u32 {
        let directory = &self.cache.directory;
        let (frames, limit) = (directory.frames(), directory.limit());
        match self.room_for(self.cache.frames.open_slots()) {
            all if all == frames => frames,
            room => limit.max(room.saturating_sub(frames - limit - self.vacant)),
        }
    }

    /// The number of frames for which this number of slots is enough, after the volume's slack is
    /// subtracted.
    fn room_for(&self, slots: u32) -> u32 {
        slots.saturating_sub(self.cache.frames.config().slack()).min(self.cache.directory.frames())
    }

    /// Opens a frame if it is before the new limit.
    fn open_frame(&mut self, frame: Frame, limit: u32) {
        let directory = &self.cache.directory;
        if directory.is_beyond(frame, limit) {
            return;
        }
        if directory.load(frame).is_vacant() {
            self.vacant -= 1;
        }
        directory.open(frame);
    }
}

fn failed(chunk: u32, error: GiveBackError) -> ReclaimError {
    ReclaimError::Chunk { chunk, error }
}
