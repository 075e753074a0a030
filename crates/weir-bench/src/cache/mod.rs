//! `weir bench cache`: random 4 KiB requests on a stripe of disks. They go to the stripe directly,
//! through a cache over the stripe (`raw`), and through a cache over a log on it.
//!
//! The disks are simulated in memory, by one model that all contenders use. The model limits the
//! disks' operations and bytes a second. So the figures say nothing about io_uring, the cipher or
//! FUSE. One thread makes the requests, and holds a fixed number of them in flight. The cache's
//! write-back and the log's cleaner have threads of their own. At first the disks have no limits:
//! each contender is filled, and then written at random until its log is cleaned at a steady rate.
//! Then the limits apply, and after a while the measurement begins.

mod disks;

use crate::report::{Goal, Report, Row, Runs, percentile};
use crate::steps::Steps;
use disks::{DiskStore, Disks, Limits, Traffic};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};
use weir_cache::{Cache, CacheError, CacheLane, WriteBack};
use weir_core::{ByteSize, PAGE_SIZE, PageBytes, PageNo, Slot};
use weir_device::{PageDevice as _, PageLane as _};
use weir_log::{Cleaner, Log, LogError, LogStatus};
use weir_store::{Fault, Host, Lane, OpenError, Progress, Store, StoreUrl, VramUrl};

/// Number of requests that are in flight together.
const DEPTH: usize = 256;
/// Time for which the disks' limits apply before the measurement begins.
const SETTLES: Duration = Duration::from_secs(2);

/// The disks of the benchmark, and the time of a measurement.
#[derive(Clone, Debug)]
pub struct Options {
    /// The size of all simulated disks together, in bytes.
    pub size: ByteSize,
    /// Number of simulated disks.
    pub members: u32,
    /// Number of operations a second that each disk can do.
    pub operations: u64,
    /// Number of bytes a second that each disk can move.
    pub bytes: ByteSize,
    /// The card whose memory is the cache; `None`: host memory. Its size is chosen here.
    pub card: Option<VramUrl>,
    /// Time for which each contender is measured.
    pub time: Duration,
    /// Number of runs.
    pub runs: usize,
}

/// The reason why nothing could be measured.
#[derive(Debug, thiserror::Error)]
pub enum CacheBenchError {
    /// There is no memory for the disks or for a lane.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The cache failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The log over the disks failed.
    #[error(transparent)]
    Log(#[from] LogError),
    /// A contender's request failed.
    #[error("a request of {contender} failed: {fault}")]
    Fault {
        /// The name of the contender whose request failed.
        contender: &'static str,
        /// The fault that ended the contender's request.
        fault: Fault,
    },
}

/// The distribution by which requests choose their pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Law {
    Uniform,
    Zipf,
}

/// A case: the load, and how full the disks are.
#[derive(Clone, Copy, Debug)]
struct Case {
    name: &'static str,
    law: Law,
    write: bool,
    /// How full the disks are, in percent.
    full: u32,
    /// The goal for write amplification.
    amplification: f64,
}

const CASES: [Case; 5] = [
    Case { name: "uniform_50_write", law: Law::Uniform, write: true, full: 50, amplification: 1.3 },
    Case { name: "zipf_50_write", law: Law::Zipf, write: true, full: 50, amplification: 1.3 },
    Case { name: "uniform_80_write", law: Law::Uniform, write: true, full: 80, amplification: 2.7 },
    Case { name: "zipf_80_write", law: Law::Zipf, write: true, full: 80, amplification: 1.5 },
    Case { name: "zipf_80_read", law: Law::Zipf, write: false, full: 80, amplification: 0.0 },
];

const CONTENDERS: [&str; 3] = ["bare", "raw", "log"];

/// The figures of one of the compared devices.
#[derive(Clone, Copy, Default, Debug)]
struct Figures {
    per_second: f64,
    p99_us: f64,
    long_per_cent: f64,
    amplification: f64,
    /// Number of pages that were written to the disks for each page that was written.
    disk_pages: f64,
}

/// Runs every case with every compared device.
///
/// # Errors
/// Fails when memory cannot be allocated, or when a request fails.
pub fn run(options: &Options) -> Result<Report, CacheBenchError> {
    let mut report = Report::new("cache", options.runs);
    let steps = Steps::new(CASES.len() * options.runs * CONTENDERS.len());
    for case in CASES {
        steps.part(case.name);
        let mut figures: [Vec<Figures>; 3] = Default::default();
        for run in 0..options.runs {
            for (contender, figures) in figures.iter_mut().enumerate() {
                figures.push(measure(options, case, CONTENDERS[contender], run as u64)?);
                steps.end();
            }
        }
        report.rows.extend(rows(case, &figures));
    }
    Ok(report)
}

fn rows(case: Case, [bare, raw, log]: &[Vec<Figures>; 3]) -> Vec<Row> {
    let median = |figures: &[Figures], of: fn(&Figures) -> f64| {
        let mut runs = Runs::default();
        figures.iter().for_each(|figures| runs.push(of(figures)));
        runs.median()
    };
    let id = |suffix: &str| format!("{}{suffix}", case.name);
    let rate = |figures| median(figures, |of| of.per_second);
    let p99 = |figures| median(figures, |of| of.p99_us);
    let goal = if case.write { Goal::Ratio(5.0) } else { Goal::Ratio(3.0) };
    let mut rows = vec![
        Row::higher(id(""), "per_s", rate(log)).beside("bare", rate(bare)).goal(goal),
        Row::higher(id("_raw"), "per_s", rate(raw)).beside("bare", rate(bare)),
        Row::lower(id(""), "p99_us", p99(log)).beside("bare", p99(bare)),
        Row::lower(id("_raw"), "p99_us", p99(raw)).beside("bare", p99(bare)),
    ];
    if case.write {
        let long = |figures| median(figures, |of| of.long_per_cent);
        let amplification = median(log, |of| of.amplification);
        rows.push(Row::higher(id(""), "per_cent_in_long_writes", long(log)).goal(Goal::Value(95.0)));
        let disk_pages = |figures| median(figures, |of| of.disk_pages);
        let row = Row::lower(id(""), "disk_pages_a_page", disk_pages(log));
        rows.push(row.beside("bare", disk_pages(bare)));
        let row = Row::lower(id(""), "amplification", amplification);
        rows.push(row.goal(Goal::Value(case.amplification)));
    }
    rows
}

fn measure(
    options: &Options,
    case: Case,
    contender: &'static str,
    seed: u64,
) -> Result<Figures, CacheBenchError> {
    let slots = (options.size.0 / PAGE_SIZE as u64) as u32;
    let limits = Limits { operations: options.operations, bytes: options.bytes.0 };
    let disks = Disks::new(slots, options.members, limits)?;
    let below: Arc<dyn Store> = Arc::new(DiskStore(Arc::clone(&disks)));
    let pages = (u64::from(slots) * u64::from(case.full) / 100) as u32;
    let requests = Requests::new(case, pages, seed, contender);
    if contender == "bare" {
        let lane = Bare { lane: below.lane(DEPTH)? };
        return requests.run(lane, &disks, None, options.time);
    }
    let log = if contender == "log" {
        let config = weir_log::Config { pages, members: options.members, lanes: 3, ..Default::default() };
        Some(Log::create(Arc::clone(&below), config)?)
    } else {
        None
    };
    let home = log.as_ref().map_or(below, |log| Arc::new(log.clone()) as _);
    // The cache has frames for a quarter of the working set, and 1024 more for the pages that lanes
    // have under way.
    let frames = pages / 4 + 1024;
    let store: Arc<dyn Store> = match &options.card {
        None => Arc::new(Host::new(frames)?),
        Some(card) => {
            let size = Some(ByteSize(u64::from(frames) * PAGE_SIZE as u64));
            weir_store::open(&StoreUrl::Vram(VramUrl { size, ..card.clone() }))?
        }
    };
    let mut config = weir_cache::Config { lanes: 1, depth: DEPTH, stream_pages: 0, ..Default::default() };
    if log.is_some() {
        config = config.with_dirty(weir_cache::Config::DIRTY_BEFORE_SCRATCH_LOG);
    }
    let cache = Cache::create(store, home, config)?;
    let lane = Cached { lane: cache.open()? };
    let mut write_back = WriteBack::open(&cache)?;
    let mut cleaner = log.as_ref().map(Cleaner::open).transpose()?;
    let ends = AtomicBool::new(false);
    // The write-back and the cleaner wait on a descriptor that could wake them early. This
    // descriptor is never readable, so each wait takes its full time.
    let quiet = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)
        .map_err(|errno| OpenError::io("bench", "cannot make an eventfd", errno))?;
    std::thread::scope(|scope| {
        let (ends, quiet) = (&ends, &quiet);
        scope.spawn(move || {
            while !ends.load(SeqCst) {
                let now = Instant::now();
                let next = write_back.step(now);
                let soon = match next {
                    weir_cache::Next::Work(_) => weir_cache::Next::Work(Some(now + SETTLES)),
                    next => next,
                };
                write_back.wait(soon, std::os::fd::AsFd::as_fd(quiet), now);
            }
        });
        if let Some(cleaner) = &mut cleaner {
            scope.spawn(move || {
                while !ends.load(SeqCst) {
                    let next = cleaner.step(Instant::now());
                    cleaner.wait(next, std::os::fd::AsFd::as_fd(quiet));
                }
            });
        }
        let figures = requests.run(lane, &disks, log.as_ref(), options.time);
        ends.store(true, SeqCst);
        figures
    })
}

/// One of the compared devices: Weir's cache, or one of its controls.
trait Target {
    /// Begins a request, as a lane does.
    fn begin(&mut self, ticket: u32, page: u32, write: bool, bytes: &mut PageBytes) -> Progress;
    /// Submits the requests that were begun, and hands over those that have ended.
    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(u32, Result<(), Fault>));
    /// Sleeps until there is something to hand over, for at most a millisecond.
    fn sleep(&self);
}

struct Bare {
    lane: Box<dyn Lane>,
}

impl Target for Bare {
    fn begin(&mut self, ticket: u32, page: u32, write: bool, bytes: &mut PageBytes) -> Progress {
        match write {
            true => self.lane.write(ticket, Slot(page), bytes),
            false => self.lane.read(ticket, Slot(page), bytes),
        }
    }

    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(u32, Result<(), Fault>)) {
        self.lane.submit();
        self.lane.poll(now, &mut |end| done(end.ticket, end.result));
    }

    fn sleep(&self) {
        disks::sleep(self.lane.wake_fd().as_slice());
    }
}

struct Cached {
    lane: CacheLane,
}

impl Target for Cached {
    fn begin(&mut self, ticket: u32, page: u32, write: bool, bytes: &mut PageBytes) -> Progress {
        match write {
            true => self.lane.write(ticket, PageNo(page), bytes),
            false => self.lane.read(ticket, PageNo(page), bytes),
        }
    }

    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(u32, Result<(), Fault>)) {
        self.lane.submit();
        self.lane.poll(now, &mut |end| done(end.ticket, end.result));
    }

    fn sleep(&self) {
        if self.lane.must_poll() {
            std::thread::sleep(Duration::from_micros(50));
        } else {
            disks::sleep(&self.lane.wake_fds().collect::<Vec<_>>());
        }
    }
}

/// The requests to one of the compared devices.
struct Requests {
    case: Case,
    contender: &'static str,
    pages: u32,
    law: Option<Zipf>,
    state: u64,
}

/// A request that is under way or waits for room.
#[derive(Clone, Copy)]
struct Request {
    page: u32,
    since: Instant,
    is_begun: bool,
}

impl Requests {
    fn new(case: Case, pages: u32, seed: u64, contender: &'static str) -> Self {
        let law = (case.law == Law::Zipf).then(|| Zipf::new(pages, 0.99));
        Requests { case, contender, pages, law, state: seed }
    }

    fn page(&mut self) -> u32 {
        let random = random(&mut self.state);
        match &self.law {
            Some(law) => law.rank(random).wrapping_mul(0x9e37_79b1) % self.pages,
            None => ((u128::from(random) * u128::from(self.pages)) >> 64) as u32,
        }
    }

    fn run(
        mut self,
        mut target: impl Target,
        disks: &Disks,
        log: Option<&Log>,
        time: Duration,
    ) -> Result<Figures, CacheBenchError> {
        // Write each page once. Then write random pages, until the log's segments are in their
        // steady state.
        let mut next = 0;
        self.issue(
            &mut target,
            true,
            &mut |_| {
                next += 1;
                Some(next - 1)
            },
            self.pages.into(),
            None,
        )?;
        let more = if log.is_some() { 3 } else { 1 };
        self.issue(
            &mut target,
            true,
            &mut |requests| Some(requests.page()),
            u64::from(self.pages) * more,
            None,
        )?;
        disks.limit(true);
        let random = &mut |requests: &mut Requests| Some(requests.page());
        self.issue(&mut target, self.case.write, random, u64::MAX, Some(SETTLES))?;
        let before = (disks.traffic(), log.map(Log::status));
        let mut latencies = self.issue(&mut target, self.case.write, random, u64::MAX, Some(time))?;
        let after = (disks.traffic(), log.map(Log::status));
        disks.limit(false);
        Ok(Figures {
            per_second: latencies.len() as f64 / time.as_secs_f64(),
            p99_us: percentile(&mut latencies, 99.0) as f64 / 1e3,
            disk_pages: (after.0.written - before.0.written) as f64
                / (latencies.len().max(1) * PAGE_SIZE) as f64,
            long_per_cent: long_per_cent(&before.0, &after.0),
            amplification: before
                .1
                .zip(after.1)
                .map_or(1.0, |(before, after)| amplification(&before, &after)),
        })
    }

    /// Issues requests until `count` of them have ended, or until `time` is over. Returns the
    /// nanoseconds that each request took.
    fn issue(
        &mut self,
        target: &mut impl Target,
        write: bool,
        choose: &mut dyn FnMut(&mut Requests) -> Option<u32>,
        count: u64,
        time: Option<Duration>,
    ) -> Result<Vec<u64>, CacheBenchError> {
        let mut waiting: [Option<Request>; DEPTH] = [None; DEPTH];
        let mut latencies = Vec::with_capacity(if time.is_some() { 1 << 22 } else { 0 });
        let (begun, mut issued, mut ended) = (Instant::now(), 0u64, 0u64);
        let mut bytes = [0; PAGE_SIZE];
        let keep = time.is_some();
        let mut is_over = false;
        while ended < count && !(is_over && waiting.iter().all(Option::is_none)) {
            let now = Instant::now();
            is_over |= time.is_some_and(|time| now >= begun + time);
            let mut went = false;
            for (ticket, slot) in waiting.iter_mut().enumerate() {
                if slot.is_none() && !is_over && issued < count {
                    let Some(page) = choose(self) else { continue };
                    *slot = Some(Request { page, since: now, is_begun: false });
                    issued += 1;
                }
                let Some(request) = slot.as_mut().filter(|request| !request.is_begun) else { continue };
                bytes[..8].copy_from_slice(&(u64::from(request.page) << 32 | issued).to_le_bytes());
                match target.begin(ticket as u32, request.page, write, &mut bytes) {
                    Progress::Full => {}
                    Progress::Queued => request.is_begun = true,
                    Progress::Done(result) => {
                        result
                            .map_err(|fault| CacheBenchError::Fault { contender: self.contender, fault })?;
                        if keep && !is_over {
                            latencies.push(request.since.elapsed().as_nanos() as u64);
                        }
                        (ended, went, *slot) = (ended + 1, true, None);
                    }
                }
            }
            let mut failed = Ok(());
            let now = Instant::now();
            target.poll(now, &mut |ticket, result| {
                if let Some(request) = waiting[ticket as usize].take()
                    && keep
                    && !is_over
                {
                    latencies.push((now - request.since).as_nanos() as u64);
                }
                failed = failed.and(result);
                (ended, went) = (ended + 1, true);
            });
            failed.map_err(|fault| CacheBenchError::Fault { contender: self.contender, fault })?;
            if !went {
                target.sleep();
            }
        }
        Ok(latencies)
    }
}

fn long_per_cent(before: &Traffic, after: &Traffic) -> f64 {
    let written = after.written - before.written;
    100.0 * (after.long - before.long) as f64 / written.max(1) as f64
}

fn amplification(before: &LogStatus, after: &LogStatus) -> f64 {
    let all = |status: &LogStatus| status.written + status.moved + status.summaries;
    (all(after) - all(before)) as f64 / (after.written - before.written).max(1) as f64
}

/// Draws ranks by Zipf's law (Gray et al., *Quickly generating billion-record synthetic databases*,
/// SIGMOD 1994).
struct Zipf {
    count: f64,
    theta: f64,
    zeta: f64,
    eta: f64,
}

impl Zipf {
    fn new(count: u32, theta: f64) -> Self {
        let zeta = (1..=count).map(|n| f64::from(n).powf(-theta)).sum::<f64>();
        let two = 1.0 + 0.5f64.powf(theta);
        let eta = (1.0 - (2.0 / f64::from(count)).powf(1.0 - theta)) / (1.0 - two / zeta);
        Zipf { count: count.into(), theta, zeta, eta }
    }

    fn rank(&self, random: u64) -> u32 {
        let unit = (random >> 11) as f64 / (1u64 << 53) as f64;
        let scaled = unit * self.zeta;
        if scaled < 1.0 {
            0
        } else if scaled < 1.0 + 0.5f64.powf(self.theta) {
            1
        } else {
            (self.count * (self.eta * (unit - 1.0) + 1.0).powf(1.0 / (1.0 - self.theta))) as u32
        }
    }
}

/// The next random number, by SplitMix64.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_follow_the_law() {
        let (law, mut state, mut counts) = (Zipf::new(1000, 0.99), 1, vec![0u32; 1000]);
        for _ in 0..100_000 {
            counts[law.rank(random(&mut state)) as usize] += 1;
        }
        // By Zipf's law with exponent 0.99 the first rank has a share of 1/zeta, and the second
        // about half of that.
        let first = 100_000.0 / law.zeta;
        assert!((f64::from(counts[0]) - first).abs() < first * 0.1, "{} of {first}", counts[0]);
        assert!((f64::from(counts[1]) - first / 2.0).abs() < first * 0.1, "{}", counts[1]);
        assert_eq!(counts.iter().sum::<u32>(), 100_000);
    }

    #[test]
    fn every_contender_does_what_it_is_asked() {
        let options = Options {
            size: ByteSize(256 << 20),
            members: 4,
            operations: 50_000,
            bytes: ByteSize(4 << 30),
            card: None,
            time: Duration::from_millis(50),
            runs: 1,
        };
        for contender in CONTENDERS {
            let figures = measure(&options, CASES[0], contender, 1).unwrap();
            assert!(figures.per_second > 0.0, "{contender}: {figures:?}");
        }
    }
}
