//! Brings swapped pages back. It first checks whether there is room for them, then shows progress.
//! Ctrl-C leaves the device on.
//!
//! swapoff(2) runs in a child process. A signal ends it in the middle, and the device stays swap
//! (`EINTR` from `try_to_unuse`). While it runs, the kernel marks its process as the first to be
//! killed for want of memory (`set_current_oom_origin`), which must not be this process.

use super::interrupt;
use crate::progress::Shown;
use rustix::process::{Pid, Signal};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;
use weir_cli::failure::Failure;
use weir_core::ByteSize;
use weir_system::{Machine, swaps};

/// Time between two looks at the progress of swapoff.
const LOOK: Duration = Duration::from_millis(100);
/// Memory that must stay free besides the pages that are brought back.
const SPARE: ByteSize = ByteSize(32 << 20);
/// Exit code of the child when the kernel has no memory for the pages.
const NO_MEMORY: i32 = 3;

/// Memory and swap, as far as they decide whether pages fit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Room {
    /// Bytes swapped to the devices that are to be turned off.
    pub swapped: ByteSize,
    /// Memory that the kernel calls available (`MemAvailable`).
    pub available: ByteSize,
    /// Bytes that are free on the swap devices that stay on.
    pub other_swap: ByteSize,
}

impl Room {
    /// Bytes of pages that would not fit; zero if all do.
    pub fn lacking(self) -> ByteSize {
        let room = (self.available.0 + self.other_swap.0).saturating_sub(SPARE.0);
        ByteSize(self.swapped.0.saturating_sub(room))
    }
}

/// Refuses if the pages on `devices` fit nowhere else. Changes nothing.
pub fn check_room(devices: &[PathBuf]) -> Result<(), Failure> {
    let swaps = swaps::all().map_err(Failure::failed)?;
    let (ours, others): (Vec<_>, Vec<_>) =
        swaps.iter().partition(|swap| devices.iter().any(|device| device == Path::new(&swap.path)));
    let swapped = ByteSize(ours.iter().map(|swap| swap.used.0).sum());
    let other_swap = ByteSize(others.iter().map(|swap| swap.size.0.saturating_sub(swap.used.0)).sum());
    let available = Machine::this().available_to_all();
    let available = available.ok_or_else(|| Failure::failed("/proc/meminfo has no MemAvailable"))?;
    let room = Room { swapped, available, other_swap };
    let lacking = room.lacking();
    if lacking.0 == 0 {
        return Ok(());
    }
    Err(Failure::Failed(format!(
        "{swapped} is swapped out, and {lacking} of it would not fit: {} of RAM and {other_swap} of other swap are free; \
         close some programs, or add swap (a file will do), then try again; nothing was changed",
        room.available
    )))
}

/// Exit code of the child when another swapoff of the device is at work, for instance that of a
/// killed `weir off`. The kernel returns EINVAL (mm/swapfile.c: the area is not `SWP_WRITEOK`).
const ELSEWHERE: i32 = 4;

/// The child process's work: one swapoff.
pub fn swapoff_here(device: &Path) -> Result<(), Failure> {
    match swaps::off(device) {
        Ok(()) => Ok(()),
        Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => std::process::exit(NO_MEMORY),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) && swaps::is_on(device) => {
            std::process::exit(ELSEWHERE)
        }
        Err(error) => Err(Failure::Failed(format!("swapoff {}: {error}", device.display()))),
    }
}

/// Stops swapping on a device. Returns once all pages are back. A device that is no swap is no
/// error.
pub fn swapoff(device: &Path) -> Result<(), Failure> {
    let Some(swap) = swaps::find(device).map_err(Failure::failed)? else { return Ok(()) };
    let failed =
        |error: io::Error| Failure::Failed(format!("cannot run swapoff {}: {error}", device.display()));
    interrupt::forget();
    let start = || {
        let mut swapoff = Command::new("/proc/self/exe");
        swapoff.args(["off", "--swapoff"]).arg(device).stdin(Stdio::null()).stdout(Stdio::null());
        swapoff.spawn().map_err(failed)
    };
    let mut child = start()?;
    let total = swap.used.0;
    let mut shown =
        Shown::new("bringing pages back", |far, left| println!("bringing pages back: {far}{left}"));
    if total > 0 {
        shown.show(0, total);
    }
    let status = loop {
        match child.try_wait().map_err(failed)? {
            // Another swapoff works on the device. Once that has ended, the device is off, or this
            // process can try again.
            Some(status) if status.code() == Some(ELSEWHERE) && !interrupt::came() => {
                thread::sleep(LOOK);
                child = start()?;
            }
            Some(status) => break status,
            None => {}
        }
        if interrupt::came() {
            stop(&child);
            break child.wait().map_err(failed)?;
        }
        if let Ok(Some(swap)) = swaps::find(device) {
            // Pages may have been swapped out since `total` was read.
            let total = total.max(swap.used.0);
            shown.show(total - swap.used.0, total);
        }
        thread::sleep(LOOK);
    };
    drop(shown);
    match swaps::find(device).map_err(Failure::failed)? {
        None => Ok(()),
        Some(swap) => Err(Failure::Failed(still_on(device, swap.used, status))),
    }
}

fn stop(child: &Child) {
    // No signal can be sent if the child has ended already. The caller notices that when it waits
    // for the child.
    let _ = rustix::process::kill_process(Pid::from_child(child), Signal::INT);
}

fn still_on(device: &Path, used: ByteSize, status: ExitStatus) -> String {
    let device = device.display();
    let why = if status.code() == Some(ELSEWHERE) {
        "another swapoff is at work, and goes on".to_owned()
    } else if interrupt::came() {
        "interrupted".to_owned()
    } else if status.code() == Some(NO_MEMORY) {
        "there is not enough memory for its pages, or a memory cgroup's limit leaves them no room".to_owned()
    } else if status.code().is_none() {
        format!("swapoff was ended by a signal ({status}), as happens when memory runs out")
    } else {
        format!("swapoff failed ({status})")
    };
    format!("{why}: {device} stays on with {used}; try again when there is room")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_fit_into_free_memory_and_other_swap_together() {
        let mib = |mib: u64| ByteSize(mib << 20);
        let room = |swapped, available, other| Room {
            swapped: mib(swapped),
            available: mib(available),
            other_swap: mib(other),
        };
        assert_eq!(room(1000, 2000, 0).lacking(), mib(0));
        assert_eq!(room(1000, 500, 600).lacking(), mib(0));
        assert_eq!(room(1000, 500, 0).lacking(), mib(532), "32 MiB of the free memory stay free");
        assert_eq!(room(0, 0, 0).lacking(), mib(0), "nothing swapped always fits");
    }
}
