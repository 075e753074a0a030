//! `weir vm`: runs QEMU as `weir run` does, and makes sure that its guest's memory is bounded.
//!
//! QEMU's guest memory is a private anonymous mapping, unless an option changes that. `weir vm`
//! refuses such an option before it starts QEMU. Other obstacles show only in the mappings of the
//! process. `weir vm` checks these mappings as soon as QEMU has made the guest's memory.

mod memory;
mod qemu;

use super::{TIMES, end, execute};
use crate::cli::VmOptions;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::path::Path;
use std::process::Child;
use std::thread::{self, JoinHandle};
use std::time::Duration;
use weir_cli::failure::Failure;
use weir_core::ByteSize;
use weir_store::StoreUrl;

/// Time between two looks at the mappings of QEMU, at first. It doubles up to `LOOK_MAX`.
const LOOK: Duration = Duration::from_millis(20);
const LOOK_MAX: Duration = Duration::from_millis(900);

/// Bytes of the default store for QEMU's own memory, beside the guest's memory.
const BESIDE: u64 = 256 << 20;

/// Runs QEMU to its end, and ends with its exit status.
pub fn vm(options: VmOptions) -> Result<(), Failure> {
    let VmOptions { mut bound, qemu } = options;
    let resident = bound.resident;
    let name = Path::new(&qemu[0]);
    if !qemu::is_qemu(name) {
        return Err(Failure::Failed(format!(
            "{} is not QEMU; weir run bounds programs of every kind",
            name.display()
        )));
    }
    let guest = qemu::read(&qemu[1..])
        .map_err(|(option, why)| Failure::Failed(format!("{option} cannot be bounded: {why}")))?;
    if bound.store.is_empty() {
        let size = ByteSize((guest.most + BESIDE).max(resident.0 * TIMES));
        bound.store.push(StoreUrl::Host { size });
    }
    let fits = |room: u64| {
        let lacking = guest.most.saturating_sub(resident.0.saturating_add(room));
        match lacking {
            0 => Ok(()),
            _ => Err(Failure::Failed(format!(
                "the guest may have {} of memory, and there is room for {} beside the limit of {resident}; \
                 make --store larger by {}",
                ByteSize(guest.most),
                ByteSize(room),
                ByteSize(lacking)
            ))),
        }
    };
    let (status, watch) = execute(&qemu, &bound, fits, |child| watch(child, guest.at_start))?;
    match watch.join() {
        Ok(Some(why)) => Err(Failure::Failed(format!("the virtual machine was ended: {why}"))),
        _ => end(status),
    }
}

/// Starts a thread that checks QEMU until QEMU has made the guest's memory. If that memory cannot
/// be bounded, the thread ends QEMU and returns the reason. By that time the guest's firmware has
/// hardly begun.
fn watch(child: &Child, ram: u64) -> JoinHandle<Option<String>> {
    let process = Pid::from_child(child);
    // No caller has waited for the child yet, so its PID cannot belong to another process.
    let descriptor = pidfd_open(process, PidfdFlags::empty());
    thread::spawn(move || {
        let descriptor = descriptor.ok()?;
        let mut pause = LOOK;
        loop {
            match memory::look(process.as_raw_nonzero().get(), ram) {
                memory::Verdict::NotYet => {}
                memory::Verdict::Bounded => return None,
                memory::Verdict::Refused(why) => {
                    let _ = pidfd_send_signal(&descriptor, Signal::TERM);
                    return Some(why);
                }
            }
            let timeout = Timespec { tv_sec: 0, tv_nsec: pause.subsec_nanos().into() };
            // The descriptor becomes readable once the process has ended.
            if poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&timeout)).ok()? > 0 {
                return None;
            }
            pause = (pause * 2).min(LOOK_MAX);
        }
    })
}
