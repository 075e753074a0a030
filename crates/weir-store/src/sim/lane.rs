//! A lane into a simulated store. It decides about an operation's fault when the operation is
//! queued, and does the operation when it is due.

use super::chance::Chance;
use super::{Damage, Shared, hold};
use crate::{Done, Fault, Lane, Progress, Ticket};
use std::sync::Arc;
use std::sync::atomic::Ordering::{self, Relaxed};
use std::time::Instant;
use weir_core::{PAGE_SIZE, Page, PageBytes, Slot};

/// The number of EIO, which is the same on every architecture of Linux.
const EIO: i32 = 5;
/// The number of ETIMEDOUT, which is the same on every architecture but MIPS.
const ETIMEDOUT: i32 = 110;

pub(super) struct SimLane {
    shared: Arc<Shared>,
    chance: Chance,
    waiting: Vec<Operation>,
    /// The operations on the later pages of runs, in order. They wait for the operation on the
    /// run's first page.
    followers: Vec<Operation>,
    /// Writes that ended with a timeout and have not landed.
    late: Vec<Operation>,
    /// Slots of timed-out writes that have landed since.
    settled: Vec<Slot>,
    depth: usize,
    /// Contents of the writes that wait, by the index [`Operation::page`].
    pages: Box<[Page]>,
    free_pages: Vec<usize>,
    polls: u64,
    read: Box<Page>,
}

#[derive(Clone, Copy)]
struct Operation {
    ticket: Ticket,
    slot: Slot,
    fate: Fate,
    /// The index of the write's content; `None` for a read.
    page: Option<usize>,
    /// Number of polls that the operation waits for, from its submission on.
    delay: u64,
    /// The time when the operation is due; `None` before its submission.
    due: Option<Due>,
}

/// The time when an operation is due: after this many polls, and not before `time`, which the first
/// poll sets.
#[derive(Clone, Copy)]
struct Due {
    polls: u64,
    time: Option<Instant>,
}

/// The outcome of an operation on a slot whose memory the store still has.
#[derive(Clone, Copy)]
enum Fate {
    Succeed,
    Fail,
    Lose,
    /// Store the page with this bit flipped.
    Corrupt(usize),
}

impl SimLane {
    pub(super) fn new(shared: Arc<Shared>, number: u64, depth: usize) -> Self {
        let queues = shared.url.delay > 0 || !shared.url.latency.is_zero();
        let depth = if queues { depth.max(1) } else { 0 };
        SimLane {
            chance: Chance::of_lane(shared.url.seed, number),
            waiting: Vec::with_capacity(depth),
            followers: Vec::with_capacity(depth),
            late: Vec::with_capacity(depth),
            settled: Vec::with_capacity(depth),
            depth,
            pages: vec![Page::zeroed(); depth].into(),
            free_pages: (0..depth).collect(),
            polls: 0,
            read: Box::new(Page::zeroed()),
            shared,
        }
    }

    fn finishes_at_once(&self) -> bool {
        self.depth == 0
    }

    /// Number of operations for which there is room.
    fn room(&self) -> usize {
        self.depth - self.in_flight() - self.late.len() - self.settled.len()
    }

    /// The answer if there is no room for one more operation.
    fn refusal(&self) -> Option<Progress> {
        if self.room() > 0 {
            return None;
        }
        let hung = self.waiting.is_empty() && self.settled.is_empty();
        Some(if hung { Progress::Done(Err(Fault::Io(ETIMEDOUT))) } else { Progress::Full })
    }

    /// Draws all random numbers whatever the probabilities are. So a change of one probability
    /// changes no other kind of fault.
    fn draw_write(&mut self, slot: Slot) -> Fate {
        let url = &self.shared.url;
        let fails = self.chance.happens(url.write_error);
        let lost = self.chance.happens(url.lose) || url.lost_slot == Some(slot.0);
        let corrupt = self.chance.happens(url.corrupt);
        let bit = self.chance.below(PAGE_SIZE as u64 * 8) as usize;
        match (fails, lost, corrupt) {
            (true, ..) => Fate::Fail,
            (_, true, _) => Fate::Lose,
            (.., true) => Fate::Corrupt(bit),
            _ => Fate::Succeed,
        }
    }

    fn draw_read(&mut self) -> Fate {
        if self.chance.happens(self.shared.url.read_error) { Fate::Fail } else { Fate::Succeed }
    }

    fn queue(&mut self, ticket: Ticket, slot: Slot, fate: Fate, page: Option<usize>) -> Progress {
        let delay = 1 + self.chance.below(u64::from(self.shared.url.delay));
        self.waiting.push(Operation { ticket, slot, fate, page, delay, due: None });
        Progress::Queued
    }

    /// Queues the operations of a run of neighbouring slots. The later ones finish only after the
    /// first.
    fn queue_run(
        &mut self,
        (ticket, first): (Ticket, Slot),
        count: usize,
        mut queue: impl FnMut(&mut Self, Slot, usize) -> Progress,
    ) -> usize {
        let count = count.min(self.room());
        for at in 0..count {
            let queued = queue(self, Slot(first.0 + at as u32), at);
            debug_assert_eq!(queued, Progress::Queued, "ticket {ticket} has room");
            if at > 0 {
                self.followers.extend(self.waiting.pop());
            }
        }
        count
    }

    /// Does an operation whose time has come.
    fn end(&mut self, operation: Operation, hangs: bool, done: &mut dyn FnMut(Done<'_>)) {
        let Operation { ticket, slot, fate, page, .. } = operation;
        match page {
            _ if hangs => {
                if page.is_some() {
                    self.late.push(operation);
                }
                done(Done { ticket, result: Err(Fault::Timeout), page: None });
            }
            Some(kept) => {
                let result = self.shared.write(slot, &self.pages[kept], fate);
                self.free_pages.push(kept);
                done(Done { ticket, result, page: None });
            }
            None => {
                let result = self.shared.read(slot, &mut self.read, fate);
                done(Done { ticket, result, page: result.is_ok().then_some(&**self.read) });
            }
        }
    }
}

impl Shared {
    fn write(&self, slot: Slot, page: &PageBytes, fate: Fate) -> Result<(), Fault> {
        let mut cell = hold(self.cell(slot)?);
        let is_recorded = hold(&self.unflushed).is_some();
        let now = cell.page();
        let before = if is_recorded { Some(*now) } else { None };
        match fate {
            Fate::Succeed => (cell.page, cell.damage) = (*page, None),
            Fate::Fail => {
                self.counts.write_errors.fetch_add(1, Relaxed);
                return Err(Fault::Io(EIO));
            }
            Fate::Lose => {
                self.counts.lost_writes.fetch_add(1, Relaxed);
                // If the lost write had the same content as the slot, the slot is not damaged: a
                // reader gets what it expects.
                cell.damage = (cell.page != *page).then_some(Damage::Stale);
            }
            Fate::Corrupt(bit) => {
                self.counts.corrupt_writes.fetch_add(1, Relaxed);
                (cell.page, cell.damage) = (*page, Some(Damage::Corrupt));
                cell.page[bit / 8] ^= 1 << (bit % 8);
            }
        }
        if let (Some(unflushed), Some(before)) = (&mut *hold(&self.unflushed), before) {
            unflushed.entry(slot.0).or_insert_with(|| vec![before]).push(cell.page);
        }
        Ok(())
    }

    fn read(&self, slot: Slot, page: &mut PageBytes, fate: Fate) -> Result<(), Fault> {
        let mut cell = hold(self.cell(slot)?);
        if let Fate::Fail = fate {
            self.counts.read_errors.fetch_add(1, Relaxed);
            return Err(Fault::Io(EIO));
        }
        if cell.damage.is_some() {
            self.counts.damaged_reads.fetch_add(1, Relaxed);
        }
        *page = *cell.page();
        Ok(())
    }
}

impl Lane for SimLane {
    fn write(&mut self, ticket: Ticket, slot: Slot, page: &PageBytes) -> Progress {
        if self.finishes_at_once() {
            self.shared.count_operation();
            let fate = self.draw_write(slot);
            return Progress::Done(self.shared.write(slot, page, fate));
        }
        if let Some(refusal) = self.refusal() {
            return refusal;
        }
        self.shared.count_operation();
        let fate = self.draw_write(slot);
        let kept = self.free_pages.pop().expect("a page for each operation that may wait");
        *self.pages[kept] = *page;
        self.queue(ticket, slot, fate, Some(kept))
    }

    fn read(&mut self, ticket: Ticket, slot: Slot, page: &mut PageBytes) -> Progress {
        if self.finishes_at_once() {
            self.shared.count_operation();
            let fate = self.draw_read();
            return Progress::Done(self.shared.read(slot, page, fate));
        }
        if let Some(refusal) = self.refusal() {
            return refusal;
        }
        self.shared.count_operation();
        let fate = self.draw_read();
        self.queue(ticket, slot, fate, None)
    }

    fn run_room(&self, _write: bool) -> usize {
        self.room()
    }

    fn read_run(&mut self, ticket: Ticket, first: Slot, count: usize) -> usize {
        let mut untouched = [0; PAGE_SIZE];
        self.queue_run((ticket, first), count, |lane, slot, _| lane.read(ticket, slot, &mut untouched))
    }

    fn write_run(&mut self, ticket: Ticket, first: Slot, pages: &[PageBytes]) -> usize {
        self.queue_run((ticket, first), pages.len(), |lane, slot, at| lane.write(ticket, slot, &pages[at]))
    }

    fn flush(&mut self, _ticket: Ticket) -> Progress {
        if self.shared.fails_flushes.load(Ordering::SeqCst) {
            return Progress::Done(Err(Fault::Io(EIO)));
        }
        if let Some(unflushed) = &mut *hold(&self.shared.unflushed) {
            unflushed.clear();
        }
        Progress::Done(Ok(()))
    }

    fn submit(&mut self) {
        let queued = self.waiting.iter_mut().chain(&mut self.followers);
        for operation in queued.filter(|operation| operation.due.is_none()) {
            operation.due = Some(Due { polls: self.polls + operation.delay, time: None });
        }
    }

    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        self.polls += 1;
        let hangs = self.shared.hangs.load(Ordering::SeqCst);
        if !hangs {
            for operation in self.late.drain(..) {
                let kept = operation.page.expect("a write");
                // The result does not matter: no client waits for it.
                let _ = self.shared.write(operation.slot, &self.pages[kept], operation.fate);
                self.free_pages.push(kept);
                self.settled.push(operation.slot);
            }
        }
        let latency = self.shared.url.latency;
        let mut at = 0;
        while let Some(Operation { ticket, due, .. }) = self.waiting.get_mut(at) {
            let ticket = *ticket;
            let is_due =
                |due: &mut Due| self.polls >= due.polls && now >= *due.time.get_or_insert(now + latency);
            if !due.as_mut().is_some_and(is_due) {
                at += 1;
                continue;
            }
            let operation = self.waiting.swap_remove(at);
            self.end(operation, hangs, done);
            while let Some(next) = self.followers.iter().position(|follower| follower.ticket == ticket) {
                let operation = self.followers.remove(next);
                self.end(operation, hangs, done);
            }
        }
    }

    fn settled(&mut self, free: &mut dyn FnMut(Slot)) {
        self.settled.drain(..).for_each(free);
    }

    fn in_flight(&self) -> usize {
        self.waiting.len() + self.followers.len()
    }
}

impl Drop for SimLane {
    fn drop(&mut self) {
        if !self.shared.outlives_lanes.load(Ordering::SeqCst) {
            return;
        }
        let queued = self.waiting.iter().chain(&self.followers).chain(&self.late);
        let submitted = queued.filter(|operation| operation.due.is_some());
        let writes = submitted.filter_map(|operation| Some((operation.slot, *self.pages[operation.page?])));
        hold(&self.shared.orphans).extend(writes);
    }
}
