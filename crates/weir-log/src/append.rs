//! Appends to segments: pages take places in order, and the segment's summary comes last.

use crate::Shared;
use crate::config::OPEN_MAX;
use crate::segment::GENERATIONS;
use crate::summary::{self, Record};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use weir_core::{Page, Slot};
use weir_store::{Fault, Lane, Progress, Ticket};

/// Appends pages to segments. Each lane has an appender, and so has the cleaner.
pub(crate) struct Appender {
    open: [Option<Open>; OPEN_MAX],
    /// For each generation, the index in `open` of the segment that takes the generation's next
    /// page.
    current: [Option<usize>; GENERATIONS],
    turn: u32,
    /// Number of free segments that this appender must leave to the cleaner.
    reserve: u32,
    /// Base of the tickets under which summaries are written to the store below. A summary's ticket
    /// is this plus its segment's index in `open`.
    tickets: Ticket,
    page: Box<Page>,
}

struct Open {
    segment: u32,
    life: u32,
    row: u32,
    /// Number of the segment's places that were taken so far.
    next: u32,
    /// Number of writes to the segment, its summary included, that may still land.
    waits: u32,
    generation: usize,
    summary: Written,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Written {
    /// The segment takes more pages.
    NotYet,
    Wanted,
    Waits,
    Done,
    /// The summary is not written, because its write failed or the segment ended early. The row
    /// stays in memory.
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

    /// Number of places left in the segment that takes the next page of a generation.
    pub fn left(&self, log: &Shared, generation: usize) -> u32 {
        let open = self.current[generation].and_then(|at| self.open[at].as_ref());
        open.map_or(0, |open| log.shape.places() - open.next)
    }

    /// Returns the place that [`take`](Appender::take) takes next. `None`: no segment or no row is
    /// free now.
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
                self.open[at] = Some(Open { segment, life, row, next, waits, generation, summary });
                self.current[generation] = Some(at);
                at
            }
        };
        let open = self.open[at].as_ref().expect("a current segment is open");
        Some(log.shape.place(open.segment, open.next))
    }

    /// Takes the place that [`next`](Appender::next) has named. `queued`: the page's write has no
    /// answer yet. Returns whether the segment is now full, so that its summary is due.
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

    /// Gives the record of a place its version, once the page has been written. Scratch logs have
    /// no versions.
    pub fn publish(&self, log: &Shared, place: u32, version: u64) {
        if log.durable.is_none() {
            return;
        }
        let (segment, within) = log.shape.split(place);
        let open = self.find(log, place).and_then(|at| self.open[at].as_ref());
        let open = open.expect("a segment whose write had no answer is open");
        log.rows.publish_version(open.row, within, version);
        log.segments.mark(segment);
    }

    /// Writes the summaries that are due, as far as the store below has room. The summary of a
    /// durable log names the pages that were written, so it waits for the answers of their writes.
    pub fn write_summaries(&mut self, log: &Shared, below: &mut dyn Lane) {
        for at in 0..OPEN_MAX {
            let is_due = |open: &&mut Open| {
                open.summary == Written::Wanted && (log.durable.is_none() || open.waits == 0)
            };
            let Some(open) = self.open[at].as_mut().filter(is_due) else { continue };
            let about = (open.segment, open.life, open.generation);
            summary::write(&log.rows, open.row, about, log.identity(), &mut self.page);
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
        if result.is_ok() {
            log.segments.has_summary(open.segment);
        } else {
            log.counters.write_errors.fetch_add(1, Relaxed);
            log.segments.blame(open.segment);
        }
    }

    /// Handles the answer to the write of a summary.
    pub fn summary_answered(&mut self, log: &Shared, ticket: Ticket, result: Result<(), Fault>) {
        let at = (ticket - self.tickets) as usize;
        self.summary_written(log, at, result);
        if let Some(open) = self.open[at].as_mut().filter(|_| result != Err(Fault::Timeout)) {
            open.waits -= 1;
        }
        self.end(log, at);
    }

    /// Handles the answer to the write of a page, after the map was updated.
    pub fn answered(&mut self, log: &Shared, place: u32, result: Result<(), Fault>) {
        if result.is_err() {
            self.failed(log, place);
        }
        if result != Err(Fault::Timeout) {
            self.settled(log, place);
        }
    }

    /// Handles the end of the write to a place, done or failed.
    pub fn settled(&mut self, log: &Shared, place: u32) {
        let Some(at) = self.find(log, place) else { return };
        if let Some(open) = self.open[at].as_mut() {
            open.waits -= 1;
        }
        self.end(log, at);
    }

    /// Ends the segment of a failed write, so that the next segment lies on another member.
    pub fn failed(&mut self, log: &Shared, place: u32) {
        log.counters.write_errors.fetch_add(1, Relaxed);
        log.segments.blame(log.shape.split(place).0);
        let Some(at) = self.find(log, place) else { return };
        if let Some(current) = self.current.iter_mut().find(|current| **current == Some(at)) {
            *current = None;
            if let Some(open) = self.open[at].as_mut() {
                // In a scratch log the summary would also name the page whose write failed. So the
                // summary is not written.
                open.summary = if log.durable.is_some() { Written::Wanted } else { Written::Never };
            }
            self.end(log, at);
        }
    }

    fn find(&self, log: &Shared, place: u32) -> Option<usize> {
        let (segment, _) = log.shape.split(place);
        self.open.iter().position(|open| open.as_ref().is_some_and(|open| open.segment == segment))
    }

    /// Ends an appender's work on a segment whose writes all have answers.
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

    /// Whether this appender may open one more segment.
    pub fn has_room(&self) -> bool {
        self.open.iter().any(Option::is_none)
    }

    /// Whether a write to an open segment has no answer, or was given up and may still land.
    pub fn waits(&self) -> bool {
        self.open.iter().flatten().any(|open| open.waits > 0)
    }

    /// Ends the appender's work on all segments. A segment with a write that was given up stays
    /// open for ever, because that write may still land.
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
