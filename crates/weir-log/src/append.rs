//! Appending to segments: places for pages in order, and the summary behind the last.

use crate::Shared;
use crate::segment::GENERATIONS;
use crate::summary::{self, Record};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use weir_core::{Page, Slot};
use weir_store::{Fault, Lane, Progress, Ticket};

/// Segments that one appender has under way at once, at most.
pub(crate) const OPEN_MAX: usize = 16;

/// An appender. One for each lane, and one for the cleaner.
pub(crate) struct Appender {
    open: [Option<Open>; OPEN_MAX],
    /// The segment of each generation that takes the next page.
    current: [Option<usize>; GENERATIONS],
    turn: u32,
    /// Free segments that it leaves alone.
    reserve: u32,
    /// The tickets of summaries below: this, and the number in `open`.
    tickets: Ticket,
    page: Box<Page>,
}

struct Open {
    segment: u32,
    life: u32,
    row: u32,
    /// Places taken so far.
    next: u32,
    /// Writes, the summary's too, that may land still.
    waits: u32,
    summary: Written,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Written {
    /// The segment takes more pages.
    NotYet,
    Wanted,
    Waits,
    Done,
    /// It failed, or the segment ended early: the row stays.
    Never,
}

impl Appender {
    pub fn new(turn: u32, reserve: u32, tickets: Ticket) -> Self {
        Appender {
            open: [const { None }; OPEN_MAX],
            current: [None; GENERATIONS],
            turn,
            reserve,
            tickets,
            page: Box::new(Page::zeroed()),
        }
    }

    /// Places left in the segment that takes the next page of a generation.
    pub fn left(&self, log: &Shared, generation: usize) -> u32 {
        let open = self.current[generation].and_then(|at| self.open[at].as_ref());
        open.map_or(0, |open| log.shape.places() - open.next)
    }

    /// The place of the next page, which is taken by [`take`](Appender::take). `None`: no segment
    /// can be had now.
    pub fn next(&mut self, log: &Shared, generation: usize) -> Option<u32> {
        let at = match self.current[generation] {
            Some(at) => at,
            None => {
                let at = self.open.iter().position(Option::is_none)?;
                let Some(segment) = log.segments.pop(&mut self.turn, self.reserve) else {
                    log.counters.waits.fetch_add(1, Relaxed);
                    return None;
                };
                log.ring();
                let Some(row) = log.rows.open(&log.segments, segment) else {
                    log.segments.push(segment);
                    return None;
                };
                let life = log.segments.open(segment, generation);
                let (next, waits, summary) = (0, 0, Written::NotYet);
                self.open[at] = Some(Open { segment, life, row, next, waits, summary });
                self.current[generation] = Some(at);
                at
            }
        };
        let open = self.open[at].as_ref().expect("a current segment is open");
        Some(log.shape.place(open.segment, open.next))
    }

    /// Takes the place that [`next`](Appender::next) has named; `queued`: its write has no answer
    /// yet. Whether the segment is full now, so that its summary is due.
    pub fn take(&mut self, log: &Shared, generation: usize, record: Record, queued: bool) -> bool {
        let at = self.current[generation].expect("next has named a place");
        let open = self.open[at].as_mut().expect("a current segment is open");
        log.rows.set(open.row, open.next, record);
        open.next += 1;
        open.waits += u32::from(queued);
        let is_full = open.next == log.shape.places();
        if is_full {
            open.summary = Written::Wanted;
            self.current[generation] = None;
        }
        is_full
    }

    /// Writes the summaries that are due, as far as there is room below.
    pub fn write_summaries(&mut self, log: &Shared, below: &mut dyn Lane) {
        for at in 0..OPEN_MAX {
            let Some(open) = self.open[at].as_mut().filter(|open| open.summary == Written::Wanted) else {
                continue;
            };
            summary::write(&log.rows, open.row, open.segment, open.life, &mut self.page);
            let slot = Slot(log.shape.place(open.segment, log.shape.places()));
            match below.write(self.tickets + at as Ticket, slot, &self.page) {
                Progress::Full => break,
                Progress::Queued => {
                    open.waits += 1;
                    open.summary = Written::Waits;
                }
                Progress::Done(result) => self.summary_written(log, at, result),
            }
            log.counters.summaries.fetch_add(1, Relaxed);
            below.submit();
            self.end(log, at);
        }
    }

    fn summary_written(&mut self, log: &Shared, at: usize, result: Result<(), Fault>) {
        let Some(open) = self.open[at].as_mut() else { return };
        open.summary = if result.is_ok() { Written::Done } else { Written::Never };
        if result.is_err() {
            log.counters.write_errors.fetch_add(1, Relaxed);
            log.segments.blame(open.segment);
        }
    }

    /// The write of a summary has been answered.
    pub fn summary_answered(&mut self, log: &Shared, ticket: Ticket, result: Result<(), Fault>) {
        let at = (ticket - self.tickets) as usize;
        self.summary_written(log, at, result);
        if let Some(open) = self.open[at].as_mut().filter(|_| result != Err(Fault::Timeout)) {
            open.waits -= 1;
        }
        self.end(log, at);
    }

    /// The write of a page to a place has been answered, after the map was told.
    pub fn answered(&mut self, log: &Shared, place: u32, result: Result<(), Fault>) {
        if result.is_err() {
            self.failed(log, place);
        }
        if result != Err(Fault::Timeout) {
            self.settled(log, place);
        }
    }

    /// The write to a place has ended, one way or the other.
    pub fn settled(&mut self, log: &Shared, place: u32) {
        let Some(at) = self.find(log, place) else { return };
        if let Some(open) = self.open[at].as_mut() {
            open.waits -= 1;
        }
        self.end(log, at);
    }

    /// A write has failed: its segment ends, so that the next one lies on another member.
    pub fn failed(&mut self, log: &Shared, place: u32) {
        log.counters.write_errors.fetch_add(1, Relaxed);
        log.segments.blame(log.shape.split(place).0);
        let Some(at) = self.find(log, place) else { return };
        if let Some(current) = self.current.iter_mut().find(|current| **current == Some(at)) {
            *current = None;
            if let Some(open) = self.open[at].as_mut() {
                open.summary = Written::Never;
            }
            self.end(log, at);
        }
    }

    fn find(&self, log: &Shared, place: u32) -> Option<usize> {
        let (segment, _) = log.shape.split(place);
        self.open.iter().position(|open| open.as_ref().is_some_and(|open| open.segment == segment))
    }

    /// Lets go of a segment that is written.
    fn end(&mut self, log: &Shared, at: usize) {
        let over = |open: &&Open| open.waits == 0 && matches!(open.summary, Written::Done | Written::Never);
        let Some(&Open { segment, row, summary, .. }) = self.open[at].as_ref().filter(over) else { return };
        if summary == Written::Done {
            log.rows.unpin(row);
        }
        self.open[at] = None;
        if log.segments.close(segment) {
            log.free(segment);
        }
    }

    /// Whether a segment more can be had as far as this appender goes.
    pub fn has_room(&self) -> bool {
        self.open.iter().any(Option::is_none)
    }

    /// Lets go of all segments but those whose writes may land still: they are nobody's any more.
    pub fn close(&mut self, log: &Shared) {
        self.current = [None; GENERATIONS];
        for at in 0..OPEN_MAX {
            if let Some(open) = &mut self.open[at] {
                if open.summary != Written::Done {
                    open.summary = Written::Never;
                }
                self.end(log, at);
            }
        }
        log.is_full.store(false, SeqCst);
    }
}
