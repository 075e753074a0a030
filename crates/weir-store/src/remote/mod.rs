//! `redis://`: pages in a fleet of engines that speak the Redis protocol.
//!
//! Each page is a value of its own, sealed by a key that dies with the store, and named by the
//! store's random number and the slot. The nodes of a slot are chosen by rendezvous hashing. A node
//! that is away has its pages wait, and be read from their second copy if they have one. The keys
//! are deleted when the store is closed.
//!
//! A lane does no network I/O. The store has two threads for each node, one that reads and one
//! that writes; see [`node`]. They allocate, and the network may need memory to free memory. So a
//! kernel must not swap onto it.

mod lane;
mod node;
mod operations;
mod placement;
mod seal;
mod url;

pub use url::RemoteUrl;

use crate::{Condition, Lane, OpenError, OpenErrorKind, Report, State, Store, Tell, TellChange};
use lane::RemoteLane;
use node::{Core, Counts, Node, Senders, Worker};
use placement::Placement;
use redis::{Connection, RedisResult};
use rustix::rand::GetRandomFlags;
use seal::Seal;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use weir_core::{ByteSize, PAGE_SIZE, Slot};

/// Operations of a lane at most.
const DEPTH_MAX: usize = 1024;

/// Bytes that an engine takes for a page: the value in its allocator's next size, key and entry.
/// Measured over 20,000 pages with Redis 7.0.15 and jemalloc 5.3: 5,215.
const PER_PAGE: u64 = 5300;

/// Pages in a fleet.
pub struct RemoteStore {
    name: String,
    core: Arc<Core>,
    /// The ways to the threads, of which each lane takes a copy; empty once the store closes.
    senders: Mutex<Senders>,
    nodes: Box<[Arc<Node>]>,
    threads: Vec<JoinHandle<()>>,
    has_ended: AtomicBool,
}

/// Counts of a store since it was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RemoteCounts {
    /// Values that were not what was written: changed, replayed, or of another slot.
    pub forged: u64,
    /// Pages that a node no longer had.
    pub lost: u64,
    /// Writes of which a copy was left out, since its node was away.
    pub degraded: u64,
}

impl std::fmt::Debug for RemoteStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteStore").field("name", &self.name).finish_non_exhaustive()
    }
}

impl RemoteStore {
    /// Connects to every node that `url` names, and looks whether it may be trusted with pages.
    ///
    /// # Errors
    /// When a node is not there, or throws pages away, or has too little room; when the password
    /// cannot be read.
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
        let node = |node: &String| {
            let made = Node::new(node, url, password.as_deref());
            made.map(Arc::new).map_err(|error| OpenError::io(&name, format!("cannot use {node}"), error))
        };
        let nodes: Box<[Arc<Node>]> = url.nodes.iter().map(node).collect::<Result<_, _>>()?;
        nodes.iter().try_for_each(|node| look_at(&name, node, url))?;

        let slots = (url.size.0 / PAGE_SIZE as u64) as u32;
        let mut number = [0; 8];
        let drawn = rustix::rand::getrandom(&mut number, GetRandomFlags::empty());
        drawn.map_err(|errno| OpenError::io(&name, "cannot draw a random number", errno))?;
        let mut stamps = Vec::new();
        if stamps.try_reserve_exact(slots as usize).is_err() {
            let bytes = u64::from(slots) * size_of::<AtomicU64>() as u64;
            return Err(OpenError::no_memory(&name, bytes, std::io::ErrorKind::OutOfMemory));
        }
        stamps.resize_with(slots as usize, || AtomicU64::new(0));
        let core = Arc::new(Core {
            seal: Seal::ephemeral().map_err(|error| OpenError::io(&name, "cannot make a key", error))?,
            prefix: format!("weir:{:016x}:", u64::from_ne_bytes(number)),
            placement: Placement::new(&url.nodes, slots, url.copies.into()),
            stamps: stamps.into(),
            last_stamp: AtomicU64::new(0),
            counts: Counts::default(),
        });
        let mut store = RemoteStore {
            core,
            senders: Mutex::default(),
            nodes: nodes.clone(),
            threads: Vec::new(),
            has_ended: AtomicBool::new(false),
            name,
        };
        let mut senders = Senders { nodes, ..Senders::default() };
        for number in 0..store.nodes.len() {
            for paths in [&mut senders.reads, &mut senders.writes] {
                let (sender, jobs) = weir_queue::channel(DEPTH_MAX);
                let node = Arc::clone(&store.nodes[number]);
                let worker = Worker { node, core: Arc::clone(&store.core), jobs };
                let thread = std::thread::Builder::new().name(format!("node-{number}"));
                let started = thread.spawn(move || worker.run());
                let started = started
                    .map_err(|error| OpenError::io(&store.name, "cannot start a thread for a node", error))?;
                store.threads.push(started);
                paths.push(sender);
            }
        }
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
        }
    }

    /// The beginning of each of its keys.
    pub fn key_prefix(&self) -> &str {
        &self.core.prefix
    }
}

impl Drop for RemoteStore {
    /// Ends the threads. All lanes are gone by then, or their operations are void.
    fn drop(&mut self) {
        *self.senders.get_mut().unwrap_or_else(PoisonError::into_inner) = Senders::default();
        self.nodes.iter().for_each(|node| node.close());
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        self.end();
    }
}

impl Store for RemoteStore {
    fn name(&self) -> &str {
        &self.name
    }

    fn slots(&self) -> u32 {
        self.core.stamps.len() as u32
    }

    fn lane(&self, depth: usize) -> Result<Box<dyn Lane>, OpenError> {
        if depth > DEPTH_MAX {
            let what = format!("a lane of {depth} operations; at most {DEPTH_MAX} fit");
            return Err(OpenError::new(OpenErrorKind::Layout, &self.name, what));
        }
        let senders = self.senders.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let opened = RemoteLane::open(Arc::clone(&self.core), senders, depth.max(1));
        Ok(Box::new(opened.map_err(|error| OpenError::io(&self.name, "cannot open a lane", error))?))
    }

    fn members(&self) -> u32 {
        self.nodes.len() as u32
    }

    fn member(&self, slot: Slot) -> u32 {
        self.core.placement.node(slot, 0).unwrap_or(0) as u32
    }

    fn state(&self, member: u32) -> State {
        self.nodes.get(member as usize).map_or(State::Lost, |node| node.state())
    }

    fn unfit_for_swap(&self) -> Option<String> {
        Some("the network may need memory to free memory; use it under `weir run` or a cache".to_owned())
    }

    fn report(&self) -> Option<&dyn Report> {
        Some(self)
    }

    /// Deletes the keys, within a limit for each node.
    fn end(&self) {
        if !self.has_ended.swap(true, Ordering::Relaxed) {
            self.nodes.iter().enumerate().for_each(|(number, node)| node.clean_up(number, &self.core));
        }
    }
}

impl Report for RemoteStore {
    fn conditions(&self) -> Vec<Condition> {
        self.nodes.iter().map(|node| node.condition()).collect()
    }

    fn when_changed(&self, tell: TellChange) {
        self.nodes.iter().for_each(|node| node.when_changed(Arc::clone(&tell)));
    }

    fn stages(&self) -> Vec<(&'static str, Duration)> {
        Vec::new()
    }

    fn when_joined(&self, _tell: Tell) {}
}

/// Refuses a node that is not there, or on which pages would not stay.
fn look_at(store: &str, node: &Node, url: &RemoteUrl) -> Result<(), OpenError> {
    let unreachable = |error: redis::RedisError| {
        let what = format!("node {} does not answer as Redis does: {error}", node.name);
        OpenError::new(OpenErrorKind::NoDevice, store, what)
    };
    let mut connection = node.connect().map_err(unreachable)?;
    let cluster: String = redis::cmd("INFO").arg("cluster").query(&mut connection).map_err(unreachable)?;
    if cluster.contains("cluster_enabled:1") {
        let what =
            format!("node {} is part of a cluster, which moves keys: name nodes that are not", node.name);
        return Err(OpenError::new(OpenErrorKind::Layout, store, what));
    }
    if !url.check {
        return Ok(());
    }
    let setting = |connection: &mut Connection, key: &str| -> RedisResult<String> {
        let pair: Vec<String> = redis::cmd("CONFIG").arg("GET").arg(key).query(connection)?;
        Ok(pair.into_iter().nth(1).unwrap_or_default())
    };
    let denied = |error: redis::RedisError| {
        let what = format!(
            "node {} does not tell its settings: {error}; allow CONFIG GET, or give check=off if it has no \
             memory limit below {} and its policy is noeviction",
            node.name,
            ByteSize(needed(url)),
        );
        OpenError::new(OpenErrorKind::Denied, store, what)
    };
    let most: u64 = setting(&mut connection, "maxmemory").map_err(denied)?.parse().unwrap_or(0);
    let policy = setting(&mut connection, "maxmemory-policy").map_err(denied)?;
    if most > 0 && policy != "noeviction" {
        let what = format!(
            "node {} throws pages away where memory is short (maxmemory-policy {policy}): set it to noeviction",
            node.name
        );
        return Err(OpenError::new(OpenErrorKind::Layout, store, what));
    }
    if most > 0 && most < needed(url) {
        let what = format!(
            "node {} may take {} of memory, and its share of the pages takes {}: raise maxmemory, or give a \
             smaller size",
            node.name,
            ByteSize(most),
            ByteSize(needed(url)),
        );
        return Err(OpenError::new(OpenErrorKind::NoMemory { wanted: needed(url), had: most }, store, what));
    }
    Ok(())
}

/// Memory that a node's share of the pages takes.
fn needed(url: &RemoteUrl) -> u64 {
    let pages = url.size.0 / PAGE_SIZE as u64 * u64::from(url.copies);
    pages.div_ceil(url.nodes.len() as u64) * PER_PAGE
}
