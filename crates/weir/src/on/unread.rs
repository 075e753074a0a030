//! Pages that could not be read while swap was turned off. The kernel turns the swap off all the
//! same. A program that touches such a page afterwards gets SIGBUS.

use super::service;
use super::state::{Journal, Step};
use std::path::{Path, PathBuf};
use weir_core::ByteSize;
use weir_daemon::control;

/// The daemons of a device, as they were before its swap was turned off.
pub struct Daemons(Vec<Daemon>);

struct Daemon {
    directory: PathBuf,
    /// Whether the daemon's process, or that of its keeper, was there.
    was_there: bool,
    failed: Option<Failed>,
}

impl Daemons {
    /// Looks at the daemons of a device that is on.
    pub fn before(journal: &Journal) -> Self {
        let look = |step: &Step| match step {
            Step::Daemon { directory, unit, process } => Some(Daemon {
                was_there: service::running(directory, unit.as_deref(), *process).is_some(),
                failed: failed(directory),
                directory: directory.clone(),
            }),
            _ => None,
        };
        Daemons(journal.state().steps.iter().filter_map(look).collect())
    }

    /// A sentence about the pages that were lost while the swap was turned off, or `None`. `used`:
    /// the bytes that were swapped out. The daemons must still run.
    pub fn lost(&self, used: ByteSize) -> Option<String> {
        self.0.iter().find_map(|daemon| daemon.lost(failed(&daemon.directory), used))
    }
}

impl Daemon {
    /// See [`Daemons::lost`]. `now` is what `failed` was before, after the swap was turned off.
    fn lost(&self, now: Option<Failed>, used: ByteSize) -> Option<String> {
        if used.0 == 0 {
            return None;
        }
        if !self.was_there && self.failed.is_none() && now.is_none() {
            return Some(format!(
                "the daemon had ended before, and its pages with it: up to {used} are lost"
            ));
        }
        let Some(now) = now else {
            return Some(format!("the daemon does not answer, so some of {used} may be lost"));
        };
        // A daemon that has followed counts from 0 on, and the kernel may have given requests up
        // while there was none.
        let Some(before) = self.failed.filter(|before| before.process == now.process) else {
            return Some(format!("the daemon was replaced meanwhile, so some of {used} may be lost"));
        };
        let pages = now.pages.saturating_sub(before.pages);
        (pages > 0).then(|| format!("{pages} pages could not be read, and are lost"))
    }
}

/// The pages whose read has failed since a daemon's start.
#[derive(Clone, Copy)]
struct Failed {
    process: u32,
    pages: u64,
}

/// Asks the daemon. `None`: it does not answer.
fn failed(directory: &Path) -> Option<Failed> {
    let status = control::status(&service::control_socket(directory)).ok()?;
    Some(Failed { process: status.pid, pages: status.read.faults })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_lost_with_their_daemon_or_by_reads_that_failed_while_swap_was_turned_off() {
        let failed = |process, pages| Some(Failed { process, pages });
        let said = |was_there, before, now, used| {
            let daemon = Daemon { directory: PathBuf::new(), was_there, failed: before };
            daemon.lost(now, ByteSize(used)).unwrap_or_default()
        };
        assert_eq!(said(true, failed(7, 3), failed(7, 3), 1 << 20), "");
        assert_eq!(
            said(true, failed(7, 3), failed(7, 5), 1 << 20),
            "2 pages could not be read, and are lost"
        );
        let replaced = "the daemon was replaced meanwhile, so some of 1MiB may be lost";
        assert_eq!(said(true, failed(7, 3), failed(8, 0), 1 << 20), replaced);
        assert_eq!(said(true, None, failed(8, 0), 1 << 20), replaced);
        assert_eq!(said(false, failed(7, 3), failed(7, 3), 1 << 20), "", "it has answered");
        assert!(said(true, failed(7, 3), None, 1 << 20).starts_with("the daemon does not answer"));
        assert!(said(false, None, None, 1 << 20).ends_with("up to 1MiB are lost"));
        assert_eq!(said(false, None, None, 0), "");
    }
}
