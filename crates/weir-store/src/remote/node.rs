//! One node: its state, and the two threads that speak to it.
//!
//! One thread reads and one writes, each by a connection of its own, so no read queues behind a
//! batch of writes. A thread takes everything that waits, sends up to [`BATCH`] commands in one go
//! and answers each by itself.
//!
//! A connection that fails leaves commands of which nobody knows whether the node has done them, or
//! will yet: a node that stood still finds them in its socket. So the next connection first has the
//! node close the one before (`CLIENT KILL ID`). Only then are its writes sent again.

use super::operations::{Job, Kind};
use super::placement::Placement;
use super::seal::{SEALED, Seal};
use super::url::RemoteUrl;
use crate::{Condition, Fault, State, TellChange};
use redis::{Client, Connection, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo};
use redis::{Pipeline, RedisResult, Value};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use weir_core::{PAGE_SIZE, PageBytes, Slot};
use weir_queue::{Closed, Receiver, Sender};

/// Commands that are sent in one go: 256 KiB of pages.
const BATCH: usize = 64;

/// How long a node has to accept a connection, and for each step of its greeting.
const CONNECT_LIMIT: Duration = Duration::from_secs(1);

/// How long a connection may be silent while an answer is due, before it counts as broken.
const SILENCE_LIMIT: Duration = Duration::from_secs(4);

/// The rest between two tries to reach a node.
const RETRY_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Keys that one command deletes at the end.
const UNLINK_BATCH: usize = 512;

/// How long a node may take to delete all that the store has written there.
const CLEAN_UP_LIMIT: Duration = Duration::from_secs(30);

/// The parts that all threads and lanes of a store share.
pub(super) struct Core {
    pub(super) seal: Seal,
    /// The beginning of each key: `weir:`, the store's random number, `:`.
    pub(super) prefix: String,
    pub(super) placement: Placement,
    /// The stamp of the last acknowledged write of each slot; 0: never written.
    pub(super) stamps: Box<[AtomicU64]>,
    /// The last stamp that was given to a write.
    pub(super) last_stamp: AtomicU64,
    pub(super) counts: Counts,
}

impl Core {
    fn key(&self, slot: Slot) -> String {
        format!("{}{}", self.prefix, slot.0)
    }

    /// Whether a write of the slot may have reached a node.
    fn is_written(&self, slot: Slot) -> bool {
        self.stamps[slot.0 as usize].load(Ordering::Relaxed) != 0
    }
}

/// Counts of all lanes.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Values that did not open, or were older than acknowledged.
    pub(super) forged: AtomicU64,
    /// Pages that a node no longer had.
    pub(super) lost: AtomicU64,
    /// Writes of which a copy could not be kept.
    pub(super) degraded: AtomicU64,
}

/// One engine.
pub(super) struct Node {
    pub(super) name: String,
    client: Client,
    away: AtomicBool,
    condition: Mutex<(SystemTime, Option<String>)>,
    tell: Mutex<Option<TellChange>>,
    /// Readable once the store closes, for a thread that rests.
    closing: OwnedFd,
}

impl Node {
    /// The node `name` of `url`. Does not connect.
    pub(super) fn new(name: &str, url: &RemoteUrl, password: Option<&str>) -> io::Result<Self> {
        let (host, port) = name.rsplit_once(':').expect("the URL's parser looked");
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let address = ConnectionAddr::Tcp(host.to_owned(), port.parse().expect("likewise"));
        let mut login = RedisConnectionInfo::default();
        if let Some(user) = &url.user {
            login = login.set_username(user);
        }
        if let Some(password) = password {
            login = login.set_password(password);
        }
        let info: ConnectionInfo =
            address.into_connection_info().map_err(io::Error::other)?.set_redis_settings(login);
        Ok(Node {
            name: name.to_owned(),
            client: Client::open(info).map_err(io::Error::other)?,
            away: AtomicBool::new(false),
            condition: Mutex::new((SystemTime::now(), None)),
            tell: Mutex::new(None),
            closing: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Opens a connection, without a greeting yet.
    pub(super) fn connect(&self) -> RedisResult<Connection> {
        let connection = self.client.get_connection_with_timeout(CONNECT_LIMIT)?;
        connection.set_read_timeout(Some(CONNECT_LIMIT))?;
        connection.set_write_timeout(Some(SILENCE_LIMIT))?;
        Ok(connection)
    }

    /// Deletes the store's keys on this node, which is node `number`. A value that cannot be
    /// deleted is noise.
    pub(super) fn clean_up(&self, number: usize, core: &Core) {
        let copies = core.placement.copies();
        let is_here = |slot| (0..copies).any(|copy| core.placement.node(slot, copy) == Some(number));
        let mut slots = (0..core.stamps.len() as u32)
            .map(Slot)
            .filter(|&slot| core.is_written(slot) && is_here(slot))
            .peekable();
        if slots.peek().is_none() {
            return;
        }
        let begun = Instant::now();
        let mut connection = self.connect();
        while let (Ok(connection), Some(_)) = (&mut connection, slots.peek()) {
            let mut unlink = redis::cmd("UNLINK");
            slots.by_ref().take(UNLINK_BATCH).for_each(|slot| {
                unlink.arg(core.key(slot));
            });
            let done: RedisResult<i64> = unlink.query(connection);
            if done.is_err() || begun.elapsed() > CLEAN_UP_LIMIT {
                break;
            }
        }
        if slots.peek().is_some() {
            self.say(format!("keys {}* are left there, sealed by a key that is gone", core.prefix));
        }
    }

    pub(super) fn state(&self) -> State {
        if self.away.load(Ordering::Relaxed) { State::Unreachable } else { State::Online }
    }

    pub(super) fn condition(&self) -> Condition {
        let (since, why) = self.condition.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Condition {
            part: self.name.clone(),
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

    /// The store closes: threads that rest look up.
    pub(super) fn close(&self) {
        let _ = rustix::io::write(&self.closing, &1u64.to_ne_bytes());
    }

    /// Rests between two tries. Whether the store closes.
    fn rest(&self) -> bool {
        poll(&mut [PollFd::new(&self.closing, PollFlags::IN)], Some(&RETRY_EVERY))
            .is_ok_and(|ready| ready > 0)
    }

    fn is_away(&self, why: Option<String>) {
        let away = why.is_some();
        if self.away.swap(away, Ordering::Relaxed) != away {
            self.say(why.unwrap_or_else(|| "it answers again".to_owned()));
        }
    }

    fn say(&self, why: String) {
        *self.condition.lock().unwrap_or_else(PoisonError::into_inner) = (SystemTime::now(), Some(why));
        let tell = self.tell.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(tell) = tell {
            tell(&self.condition());
        }
    }
}

/// The ways to the nodes' threads.
#[derive(Clone, Default)]
pub(super) struct Senders {
    pub(super) nodes: Box<[Arc<Node>]>,
    pub(super) reads: Vec<Sender<Job>>,
    pub(super) writes: Vec<Sender<Job>>,
}

/// One of a node's two threads.
pub(super) struct Worker {
    pub(super) node: Arc<Node>,
    pub(super) core: Arc<Core>,
    pub(super) jobs: Receiver<Job>,
}

/// A connection.
struct Session {
    connection: Connection,
    name: Name,
}

/// A connection's name: the run of the node's process, and its number there. Another process deals
/// the same numbers again.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Name {
    run: String,
    id: i64,
}

impl Worker {
    /// Serves jobs until nobody can send one any more.
    pub(super) fn run(mut self) {
        let mut waiting: Vec<Job> = Vec::new();
        let mut session: Option<Session> = None;
        // The connection that failed last, which the node may still have.
        let mut broken: Option<Name> = None;
        // Whether the last try to reach the node failed: then it is looked for without a job too,
        // since lanes pass it over meanwhile.
        let mut is_sought = false;
        loop {
            if is_sought && self.node.rest() && waiting.is_empty() {
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
            if waiting.is_empty() && !is_sought {
                continue;
            }
            if session.is_none() {
                match self.open(broken.as_ref()) {
                    Ok(opened) => {
                        (session, broken, is_sought) = (Some(opened), None, false);
                        self.node.is_away(None);
                    }
                    Err(error) => {
                        self.node.is_away(Some(error.to_string()));
                        self.give_up(&mut waiting);
                        is_sought = true;
                        continue;
                    }
                }
            }
            let Some(opened) = &mut session else { continue };
            let count = waiting.len().min(BATCH);
            if let Err(error) = self.turn(&mut opened.connection, &mut waiting, count) {
                broken = Some(opened.name.clone());
                (session, is_sought) = (None, true);
                self.node.is_away(Some(error.to_string()));
                self.give_up(&mut waiting);
            }
        }
    }

    /// Connects, and has the node close the connection `broken`.
    fn open(&self, broken: Option<&Name>) -> RedisResult<Session> {
        let mut connection = self.node.connect()?;
        let id = redis::cmd("CLIENT").arg("ID").query(&mut connection)?;
        let about: String = redis::cmd("INFO").arg("server").query(&mut connection)?;
        let run = about.lines().find_map(|line| line.strip_prefix("run_id:")).unwrap_or_default();
        let name = Name { run: run.to_owned(), id };
        if let Some(broken) = broken.filter(|broken| broken.run == name.run) {
            // 0: there is no such connection any more.
            let mut kill = redis::cmd("CLIENT");
            let _: i64 = kill.arg("KILL").arg("ID").arg(broken.id).query(&mut connection)?;
        }
        connection.set_read_timeout(Some(SILENCE_LIMIT))?;
        Ok(Session { connection, name })
    }

    /// Answers what need not wait for the node.
    fn give_up(&self, waiting: &mut Vec<Job>) {
        waiting.retain(|job| {
            if !job.waits {
                job.lane.answer(job.operation, job.attempt, Err(Fault::Timeout), None);
            }
            job.waits
        });
    }

    /// Sends the first `count` jobs and takes their answers. With an error, those that were not
    /// answered still wait.
    fn turn(&self, connection: &mut Connection, waiting: &mut Vec<Job>, count: usize) -> RedisResult<()> {
        let mut commands = Pipeline::with_capacity(count);
        let mut sealed = [0; SEALED];
        let mut page = [0; PAGE_SIZE];
        let mut sent = 0;
        for job in &waiting[..count] {
            match job.kind {
                Kind::Read(_) => commands.cmd("GET").arg(self.core.key(job.slot)),
                // A write whose lane has gone since has no effect: an empty place keeps the order.
                Kind::Write(_) if !job.lane.copy_page(job.operation, job.attempt, &mut page) => {
                    commands.cmd("PING")
                }
                Kind::Write(stamp) => {
                    self.core.seal.close(job.slot, stamp, &page, &mut sealed);
                    commands.cmd("SET").arg(self.core.key(job.slot)).arg(&sealed[..])
                }
            };
            sent += 1;
        }
        connection.send_packed_command(&commands.get_packed_pipeline())?;
        let mut answered = 0;
        let outcome = loop {
            if answered == sent {
                break Ok(());
            }
            match connection.recv_response() {
                // A node that is starting, or is not the master, will do it later.
                Ok(Value::ServerError(error)) if is_passing(error.code()) => break Err(error.into()),
                Ok(value) => self.answer(&waiting[answered], value, &mut page),
                Err(error) => break Err(error),
            }
            answered += 1;
        };
        waiting.drain(..answered);
        outcome
    }

    /// Answers a job by what the node said.
    fn answer(&self, job: &Job, value: Value, page: &mut PageBytes) {
        let core = &self.core;
        let result = match (job.kind, value) {
            (Kind::Write(_), Value::Okay | Value::SimpleString(_)) => Ok(()),
            (Kind::Read(_), Value::BulkString(sealed)) => {
                match (core.seal.open(job.slot, &sealed, page), job.kind) {
                    (Ok(stamp), Kind::Read(least)) if stamp >= least => Ok(()),
                    _ => {
                        core.counts.forged.fetch_add(1, Ordering::Relaxed);
                        Err(Fault::Corrupt)
                    }
                }
            }
            (Kind::Read(0), Value::Nil) => {
                page.fill(0);
                Ok(())
            }
            (Kind::Read(_), Value::Nil) => {
                core.counts.lost.fetch_add(1, Ordering::Relaxed);
                Err(Fault::Lost)
            }
            (_, Value::ServerError(error)) if error.code() == "OOM" => Err(Fault::Io(libc::ENOSPC)),
            _ => Err(Fault::Io(libc::EIO)),
        };
        let read = matches!(job.kind, Kind::Read(_)) && result.is_ok();
        job.lane.answer(job.operation, job.attempt, result, read.then_some(page));
    }
}

/// Whether a node's error may go away by itself.
fn is_passing(code: &str) -> bool {
    ["LOADING", "BUSY", "MASTERDOWN", "TRYAGAIN", "READONLY", "CLUSTERDOWN"].contains(&code)
}
