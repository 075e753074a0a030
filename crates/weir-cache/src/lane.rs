//! A lane: one thread's access to a cache.

use crate::directory::{Found, Held, Outcome};
use crate::status::Counters;
use crate::{Cache, Mode};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Release;
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, Page, PageBytes, PageNo, Slot};
use weir_device::{Done, Fault, PageGuard, PageLane, Progress, Ticket, View};
use weir_store::{Lane as HomeLane, OpenError};
use weir_volume::Lane as FrameLane;

/// Longest time that an operation waits for a page that another user holds exclusively, or for a
/// frame in the page's set. It is twice the time limit of an operation at the home.
const BUSY_WITHIN: Duration = Duration::from_secs(60);

/// A lane: one thread's access to a [`Cache`].
///
/// An operation returns [`Progress::Full`] if another user has the page exclusively, or if the
/// page's set has no free frame. If that lasts for a minute, the operation fails. Other waits have
/// no limit: a write to a disk that hangs completes when the disk answers.
pub struct CacheLane {
    parts: Parts,
    frames: FrameLane,
    home: Box<dyn HomeLane>,
}

/// The lane without its accesses to the volume and to the home. A completion changes this part
/// while one of these two accesses is borrowed for its poll. So this part is a value of its own.
struct Parts {
    cache: Arc<Cache>,
    seat: usize,
    operations: Box<[Operation]>,
    /// One page of memory for each operation: the result of a partial write, or content on its way
    /// into a frame.
    pages: Box<[Page]>,
    idle: Vec<u16>,
    /// Operations that wait for room to write their page, or for exclusive use of its frame.
    again: Vec<u16>,
    /// Flushes without an answer, each as its ticket and its number.
    flushes: Vec<(Ticket, u64)>,
    /// The time of the last poll.
    now: Option<Instant>,
    /// The time since which operations have found their page or its set busy.
    busy_since: Option<Instant>,
    is_busy: bool,
}

#[derive(Clone, Copy)]
struct Operation {
    ticket: Ticket,
    page: PageNo,
    state: State,
}

/// The present step of an operation.
#[derive(Clone, Copy)]
enum State {
    Idle,
    /// The operation reads the page from its frame.
    ReadFrame {
        frame: u32,
    },
    /// The operation reads the home. Then it writes the content into a frame, if the page is to be
    /// cached.
    ReadHome {
        held: Held,
        stays: bool,
    },
    /// The operation writes content from the home into the frame.
    Fill {
        held: Held,
    },
    /// The operation writes a frame that other users share.
    WriteFrame {
        frame: u32,
    },
    /// The operation reads the old page, to write a part of it.
    ReadRest {
        held: Held,
        patch: (u16, u16),
    },
    /// The operation waits for room to write its content.
    Again {
        held: Held,
    },
    /// The page could not be read from its frame, which other users share. Once the lane has the
    /// frame exclusively, it reads the page at the home.
    ReadAgain,
    /// The operation writes a frame that this lane has exclusively.
    WriteNew {
        held: Held,
    },
    /// The operation writes the page to the home and to the frame.
    WriteBoth {
        held: Held,
        home: Option<Result<(), Fault>>,
        frame: Option<Result<(), Fault>>,
    },
    /// The operation writes the page to the home.
    WriteHome {
        held: Held,
        late: bool,
    },
}

/// The result of an operation's next step.
enum Step {
    Ended(Result<(), Fault>),
    Queued,
    Full,
}

impl CacheLane {
    pub(crate) fn open(cache: Arc<Cache>, seat: usize) -> Result<Self, OpenError> {
        let depth = cache.config.depth.clamp(1, usize::from(u16::MAX));
        let idle = Operation { ticket: 0, page: PageNo(0), state: State::Idle };
        Ok(CacheLane {
            frames: cache.frames.lane()?,
            home: cache.home.lane(depth)?,
            parts: Parts {
                cache,
                seat,
                operations: vec![idle; depth].into(),
                pages: vec![Page::zeroed(); depth].into(),
                idle: (0..depth as u16).rev().collect(),
                again: Vec::with_capacity(depth),
                flushes: Vec::with_capacity(depth),
                now: None,
                busy_since: None,
                is_busy: false,
            },
        })
    }

    /// The cache of this lane.
    pub fn cache(&self) -> &Arc<Cache> {
        &self.parts.cache
    }

    /// Reads an uncached page from the home.
    fn read_home(
        &mut self,
        at: u16,
        ticket: Ticket,
        page: PageNo,
        held: Held,
        stays: bool,
        out: &mut PageBytes,
    ) -> Progress {
        let stays = stays && !held.passes;
        match self.home.read(at.into(), Slot(page.0), out) {
            Progress::Done(Ok(())) => {
                // If the volume with the frames cannot take the page at once, the page is not
                // cached. To wait would cost more than to read the page from the home again.
                let fill = if stays {
                    self.frames.write(at.into(), PageNo(held.frame), out)
                } else {
                    Progress::Full
                };
                if fill == Progress::Queued {
                    *self.parts.pages[usize::from(at)] = *out;
                    return self.parts.begin(at, ticket, page, State::Fill { held });
                }
                self.parts.end_fill(held, fill == Progress::Done(Ok(())));
                Progress::Done(Ok(()))
            }
            Progress::Done(Err(fault)) => {
                self.parts.let_go(held, Outcome::Nothing);
                self.parts.fails(fault)
            }
            Progress::Queued => self.parts.begin(at, ticket, page, State::ReadHome { held, stays }),
            Progress::Full => {
                self.parts.let_go(held, Outcome::Nothing);
                Progress::Full
            }
        }
    }

    /// Writes a page whose frame this lane has exclusively.
    fn put(&mut self, at: u16, page: PageNo, held: Held, around: bool, bytes: &PageBytes) -> (State, Step) {
        let mode = self.parts.cache.mode();
        let around = around || held.passes;
        if mode == Mode::WriteBack && !around {
            let step = match self.frames.write(at.into(), PageNo(held.frame), bytes) {
                Progress::Done(result) => {
                    self.parts.end_new(page, held, &mut *self.home, result);
                    Step::Ended(result)
                }
                Progress::Queued => Step::Queued,
                Progress::Full => Step::Full,
            };
            return (State::WriteNew { held }, step);
        }
        let home = match self.home.write(at.into(), Slot(page.0), bytes) {
            Progress::Done(result) => Some(result),
            Progress::Queued => None,
            Progress::Full => {
                // A home without a descriptor cannot announce that it has room again, so the lane's
                // owner must poll.
                self.parts.is_busy |= self.home.wake_fd().is_none();
                return (State::Idle, Step::Full);
            }
        };
        if mode == Mode::WriteAround || around {
            let state = State::WriteHome { held, late: false };
            let Some(result) = home else { return (state, Step::Queued) };
            self.parts.end_around(held, result);
            return (state, Step::Ended(result));
        }
        let frame = match self.frames.write(at.into(), PageNo(held.frame), bytes) {
            Progress::Done(result) => Some(result),
            Progress::Queued => None,
            Progress::Full => Some(Err(Fault::Full)),
        };
        let state = State::WriteBoth { held, home, frame };
        let (Some(home), Some(frame)) = (home, frame) else { return (state, Step::Queued) };
        (state, Step::Ended(self.parts.end_both(held, home, frame)))
    }

    /// Continues operations that waited for room at a store, or for exclusive use of their page.
    fn go_on(&mut self, done: &mut dyn FnMut(Done<'_>)) {
        for _ in 0..self.parts.again.len() {
            let at = self.parts.again.remove(0);
            let Operation { page, state, .. } = self.parts.operations[usize::from(at)];
            let State::Again { held } = state else {
                self.read_again(at, page, done);
                continue;
            };
            let bytes = self.parts.pages[usize::from(at)].clone();
            match self.put(at, page, held, false, &bytes) {
                (_, Step::Full) => self.parts.again.push(at),
                (state, Step::Queued) => self.parts.operations[usize::from(at)].state = state,
                (_, Step::Ended(result)) => self.parts.hand_over(at, result, None, done),
            }
        }
    }
}

impl CacheLane {
    /// Tries again to read a page whose frame could not be read.
    fn read_again(&mut self, at: u16, page: PageNo, done: &mut dyn FnMut(Done<'_>)) {
        let Some(held) = self.parts.hold(page) else {
            if self.parts.is_busy_for_too_long() {
                self.parts.hand_over(at, Err(Fault::Timeout), None, done);
            } else {
                self.parts.again.push(at);
            }
            return;
        };
        if !held.is_dirty {
            let state = State::ReadHome { held, stays: !held.passes };
            return self.parts.read_instead(at, page, state, held, &mut *self.home, done);
        }
        // A lane has written the page meanwhile. So its frame can be read, and the home's content
        // is older.
        self.parts.put_back(held);
        let Found::Hit(frame) = self.parts.cache.directory.share(page, false) else {
            return self.parts.again.push(at);
        };
        let mut content = Page::zeroed();
        let progress = self.frames.read(at.into(), PageNo(frame), &mut content);
        if progress == Progress::Queued {
            self.parts.operations[usize::from(at)].state = State::ReadFrame { frame };
            return;
        }
        self.parts.cache.directory.leave(frame, false);
        match progress {
            Progress::Done(result) => {
                self.parts.hand_over(at, result, Some(&*content).filter(|_| result.is_ok()), done);
            }
            _ => self.parts.again.push(at),
        }
    }
}

impl Parts {
    fn counters(&self) -> &Counters {
        &self.cache.seats[self.seat].counters
    }

    fn fails(&self, fault: Fault) -> Progress {
        self.counters().faults.add(1);
        Progress::Done(Err(fault))
    }

    fn begin(&mut self, at: u16, ticket: Ticket, page: PageNo, state: State) -> Progress {
        self.operations[usize::from(at)] = Operation { ticket, page, state };
        self.idle.retain(|idle| *idle != at);
        Progress::Queued
    }

    /// The number of an idle operation, if there is one.
    fn next(&self) -> Option<u16> {
        self.idle.last().copied()
    }

    fn hand_over(
        &mut self,
        at: u16,
        result: Result<(), Fault>,
        page: Option<&PageBytes>,
        done: &mut dyn FnMut(Done<'_>),
    ) {
        let operation = &mut self.operations[usize::from(at)];
        operation.state = State::Idle;
        let ticket = operation.ticket;
        self.idle.push(at);
        self.counters().faults.add(u64::from(result.is_err()));
        done(Done { ticket, result, page });
    }

    /// Answers that the page is busy: another user has its frame exclusively, or its set has no
    /// free frame.
    fn busy(&mut self) -> Progress {
        if self.is_busy_for_too_long() { self.fails(Fault::Timeout) } else { Progress::Full }
    }

    /// Notes that a page or its set is busy. Returns whether that has lasted for [`BUSY_WITHIN`].
    fn is_busy_for_too_long(&mut self) -> bool {
        self.is_busy = true;
        self.cache.ring();
        // If `busy_since` is not set, the next poll sets it. This function must not set it to
        // `now`: `now` is the time of the last poll, which may be long ago.
        let (Some(since), Some(now)) = (self.busy_since, self.now) else { return false };
        let is_too_long = now >= since + BUSY_WITHIN;
        if is_too_long {
            self.not_busy();
        }
        is_too_long
    }

    /// Ends this lane's use of a frame that could not be read. Returns whether the home has the
    /// frame's content. If so, a lane that takes the frame exclusively may read the home instead.
    fn leave_unreadable(&self, frame: u32) -> bool {
        let directory = &self.cache.directory;
        let is_at_home = !directory.load(frame).is_ahead();
        directory.leave(frame, false);
        is_at_home
    }

    /// Makes a read wait until its lane can have the page's frame exclusively.
    fn wait_to_read(&mut self, at: u16) {
        self.operations[usize::from(at)].state = State::ReadAgain;
        self.again.push(at);
    }

    fn not_busy(&mut self) {
        (self.busy_since, self.is_busy) = (None, false);
    }

    fn hold(&self, page: PageNo) -> Option<Held> {
        self.cache.directory.hold(page, self.seat as u8)
    }

    fn let_go(&self, held: Held, outcome: Outcome) {
        self.cache.directory.let_go(held, outcome);
        if outcome == Outcome::Dirty {
            self.cache.has_dirt();
        }
    }

    /// Ends the exclusive use of a frame, in the state that the frame had before.
    fn put_back(&self, held: Held) {
        let outcome = match (held.is_valid, held.is_dirty) {
            (_, true) => Outcome::Dirty,
            (true, false) => Outcome::Clean,
            (false, false) => Outcome::Nothing,
        };
        self.let_go(held, outcome);
    }

    fn end_fill(&self, held: Held, is_there: bool) {
        self.let_go(held, if is_there { Outcome::Clean } else { Outcome::Nothing });
    }

    /// Ends a write to a frame that this lane has exclusively. From here on the home's copy of the
    /// page is old, and nobody reads it.
    fn end_new(&self, page: PageNo, held: Held, home: &mut dyn HomeLane, result: Result<(), Fault>) {
        match result {
            Ok(()) => {
                if !held.is_dirty {
                    home.discard(Slot(page.0));
                }
                self.let_go(held, Outcome::Dirty);
            }
            Err(_) => self.put_back(held),
        }
    }

    /// Ends a write to a frame that other users share. The home's copy is discarded before the
    /// frame is dirty, so this never discards what the write-back writes home later.
    fn end_shared(&self, page: PageNo, frame: u32, home: &mut dyn HomeLane, result: Result<(), Fault>) {
        if result.is_ok() && !self.cache.directory.load(frame).is_ahead() {
            home.discard(Slot(page.0));
        }
        self.cache.leave(frame, result.is_ok());
    }

    /// Ends a write that went to the home only. If the write failed, the home has the old page or
    /// the new one.
    fn end_around(&self, held: Held, result: Result<(), Fault>) {
        let keeps = result.is_err() && held.is_dirty;
        self.let_go(held, if keeps { Outcome::Dirty } else { Outcome::Nothing });
    }

    fn end_both(&self, held: Held, home: Result<(), Fault>, frame: Result<(), Fault>) -> Result<(), Fault> {
        let outcome = match (home, frame) {
            (Ok(()), Ok(())) => Outcome::Clean,
            // The home has the new content, and the frame does not.
            (Ok(()), Err(_)) => Outcome::Nothing,
            // The frame has the new content, and the home does not. The write-back writes it home
            // later.
            (Err(_), Ok(())) => Outcome::Dirty,
            (Err(_), Err(_)) if held.is_dirty => Outcome::Dirty,
            (Err(_), Err(_)) => Outcome::Nothing,
        };
        self.let_go(held, outcome);
        home
    }

    /// Completes a partial write, after the rest of the page has been read.
    fn complete(&mut self, at: u16, held: Held, patch: (u16, u16), content: &PageBytes) {
        let kept = &mut self.pages[usize::from(at)];
        let (from, to) = (usize::from(patch.0), usize::from(patch.1));
        kept[..from].copy_from_slice(&content[..from]);
        kept[to..].copy_from_slice(&content[to..]);
        self.operations[usize::from(at)].state = State::Again { held };
        self.again.push(at);
    }

    /// Handles an answer of the volume that has the cache's frames.
    fn frame_answered(
        &mut self,
        frame_done: &Done<'_>,
        home: &mut dyn HomeLane,
        done: &mut dyn FnMut(Done<'_>),
    ) {
        let at = frame_done.ticket as u16;
        let Operation { page, state, .. } = self.operations[usize::from(at)];
        let (result, content) = (frame_done.result, frame_done.page);
        match state {
            State::ReadFrame { frame } => match (result, content) {
                (Ok(()), Some(content)) => {
                    self.cache.directory.leave(frame, false);
                    self.hand_over(at, Ok(()), Some(content), done);
                }
                (result, _) => {
                    if let Some(held) = self.cache.directory.upgrade(frame) {
                        // The frame is clean, so the home has the same content.
                        let state = State::ReadHome { held, stays: !held.passes };
                        self.read_instead(at, page, state, held, home, done);
                    } else if self.leave_unreadable(frame) {
                        self.wait_to_read(at);
                    } else {
                        self.hand_over(at, result.and(Err(Fault::Lost)), None, done);
                    }
                }
            },
            State::Fill { held } => {
                self.end_fill(held, result.is_ok());
                let content = self.pages[usize::from(at)].clone();
                self.hand_over(at, Ok(()), Some(&content), done);
            }
            State::WriteFrame { frame } => {
                self.end_shared(page, frame, home, result);
                self.hand_over(at, result, None, done);
            }
            State::ReadRest { held, patch } => match (result, content) {
                (Ok(()), Some(content)) => self.complete(at, held, patch, content),
                _ if !held.is_dirty => self.read_instead(at, page, state, held, home, done),
                _ => {
                    self.put_back(held);
                    self.hand_over(at, result.and(Err(Fault::Lost)), None, done);
                }
            },
            State::WriteNew { held } => {
                self.end_new(page, held, home, result);
                self.hand_over(at, result, None, done);
            }
            State::WriteBoth { held, home, .. } => self.both(at, held, home, Some(result), done),
            State::Idle
            | State::ReadHome { .. }
            | State::Again { .. }
            | State::ReadAgain
            | State::WriteHome { .. } => {}
        }
    }

    /// Reads a clean page from the home, because the page's frame cannot be read.
    fn read_instead(
        &mut self,
        at: u16,
        page: PageNo,
        state: State,
        held: Held,
        home: &mut dyn HomeLane,
        done: &mut dyn FnMut(Done<'_>),
    ) {
        let mut content = Page::zeroed();
        self.operations[usize::from(at)].state = state;
        match home.read(at.into(), Slot(page.0), &mut content) {
            Progress::Queued => {}
            Progress::Done(Ok(())) => match state {
                State::ReadRest { patch, .. } => self.complete(at, held, patch, &content),
                _ => {
                    self.let_go(held, Outcome::Nothing);
                    self.hand_over(at, Ok(()), Some(&content), done);
                }
            },
            Progress::Done(Err(fault)) => {
                self.let_go(held, Outcome::Nothing);
                self.hand_over(at, Err(fault), None, done);
            }
            Progress::Full => {
                self.let_go(held, Outcome::Nothing);
                self.hand_over(at, Err(Fault::Corrupt), None, done);
            }
        }
    }

    fn both(
        &mut self,
        at: u16,
        held: Held,
        home: Option<Result<(), Fault>>,
        frame: Option<Result<(), Fault>>,
        done: &mut dyn FnMut(Done<'_>),
    ) {
        if let (Some(home), Some(frame)) = (home, frame) {
            let result = self.end_both(held, home, frame);
            self.hand_over(at, result, None, done);
        } else {
            self.operations[usize::from(at)].state = State::WriteBoth { held, home, frame };
        }
    }

    /// Handles the answer of the home.
    fn home_answered(
        &mut self,
        home_done: &Done<'_>,
        frames: &mut FrameLane,
        done: &mut dyn FnMut(Done<'_>),
    ) {
        let at = home_done.ticket as u16;
        let Operation { state, .. } = self.operations[usize::from(at)];
        let result = home_done.result;
        match (state, home_done.page) {
            (State::ReadHome { held, stays }, Some(content)) if result.is_ok() => {
                let fill =
                    if stays { frames.write(at.into(), PageNo(held.frame), content) } else { Progress::Full };
                if fill == Progress::Queued {
                    *self.pages[usize::from(at)] = *content;
                    self.operations[usize::from(at)].state = State::Fill { held };
                } else {
                    self.end_fill(held, fill == Progress::Done(Ok(())));
                    self.hand_over(at, Ok(()), Some(content), done);
                }
            }
            (State::ReadRest { held, patch }, Some(content)) if result.is_ok() => {
                self.complete(at, held, patch, content);
            }
            (State::ReadHome { held, .. } | State::ReadRest { held, .. }, _) => {
                self.let_go(held, Outcome::Nothing);
                self.hand_over(at, result.and(Err(Fault::Lost)), None, done);
            }
            // The write to the home may still land at any time. Until the write has ended, no other
            // user may touch the page.
            (State::WriteHome { held, .. }, _) if result == Err(Fault::Timeout) => {
                self.operations[usize::from(at)].state = State::WriteHome { held, late: true };
            }
            (State::WriteBoth { .. }, _) if result == Err(Fault::Timeout) => {}
            (State::WriteHome { held, .. }, _) => {
                self.end_around(held, result);
                self.hand_over(at, result, None, done);
            }
            (State::WriteBoth { held, frame, .. }, _) => self.both(at, held, Some(result), frame, done),
            _ => {}
        }
    }

    /// Handles the end of a write to the home that had timed out.
    fn settled(&mut self, slot: Slot, done: &mut dyn FnMut(Done<'_>)) {
        let late = Err(Fault::Timeout);
        for at in 0..self.operations.len() {
            let Operation { page, state, .. } = self.operations[at];
            match state {
                State::WriteHome { held, late: true } if page.0 == slot.0 => {
                    self.end_around(held, late);
                    self.hand_over(at as u16, late, None, done);
                }
                State::WriteBoth { held, home: None, frame } if page.0 == slot.0 => {
                    self.both(at as u16, held, Some(late), frame, done);
                }
                _ => {}
            }
        }
    }
}

impl CacheLane {
    fn begin_read(&mut self, ticket: Ticket, page: PageNo, out: &mut PageBytes) -> Progress {
        let Some(at) = self.parts.next() else { return Progress::Full };
        let cache = Arc::clone(&self.parts.cache);
        let held = match cache.directory.share(page, false) {
            Found::Busy => return self.parts.busy(),
            Found::Hit(frame) => {
                let progress = self.frames.read(at.into(), PageNo(frame), out);
                if progress == Progress::Full {
                    cache.directory.leave(frame, false);
                    return Progress::Full;
                }
                self.parts.not_busy();
                self.parts.counters().read_hits.add(1);
                cache.streams.note(page);
                match progress {
                    Progress::Queued => {
                        return self.parts.begin(at, ticket, page, State::ReadFrame { frame });
                    }
                    Progress::Done(Err(fault)) => {
                        // The home has the frame's content too, since `upgrade` succeeds only for a
                        // clean frame.
                        if let Some(held) = cache.directory.upgrade(frame) {
                            return self.read_home(at, ticket, page, held, true, out);
                        }
                        if self.parts.leave_unreadable(frame) {
                            return self.parts.busy();
                        }
                        return self.parts.fails(fault);
                    }
                    progress => {
                        cache.directory.leave(frame, false);
                        return progress;
                    }
                }
            }
            Found::Absent => match self.parts.hold(page) {
                Some(held) if !held.is_valid => held,
                Some(held) => {
                    // Another lane has cached the page meanwhile.
                    self.parts.put_back(held);
                    return self.parts.busy();
                }
                None => return self.parts.busy(),
            },
        };
        self.parts.not_busy();
        let is_stream = cache.streams.note(page);
        let progress = self.read_home(at, ticket, page, held, !is_stream, out);
        if progress != Progress::Full {
            self.parts.counters().read_misses.add(1);
            self.parts.counters().bypassed.add(is_stream.into());
        }
        progress
    }

    fn begin_write(&mut self, ticket: Ticket, page: PageNo, bytes: &PageBytes) -> Progress {
        let Some(at) = self.parts.next() else { return Progress::Full };
        let cache = Arc::clone(&self.parts.cache);
        let shared = self.write_shared(at, ticket, page, |frames, at, frame| frames.write(at, frame, bytes));
        if let Some(progress) = shared {
            return progress;
        }
        let Some(held) = self.parts.hold(page) else { return self.parts.busy() };
        self.parts.not_busy();
        let is_stream = cache.streams.note(page) && !held.is_valid;
        let (state, step) = self.put(at, page, held, is_stream, bytes);
        let counters = self.parts.counters();
        match step {
            Step::Full => {
                self.parts.put_back(held);
                return Progress::Full;
            }
            _ if held.is_valid => counters.write_hits.add(1),
            _ => counters.write_misses.add(1),
        }
        counters.bypassed.add(is_stream.into());
        match step {
            Step::Ended(Ok(())) => Progress::Done(Ok(())),
            Step::Ended(Err(fault)) => self.parts.fails(fault),
            _ => self.parts.begin(at, ticket, page, state),
        }
    }

    fn begin_write_part(&mut self, ticket: Ticket, page: PageNo, offset: usize, bytes: &[u8]) -> Progress {
        let Some(at) = self.parts.next() else { return Progress::Full };
        let patch: Range<usize> = offset..offset + bytes.len();
        let shared = self
            .write_shared(at, ticket, page, |frames, at, frame| frames.write_part(at, frame, offset, bytes));
        if let Some(progress) = shared {
            return progress;
        }
        let Some(held) = self.parts.hold(page) else { return self.parts.busy() };
        self.parts.not_busy();
        let mut content = Page::zeroed();
        let mut progress = Progress::Done(Err(Fault::Lost));
        if held.is_valid {
            progress = self.frames.read(at.into(), PageNo(held.frame), &mut content);
        }
        if matches!(progress, Progress::Done(Err(_))) && !held.is_dirty {
            progress = self.home.read(at.into(), Slot(page.0), &mut content);
        }
        match progress {
            Progress::Full => {
                self.parts.put_back(held);
                return Progress::Full;
            }
            Progress::Done(Err(fault)) => {
                self.parts.put_back(held);
                return self.parts.fails(fault);
            }
            Progress::Done(Ok(())) | Progress::Queued => {}
        }
        let counters = self.parts.counters();
        if held.is_valid {
            counters.write_hits.add(1);
        } else {
            counters.write_misses.add(1);
        }
        self.parts.pages[usize::from(at)][patch.clone()].copy_from_slice(bytes);
        let patch = (patch.start as u16, patch.end as u16);
        let queued = self.parts.begin(at, ticket, page, State::ReadRest { held, patch });
        if progress != Progress::Queued {
            self.parts.complete(at, held, patch, &content);
        }
        queued
    }
}

impl PageLane for CacheLane {
    type Guard<'a> = Elsewhere;

    /// A cache clears no pages: its home could only write zeros, which costs as much as any write.
    const CLEARS: bool = false;
    const FLUSHES: bool = true;

    fn pages(&self) -> u32 {
        self.parts.cache.pages()
    }

    fn read(&mut self, ticket: Ticket, page: PageNo, out: &mut PageBytes) -> Progress {
        let progress = self.begin_read(ticket, page, out);
        self.parts.cache.recorder.note(page, progress);
        progress
    }

    fn read_run(&mut self, _first: PageNo, _out: &mut [PageBytes]) -> usize {
        0
    }

    fn write(&mut self, ticket: Ticket, page: PageNo, bytes: &PageBytes) -> Progress {
        let progress = self.begin_write(ticket, page, bytes);
        self.parts.cache.recorder.note(page, progress);
        progress
    }

    fn write_part(&mut self, ticket: Ticket, page: PageNo, offset: usize, bytes: &[u8]) -> Progress {
        let progress = self.begin_write_part(ticket, page, offset, bytes);
        self.parts.cache.recorder.note(page, progress);
        progress
    }

    fn write_run(&mut self, _first: PageNo, _pages: &[PageBytes]) -> usize {
        0
    }

    /// A flush of the cache waits until all dirty pages are at home.
    fn flush(&mut self, ticket: Ticket) -> Progress {
        if self.parts.flushes.len() == self.parts.flushes.capacity() {
            return Progress::Full;
        }
        let number = self.parts.cache.ask_for_flush();
        self.parts.flushes.push((ticket, number));
        Progress::Queued
    }

    fn pin(&mut self) -> Elsewhere {
        Elsewhere
    }

    /// Only a write to a frame can wait for another look. One on its way to the home cannot.
    fn hold(&mut self, holds: bool) {
        self.frames.hold(holds);
    }

    /// Only a write that has not gone to the home yet can be stopped.
    fn forsake(&mut self, whose: impl Fn(Ticket) -> bool) {
        let operations = &self.parts.operations;
        self.frames.forsake(|at| whose(operations[at as usize].ticket));
    }

    fn known_zero(&self, _page: PageNo) -> bool {
        false
    }

    fn submit(&mut self) {
        self.frames.submit();
        self.home.submit();
    }

    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        let CacheLane { parts, frames, home } = self;
        parts.now = Some(now);
        // Each refusal sets `is_busy` again. If there was no refusal since the last poll, no caller
        // waits any more.
        parts.busy_since = parts.busy_since.or(Some(now)).filter(|_| parts.is_busy);
        parts.is_busy = false;
        home.poll(now, &mut |home_done| parts.home_answered(&home_done, frames, done));
        home.settled(&mut |slot| parts.settled(slot, done));
        frames.poll(now, &mut |frame_done| parts.frame_answered(&frame_done, &mut **home, done));
        self.go_on(done);
        let parts = &mut self.parts;
        let counters = &parts.cache.seats[parts.seat].counters;
        parts.flushes.retain(|&(ticket, number)| {
            let Some(result) = parts.cache.flush_result(number) else { return true };
            counters.faults.add(u64::from(result.is_err()));
            done(Done { ticket, result, page: None });
            false
        });
        self.submit();
    }

    fn in_flight(&self) -> usize {
        self.parts.operations.len() - self.parts.idle.len() + self.parts.flushes.len()
    }

    fn wake_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.home.wake_fd().into_iter().chain(self.frames.wake_fds())
    }

    fn must_poll(&self) -> bool {
        let Parts { flushes, again, is_busy, .. } = &self.parts;
        let no_fd = self.home.in_flight() > 0 && self.home.wake_fd().is_none();
        !flushes.is_empty() || !again.is_empty() || *is_busy || no_fd || self.frames.must_poll()
    }
}

impl CacheLane {
    /// Writes a cached page in its frame, which other users may share. `None`: the page is not
    /// cached, or the mode sends written pages to the home.
    fn write_shared(
        &mut self,
        at: u16,
        ticket: Ticket,
        page: PageNo,
        write: impl FnOnce(&mut FrameLane, Ticket, PageNo) -> Progress,
    ) -> Option<Progress> {
        if self.parts.cache.mode() != Mode::WriteBack {
            return None;
        }
        match self.parts.cache.directory.share(page, true) {
            Found::Busy => Some(self.parts.busy()),
            Found::Absent => None,
            Found::Hit(frame) => {
                let progress = write(&mut self.frames, at.into(), PageNo(frame));
                Some(self.wrote_shared(at, ticket, page, frame, progress))
            }
        }
    }

    /// Handles the progress of a write to a frame that other users may share.
    fn wrote_shared(
        &mut self,
        at: u16,
        ticket: Ticket,
        page: PageNo,
        frame: u32,
        progress: Progress,
    ) -> Progress {
        match progress {
            Progress::Full => {
                self.parts.cache.directory.leave(frame, false);
                return Progress::Full;
            }
            Progress::Queued => {
                let _ = self.parts.begin(at, ticket, page, State::WriteFrame { frame });
            }
            Progress::Done(result) => self.parts.end_shared(page, frame, &mut *self.home, result),
        }
        self.parts.not_busy();
        self.parts.cache.streams.note(page);
        self.parts.counters().write_hits.add(1);
        match progress {
            Progress::Done(Err(fault)) => self.parts.fails(fault),
            progress => progress,
        }
    }
}

impl Drop for CacheLane {
    /// Operations that are still under way take no effect, except for writes that have gone to the
    /// home. Once the lane is gone, nothing notices the end of such a write. So the write-back
    /// never writes that page home again, and flushes fail. If the page's frame has the page's
    /// content, lanes go on reading the frame. Otherwise the frame stays taken for ever: a read of
    /// the home might find half of the write.
    fn drop(&mut self) {
        let parts = &self.parts;
        for operation in &parts.operations {
            match operation.state {
                State::WriteHome { held, .. } | State::WriteBoth { held, home: None, .. }
                    if held.is_valid =>
                {
                    parts.let_go(held, Outcome::Late);
                }
                State::Idle
                | State::ReadAgain
                | State::WriteHome { .. }
                | State::WriteBoth { home: None, .. } => {}
                State::ReadFrame { frame } | State::WriteFrame { frame } => {
                    parts.cache.directory.leave(frame, false);
                }
                // The home refused the write, and the frame still has the old content.
                State::WriteBoth { held, home: Some(Err(_)), .. } => parts.put_back(held),
                State::WriteBoth { held, .. } => parts.let_go(held, Outcome::Nothing),
                State::ReadHome { held, .. } | State::Fill { held } => parts.let_go(held, Outcome::Nothing),
                State::ReadRest { held, .. } | State::Again { held } | State::WriteNew { held } => {
                    parts.put_back(held);
                }
            }
        }
        parts.cache.seats[parts.seat].taken.store(false, Release);
    }
}

/// A guard that shows no page: a cached page may leave its frame while a caller reads it.
pub struct Elsewhere;

impl PageGuard for Elsewhere {
    fn view(&self, _page: PageNo) -> View<'_> {
        View::Elsewhere
    }
}

const _: () = assert!(PAGE_SIZE <= u16::MAX as usize);
