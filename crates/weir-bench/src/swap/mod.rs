//! `weir bench swap`: the time of a page that comes back from swap on Weir. Beside it run a RAM
//! loop, zram, a file on disk and, if they are installed, nbdkit with nbdfuse.
//!
//! Each device in turn is the swap that the kernel fills first. A child process under a memory
//! limit writes more than the limit lets it keep in RAM. Then it touches pages at random, one after
//! the other, which gives the latency of a major page fault. Then it reads all of them in order,
//! then stretches of 16 at random places. At last it touches one each 20 ms, which is what a
//! desktop does.
//!
//! A page fault brings only its own page (vm.page-cluster 0) on every device. If other values are
//! asked for, each device is measured at each value. Every page is checked. The benchmark needs
//! root, loop devices, a memory cgroup of either version, and no other program that swaps
//! meanwhile.

pub(crate) mod devices;
mod touch;

use crate::report::{Goal, Report, Row, Runs};
use crate::steps::Steps;
use devices::{Device, Kind, Scratch};
use std::path::PathBuf;
use std::time::Duration;
use weir_core::ByteSize;

pub use touch::{Touch, touch};

/// The plan of the swap benchmark.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The path of the weir program, which serves and touches.
    pub weir: PathBuf,
    /// Memory that the child writes.
    pub size: ByteSize,
    /// Memory that the child may keep in RAM.
    pub limit: ByteSize,
    /// The URL of another store of Weir's, without a size.
    pub store: Option<String>,
    /// Time for which page faults are timed on each device: one after the other, and then one each
    /// 20 ms.
    pub time: Duration,
    /// Number of runs; the figures are medians.
    pub runs: usize,
    /// Microseconds for which the spinning server spins before it sleeps.
    pub spin_us: u32,
    /// The devices to measure; empty for all. The RAM loop is always measured.
    pub only: Vec<String>,
    /// The values of vm.page-cluster at which each device is measured.
    pub page_clusters: Vec<u8>,
}

impl Default for Plan {
    fn default() -> Self {
        Plan {
            weir: crate::weir(),
            size: ByteSize(256 << 20),
            limit: ByteSize(64 << 20),
            store: None,
            time: Duration::from_secs(3),
            runs: 3,
            spin_us: 20,
            only: Vec::new(),
            page_clusters: vec![0],
        }
    }
}

/// The reason why nothing could be measured.
#[derive(Debug, thiserror::Error)]
pub enum SwapError {
    /// This machine lacks something that the comparison needs.
    #[error("cannot measure swap here: {0}")]
    Machine(String),
    /// No device has the given name.
    #[error("{name:?} is no device; accepted: {accepted}")]
    Unknown {
        /// The name of a device that was asked for.
        name: String,
        /// The names of the devices that this benchmark has.
        accepted: String,
    },
    /// A step failed that should have worked.
    #[error("{what}")]
    Failed {
        /// A description of the step that failed.
        what: String,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// A signal ended the child. The kernel kills one that it cannot hold within the limit.
    #[error("the child did not finish: {status}: {said}")]
    Killed {
        /// How the child ended.
        status: std::process::ExitStatus,
        /// The child's standard error.
        said: String,
    },
    /// The child read content that it had not written.
    #[error("{mismatches} pages on {device} were not what had been written")]
    Mismatch {
        /// The device's name.
        device: String,
        /// Number of wrong pages.
        mismatches: u64,
    },
}

impl SwapError {
    pub(crate) fn failed(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| SwapError::Failed { what, source }
    }
}

/// The figures of several runs on one device.
#[derive(Default)]
struct Way {
    fault_p50: Runs,
    fault_p99: Runs,
    pages_per_fault: Runs,
    sporadic_p50: Runs,
    sporadic_p99: Runs,
    out: Runs,
    into: Runs,
    mixed: Runs,
}

impl Way {
    fn push(&mut self, touched: &Touch) {
        self.fault_p50.push(touched.fault_p50_us);
        self.fault_p99.push(touched.fault_p99_us);
        self.pages_per_fault.push(touched.pages_per_fault);
        self.sporadic_p50.push(touched.sporadic_p50_us);
        self.sporadic_p99.push(touched.sporadic_p99_us);
        self.out.push(touched.out_mb_per_s);
        self.into.push(touched.in_mb_per_s);
        self.mixed.push(touched.mixed_mb_per_s);
    }
}

const RAM_LOOP: &str = "ram-loop";

/// Measures every device that works on this machine. Prints on standard error which devices do not,
/// and why.
///
/// # Errors
/// Fails when the control, a RAM loop, does not work on this machine, or when a page is not what
/// was written.
pub fn run(plan: &Plan) -> Result<Report, SwapError> {
    let kinds = Kind::all(plan);
    if let Some(name) = plan.only.iter().find(|name| kinds.iter().all(|kind| kind.name() != **name)) {
        let accepted = kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", ");
        return Err(SwapError::Unknown { name: name.clone(), accepted });
    }
    let scratch =
        Scratch::new().map_err(SwapError::failed("cannot make a directory for sockets and files"))?;
    let denied = |error| SwapError::Machine(format!("vm.page-cluster cannot be set ({error}); run as root"));
    let setting = scratch.page_cluster().map_err(denied)?;
    let bytes = plan.size.0 + plan.size.0 / 4 + (16 << 20);
    // Each device, with its figures at each value of vm.page-cluster.
    let mut ways: Vec<(Kind, Vec<Way>)> = Vec::new();
    let nothing = || plan.page_clusters.iter().map(|_| Way::default()).collect();
    for kind in kinds {
        if kind.name() != RAM_LOOP
            && !plan.only.is_empty()
            && !plan.only.iter().any(|only| only == kind.name())
        {
            continue;
        }
        // Try each device once. One that does not work is left out of every run.
        match Device::new(&kind, plan, bytes, &scratch) {
            Ok(_) => ways.push((kind, nothing())),
            Err(error) if kind.name() == RAM_LOOP => return Err(error),
            Err(error) => eprintln!("weir: {} is left out: {}", kind.name(), chain(&error)),
        }
    }
    let steps = Steps::new(plan.runs * ways.len() * plan.page_clusters.len());
    for run in 0..plan.runs {
        // Each run begins with another device, so that none is always the first.
        for turn in 0..ways.len() {
            let at = (run + turn) % ways.len();
            let (kind, ways) = &mut ways[at];
            steps.part(kind.name());
            for (&cluster, way) in plan.page_clusters.iter().zip(ways) {
                setting.set(cluster).map_err(denied)?;
                let device = Device::new(kind, plan, bytes, &scratch)?;
                let touched = touch::run(plan, &device, &steps)?;
                device.end()?;
                if touched.mismatches > 0 {
                    let device = kind.name().to_owned();
                    return Err(SwapError::Mismatch { device, mismatches: touched.mismatches });
                }
                way.push(&touched);
                steps.end();
            }
        }
    }
    let mut report = Report::new("swap", plan.runs);
    let controls = &ways.iter().find(|(kind, _)| kind.name() == RAM_LOOP).expect("measured first").1;
    for (kind, ways) in ways.iter().filter(|(kind, _)| kind.name() != RAM_LOOP) {
        for ((cluster, way), control) in plan.page_clusters.iter().zip(ways).zip(controls) {
            // A row's name has the value of vm.page-cluster only if several values are measured.
            let name = match plan.page_clusters.len() {
                1 => kind.name().to_owned(),
                _ => format!("{}_cluster_{cluster}", kind.name()),
            };
            report.rows.extend(rows(&name, kind, way, control));
        }
    }
    Ok(report)
}

fn rows(name: &str, kind: &Kind, way: &Way, control: &Way) -> Vec<Row> {
    let lower = |what: &str, metric: &str, ours: &Runs, theirs: &Runs| {
        Row::lower(format!("{name}_{what}"), metric, ours.median()).beside(RAM_LOOP, theirs.median())
    };
    let higher = |what: &str, ours: &Runs, theirs: &Runs| {
        Row::higher(format!("{name}_{what}"), "mb_per_s", ours.median()).beside(RAM_LOOP, theirs.median())
    };
    let mut p50 = lower("fault", "p50_us", &way.fault_p50, &control.fault_p50);
    let mut p99 = lower("fault", "p99_us", &way.fault_p99, &control.fault_p99);
    match kind {
        Kind::Weir { spin_us: 1.., store: None } => {
            p50 = p50.goal(Goal::Ratio(1.6));
            p99 = p99.goal(Goal::Value(150.0));
        }
        Kind::Weir { spin_us: 1.., store: Some(_) } => {
            // With host memory the goal is 1.6 times the control. With GPU memory 6 us are added to
            // it, for the way to the card.
            p50 = p50.goal(Goal::Value(control.fault_p50.median() * 1.6 + 6.0));
            p99 = p99.goal(Goal::Value(150.0));
        }
        _ => {}
    }
    vec![
        p50,
        p99,
        lower("fault", "pages_in", &way.pages_per_fault, &control.pages_per_fault),
        lower("sporadic", "p50_us", &way.sporadic_p50, &control.sporadic_p50),
        lower("sporadic", "p99_us", &way.sporadic_p99, &control.sporadic_p99),
        higher("out", &way.out, &control.out),
        higher("in", &way.into, &control.into),
        higher("mixed", &way.mixed, &control.mixed),
    ]
}

pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
