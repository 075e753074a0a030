//! Protections of a process on whose memory the kernel swaps. The facts are from prctl(2),
//! mm/vmscan.c, drivers such as nbd-client -swap, and the deadlock reports that led to
//! `PR_SET_IO_FLUSHER`.
//!
//! - The flusher flag (`PR_SET_IO_FLUSHER`, Linux 5.6) sets `PF_MEMALLOC_NOIO | PF_LOCAL_THROTTLE`:
//!   an allocation of this process never waits for I/O, which would be its own. The flag is per
//!   task and inherited by clone. So it is set first in `main`, before any thread, and checked on
//!   each I/O thread.
//! - `mlockall` keeps this process's own pages out of the swap that it serves.
//! - An OOM score of -1000 keeps the kernel from killing the one process whose death loses all
//!   pages.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

/// The message of a server that is asked to serve swap, in a process that has not called
/// [`protect`].
pub const NOT_PROTECTED: &str =
    "threads that are to serve swap lack the I/O flusher flag: call swap_safety::protect first in main";

/// The protections of this process that are in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Protections {
    /// Whether `PR_SET_IO_FLUSHER` is set on the calling thread and inherited by its children.
    pub io_flusher: bool,
    /// Whether all memory, present and future, is locked.
    pub memory_locked: bool,
    /// Whether the OOM killer passes over this process.
    pub oom_exempt: bool,
}

/// A protection that the system denies.
#[derive(Debug, thiserror::Error)]
#[error("{protection} cannot be set: {reason}")]
pub struct Unprotected {
    /// The protection's name.
    pub protection: &'static str,
    /// The right that is missing, and what the operator can do.
    pub reason: &'static str,
    /// The error of the system call that was to set the protection.
    #[source]
    pub source: io::Error,
}

/// Sets `PR_SET_IO_FLUSHER` on the calling thread. Call it first in `main`: threads made later
/// inherit it.
///
/// # Errors
/// Fails with `EPERM` without `CAP_SYS_RESOURCE`, with `EINVAL` before Linux 5.6.
pub fn set_io_flusher() -> Result<(), Unprotected> {
    rustix::process::configure_io_flusher_behavior(true).map_err(|errno| flusher_error(errno.into()))
}

/// Whether the calling thread has the flusher flag.
///
/// # Errors
/// Fails as [`set_io_flusher`] does: reading the flag needs `CAP_SYS_RESOURCE` too.
pub fn has_io_flusher() -> Result<bool, Unprotected> {
    rustix::process::is_io_flusher().map_err(|errno| flusher_error(errno.into()))
}

fn flusher_error(source: io::Error) -> Unprotected {
    let reason = if source.raw_os_error() == Some(libc::EPERM) {
        "the process lacks CAP_SYS_RESOURCE; run it as root with that capability (systemd: \
         AmbientCapabilities=CAP_SYS_RESOURCE)"
    } else {
        "the kernel is older than 5.6"
    };
    Unprotected { protection: "PR_SET_IO_FLUSHER", reason, source }
}

/// Locks all present and future memory of the process.
///
/// # Errors
/// Fails with `ENOMEM` or `EPERM` if `RLIMIT_MEMLOCK` is too small and `CAP_IPC_LOCK` missing.
pub fn lock_all_memory() -> Result<(), Unprotected> {
    rustix::mm::mlockall(rustix::mm::MlockAllFlags::CURRENT | rustix::mm::MlockAllFlags::FUTURE).map_err(
        |errno| Unprotected {
            protection: "mlockall",
            reason: "raise RLIMIT_MEMLOCK (systemd: LimitMEMLOCK=infinity) or grant CAP_IPC_LOCK",
            source: errno.into(),
        },
    )?;
    LOCKS_ALL.store(true, Ordering::Relaxed);
    Ok(())
}

/// Whether [`lock_all_memory`] was granted: later mappings are then locked from their first page
/// on.
pub fn locks_all_memory() -> bool {
    LOCKS_ALL.load(Ordering::Relaxed)
}

static LOCKS_ALL: AtomicBool = AtomicBool::new(false);

/// Exempts the process from the OOM killer.
///
/// # Errors
/// Fails with `EACCES` without `CAP_SYS_RESOURCE`.
pub fn exempt_from_oom_killer() -> Result<(), Unprotected> {
    std::fs::write("/proc/self/oom_score_adj", "-1000").map_err(|source| Unprotected {
        protection: "OOM score -1000",
        reason: "the process lacks CAP_SYS_RESOURCE (systemd: OOMScoreAdjust=-1000)",
        source,
    })
}

/// Whether threads and processes that a thread starts inherit its priority.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Children {
    /// The threads that this thread starts are real-time too, until they change that.
    Inherit,
    /// The threads that this thread starts are ordinary ones, and not real-time.
    Ordinary,
}

/// Makes the calling thread a real-time thread of the lowest priority. The kernel lets such a
/// thread use two of its reserves: the memory below `vm.min_free_kbytes`, and the memory set aside
/// against fragmentation (mm/page_alloc.c, `gfp_to_alloc_flags`: `rt_task`; `zone_watermark_fast`).
/// The thread also runs as soon as there is work.
///
/// # Errors
/// Fails with `EPERM` without `CAP_SYS_NICE`, or if systemd's `RestrictRealtime=` forbids it.
pub fn reach_reserves(children: Children) -> io::Result<()> {
    let reset = if children == Children::Ordinary { libc::SCHED_RESET_ON_FORK } else { 0 };
    schedule(libc::SCHED_RR | reset, 1)
}

/// Ends the real-time priority of the calling thread.
///
/// # Errors
/// Fails with the error of `sched_setscheduler`.
pub fn leave_reserves() -> io::Result<()> {
    schedule(libc::SCHED_OTHER, 0)
}

fn schedule(policy: libc::c_int, sched_priority: libc::c_int) -> io::Result<()> {
    let parameter = libc::sched_param { sched_priority };
    // SAFETY: 0 is the calling thread; the parameter outlives the call.
    match unsafe { libc::sched_setscheduler(0, policy, &parameter) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets all three protections. Returns those that hold, and those that the system denied. Call it
/// before the first thread is started.
pub fn protect() -> (Protections, Vec<Unprotected>) {
    let mut missing = Vec::new();
    let mut holds = |result: Result<(), Unprotected>| match result {
        Ok(()) => true,
        Err(error) => {
            missing.push(error);
            false
        }
    };
    let protections = Protections {
        io_flusher: holds(set_io_flusher()),
        oom_exempt: holds(exempt_from_oom_killer()),
        memory_locked: holds(lock_all_memory()),
    };
    (protections, missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_urgent_until_it_says_otherwise_and_its_children_as_it_chose() {
        // SAFETY: 0 is the calling thread.
        let policy = || unsafe { libc::sched_getscheduler(0) } & !libc::SCHED_RESET_ON_FORK;
        let of_a_child = move || std::thread::spawn(policy).join().unwrap();
        std::thread::spawn(move || {
            if let Err(error) = reach_reserves(Children::Ordinary) {
                println!("skipped: real-time threads are not allowed here: {error}");
                return;
            }
            assert_eq!((policy(), of_a_child()), (libc::SCHED_RR, libc::SCHED_OTHER));
            reach_reserves(Children::Inherit).unwrap();
            assert_eq!((policy(), of_a_child()), (libc::SCHED_RR, libc::SCHED_RR));
            leave_reserves().unwrap();
            assert_eq!((policy(), of_a_child()), (libc::SCHED_OTHER, libc::SCHED_OTHER));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn the_flusher_is_set_and_inherited_or_the_missing_capability_is_named() {
        match set_io_flusher() {
            Ok(()) => {
                assert!(has_io_flusher().unwrap());
                assert!(std::thread::spawn(|| has_io_flusher().unwrap()).join().unwrap());
            }
            Err(error) => {
                assert!(error.to_string().contains("CAP_SYS_RESOURCE"), "{error}");
                assert!(has_io_flusher().is_err());
            }
        }
    }
}
