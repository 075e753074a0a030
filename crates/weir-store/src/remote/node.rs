//! One node of a fleet: its state, and the two threads that speak to it.
//!
//! One thread reads pages and one writes, each by its own connection. So no read waits behind a
//! batch of writes. A thread takes all jobs that wait, sends up to [`BATCH`] commands at once, and
//! answers each job by itself.
//!
//! After a connection has failed, a node may still do commands of that connection. They may wait in
//! the socket of a node that was stopped for a while. So on the next connection the thread first
//! tells the node to close the earlier one (`CLIENT KILL ID`). Only then it sends the writes again.
//!
//! If another process has taken a node's place, the node's pages are lost or old. So before a
//! thread writes there, the ledger marks all copies on the node as lacking. Answers of the earlier
//! process no longer count.

use super::alarm::Alarm;
use super::answers::{Meaning, meaning, plain};
use super::check::{check, process, serves};
use super::cluster::{map, redirection};
use super::ledger::{Entry, Ledger};
use super::operations::{Job, Kind};
use super::placement::Placement;
use super::seal::{SEALED, Seal};
use super::url::RemoteUrl;
use crate::{Condition, Fault, State, TellChange};
use redis::io::tcp::TcpSettings;
use redis::{Client, Connection, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo};
use redis::{Pipeline, RedisError, RedisResult, Value};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};
use weir_core::{PAGE_SIZE, PageBytes, Slot};
use weir_queue::{Closed, Receiver, Sender};

/// Number of commands that a thread sends at once. Their pages have 256 KiB together.
const BATCH: usize = 64;

/// Time limit for a node to accept a connection, and for each step of the greeting after that. It
/// is longer than one second, after which TCP sends a lost packet again.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);

/// Time that a node may be silent while an answer is due. After that its connection counts as
/// broken.
const SILENCE_LIMIT: Duration = Duration::from_secs(4);

/// Pause between two attempts to reach a node.
const RETRY_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// The state that all threads and lanes of a store share.
pub(super) struct Core {
    /// The store's name.
    pub(super) name: String,
    pub(super) url: RemoteUrl,
    pub(super) seal: Seal,
    /// The store's random number. The keys of its pages begin with `weir:` and this number.
    pub(super) number: u64,
    pub(super) placement: Placement,
    pub(super) ledger: Ledger,
    /// The stamp of the store's latest write.
    pub(super) last_stamp: AtomicU64,
    pub(super) counts: Counts,
    /// Wakes the thread that copies pages to nodes that lack them.
    pub(super) alarm: Alarm,
    /// The nodes of a cluster; `None` if the nodes are no cluster.
    pub(super) cluster: Option<Cluster>,
}

impl Core {
    pub(super) fn key(&self, slot: Slot) -> String {
        self.placement.key(self.number, slot)
    }

    /// A key of the store that never has a value.
    pub(super) fn no_page(&self) -> String {
        self.placement.no_page(self.number)
    }

    /// Asks a node of the cluster for its map. Nodes that are away are not asked. Once `is_over` is
    /// true, no other node is asked.
    pub(super) fn follow(&self, is_over: impl Fn() -> bool) {
        let Some(cluster) = &self.cluster else { return };
        let is_online = |node: &&Arc<Node>| node.name().is_some() && node.state() == State::Online;
        for node in cluster.nodes().iter().filter(is_online).take_while(|_| !is_over()) {
            let Ok(mut connection) = node.connect() else { continue };
            let Ok(ranges) = map(&mut connection, node.name().unwrap_or_default()) else { continue };
            for (first, last, address) in ranges {
                if let Some(owner) = cluster.find(&address) {
                    (first..=last).for_each(|hash| self.placement.moved(hash, owner));
                }
            }
            break;
        }
    }

    /// Reads the rest of an answer by which `node` of a cluster names another one: a hash slot and
    /// the number of its node. `None` for any other text, and outside of clusters.
    fn referred(&self, details: &str, node: &Node) -> Option<(usize, usize)> {
        let cluster = self.cluster.as_ref()?;
        self.counts.redirected.fetch_add(1, Ordering::Relaxed);
        let (hash, address) = redirection(details, node.name().unwrap_or_default())?;
        Some((hash, cluster.find(&address)?))
    }

    /// Notes that `node` no longer has a hash slot, as the rest of its answer `MOVED` says.
    pub(super) fn moved(&self, details: &str, node: &Node) {
        if let Some((hash, owner)) = self.referred(details, node) {
            self.placement.moved(hash, owner);
        }
    }

    /// Whether a node has kept a write of the slot.
    fn is_written(&self, slot: Slot) -> bool {
        self.ledger.get(slot).stamp() != 0
    }
}

/// The counts of all lanes of a store together.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Number of values that could not be decrypted, or were older than the acknowledged write.
    pub(super) forged: AtomicU64,
    /// Number of reads of a page that its node no longer had.
    pub(super) lost: AtomicU64,
    /// Number of writes that left out a copy, because the copy's node was away.
    pub(super) degraded: AtomicU64,
    /// Number of copies that were made anew on nodes that lacked them.
    pub(super) copied: AtomicU64,
    /// Number of copies that were lost when a node's process was replaced.
    pub(super) gone: AtomicU64,
    /// Number of operations that a cluster referred to another node.
    pub(super) redirected: AtomicU64,
}

/// One node of the fleet.
pub(super) struct Node {
    /// The node's name, and the client that connects to it. A place for a node that may join a
    /// cluster has neither yet.
    address: OnceLock<(String, Client)>,
    login: RedisConnectionInfo,
    /// The node's index in the list of nodes.
    number: usize,
    /// A bit for each thread of the node that does not get through to it: [`READS`] and
    /// [`WRITES`].
    away: AtomicU8,
    /// The run ID of the node's process; empty until a process has passed the check. While a thread
    /// has the lock, no other thread changes it.
    run: Mutex<String>,
    condition: Mutex<(SystemTime, Option<String>)>,
    tell: Mutex<Option<TellChange>>,
    /// Becomes readable when the store closes, and wakes a thread that pauses.
    closing: OwnedFd,
}

impl Node {
    /// Makes node `number`, which has no name yet.
    pub(super) fn new(number: usize, url: &RemoteUrl, password: Option<&str>) -> io::Result<Self> {
        let mut login = RedisConnectionInfo::default();
        if let Some(user) = &url.user {
            login = login.set_username(user);
        }
        if let Some(password) = password {
            login = login.set_password(password);
        }
        Ok(Node {
            address: OnceLock::new(),
            login,
            number,
            run: Mutex::default(),
            away: AtomicU8::new(0),
            condition: Mutex::new((SystemTime::now(), None)),
            tell: Mutex::new(None),
            closing: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Names the node, as `HOST:PORT`. Returns false if that is no address, or the node has a name
    /// already.
    pub(super) fn assign(&self, name: &str) -> bool {
        let client = || {
            let (host, port) = name.rsplit_once(':')?;
            let host = host.trim_start_matches('[').trim_end_matches(']');
            let address = ConnectionAddr::Tcp(host.to_owned(), port.parse().ok()?);
            let info: ConnectionInfo = address.into_connection_info().ok()?;
            // Nagle's algorithm would hold the short segment that ends a batch until an
            // acknowledgement comes. So turn it off.
            let settings = TcpSettings::default().set_nodelay(true);
            Client::open(info.set_redis_settings(self.login.clone()).set_tcp_settings(settings)).ok()
        };
        client().is_some_and(|client| self.address.set((name.to_owned(), client)).is_ok())
    }

    pub(super) fn name(&self) -> Option<&str> {
        self.address.get().map(|(name, _)| name.as_str())
    }

    /// Opens a connection without a greeting.
    pub(super) fn connect(&self) -> RedisResult<Connection> {
        let Some((_, client)) = self.address.get() else {
            return Err(io::Error::from(io::ErrorKind::NotFound).into());
        };
        let connection = client.get_connection_with_timeout(CONNECT_LIMIT)?;
        connection.set_read_timeout(Some(CONNECT_LIMIT))?;
        connection.set_write_timeout(Some(SILENCE_LIMIT))?;
        Ok(connection)
    }

    /// Notes the process that the check found fit when the store was opened.
    pub(super) fn is_checked(&self, run: String) {
        *self.run.lock().unwrap_or_else(PoisonError::into_inner) = run;
    }

    /// Notes the process that answers. Each process is checked before the node serves pages. That
    /// includes the first one of a node which joins a cluster later. If a process may not be
    /// trusted with pages, the node is refused. If it has taken the place of an earlier process,
    /// all copies on the node count as lacking. Returns a message about the node, if there is one.
    fn meet(&self, run: &str, connection: &mut Connection, core: &Core) -> RedisResult<Option<String>> {
        let mut known = self.run.lock().unwrap_or_else(PoisonError::into_inner);
        // A process without a run ID is never known, because the check refuses it.
        if !run.is_empty() && *known == run {
            return Ok(None);
        }
        let mut note = None;
        let name = self.name().unwrap_or_default();
        let (is_cluster, key) = (core.cluster.is_some(), core.no_page());
        if let Err(unfit) = check(&core.name, name, connection, &core.url, is_cluster, &key) {
            let why = plain(&unfit.to_string());
            // If the node is online, the caller notes that it is away, and tells this reason.
            if self.state() != State::Online && self.condition().why.as_ref() != Some(&why) {
                self.say(&why);
            }
            return Err(io::Error::other(why).into());
        }
        if !known.is_empty() {
            let mut gone = 0;
            for slot in (0..core.ledger.slots()).map(Slot) {
                let here = core.placement.copy_on(slot, self.number);
                if let Some(copy) = here.filter(|_| core.is_written(slot)) {
                    core.ledger.lost(slot, copy);
                    gone += 1;
                }
            }
            core.counts.gone.fetch_add(gone, Ordering::Relaxed);
            let then =
                if core.placement.copies() > 1 { "they are copied there again" } else { "they are lost" };
            note = Some(format!("it is another process, without the {gone} pages that it held: {then}"));
        }
        run.clone_into(&mut known);
        Ok(note)
    }

    /// Notes that the node's process with the run ID `run` has kept a write. Returns false if
    /// another process has taken its place since.
    fn keep(&self, run: &str, slot: Slot, stamp: u64, core: &Core) -> bool {
        let known = self.run.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = *known == run;
        // A cluster has one copy of each page: copy 0. The page's hash slot may have moved to
        // another node since, and the page with it. The write counts for copy 0 all the same.
        let copy = core.placement.copy_on(slot, self.number).or(core.cluster.is_some().then_some(0));
        if let Some(copy) = copy.filter(|_| is_same) {
            core.ledger.kept(slot, copy, stamp);
        }
        is_same
    }

    /// Notes that the store has ended, and that `left` values of it may be left on this node.
    /// Nobody can read them, since the key that seals them is gone.
    pub(super) fn leaves_values(&self, core: &Core, left: usize) {
        let name = self.name().unwrap_or_default();
        let (host, port) = name.rsplit_once(':').unwrap_or((name, ""));
        let host = host.trim_start_matches('[').trim_end_matches(']');
        // One command to a cluster may only name keys of one hash slot.
        let most = if core.cluster.is_some() { 1 } else { 500 };
        self.say(&format!(
            "{left} values are left there, sealed by a key that is gone; to delete them: C='redis-cli -h {host} -p \
             {port}'; $C --scan --pattern 'weir:*{:016x}*' | xargs -r -n {most} $C unlink",
            core.number
        ));
    }

    pub(super) fn state(&self) -> State {
        if self.away.load(Ordering::Relaxed) == 0 { State::Online } else { State::Unreachable }
    }

    pub(super) fn condition(&self) -> Condition {
        let (since, why) = self.condition.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Condition {
            part: self.name().unwrap_or_default().to_owned(),
            state: self.state(),
            ways: vec!["redis"],
            missing: Vec::new(),
            since,
            why,
            wants_another_process: false,
        }
    }

    pub(super) fn when_changed(&self, tell: TellChange) {
        *self.tell.lock().unwrap_or_else(PoisonError::into_inner) = Some(tell);
    }

    /// Notes that the store closes, and wakes the threads that pause.
    pub(super) fn close(&self) {
        let _ = rustix::io::write(&self.closing, &1u64.to_ne_bytes());
    }

    /// Waits for the pause between two attempts to reach the node, or until the store closes.
    /// Returns whether it closes.
    fn rest(&self) -> bool {
        poll(&mut [PollFd::new(&self.closing, PollFlags::IN)], Some(&RETRY_EVERY))
            .is_ok_and(|ready| ready > 0)
    }

    /// Notes that a thread does not get through to the node. Returns whether the node was online
    /// until now.
    pub(super) fn is_away(&self, thread: u8, why: &str) -> bool {
        let was_online = self.away.fetch_or(thread, Ordering::Relaxed) == 0;
        if was_online {
            self.say(why);
        }
        was_online
    }

    /// Notes that a thread gets through to the node.
    fn is_back(&self, thread: u8, note: Option<&str>) {
        if self.away.fetch_and(!thread, Ordering::Relaxed) == thread || note.is_some() {
            self.say(note.unwrap_or("it answers again"));
        }
    }

    pub(super) fn say(&self, why: &str) {
        let why = plain(why);
        *self.condition.lock().unwrap_or_else(PoisonError::into_inner) = (SystemTime::now(), Some(why));
        let tell = self.tell.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(tell) = tell {
            tell(&self.condition());
        }
    }
}

/// Largest number of nodes that may join a cluster while the store is open.
pub(super) const SPARE: usize = 8;

/// The nodes of a cluster: the known nodes, and empty places for nodes that may join.
pub(super) struct Cluster {
    nodes: Box<[Arc<Node>]>,
    naming: Mutex<()>,
}

impl Cluster {
    pub(super) fn new(nodes: Box<[Arc<Node>]>) -> Self {
        Cluster { nodes, naming: Mutex::new(()) }
    }

    pub(super) fn nodes(&self) -> &[Arc<Node>] {
        &self.nodes
    }

    /// Returns the number of the node at `address`. Gives an unknown node the next free number.
    /// `None`: no number is free.
    pub(super) fn find(&self, address: &str) -> Option<usize> {
        let _naming = self.naming.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.nodes.iter().position(|node| node.name() == Some(address));
        known.or_else(|| {
            let free = self.nodes.iter().position(|node| node.name().is_none())?;
            self.nodes[free].assign(address).then_some(free)
        })
    }
}

/// The queues of the nodes' threads.
#[derive(Clone, Default)]
pub(super) struct Senders {
    pub(super) nodes: Box<[Arc<Node>]>,
    pub(super) reads: Vec<Sender<Job>>,
    pub(super) writes: Vec<Sender<Job>>,
}

/// The bit of the thread that reads from a node.
pub(super) const READS: u8 = 1;
/// The bit of the thread that writes to a node.
pub(super) const WRITES: u8 = 2;

/// One of the two threads of a node.
pub(super) struct Worker {
    pub(super) node: Arc<Node>,
    pub(super) core: Arc<Core>,
    pub(super) jobs: Receiver<Job>,
    /// [`READS`] or [`WRITES`].
    pub(super) thread: u8,
}

/// A connection to a node.
struct Session {
    connection: Connection,
    name: Name,
}

/// Names a connection by the run ID of the node's process and by the number that the process gave
/// it. A later process of the node gives the same numbers again.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Name {
    run: String,
    id: i64,
}

impl Worker {
    /// Serves jobs until every sender is gone.
    pub(super) fn run(mut self) {
        let mut waiting: Vec<Job> = Vec::new();
        let mut session: Option<Session> = None;
        // The connection that failed last. The node may not have noticed yet.
        let mut broken: Option<Name> = None;
        // Whether the last attempt to reach the node failed. Then the thread tries without a job
        // too, because lanes send no jobs to a node that is away.
        let mut is_sought = false;
        loop {
            let closes = is_sought && self.node.rest();
            if closes && waiting.is_empty() {
                break;
            }
            if waiting.is_empty() && !is_sought {
                match self.jobs.drain(|batch| waiting.extend(batch)) {
                    Ok(()) => {}
                    Err(Closed) => break,
                }
            } else {
                waiting.extend(self.jobs.try_drain());
            }
            waiting.retain(|job| job.lane.is_wanted(job.operation, job.attempt));
            if waiting.is_empty() && closes {
                break;
            }
            if waiting.is_empty() && !is_sought {
                continue;
            }
            if session.is_none() {
                match self.open(broken.as_ref()) {
                    Ok((opened, note)) => {
                        (session, broken, is_sought) = (Some(opened), None, false);
                        self.node.is_back(self.thread, note.as_deref());
                        self.core.alarm.wake();
                    }
                    Err(error) => {
                        self.goes_away(&error);
                        self.give_up(&mut waiting);
                        is_sought = true;
                        continue;
                    }
                }
            }
            let Some(opened) = &mut session else { continue };
            if let Err(error) = self.turn(opened, &mut waiting) {
                broken = Some(opened.name.clone());
                (session, is_sought) = (None, true);
                self.goes_away(&error);
                self.give_up(&mut waiting);
            }
        }
    }

    /// Notes that the node does not answer. Wakes the thread that asks a cluster for its map:
    /// another node may serve the same pages now.
    fn goes_away(&self, error: &RedisError) {
        if self.node.is_away(self.thread, &why(error)) {
            self.core.alarm.wake();
        }
    }

    /// Connects, and tells the node to close the connection `broken`. Also returns a message about
    /// the node, if there is one.
    fn open(&self, broken: Option<&Name>) -> RedisResult<(Session, Option<String>)> {
        let mut connection = self.node.connect()?;
        let id = redis::cmd("CLIENT").arg("ID").query(&mut connection)?;
        let name = Name { run: process(&mut connection)?, id };
        let note = self.node.meet(&name.run, &mut connection, &self.core)?;
        if let Some(broken) = broken.filter(|broken| broken.run == name.run) {
            // The node answers 0 if it has closed that connection already. The connection is closed
            // in both cases, so the answer does not matter.
            let mut kill = redis::cmd("CLIENT");
            let _: i64 = kill.arg("KILL").arg("ID").arg(broken.id).query(&mut connection)?;
        }
        // Check that the node serves pages. Otherwise a node that is starting, or that is a
        // replica, would count as online now, and as away after the first page.
        let command = if self.thread == READS { "GET" } else { "UNLINK" };
        serves(command, &self.core.no_page(), &mut connection)?;
        connection.set_read_timeout(Some(SILENCE_LIMIT))?;
        Ok((Session { connection, name }, note))
    }

    /// Ends waiting jobs with a timeout, if they must not wait for a node that is away.
    fn give_up(&self, waiting: &mut Vec<Job>) {
        waiting.retain(|job| {
            if !job.waits {
                job.answer(Err(Fault::Timeout), None);
            }
            job.waits
        });
    }

    /// Sends up to a batch of the jobs that wait, and takes the answers. After an error, the jobs
    /// that have no answer still wait.
    fn turn(&self, session: &mut Session, waiting: &mut Vec<Job>) -> RedisResult<()> {
        let mut commands = Pipeline::with_capacity(waiting.len().min(BATCH));
        let mut sealed = [0; SEALED];
        let mut page = [0; PAGE_SIZE];
        let mut sent = 0;
        // The ledger's entry of each job's slot at the time when the job is sent.
        let mut seen = [Entry::default(); BATCH];
        let is_copy = |job: &Job| matches!(job.kind, Kind::Copy(_));
        while let Some(job) = waiting.get(sent).filter(|_| sent < BATCH) {
            // Copies and writes do not share a batch. Whether a copied page is the newest is known
            // only once no earlier write of its slot waits for an answer.
            if is_copy(job) != is_copy(&waiting[0]) {
                break;
            }
            seen[sent] = self.core.ledger.get(job.slot);
            match (job.kind, self.is_due(job)) {
                (Kind::Probe, _) => _ = commands.cmd("PING"),
                (Kind::Read(_), _) => _ = begin(&mut commands, job).cmd("GET").arg(self.core.key(job.slot)),
                (Kind::Write(stamp) | Kind::Copy(stamp), true)
                    if job.lane.copy_page(job.operation, job.attempt, &mut page) =>
                {
                    self.core.ledger.touch(job.slot);
                    self.core.seal.close(job.slot, stamp, &page, &mut sealed);
                    begin(&mut commands, job).cmd("SET").arg(self.core.key(job.slot)).arg(&sealed[..]);
                }
                // The job is void, or a newer write has been kept. So there is nothing to send.
                _ => {
                    job.answer(Ok(()), None);
                    waiting.remove(sent);
                    continue;
                }
            }
            sent += 1;
        }
        if sent == 0 {
            return Ok(());
        }
        let connection = &mut session.connection;
        connection.send_packed_command(&commands.get_packed_pipeline())?;
        let mut answered = 0;
        let outcome = loop {
            if answered == sent {
                break Ok(());
            }
            if waiting[answered].asking
                && let Err(error) = connection.recv_response()
            {
                break Err(error);
            }
            let answer = match connection.recv_response() {
                Ok(value) => {
                    self.answer(&session.name.run, &waiting[answered], seen[answered], &value, &mut page)
                }
                Err(error) => Err(error),
            };
            if let Err(error) = answer {
                break Err(error);
            }
            answered += 1;
        };
        waiting.drain(..answered);
        outcome
    }

    /// Whether the job must still be sent. Reads and probes always are. A write is not sent if a
    /// node has kept a newer one, or if all copies have this write. A copied page is sent if this
    /// node lacks it, and no node has kept a newer one.
    fn is_due(&self, job: &Job) -> bool {
        let entry = self.core.ledger.get(job.slot);
        match job.kind {
            Kind::Read(_) | Kind::Probe => true,
            Kind::Write(stamp) => stamp > entry.stamp() || stamp == entry.stamp() && entry.lacks_any(),
            Kind::Copy(stamp) => {
                let copy = self.core.placement.copy_on(job.slot, self.node.number);
                stamp >= entry.stamp() && copy.is_some_and(|copy| entry.lacks(copy))
            }
        }
    }

    /// Whether this node is known to lack the newest page of a slot.
    fn lacks(&self, slot: Slot, entry: Entry) -> bool {
        let copy = self.core.placement.copy_on(slot, self.node.number);
        copy.is_some_and(|copy| entry.lacks(copy))
    }

    /// Ends a job with `value`, the answer of the node's process with the run ID `run`. `seen` is
    /// what the ledger said of the slot as the job was sent. Fails if another process has taken its
    /// place since, or if the node does not serve at present.
    fn answer(
        &self,
        run: &str,
        job: &Job,
        seen: Entry,
        value: &Value,
        page: &mut PageBytes,
    ) -> RedisResult<()> {
        let core = &self.core;
        let mut read = None;
        let result = match meaning(job.kind, value, |sealed| core.seal.open(job.slot, sealed, page).ok()) {
            // A node that is starting, or that is not the master, may do the command later. So the
            // job waits.
            Meaning::Away(why) => return Err(io::Error::other(why).into()),
            Meaning::Moved(details) => {
                core.moved(&details, &self.node);
                Err(Fault::Timeout)
            }
            Meaning::Ask(details) => {
                let ask = core.referred(&details, &self.node).map(|(_, node)| node);
                job.redirect(ask);
                return Ok(());
            }
            Meaning::Later => Err(Fault::Timeout),
            Meaning::Kept => match job.kind {
                Kind::Write(stamp) | Kind::Copy(stamp) if !self.node.keep(run, job.slot, stamp, core) => {
                    return Err(RedisError::from(io::Error::other("it is another process by now")));
                }
                _ => Ok(()),
            },
            Meaning::Page(stamp) => {
                self.is_there(run, job.slot, stamp);
                read = Some(stamp);
                Ok(())
            }
            Meaning::Zeros => {
                page.fill(0);
                read = Some(0);
                Ok(())
            }
            Meaning::Missing => {
                core.counts.lost.fetch_add(1, Ordering::Relaxed);
                self.was_wrong(job.slot, seen);
                Err(Fault::Lost)
            }
            Meaning::Wrong(older) => {
                // If the ledger says that the node lacks the newest page, the node may rightly
                // return an older one. Then the newest page is lost, and nothing was forged. The
                // page may have been copied there while the answer was under way.
                let now = core.ledger.get(job.slot);
                if older.is_some() && [seen, now].into_iter().any(|entry| self.lacks(job.slot, entry)) {
                    Err(Fault::Lost)
                } else {
                    core.counts.forged.fetch_add(1, Ordering::Relaxed);
                    self.was_wrong(job.slot, seen);
                    Err(Fault::Corrupt)
                }
            }
            Meaning::Refused(fault) => Err(fault),
        };
        job.answer(result, read.map(|stamp| (&*page, stamp)));
        Ok(())
    }

    /// Notes that the node's process with the run ID `run` has the page of a slot with this stamp.
    /// If that is the newest page and its copy here is marked, the mark was out of date.
    fn is_there(&self, run: &str, slot: Slot, stamp: u64) {
        let entry = self.core.ledger.get(slot);
        if stamp == entry.stamp() && self.lacks(slot, entry) {
            // If another process has taken the node's place since, nothing is noted. The page is
            // the right one all the same.
            self.node.keep(run, slot, stamp, &self.core);
        }
    }

    /// Notes that this node's copy of a slot was missing or wrong when the ledger said `seen` of
    /// that slot. If there is another copy, this one is made anew.
    fn was_wrong(&self, slot: Slot, seen: Entry) {
        let copy = self.core.placement.copy_on(slot, self.node.number);
        if let Some(copy) = copy.filter(|_| self.core.placement.copies() > 1) {
            // A copy that is marked already was not made anew, so nothing is to be done now.
            if self.core.ledger.was_lost(slot, copy, seen) {
                self.core.alarm.wake();
            }
        }
    }
}

/// The reason for which a node cannot be reached. The system's text for an answer that took too
/// long is "temporarily unavailable", which does not say what happened.
pub(super) fn why(error: &RedisError) -> String {
    if error.is_timeout() { "it does not answer in time".to_owned() } else { error.to_string() }
}

/// Begins a job's command. A cluster's node serves a page that is being moved to it only after the
/// command `ASKING`.
fn begin<'a>(commands: &'a mut Pipeline, job: &Job) -> &'a mut Pipeline {
    if job.asking { commands.cmd("ASKING") } else { commands }
}
