//! Many pages in a row at a slow store: one operation for pages that lie side by side.
//!
//! A run saves bookkeeping. A page that is an operation of its own needs an entry in each of three
//! tables, and two hand-overs. Together these take longer than the page's checksum.

use super::located::Located;
use super::run::LEAST;
use super::{Lane, Work};
use crate::entry::{Entry, Place};
use crate::records::Occupant;
use weir_core::{Checksum, PageBytes, PageNo, Slot, uniform_value};
use weir_store::{Done, Fault, Ticket};

/// Largest number of runs that a lane may have under way; further pages go by single operations.
pub(super) const RUNS: usize = 16;
/// Largest number of pages of a run: as many as [`Run::late`] has bits.
const RUN_PAGES: usize = u64::BITS as usize;
/// Distance, in pages, from the page that is handled now to the page that is prefetched meanwhile.
const AHEAD: usize = 2;

/// Pages that follow one another, in slots side by side, on their way from or to a store.
pub(crate) struct Run {
    is_write: bool,
    first: PageNo,
    store: usize,
    count: usize,
    /// Number of pages that the store has answered.
    answered: usize,
    /// Of a write: the first fault among its pages.
    fault: Option<Fault>,
    /// Of a write: a bit for each page that the store did not answer in time. The write may still
    /// change such a page's slot.
    late: u64,
    entries: [Entry; RUN_PAGES],
    checksums: [Checksum; RUN_PAGES],
}

impl Run {
    pub(super) fn idle() -> Run {
        Run {
            is_write: false,
            first: PageNo(0),
            store: 0,
            count: 0,
            answered: 0,
            fault: None,
            late: 0,
            entries: [Entry::default(); RUN_PAGES],
            checksums: [Checksum(0); RUN_PAGES],
        }
    }

    pub(crate) fn is_write(&self) -> bool {
        self.is_write
    }

    fn page(&self, at: usize) -> PageNo {
        PageNo(self.first.0 + at as u32)
    }

    /// Takes the store's answer for the next page. Returns the page's index in the run, and for a
    /// read whether `bytes` are its content.
    #[inline]
    pub(crate) fn answer(
        &mut self,
        result: Result<(), Fault>,
        bytes: Option<&PageBytes>,
    ) -> (usize, Result<(), Fault>) {
        let at = self.answered;
        self.answered += 1;
        if self.is_write {
            self.fault = self.fault.or(result.err());
            self.late |= u64::from(result == Err(Fault::Timeout)) << at;
            return (at, result);
        }
        let located = Located {
            page: self.page(at),
            entry: self.entries[at],
            checksum: Some(self.checksums[at]),
            packed: false,
        };
        (at, result.and_then(|()| located.verify(bytes.ok_or(Fault::Lost)?)))
    }

    /// Of a write: the store and slot of the page at index `at`.
    pub(crate) fn slot(&self, at: usize) -> Option<(usize, Slot)> {
        match self.entries[at].place() {
            Place::Stored { store, slot } if self.is_write => Some((store, slot)),
            _ => None,
        }
    }

    /// The store's answers for the pages of a finished write.
    pub(crate) fn answers(&self) -> impl Iterator<Item = (usize, Result<(), Fault>)> {
        (0..self.answered).map(|at| (at, if self.late >> at & 1 == 1 { Err(Fault::Timeout) } else { Ok(()) }))
    }

    pub(super) fn has_ended(&self) -> bool {
        self.answered == self.count
    }
}

impl Lane {
    /// Begins to read pages from `first` on, at most `count`, as one operation: as many as lie side
    /// by side in a slow store. Returns their number. Read the others by [`read`](Lane::read). Each
    /// page has a completion of its own, with tickets from `ticket` on. The completions come in any
    /// order, among those of other operations.
    pub fn queue_reads(&mut self, ticket: Ticket, first: PageNo, count: usize) -> usize {
        let (Some(&op), Some(&run)) = (self.idle_ops.last(), self.idle_runs.last()) else { return 0 };
        let first = self.run_at(first, count);
        let mut most = count.min(RUN_PAGES).min(self.room_under_way());
        if most < LEAST {
            return 0;
        }
        self.enter();
        let Lane { pool, stores, runs, .. } = self;
        let found = &mut runs[run as usize];
        let (mut pages, mut from) = (0, None);
        while pages < most {
            let located = pool.locate(PageNo(first.0 + pages as u32));
            let (Place::Stored { store, slot }, Some(checksum), false) =
                (located.entry.place(), located.checksum, located.packed)
            else {
                break;
            };
            let (of, start) = *from.get_or_insert_with(|| {
                most = most.min(stores[store].lane.run_room(false));
                (store, slot)
            });
            if of != store || slot.0 != start.0 + pages as u32 || pages >= most {
                break;
            }
            (found.entries[pages], found.checksums[pages]) = (located.entry, checksum);
            pages += 1;
        }
        let Some((store, slot)) = from.filter(|_| pages >= LEAST) else { return 0 };
        let taken = stores[store].lane.read_run(op, slot, pages);
        if taken > 0 {
            self.start_run(ticket, run, false, store, first, taken);
            self.ops[op as usize].found = self.looking.begin();
        }
        taken
    }

    /// Begins to write `pages` to `first` and the pages after it, as one operation: as many as find
    /// slots side by side in a slow store. Returns their number. Write the others by
    /// [`write`](Lane::write). The operation has one completion for all its pages.
    pub fn queue_writes(&mut self, ticket: Ticket, first: PageNo, pages: &[PageBytes]) -> usize {
        let (Some(&op), Some(&run)) = (self.idle_ops.last(), self.idle_runs.last()) else { return 0 };
        let first = self.run_at(first, pages.len());
        let room = self.stores[self.taker].lane.run_room(true).min(self.room_under_way());
        let most = pages.len().min(RUN_PAGES).min(room);
        if most < LEAST
            || self.long == 0
            || self.packing.is_some()
            || self.pool.tiers[self.taker].is_quarantined()
        {
            return 0;
        }
        let is_uniform = |at: usize| uniform_value(&pages[at]).is_some();
        if is_uniform(0) {
            return 0;
        }
        self.enter();
        // If no slot is free, begin nothing: the caller then writes single pages, which can wait
        // for a slot.
        let Some((store, slot)) = self.claim_now(first) else { return 0 };
        let place = |at: usize| Place::Stored { store, slot: Slot(slot.0 + at as u32) };
        let page = |at: usize| PageNo(first.0 + at as u32);
        let mut claimed = 1;
        if self.stores[store].lane.run_room(true) >= most && !self.pool.tiers[store].is_quarantined() {
            while claimed < most
                && !is_uniform(claimed)
                && self.claim_neighbour(store, Slot(slot.0 + claimed as u32), page(claimed))
            {
                claimed += 1;
            }
        }
        let Lane { pool, stores, runs, .. } = self;
        let records = &pool.tiers[store].records;
        for (at, bytes) in pages[..claimed].iter().enumerate() {
            if let Some(ahead) = pages[..claimed].get(at + AHEAD) {
                weir_core::prefetch(ahead);
            }
            let entry = Entry::new(place(at), pool.map.load(page(at)).next_generation());
            let checksum = Checksum::of(bytes, page(at), entry.generation());
            // The record is complete before the content is in the slot. That is safe, because no
            // lane reads the slot until the map names it.
            records.fill_in(Slot(slot.0 + at as u32), Occupant { page: page(at), checksum });
            runs[run as usize].entries[at] = entry;
        }
        let taken = stores[store].lane.write_run(op, slot, &pages[..claimed]);
        for at in taken..claimed {
            self.unclaim(self.runs[run as usize].entries[at]);
        }
        if taken > 0 {
            self.start_run(ticket, run, true, store, first, taken);
        }
        taken
    }

    /// Number of pages that this lane can begin to read or write besides those under way.
    fn room_under_way(&self) -> usize {
        self.ops.len().saturating_sub(self.under_way)
    }

    fn start_run(
        &mut self,
        ticket: Ticket,
        run: u32,
        is_write: bool,
        store: usize,
        first: PageNo,
        count: usize,
    ) {
        let started = self.sample();
        self.idle_runs.pop();
        let begun = &mut self.runs[run as usize];
        (begun.is_write, begun.store, begun.first) = (is_write, store, first);
        (begun.count, begun.answered, begun.fault, begun.late) = (count, 0, None, 0);
        self.start(ticket, started, Work::Run { run });
        self.under_way += count;
    }

    /// Ends a run once the store has answered for each of its pages. The pages of a read were
    /// handed over one by one.
    pub(super) fn end_run(&mut self, op: u32, run: u32, done: &mut dyn FnMut(Done<'_>)) {
        let Run { is_write, store, count, first, fault, late, .. } = self.runs[run as usize];
        if !is_write {
            let ended = self.end(op);
            self.metrics().run_read(store, count as u64, ended.started);
            return;
        }
        let fault = if self.ops[op as usize].forsaken { Some(Fault::Forsaken) } else { fault };
        let mut is_overtaken = false;
        for at in 0..count {
            let entry = self.runs[run as usize].entries[at];
            match fault {
                // An earlier poll has published this page of the run, and cleared its entry here.
                _ if entry == Entry::default() => {}
                // The whole run takes effect, or none of it.
                None => {
                    let left = self.publish_slow(op, PageNo(first.0 + at as u32), entry);
                    is_overtaken |= left.is_some();
                    self.runs[run as usize].entries[at] = left.unwrap_or_default();
                }
                Some(_) if late >> at & 1 == 1 => self.unclaim_failed(entry, Fault::Timeout),
                Some(_) => self.unclaim(entry),
            }
        }
        if is_overtaken {
            return self.wait_for_look(op);
        }
        let ended = self.end(op);
        if !ended.forsaken {
            self.metrics().run_written(store, count as u64, ended.started, fault.is_some());
        }
        done(Done { ticket: ended.ticket, result: fault.map_or(Ok(()), Err), page: None });
    }
}
