//! The cleaner makes segments free: it reads their live pages, verifies them, and appends them to
//! other segments.
//!
//! The cleaner works while fewer segments are free than the writers may soon want. It cleans up to
//! [`VICTIMS`] segments at a time. It reads their live pages, and writes whole segments of them. It
//! reads a short gap between live pages too, since a second operation would cost more. Pages that
//! were moved before go to other segments than pages that were not. So pages that lanes often write
//! are together, and their segments die without cleaning. Pages that do not fill a segment wait in
//! memory. Meanwhile lanes read them in their old place.
//!
//! In a durable log the cleaner also [commits](crate::commit): it answers flushes, and frees the
//! segments that have died.
//!
//! A page that cannot be read or verified stays in its place, and its segment is *stuck*. The
//! cleaner tries a stuck segment again only now and then, when it finds no other segment.

use crate::append::Appender;
use crate::commit::{Committer, Stepped};
use crate::config::{LogError, OPEN_MAX, RESERVE};
use crate::segment::{GENERATIONS, State, Word};
use crate::summary::{Record, Summary};
use crate::{Log, Shared};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};
use weir_core::{Page, Rest, Slot};
use weir_store::{Done, Fault, Lane, POLL_EVERY, Progress, Ticket};

/// Largest number of segments that are cleaned at a time. Half of them may wait until the pages in
/// memory fill a segment, while the disks are busy with the others. With 16 the disks of `weir
/// bench cache` were idle for a third of the time, though the writers waited for free segments.
const VICTIMS: usize = 32;
/// Number of segments whose pages the disks may have under way. A lane takes memory for them.
const UNDER_WAY: usize = 16;
/// Number of segments that the cleaner looks at to choose one.
const WINDOW: u32 = 4096;
/// Largest number of dead pages between two live ones for which one operation reads both. A disk
/// reads 64 KiB more in the time of a second operation.
const GAP: u32 = 16;
const EIO: i32 = rustix::io::Errno::IO.raw_os_error();
/// Time for which the cleaner leaves stuck segments alone.
const AGAIN: Duration = Duration::from_millis(100);

/// Bits of the tickets in the store below. The lower bits name the victim and the place. `WRITE`
/// marks the write of a page, `SUMMARY` the read of a summary, and `SEGMENTS` the write of a
/// summary.
const WRITE: Ticket = 1 << 16;
const SUMMARY: Ticket = 1 << 17;
const SEGMENTS: Ticket = 1 << 18;
const _: () = assert!(VICTIMS * 512 <= WRITE as usize);

/// The event that the cleaner needs before its next step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// The next step can follow at once.
    Step,
    /// The cleaner must wait for an answer of the store below.
    Answers,
    /// Enough segments are free, or none can be cleaned. The cleaner waits to be woken.
    Work,
}

/// Frees segments of a log. Each log has one cleaner.
pub struct Cleaner {
    log: Arc<Shared>,
    below: Box<dyn Lane>,
    parts: Parts,
    /// Commits what was written, if the log is durable.
    committer: Option<Committer>,
    /// The segment at which the cleaner begins to look for its next choice.
    cursor: u32,
    /// The time when a stuck segment may be tried again.
    again_at: Option<Instant>,
    rest: Rest,
}

struct Parts {
    appender: Appender,
    victims: Box<[Victim]>,
}

/// A segment that is being cleaned.
struct Victim {
    /// The segment's number. `None`: no segment is being cleaned here.
    segment: Option<u32>,
    generation: usize,
    /// Number of the segment's live pages when it was chosen.
    live: u32,
    phase: Phase,
    records: Vec<Record>,
    pages: Box<[Page]>,
    states: Box<[PageState]>,
    /// For each page of the victim, the new place to which it is being written.
    targets: Box<[u32]>,
    /// Number of the segment's operations that the store below has not answered.
    waits: u32,
    failed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The segment's summary must be read.
    Summary,
    SummaryWaits,
    /// The segment's pages are being read. The number is the place of the next page to read.
    Read(u32),
    /// The segment's pages are being written.
    Write,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PageState {
    /// The page is dead or moved, or the cleaner has given it up.
    Over,
    /// The page is being read, for itself or as part of a gap.
    Reads,
    /// The page is in memory and verified.
    Here,
    /// The page is being written.
    Writes,
}

impl Cleaner {
    /// Opens the cleaner of a log, and takes memory for the pages of 32 segments.
    ///
    /// # Errors
    /// Fails when the store below has no lane left.
    pub fn open(log: &Log) -> Result<Self, LogError> {
        let log = Arc::clone(&log.shared);
        let (pages, places) = (log.shape.segment_pages as usize, log.shape.places() as usize);
        let victim = || Victim {
            segment: None,
            generation: 0,
            live: 0,
            phase: Phase::Summary,
            records: Vec::with_capacity(places),
            pages: vec![Page::zeroed(); places].into(),
            states: vec![PageState::Over; places].into(),
            targets: vec![0; places].into(),
            waits: 0,
            failed: false,
        };
        let commit = |durable| Committer::open(&log, durable);
        let committer = log.durable.as_ref().map(commit).transpose()?;
        let room = ((UNDER_WAY + 1) * pages + OPEN_MAX).next_multiple_of(pages);
        Ok(Cleaner {
            below: log.below.lane(room)?,
            parts: Parts {
                appender: Appender::new(0, 0, SEGMENTS),
                victims: (0..VICTIMS).map(|_| victim()).collect(),
            },
            log,
            committer,
            cursor: 0,
            again_at: None,
            rest: Rest::default(),
        })
    }

    /// Does what can be done now, without waiting: cleans segments, and goes on with a commit.
    /// Returns the event that the next step needs.
    pub fn step(&mut self, now: Instant) -> Next {
        let stepped = match (&mut self.committer, &self.log.durable) {
            (Some(committer), Some(durable)) => committer.step(&self.log, durable, now),
            _ => Stepped::Idle,
        };
        match (stepped, self.clean(now, stepped == Stepped::Idle)) {
            (Stepped::Worked, _) => {
                self.rest.end();
                Next::Step
            }
            (Stepped::Waits, Next::Work) => Next::Answers,
            (_, next) => next,
        }
    }

    /// Takes the answers of the disks, and goes on with the cleaning of segments. Never waits.
    /// `is_idle` is true if no commit is under way.
    fn clean(&mut self, now: Instant, is_idle: bool) -> Next {
        let Cleaner { log, below, parts, rest, .. } = self;
        below.poll(now, &mut |done| {
            rest.end();
            parts.answered(log, &done);
        });
        below.settled(&mut |slot| parts.appender.settled(log, slot.0));
        parts.appender.write_summaries(log, &mut **below);
        // Writes come first: the lane has no room for the pages of all victims.
        self.write();
        let Cleaner { log, below, parts, .. } = self;
        for at in 0..VICTIMS {
            parts.read(log, &mut **below, at);
        }
        below.submit();
        let ended = self.parts.end(&self.log);
        let may_add = self.wants_more();
        let chosen = may_add && self.choose(now);
        if chosen || ended {
            self.log.is_full.store(false, SeqCst);
            return Next::Step;
        }
        if self.below.in_flight() > 0 {
            return Next::Answers;
        }
        // No further segment can be chosen, and the pages in memory fill no segment.
        if may_add || self.parts.is_crowded() {
            if self.write_what_is_here() {
                return Next::Step;
            }
            // The log is not full while a commit may free enough segments: a commit is under way,
            // or a dead segment waits for one. Nor is it full while a write that was given up may
            // still land, since its victim goes on then.
            let is_short = self.log.segments.free() <= RESERVE
                && (!self.log.segments.are_durable() || is_idle && self.log.segments.dead() == 0);
            let is_busy = self.parts.is_busy();
            self.log.is_full.store(is_short && !(is_busy && self.parts.appender.waits()), SeqCst);
            if is_busy {
                return Next::Answers;
            }
        }
        Next::Work
    }

    /// Sleeps until the event that the last step asked for, or until `also` is readable. No other
    /// function of the cleaner sleeps.
    pub fn wait(&mut self, next: Next, also: BorrowedFd<'_>) {
        let listen = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let nap = Timespec { tv_sec: 0, tv_nsec: POLL_EVERY.subsec_nanos().into() };
        match next {
            Next::Step => {}
            Next::Answers => {
                let fd = self.below.wake_fd().filter(|_| self.below.in_flight() > 0);
                let commit = self.committer.as_ref().filter(|committer| committer.in_flight() > 0);
                let commit = commit.and_then(Committer::wake_fd);
                if fd.is_none() && commit.is_none() {
                    return self.rest.until_next();
                }
                let mut fds = vec![listen(also)];
                fds.extend(fd.into_iter().chain(commit).map(listen));
                // A signal only makes the sleep shorter.
                let _ = rustix::event::poll(&mut fds, Some(&nap));
            }
            Next::Work => {
                self.log.asleep.store(true, SeqCst);
                // A page can die although no write takes a segment. Nothing wakes this thread then,
                // so its sleep has a limit.
                let _ = rustix::event::poll(&mut [listen(also), listen(self.log.bell())], Some(&nap));
                let _ = rustix::io::read(self.log.bell(), &mut [0; 8]);
            }
        }
    }

    /// Whether to clean one segment more.
    fn wants_more(&self) -> bool {
        // A victim whose pages were all read may wait for another victim's pages, to fill a segment
        // with them. So it is not counted among the victims that will soon be free.
        let moves = |victim: &&Victim| victim.phase != Phase::Write || victim.waits > 0;
        let taken = self.parts.victims.iter().filter(|victim| victim.segment.is_some());
        // The live pages of all victims take segments again.
        let places = self.log.shape.places();
        let soon = taken.filter(moves).map(|victim| places - victim.live).sum::<u32>() / places;
        let free = self.log.segments.free() + self.log.segments.dead();
        !self.parts.is_crowded() && free + soon < self.log.low()
    }

    /// Chooses the segment that is most worth cleaning: many pages are dead, and the segment is
    /// old.
    fn choose(&mut self, now: Instant) -> bool {
        let Cleaner { log, parts, cursor, again_at, .. } = self;
        let count = log.segments.count();
        let mut best: Option<(u64, u32, Word)> = None;
        for step in 0..WINDOW.min(count) {
            let segment = (*cursor + step) % count;
            let word = log.segments.word(segment);
            let score = match word.state() {
                State::Closed if word.live() < log.shape.places() => {
                    score(word.live(), log.shape.places(), log.segments.age(segment))
                }
                // A stuck segment is chosen only if there is no other.
                State::Stuck if again_at.is_none_or(|at| now >= at) => 0,
                _ => continue,
            };
            if best.is_none_or(|(most, ..)| score > most) {
                best = Some((score, segment, word));
            }
        }
        *cursor = (*cursor + WINDOW.min(count)) % count;
        let Some((_, segment, word)) = best else { return false };
        if word.state() == State::Stuck {
            *again_at = Some(now + AGAIN);
        }
        if !log.segments.begin_cleaning(segment, word) {
            // The segment's word has changed since it was read, as when one of its pages died. The
            // next step chooses again.
            return true;
        }
        let victim = parts.victims.iter_mut().find(|victim| victim.segment.is_none());
        let victim = victim.expect("fewer than VICTIMS are under way");
        (victim.segment, victim.generation) = (Some(segment), word.generation());
        (victim.failed, victim.waits, victim.live) = (false, 0, word.live());
        victim.states.fill(PageState::Over);
        let has_row = log.rows.copy(&log.segments, segment, &mut victim.records);
        victim.phase = if has_row { Phase::Read(0) } else { Phase::Summary };
        log.counters.live_cleaned.fetch_add(word.live().into(), Relaxed);
        true
    }

    /// Writes the pages in memory as long as they fill whole segments.
    fn write(&mut self) {
        for generation in 1..GENERATIONS {
            while self.parts.count_here(&self.log, generation) >= self.goal(generation) {
                if !self.write_segment(generation) {
                    break;
                }
            }
        }
    }

    /// The cleaner writes a generation's pages once this many of them are in memory. They fill the
    /// rest of the generation's open segment, or else a whole segment.
    fn goal(&self, generation: usize) -> usize {
        match self.parts.appender.left(&self.log, generation) {
            0 => self.log.shape.places() as usize,
            left => left as usize,
        }
    }

    /// Writes less than a segment: pages of the generation that has most pages in memory and finds
    /// room. Returns whether it wrote a page.
    fn write_what_is_here(&mut self) -> bool {
        let log = Arc::clone(&self.log);
        let mut counts: Vec<_> = (1..GENERATIONS)
            .map(|generation| (self.parts.count_here(&log, generation), generation))
            .collect();
        counts.sort_unstable_by_key(|(count, _)| std::cmp::Reverse(*count));
        counts.into_iter().any(|(count, generation)| count > 0 && self.write_segment(generation))
    }

    /// Writes pages of a generation until a segment is full or no page is left. Returns whether it
    /// wrote a page.
    fn write_segment(&mut self, generation: usize) -> bool {
        let Cleaner { log, below, parts, .. } = self;
        let Parts { appender, victims } = parts;
        let mut wrote = false;
        let ready = victims.iter_mut().enumerate().filter(|(_, victim)| victim.is_read(generation));
        'all: for (number, victim) in ready {
            for at in 0..victim.records.len() {
                if victim.states[at] != PageState::Here {
                    continue;
                }
                let Some(place) = appender.next(log, generation) else { break 'all };
                let ticket = WRITE | ticket(number, at as u32);
                let progress = below.write(ticket, Slot(place), &victim.pages[at]);
                if progress == Progress::Full {
                    break 'all;
                }
                let record = victim.records[at];
                let is_full = appender.take(log, generation, record, progress == Progress::Queued);
                wrote = true;
                log.counters.moved.fetch_add(1, Relaxed);
                match progress {
                    Progress::Queued => {
                        victim.states[at] = PageState::Writes;
                        victim.targets[at] = place;
                        victim.waits += 1;
                    }
                    Progress::Done(Ok(())) => {
                        appender.publish(log, place, record.version);
                        victim.moved(log, at, place);
                    }
                    _ => {
                        // The page stays in memory, and is written to another segment later.
                        appender.failed(log, place);
                        below.submit();
                        return false;
                    }
                }
                if is_full {
                    appender.write_summaries(log, &mut **below);
                    break 'all;
                }
            }
        }
        below.submit();
        wrote
    }
}

/// Rates how much it is worth to clean a segment: more with dead pages and with age, less with live
/// pages. It follows Rosenblum and Ousterhout, *The design and implementation of a log-structured
/// file system*, SOSP 1991. With the square root of the age the cleaner moves fewer pages than with
/// the age itself.
fn score(live: u32, places: u32, age: u32) -> u64 {
    let dead = u64::from(places - live);
    dead * (u64::from(age) + 1).isqrt() * 1024 / (u64::from(live) * 2 + 1)
}

fn ticket(victim: usize, at: u32) -> Ticket {
    (victim as Ticket) << 9 | at
}

impl Victim {
    /// The generation to which the segment's pages move.
    fn target(&self) -> usize {
        (self.generation + 1).min(GENERATIONS - 1)
    }

    /// Whether the segment's pages move to this generation, and all were read. Only then are they
    /// written: each segment that the cleaner fills ends a victim, unless the disk fails. So its
    /// reserve is not used up.
    fn is_read(&self, generation: usize) -> bool {
        self.target() == generation
            && self.phase == Phase::Write
            && self.states.iter().all(|state| *state != PageState::Reads)
    }

    /// Notes that the page at index `at` has been written to `place`.
    fn moved(&mut self, log: &Shared, at: usize, place: u32) {
        self.states[at] = PageState::Over;
        let from = log.shape.place(self.segment.expect("a victim has a segment"), at as u32);
        log.rename(self.records[at].page, from, place);
    }

    /// Whether the page at this place of the segment is live: the log's map still names the place.
    fn is_live(&self, log: &Shared, at: u32) -> bool {
        let Some(segment) = self.segment else { return false };
        let page = self.records[at as usize].page;
        page < log.shape.pages && log.find(page) == Some(log.shape.place(segment, at))
    }

    /// Handles the end of a page's read. The page was read because it was live, or as part of a
    /// gap.
    fn read(&mut self, log: &Shared, at: u32, result: Result<(), Fault>, found: Option<&Page>) {
        let place = at as usize;
        self.states[place] = PageState::Over;
        if !self.is_live(log, at) {
            return;
        }
        match found.filter(|_| result.is_ok()) {
            Some(page) if self.records[place].proves(self.records[place].page, page) => {
                self.pages[place].clone_from(page);
                self.states[place] = PageState::Here;
            }
            found => {
                log.counters.corrupt.fetch_add(found.is_some().into(), Relaxed);
                self.failed = true;
            }
        }
    }

    /// Handles the end of the read of a victim's summary. `None`: the read has failed.
    fn learn(&mut self, log: &Shared, found: Option<&weir_core::PageBytes>) {
        let segment = self.segment.expect("a victim has a segment");
        let summary = found.and_then(|bytes| Summary::parse(bytes, segment));
        let life = log.segments.word(segment).life();
        let Some(summary) = summary.filter(|summary| log.is_its(summary, life)) else {
            self.records.clear();
            (self.failed, self.phase) = (true, Phase::Write);
            return;
        };
        self.records.clear();
        self.records.extend(summary.records().take(log.shape.places() as usize));
        self.phase = Phase::Read(0);
    }
}

impl Parts {
    /// Handles an answer of the store below.
    fn answered(&mut self, log: &Shared, done: &Done<'_>) {
        let Done { ticket, result, page } = *done;
        if ticket >= SEGMENTS {
            return self.appender.summary_answered(log, ticket, result);
        }
        let (number, at) = (((ticket % WRITE) >> 9) as usize, ticket & 511);
        let victim = &mut self.victims[number];
        victim.waits -= 1;
        if ticket >= SUMMARY {
            return victim.learn(log, page.filter(|_| result.is_ok()));
        }
        if ticket < WRITE {
            let page = page.map(|bytes| Page(*bytes));
            return victim.read(log, at, result, page.as_ref());
        }
        let place = victim.targets[at as usize];
        match result {
            Ok(()) => {
                self.appender.publish(log, place, victim.records[at as usize].version);
                victim.moved(log, at as usize, place);
            }
            // The page is still in its old place, and in memory. It is written again, to another
            // segment.
            Err(_) => victim.states[at as usize] = PageState::Here,
        }
        self.appender.answered(log, place, result);
    }

    /// Issues the reads that a victim needs, as long as the store below takes them.
    fn read(&mut self, log: &Shared, below: &mut dyn Lane, number: usize) {
        let victim = &mut self.victims[number];
        let Some(segment) = victim.segment else { return };
        let mut out = Page::zeroed();
        if victim.phase == Phase::Summary {
            let slot = Slot(log.shape.place(segment, log.shape.places()));
            match below.read(SUMMARY | ticket(number, 0), slot, &mut out) {
                Progress::Full => return,
                Progress::Queued => {
                    victim.waits += 1;
                    victim.phase = Phase::SummaryWaits;
                }
                Progress::Done(result) => victim.learn(log, Some(&*out).filter(|_| result.is_ok())),
            }
        }
        let Phase::Read(from) = victim.phase else { return };
        let places = victim.records.len() as u32;
        let mut at = from;
        while at < places {
            // Go on to the next live page, and read the gap too if it is short.
            let Some(live) = (at..places).find(|at| victim.is_live(log, *at)) else {
                at = places;
                break;
            };
            let first = if at > 0 && live - at <= GAP { at } else { live };
            for place in first..=live {
                let slot = Slot(log.shape.place(segment, place));
                match below.read(ticket(number, place), slot, &mut out) {
                    Progress::Full => {
                        victim.phase = Phase::Read(place);
                        return;
                    }
                    Progress::Queued => {
                        victim.waits += 1;
                        victim.states[place as usize] = PageState::Reads;
                    }
                    Progress::Done(result) => victim.read(log, place, result, Some(&out)),
                }
            }
            at = live + 1;
        }
        victim.phase = if at == places { Phase::Write } else { Phase::Read(at) };
    }

    /// Number of live pages in memory that are to be written to this generation. Drops pages that a
    /// lane has written anew meanwhile.
    fn count_here(&mut self, log: &Shared, generation: usize) -> usize {
        let mut count = 0;
        for victim in self.victims.iter_mut().filter(|victim| victim.is_read(generation)) {
            for at in 0..victim.records.len() {
                if victim.states[at] != PageState::Here {
                    continue;
                }
                if victim.is_live(log, at as u32) {
                    count += 1;
                } else {
                    victim.states[at] = PageState::Over;
                }
            }
        }
        count
    }

    /// Ends work on finished victims. Returns whether there was one.
    fn end(&mut self, log: &Shared) -> bool {
        let mut ended = false;
        for victim in &mut self.victims {
            let Some(segment) = victim.segment else { continue };
            let is_over = victim.phase == Phase::Write
                && victim.waits == 0
                && victim.states.iter().all(|state| *state == PageState::Over);
            if !is_over {
                continue;
            }
            victim.segment = None;
            ended = true;
            let state = if victim.failed { State::Stuck } else { State::Closed };
            if log.segments.leave(segment, state) {
                log.counters.cleaned.fetch_add(1, Relaxed);
                log.free(segment);
            }
        }
        ended
    }

    /// Whether no further victim can be taken.
    fn is_crowded(&self) -> bool {
        self.victims.iter().all(|victim| victim.segment.is_some())
    }

    fn is_busy(&self) -> bool {
        self.victims.iter().any(|victim| victim.segment.is_some())
    }
}

impl Drop for Cleaner {
    /// Pages that were not moved stay in their old places.
    fn drop(&mut self) {
        for victim in &mut self.parts.victims {
            if let Some(segment) = victim.segment.take()
                && self.log.segments.leave(segment, State::Closed)
            {
                self.log.free(segment);
            }
        }
        // The cleaner's open segments are not closed: their writes may still land while the
        // cleaner's lane exists.
        if let Some(durable) = &self.log.durable
            && let Some(number) = durable.asked()
        {
            // Only the cleaner commits, and it ends here. So a flush that waits for a commit fails.
            durable.answer(number, Err(Fault::Io(EIO)));
        }
    }
}
