//! The cost of page faults for a program whose memory does not fit into its limit. Each way to keep
//! the limit runs beside the same program without a limit.
//!
//! A child process goes through its memory in several ways. It goes in order, reading and writing.
//! It goes through pairs of words that lie a power of two apart, as a gate of a state-vector
//! simulator does. It touches single pages, at random and by Zipf's law. Every word is checked at
//! the end. The benchmark needs root, a memory cgroup, and loop devices for the swap devices.
//!
//! The bare handler keeps moved-out pages in the same process, so it saves no memory. It shows the
//! least cost of a page fault on one page.

mod bare;
mod touch;

use crate::report::{Goal, Report, Row, Runs};
use crate::steps::Steps;
use crate::swap::devices::{Device, Kind, Scratch};
use crate::swap::{self, SwapError};
use std::collections::BTreeMap;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::Duration;
use weir_cli::guard::die_together;
use weir_core::ByteSize;
use weir_system::cgroup::Cgroup;

pub use touch::{Bound, Touch, touch};

/// The plan of the fault benchmark.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Memory that the child goes through: a power of two.
    pub size: ByteSize,
    /// Bytes of the child process that may stay in RAM.
    pub limit: ByteSize,
    /// Another store for `weir run`, as a URL without a size.
    pub store: Option<String>,
    /// Time for which single pages are touched. Whole passes take as long as they need.
    pub time: Duration,
    /// Number of runs; the figures are medians.
    pub runs: usize,
    /// The ways to measure; empty for all. The child without a limit always runs.
    pub only: Vec<String>,
}

impl Default for Plan {
    fn default() -> Self {
        Plan {
            size: ByteSize(256 << 20),
            limit: ByteSize(64 << 20),
            store: None,
            time: Duration::from_secs(2),
            runs: 3,
            only: Vec::new(),
        }
    }
}

const ALONE: &str = "alone";
const BARE: &str = "bare";
const ZRAM: &str = "zram";
/// The ways to keep the limit, by the names that `--only` takes.
pub const WAYS: [&str; 9] =
    [ALONE, "run", "run-asleep", "run-store", "run-store-asleep", BARE, ZRAM, "ram-loop", "host"];

/// The way in which the child is held within its limit.
#[derive(Debug)]
enum Way {
    Alone,
    /// The child runs under `weir run`, with the store of this URL. `is_asleep` says whether Weir's
    /// threads sleep at once when they have nothing to do.
    Run {
        store: String,
        is_asleep: bool,
    },
    Bare,
    Swap(Kind),
}

impl Way {
    /// Whether this is a way of others, beside which ours are measured.
    fn is_control(&self) -> bool {
        matches!(self, Way::Bare | Way::Swap(Kind::Zram | Kind::RamLoop))
    }
}

/// Runs the benchmark; prints on standard error what this machine lacks.
///
/// # Errors
/// Fails when not even the child without a limit runs, or a page is not what was written.
pub fn run(plan: &Plan) -> Result<Report, SwapError> {
    if let Some(name) = plan.only.iter().find(|name| !WAYS.contains(&name.as_str())) {
        return Err(SwapError::Unknown { name: name.clone(), accepted: WAYS.join(", ") });
    }
    let scratch =
        Scratch::new().map_err(SwapError::failed("cannot make a directory for sockets and files"))?;
    let mut ways = all(plan);
    ways.retain(|(name, _)| {
        *name == ALONE || plan.only.is_empty() || plan.only.iter().any(|only| only == name)
    });
    let mut found: BTreeMap<&str, Vec<Touch>> = BTreeMap::new();
    let mut lacking: Vec<&str> = Vec::new();
    let steps = Steps::new(plan.runs * ways.len());
    for round in 0..plan.runs {
        for turn in 0..ways.len() {
            // Each round begins with another way, so that none is always the first.
            let (name, way) = &ways[(round + turn) % ways.len()];
            steps.part(name);
            if lacking.contains(name) {
                steps.end();
                continue;
            }
            match measure(plan, way, &scratch, &steps) {
                Ok(touched) if touched.mismatches > 0 => {
                    return Err(SwapError::Mismatch {
                        device: (*name).to_owned(),
                        mismatches: touched.mismatches,
                    });
                }
                Ok(touched) => found.entry(name).or_default().push(touched),
                Err(error) => {
                    // This machine can run this way. So the way, or the child, is at fault.
                    let could_run = found.contains_key(name) || matches!(error, SwapError::Killed { .. });
                    if *name == ALONE || !way.is_control() && could_run {
                        steps.say(format_args!("weir: {name} failed in run {} of {}", round + 1, plan.runs));
                        return Err(error);
                    }
                    // The kernel may kill a child at its cgroup's limit. Other figures stay.
                    let loss = if could_run { "has one run less" } else { "is left out" };
                    steps.say(format_args!("weir: {name} {loss}: {}", swap::chain(&error)));
                    if !could_run {
                        lacking.push(name);
                    }
                }
            }
            steps.end();
        }
    }
    let mut report = Report::new("fault", plan.runs);
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    for (name, _) in &ways {
        if let Some(touched) = found.get(name) {
            report.rows.extend(rows(plan, processors, name, touched, &found));
        }
    }
    Ok(report)
}

fn all(plan: &Plan) -> Vec<(&'static str, Way)> {
    // The store has room for the program's memory. In addition it has room for as many bytes as the
    // limit, for new versions of pages whose old version is still stored, and for the stack and the
    // first allocations of each thread, which take blocks of 2 MiB.
    let bytes = plan.size.0 + plan.limit.0 + touch::THREADS as u64 * (8 << 20);
    let host = format!("host:{bytes}");
    let run = |store: &str, is_asleep| Way::Run { store: store.to_owned(), is_asleep };
    let mut ways = vec![(ALONE, Way::Alone), ("run", run(&host, false)), ("run-asleep", run(&host, true))];
    if let Some(url) = &plan.store {
        let store = format!("{url}{}size={bytes}", if url.contains('?') { "&" } else { "?" });
        ways.extend([("run-store", run(&store, false)), ("run-store-asleep", run(&store, true))]);
    }
    ways.push((BARE, Way::Bare));
    ways.extend(
        [(ZRAM, Kind::Zram), ("ram-loop", Kind::RamLoop), ("host", Kind::Weir { spin_us: 20, store: None })]
            .map(|(name, kind)| (name, Way::Swap(kind))),
    );
    ways
}

/// Runs the child process once in the given way, and returns its figures.
fn measure(plan: &Plan, way: &Way, scratch: &Scratch, steps: &Steps) -> Result<Touch, SwapError> {
    let mut command = match way {
        Way::Run { store, is_asleep } => {
            let mut command = Command::new(crate::weir());
            command.args(["run", "--resident", &plan.limit.0.to_string(), "--store", store]);
            if *is_asleep {
                command.args(["--spin-us", "0"]);
            }
            command.arg("--");
            let program = std::env::current_exe().map_err(SwapError::failed("cannot find this program"))?;
            command.arg(program);
            command
        }
        _ => Command::new("/proc/self/exe"),
    };
    command.args(["fault-touch", "--size", &plan.size.0.to_string()]);
    command.args(["--milliseconds", &plan.time.as_millis().to_string()]);
    // The device and the cgroup must outlive the child, which uses them until its end.
    let (mut device, mut cgroup) = (None, None);
    match way {
        Way::Alone | Way::Run { .. } => {}
        Way::Bare => {
            command.args(["--bare", &plan.limit.0.to_string()]);
        }
        Way::Swap(kind) => {
            let bytes = plan.size.0 + plan.size.0 / 4 + (16 << 20);
            device = Some(Device::new(kind, &swap::Plan::default(), bytes, scratch)?);
            let limit = Cgroup::new(std::process::id(), plan.limit.0)
                .map_err(SwapError::failed("cannot limit a child's memory (a memory cgroup, as root)"))?;
            command.arg("--entrance").arg(limit.entrance());
            cgroup = Some(limit);
        }
    }
    die_together(&mut command);
    let output = command.stdin(Stdio::null()).stderr(Stdio::piped()).output();
    drop(cgroup);
    if let Some(device) = device {
        device.end()?;
    }
    let output = output.map_err(SwapError::failed("the child does not start"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.signal().is_some() {
        return Err(SwapError::Killed { status: output.status, said: said.trim().to_owned() });
    }
    if !output.status.success() {
        let what = format!("{}: {}", output.status, said.trim());
        return Err(SwapError::failed("the child did not finish")(io::Error::other(what)));
    }
    // `weir run` has printed its problems on standard error.
    said.lines().for_each(|line| steps.say(line));
    let text = String::from_utf8_lossy(&output.stdout);
    serde_json::from_str(text.trim()).map_err(|error| SwapError::failed("the child")(error.into()))
}

/// The index of the gate that the limit slows down most.
fn worst_gate(touched: &[Touch], alone: &[Touch]) -> usize {
    let median =
        |of: &[Touch], gate: usize| of.iter().map(|touched| touched.gates_s[gate]).collect::<Runs>().median();
    let ratio = |gate: usize| median(touched, gate) / median(alone, gate);
    let gates = 0..alone.first().map_or(0, |touched| touched.gates_s.len());
    gates.max_by(|&one, &other| ratio(one).total_cmp(&ratio(other))).unwrap_or(0)
}

/// A figure's name, the function that reads it from a run, and its goal.
type Pass<'a> = (&'static str, &'a dyn Fn(&Touch) -> f64, f64);
type Figure = (&'static str, fn(&Touch) -> f64, f64);

fn rows(
    plan: &Plan,
    processors: usize,
    name: &str,
    touched: &[Touch],
    found: &BTreeMap<&str, Vec<Touch>>,
) -> Vec<Row> {
    let median = |of: &[Touch], what: &dyn Fn(&Touch) -> f64| of.iter().map(what).collect::<Runs>().median();
    let is_ours = name.starts_with("run");
    // Pages in VRAM have goals of their own: the GPU moves them, not the processor.
    let is_vram =
        name.starts_with("run-store") && plan.store.as_ref().is_some_and(|url| url.starts_with("vram"));
    let (read_goal, write_goal, gate_goal) = if is_vram { (1.35, 1.35, 1.6) } else { (2.5, 3.0, 3.0) };
    let mut rows = Vec::new();
    let worst = worst_gate(touched, &found[ALONE]);
    let gate = move |touched: &Touch| touched.gates_s[worst];
    let passes: [Pass<'_>; 4] = [
        ("sweep_read", &|touched| touched.sweep_read_s, read_goal),
        ("sweep_write", &|touched| touched.sweep_write_s, write_goal),
        ("gates", &|touched| touched.gates_s.iter().sum::<f64>() / touched.gates_s.len() as f64, gate_goal),
        ("gate_worst", &gate, gate_goal),
    ];
    for (what, figure, goal) in passes {
        let ours = median(touched, &figure);
        let row = |id: String, control: &'static str| {
            let control_value = median(&found[control], &figure);
            Row::lower(id, "s_per_pass", ours).beside(control, control_value)
        };
        match name {
            ALONE => rows.push(Row::lower(format!("{name}_{what}"), "s_per_pass", ours)),
            _ => {
                let beside_alone = row(format!("{name}_{what}"), ALONE);
                rows.push(if is_ours { beside_alone.goal(Goal::Ratio(goal)) } else { beside_alone });
            }
        }
        if is_ours && found.contains_key(ZRAM) {
            rows.push(row(format!("{name}_{what}_swap"), ZRAM).goal(Goal::Ratio(1.0 / 15.0)));
        }
    }
    let together: [Figure; 2] = [
        ("threads_read", |touched| touched.threads_read_s, 20.0),
        ("threads_write", |touched| touched.threads_write_s, 20.0),
    ];
    // The goal is of a machine on which each of the threads has a processor.
    let goal_threads = is_vram && processors >= touch::THREADS;
    for (what, figure, goal) in together {
        let rate = |of: &[Touch]| plan.size.0 as f64 / 1e9 / median(of, &figure);
        let mut row = Row::higher(format!("{name}_{what}"), "gb_per_s", rate(touched));
        if name != ALONE {
            row = row.beside(ALONE, rate(&found[ALONE]));
        }
        rows.push(if goal_threads { row.goal(Goal::Value(goal)) } else { row });
    }
    let singles: [Figure; 4] = [
        ("uniform", |touched| touched.uniform_us, 0.85),
        ("uniform_p50", |touched| touched.uniform_p50_us, f64::INFINITY),
        ("uniform_p99", |touched| touched.uniform_p99_us, f64::INFINITY),
        ("zipf", |touched| touched.zipf_us, 0.75),
    ];
    for (what, figure, goal) in singles {
        let mut row = Row::lower(format!("{name}_{what}"), "us_per_touch", median(touched, &figure));
        if let Some(control) = found.get(ZRAM).filter(|_| name != ZRAM) {
            row = row.beside(ZRAM, median(control, &figure));
            if is_ours && goal.is_finite() {
                row = row.goal(Goal::Ratio(goal));
            }
        }
        if what == "uniform_p50" && is_vram {
            row = row.goal(Goal::Value(if name.ends_with("asleep") { 13.0 } else { 9.5 }));
        }
        rows.push(row);
    }
    if let Some(control) = found.get(BARE).filter(|_| is_ours) {
        let p50 = |of: &[Touch]| median(of, &|touched| touched.uniform_p50_us);
        let row = Row::lower(format!("{name}_uniform_p50_bare"), "us_per_touch", p50(touched));
        rows.push(row.beside(BARE, p50(control)).goal(Goal::Ratio(1.15)));
    }
    rows.push(Row::lower(
        format!("{name}_peak"),
        "mib",
        median(touched, &|touched| touched.peak_kib as f64 / 1024.0),
    ));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_in_vram_have_goals_of_their_own() {
        let touched =
            Touch { threads_read_s: 0.01, uniform_p50_us: 11.0, gates_s: vec![1.0], ..Touch::default() };
        let ways = [ALONE, "run", "run-store", "run-store-asleep", BARE];
        let found: BTreeMap<&str, Vec<Touch>> =
            ways.iter().map(|&name| (name, vec![touched.clone()])).collect();
        let goals = |store: Option<&str>, processors, name: &str| -> BTreeMap<String, Option<f64>> {
            let plan = Plan { store: store.map(str::to_owned), ..Plan::default() };
            let rows = rows(&plan, processors, name, &found[name], &found);
            rows.into_iter().map(|row| (row.id.trim_start_matches(name).to_owned(), row.goal)).collect()
        };
        let vram = Some("vram:0");
        let over_vram = goals(vram, 16, "run-store");
        for (row, goal) in [
            ("_sweep_read", 1.35),
            ("_sweep_write", 1.35),
            ("_gates", 1.6),
            ("_gate_worst", 1.6),
            ("_threads_read", 20.0),
            ("_threads_write", 20.0),
            ("_uniform_p50", 9.5),
        ] {
            assert_eq!(over_vram[row], Some(goal), "{row}");
        }
        assert_eq!(goals(vram, 16, "run-store-asleep")["_uniform_p50"], Some(13.0));
        assert_eq!(goals(vram, 15, "run-store")["_threads_read"], None, "threads share processors");
        assert_eq!(goals(vram, 16, "run")["_gates"], Some(3.0), "over host memory");
        assert_eq!(goals(vram, 16, "run")["_threads_read"], None, "over host memory");
        assert_eq!(goals(Some("file:/pages"), 16, "run-store")["_gates"], Some(3.0));
        assert_eq!(goals(None, 2, "run")["_uniform_p50_bare"], Some(1.15));
        assert_eq!(goals(vram, 16, BARE)["_threads_read"], None, "a control has no goals");
    }
}
