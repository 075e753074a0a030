//! The closing of a store: its threads end, and its values are deleted on the nodes.
//!
//! Each node has a thread for this, so a node that does not answer holds up no other one. The owner
//! waits for all of them together, and no longer than [`LIMIT`]. A thread that is not done by then
//! ends by itself. A connection may fail in the middle. Then the next one begins behind the last
//! value that the node has said to be deleted.

use super::node::{Core, Node, WRITES, why};
use super::placement::EXTENT;
use super::url::COPIES_MAX;
use crate::State;
use redis::{Cmd, RedisResult};
use std::array;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use weir_core::Slot;

/// Time limit of the whole closing, for all nodes together.
pub(super) const LIMIT: Duration = Duration::from_secs(30);

/// Time after which a node is given up that has deleted nothing meanwhile. It is longer than the
/// time limit of an answer, so that a node with a broken connection is asked once more. A node that
/// was away before is asked once.
const SILENCE: Duration = Duration::from_secs(6);

/// Pause between two attempts at a node.
const PAUSE: Duration = Duration::from_millis(200);

/// Pause between two looks at a thread that is about to end.
const LOOK: Duration = Duration::from_millis(2);

/// Time between two lines that say how many values are still to be deleted.
const SAY_EVERY: Duration = Duration::from_secs(5);

/// Number of keys that one command deletes.
const UNLINK_BATCH: usize = 512;

/// A store that closes.
struct Closing {
    core: Arc<Core>,
    nodes: Box<[Arc<Node>]>,
    until: Instant,
    /// For each copy of each extent: number of its slots, from the first one on, whose values are
    /// deleted.
    gone: Box<[[AtomicU32; COPIES_MAX]]>,
    /// Number of nodes on which values are being deleted. Until it is 0, a node of a cluster may
    /// still name another one for its values.
    busy: AtomicUsize,
}

/// The next values to delete on a node.
struct Batch {
    /// The command, and its number of keys.
    unlink: Cmd,
    keys: usize,
    /// Extents that the batch has slots of: the extent, the copy, and the number of its slots whose
    /// values are deleted once the batch is.
    extents: Vec<(u32, usize, u32)>,
}

/// Deletes the values of a store, until `until` at the latest. First waits for the end of
/// `rebuilder`, the thread that copies pages, and at each node for the end of its `threads`. Notes
/// at each node how many values are left there.
pub(super) fn close(
    core: &Arc<Core>,
    nodes: &[Arc<Node>],
    rebuilder: &[JoinHandle<()>],
    threads: Vec<Vec<JoinHandle<()>>>,
    until: Instant,
) {
    wait_for(rebuilder, until);
    let closing = Arc::new(Closing::new(core, nodes, until));
    let (done, ended) = mpsc::channel::<()>();
    let mut threads = threads;
    threads.resize_with(nodes.len(), Vec::new);
    for (number, threads) in threads.into_iter().enumerate() {
        let (closing, done) = (Arc::clone(&closing), done.clone());
        // If the system has no thread left, the values stay, and the note below says so.
        let _ = thread::Builder::new().name(format!("close-{number}")).spawn(move || {
            threads.into_iter().for_each(|thread| drop(thread.join()));
            closing.clean(number);
            drop(done);
        });
    }
    // No thread sends a message: the wait ends when the last thread has dropped its sender.
    drop(done);
    let _ = ended.recv_timeout(until.saturating_duration_since(Instant::now()));
    for (number, node) in nodes.iter().enumerate() {
        let left = closing.left(number);
        if left > 0 {
            node.leaves_values(core, left);
        }
    }
}

/// Waits for the end of threads, until `until` at the latest.
pub(super) fn wait_for(threads: &[JoinHandle<()>], until: Instant) {
    while threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < until {
        thread::sleep(LOOK);
    }
}

/// Waits for the pause between two attempts.
fn rest() {
    thread::sleep(PAUSE);
}

impl Closing {
    fn new(core: &Arc<Core>, nodes: &[Arc<Node>], until: Instant) -> Self {
        let extents = core.ledger.slots().div_ceil(EXTENT);
        Closing {
            core: Arc::clone(core),
            nodes: nodes.into(),
            until,
            gone: (0..extents).map(|_| array::from_fn(|_| AtomicU32::new(0))).collect(),
            busy: AtomicUsize::new(nodes.len()),
        }
    }

    fn is_over(&self) -> bool {
        Instant::now() >= self.until
    }

    /// Number of an extent's slots.
    fn len(&self, extent: u32) -> u32 {
        EXTENT.min(self.core.ledger.slots() - extent * EXTENT)
    }

    /// The extents of a node from `first` on, with the copy that is there, and those of its slots
    /// whose values are not deleted yet.
    fn extents(&self, number: usize, first: u32) -> impl Iterator<Item = (u32, usize, u32)> {
        (first..self.gone.len() as u32).filter_map(move |extent| {
            let copy = self.core.placement.copy_on(Slot(extent * EXTENT), number)?;
            let gone = self.gone[extent as usize][copy].load(Ordering::Relaxed);
            (gone < self.len(extent)).then_some((extent, copy, gone))
        })
    }

    /// Number of values that are left on a node.
    fn left(&self, number: usize) -> usize {
        let slots = |(extent, _, gone): (u32, usize, u32)| gone..self.len(extent);
        let written = |extent: u32, at: u32| self.core.ledger.may_have_value(Slot(extent * EXTENT + at));
        self.extents(number, 0).map(|of| slots(of).filter(|at| written(of.0, *at)).count()).sum()
    }

    /// Deletes all values on a node, in as many attempts as it takes.
    fn clean(&self, number: usize) {
        let node = &self.nodes[number];
        let is_cluster = self.core.cluster.is_some();
        let patience = if node.state() == State::Online { SILENCE } else { Duration::ZERO };
        let (mut since, mut tries, mut is_busy) = (Instant::now(), 0, true);
        while !self.is_over() {
            // Read the number of busy nodes before the values that are left here. A busy node may
            // still answer that values have moved to this node. Once it is not busy, what it has
            // answered is among the values that are left.
            let others = self.busy.load(Ordering::Acquire) - usize::from(is_busy);
            if self.left(number) == 0 {
                if std::mem::take(&mut is_busy) {
                    self.busy.fetch_sub(1, Ordering::AcqRel);
                }
                if !is_cluster || others == 0 {
                    return;
                }
                rest();
                continue;
            }
            if !std::mem::replace(&mut is_busy, true) {
                self.busy.fetch_add(1, Ordering::AcqRel);
                (since, tries) = (Instant::now(), 0);
            }
            if self.pass(number) {
                since = Instant::now();
                continue;
            }
            if since.elapsed() >= patience {
                break;
            }
            // A cluster may have moved pages since the store last used them. The map of a node may
            // lag behind. So each second attempt goes by the answers of the one before, in which
            // the node has named the owners of what has moved.
            if is_cluster && tries % 2 == 0 {
                self.core.follow(|| self.is_over());
            }
            tries += 1;
            rest();
        }
        if is_busy {
            self.busy.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Deletes values on a node by one connection. Returns whether something has come of it.
    fn pass(&self, number: usize) -> bool {
        let node = &self.nodes[number];
        let mut connection = match node.connect() {
            Ok(connection) => connection,
            Err(error) => {
                node.is_away(WRITES, &why(&error));
                return false;
            }
        };
        let (mut first, mut is_better, mut said) = (0, false, Instant::now());
        while !self.is_over() {
            let Some(Batch { unlink, keys, extents }) = self.batch(number, first) else { break };
            let last = extents.last().map_or(first, |(extent, ..)| *extent);
            let done: RedisResult<i64> = if keys == 0 { Ok(0) } else { unlink.query(&mut connection) };
            match done {
                Ok(_) => {
                    for (extent, copy, gone) in extents {
                        self.gone[extent as usize][copy].store(gone, Ordering::Relaxed);
                    }
                    (first, is_better) = (last, true);
                }
                // The node has handed the values to another one, or does so at present.
                Err(error) if matches!(error.code(), Some("MOVED" | "ASK" | "TRYAGAIN")) => {
                    if error.code() == Some("MOVED") {
                        self.core.moved(error.detail().unwrap_or_default(), node);
                    }
                    first = last + 1;
                }
                Err(_) => break,
            }
            if said.elapsed() > SAY_EVERY {
                said = Instant::now();
                node.say(&format!("its values are being deleted: {} are left", self.left(number)));
            }
        }
        is_better
    }

    /// The next values to delete on a node, in extents from `first` on. One command to a cluster
    /// may only name keys of one hash slot, and so of one extent.
    fn batch(&self, number: usize, first: u32) -> Option<Batch> {
        let (mut unlink, mut keys, mut extents) = (redis::cmd("UNLINK"), 0, Vec::new());
        for (extent, copy, gone) in self.extents(number, first) {
            let mut next = gone;
            while next < self.len(extent) && keys < UNLINK_BATCH {
                let slot = Slot(extent * EXTENT + next);
                if self.core.ledger.may_have_value(slot) {
                    unlink.arg(self.core.key(slot));
                    keys += 1;
                }
                next += 1;
            }
            extents.push((extent, copy, next));
            if keys >= UNLINK_BATCH || self.core.cluster.is_some() && keys > 0 {
                break;
            }
        }
        (!extents.is_empty()).then_some(Batch { unlink, keys, extents })
    }
}
