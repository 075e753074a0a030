//! Reads of a page from a node of a fleet, beside GETs of 4 KiB from the same node by the crate
//! `redis`.
//!
//! Reads and GETs take turns, one at a time, so that other load of the machine slows both alike. In
//! the rows `_asleep` the thread waits for the lane's descriptor, as a program does and as the
//! crate `redis` does. In the rows `_spinning` it polls.

use super::content::Random;
use super::load::{Kind, Pages, Part};
use super::scenarios::middle_and_tail;
use super::{BenchError, Plan};
use crate::report::{Goal, Row, Runs};
use crate::steps::Steps;
use redis::{Connection, ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _};
use redis::{RedisConnectionInfo, RedisResult};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, PageBytes};
use weir_store::{Done, Lane, POLL_EVERY, Progress, RemoteUrl, StoreUrl, Ticket};

/// Number of pages that are read in random order: 64 MiB. The crate `redis` reads as many values.
const PAGES: u32 = 1 << 14;
/// Number of reads in a run. The run has as many GETs.
const READS: usize = 20_000;
/// Microseconds by which a page may take longer than a GET by the crate `redis`.
const OVER_GET_US: f64 = 10.0;

/// Measures reads with each way of waiting: asleep, and spinning. A store that is in no fleet has
/// no such rows.
///
/// # Errors
/// Fails when the store or the client fails, or a page is wrong.
pub fn rows(plan: &Plan) -> Result<Vec<Row>, BenchError> {
    let mut rows = Vec::new();
    let StoreUrl::Remote(url) = &plan.url else { return Ok(rows) };
    let store = weir_store::open(&plan.url)?;
    let mut client = Client::open(url)?;
    let mut ways = vec![("remote_read_asleep", true), ("remote_read_spinning", false)];
    ways.retain(|(id, _)| plan.is_wanted(id));
    let steps = Steps::new(ways.len() * plan.runs);
    for (id, asleep) in ways {
        steps.part(id);
        let count = if plan.short { READS / 100 } else { READS };
        let [mut middle, mut tail, mut get_middle, mut get_tail, mut over] = [const { Vec::new() }; 5];
        for run in 0..plan.runs {
            let mut lane = Waiter { lane: store.lane(16)?, asleep };
            let mut part = Part::new(0, PAGES.min(store.slots()), run as u64);
            part.fill(&mut lane)?;
            let (mut ours, mut gets) = (Vec::new(), Vec::new());
            for turn in 0..count {
                // The read goes first in every second turn, and the GET in the others.
                for first in [turn % 2 == 0, turn % 2 != 0] {
                    if first {
                        ours.push(part.once(&mut lane, Kind::Read)?.as_nanos() as u64);
                    } else {
                        gets.push(client.get()?.as_nanos() as u64);
                    }
                }
            }
            let (p50, p99) = middle_and_tail(ours);
            let (get_p50, get_p99) = middle_and_tail(gets);
            middle.push(p50);
            tail.push(p99);
            get_middle.push(get_p50);
            get_tail.push(get_p99);
            over.push(p50 - get_p50);
            steps.end();
        }
        let [middle, tail, get_middle, get_tail, over] = [middle, tail, get_middle, get_tail, over]
            .map(|runs| runs.into_iter().collect::<Runs>().median());
        let over = Row::lower(id, "p50_over_get_us", over);
        rows.push(if asleep { over.goal(Goal::Value(OVER_GET_US)) } else { over });
        rows.push(Row::lower(id, "p50_us", middle).beside("client-get", get_middle));
        rows.push(Row::lower(id, "p99_us", tail).beside("client-get", get_tail));
    }
    client.clean_up()?;
    // Other load on the machine makes the figures less reliable. So one row shows the machine's
    // load.
    rows.extend(load_average().map(|load| Row::lower("machine", "load_1m", load)));
    Ok(rows)
}

fn load_average() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()
}

/// A lane, and the way in which its owner waits for completions: asleep on the lane's descriptors,
/// or by polling.
struct Waiter {
    lane: Box<dyn Lane>,
    asleep: bool,
}

impl Pages for Waiter {
    fn plan(&mut self, reads: usize, writes: usize) {
        self.lane.plan(reads, writes);
    }
    fn write(&mut self, ticket: Ticket, number: u32, page: &PageBytes) -> Progress {
        self.lane.write(ticket, number, page)
    }
    fn read(&mut self, ticket: Ticket, number: u32, page: &mut PageBytes) -> Progress {
        self.lane.read(ticket, number, page)
    }
    fn submit(&mut self) {
        self.lane.submit();
    }
    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>)) {
        let limit = Timespec { tv_sec: 0, tv_nsec: POLL_EVERY.subsec_nanos().into() };
        if let Some(fd) = self.lane.wake_fd().filter(|_| self.asleep) {
            // The result of the wait does not matter, because the lane is polled in any case.
            let _ = poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&limit));
        }
        self.lane.poll(now, done);
    }
}

/// The crate `redis` by itself, with values of its own on the store's first node.
struct Client {
    connection: Connection,
    prefix: String,
    random: Random,
}

impl Client {
    fn open(url: &RemoteUrl) -> Result<Self, BenchError> {
        let (host, port) = url.nodes[0].rsplit_once(':').expect("the URL's parser looked");
        let address = ConnectionAddr::Tcp(host.to_owned(), port.parse().expect("likewise"));
        let mut login = RedisConnectionInfo::default();
        if let Some(user) = &url.user {
            login = login.set_username(user);
        }
        if let Some(path) = &url.password_file {
            let text = std::fs::read_to_string(path).map_err(BenchError::Process)?;
            login = login.set_password(text.lines().next().unwrap_or_default());
        }
        let info: ConnectionInfo = address.into_connection_info()?.set_redis_settings(login);
        let mut client = Client {
            connection: redis::Client::open(info)?.get_connection()?,
            prefix: format!("weir-bench:{}:", std::process::id()),
            random: Random::new(1),
        };
        for value in 0..PAGES {
            let key = format!("{}{value}", client.prefix);
            let content = [value as u8; PAGE_SIZE];
            let _: () = redis::cmd("SET").arg(key).arg(&content[..]).query(&mut client.connection)?;
        }
        Ok(client)
    }

    /// Gets a value by the crate `redis`. Returns the time that this took.
    fn get(&mut self) -> Result<Duration, BenchError> {
        let value = self.random.below(PAGES);
        let since = Instant::now();
        let key = format!("{}{value}", self.prefix);
        let content: Vec<u8> = redis::cmd("GET").arg(key).query(&mut self.connection)?;
        let took = since.elapsed();
        let is_right = content.len() == PAGE_SIZE && content[0] == value as u8;
        if is_right { Ok(took) } else { Err(BenchError::Mismatch { number: value, generation: 0 }) }
    }

    fn clean_up(&mut self) -> RedisResult<()> {
        for first in (0..PAGES).step_by(512) {
            let mut unlink = redis::cmd("UNLINK");
            (first..first + 512).for_each(|value| {
                unlink.arg(format!("{}{value}", self.prefix));
            });
            let _: i64 = unlink.query(&mut self.connection)?;
        }
        Ok(())
    }
}
