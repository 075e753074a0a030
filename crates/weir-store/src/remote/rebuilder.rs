//! The thread that copies pages to nodes that lack them.
//!
//! [`Rebuild`] decides which slots are copied. This thread reads a page from a node that has it.
//! Then it hands the page to the thread that writes to the node which lacks the page. Only the
//! writing thread knows whether a newer write came before; see [`Kind::Copy`].

use super::alarm::Call;
use super::ledger::Entry;
use super::node::{Core, Node, Senders};
use super::operations::{Answer, Job, Kind, Operations};
use super::rebuild::{BATCH, Rebuild, Step};
use crate::State;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use weir_core::Slot;

/// Time limit of each turn of a batch: of the reads from one copy, and of the writes.
const BATCH_LIMIT: Duration = Duration::from_secs(5);
/// Time between two probes of all nodes, and between two searches for writes that one node alone
/// has kept. Without probes, nobody would notice that an unused node is gone, or runs another
/// process.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// Time between two requests for a cluster's map while one of its nodes is away.
const FOLLOW_EVERY: Duration = Duration::from_secs(1);

/// The thread that copies pages to nodes that lack them.
pub(super) struct Rebuilder {
    core: Arc<Core>,
    senders: Senders,
    operations: Arc<Operations>,
}

impl Rebuilder {
    pub(super) fn new(core: Arc<Core>, senders: Senders) -> io::Result<Self> {
        Ok(Rebuilder { core, senders, operations: Arc::new(Operations::new(BATCH)?) })
    }

    /// Copies pages to nodes that lack them, until the store closes.
    pub(super) fn run(mut self) {
        let mut plan = Rebuild::new(self.core.ledger.slots());
        let mut batch = Vec::with_capacity(BATCH);
        let mut degraded = 0;
        loop {
            let step = plan.step(Instant::now(), |slot| self.can_mend(slot), &mut batch);
            let rest = match step {
                Step::Copy => {
                    plan.copied(self.copy(&batch));
                    Duration::ZERO
                }
                Step::Rest(until) => until.saturating_duration_since(Instant::now()),
                Step::Idle if self.follow() => FOLLOW_EVERY,
                Step::Idle => LOOK_EVERY,
            };
            match self.core.alarm.wait(rest) {
                Call::Close => return,
                Call::Wake => plan.wake(),
                Call::Nothing => {}
            }
            if step == Step::Idle {
                self.probe();
                let now = self.core.counts.degraded.load(Ordering::Relaxed);
                if now != degraded {
                    degraded = now;
                    plan.wake();
                }
            }
        }
    }

    /// Asks a cluster for its map if one of its nodes is away. Returns whether to ask again soon.
    fn follow(&self) -> bool {
        let Some(cluster) = &self.core.cluster else { return false };
        let is_online = |node: &&Arc<Node>| node.name().is_some() && node.state() == State::Online;
        let has_slots = |number: usize| self.core.placement.has_hash_slots(number);
        let nodes = cluster.nodes();
        if nodes.iter().enumerate().all(|(number, node)| is_online(&node) || !has_slots(number)) {
            return false;
        }
        self.core.follow(|| self.core.alarm.is_closed());
        true
    }

    /// Sends each node a probe. A node's thread notes when the node does not answer.
    fn probe(&mut self) {
        let named = |node: &usize| self.senders.nodes[*node].name().is_some();
        for node in (0..self.senders.nodes.len()).filter(named).collect::<Vec<_>>() {
            let attempt = self.operations.begin(node % BATCH, 1, None);
            let lane = Arc::clone(&self.operations);
            let (operation, slot, kind) = (node % BATCH, Slot(0), Kind::Probe);
            // A failure does no harm: a full queue already has probes of this node.
            let _ = self.senders.reads[node].try_send(Job {
                lane,
                operation,
                attempt,
                slot,
                copy: 0,
                kind,
                waits: false,
                asking: false,
            });
        }
    }

    fn is_online(&self, slot: Slot, copy: usize) -> bool {
        let node = self.core.placement.node(slot, copy);
        node.is_some_and(|node| self.senders.nodes[node].state() == State::Online)
    }

    /// Returns a copy on a node that is online, but none with a bit in `tried`. It is a copy that
    /// the ledger does not mark as lacking the page, if there is one. Otherwise it is a marked
    /// copy, since its mark may be out of date.
    fn source(&self, slot: Slot, entry: Entry, tried: u8) -> Option<usize> {
        let left = (0..self.core.placement.copies()).filter(|copy| tried & 1 << copy == 0);
        left.filter(|copy| self.is_online(slot, *copy)).min_by_key(|copy| entry.lacks(*copy))
    }

    fn can_mend(&self, slot: Slot) -> bool {
        let entry = self.core.ledger.get(slot);
        let is_target = |copy| entry.lacks(copy) && self.is_online(slot, copy);
        self.core.placement.copies() > 1
            && entry.lacks_any()
            && (0..self.core.placement.copies()).any(is_target)
            && self.source(slot, entry, 0).is_some()
    }

    /// Copies the pages of a batch, as far as their nodes answer. Returns the number of slots that
    /// gained a copy.
    fn copy(&mut self, batch: &[Slot]) -> u32 {
        let read = self.read(batch);
        let mut sent = Vec::with_capacity(read.len());
        for (operation, stamp) in read {
            let slot = batch[operation];
            let entry = self.core.ledger.get(slot);
            // Send the page to one node only. If both nodes lack it, the next pass sends it to the
            // other.
            let mut targets = (0..self.core.placement.copies()).filter(|copy| entry.lacks(*copy));
            if let Some(target) = targets.find(|copy| self.is_online(slot, *copy)) {
                self.send(operation, slot, target, Kind::Copy(stamp));
                sent.push(operation);
            }
        }
        let copied = self.await_all(sent).len() as u32;
        self.core.counts.copied.fetch_add(u64::from(copied), Ordering::Relaxed);
        copied
    }

    /// Reads the pages of a batch. If the node of one copy does not give the page, asks for the
    /// next copy. Returns the pages that were read, as [`Rebuilder::await_all`] does. A node whose
    /// marked copy was read has noted that the copy is there.
    fn read(&mut self, batch: &[Slot]) -> Vec<(usize, u64)> {
        let mut read = Vec::with_capacity(batch.len());
        let mut tried = [0; BATCH];
        let mut left: Vec<usize> = (0..batch.len()).collect();
        for _ in 0..self.core.placement.copies() {
            let mut sent = Vec::with_capacity(left.len());
            for &operation in &left {
                let (slot, tried) = (batch[operation], &mut tried[operation]);
                let entry = self.core.ledger.get(slot);
                if let Some(source) = self.source(slot, entry, *tried) {
                    *tried |= 1 << source;
                    self.send(operation, slot, source, Kind::Read(entry.stamp()));
                    sent.push(operation);
                }
            }
            read.extend(self.await_all(sent));
            left.retain(|operation| read.iter().all(|(done, _)| done != operation));
        }
        read
    }

    fn send(&mut self, operation: usize, slot: Slot, copy: usize, kind: Kind) {
        let node = self.core.placement.node(slot, copy).expect("the copy is on a node");
        let attempt = self.operations.begin(operation, 1, None);
        let lane = Arc::clone(&self.operations);
        let job = Job { lane, operation, attempt, slot, copy, kind, waits: false, asking: false };
        let paths =
            if matches!(kind, Kind::Read(_)) { &mut self.senders.reads } else { &mut self.senders.writes };
        // Sending never fails: the queue has room for a whole batch.
        let _ = paths[node].try_send(job);
    }

    /// Waits for operations. Returns those that succeeded, with the stamp of the page that was
    /// read. Makes the others void.
    fn await_all(&self, mut waiting: Vec<usize>) -> Vec<(usize, u64)> {
        let begun = Instant::now();
        let mut done = Vec::with_capacity(waiting.len());
        while !waiting.is_empty() && begun.elapsed() < BATCH_LIMIT && !self.core.alarm.is_closed() {
            let limit = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
            let bell = self.operations.bell();
            let _ = poll(&mut [PollFd::from_borrowed_fd(bell, PollFlags::IN)], Some(&limit));
            self.operations.take_answered(|operation| {
                // An operation that is not in `waiting` is a probe: nothing waits for its answer.
                let Some(at) = waiting.iter().position(|other| *other == operation) else { return };
                waiting.swap_remove(at);
                let stamp = |answer: Answer<'_>| answer.result.map(|()| answer.stamp);
                let stamp = self.operations.with_answer(operation, stamp);
                done.extend(stamp.ok().map(|stamp| (operation, stamp)));
            });
        }
        waiting.into_iter().for_each(|operation| self.operations.void(operation));
        done
    }
}
