//! A lane into a remote store: fills operations, sends them to the threads of their nodes, and
//! collects the answers. It never waits, and allocates nothing.

use super::node::{Core, Senders};
use super::operations::{Job, Kind, Operations};
use super::url::COPIES_MAX;
use crate::{ANSWER_WITHIN, Done, Fault, Lane, POLL_EVERY, Progress, State, Ticket};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use weir_core::{PageBytes, Slot};

/// How long an operation has. The next poll may be [`POLL_EVERY`] later.
const LIMIT: Duration = ANSWER_WITHIN.saturating_sub(POLL_EVERY);

/// How long a read waits for the first copy before the second is asked.
const HEDGE_AFTER: Duration = Duration::from_millis(300);

/// Operations that are sent without waiting for [`Lane::submit`].
const BATCH: usize = 64;

pub(super) struct RemoteLane {
    core: Arc<Core>,
    senders: Senders,
    operations: Arc<Operations>,
    table: Box<[Operation]>,
    free: Vec<usize>,
    /// Operations that wait for [`Lane::submit`].
    queued: Vec<usize>,
    /// Operations that were sent, or are late.
    sent: Vec<usize>,
    /// Slots of late writes that have ended since the last call of [`Lane::settled`].
    settled: Vec<Slot>,
    late: usize,
}

#[derive(Clone, Copy)]
struct Operation {
    ticket: Ticket,
    slot: Slot,
    /// The stamp of a write.
    stamp: Option<u64>,
    /// The attempt that holds.
    attempt: u32,
    /// The next copy that a read has not asked for.
    next_copy: usize,
    /// The time of the first poll after its submission, and of the first after its last attempt.
    started: Option<Instant>,
    asked: Option<Instant>,
    /// Its owner has been told that there is no answer.
    is_late: bool,
}

impl RemoteLane {
    pub(super) fn open(core: Arc<Core>, senders: Senders, depth: usize) -> std::io::Result<Self> {
        let nothing = Operation {
            ticket: 0,
            slot: Slot(0),
            stamp: None,
            attempt: 0,
            next_copy: 0,
            started: None,
            asked: None,
            is_late: false,
        };
        Ok(RemoteLane {
            core,
            senders,
            operations: Arc::new(Operations::new(depth)?),
            table: vec![nothing; depth].into(),
            free: (0..depth).collect(),
            queued: Vec::with_capacity(depth),
            sent: Vec::with_capacity(depth),
            settled: Vec::with_capacity(depth),
            late: 0,
        })
    }

    fn queue(&mut self, ticket: Ticket, slot: Slot, page: Option<&PageBytes>) -> Progress {
        if slot.0 as usize >= self.core.stamps.len() {
            return Progress::Done(Err(Fault::Io(libc::EINVAL)));
        }
        let Some(operation) = self.free.pop() else {
            // If all of them are late, no poll brings one back soon.
            let hangs = self.in_flight() == 0;
            return if hangs { Progress::Done(Err(Fault::Io(libc::ETIMEDOUT))) } else { Progress::Full };
        };
        // Taken here, so that of two writes of a slot the later call has the later stamp.
        let stamp = page.map(|_| self.core.last_stamp.fetch_add(1, Ordering::Relaxed) + 1);
        let attempt = self.operations.begin(operation, 1, page);
        self.table[operation] = Operation {
            ticket,
            slot,
            stamp,
            attempt,
            next_copy: 0,
            started: None,
            asked: None,
            is_late: false,
        };
        self.queued.push(operation);
        if self.queued.len() == BATCH {
            self.submit();
        }
        Progress::Queued
    }

    /// Sends a write to each node that keeps its slot and is online. If none is, the first may
    /// still come back in time.
    fn send_write(&mut self, operation: usize, stamp: u64) {
        let Operation { slot, .. } = self.table[operation];
        let placement = &self.core.placement;
        // Looked at once: a node may go away at any moment, and each answer is counted.
        let online: [Option<usize>; COPIES_MAX] = std::array::from_fn(|copy| {
            let node = placement.node(slot, copy)?;
            (self.senders.nodes[node].state() == State::Online).then_some(node)
        });
        let first = placement.node(slot, 0).expect("the first copy is on a node");
        let count = online.iter().flatten().count();
        if count < placement.copies() {
            self.core.counts.degraded.fetch_add(1, Ordering::Relaxed);
        }
        self.table[operation].attempt = self.operations.begin(operation, count.max(1) as u32, None);
        if count == 0 {
            return self.send(operation, first, Kind::Write(stamp), true);
        }
        for node in online.into_iter().flatten() {
            self.send(operation, node, Kind::Write(stamp), count == 1);
        }
    }

    /// Asks for a page: the next copy whose node answers, else the first, and waits for that.
    fn send_read(&mut self, operation: usize) {
        let Operation { slot, next_copy, .. } = self.table[operation];
        let placement = &self.core.placement;
        let is_online = |copy: &usize| {
            placement.node(slot, *copy).is_some_and(|node| self.senders.nodes[node].state() == State::Online)
        };
        let copies = placement.copies();
        let found = (next_copy..copies).find(is_online);
        let copy = found.unwrap_or(0);
        let waits = found.is_none() || copies == 1;
        let node = placement.node(slot, copy).expect("the first copy is on a node");
        let least = self.core.stamps[slot.0 as usize].load(Ordering::Acquire);
        let attempt = self.operations.begin(operation, 1, None);
        let entry = &mut self.table[operation];
        (entry.attempt, entry.asked) = (attempt, None);
        entry.next_copy = if found.is_some() { copy + 1 } else { copies };
        self.send(operation, node, Kind::Read(least), waits);
    }

    fn send(&mut self, operation: usize, node: usize, kind: Kind, waits: bool) {
        let Operation { slot, attempt, .. } = self.table[operation];
        let lane = Arc::clone(&self.operations);
        let job = Job { lane, operation, attempt, slot, kind, waits };
        let sender = match kind {
            Kind::Read(_) => &mut self.senders.reads[node],
            Kind::Write(_) => &mut self.senders.writes[node],
        };
        // Full: as many jobs wait for that node as there is room for, all of them void.
        if sender.try_send(job).is_err() {
            self.operations.answer(operation, attempt, Err(Fault::Timeout), None);
        }
    }

    /// Hands over an operation that was answered, or has it asked anew.
    fn finish(&mut self, operation: usize, done: &mut dyn FnMut(Done<'_>)) {
        let Operation { ticket, slot, stamp, next_copy, is_late, .. } = self.table[operation];
        let result = self.operations.with_answer(operation, |result, _| result);
        match (stamp, result) {
            (Some(stamp), _) => {
                if result.is_ok() {
                    self.core.stamps[slot.0 as usize].fetch_max(stamp, Ordering::AcqRel);
                }
                if is_late {
                    self.late -= 1;
                    self.settled.push(slot);
                } else {
                    done(Done { ticket, result, page: None });
                }
            }
            (None, Err(_)) if next_copy < self.core.placement.copies() => return self.send_read(operation),
            (None, Ok(())) => self.operations.with_answer(operation, |_, page| {
                done(Done { ticket, result: Ok(()), page: Some(page) });
            }),
            (None, Err(fault)) => done(Done { ticket, result: Err(fault), page: None }),
        }
        self.sent.retain(|&other| other != operation);
        self.free.push(operation);
    }

    /// Ends operations that have had their time, and asks for the second copy of reads that wait
    /// for the first.
    fn expire(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        let mut at = 0;
        while let Some(&operation) = self.sent.get(at) {
            at += 1;
            let entry = &mut self.table[operation];
            if entry.is_late {
                continue;
            }
            let started = *entry.started.get_or_insert(now);
            let asked = *entry.asked.get_or_insert(now);
            let (ticket, is_read) = (entry.ticket, entry.stamp.is_none());
            if now >= started + LIMIT {
                if is_read {
                    self.operations.void(operation);
                    at -= 1;
                    self.sent.swap_remove(at);
                    self.free.push(operation);
                } else {
                    entry.is_late = true;
                    self.late += 1;
                }
                done(Done { ticket, result: Err(Fault::Timeout), page: None });
            } else if is_read && now >= asked + HEDGE_AFTER && entry.next_copy < self.core.placement.copies()
            {
                self.send_read(operation);
            }
        }
    }
}

impl Lane for RemoteLane {
    fn write(&mut self, ticket: Ticket, slot: Slot, page: &PageBytes) -> Progress {
        self.queue(ticket, slot, Some(page))
    }

    fn read(&mut self, ticket: Ticket, slot: Slot, _page: &mut PageBytes) -> Progress {
        self.queue(ticket, slot, None)
    }

    fn submit(&mut self) {
        for at in 0..self.queued.len() {
            let operation = self.queued[at];
            self.sent.push(operation);
            match self.table[operation].stamp {
                Some(stamp) => self.send_write(operation, stamp),
                None => self.send_read(operation),
            }
        }
        self.queued.clear();
    }

    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        let operations = Arc::clone(&self.operations);
        operations.take_answered(|operation| self.finish(operation, done));
        self.expire(now, done);
    }

    fn settled(&mut self, free: &mut dyn FnMut(Slot)) {
        self.settled.drain(..).for_each(free);
    }

    fn in_flight(&self) -> usize {
        self.queued.len() + self.sent.len() - self.late
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.operations.bell())
    }
}

impl Drop for RemoteLane {
    /// Jobs that were not sent yet never will be. A node does its earlier jobs before the
    /// jobs of later lanes.
    fn drop(&mut self) {
        (0..self.table.len()).for_each(|operation| self.operations.void(operation));
    }
}
