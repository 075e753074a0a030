//! Detects when a dead daemon's operations can no longer change a slot.
//!
//! A process that is gone submits nothing more, but its earlier I/O may still land. The kernel
//! neither cancels block I/O that is under way nor waits for it when a process ends. It removes the
//! process's io_urings afterwards, from a work queue (`io_ring_exit_work` in io_uring/io_uring.c).
//! So every io_uring of a store registers the writing end of one pipe among its files. The kernel
//! releases these files only when each request of the io_uring is complete. The keeper also holds
//! the pipe's reading end, so the reading end outlives the daemon. Once no slot can change any
//! more, a poll of the reading end reports a hang-up.

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::pipe::PipeFlags;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The pipe of this store's io_urings, and the pipes of earlier daemons whose I/O may still land.
#[derive(Debug)]
pub(super) struct Quiet {
    reading: OwnedFd,
    writing: OwnedFd,
    before: Vec<OwnedFd>,
}

/// The name under which the keeper holds pipe number `at`. Number 0 is the newest.
fn name(at: usize) -> String {
    format!("quiet.{at}")
}

impl Quiet {
    /// Makes a pipe for the io_urings of a new store.
    pub fn new() -> io::Result<Self> {
        let (reading, writing) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        Ok(Quiet { reading, writing, before: Vec::new() })
    }

    /// Takes the pipes of the store's earlier daemons from `take`, and makes a new pipe for this
    /// daemon's io_urings.
    pub fn after(take: &mut dyn FnMut(&str) -> Option<OwnedFd>) -> io::Result<Self> {
        let mut before: Vec<OwnedFd> = (0..).map_while(|at| take(&name(at))).collect();
        before.retain(|pipe| !has_hung_up(pipe.as_fd()));
        Ok(Quiet { before, ..Quiet::new()? })
    }

    /// The descriptor that each io_uring registers: the pipe's writing end.
    pub fn token(&self) -> BorrowedFd<'_> {
        self.writing.as_fd()
    }

    /// The descriptors for the keeper, with their names.
    pub fn pipes(&self) -> impl Iterator<Item = (String, BorrowedFd<'_>)> {
        let pipes = std::iter::once(&self.reading).chain(&self.before);
        pipes.enumerate().map(|(at, pipe)| (name(at), pipe.as_fd()))
    }

    /// Whether every io_uring of the earlier daemons is gone.
    pub fn is_quiet(&self) -> bool {
        self.before.iter().all(|pipe| has_hung_up(pipe.as_fd()))
    }
}

fn has_hung_up(pipe: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(pipe, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    // If the pipe cannot be polled, the io_urings count as alive.
    rustix::event::poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().contains(PollFlags::HUP)
}

#[cfg(test)]
mod tests {
    use super::*;
    use io_uring::IoUring;
    use std::os::fd::AsRawFd;
    use std::time::{Duration, Instant};

    fn kept(quiet: &Quiet) -> Vec<(String, OwnedFd)> {
        quiet.pipes().map(|(name, fd)| (name, fd.try_clone_to_owned().unwrap())).collect()
    }

    fn after(mut kept: Vec<(String, OwnedFd)>) -> Quiet {
        let mut take = |name: &str| {
            let at = kept.iter().position(|(kept, _)| kept == name)?;
            Some(kept.remove(at).1)
        };
        Quiet::after(&mut take).unwrap()
    }

    #[test]
    fn it_is_quiet_only_when_the_ring_of_the_dead_is_gone_however_many_daemons_later() {
        let Ok(ring) = IoUring::new(4) else {
            eprintln!(
                "skipped: it_is_quiet_only_when_the_ring_of_the_dead_is_gone: io_uring is refused here"
            );
            return;
        };
        let first = Quiet::new().unwrap();
        assert!(first.is_quiet(), "nobody was there before");
        ring.submitter().register_files(&[first.token().as_raw_fd()]).unwrap();
        let left = kept(&first);
        drop(first);
        let second = after(left);
        assert!(!second.is_quiet(), "the ring is still there");
        let left = kept(&second);
        drop(second);
        let third = after(left);
        assert!(!third.is_quiet(), "and still, for the daemon after the next");
        drop(ring);
        let begun = Instant::now();
        while !third.is_quiet() {
            assert!(begun.elapsed() < Duration::from_secs(60), "the ring is gone and nobody says so");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(
            after(kept(&third)).before.iter().all(|pipe| !has_hung_up(pipe.as_fd())),
            "what is over is forgotten"
        );
    }
}
