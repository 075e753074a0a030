//! Checks of this machine: what it offers to Weir, and the next step for each thing that it lacks.
//!
//! Every check reads the machine through [`Machine`]: its directory is `/`, or a fixture in tests.
//! So a test can run each check on a machine that has a thing, and on one that lacks it.

mod finding;
mod gpu;
mod kernel;
mod memory;
mod process;
mod system;

use crate::cli::DoctorOptions;
use finding::{Finding, Level};
pub use process::Capabilities;
use serde::Serialize;
pub use system::suspend_loses_pages;
use weir_cli::failure::Failure;
use weir_daemon::cards::{self, Looked};
use weir_system::Machine;

/// The whole report, as `--json` prints it.
#[derive(Debug, Serialize)]
struct Report {
    schema: u32,
    version: &'static str,
    worst: Level,
    checks: Vec<Finding>,
}

impl Report {
    fn of(machine: &Machine, looked: &Looked) -> Self {
        let mut checks = Vec::new();
        checks.extend(gpu::check(machine, looked));
        checks.extend(kernel::check(machine));
        checks.extend(process::check(machine));
        checks.extend(memory::check(machine));
        checks.extend(system::check(machine));
        let worst = checks.iter().map(|finding| finding.level).max().unwrap_or(Level::Ok);
        Report { schema: 1, version: env!("CARGO_PKG_VERSION"), worst, checks }
    }
}

/// Prints the report. Fails (exit code 1) when a finding is a failure.
pub fn run(options: DoctorOptions) -> Result<(), Failure> {
    let report = Report::of(&Machine::this(), &cards::look(&cards::all()));
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report).map_err(Failure::failed)?);
    } else {
        for finding in &report.checks {
            println!("{finding}");
        }
    }
    if report.worst == Level::Fail { Err(Failure::Said) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpu::no_cards;
    use weir_system::fixture::Fixture;

    #[test]
    fn a_machine_with_nothing_at_all_gets_a_next_step_for_all_that_is_wrong() {
        let report = Report::of(&Fixture::new("nothing").machine(), &no_cards());
        for finding in &report.checks {
            assert!(finding.level == Level::Ok || finding.next.is_some(), "{finding}");
        }
        assert_eq!(report.worst, Level::Fail);
    }

    #[test]
    fn no_two_checks_share_an_id() {
        let report = Report::of(&Machine::this(), &no_cards());
        let mut ids: Vec<_> = report.checks.iter().map(|finding| finding.id).collect();
        ids.sort_unstable();
        let count = ids.len();
        ids.dedup();
        assert_eq!(ids.len(), count, "{ids:?}");
    }
}
