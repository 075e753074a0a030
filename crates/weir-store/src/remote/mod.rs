//! `redis://`: a store of pages on a fleet of nodes that speak the Redis protocol.
//!
//! Each page is a value of its own. Its name has the store's random number and the slot. The store
//! seals each value by a key, which is never written down and ends with the store. Rendezvous
//! hashing chooses the nodes of a slot. While a node is away, its pages are read from their second
//! copy. Without a second copy, reads wait. The store deletes its values when it closes.
//!
//! A lane does no network I/O. The store has two threads for each node, one that reads and one that
//! writes; see [`node`]. These threads allocate memory, and the network may need memory to send. So
//! a kernel must not swap onto this store. Another thread copies pages to nodes that lack them; see
//! [`rebuilder`].

mod alarm;
mod answers;
mod check;
mod closing;
mod cluster;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod lane;
mod ledger;
mod node;
mod operations;
mod placement;
mod rebuild;
mod rebuilder;
mod seal;
mod url;

pub use url::RemoteUrl;

use crate::{Condition, DENIED, Lane, OpenError, OpenErrorKind, Report, State, Store, Tell, TellChange};
use alarm::Alarm;
use check::{check, is_in_cluster, no_answer, process};
use lane::RemoteLane;
use ledger::Ledger;
use node::{Cluster, Core, Counts, Node, READS, SPARE, Senders, WRITES, Worker};
use placement::{HASH_SLOTS, Placement};
use rebuilder::Rebuilder;
use rustix::rand::GetRandomFlags;
use seal::Seal;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, Slot};

/// Largest number of operations that a lane may have in flight.
const DEPTH_MAX: usize = 1024;

/// A store of pages in a fleet.
pub struct RemoteStore {
    name: String,
    core: Arc<Core>,
    /// The queues by which lanes send jobs to the nodes' threads. Each lane takes a clone. They are
    /// dropped when the store closes.
    senders: Mutex<Senders>,
    nodes: Box<[Arc<Node>]>,
    /// The threads of each node.
    threads: Vec<Vec<JoinHandle<()>>>,
    rebuilder: Mutex<Option<JoinHandle<()>>>,
    has_ended: AtomicBool,
    /// The end of the time limit for the closing, once that has begun.
    until: OnceLock<Instant>,
}

/// The counts of a store since its opening.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RemoteCounts {
    /// Number of values that were not what the store wrote: changed, replayed, or of another slot.
    pub forged: u64,
    /// Number of reads of a page that its node no longer had.
    pub lost: u64,
    /// Number of writes that left out a copy, because its node was away.
    pub degraded: u64,
    /// Number of copies that were made anew on nodes that lacked them.
    pub copied: u64,
    /// Number of pages of which a copy is missing now.
    pub lacking: u64,
    /// Number of copies that were lost when a node's process was replaced.
    pub gone: u64,
    /// Number of operations that a cluster referred to another node.
    pub redirected: u64,
}

impl std::fmt::Debug for RemoteStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteStore").field("name", &self.name).finish_non_exhaustive()
    }
}

impl RemoteStore {
    /// Connects to every node of `url`, and checks whether the node may be trusted with pages.
    ///
    /// # Errors
    /// Fails when a node does not answer, could drop pages, or has too little room; and when the
    /// password cannot be read.
    pub fn open(url: &RemoteUrl) -> Result<Self, OpenError> {
        let name = url.to_string();
        let password = match &url.password_file {
            Some(path) => {
                let text = std::fs::read_to_string(path).map_err(|error| {
                    OpenError::io(&name, format!("cannot read the password in {}", path.display()), error)
                })?;
                Some(text.lines().next().unwrap_or_default().to_owned())
            }
            None => None,
        };
        let make = |number: usize| {
            let made = Node::new(number, url, password.as_deref());
            made.map(Arc::new).map_err(|error| OpenError::io(&name, DENIED, error))
        };
        let map = find_cluster(&name, url, make)?;
        let is_cluster = map.is_some();
        let names = map.as_ref().map_or_else(|| url.nodes.clone(), |map| map.nodes.clone());
        let count = names.len() + if is_cluster { SPARE } else { 0 };
        let nodes: Box<[Arc<Node>]> = (0..count).map(make).collect::<Result<_, OpenError>>()?;
        let url = &RemoteUrl { nodes: names.clone(), ..url.clone() };
        let slots = (url.size.0 / PAGE_SIZE as u64) as u32;
        let mut number = [0; 8];
        let drawn = rustix::rand::getrandom(&mut number, GetRandomFlags::empty());
        drawn.map_err(|errno| OpenError::io(&name, DENIED, errno))?;
        let number = u64::from_ne_bytes(number);
        let copies = usize::from(url.copies);
        let placement = match map {
            Some(map) => Placement::of_cluster(number, slots, &map.owners, count),
            None => Placement::new(&names, slots, copies),
        };
        let mut processes: Vec<(String, &str)> = Vec::new();
        for (node, at) in nodes.iter().zip(&names) {
            node.assign(at);
            let mut connection = node.connect().map_err(|error| no_answer(&name, at, &error))?;
            check(&name, at, &mut connection, url, is_cluster, &placement.no_page(number))?;
            // A connection leads to one process, so this is the one that was checked.
            let run = process(&mut connection).map_err(|error| no_answer(&name, at, &error))?;
            // Both copies of a page would be one value of this process.
            let other = processes.iter().find(|(known, _)| *known == run);
            if let Some((_, other)) = other.filter(|_| copies > 1) {
                let what = format!("nodes {other} and {at} are one process: name each node once");
                return Err(OpenError::new(OpenErrorKind::Layout, &name, what));
            }
            processes.push((run.clone(), at));
            node.is_checked(run);
        }

        let Some(ledger) = Ledger::new(slots, copies) else {
            let bytes = u64::from(slots) * size_of::<AtomicU64>() as u64;
            return Err(OpenError::no_memory(&name, bytes, std::io::ErrorKind::OutOfMemory));
        };
        let core = Arc::new(Core {
            name: name.clone(),
            url: url.clone(),
            seal: Seal::ephemeral().map_err(|error| OpenError::io(&name, DENIED, error))?,
            number,
            placement,
            ledger,
            last_stamp: AtomicU64::new(0),
            counts: Counts::default(),
            alarm: Alarm::default(),
            cluster: is_cluster.then(|| Cluster::new(nodes.clone())),
        });
        let mut store = RemoteStore {
            core,
            senders: Mutex::default(),
            nodes: nodes.clone(),
            threads: Vec::new(),
            rebuilder: Mutex::default(),
            has_ended: AtomicBool::new(false),
            until: OnceLock::new(),
            name,
        };
        let mut senders = Senders { nodes, ..Senders::default() };
        for number in 0..store.nodes.len() {
            store.threads.push(Vec::new());
            for (thread, paths) in [(READS, &mut senders.reads), (WRITES, &mut senders.writes)] {
                let (sender, jobs) = weir_queue::channel(DEPTH_MAX);
                let node = Arc::clone(&store.nodes[number]);
                let worker = Worker { node, core: Arc::clone(&store.core), jobs, thread };
                let builder = std::thread::Builder::new().name(format!("node-{number}"));
                let started = builder.spawn(move || worker.run());
                let started = started.map_err(|error| OpenError::io(&store.name, DENIED, error))?;
                store.threads[number].push(started);
                paths.push(sender);
            }
        }
        let rebuilder = Rebuilder::new(Arc::clone(&store.core), senders.clone());
        let thread = std::thread::Builder::new().name("rebuild".to_owned());
        let started = rebuilder.and_then(|rebuilder| thread.spawn(move || rebuilder.run()));
        let cannot = |error| OpenError::io(&store.name, DENIED, error);
        store.rebuilder = Mutex::new(Some(started.map_err(cannot)?));
        store.senders = Mutex::new(senders);
        Ok(store)
    }

    /// The counts so far.
    pub fn counts(&self) -> RemoteCounts {
        let counts = &self.core.counts;
        RemoteCounts {
            forged: counts.forged.load(Ordering::Relaxed),
            lost: counts.lost.load(Ordering::Relaxed),
            degraded: counts.degraded.load(Ordering::Relaxed),
            copied: counts.copied.load(Ordering::Relaxed),
            lacking: self.core.ledger.lacking(),
            gone: counts.gone.load(Ordering::Relaxed),
            redirected: counts.redirected.load(Ordering::Relaxed),
        }
    }

    /// Deletes the store's values, unless that was done. `threads` are threads of the nodes that
    /// must have ended before; all of them are about to.
    fn close(&self, threads: Vec<Vec<JoinHandle<()>>>) {
        let until = *self.until.get_or_init(|| Instant::now() + closing::LIMIT);
        if self.has_ended.swap(true, Ordering::Relaxed) {
            return closing::wait_for(&threads.into_iter().flatten().collect::<Vec<_>>(), until);
        }
        self.core.alarm.close();
        let rebuilder = self.rebuilder.lock().unwrap_or_else(PoisonError::into_inner).take();
        closing::close(&self.core, &self.nodes, rebuilder.as_slice(), threads, until);
    }

    /// The name of a slot's value on its node.
    pub fn key(&self, slot: Slot) -> String {
        self.core.key(slot)
    }
}

impl Drop for RemoteStore {
    /// Ends the store's threads. By then every lane has been dropped, and the operations that it
    /// left are void.
    fn drop(&mut self) {
        self.core.alarm.close();
        *self.senders.get_mut().unwrap_or_else(PoisonError::into_inner) = Senders::default();
        self.nodes.iter().for_each(|node| node.close());
        let threads = std::mem::take(&mut self.threads);
        self.close(threads);
    }
}

impl Store for RemoteStore {
    fn name(&self) -> &str {
        &self.name
    }

    fn slots(&self) -> u32 {
        self.core.ledger.slots()
    }

    fn lane(&self, depth: usize) -> Result<Box<dyn Lane>, OpenError> {
        if depth > DEPTH_MAX {
            let what = format!("a lane of {depth} operations; at most {DEPTH_MAX} fit");
            return Err(OpenError::new(OpenErrorKind::Layout, &self.name, what));
        }
        let senders = self.senders.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let opened = RemoteLane::open(Arc::clone(&self.core), senders, depth.max(1));
        Ok(Box::new(opened.map_err(|error| OpenError::io(&self.name, DENIED, error))?))
    }

    /// A cluster counts as one member, because it moves slots between its nodes.
    fn members(&self) -> u32 {
        if self.core.cluster.is_some() { 1 } else { self.nodes.len() as u32 }
    }

    fn member(&self, slot: Slot) -> u32 {
        if self.core.cluster.is_some() { 0 } else { self.core.placement.node(slot, 0).unwrap_or(0) as u32 }
    }

    /// If there are two copies of each page and this node alone is away, it counts as draining: the
    /// other nodes serve its pages. It then takes no new pages, so each new page gets both copies.
    fn state(&self, member: u32) -> State {
        if self.core.cluster.is_some() {
            let nodes = self.nodes.iter().enumerate();
            let owners = nodes.filter(|(number, _)| self.core.placement.has_hash_slots(*number));
            return owners.map(|(_, node)| node.state()).max().unwrap_or(State::Online);
        }
        let Some(node) = self.nodes.get(member as usize) else { return State::Lost };
        let others_online = || {
            self.nodes
                .iter()
                .enumerate()
                .all(|(number, node)| number == member as usize || node.state() == State::Online)
        };
        match node.state() {
            State::Unreachable if self.core.placement.copies() > 1 && others_online() => State::Draining,
            state => state,
        }
    }

    fn unfit_for_swap(&self) -> Option<String> {
        Some("the network may need memory to free memory; use it under `weir run` or a cache".to_owned())
    }

    fn report(&self) -> Option<&dyn Report> {
        Some(self)
    }

    /// Deletes the store's values, within 30 s for all nodes together.
    fn end(&self) {
        self.close(Vec::new());
    }
}

impl Report for RemoteStore {
    fn conditions(&self) -> Vec<Condition> {
        self.nodes.iter().filter(|node| node.name().is_some()).map(|node| node.condition()).collect()
    }

    fn when_changed(&self, tell: TellChange) {
        self.nodes.iter().for_each(|node| node.when_changed(Arc::clone(&tell)));
    }

    fn stages(&self) -> Vec<(&'static str, Duration)> {
        Vec::new()
    }

    fn when_joined(&self, _tell: Tell) {}
}

/// The state of a cluster at the opening of the store: the nodes, and the node of each hash slot.
struct Map {
    nodes: Vec<String>,
    owners: Vec<u16>,
}

/// Asks the nodes of `url`, in turn, for the map of their cluster. `None`: the nodes are no
/// cluster.
fn find_cluster(
    store: &str,
    url: &RemoteUrl,
    make: impl Fn(usize) -> Result<Arc<Node>, OpenError>,
) -> Result<Option<Map>, OpenError> {
    let mut last = None;
    for at in &url.nodes {
        let node = make(0)?;
        node.assign(at);
        let ask = |connection: &mut redis::Connection| {
            is_in_cluster(connection)?.then(|| cluster::map(connection, at)).transpose()
        };
        let ranges = match node.connect().and_then(|mut connection| ask(&mut connection)) {
            Ok(None) => return Ok(None),
            Ok(Some(ranges)) => ranges,
            // If this node does not give the map, another node of the cluster may.
            Err(error) => {
                last = last.or(Some(no_answer(store, at, &error)));
                continue;
            }
        };
        if url.copies > 1 {
            let what = "copies=2 is for nodes that are no cluster: a cluster has replicas of its own; leave copies out";
            return Err(OpenError::new(OpenErrorKind::Layout, store, what));
        }
        let (mut nodes, mut owners) = (Vec::new(), vec![None; HASH_SLOTS]);
        for (first, last, address) in ranges {
            let number = nodes.iter().position(|node| *node == address).unwrap_or(nodes.len());
            if number == nodes.len() {
                nodes.push(address);
            }
            owners[first..=last.max(first)].fill(Some(number as u16));
        }
        return match owners.into_iter().collect::<Option<Vec<u16>>>() {
            Some(owners) => Ok(Some(Map { nodes, owners })),
            None => {
                let what = format!(
                    "the cluster of {at} has hash slots without a node: see redis-cli --cluster check {at}"
                );
                Err(OpenError::new(OpenErrorKind::Layout, store, what))
            }
        };
    }
    Err(last.expect("a URL names a node"))
}
