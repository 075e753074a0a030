//! `weir bench lease`: the cost of handing out a page reference and taking it back.
//!
//! The kernel's device memory patches (devmem) had three ways to record which connection holds
//! which pages. Each is modelled here after its kernel code, beside [`weir_lease::Table`]:
//! - an xarray per connection (mainline). The model `xarray` has the least that such a tree must
//!   do. The model `xarray-kernel` has all that the kernel does for a reference: it maintains the
//!   tree, and counts the page's references, as the table does too.
//! - an array of counters per connection (version 1 of the patches).
//! - one array of counters for the region (version 10).
//!
//! Every connection holds `outstanding` references all the time. The connections take turns. In its
//! turn a connection returns its oldest references and takes as many new ones, of random pages of
//! the region.
//!
//! Times are net: a design that does nothing runs in the same rounds, and its time is subtracted.

mod counters;
mod design;
mod flows;
mod forged;
mod harness;
mod kernel;
mod rescan;
mod table;
mod xarray;

use std::time::Duration;

use crate::report::{Goal, Report, Row};
use crate::steps::Steps;

use counters::{RegionCounters, SocketArrays};
use design::Design;
use harness::{Figures, Workload, measure};
use kernel::KernelXArrays;

/// The plan of the lease benchmark.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Numbers of connections; each is a row.
    pub connections: Vec<u32>,
    /// Number of references that each connection holds all the time.
    pub outstanding: u32,
    /// Number of references that each step takes and returns. In the kernel, too, a receive call
    /// brings several, and a return call takes several back.
    pub burst: u32,
    /// Bytes of the memory region whose pages the connections reference.
    pub region: u64,
    /// The numbers of threads to measure, a column for each. The threads divide the connections
    /// among them.
    pub threads: Vec<u32>,
    /// Number of references taken and returned in a round, over all threads.
    pub pairs: u64,
    /// Number of rounds; the figures are medians.
    pub rounds: usize,
    /// Number of forged, stale and repeated tokens to try; 0 for none.
    pub trials: u64,
    /// The seed of the random numbers.
    pub seed: u64,
    /// Number of flows in the end-to-end run, each with a connection of its own. With 0 there is no
    /// such run.
    pub flows: u32,
    /// Number of workers that serve the flows.
    pub workers: u32,
    /// Time for which each design serves requests in one round of the end-to-end run.
    pub flow_time: Duration,
    /// Number of rounds of the end-to-end run.
    pub flow_rounds: usize,
}

impl Default for Plan {
    fn default() -> Self {
        Plan {
            connections: vec![1, 1_000, 10_000],
            outstanding: 64,
            burst: 16,
            region: 2 << 30,
            threads: vec![1, 2],
            pairs: 2_000_000,
            rounds: 9,
            trials: 1_000_000,
            seed: 1,
            flows: 4,
            workers: 4,
            flow_time: Duration::from_secs(2),
            flow_rounds: 5,
        }
    }
}

/// The reason why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The system gave no sockets or no memory to the end-to-end run.
    #[error("cannot set up the flows")]
    Flows(#[from] std::io::Error),
    /// A number in the plan is out of range.
    #[error("{what} of {value} cannot be measured: use {range}")]
    Figure {
        /// The name of the number in the plan.
        what: &'static str,
        /// The number that the plan gives.
        value: u64,
        /// The accepted numbers, as the error's text names them.
        range: &'static str,
    },
}

/// Most memory that a design may take. A design that needs more is left out, and the report says
/// so.
const DESIGN_BYTES_MAX: u64 = 4 << 30;

/// Runs the benchmark by `plan`.
///
/// # Errors
/// Fails with a [`PlanError`] that names the number in the plan that is out of range.
pub fn run(plan: &Plan) -> Result<Report, PlanError> {
    check(plan)?;
    let mut report = Report::new("lease", plan.rounds);
    let all =
        plan.connections.iter().flat_map(|connections| plan.threads.iter().map(|it| (*connections, *it)));
    let works: Vec<Workload> = all
        .filter(|(connections, threads)| threads <= connections)
        .map(|(connections, threads)| Workload { connections, threads, ..Workload::from(plan) })
        .collect();
    // Each workload has one round more than planned, to warm up. The last two steps are the table's
    // rescan and the forged tokens.
    let steps = Steps::new(works.len() * (plan.rounds + 1) + flows::runs(plan) + 2);
    for work in works {
        steps.part(format_args!("{} connections, {} threads", work.connections, work.threads));
        rows(&mut report, &work, plan.rounds, &steps);
    }
    if plan.flows > 0 {
        steps.part("flows");
        flows::rows(&mut report, plan, &steps)?;
    }
    steps.part("rescan");
    rescan::row(&mut report, plan);
    steps.end();
    if plan.trials > 0 {
        steps.part("forged tokens");
        forged::rows(&mut report, plan);
    }
    Ok(report)
}

fn check(plan: &Plan) -> Result<(), PlanError> {
    let figure = |what, value: u64, range, low: u64, high: u64| {
        if (low..=high).contains(&value) { Ok(()) } else { Err(PlanError::Figure { what, value, range }) }
    };
    for &connections in &plan.connections {
        figure("a number of connections", connections.into(), "1 to 1000000", 1, 1_000_000)?;
    }
    for &threads in &plan.threads {
        figure("a number of threads", threads.into(), "1 to 64", 1, 64)?;
    }
    figure("an outstanding", plan.outstanding.into(), "1 to 4096", 1, 4096)?;
    figure(
        "a burst",
        plan.burst.into(),
        "1 to 128, at most what is outstanding",
        1,
        plan.outstanding.min(128).into(),
    )?;
    figure("a number of flows", plan.flows.into(), "0 to 64", 0, 64)?;
    figure("a number of workers", plan.workers.into(), "1 to 64", 1, 64)?;
    figure("a region", plan.region, "4KiB to 256GiB", 4096, 256 << 30)?;
    figure("a number of rounds", plan.rounds as u64, "1 to 1000", 1, 1000)
}

/// Adds the rows of one workload, that is, of one number of connections and one number of threads.
/// They compare every design, as the discussion of the kernel's device memory patches does.
fn rows(report: &mut Report, work: &Workload, rounds: usize, steps: &Steps) {
    let sockets = u64::from(work.pages) * 4 * u64::from(work.connections);
    let with_arrays = sockets <= DESIGN_BYTES_MAX;
    let figures = measure(work, rounds, with_arrays, steps);
    let Figures { owned, shared, xarray, kernel, region, arrays, .. } = &figures;
    let id = format!("{}x{}", work.connections, work.outstanding);
    let metric = |name: &str| format!("{name}_{}t", work.threads);

    let contract =
        |row: Row, ratio: f64| if work.is_of_the_contract() { row.goal(Goal::Ratio(ratio)) } else { row };
    let beside = |control: &str, of: &harness::Figure| {
        Row::lower(&id, metric("ns_net"), owned.ns).beside(control, of.ns)
    };
    report.rows.push(contract(beside(KernelXArrays::NAME, kernel), 0.1));
    report.rows.push(beside("xarray", xarray));
    report.rows.push(contract(beside("binding", region), 1.0));
    if let Some(arrays) = arrays {
        report.rows.push(beside("socket-array", arrays));
    }
    report.rows.push(Row::lower(&id, metric("shared_counts_ns_net"), shared.ns).beside("binding", region.ns));
    report
        .rows
        .push(Row::lower(&id, metric("no_counts_ns_net"), figures.uncounted.ns).beside("xarray", xarray.ns));
    report.rows.push(Row::lower(&id, metric("harness_ns"), figures.harness));
    if work.threads == 1 {
        let bytes = Row::lower(&id, "bytes", owned.bytes as f64);
        let row = bytes.beside("xarray", xarray.bytes as f64);
        report.rows.push(if work.is_of_the_contract() { row.goal(Goal::Value(10e6)) } else { row });
        for (control, bytes) in [(RegionCounters::NAME, region.bytes as u64), (SocketArrays::NAME, sockets)] {
            report.rows.push(Row::lower(&id, "bytes", owned.bytes as f64).beside(control, bytes as f64));
        }
        let idle = Row::lower(&id, "idle_connection_bytes", table::idle_connection_bytes() as f64);
        report.rows.push(idle.goal(Goal::Value(64.0)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_plan_gives_every_row_and_refuses_every_forged_token() {
        let plan = Plan {
            connections: vec![1, 50],
            region: 1 << 20,
            pairs: 20_000,
            rounds: 1,
            trials: 50_000,
            flows: 3,
            workers: 2,
            flow_time: Duration::from_millis(100),
            flow_rounds: 1,
            ..Plan::default()
        };
        let report = run(&plan).unwrap();
        let row = |id: &str, metric: &str, control: Option<&str>| {
            let found = report
                .rows
                .iter()
                .find(|row| row.id == id && row.metric == metric && row.control.as_deref() == control);
            found.unwrap_or_else(|| panic!("{id} {metric} {control:?} is missing:\n{report}"))
        };
        for control in ["xarray-kernel", "xarray", "binding", "socket-array"] {
            row("1x64", "ns_net_1t", Some(control));
            row("50x64", "ns_net_2t", Some(control));
            if control != "xarray-kernel" {
                row("50x64", "bytes", Some(control));
            }
        }
        for control in ["xarray-kernel", "xarray", "binding", "socket-array", "none"] {
            assert!(row("flows_3x2", "worker_cpu_percent", Some(control)).value > 0.0);
            assert!(row("flows_3x2", "worker_ns_per_page", Some(control)).value > 0.0);
        }
        assert_eq!(row("forged", "accepted", None).value, 0.0);
        assert_eq!(row("50x64", "idle_connection_bytes", None).met, Some(true));
    }

    #[test]
    fn a_plan_that_makes_no_sense_names_the_figure() {
        let plan = Plan { burst: 65, ..Plan::default() };
        let error = run(&plan).unwrap_err().to_string();
        assert!(error.contains("burst of 65") && error.contains("1 to 128"), "{error}");
    }
}
