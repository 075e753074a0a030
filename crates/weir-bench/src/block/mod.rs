//! `weir bench block`: Weir's NBD server over host memory, beside nbdkit's memory plugin on the
//! same kind of socket.
//!
//! fio drives both servers by its libnbd engine. Cases run one after another, the servers take
//! turns, and a figure is the median of several runs. Weir runs twice: once it sleeps between
//! requests, which is the usual way, and once it spins (`--spin-us`). Over host memory both of
//! Weir's servers run at once. Over a store they run one after the other, each beside nbdkit. Two
//! daemons on one card would hinder each other: neither could keep its kernel resident there. For
//! single requests a third server, which keeps no pages, shows the cost of the client and the
//! system.
//!
//! Before the measurement every page of both servers is written in order, so that none is a hole. A
//! page that Weir overwrites moves, so the order of the last writes decides whether neighbours lie
//! side by side. Long requests are measured twice: first on the device that was written in order,
//! and at the end (`scattered_read`), after every page was written once more in random order.
//!
//! The processor time that a server takes for each request is read from `/proc`. It shows whether a
//! server is fast only because it keeps more than one processor busy.

mod echo;
mod fio;
mod long;
mod server;

use crate::report::{Goal, Report, Row, Runs};
use crate::steps::Steps;
use echo::Echo;
pub use long::{Long, run as run_long};
use server::Server;
use std::path::PathBuf;
use std::time::Duration;
use weir_core::ByteSize;

/// The plan of the measurement.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The path of the weir program, which serves the block device.
    pub weir: PathBuf,
    /// The size of the block device, in bytes.
    pub size: ByteSize,
    /// Weir's store, as a URL; `None` for host memory.
    pub store: Option<String>,
    /// Time that a case runs on each server.
    pub time: Duration,
    /// Number of runs; the figures are medians.
    pub runs: usize,
    /// Microseconds for which the spinning server spins before it sleeps.
    pub spin_us: u32,
    /// The cases to run, by their row ids or the start of these (`qd1`); empty for all.
    pub only: Vec<String>,
}

impl Default for Plan {
    fn default() -> Self {
        Plan {
            weir: crate::weir(),
            size: ByteSize(256 << 20),
            store: None,
            time: Duration::from_secs(2),
            runs: 5,
            spin_us: 50,
            only: Vec::new(),
        }
    }
}

/// The reason why nothing could be measured.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    /// A program that the benchmark runs is missing, or has failed.
    #[error("{program}: {what}; install the package {package}")]
    Program {
        /// The name of the program that is missing or has failed.
        program: String,
        /// The error, as the program or the system reports it.
        what: String,
        /// The Debian package that contains the program.
        package: &'static str,
    },
    /// No case has the given name.
    #[error("{0:?} is no case; accepted, or what they begin with: {cases}", cases = CASES.map(|case| case.id).join(", "))]
    Case(String),
    /// The directory for the sockets cannot be made.
    #[error("cannot make a directory for the sockets")]
    Directory(#[source] std::io::Error),
}

/// The load that fio makes.
#[derive(Clone, Copy, Debug)]
struct Case {
    id: &'static str,
    write: bool,
    sequential: bool,
    block: u32,
    jobs: u32,
    depth: u32,
    /// Pause before each request, in milliseconds.
    pause: u32,
}

impl Case {
    const fn pages(id: &'static str, write: bool, jobs: u32, depth: u32) -> Case {
        Case { id, write, sequential: false, block: 4096, jobs, depth, pause: 0 }
    }

    const fn long(id: &'static str, write: bool) -> Case {
        Case { id, write, sequential: true, block: 1 << 20, jobs: 1, depth: 8, pause: 0 }
    }

    /// Whether the name selects this case: the name is the case's id, or the id's part before an
    /// underscore.
    fn is_called(&self, name: &str) -> bool {
        self.id.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
    }

    fn is_single(&self) -> bool {
        self.jobs * self.depth == 1
    }
}

const CASES: [Case; 11] = [
    Case::long("seq_read", false),
    Case::long("seq_write", true),
    Case::pages("qd1_read", false, 1, 1),
    Case::pages("qd1_write", true, 1, 1),
    Case::pages("1x32_read", false, 1, 32),
    Case::pages("4x16_read", false, 4, 16),
    Case::pages("4x16_write", true, 4, 16),
    Case::pages("16x8_read", false, 16, 8),
    Case::pages("16x8_write", true, 16, 8),
    Case { pause: 20, ..Case::pages("sporadic_read", false, 1, 1) },
    Case::long(SCATTERED, false),
];

/// The last case. Before it, every page is written once more in random order.
const SCATTERED: &str = "scattered_read";

/// The figures of one run of a case on one server.
#[derive(Clone, Copy, Debug, Default)]
struct Figures {
    per_second: f64,
    p50_us: f64,
    p99_us: f64,
    /// The server's processor time for each request, in user and in kernel mode.
    cpu_us: f64,
    /// The server's processor time for each request in user mode alone.
    user_us: f64,
}

/// The figures of several runs of a case on one server.
#[derive(Default)]
struct Way {
    per_second: Runs,
    p50_us: Runs,
    p99_us: Runs,
    cpu_us: Runs,
    user_us: Runs,
}

impl Way {
    /// Whether there are no figures, because this server did not run.
    fn is_empty(&self) -> bool {
        self.per_second.is_empty()
    }

    fn push(&mut self, figures: Figures) {
        self.per_second.push(figures.per_second);
        self.p50_us.push(figures.p50_us);
        self.p99_us.push(figures.p99_us);
        self.cpu_us.push(figures.cpu_us);
        self.user_us.push(figures.user_us);
    }
}

/// The index of each server's runs in `Measured::ways`.
const ASLEEP: usize = 0;
const SPINNING: usize = 1;
const NBDKIT: usize = 2;

/// The runs of a case, on every server.
#[derive(Default)]
struct Measured {
    ways: [Way; 3],
    /// The runs on the server that keeps no pages.
    bare: Way,
}

/// Runs every case on every server, in turns.
///
/// # Errors
/// Fails when fio or nbdkit is missing, or a server does not start.
pub fn run(plan: &Plan) -> Result<Report, BlockError> {
    if let Some(unknown) = plan.only.iter().find(|id| !CASES.iter().any(|case| case.is_called(id))) {
        return Err(BlockError::Case(unknown.clone()));
    }
    let sockets = server::Directory::new().map_err(BlockError::Directory)?;
    let cases: Vec<Case> = CASES
        .into_iter()
        .filter(|case| plan.only.is_empty() || plan.only.iter().any(|id| case.is_called(id)))
        .collect();
    let nbdkit = Server::nbdkit(plan, &sockets)?;
    fio::fill(&nbdkit, plan.size)?;
    let echo = Echo::start(plan, &sockets)?;
    let mut measured: Vec<Measured> = cases.iter().map(|_| Measured::default()).collect();
    // nbdkit runs in every pass, beside those servers of Weir that [`passes`] names.
    let servers: usize = passes(plan).iter().map(|present| present.len() + 1).sum();
    let steps = Steps::new(servers * cases.len() * plan.runs);
    for present in passes(plan) {
        let weirs = present
            .iter()
            .map(|&way| {
                Ok((way, {
                    let name = ["weir", "weir-spinning"][way];
                    Server::weir(plan, [0, plan.spin_us][way], name, &sockets)?
                }))
            })
            .collect::<Result<Vec<(usize, Server)>, BlockError>>()?;
        weirs.iter().try_for_each(|(_, server)| fio::fill(server, plan.size))?;
        let servers: Vec<(usize, &Server)> =
            weirs.iter().map(|(way, server)| (*way, server)).chain([(NBDKIT, &nbdkit)]).collect();
        for (case, into) in cases.iter().zip(&mut measured) {
            measure(plan, *case, &servers, &echo, into, &steps)?;
        }
    }
    let mut report = Report::new("block", plan.runs);
    for (case, measured) in cases.iter().zip(&measured) {
        report.rows.extend(rows(*case, On::of(plan), &measured.ways));
        report.rows.extend(beside_nothing(*case, measured));
    }
    Ok(report)
}

/// The passes through all cases. For each pass, the indices of Weir's servers that run in it at the
/// same time.
fn passes(plan: &Plan) -> &'static [&'static [usize]] {
    match plan.store {
        None => &[&[ASLEEP, SPINNING]],
        Some(_) => &[&[ASLEEP], &[SPINNING]],
    }
}

/// Runs a case on the given servers in turns.
fn measure(
    plan: &Plan,
    case: Case,
    servers: &[(usize, &Server)],
    echo: &Echo,
    into: &mut Measured,
    steps: &Steps,
) -> Result<(), BlockError> {
    steps.part(case.id);
    if case.id == SCATTERED {
        servers.iter().try_for_each(|(_, server)| fio::scatter(server, plan.size))?;
    }
    // A load with pauses makes few requests, so it runs twice as long.
    let time = if case.pause > 0 { plan.time * 2 } else { plan.time };
    for run in 0..plan.runs {
        // Each run begins with another server, so that none is always the first.
        for turn in 0..servers.len() {
            let (way, server) = servers[(run + turn) % servers.len()];
            into.ways[way].push(fio::run(server, case, plan.size, time)?);
            steps.end();
        }
        if case.is_single() || case.sequential {
            into.bare.push(fio::latencies(&echo.socket, case, plan.size, time)?.0);
        }
    }
    Ok(())
}

/// The cost of a case on a server that keeps no pages, which is the cost of the client and the
/// system.
fn beside_nothing(case: Case, Measured { ways, bare }: &Measured) -> Option<Row> {
    const CONTROL: &str = "a server of nothing";
    if case.is_single() {
        let row = Row::lower(case.id, "spinning_p50_us", ways[SPINNING].p50_us.median());
        Some(row.beside(CONTROL, bare.p50_us.median()))
    } else if case.sequential {
        let of = |way: &Way| way.per_second.median() * f64::from(case.block) / 1e6;
        Some(Row::higher(case.id, "mb_per_s", of(&ways[ASLEEP])).beside(CONTROL, of(bare)))
    } else {
        None
    }
}

/// The combinations of machine and store for which there are goals.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum On {
    /// Any store on a machine of fewer than 8 processors.
    Small,
    /// Host memory or a disk, on a machine of 8 processors or more. The goals were set for 16.
    Large,
    /// A GPU's memory, on a machine of 8 processors or more. The goals were set for 16.
    Card,
}

impl On {
    fn of(plan: &Plan) -> On {
        let large = std::thread::available_parallelism().is_ok_and(|count| count.get() >= 8);
        match &plan.store {
            _ if !large => On::Small,
            Some(store) if store.starts_with("vram") => On::Card,
            _ => On::Large,
        }
    }
}

fn rows(case: Case, on: On, [asleep, spinning, nbdkit]: &[Way; 3]) -> Vec<Row> {
    const CONTROL: &str = "nbdkit-memory";
    let lower = |metric: &str, ours: &Runs, theirs: &Runs| {
        Row::lower(case.id, metric, ours.median()).beside(CONTROL, theirs.median())
    };
    let mut rows = Vec::new();
    if case.is_single() {
        let [asleep_goal, spinning_goal, p99_goal] = match (case.pause > 0, on) {
            (true, On::Small) => [None, None, None],
            (true, On::Large | On::Card) => [Some(Goal::Ratio(0.6)), None, Some(Goal::Ratio(0.6))],
            (false, On::Small) => [Some(Goal::Ratio(0.8)), Some(Goal::Ratio(0.5)), None],
            (false, On::Large) => [None, Some(Goal::Value(12.0)), None],
            (false, On::Card) => [None, Some(Goal::Value(14.0)), None],
        };
        let judge = |row: Row, goal: Option<Goal>| match goal {
            Some(goal) => row.goal(goal),
            None => row,
        };
        rows.push(judge(lower("p50_us", &asleep.p50_us, &nbdkit.p50_us), asleep_goal));
        rows.push(judge(lower("p99_us", &asleep.p99_us, &nbdkit.p99_us), p99_goal));
        rows.push(judge(lower("spinning_p50_us", &spinning.p50_us, &nbdkit.p50_us), spinning_goal));
        rows.push(lower("spinning_p99_us", &spinning.p99_us, &nbdkit.p99_us));
    } else {
        let scale = if case.sequential { f64::from(case.block) / 1e6 } else { 1.0 };
        let metric = if case.sequential { "mb_per_s" } else { "iops" };
        let goal = match (case.id, on) {
            ("4x16_read", On::Small) => Some(Goal::Ratio(1.8)),
            ("4x16_write", On::Small) => Some(Goal::Ratio(1.25)),
            ("seq_read", On::Small) => Some(Goal::Ratio(1.3)),
            ("seq_write", On::Small) => Some(Goal::Ratio(1.0)),
            ("16x8_read" | "16x8_write", On::Large) => Some(Goal::Value(1.2e6)),
            ("16x8_read" | "16x8_write", On::Card) => Some(Goal::Value(1e6)),
            _ => None,
        };
        let higher = |metric: &str, ours: &Way| {
            Row::higher(case.id, metric, ours.per_second.median() * scale)
                .beside(CONTROL, nbdkit.per_second.median() * scale)
        };
        let row = higher(metric, asleep);
        rows.push(match goal {
            Some(goal) => row.goal(goal),
            None => row,
        });
        rows.push(higher(&format!("spinning_{metric}"), spinning));
        rows.push(lower("p99_us", &asleep.p99_us, &nbdkit.p99_us));
    }
    rows.push(lower("server_cpu_us", &asleep.cpu_us, &nbdkit.cpu_us).goal(Goal::Ratio(0.8)));
    rows
}
