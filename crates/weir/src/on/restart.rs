//! `weir restart`: replaces the daemon under a device that stays, for instance after an upgrade.
//! The daemon ends as if it had crashed. Its keeper then starts the program that is installed now,
//! which takes over every page and gives NBD devices new connections.

use super::options::RestartOptions;
use super::service;
use super::state::{Journal, Phase, Step};
use crate::failure;
use crate::progress::Waiting;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};
use weir_cli::failure::Failure;
use weir_daemon::control;
use weir_system::Machine;

/// Time that a new daemon may take to answer.
const PATIENCE: Duration = Duration::from_secs(60);
/// A new daemon counts as serving only after it has answered for this time. The keeper also counts
/// a daemon that dies earlier as one that does not serve.
const HOLDS: Duration = Duration::from_millis(1200);

/// Replaces the daemon. An earlier weir made one for each part. These are replaced one after
/// another.
pub fn run(options: &RestartOptions) -> Result<(), Failure> {
    let journal = Journal::open(&options.runtime)?;
    if journal.state().phase != Phase::On {
        let directory = options.runtime.display();
        if journal.state().steps.is_empty() {
            journal.delete()?;
        }
        return Err(Failure::Failed(format!("weir is not on in {directory}; weir on turns it on")));
    }
    let release = Machine::this().release();
    let fails =
        |step: &Step| matches!(step, Step::Device { front, .. } if !front.outlives_its_daemon(&release));
    if journal.state().steps.iter().any(fails) {
        return Err(Failure::Failed(format!(
            "on Linux {release} requests that the daemon has in hand fail when it is replaced under a FUSE file (6.9 sends them again), and \
             programs die of that; run weir off, then weir on"
        )));
    }
    // From here on this process must not wait for swapped pages, since no daemon serves them.
    weir_core::swap_safety::lock_all_memory()
        .map_err(|error| Failure::Failed(format!("{error}; run as root")))?;
    directories(&journal).try_for_each(replace)
}

/// The directories of all daemons.
fn directories(journal: &Journal) -> impl Iterator<Item = &Path> {
    journal.state().steps.iter().filter_map(|step| match step {
        Step::Daemon { directory, .. } => Some(directory.as_path()),
        _ => None,
    })
}

fn replace(directory: &Path) -> Result<(), Failure> {
    let socket = service::control_socket(directory);
    let before = control::status(&socket).map_err(failure::of)?;
    let pid = Pid::from_raw(before.pid as i32).ok_or(Errno::SRCH);
    let begun = Instant::now();
    pid.and_then(|pid| kill_process(pid, Signal::USR1)).map_err(|errno| {
        Failure::Failed(format!("cannot reach the daemon, process {}: {errno}", before.pid))
    })?;
    let mut waiting = Waiting::new(format!("the daemon that follows process {}", before.pid), PATIENCE);
    let mut serving = Serving::default();
    let (after, took) = loop {
        waiting.look();
        let status = control::status(&socket).ok();
        let pid = status.as_ref().map(|status| status.pid);
        if let (Some(took), Some(status)) = (serving.look(pid, before.pid, begun.elapsed()), status) {
            break (status, took);
        }
        if begun.elapsed() > PATIENCE + HOLDS {
            return Err(Failure::Failed(format!(
                "no new daemon answers at {} after {} s; its keeper goes on trying, see weir status",
                socket.display(),
                PATIENCE.as_secs()
            )));
        }
        thread::sleep(Duration::from_millis(10));
    };
    drop(waiting);
    if after.upgrade_failed {
        return Err(Failure::Failed(format!(
            "the program that is installed now does not serve, so weir {} (process {}) goes on: the daemon's log says why; weir off, then weir on starts the installed one",
            after.version, after.pid
        )));
    }
    println!(
        "restarted: weir {} (process {}) is now weir {} (process {}), after {:.2} s",
        before.version,
        before.pid,
        after.version,
        after.pid,
        took.as_secs_f64()
    );
    Ok(())
}

/// The daemon that answers, and the time since when it does.
#[derive(Default)]
struct Serving(Option<(u32, Duration)>);

impl Serving {
    /// Notes which process answers now, if any does. Once a process other than `before` has
    /// answered for [`HOLDS`], returns the time of its first answer.
    fn look(&mut self, pid: Option<u32>, before: u32, now: Duration) -> Option<Duration> {
        self.0 = match (pid.filter(|pid| *pid != before), self.0) {
            (Some(pid), Some((known, since))) if pid == known => Some((pid, since)),
            (pid, _) => pid.map(|pid| (pid, now)),
        };
        self.0.map(|(_, since)| since).filter(|since| now - *since >= HOLDS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_answers_once_and_dies_has_not_replaced_the_one_before() {
        let mut serving = Serving::default();
        let mut look = |pid, tenths: u64| {
            let since = serving.look(pid, 1, Duration::from_millis(100 * tenths));
            since.map(|since| since.as_millis())
        };
        assert_eq!([look(Some(1), 0), look(None, 1), look(Some(2), 2)], [None; 3]);
        assert_eq!([look(None, 3), look(Some(3), 4), look(Some(3), 15)], [None; 3]);
        assert_eq!(look(Some(3), 16), Some(400));
    }
}
