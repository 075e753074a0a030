//! `weir bench share`: pages used in place beside the same pages over NBD, with one volume in one
//! run.
//!
//! Both servers run in this process and spin equally long after a request. The figures count the
//! CPU time of servers and client together. In the rows `asleep`, no thread spins: they show the
//! cost of a request that comes unexpectedly. In the rows on one CPU, servers and client share that
//! CPU, so both transports have the same CPU time. Each transport is measured there with spinning
//! and with sleeping servers, and its better rate counts.
//!
//! The rate per CPU is measured with several numbers of requests in flight, each with spinning and
//! with sleeping servers. Each transport's best rate counts.
//!
//! The client reads the first bytes of each page. In the rows `_used` it reads whole pages.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use weir_core::PAGE_SIZE;
use weir_core::log::{Level, to_stderr};
use weir_export::nbd::client::Operation;
use weir_export::nbd::{self, Listen};
use weir_export::share;
use weir_share::{Client, Options};
use weir_store::Host;
use weir_volume::Volume;

use crate::report::{Goal, Report, Row, Runs, percentile};
use crate::steps::Steps;

/// The plan of the share benchmark.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Number of pages of the volume, all written.
    pub pages: u32,
    /// Number of reads for each latency. The reads go one after the other.
    pub singles: u32,
    /// Number of reads for each rate. Many of them are in flight at a time.
    pub reads: u32,
    /// Number of reads in flight for the rates.
    pub depth: u32,
    /// Time that servers spin for the next request before they sleep, and that the share client
    /// spins for its completion.
    pub spin: Duration,
    /// Number of rounds; the figures are medians.
    pub rounds: usize,
}

impl Default for Plan {
    fn default() -> Self {
        Plan {
            pages: 65_536,
            singles: 20_000,
            reads: 200_000,
            depth: 32,
            spin: Duration::from_micros(50),
            rounds: 5,
        }
    }
}

/// The reason why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The volume or a server could not be made.
    #[error("cannot set up the {what}")]
    SetUp {
        /// The name of the thing that could not be set up.
        what: &'static str,
        /// The error that prevented the set-up.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A client failed.
    #[error("the {what} client failed")]
    Client {
        /// The name of the client's transport.
        what: &'static str,
        /// The error that ended the client.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

fn set_up<E: Into<Box<dyn std::error::Error + Send + Sync>>>(what: &'static str) -> impl Fn(E) -> RunError {
    move |source| RunError::SetUp { what, source: source.into() }
}

fn client<E: Into<Box<dyn std::error::Error + Send + Sync>>>(what: &'static str) -> impl Fn(E) -> RunError {
    move |source| RunError::Client { what, source: source.into() }
}

/// A transport under measurement.
trait Transport {
    /// Reads `count` pages, `depth` at a time. With a depth of one, notes the time of each.
    fn read(&mut self, count: u32, depth: u32, latencies: &mut Vec<u64>) -> Result<(), RunError>;
}

/// Page numbers in an order that a cache cannot predict (a full-period congruence, Knuth 3.2.1.2).
struct Pages {
    at: u32,
    pages: u32,
}

impl Pages {
    fn next(&mut self) -> u32 {
        self.at = self.at.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((u64::from(self.at) * u64::from(self.pages)) >> 32) as u32
    }
}

struct Shared {
    client: Client,
    pages: Pages,
    whole: bool,
}

impl Transport for Shared {
    fn read(&mut self, count: u32, depth: u32, latencies: &mut Vec<u64>) -> Result<(), RunError> {
        let failed = client::<weir_share::Error>("share");
        let (mut asked, mut done, mut begun) = (0, 0, Instant::now());
        while done < count {
            if self.client.in_flight() * 2 <= depth {
                while self.client.in_flight() < depth && asked < count {
                    let page = self.pages.next();
                    self.client.ask_read(page, page.into()).map_err(&failed)?;
                    asked += 1;
                }
                self.client.submit().map_err(&failed)?;
            }
            let completion = self.client.wait().map_err(&failed)?;
            let lease =
                completion.result.map_err(client("share"))?.ok_or("no page").map_err(client("share"))?;
            check(completion.tag, self.client.page(&lease), self.whole);
            self.client.give_later(lease).map_err(&failed)?;
            done += 1;
            if depth == 1 {
                latencies.push(begun.elapsed().as_nanos() as u64);
                begun = Instant::now();
            }
        }
        self.client.submit().map_err(&failed)
    }
}

struct Nbd {
    client: nbd::client::Client,
    pages: Pages,
    whole: bool,
}

impl Transport for Nbd {
    fn read(&mut self, count: u32, depth: u32, latencies: &mut Vec<u64>) -> Result<(), RunError> {
        let failed = client::<nbd::client::ClientError>("nbd");
        let (mut asked, mut done, mut begun) = (0, 0, Instant::now());
        let mut tags = std::collections::HashMap::new();
        while done < count {
            if self.client.in_flight() as u32 * 2 <= depth {
                while (self.client.in_flight() as u32) < depth && asked < count {
                    let page = self.pages.next();
                    let operation = Operation::read(u64::from(page) * PAGE_SIZE as u64, PAGE_SIZE as u32);
                    tags.insert(self.client.queue(operation), page);
                    asked += 1;
                }
                self.client.send().map_err(&failed)?;
            }
            let reply = self.client.receive().map_err(&failed)?;
            let page = tags.remove(&reply.cookie).ok_or("an unknown reply").map_err(client("nbd"))?;
            check(page, &reply.data, self.whole);
            done += 1;
            if depth == 1 {
                latencies.push(begun.elapsed().as_nanos() as u64);
                begun = Instant::now();
            }
        }
        Ok(())
    }
}

/// Checks that a page is the expected one, by the number with which it begins. If `whole`, also
/// reads all of its words and checks their sum, as a program that uses the page would read them.
fn check(page: u32, bytes: &[u8], whole: bool) {
    assert_eq!(bytes[..4], page.to_le_bytes(), "another page came than was asked for");
    if whole {
        let sum = bytes.chunks_exact(8).fold(0u64, |sum, chunk| {
            sum.wrapping_add(u64::from_le_bytes(chunk.try_into().expect("8 of 8 bytes")))
        });
        let count = PAGE_SIZE as u64 / 8;
        let expected = u64::from(page) * count + ((count * (count - 1) / 2) << 32);
        assert_eq!(sum, expected, "page {page} is not what was written");
    }
}

/// The CPU time of this process.
fn cpu() -> Duration {
    let usage = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(usage.tv_sec as u64, usage.tv_nsec as u32)
}

/// The figures of one transport. Each figure has one value for every run.
#[derive(Default)]
struct Figures {
    p50: Runs,
    p99: Runs,
    kiops: Runs,
    kiops_per_cpu: Runs,
}

impl Figures {
    fn measure(&mut self, transport: &mut impl Transport, plan: &Plan) -> Result<(), RunError> {
        let mut latencies = Vec::with_capacity(plan.singles as usize);
        transport.read(plan.singles, 1, &mut latencies)?;
        self.p50.push(percentile(&mut latencies, 50.0) as f64 / 1e3);
        self.p99.push(percentile(&mut latencies, 99.0) as f64 / 1e3);
        let (begun, used) = (Instant::now(), cpu());
        transport.read(plan.reads, plan.depth, &mut latencies)?;
        let thousands = f64::from(plan.reads) / 1e3;
        self.kiops.push(thousands / begun.elapsed().as_secs_f64());
        self.kiops_per_cpu.push(thousands / (cpu() - used).as_secs_f64());
        Ok(())
    }
}

/// The indices of the three transports' figures.
const FRAMES: usize = 0;
const IN_PLACE: usize = 1;
const NBD: usize = 2;
/// Largest number of loans that the share server gives out at a time.
const LENT: u32 = 1024;
/// The numbers of reads in flight that are tried for the rate per CPU. Each transport's best one
/// counts.
const DEPTHS: [u32; 4] = [16, 32, 64, 128];

/// The conditions of a measurement.
#[derive(Clone, Copy)]
struct Terms {
    /// Time that servers and share clients spin before they sleep.
    spin: Duration,
    /// Whether the client reads the whole of each page.
    whole: bool,
    /// Whether servers and client share one CPU.
    one_cpu: bool,
}

/// Runs the benchmark by `plan`.
///
/// # Errors
/// Fails with a [`RunError`], which names the thing that could not be set up, or the client that
/// failed.
pub fn run(plan: &Plan) -> Result<Report, RunError> {
    let config = weir_volume::Config { pages: plan.pages, lanes: 16, depth: 64 };
    let store = Host::new(config.slots()).map_err(set_up("store"))?;
    let volume = Volume::create(config, vec![Arc::new(store)]).map_err(set_up("volume"))?;
    let mut lane = volume.lane().map_err(set_up("volume"))?;
    for page in 0..plan.pages {
        let mut bytes = [0; PAGE_SIZE];
        for (chunk, at) in bytes.chunks_exact_mut(8).zip(0u32..) {
            chunk[..4].copy_from_slice(&page.to_le_bytes());
            chunk[4..].copy_from_slice(&at.to_le_bytes());
        }
        let _ = lane.write(0, weir_core::PageNo(page), &bytes);
        lane.submit();
    }
    drop(lane);
    let mut report = Report::new("share", plan.rounds);
    // Number of measurements: three of latencies, two for each depth (spinning and sleeping
    // servers), and two on one CPU.
    let steps = Steps::new((3 + DEPTHS.len() * 2 + 2) * plan.rounds);
    steps.part("spinning");
    let spinning = Terms { spin: plan.spin, whole: false, one_cpu: false };
    let figures = measure(&volume, plan, spinning, &steps)?;
    rows(&mut report, "", &figures, Some(0.5));
    steps.part("asleep");
    let asleep = measure(&volume, plan, Terms { spin: Duration::ZERO, ..spinning }, &steps)?;
    rows(&mut report, "_asleep", &asleep, None);
    steps.part("used");
    let used = measure(&volume, plan, Terms { whole: true, ..spinning }, &steps)?;
    rows(&mut report, "_used", &used, None);
    // The measurements below are of rates alone, so one read for the latency will do.
    let rates = Plan { singles: 1, ..plan.clone() };
    // Try all depths, each with spinning and with sleeping servers. The best rate of each transport
    // counts.
    let mut most = [0.0f64; 3];
    for depth in DEPTHS {
        steps.part(format_args!("{depth} in flight"));
        for spin in [plan.spin, Duration::ZERO] {
            let terms = Terms { spin, ..spinning };
            let figures = measure(&volume, &Plan { depth, ..rates.clone() }, terms, &steps)?;
            for (most, figures) in most.iter_mut().zip(&figures) {
                *most = most.max(figures.kiops_per_cpu.median());
            }
        }
    }
    for (id, way) in [("best_read", FRAMES), ("best_read_in_place", IN_PLACE)] {
        let row = Row::higher(id, "kiops_per_cpu", most[way]).beside("nbd-unix", most[NBD]);
        report.rows.push(row.goal(Goal::Ratio(3.0)));
    }
    steps.part("one CPU");
    let one_cpu = Terms { one_cpu: true, ..spinning };
    let spun = measure(&volume, &rates, one_cpu, &steps)?;
    let slept = measure(&volume, &rates, Terms { spin: Duration::ZERO, ..one_cpu }, &steps)?;
    let best = |way: usize| spun[way].kiops.median().max(slept[way].kiops.median());
    for (id, way) in [("deep_read_one_cpu", FRAMES), ("deep_read_in_place_one_cpu", IN_PLACE)] {
        report.rows.push(Row::higher(id, "kiops", best(way)).beside("nbd-unix", best(NBD)));
    }
    Ok(report)
}

/// Adds the rows of one measurement; `latency` is a goal for the latency, if there is one.
fn rows(report: &mut Report, suffix: &str, figures: &[Figures; 3], latency: Option<f64>) {
    let nbd = &figures[NBD];
    for (way, place) in [(FRAMES, ""), (IN_PLACE, "_in_place")] {
        let ours = &figures[way];
        let (single, deep) = (format!("qd1_read{place}{suffix}"), format!("deep_read{place}{suffix}"));
        let p50 = Row::lower(&*single, "p50_us", ours.p50.median()).beside("nbd-unix", nbd.p50.median());
        report.rows.push(match latency {
            Some(goal) => p50.goal(Goal::Ratio(goal)),
            None => p50,
        });
        report
            .rows
            .push(Row::lower(&*single, "p99_us", ours.p99.median()).beside("nbd-unix", nbd.p99.median()));
        let by_cpu = Row::higher(&*deep, "kiops_per_cpu", ours.kiops_per_cpu.median())
            .beside("nbd-unix", nbd.kiops_per_cpu.median());
        report.rows.push(by_cpu);
        report
            .rows
            .push(Row::higher(&*deep, "kiops", ours.kiops.median()).beside("nbd-unix", nbd.kiops.median()));
    }
}

/// Measures the transports over one volume, in turns.
fn measure(volume: &Arc<Volume>, plan: &Plan, terms: Terms, steps: &Steps) -> Result<[Figures; 3], RunError> {
    // Threads that start while this thread is pinned to one CPU run on that CPU too.
    let _pinned = terms.one_cpu.then(OneCpu::enter);
    let spin = terms.spin;
    let log = to_stderr(Level::Warning);
    let path = |kind: &str| std::env::temp_dir().join(format!("weir-bench-{kind}-{}", std::process::id()));
    let config = share::Config { spin, in_place: LENT, ..share::Config::at(path("share")) };
    let share = share::Server::start(volume, &config, Arc::clone(&log)).map_err(set_up("share server"))?;
    let listen = [Listen::Unix(path("nbd"))];
    let config = nbd::Config { connections: 1, spin, ..nbd::Config::default() };
    let _nbd = nbd::Server::start(volume, &config, &listen, &log).map_err(set_up("NBD server"))?;
    let (pages, whole) = (|| Pages { at: 1, pages: plan.pages }, terms.whole);
    let shared = |in_place| {
        let options = Options { spin, in_place, ..Options::default() };
        let client = Client::connect(share.path(), options).map_err(client("share"))?;
        Ok(Shared { client, pages: pages(), whole })
    };
    let (mut frames, mut in_place) = (shared(false)?, shared(true)?);
    let wish = nbd::client::Wish { structured: false, allocation: false, ..nbd::client::Wish::default() };
    let over_nbd = nbd::client::Client::unix(path("nbd"), &wish).map_err(client("nbd"))?;
    let mut over_nbd = Nbd { client: over_nbd, pages: pages(), whole };
    let mut figures: [Figures; 3] = std::array::from_fn(|_| Figures::default());
    for _ in 0..plan.rounds {
        figures[FRAMES].measure(&mut frames, plan)?;
        figures[IN_PLACE].measure(&mut in_place, plan)?;
        figures[NBD].measure(&mut over_nbd, plan)?;
        steps.end();
    }
    let lent = share.stats().in_place();
    assert!(lent >= u64::from(plan.reads), "pages were to be lent in place, and only {lent} were");
    Ok(figures)
}

/// Pins the present thread, and threads that it starts, to one CPU. Dropping this value unpins the
/// present thread.
struct OneCpu(CpuSet);

impl OneCpu {
    fn enter() -> Self {
        let all = sched_getaffinity(None).unwrap_or_default();
        let mut one = CpuSet::new();
        // Use the last CPU, because the system handles most interrupts on the first.
        let last = (0..CpuSet::MAX_CPU).rev().find(|&cpu| all.is_set(cpu)).unwrap_or(0);
        one.set(last);
        // If the system refuses the pinning, all CPUs are used, which favours neither transport.
        let _ = sched_setaffinity(None, &one);
        OneCpu(all)
    }
}

impl Drop for OneCpu {
    fn drop(&mut self) {
        let _ = sched_setaffinity(None, &self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_plan_gives_every_row() {
        let plan = Plan { pages: 256, singles: 200, reads: 2_000, rounds: 1, ..Plan::default() };
        let report = run(&plan).unwrap();
        for id in [
            "qd1_read",
            "deep_read",
            "qd1_read_in_place",
            "deep_read_in_place",
            "deep_read_asleep",
            "deep_read_used",
            "deep_read_in_place_one_cpu",
            "best_read",
            "best_read_in_place",
        ] {
            let row = report.rows.iter().find(|row| row.id == id).unwrap();
            assert!(row.value > 0.0 && row.control_value.is_some_and(|value| value > 0.0), "{report}");
        }
    }
}
