//! `weir bench long`: requests of 1 MiB, by one job and by four, each with eight in flight.
//!
//! Weir serves a store. If the store is a card, Weir runs a second time without the processor's
//! window onto the card. Beside Weir run nbdkit's memory plugin and a server that keeps no pages.
//! If the path of nbd-vram's program is given, nbd-vram runs too: it keeps pages on the same card
//! without a checksum. The servers take turns. For each of them fio reads and writes in random
//! order. Every device is first written in order. The writes between two runs of reads move Weir's
//! pages.

use super::echo::Echo;
use super::server::{Directory, Server};
use super::{BlockError, Case, Plan, Way, fio};
use crate::report::{Goal, Report, Row};
use crate::steps::Steps;
use std::path::PathBuf;

/// The settings of the long benchmark: those of the block benchmark, and one more server.
#[derive(Clone, Debug)]
pub struct Long {
    /// The plan: Weir's program, device, store, time and runs.
    pub plan: Plan,
    /// The path of nbd-vram's program.
    pub nbd_vram: Option<PathBuf>,
}

const CASES: [Case; 4] = [
    long("1x8_read", false, 1),
    long("1x8_write", true, 1),
    long("4x8_read", false, 4),
    long("4x8_write", true, 4),
];

const fn long(id: &'static str, write: bool, jobs: u32) -> Case {
    Case { id, write, sequential: false, block: 1 << 20, jobs, depth: 8, pause: 0 }
}

/// A server that is measured.
struct Asked {
    name: &'static str,
    /// For Weir, the start of its rows' ids; `None` for a control.
    prefix: Option<&'static str>,
    /// The server's process; `None` for a server in this process.
    server: Option<Server>,
    /// Whether the server has failed and gets no more requests. Only its own rows are lost then,
    /// not the run.
    fails: bool,
    ways: [Way; CASES.len()],
}

impl Asked {
    fn weir(prefix: &'static str, server: Result<Server, BlockError>, steps: &Steps) -> Asked {
        Asked { prefix: Some(prefix), ..Asked::control("weir", server, steps) }
    }

    fn control(name: &'static str, server: Result<Server, BlockError>, steps: &Steps) -> Asked {
        let mut asked = Asked { name, prefix: None, server: None, fails: false, ways: Default::default() };
        asked.server = asked.complain("at its start", server, steps);
        asked.fails = asked.server.is_none();
        asked
    }

    fn called(&self) -> String {
        format!("{}{}", self.prefix.unwrap_or_default(), self.name)
    }

    /// Returns the figures. If there are none, prints a line with the reason.
    fn complain<T>(&self, when: &str, result: Result<T, BlockError>, steps: &Steps) -> Option<T> {
        let say =
            |error: &_| steps.say(format_args!("{} fails {when}: {error}; it is left out", self.called()));
        result.inspect_err(say).ok()
    }
}

/// Runs every case on every server, in turns.
///
/// # Errors
/// Fails when there is no directory for the sockets. A server that fails is left out from then on.
/// If that server is Weir's, its rows miss their goals.
pub fn run(Long { plan, nbd_vram }: &Long) -> Result<Report, BlockError> {
    let sockets = Directory::new().map_err(BlockError::Directory)?;
    let echo = Echo::start(plan, &sockets)?;
    let alone = plan.store.as_ref().filter(|store| store.starts_with("vram:")).map(|store| {
        let alone = format!("{store}{}window=off", if store.contains('?') { "&" } else { "?" });
        Plan { store: Some(alone), ..plan.clone() }
    });
    // Weir, nbdkit and the server that keeps no pages always run.
    let servers = 3 + usize::from(alone.is_some()) + usize::from(nbd_vram.is_some());
    let steps = Steps::new(plan.runs * CASES.len() * servers);
    let mut asked = vec![Asked::weir("", Server::weir(plan, 0, "weir", &sockets), &steps)];
    asked.extend(
        alone.map(|plan| Asked::weir("cuda_alone_", Server::weir(&plan, 0, "weir-cuda", &sockets), &steps)),
    );
    asked.extend(
        nbd_vram
            .as_ref()
            .map(|program| Asked::control("nbd-vram", Server::nbd_vram(plan, program, &sockets), &steps)),
    );
    asked.push(Asked::control("nbdkit-memory", Server::nbdkit(plan, &sockets), &steps));
    for asked in &mut asked {
        if let Some(server) = &asked.server {
            asked.fails |= asked.complain("before", fio::fill(server, plan.size), &steps).is_none();
        }
    }
    asked.push(Asked {
        name: "a server of nothing",
        prefix: None,
        server: None,
        fails: false,
        ways: Default::default(),
    });
    for run in 0..plan.runs {
        for (at, case) in CASES.into_iter().enumerate() {
            steps.part(case.id);
            for turn in 0..asked.len() {
                let count = asked.len();
                let asked = &mut asked[(run + turn) % count];
                if asked.fails {
                    steps.end();
                    continue;
                }
                let figures = match &asked.server {
                    Some(server) => fio::run(server, case, plan.size, plan.time),
                    None => fio::latencies(&echo.socket, case, plan.size, plan.time).map(|it| it.0),
                };
                match asked.complain(case.id, figures, &steps) {
                    Some(figures) => {
                        let rate = figures.per_second * f64::from(case.block) / 1e6;
                        steps.say(format_args!("{} {}: {rate:.0} MB/s", asked.called(), case.id));
                        asked.ways[at].push(figures);
                    }
                    None => asked.fails = true,
                }
                steps.end();
            }
        }
    }
    let mut report = Report::new("long", plan.runs);
    for (at, case) in CASES.into_iter().enumerate() {
        let weirs = asked.iter().filter_map(|it| Some((it.prefix?, &it.ways[at])));
        for (prefix, weir) in weirs {
            for control in asked.iter().filter(|it| it.prefix.is_none() && !it.ways[at].is_empty()) {
                report.rows.extend(rows(case, prefix, weir, control.name, &control.ways[at]));
            }
        }
    }
    Ok(report)
}

/// The report's rows that compare Weir's figures with those of one control.
fn rows(case: Case, prefix: &str, weir: &Way, control: &'static str, theirs: &Way) -> Vec<Row> {
    // The rate of a server that failed counts as zero, so that the server misses its goal.
    let rate = |way: &Way| match way.is_empty() {
        true => 0.0,
        false => way.per_second.median() * f64::from(case.block) / 1e6,
    };
    let id = format!("{prefix}{}", case.id);
    let row = Row::higher(&id, "mb_per_s", rate(weir)).beside(control, rate(theirs));
    // Only the comparison with nbd-vram has a goal, since nbd-vram keeps its pages on the card too.
    let goal = if case.jobs == 1 { 1.0 } else { 1.1 };
    let mut rows = vec![if control == "nbd-vram" { row.goal(Goal::Ratio(goal)) } else { row }];
    if !weir.is_empty() && theirs.cpu_us.median() > 0.0 {
        for (metric, runs) in
            [("server_cpu_us", |way: &Way| &way.cpu_us), ("server_user_us", |way: &Way| &way.user_us)]
                as [(&str, fn(&Way) -> &crate::report::Runs); 2]
        {
            rows.push(Row::lower(&id, metric, runs(weir).median()).beside(control, runs(theirs).median()));
        }
    }
    rows
}
