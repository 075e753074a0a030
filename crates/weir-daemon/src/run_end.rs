//! The end of a `weir run` whose daemon or keeper this is. The run may be killed, and so may the
//! keeper.
//!
//! Signals do not end them before: a manager of services sends SIGTERM to all processes of a
//! service. The program may still need its pages then, to save what it has.

use rustix::process::{Signal, getpid, kill_process};
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use weir_export::share::{THREADS_MOST, path_of};
use weir_pager::{Ledger, directory};

/// Whether the run has ended. Until then this process heeds no signal that would end it.
static IS_OVER: AtomicBool = AtomicBool::new(false);

/// Sends this process SIGTERM as soon as the run has ended. Standard input is a pipe whose other
/// end the run holds, so standard input ends with the run.
///
/// # Errors
/// Fails when the system has no thread left.
pub fn watch() -> io::Result<()> {
    thread::Builder::new().name("weir-run-end".into()).spawn(|| {
        let mut input = io::stdin();
        while matches!(input.read(&mut [0; 16]), Ok(1..)) {}
        IS_OVER.store(true, Ordering::Release);
        let _ = kill_process(getpid(), Signal::TERM);
    })?;
    Ok(())
}

/// Whether the run has ended.
pub fn is_over() -> bool {
    IS_OVER.load(Ordering::Acquire)
}

/// Removes the directory of a run that cannot do so itself, because it was killed. `socket` is the
/// pagers' socket, in that directory.
pub fn clear(socket: &Path) {
    let Some(path) = socket.parent() else { return };
    // A later run may make a directory of the same name at any moment. So name this one by its
    // descriptor.
    let Ok(held) = File::open(path) else { return };
    let run = PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd()));
    let ledger = run.join(directory::LEDGER);
    if Ledger::is_abandoned(&ledger) {
        // A daemon that was killed has left its sockets.
        for name in [directory::SHARE, directory::CONTROL, directory::PROGRAMS, directory::MESSAGES] {
            let _ = std::fs::remove_file(run.join(name));
        }
        for number in 1..THREADS_MOST {
            let _ = std::fs::remove_file(path_of(&run.join(directory::SHARE), number));
        }
        let _ = std::fs::remove_file(ledger);
        // This call fails if the directory holds anything else. The directory then stays.
        let _ = std::fs::remove_dir(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_of_a_run_goes_only_once_the_run_has_ended_and_only_what_is_a_run_s() {
        let run = std::env::temp_dir().join(format!("weir-run-end-{}", std::process::id()));
        std::fs::create_dir(&run).unwrap();
        let clear = || clear(&run.join(directory::PROGRAMS));
        clear();
        assert!(run.exists(), "no run has made it");
        let promise = Ledger::create(&run.join(directory::LEDGER)).unwrap();
        std::fs::write(run.join("precious"), "").unwrap();
        clear();
        assert!(run.join(directory::LEDGER).exists(), "the run goes on");
        drop(promise);
        clear();
        assert!(!run.join(directory::LEDGER).exists() && run.join("precious").exists());
        std::fs::remove_file(run.join("precious")).unwrap();
        drop(Ledger::create(&run.join(directory::LEDGER)).unwrap());
        for number in 0..THREADS_MOST {
            std::fs::write(path_of(&run.join(directory::SHARE), number), "").unwrap();
        }
        clear();
        assert!(!run.exists());
    }
}
