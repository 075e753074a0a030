//! A lane: one thread's access to a log.

use crate::Shared;
use crate::append::Appender;
use crate::config::{OPEN_MAX, RESERVE};
use crate::summary::{Record, Summary};
use rustix::io::Errno;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Instant;
use weir_core::{Page, PageBytes, Slot};
use weir_store::{Done, Fault, Lane, OpenError, Progress, Ticket};

/// In the store below, the ticket of a page's read or write is the number of its operation. The
/// other tickets have one of these bits: for the read of a summary, the write of a summary, and the
/// flush.
const SUMMARY: Ticket = 1 << 16;
const SEGMENTS: Ticket = 1 << 17;
const FLUSH: Ticket = 1 << 18;
/// Maximum number of restarts of one read. A read restarts when the cleaner has moved its page.
const TRIES: u8 = 100;

pub(crate) struct LogLane {
    /// The lane of the store below; `None` only while this lane is being dropped.
    below: Option<Box<dyn Lane>>,
    parts: Parts,
}

/// The parts of a lane that change when an operation is completed.
struct Parts {
    log: Arc<Shared>,
    appender: Appender,
    operations: Box<[Operation]>,
    /// For each operation, the content that was read and is not verified yet.
    pages: Box<[Page]>,
    idle: Vec<u16>,
    /// Reads that have a step to issue or a result to hand over.
    again: Vec<u16>,
    flush: Option<Ticket>,
    /// For a flush of a durable log, the flush's number.
    flush_number: u64,
    /// Whether a write has found no free segment since the last poll.
    is_starved: bool,
}

#[derive(Clone, Copy)]
struct Operation {
    ticket: Ticket,
    page: u32,
    place: u32,
    /// The life of the place's segment when the read began. In another life the segment holds other
    /// pages.
    life: u32,
    /// The version that a write gives to its page; 0 for a read.
    version: u64,
    state: State,
}

#[derive(Clone, Copy)]
enum State {
    Idle,
    Write,
    Read { content: Part, summary: Part, proof: Option<Record>, tries: u8 },
}

/// The progress of one part of a read: of the page's content, or of the summary.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    /// The read has not needed this part yet.
    No,
    Wanted,
    Waits,
    Ended(Result<(), Fault>),
}

impl LogLane {
    pub fn open(log: Arc<Shared>, depth: usize) -> Result<Self, OpenError> {
        let depth = depth.clamp(1, SUMMARY as usize - 1);
        // Give the lane below room for a whole number of segments. Then it need not split a
        // segment's pages in its memory.
        let room = (depth * 2 + OPEN_MAX).next_multiple_of(log.shape.segment_pages as usize);
        let idle = Operation { ticket: 0, page: 0, place: 0, life: 0, version: 0, state: State::Idle };
        let turn = log.seats.load(Relaxed);
        Ok(LogLane {
            below: Some(log.below.lane(room)?),
            parts: Parts {
                log,
                appender: Appender::new(turn, RESERVE, SEGMENTS),
                operations: vec![idle; depth].into(),
                pages: vec![Page::zeroed(); depth].into(),
                idle: (0..depth as u16).rev().collect(),
                again: Vec::with_capacity(depth),
                flush: None,
                flush_number: 0,
                is_starved: false,
            },
        })
    }

    fn below(&mut self) -> &mut dyn Lane {
        self.below.as_deref_mut().expect("a lane until it is dropped")
    }
}

impl Parts {
    /// Begins to read a page; a result other than `None` ends the read.
    fn begin_read(
        &mut self,
        at: u16,
        below: &mut dyn Lane,
        out: &mut PageBytes,
    ) -> Option<Result<(), Fault>> {
        self.issue(at, below, out);
        self.verdict(at, Some(out))
    }

    /// Issues the parts of a read that are wanted, as long as the store below takes them.
    fn issue(&mut self, at: u16, below: &mut dyn Lane, out: &mut PageBytes) {
        let Parts { log, operations, pages, again, .. } = self;
        let operation = &mut operations[usize::from(at)];
        let State::Read { content, summary, proof, .. } = &mut operation.state else { return };
        let (segment, _) = log.shape.split(operation.place);
        let mut is_short = false;
        if *content == Part::Wanted {
            match below.read(at.into(), Slot(operation.place), out) {
                Progress::Queued => *content = Part::Waits,
                Progress::Full => is_short = true,
                Progress::Done(result) => {
                    *content = Part::Ended(result);
                    *pages[usize::from(at)] = *out;
                }
            }
            // If no row has the place's record, the read needs the summary too. Issue both at once.
            if *content != Part::Wanted && *summary == Part::No && !log.rows.has(&log.segments, segment) {
                *summary = Part::Wanted;
            }
        }
        if *summary == Part::Wanted && !is_short {
            let slot = Slot(log.shape.place(segment, log.shape.places()));
            let mut page = Page::zeroed();
            match below.read(SUMMARY | Ticket::from(at), slot, &mut page) {
                Progress::Queued => *summary = Part::Waits,
                Progress::Full => is_short = true,
                Progress::Done(result) => {
                    *summary = Part::Ended(result);
                    let (place, life) = (operation.place, operation.life);
                    *proof = result.ok().and_then(|()| log.read_summary(place, life, &page));
                }
            }
            log.counters.summary_reads.fetch_add(u64::from(*summary != Part::Wanted), Relaxed);
        }
        if is_short && !again.contains(&at) {
            again.push(at);
        }
    }

    /// The result of a read, or `None` if it is not known yet. The content is in the operation's
    /// page of memory, unless `found` has it. Restarts the read if its page has moved.
    fn verdict(&mut self, at: u16, found: Option<&PageBytes>) -> Option<Result<(), Fault>> {
        let Parts { log, operations, pages, again, .. } = self;
        let operation = &mut operations[usize::from(at)];
        let Operation { page, place, life, .. } = *operation;
        let State::Read { content, summary, proof, tries } = &mut operation.state else { return None };
        let Part::Ended(read) = *content else { return None };
        let (segment, within) = log.shape.split(place);
        let bytes = found.unwrap_or(&pages[usize::from(at)]);
        let row = log.rows.get(&log.segments, segment, within);
        if read.is_ok() && [row, *proof].into_iter().flatten().any(|record| record.proves(page, bytes)) {
            // If a read has also asked for a summary, it waits for the summary. Otherwise the
            // summary could arrive after the operation has ended.
            return (*summary != Part::Waits).then_some(Ok(()));
        }
        if *summary == Part::Waits {
            return None;
        }
        let Some(now) = log.find_with_life(page) else {
            // The page was discarded meanwhile.
            return Some(Err(Fault::Lost));
        };
        let moved = now != (place, life);
        let answer = match (read, *summary) {
            _ if moved && *tries < TRIES => {
                let tries = *tries + 1;
                (operation.place, operation.life) = now;
                operation.state =
                    State::Read { content: Part::Wanted, summary: Part::No, proof: None, tries };
                if !again.contains(&at) {
                    again.push(at);
                }
                return None;
            }
            (Err(fault), _) | (_, Part::Ended(Err(fault))) => Err(fault),
            (Ok(()), Part::Ended(Ok(()))) => {
                log.counters.corrupt.fetch_add(1, Relaxed);
                Err(Fault::Corrupt)
            }
            (Ok(()), _) => {
                if let Some(found) = found {
                    *pages[usize::from(at)] = *found;
                }
                *summary = Part::Wanted;
                if !again.contains(&at) {
                    again.push(at);
                }
                return None;
            }
        };
        Some(answer)
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
        self.idle.push(at);
        done(Done { ticket: operation.ticket, result, page: page.filter(|_| result.is_ok()) });
    }

    /// Handles an answer of the store below.
    fn answered(&mut self, below_done: &Done<'_>, done: &mut dyn FnMut(Done<'_>)) {
        let Done { ticket, result, page: found } = *below_done;
        if ticket == FLUSH {
            if let Some(ticket) = self.flush.take() {
                done(Done { ticket, result, page: None });
            }
            return;
        }
        if ticket >= SEGMENTS {
            return self.appender.summary_answered(&self.log, ticket, result);
        }
        let at = (ticket % SUMMARY) as u16;
        let Operation { page, place, life, version, state, .. } = &mut self.operations[usize::from(at)];
        let (page, place, life, version) = (*page, *place, *life, *version);
        match state {
            State::Idle => {}
            State::Write => {
                if result.is_ok() {
                    self.appender.publish(&self.log, place, version);
                    self.log.publish(page, place);
                }
                self.appender.answered(&self.log, place, result);
                // The map still names the page's old place. If the write lands late, it lands in a
                // place without a page.
                let result = result.map_err(|fault| match fault {
                    Fault::Timeout => Fault::Io(Errno::TIMEDOUT.raw_os_error()),
                    fault => fault,
                });
                self.hand_over(at, result, None, done);
            }
            State::Read { summary, proof, .. } if ticket >= SUMMARY => {
                *summary = Part::Ended(result);
                *proof = found.and_then(|bytes| self.log.read_summary(place, life, bytes));
                if let Some(result) = self.verdict(at, None) {
                    let page = self.pages[usize::from(at)].clone();
                    self.hand_over(at, result, Some(&page), done);
                }
            }
            State::Read { content, .. } => {
                *content = Part::Ended(result);
                match self.verdict(at, found) {
                    Some(result) => self.hand_over(at, result, found, done),
                    None => {
                        if let Some(found) = found {
                            *self.pages[usize::from(at)] = *found;
                        }
                    }
                }
            }
        }
    }

    /// Hands over the flush's completion if a commit has answered the flush.
    fn take_commit(&mut self, done: &mut dyn FnMut(Done<'_>)) {
        let Some(durable) = self.log.durable.as_ref().filter(|_| self.flush.is_some()) else { return };
        if let Some(result) = durable.answer_to(self.flush_number)
            && let Some(ticket) = self.flush.take()
        {
            done(Done { ticket, result, page: None });
        }
    }

    /// Goes on with the reads in `again`: issues what they need, or hands over their results.
    fn go_on(&mut self, below: &mut dyn Lane, done: &mut dyn FnMut(Done<'_>)) {
        for _ in 0..self.again.len() {
            let at = self.again.remove(0);
            let mut page = Page::zeroed();
            self.issue(at, below, &mut page);
            if let Some(result) = self.verdict(at, None) {
                let page = self.pages[usize::from(at)].clone();
                self.hand_over(at, result, Some(&page), done);
            }
        }
    }
}

impl Shared {
    /// The record of a place in a summary that was read. Stores the summary in memory.
    fn read_summary(&self, place: u32, life: u32, bytes: &PageBytes) -> Option<Record> {
        let (segment, within) = self.shape.split(place);
        let summary = Summary::parse(bytes, segment).filter(|it| self.is_its(it, life))?;
        self.rows.keep(&self.segments, &summary);
        Some(summary.record(within))
    }
}

impl Lane for LogLane {
    fn write(&mut self, ticket: Ticket, slot: Slot, page: &PageBytes) -> Progress {
        let LogLane { below, parts } = self;
        let below = below.as_deref_mut().expect("a lane until it is dropped");
        let Parts { log, appender, operations, idle, is_starved, .. } = parts;
        if slot.0 >= log.shape.pages {
            return Progress::Done(Err(Fault::Lost));
        }
        let Some(at) = idle.last().copied() else { return Progress::Full };
        let Some(place) = appender.next(log, 0) else {
            if !appender.has_room() && below.in_flight() == 0 {
                // The appender has its largest number of segments open. Each of them has a write
                // that was given up and may still land, because a disk does not answer.
                return Progress::Done(Err(Fault::Io(Errno::TIMEDOUT.raw_os_error())));
            }
            if log.is_full.load(SeqCst) {
                return Progress::Done(Err(Fault::Full));
            }
            *is_starved = true;
            log.ring();
            return Progress::Full;
        };
        let version = log.next_version();
        let progress = below.write(at.into(), Slot(place), page);
        if progress == Progress::Full {
            return Progress::Full;
        }
        let record = Record::of(slot.0, page);
        let is_full = appender.take(log, 0, record, progress == Progress::Queued);
        match progress {
            Progress::Done(Ok(())) => {
                appender.publish(log, place, version);
                log.publish(slot.0, place);
            }
            Progress::Done(Err(_)) => appender.failed(log, place),
            _ => {
                idle.pop();
                operations[usize::from(at)] =
                    Operation { ticket, page: slot.0, place, life: 0, version, state: State::Write };
            }
        }
        log.counters.written.fetch_add(1, Relaxed);
        if is_full {
            appender.write_summaries(log, below);
        }
        progress
    }

    fn read(&mut self, ticket: Ticket, slot: Slot, page: &mut PageBytes) -> Progress {
        let LogLane { below, parts } = self;
        let below = below.as_deref_mut().expect("a lane until it is dropped");
        if slot.0 >= parts.log.shape.pages {
            return Progress::Done(Err(Fault::Lost));
        }
        let Some((place, life)) = parts.log.find_with_life(slot.0) else {
            page.fill(0);
            return Progress::Done(Ok(()));
        };
        let Some(at) = parts.idle.pop() else { return Progress::Full };
        let state = State::Read { content: Part::Wanted, summary: Part::No, proof: None, tries: 0 };
        parts.operations[usize::from(at)] =
            Operation { ticket, page: slot.0, place, life, version: 0, state };
        let mut found = Page::zeroed();
        match parts.begin_read(at, below, &mut found) {
            Some(result) => {
                parts.operations[usize::from(at)].state = State::Idle;
                parts.idle.push(at);
                if result.is_ok() {
                    *page = *found;
                }
                Progress::Done(result)
            }
            None => Progress::Queued,
        }
    }

    /// The best numbers of pages to write in a row: first the number that the open segment still
    /// takes, and then that of a whole segment. Pages up to a segment's end go to the disk as one
    /// write.
    fn best_runs(&self) -> Option<(usize, usize)> {
        let Parts { log, appender, .. } = &self.parts;
        let places = log.shape.places();
        let left = Some(appender.left(log, 0)).filter(|left| *left > 0);
        Some((left.unwrap_or(places) as usize, places as usize))
    }

    /// A durable log keeps the page: after a power cut it must have the content that was flushed.
    fn discard(&mut self, slot: Slot) {
        let log = &self.parts.log;
        if log.durable.is_none() && slot.0 < log.shape.pages {
            log.discard(slot.0);
        }
    }

    fn flush(&mut self, ticket: Ticket) -> Progress {
        if self.parts.flush.is_some() {
            return Progress::Full;
        }
        if let Some(durable) = &self.parts.log.durable {
            self.parts.flush_number = durable.ask();
            self.parts.flush = Some(ticket);
            self.parts.log.wake();
            return Progress::Queued;
        }
        let progress = self.below().flush(FLUSH);
        if progress == Progress::Queued {
            self.parts.flush = Some(ticket);
        }
        progress
    }

    fn submit(&mut self) {
        self.below().submit();
    }

    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        let LogLane { below, parts } = self;
        let below = below.as_deref_mut().expect("a lane until it is dropped");
        parts.is_starved = false;
        below.poll(now, &mut |below_done| parts.answered(&below_done, done));
        below.settled(&mut |slot| parts.appender.settled(&parts.log, slot.0));
        parts.appender.write_summaries(&parts.log, below);
        parts.take_commit(done);
        if !parts.again.is_empty() {
            parts.go_on(below, done);
            below.submit();
        }
    }

    fn in_flight(&self) -> usize {
        self.parts.operations.len() - self.parts.idle.len() + usize::from(self.parts.flush.is_some())
    }

    /// Returns `None` while the lane waits for a free segment or a commit, or has an operation to
    /// issue again. No descriptor announces these events, so the lane's owner must poll.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        let Parts { log, again, flush, is_starved, .. } = &self.parts;
        let must_poll = *is_starved || !again.is_empty() || log.durable.is_some() && flush.is_some();
        self.below.as_ref().filter(|_| !must_poll)?.wake_fd()
    }
}

impl Drop for LogLane {
    /// The lane of the store below is dropped first. After that, no write that it has answered can
    /// still land.
    fn drop(&mut self) {
        self.below = None;
        self.parts.appender.close(&self.parts.log);
        self.parts.log.seats.fetch_add(1, SeqCst);
    }
}
