//! `weir bench queue`: the cost of a work item from the thread that schedules it to the thread that
//! runs it. It compares weir-queue with the channels that Rust programs use, and with the two
//! designs of `nv_kthread_q`. One raises a semaphore for each item; the other is the batching of
//! pull request 1050.
//!
//! Every design gets the same jobs from the same number of threads. The designs run one after the
//! other in each round, and a round starts with a new worker. The time is from the moment when the
//! producers may start to the end of the last job. The arguments have the form of those that
//! `nv_kthread_q`'s own benchmark takes: `300000 600000 8 10`. A round of that size lasts some
//! milliseconds, so its figures need many rounds. [`Options::default`] is ten times that size, and
//! fifty rounds.

mod batch;
mod channels;
mod design;
mod jobs;
mod latency;
mod list;
mod semaphore;
mod throughput;
mod weir;

use std::sync::Mutex;

use crate::report::{Goal, Report, Row};
use crate::steps::Steps;
use throughput::Figures;

/// The plan of the queue benchmark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Number of jobs in a round with one producer.
    pub single: usize,
    /// Number of jobs in a round of several producers, all together.
    pub multi: usize,
    /// Number of producers in a round with several producers.
    pub producers: usize,
    /// Number of rounds in which every design is measured.
    pub rounds: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options { single: 3_000_000, multi: 6_000_000, producers: 8, rounds: 50 }
    }
}

/// The reason why the benchmark did not run.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// An option is 0: the jobs, the producers or the rounds. So there is nothing to measure.
    #[error(
        "jobs, producers and rounds must be at least 1, got {0:?}; the source's own are 300000 600000 8 10"
    )]
    Nothing(Options),
    /// A queue did not start.
    #[error("a worker of the benchmark did not start")]
    Start(#[from] weir_queue::StartError),
}

/// Least number of jobs in a round to which the goals apply. The time of a smaller round is too
/// short to compare.
const SIZE_OF_PROMISES: usize = 3_000_000;

/// How many times as fast as the semaphore pull request 1050 calls its own design, with one
/// producer and with eight.
const CLAIMED: [f64; 2] = [3.77, 1.61];

/// All designs share the process's one tally, so only one benchmark runs at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Runs the benchmark.
///
/// # Errors
/// Fails with a [`QueueError`] when there is nothing to run, or no thread to run it on.
pub fn run(options: &Options) -> Result<Report, QueueError> {
    if [options.single, options.multi, options.producers, options.rounds].contains(&0) {
        return Err(QueueError::Nothing(options.clone()));
    }
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut report = Report::new("queue", options.rounds);
    let promised = options.single >= SIZE_OF_PROMISES && options.multi >= SIZE_OF_PROMISES;
    let many = format!("{}p", options.producers);
    let steps = Steps::new(throughput::runs(options) + latency::RUNS);
    let by_size = throughput::measure(options, &steps)?;
    for (figures, (id, claimed)) in by_size.iter().zip([("1p", CLAIMED[0]), (many.as_str(), CLAIMED[1])]) {
        let goals = promised.then_some(if id == "1p" { GOALS_SINGLE } else { GOALS_MULTI });
        rows(&mut report, id, figures, goals, claimed);
    }
    for figures in latency::measure(&steps)? {
        figures.rows(&mut report);
    }
    Ok(report)
}

/// The goals: the largest share of each control's time that Weir's queue may take.
struct Goals {
    semaphore: f64,
    batch: f64,
    channels: f64,
}

const GOALS_SINGLE: Goals = Goals { semaphore: 1.0 / 8.0, batch: 1.0 / 1.2, channels: 1.0 };
const GOALS_MULTI: Goals = Goals { semaphore: 1.0 / 8.0, batch: 1.0 / 2.0, channels: 1.0 };

/// Adds the rows for one number of producers to the report.
#[expect(clippy::needless_pass_by_value, reason = "goals are a choice made at the call, not data")]
fn rows(report: &mut Report, id: &str, figures: &Figures, goals: Option<Goals>, claimed: f64) {
    let ours = figures.of(weir::EMBEDDED);
    let values = figures.of(weir::VALUES);
    for (name, control) in figures.controls() {
        let row = Row::lower(id, "ns_per_item", ours.ns.median()).beside(name, control.ns.median());
        let bound = goals.as_ref().map(|goals| match name {
            semaphore::NAME => goals.semaphore,
            batch::NAME => goals.batch,
            _ => goals.channels,
        });
        report.rows.push(match bound {
            Some(bound) => row.goal(Goal::Ratio(bound)),
            None => row,
        });
    }
    for (name, control) in figures.controls() {
        report.rows.push(Row::lower(id, "ns_per_item_min", ours.ns.min()).beside(name, control.ns.min()));
    }
    for (name, control) in figures.controls() {
        let row = Row::lower(id, "wakes_per_1000", ours.wakes.median());
        report.rows.push(row.beside(name, control.wakes.median()));
    }
    let semaphore = figures.of(semaphore::NAME).ns.median();
    for (metric, design) in [
        ("times_over_semaphore", ours),
        ("times_over_semaphore_of_values", values),
        ("times_over_semaphore_of_batch", figures.of(batch::NAME)),
    ] {
        report.rows.push(
            Row::higher(id, metric, semaphore / design.ns.median()).beside("pull request 1050", claimed),
        );
    }
    let channel = format!("{id}_values");
    for (name, control) in figures.controls().filter(|(name, _)| channels::NAMES.contains(name)) {
        let row = Row::lower(&channel, "ns_per_item", values.ns.median());
        report.rows.push(row.beside(name, control.ns.median()));
    }
    report.rows.push(Row::higher(id, "items_per_batch", ours.batch.median()));
    report.rows.push(Row::higher(channel, "items_per_batch", values.batch.median()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_run_has_a_row_for_every_control_and_no_promises() {
        let options = Options { single: 2_000, multi: 4_000, producers: 3, rounds: 2 };
        let report = run(&options).unwrap();
        for id in ["1p", "3p"] {
            for control in ["semaphore", "batch", "crossbeam", "flume", "std", "kanal"] {
                let row = report.rows.iter().find(|row| {
                    row.id == id && row.metric == "ns_per_item" && row.control.as_deref() == Some(control)
                });
                let row = row.unwrap_or_else(|| panic!("no row {id} beside {control}"));
                assert!(row.value > 0.0 && row.control_value > Some(0.0) && row.goal.is_none(), "{row:?}");
            }
        }
        assert!(report.rows.iter().any(|row| row.id == "sporadic" && row.metric == "p99_us"));
    }

    #[test]
    fn nothing_to_run_is_refused_with_the_values_seen() {
        let error = run(&Options { producers: 0, ..Options::default() }).unwrap_err().to_string();
        assert!(error.contains("producers: 0") && error.contains("300000 600000 8 10"), "{error}");
    }
}
