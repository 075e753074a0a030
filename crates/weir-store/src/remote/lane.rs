//! A lane of a remote store: sends operations to the threads of their nodes, and collects the
//! answers. The lane never waits, and allocates nothing.

use super::node::{Core, Senders};
use super::operations::{Answer, Job, Kind, Operations};
use super::url::COPIES_MAX;
use crate::{ANSWER_WITHIN, Done, Fault, Lane, POLL_EVERY, Progress, State, Ticket};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use weir_core::{PageBytes, Slot};
use weir_queue::SendError;

/// Time limit of an operation. A poll may notice up to [`POLL_EVERY`] late that the limit has
/// passed.
const LIMIT: Duration = ANSWER_WITHIN.saturating_sub(POLL_EVERY);

/// Time that a read waits for one copy before the lane asks for the other too.
const HEDGE_AFTER: Duration = Duration::from_millis(300);

/// Time that a write waits for its second node after the first has kept it.
const ALONE_AFTER: Duration = Duration::from_secs(1);

/// Pause of a read that no node has answered, before the lane asks all nodes anew.
const RETRY_AFTER: Duration = Duration::from_millis(50);

/// When this many operations are queued, the lane sends them without a call of [`Lane::submit`].
const BATCH: usize = 64;

/// Fewest operations that a lane of any depth may lose to the late writes of one node.
const LATE_MIN: usize = 4;

pub(super) struct RemoteLane {
    core: Arc<Core>,
    senders: Senders,
    operations: Arc<Operations>,
    table: Box<[Operation]>,
    free: Vec<usize>,
    /// Operations that wait for [`Lane::submit`].
    queued: Vec<usize>,
    /// Operations that were sent to nodes. Those that have timed out stay among them until all
    /// nodes have answered.
    sent: Vec<usize>,
    /// Slots whose late writes have ended since the last call of [`Lane::settled`].
    settled: Vec<Slot>,
    /// Number of late writes: those whose owners have been told of a timeout.
    late: usize,
    /// Number of late writes of each node.
    late_at: Box<[usize]>,
}

#[derive(Clone, Copy)]
struct Operation {
    ticket: Ticket,
    slot: Slot,
    /// The stamp of a write; `None` for a read.
    stamp: Option<u64>,
    /// The nodes of a write, for a read none. Once the write is sent, they are the nodes that it
    /// went to. A late write counts for them, even if a cluster has moved the slot since.
    nodes: [Option<usize>; COPIES_MAX],
    /// The number of the latest attempt. The lane ignores answers to earlier ones.
    attempt: u32,
    /// A bit for each copy that the read has asked for.
    asked_for: u8,
    /// A bit for each of them whose node did not answer.
    silent: u8,
    /// Whether the read waits for the end of a pause, after which the lane asks all nodes anew.
    rests: bool,
    /// Whether the write goes to every node of its slot, and waits for nodes that are away.
    patient: bool,
    /// `started` is the time of the first poll after the operation was submitted. `asked` is the
    /// time of the first poll after its latest attempt began.
    started: Option<Instant>,
    asked: Option<Instant>,
    /// Whether the operation's owner has been told of a timeout.
    is_late: bool,
}

impl RemoteLane {
    pub(super) fn open(core: Arc<Core>, senders: Senders, depth: usize) -> std::io::Result<Self> {
        let nothing = Operation {
            ticket: 0,
            slot: Slot(0),
            stamp: None,
            nodes: [None; COPIES_MAX],
            attempt: 0,
            asked_for: 0,
            silent: 0,
            rests: false,
            patient: false,
            started: None,
            asked: None,
            is_late: false,
        };
        let late_at = vec![0; senders.nodes.len()].into();
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
            late_at,
        })
    }

    fn queue(&mut self, ticket: Ticket, slot: Slot, page: Option<&PageBytes>) -> Progress {
        if slot.0 as usize >= self.core.ledger.slots() as usize {
            return Progress::Done(Err(Fault::Io(libc::EINVAL)));
        }
        let nodes = page.map_or([None; COPIES_MAX], |_| self.nodes_of(slot));
        if page.is_some() && self.is_refused_by(&nodes) {
            return Progress::Done(Err(Fault::Io(libc::ETIMEDOUT)));
        }
        // Late writes keep their operations for as long as a node is silent. So once there are
        // some, reads have the rest of the lane to themselves.
        let kept = if page.is_some() && self.late > 0 { self.table.len() / 4 } else { 0 };
        let has_room = self.free.len() > kept;
        let Some(operation) = has_room.then(|| self.free.pop()).flatten() else {
            // Whether late writes alone have taken the room. Then no poll makes room soon.
            let hangs = self.late >= self.table.len() - kept;
            return if hangs { Progress::Done(Err(Fault::Io(libc::ETIMEDOUT))) } else { Progress::Full };
        };
        // The stamp is taken here, so that of two writes of a slot the later call has the later
        // stamp.
        let stamp = page.map(|_| self.core.last_stamp.fetch_add(1, Ordering::Relaxed) + 1);
        let attempt = self.operations.begin(operation, 1, page);
        self.table[operation] = Operation {
            ticket,
            slot,
            stamp,
            nodes,
            attempt,
            asked_for: 0,
            silent: 0,
            rests: false,
            patient: false,
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

    /// The nodes of the copies of a slot.
    fn nodes_of(&self, slot: Slot) -> [Option<usize>; COPIES_MAX] {
        std::array::from_fn(|copy| self.core.placement.node(slot, copy))
    }

    /// Whether a write to these nodes is refused, because late writes of each of them have taken
    /// their share of the lane. That is a quarter. The writes under way may turn late too, so a
    /// node with a late write takes no more once it has half of the lane in all.
    fn is_refused_by(&self, nodes: &[Option<usize>]) -> bool {
        let depth = self.table.len();
        let unanswered = |node: usize| {
            let operations = self.queued.iter().chain(&self.sent);
            operations.filter(|&&operation| self.table[operation].nodes.contains(&Some(node))).count()
        };
        let has_its_share = |node: usize| {
            let late = self.late_at[node];
            late >= LATE_MIN.max(depth / 4) || late > 0 && unanswered(node) >= LATE_MIN.max(depth / 2)
        };
        // A hash slot without a node is no reason: a cluster may give it one.
        let mut nodes = nodes.iter().flatten().peekable();
        nodes.peek().is_some() && nodes.all(|&node| has_its_share(node))
    }

    /// Sends a write to each node of its slot that is online. If no node is online, or none has
    /// kept the write, sends it to all: a node may come back in time.
    fn send_write(&mut self, operation: usize, stamp: u64, patient: bool) {
        let Operation { slot, .. } = self.table[operation];
        let nodes = self.nodes_of(slot);
        // Read each node's state only once. A node may go away at any moment, but the number of
        // answers to wait for must match the jobs that are sent.
        let online = nodes.map(|node| node.filter(|node| self.senders.nodes[*node].state() == State::Online));
        let patient = patient || self.core.placement.copies() == 1 || online.iter().flatten().count() == 0;
        let chosen = if patient { nodes } else { online };
        let count = chosen.iter().flatten().count();
        let attempt = self.operations.begin(operation, count as u32, None);
        let entry = &mut self.table[operation];
        (entry.attempt, entry.patient, entry.nodes) = (attempt, patient, chosen);
        for (copy, node) in chosen.into_iter().enumerate() {
            let Some(node) = node else { continue };
            self.send(
                operation,
                node,
                copy,
                Kind::Write(stamp),
                patient && !self.core.placement.is_cluster(),
                false,
            );
        }
    }

    /// Returns the copies that a read has not asked for yet and may ask for next. These are the
    /// copies that the ledger does not mark as lacking the page. If none is left and `lacking_too`
    /// is true, they are the marked copies: a mark may be out of date.
    fn copies_left(&self, operation: usize, lacking_too: bool) -> [Option<usize>; COPIES_MAX] {
        let Operation { slot, asked_for, .. } = self.table[operation];
        let entry = self.core.ledger.get(slot);
        let copies = self.core.placement.copies();
        let left = |lacks: bool| {
            let copy = |copy: &usize| asked_for & 1 << copy == 0 && (lacks || !entry.lacks(*copy));
            let mut found = (0..copies).filter(copy);
            std::array::from_fn(|_| found.next())
        };
        match left(false) {
            none if none[0].is_none() && lacking_too => left(true),
            some => some,
        }
    }

    /// Returns the copy that a read asks for next: one on a node that is online, or if no node is
    /// online any other. `None`: the read has asked for every copy.
    fn next_copy(&self, operation: usize, lacking_too: bool) -> Option<usize> {
        let left = self.copies_left(operation, lacking_too);
        let is_online =
            |copy: &usize| self.senders.nodes[self.node_of(operation, *copy)].state() == State::Online;
        left.iter().flatten().copied().find(is_online).or(left[0])
    }

    /// The node of a copy of the operation's slot.
    fn node_of(&self, operation: usize, copy: usize) -> usize {
        self.core.placement.node(self.table[operation].slot, copy).expect("the copy is on a node")
    }

    /// Sends a read to the node of the next copy. Returns false if the read has asked for every
    /// copy.
    fn send_read(&mut self, operation: usize, lacking_too: bool) -> bool {
        let Some(copy) = self.next_copy(operation, lacking_too) else { return false };
        self.table[operation].attempt = self.operations.begin(operation, 1, None);
        self.ask_for(operation, copy);
        true
    }

    /// Sends a read that waits to one more node. A node that is only slow may still answer, so the
    /// read takes the page that comes first.
    fn hedge(&mut self, operation: usize) {
        // A node that did not answer may do so by now.
        let entry = &mut self.table[operation];
        entry.asked_for &= !(entry.silent | self.operations.silent(operation));
        let Some(copy) = self.next_copy(operation, false) else { return };
        if self.operations.add_copy(operation, copy).is_some() {
            self.ask_for(operation, copy);
        }
    }

    /// Sends a read to the node of `copy`, as a part of its present attempt.
    fn ask_for(&mut self, operation: usize, copy: usize) {
        let placement = &self.core.placement;
        let waits = placement.copies() == 1 && !placement.is_cluster();
        let node = self.node_of(operation, copy);
        let least = self.core.ledger.get(self.table[operation].slot).stamp();
        let entry = &mut self.table[operation];
        entry.asked = None;
        entry.asked_for |= 1 << copy;
        entry.silent &= !(1 << copy);
        entry.rests = false;
        self.send(operation, node, copy, Kind::Read(least), waits, false);
    }

    /// Sends an operation to the node to which a cluster is moving the page.
    fn send_asking(&mut self, operation: usize, node: usize) {
        let Operation { slot, stamp, .. } = self.table[operation];
        let least = self.core.ledger.get(slot).stamp();
        let entry = &mut self.table[operation];
        entry.attempt = self.operations.begin(operation, 1, None);
        if stamp.is_some() {
            entry.nodes = std::array::from_fn(|copy| (copy == 0).then_some(node));
        }
        self.send(operation, node, 0, stamp.map_or(Kind::Read(least), Kind::Write), false, true);
    }

    fn send(&mut self, operation: usize, node: usize, copy: usize, kind: Kind, waits: bool, asking: bool) {
        let Operation { slot, attempt, .. } = self.table[operation];
        let lane = Arc::clone(&self.operations);
        let job = Job { lane, operation, attempt, slot, copy, kind, waits, asking };
        let sender = match kind {
            Kind::Read(_) | Kind::Probe => &mut self.senders.reads[node],
            Kind::Write(_) | Kind::Copy(_) => &mut self.senders.writes[node],
        };
        // The node's queue is only full if the node has not answered for long. Its jobs are void by
        // now.
        if let Err(SendError::Full(job) | SendError::Closed(job)) = sender.try_send(job) {
            job.answer(Err(Fault::Timeout), None);
        }
    }

    /// Hands over an operation that has been answered, or sends the operation again.
    fn finish(&mut self, operation: usize, done: &mut dyn FnMut(Done<'_>)) {
        let Operation { ticket, slot, stamp, is_late, patient, .. } = self.table[operation];
        let of = |answer: Answer<'_>| (answer.result, answer.ask, answer.silent);
        let (result, ask, silent) = self.operations.with_answer(operation, of);
        if let Some(node) = ask.filter(|_| !is_late) {
            return self.send_asking(operation, node);
        }
        match (stamp, result) {
            (Some(stamp), Err(Fault::Timeout)) if !is_late && !patient => {
                return self.send_write(operation, stamp, true);
            }
            (Some(_), Err(Fault::Timeout)) if !is_late => {
                let entry = &mut self.table[operation];
                (entry.rests, entry.asked) = (true, None);
                return;
            }
            (Some(stamp), _) => {
                let entry = self.core.ledger.get(slot);
                if result.is_ok() && entry.stamp() == stamp && entry.lacks_any() {
                    self.core.counts.degraded.fetch_add(1, Ordering::Relaxed);
                }
                if is_late {
                    self.end_late(operation);
                } else {
                    done(Done { ticket, result, page: None });
                }
            }
            (None, Ok(())) => self.operations.with_answer(operation, |answer| {
                done(Done { ticket, result, page: Some(answer.page) });
            }),
            (None, Err(fault)) => {
                let entry = &mut self.table[operation];
                entry.silent |= silent;
                let is_answered = entry.silent == 0;
                if self.send_read(operation, is_answered) {
                    return;
                }
                if !is_answered {
                    let entry = &mut self.table[operation];
                    (entry.asked_for, entry.silent) = (0, 0);
                    (entry.rests, entry.asked) = (true, None);
                    return;
                }
                done(Done { ticket, result: Err(fault), page: None });
            }
        }
        self.sent.retain(|&other| other != operation);
        self.free.push(operation);
    }

    /// Notes that a late write changes its slot no more.
    fn end_late(&mut self, operation: usize) {
        let Operation { slot, nodes, .. } = self.table[operation];
        self.late -= 1;
        nodes.into_iter().flatten().for_each(|node| self.late_at[node] -= 1);
        self.settled.push(slot);
    }

    /// Ends operations whose time is over. If a read has waited long enough for the first copy,
    /// asks for the second too.
    fn expire(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        let mut at = 0;
        while let Some(&operation) = self.sent.get(at) {
            at += 1;
            let entry = &mut self.table[operation];
            if entry.is_late {
                // A late write that one node has kept ends as one does that is not late, below. The
                // other node may never answer.
                if self.operations.is_kept_alone(operation) {
                    self.operations.void(operation);
                    self.end_late(operation);
                    at -= 1;
                    self.sent.swap_remove(at);
                    self.free.push(operation);
                }
                continue;
            }
            let started = *entry.started.get_or_insert(now);
            let asked = *entry.asked.get_or_insert(now);
            let Operation { ticket, slot, stamp, rests, .. } = *entry;
            let is_read = entry.stamp.is_none();
            if !is_read && now >= asked + ALONE_AFTER && self.operations.is_kept_alone(operation) {
                // One node has kept the write, so it has succeeded. If the other node still does
                // the write, it does so before later writes of the slot.
                self.core.counts.degraded.fetch_add(1, Ordering::Relaxed);
                self.operations.void(operation);
                at -= 1;
                self.sent.swap_remove(at);
                self.free.push(operation);
                done(Done { ticket, result: Ok(()), page: None });
            } else if now >= started + LIMIT {
                // A write that pauses between two attempts has no job at any node, and a read
                // changes nothing. So neither can change the slot later, and the operation ends
                // here for good.
                if is_read || rests {
                    self.settled.extend((!is_read).then_some(slot));
                    self.operations.void(operation);
                    at -= 1;
                    self.sent.swap_remove(at);
                    self.free.push(operation);
                } else {
                    entry.is_late = true;
                    self.late += 1;
                    entry.nodes.iter().flatten().for_each(|&node| self.late_at[node] += 1);
                }
                done(Done { ticket, result: Err(Fault::Timeout), page: None });
            } else if rests && now >= asked + RETRY_AFTER {
                entry.rests = false;
                match stamp {
                    Some(stamp) => self.send_write(operation, stamp, true),
                    None => _ = self.send_read(operation, true),
                }
            } else if is_read && !rests && now >= asked + HEDGE_AFTER {
                self.hedge(operation);
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
                Some(stamp) => self.send_write(operation, stamp, false),
                None => _ = self.send_read(operation, true),
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
    /// Makes all operations void. The nodes' threads skip their jobs that still wait in a queue. At
    /// each node, a job under way ends before a job of a later lane begins.
    fn drop(&mut self) {
        (0..self.table.len()).for_each(|operation| self.operations.void(operation));
    }
}
