//! Commits of a durable log. A power cut loses no page that was written before a committed flush.
//!
//! A commit has four steps, each of which waits for the disks:
//!
//! 1. The committer finds the records that no commit has, and the segments that have died since the
//!    last commit. Then the store below flushes, which makes the pages of those records safe.
//! 2. The committer writes the records to the journal, in pages that follow each other.
//! 3. The store below flushes again. The commit is complete.
//! 4. The dead segments that the commit names are free: their old pages cannot come back.
//!
//! After the four steps, a page beside the first superblock confirms the commit. No flush waits for
//! that page. With that page, an opening can tell two cases apart: a commit that was damaged later,
//! and one that was under way at a power cut.
//!
//! The commit takes the dead segments first, and the records after them. A segment dies after the
//! records that replace its pages were published. So each commit that frees a segment has those
//! records.
//!
//! If a write to the journal fails, the committer writes everything again as a checkpoint, into the
//! half that is not in use. After a flush of the store below has failed, no later commit succeeds.
//! The kernel reports lost writes once only, so a later flush would hide them.

use crate::Shared;
use crate::config::LogError;
use crate::durable::{Durable, Journal};
use crate::journal::{self, Head};
use crate::segment::State;
use crate::summary::Record;
use std::os::fd::BorrowedFd;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use weir_core::{Page, Slot};
use weir_store::{Done, Fault, Lane, Progress, Ticket};

/// Largest number of journal pages that are written at a time.
const DEPTH: usize = 256;
/// The tickets of the committer's flush, and of the page that confirms a commit. All other tickets
/// are indices of the commit's pages.
const FLUSH: Ticket = Ticket::MAX;
const CONFIRM: Ticket = Ticket::MAX - 1;
/// Number of attempts to write the journal, after which flushes fail.
const ATTEMPTS: u32 = 8;
/// Time until the committer tries to free segments again, after a failed commit.
const AGAIN: Duration = Duration::from_millis(100);

/// Makes the commits of a durable log. The cleaner calls its steps.
pub(crate) struct Committer {
    lane: Box<dyn Lane>,
    journal: Journal,
    /// The index of the next journal page in the half that is in use.
    at: u32,
    /// Number of pages of each half of the journal.
    half_pages: u32,
    phase: Phase,
    is_checkpoint: bool,
    must_checkpoint: bool,
    /// Whether a flush of the store below has failed. If so, no later commit succeeds.
    is_broken: bool,
    /// The number of the last flush that the commit answers; 0: none waits for an answer.
    number: u64,
    pages: Vec<Page>,
    confirmation: Box<Page>,
    /// The numbers of the dead segments that the commit frees, in rising order.
    dead: Vec<u32>,
    records: Vec<Record>,
    write: Write,
    attempts: u32,
    again_at: Option<Instant>,
}

/// The progress of the writes of a commit's pages.
#[derive(Default)]
struct Write {
    /// Number of pages whose first write has been issued.
    issued: usize,
    waits: usize,
    /// Indices of pages whose write failed. They are written again.
    again: Vec<usize>,
    /// Number of writes that may still fail before the attempt to write the commit ends.
    patience: u32,
    failed: bool,
    /// Number of writes that ended with a timeout and may still land.
    late: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Idle,
    /// The store below flushes the pages that the commit names.
    FlushPages,
    Write,
    /// The store below flushes the commit itself.
    FlushJournal,
}

/// The outcome of a [`Committer::step`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stepped {
    /// There is nothing to commit.
    Idle,
    /// The committer must wait for an answer of the disks.
    Waits,
    /// The next step can follow at once.
    Worked,
}

/// The reason why the pages of a commit could not be filled.
enum Unfit {
    /// The commit needs more pages than the half has left.
    Large,
    /// A segment changed while its records were copied.
    Changed,
}

impl Committer {
    /// Opens the committer of a durable log.
    pub fn open(log: &Shared, durable: &Durable) -> Result<Self, LogError> {
        let mut journal = durable.journal.lock().unwrap_or_else(PoisonError::into_inner);
        let journal = journal.take().ok_or_else(|| LogError::Shape("a second cleaner".to_owned()))?;
        let half_pages = durable.superblock.half_pages();
        Ok(Committer {
            lane: log.below.lane(DEPTH)?,
            journal,
            at: half_pages,
            half_pages,
            phase: Phase::Idle,
            is_checkpoint: true,
            must_checkpoint: true,
            is_broken: false,
            number: 0,
            pages: Vec::with_capacity(half_pages as usize),
            confirmation: Box::new(Page::zeroed()),
            dead: Vec::with_capacity(log.segments.count() as usize),
            records: Vec::with_capacity(log.shape.places() as usize),
            write: Write::default(),
            attempts: 0,
            again_at: None,
        })
    }

    /// Returns the position at which the journal goes on. The next committer writes a checkpoint
    /// there first.
    pub fn end(self) -> Journal {
        self.journal
    }

    /// Takes the answers of the disks, and does what the present step of a commit needs. Never
    /// waits.
    pub fn step(&mut self, log: &Shared, durable: &Durable, now: Instant) -> Stepped {
        self.take_answers(log, durable, now);
        let before = self.phase;
        match self.phase {
            Phase::Idle if self.write.late > 0 || !self.is_wanted(log, durable, now) => {}
            Phase::Idle => self.begin(log, durable, now),
            Phase::Write => self.go_on(log, durable, now),
            Phase::FlushPages | Phase::FlushJournal => {}
        }
        match self.phase {
            Phase::Idle if before == Phase::Idle && self.write.late == 0 => Stepped::Idle,
            phase if phase != before => Stepped::Worked,
            _ => Stepped::Waits,
        }
    }

    /// A descriptor that becomes readable when a step has something to do. `None`: the caller must
    /// poll.
    pub fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.lane.wake_fd()
    }

    /// Number of operations that the disks have not answered.
    pub fn in_flight(&self) -> usize {
        self.lane.in_flight()
    }

    fn is_wanted(&self, log: &Shared, durable: &Durable, now: Instant) -> bool {
        let has_dead = log.segments.dead() > 0 || !self.dead.is_empty();
        let frees = has_dead && log.segments.free() < log.low() && !self.is_broken;
        durable.asked().is_some() || frees && self.again_at.is_none_or(|at| now >= at)
    }

    /// Begins a commit: fills its pages, and asks the store below for a flush.
    fn begin(&mut self, log: &Shared, durable: &Durable, now: Instant) {
        self.number = durable.asked().unwrap_or(0);
        if self.is_broken {
            return self.answer(durable, Err(Fault::Io(EIO)));
        }
        log.segments.take_dead(&mut self.dead);
        self.dead.sort_unstable();
        let mut gathered = if self.must_checkpoint { Err(Unfit::Large) } else { self.gather(log, false) };
        self.is_checkpoint = matches!(gathered, Err(Unfit::Large));
        if self.is_checkpoint {
            gathered = self.gather(log, true);
        }
        if let Err(unfit) = gathered {
            // This commit has cleared the marks of changed segments in order to fill its pages. So
            // the next commit has to look at all segments.
            self.must_checkpoint = true;
            if matches!(unfit, Unfit::Large) {
                // No half of the journal has room for this commit: too many segments have no
                // summary on the disk, so their records must go into the journal.
                self.attempts = ATTEMPTS;
                self.fail(durable, now);
            }
            return;
        }
        if self.pages.is_empty() {
            return self.answer(durable, Ok(()));
        }
        let (commit, floor, clock) = (self.journal.commit + 1, self.journal.floor, durable.clock());
        let last = self.pages.len() - 1;
        for (at, page) in self.pages.iter_mut().enumerate() {
            let head = Head {
                is_checkpoint: self.is_checkpoint,
                is_last: at == last,
                floor,
                clock,
                ..Head::new(log.identity(), self.journal.sequence + at as u64, commit)
            };
            journal::seal(page, head);
        }
        self.journal.sequence += self.pages.len() as u64;
        let patience = ATTEMPTS + self.pages.len() as u32 / 4;
        self.write = Write { patience, late: self.write.late, ..Write::default() };
        self.flush(log, durable, Phase::FlushPages, now);
    }

    /// Fills the pages of a commit: with all segments, or with those that have changed since the
    /// last commit.
    fn gather(&mut self, log: &Shared, everything: bool) -> Result<(), Unfit> {
        self.pages.clear();
        let room = if everything { self.half_pages } else { self.half_pages.saturating_sub(self.at) };
        let mut result = Ok(());
        if everything {
            log.segments.take_marked(|_| {});
            for segment in 0..log.segments.count() {
                result = result.and_then(|()| self.add(log, segment, room));
            }
            if self.pages.is_empty() {
                self.add_page(room)?;
            }
            return result;
        }
        for at in 0..self.dead.len() {
            let segment = self.dead[at];
            let life = log.segments.word(segment).life();
            self.journal.floor = self.journal.floor.max(life);
            self.name(true, segment, life, room)?;
        }
        log.segments.take_marked(|segment| {
            if result.is_ok() {
                result = self.add(log, segment, room);
            }
        });
        result
    }

    /// Adds a segment's records to the commit. If the segment's summary is on the disk, adds only
    /// the segment's number and life.
    fn add(&mut self, log: &Shared, segment: u32, room: u32) -> Result<(), Unfit> {
        for _ in 0..3 {
            let word = log.segments.word(segment);
            match word.state() {
                State::Reserved | State::Free => return Ok(()),
                State::Dead if self.dead.binary_search(&segment).is_ok() => return Ok(()),
                _ => {}
            }
            self.journal.floor = self.journal.floor.max(word.life());
            if word.has_summary() {
                return self.name(false, segment, word.life(), room);
            }
            if word.state() == State::Dead {
                // The segment has died after this commit made its list of dead segments, and its
                // row is gone.
                return Err(Unfit::Changed);
            }
            let has_row = log.rows.copy(&log.segments, segment, &mut self.records);
            let now = log.segments.word(segment);
            if !has_row || now.life() != word.life() || now.state() == State::Dead {
                continue;
            }
            if self.records.iter().all(|record| record.version == 0) {
                return Ok(());
            }
            self.add_page(room)?;
            let page = self.pages.last_mut().expect("the page that was added");
            journal::put_records(page, (segment, word.life(), word.generation()), &self.records);
            return Ok(());
        }
        Err(Unfit::Changed)
    }

    fn name(&mut self, is_free: bool, segment: u32, life: u32, room: u32) -> Result<(), Unfit> {
        let fits = |page: &mut Page| journal::add_name(page, is_free, segment, life);
        if self.pages.last_mut().is_some_and(fits) {
            return Ok(());
        }
        self.add_page(room)?;
        self.pages.last_mut().map(fits);
        Ok(())
    }

    fn add_page(&mut self, room: u32) -> Result<(), Unfit> {
        if self.pages.len() >= room as usize {
            return Err(Unfit::Large);
        }
        let mut page = Page::zeroed();
        journal::begin(&mut page);
        self.pages.push(page);
        Ok(())
    }

    fn flush(&mut self, log: &Shared, durable: &Durable, phase: Phase, now: Instant) {
        self.phase = phase;
        match self.lane.flush(FLUSH) {
            Progress::Done(result) => self.flushed(log, durable, result, now),
            Progress::Queued => self.lane.submit(),
            Progress::Full => self.flushed(log, durable, Err(Fault::Full), now),
        }
    }

    fn flushed(&mut self, log: &Shared, durable: &Durable, result: Result<(), Fault>, now: Instant) {
        match (result, self.phase) {
            (Err(fault), _) => {
                self.is_broken = true;
                self.must_checkpoint = true;
                self.phase = Phase::Idle;
                self.answer(durable, Err(fault));
            }
            (Ok(()), Phase::FlushPages) => {
                self.phase = Phase::Write;
                self.go_on(log, durable, now);
            }
            (Ok(()), _) => self.complete(log, durable),
        }
    }

    /// Issues the writes of the commit's pages. Once all are done, asks the store below for the
    /// flush that makes the commit safe.
    fn go_on(&mut self, log: &Shared, durable: &Durable, now: Instant) {
        let half = if self.is_checkpoint { self.journal.half } else { self.journal.half ^ 1 };
        let first = if self.is_checkpoint { 0 } else { self.at };
        while let Some(at) = self.write.next(self.pages.len()) {
            let slot = Slot(durable.superblock.journal_slot(half, first + at as u32));
            match self.lane.write(at as Ticket, slot, &self.pages[at]) {
                Progress::Full => {
                    self.write.again.push(at);
                    break;
                }
                Progress::Queued => self.write.waits += 1,
                Progress::Done(result) => self.write.ended(at, result),
            }
        }
        self.lane.submit();
        if self.write.waits > 0 {
            return;
        }
        if self.write.failed {
            return self.fail(durable, now);
        }
        if self.write.is_over(self.pages.len()) {
            self.flush(log, durable, Phase::FlushJournal, now);
        }
    }

    /// Ends a failed attempt to write the journal. The next attempt is a checkpoint.
    fn fail(&mut self, durable: &Durable, now: Instant) {
        self.phase = Phase::Idle;
        self.must_checkpoint = true;
        self.attempts += 1;
        if self.attempts > ATTEMPTS {
            self.attempts = 0;
            self.again_at = Some(now + AGAIN);
            self.answer(durable, Err(Fault::Io(EIO)));
        }
    }

    /// Ends a commit that is safe on the disks.
    fn complete(&mut self, log: &Shared, durable: &Durable) {
        self.phase = Phase::Idle;
        self.journal.commit += 1;
        let pages = self.pages.len() as u32;
        if self.is_checkpoint {
            self.journal.half ^= 1;
            self.at = pages;
        } else {
            self.at += pages;
        }
        self.must_checkpoint = false;
        self.attempts = 0;
        self.again_at = None;
        let counters = &durable.counters;
        counters.commits.fetch_add(1, Relaxed);
        counters.checkpoints.fetch_add(self.is_checkpoint.into(), Relaxed);
        counters.pages.fetch_add(pages.into(), Relaxed);
        for segment in self.dead.drain(..) {
            log.segments.free_dead(segment);
        }
        self.confirm(log, durable);
        self.answer(durable, Ok(()));
    }

    /// Writes the confirmation of the last commit. If that write fails, the commit before that one
    /// stays confirmed.
    fn confirm(&mut self, log: &Shared, durable: &Durable) {
        let commit = self.journal.commit;
        let page = &mut self.confirmation;
        journal::begin(page);
        journal::seal(page, Head { is_last: true, ..Head::new(log.identity(), commit, commit) });
        let slot = Slot(durable.superblock.confirmation_slot(commit));
        // No step waits for this write. The store below answers it before the flush of the next
        // commit.
        let _ = self.lane.write(CONFIRM, slot, page);
        self.lane.submit();
    }

    /// Answers the flushes that waited for the commit.
    fn answer(&mut self, durable: &Durable, result: Result<(), Fault>) {
        let number = std::mem::take(&mut self.number);
        if number > 0 {
            durable.answer(number, result);
        }
    }

    fn take_answers(&mut self, log: &Shared, durable: &Durable, now: Instant) {
        let Committer { lane, write, .. } = self;
        let mut flushed = None;
        lane.poll(now, &mut |done| {
            let Done { ticket, result, .. } = done;
            if ticket == FLUSH {
                flushed = Some(result);
                return;
            }
            if ticket == CONFIRM {
                write.late += usize::from(result == Err(Fault::Timeout));
                return;
            }
            write.waits -= 1;
            write.ended(ticket as usize, result);
        });
        lane.settled(&mut |_| write.late -= 1);
        if let Some(result) = flushed {
            self.flushed(log, durable, result, now);
        }
    }
}

impl Write {
    /// The index of the commit's next page to write. `None`: there is none, or the attempt has
    /// failed.
    fn next(&mut self, pages: usize) -> Option<usize> {
        if self.failed {
            return None;
        }
        self.again.pop().or_else(|| {
            let at = self.issued;
            self.issued += usize::from(at < pages);
            (at < pages).then_some(at)
        })
    }

    fn ended(&mut self, at: usize, result: Result<(), Fault>) {
        match result {
            Ok(()) => {}
            Err(Fault::Timeout) => {
                self.late += 1;
                self.failed = true;
            }
            Err(_) if self.patience > 0 => {
                self.patience -= 1;
                self.again.push(at);
            }
            Err(_) => self.failed = true,
        }
    }

    fn is_over(&self, pages: usize) -> bool {
        self.again.is_empty() && self.issued == pages
    }
}

const EIO: i32 = rustix::io::Errno::IO.raw_os_error();
