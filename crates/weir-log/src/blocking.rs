//! Reads and writes of the store below by a caller that waits for each. They serve to make, open
//! and check a durable log, while no other thread has a lane of the log.

use std::io;
use std::time::Instant;
use weir_core::{Page, PageBytes, Rest, Slot, Watch};
use weir_store::{Fault, Lane, OpenError, Progress, Store, Ticket};

/// Largest number of operations under way at once.
const DEPTH: usize = 256;
/// Maximum number of attempts of one read.
const TRIES: usize = 4;

/// The caller's clock, which returns the present time.
pub type Clock<'a> = &'a mut dyn FnMut() -> Instant;

/// A lane of the store below, for a caller that waits for its operations.
pub(crate) struct Blocking<'a> {
    lane: Box<dyn Lane>,
    clock: Clock<'a>,
    watch: Watch<'a>,
    rest: Rest,
    /// For each ticket under way, its operation's number and slot.
    under_way: Vec<Option<(usize, u32)>>,
}

/// The reason why the caller's work ended early.
#[derive(Debug)]
pub(crate) enum Ended {
    /// A write or a flush failed.
    Fault(Fault),
    /// The caller's [`Watch`] ended the work.
    Stopped(io::Error),
}

impl<'a> Blocking<'a> {
    pub fn open(store: &dyn Store, clock: Clock<'a>, watch: Watch<'a>) -> Result<Self, OpenError> {
        Ok(Blocking {
            lane: store.lane(DEPTH)?,
            clock,
            watch,
            rest: Rest::default(),
            under_way: vec![None; DEPTH],
        })
    }

    pub fn clock(&mut self) -> Clock<'_> {
        &mut *self.clock
    }

    /// Reports the progress to the caller's [`Watch`], which may end the work.
    pub fn tell(&mut self, done: u64, all: u64) -> Result<(), Ended> {
        (self.watch)(done, all).map_err(Ended::Stopped)
    }

    /// Reads these slots, and hands each page over with the slot's index in `slots`, in any order.
    /// Tries a failed read again.
    pub fn read(
        &mut self,
        slots: impl Iterator<Item = u32>,
        mut each: impl FnMut(usize, Result<&PageBytes, Fault>),
    ) {
        let mut failed = self.read_once(slots.enumerate(), &mut each);
        for _ in 1..TRIES {
            if failed.is_empty() {
                return;
            }
            let again: Vec<_> = failed.iter().map(|(number, slot, _)| (*number, *slot)).collect();
            failed = self.read_once(again.into_iter(), &mut each);
        }
        failed.into_iter().for_each(|(number, _, fault)| each(number, Err(fault)));
    }

    /// Reads each slot once, and hands its page over with the slot's number. Returns the slots
    /// whose read failed.
    fn read_once(
        &mut self,
        slots: impl Iterator<Item = (usize, u32)>,
        each: &mut impl FnMut(usize, Result<&PageBytes, Fault>),
    ) -> Vec<(usize, u32, Fault)> {
        let mut failed = Vec::new();
        let mut page = Page::zeroed();
        let mut slots = slots.peekable();
        while slots.peek().is_some() || self.lane.in_flight() > 0 {
            while let (Some(ticket), Some(&(number, slot))) = (self.free_ticket(), slots.peek()) {
                match self.lane.read(ticket as Ticket, Slot(slot), &mut page) {
                    Progress::Full => break,
                    Progress::Queued => self.under_way[ticket] = Some((number, slot)),
                    Progress::Done(Ok(())) => each(number, Ok(&page)),
                    Progress::Done(Err(fault)) => failed.push((number, slot, fault)),
                }
                slots.next();
            }
            self.wait(|(number, slot), result, page| match (result, page) {
                (Ok(()), Some(page)) => each(number, Ok(page)),
                (result, _) => failed.push((number, slot, result.err().unwrap_or(Fault::Lost))),
            });
        }
        failed
    }

    /// Writes pages, and waits for all of them.
    pub fn write<'p>(&mut self, pages: impl Iterator<Item = (u32, &'p PageBytes)>) -> Result<(), Ended> {
        let mut failed = Ok(());
        let mut pages = pages.peekable();
        while pages.peek().is_some() || self.lane.in_flight() > 0 {
            while let (Some(ticket), Some(&(slot, page))) = (self.free_ticket(), pages.peek()) {
                match self.lane.write(ticket as Ticket, Slot(slot), page) {
                    Progress::Full => break,
                    Progress::Queued => self.under_way[ticket] = Some((0, slot)),
                    Progress::Done(result) => failed = failed.and(result),
                }
                pages.next();
            }
            self.wait(|_, result, _| failed = failed.and(result));
        }
        failed.map_err(Ended::Fault)
    }

    /// Asks the store for a flush, and waits for its answer.
    pub fn flush(&mut self) -> Result<(), Ended> {
        let mut answer = None;
        match self.lane.flush(Ticket::MAX) {
            Progress::Done(result) => answer = Some(result),
            Progress::Queued => {}
            Progress::Full => return Err(Ended::Fault(Fault::Full)),
        }
        self.lane.submit();
        while answer.is_none() {
            let now = (self.clock)();
            self.lane.poll(now, &mut |done| answer = Some(done.result));
            if answer.is_none() {
                self.rest.until_next();
            }
        }
        self.rest.end();
        answer.unwrap_or(Ok(())).map_err(Ended::Fault)
    }

    fn free_ticket(&self) -> Option<usize> {
        self.under_way.iter().position(Option::is_none)
    }

    /// Takes the answers that the store below has by now. If it has none, pauses.
    fn wait(&mut self, mut each: impl FnMut((usize, u32), Result<(), Fault>, Option<&PageBytes>)) {
        self.lane.submit();
        if self.lane.in_flight() == 0 {
            return;
        }
        let Blocking { lane, clock, under_way, rest, .. } = self;
        let mut any = false;
        lane.poll(clock(), &mut |done| {
            any = true;
            if let Some(which) = under_way.get_mut(done.ticket as usize).and_then(Option::take) {
                each(which, done.result, done.page);
            }
        });
        lane.settled(&mut |_| {});
        if any { rest.end() } else { rest.until_next() }
    }
}
