//! `weir bench store`: a store alone, and the same store under a volume, beside the copy engine
//! with one call for each request.
//!
//! The loads use 4 KiB pages in random order. The number and generation of each page are checked;
//! one wrong page fails the run. Single operations are timed one by one. Deep rows count the pages
//! finished by all threads, divided by the slowest thread's time.

pub mod batches;
mod coherence;
pub(crate) mod content;
mod control;
mod give_back;
mod load;
pub mod remote;
mod scenarios;

pub use give_back::Effort;
pub use load::Kind;

use crate::report::{Report, Row};
use crate::steps::Steps;
use std::time::{Duration, Instant};
use weir_store::vram::VramStore;
use weir_store::vram::engine::CallError;
use weir_store::vram::table::{BatchShape, Direction, Path, Table};
use weir_store::{Fault, OpenError, StoreUrl};

/// The plan of the store benchmark.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The store's URL.
    pub url: StoreUrl,
    /// Number of runs of each row.
    pub runs: usize,
    /// Number of threads of the deep rows.
    pub threads: usize,
    /// Number of operations in flight of each thread.
    pub depth: usize,
    /// The efforts with which give-back is measured. Several are compared to find the best.
    pub efforts: Vec<Effort>,
    /// Seconds for each pair of paths of the coherence row.
    pub coherence_seconds: u64,
    /// Whether all measurements are shorter, for tests of the benchmark itself.
    pub short: bool,
    /// The rows to run: those whose id begins with one of these texts. Empty: all rows.
    pub only: Vec<String>,
}

impl Plan {
    /// Whether the plan asks for the row with this id.
    fn is_wanted(&self, id: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| id.starts_with(only.as_str()))
    }
}

/// The reason why a benchmark gave no figures.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The store could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// An operation of the store failed.
    #[error("an operation failed: {0}")]
    Fault(Fault),
    /// A page was read with another content than was written, which must never happen.
    #[error("page {number} is not its generation {generation}")]
    Mismatch {
        /// The number of the page that was read.
        number: u32,
        /// The generation that was last written to the page.
        generation: u32,
    },
    /// The control that calls the card's copy engine failed.
    #[error("the control: {0}")]
    Control(CallError),
    /// The volume could not be made.
    #[error("the volume: {0}")]
    Volume(String),
    /// The crate `redis` failed, which is the control of a store in a fleet.
    #[error("the control: {0}")]
    Client(#[from] redis::RedisError),
    /// A process of the benchmark could not be started.
    #[error("a process of the benchmark: {0}")]
    Process(std::io::Error),
    /// A thread of the benchmark panicked.
    #[error("a thread of the benchmark panicked")]
    Panic,
}

/// Runs the benchmark by `plan`.
///
/// # Errors
/// Fails when the store fails, or a page is wrong.
pub fn run(plan: &Plan) -> Result<Report, BenchError> {
    scenarios::run(plan)
}

/// Reads and writes `rate` pages a second for `seconds`, half each, and checks them. A competing
/// job can be measured beside it. Returns the rate that was reached.
///
/// # Errors
/// Fails when the store fails, or a page is wrong.
pub fn hold(url: &StoreUrl, rate: f64, seconds: u64) -> Result<f64, BenchError> {
    let store = weir_store::open(url)?;
    let mut lane = store.lane(16)?;
    let mut part = load::Part::new(0, store.slots().min(1 << 18), 3);
    part.fill(&mut lane)?;
    let steps = Steps::new(seconds as usize);
    steps.part("load");
    let load = move || {
        let (since, mut done) = (Instant::now(), 0u64);
        while since.elapsed().as_secs() < seconds {
            while (done as f64) < rate * since.elapsed().as_secs_f64() {
                part.once(&mut lane, if done % 2 == 0 { Kind::Read } else { Kind::Write })?;
                done += 1;
            }
            std::hint::spin_loop();
        }
        Ok(done as f64 / since.elapsed().as_secs_f64())
    };
    std::thread::scope(|scope| {
        let load = scope.spawn(load);
        for _ in 0..seconds {
            if load.is_finished() {
                break;
            }
            std::thread::sleep(Duration::from_secs(1));
            steps.end();
        }
        load.join().unwrap_or(Err(BenchError::Panic))
    })
}

/// The cost of each path of each card, as the store measured it when it was opened.
///
/// # Errors
/// Fails when the store cannot be opened.
pub fn calibrate(url: &StoreUrl) -> Result<Report, BenchError> {
    let mut report = Report::new("store", 1);
    let StoreUrl::Vram(url) = url else { return Ok(report) };
    let store = VramStore::open(url)?;
    for gpu in store.gpus() {
        eprintln!("{}", gpu.describe());
        for path in Path::ALL {
            for (direction, name) in [(Direction::Read, "read"), (Direction::Write, "write")] {
                let Some(cost) = gpu.table().get(path, direction) else { continue };
                let id = format!("{}_{name}", path.name());
                let figures = [
                    ("first_ns", cost.first),
                    ("each_ns", cost.each),
                    ("neighbour_ns", cost.neighbour),
                    ("shared_ns", cost.shared),
                ];
                report.rows.extend(figures.map(|(metric, value)| Row::lower(id.clone(), metric, value)));
            }
        }
        report.rows.extend(choices(gpu.table()));
    }
    Ok(report)
}

/// The paths that a store chooses by the measured costs. Each row is for one case: a direction, a
/// number of pages, a number of busy threads, and either neighbours or random pages. The row's
/// metric names the path, and its value is the estimated time for a thread. There are rows with the
/// kernel on the card, and without.
fn choices(table: &Table) -> Vec<Row> {
    let mut rows = Vec::new();
    for (direction, name) in [(Direction::Read, "read"), (Direction::Write, "write")] {
        for (neighbours, kind) in [(false, "random"), (true, "runs")] {
            for (pages, busy) in [(1, 1), (16, 1), (64, 1), (1, 16), (64, 4), (64, 16), (256, 8)] {
                for (ring, there) in [(true, ""), (false, "_no_ring")] {
                    let batch = BatchShape { pages, neighbours, busy, ring };
                    let Some(path) = table.choose(direction, batch) else { continue };
                    let cost = table.get(path, direction).map_or(f64::NAN, |cost| cost.of(batch));
                    let id = format!("{name}_{kind}_{pages}x{busy}{there}");
                    rows.push(Row::lower(id, path.name(), cost));
                }
            }
        }
    }
    rows
}
