//! The pool of a connection's threads, which take turns at waiting for requests.
//!
//! A request wakes one thread, and only if no other thread looks for requests. So one thread at a
//! time waits at `/dev/fuse`: it spins for a while, then sleeps. The others are parked. A thread
//! that finds several requests in a row wakes a parked one to help. A thread that must wait for a
//! slow store wakes a parked one to take its place. A thread that finds no request parks again, if
//! another thread waits at `/dev/fuse`.

use super::device::Device;
use crate::spin::SpinGate;
use rustix::event::{EventfdFlags, PollFd, PollFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::Thread;

/// Largest number of threads of a pool, which has one bit for each.
pub const THREADS_MAX: usize = 64;

/// The state that the threads of a connection share.
#[derive(Debug)]
pub(super) struct Pool {
    threads: Box<[OnceLock<Thread>]>,
    /// A bit for each parked thread.
    parked: AtomicU64,
    /// Number of threads that look for requests. A thread that is answering a request counts too,
    /// if it looks for the next one afterwards.
    at_device: AtomicUsize,
    stop: AtomicBool,
    /// An eventfd that becomes readable once the threads are to leave.
    bell: OwnedFd,
    /// An eventfd that becomes readable once the file system has been unmounted.
    gone: OwnedFd,
    pub gate: SpinGate,
}

impl Pool {
    pub fn new(threads: usize) -> io::Result<Pool> {
        assert!(threads <= THREADS_MAX, "one bit a thread");
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Pool {
            threads: (0..threads).map(|_| OnceLock::new()).collect(),
            parked: AtomicU64::new(0),
            at_device: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            bell: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            gone: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            gate: SpinGate::new(processors),
        })
    }

    /// Registers the calling thread as number `number`.
    pub fn join(&self, number: usize) {
        // This call cannot fail. Each number belongs to one thread, and each thread joins once, so
        // no thread has set this cell before.
        let _ = self.threads[number].set(std::thread::current());
        self.back();
    }

    /// Notes that the calling thread stops looking for requests, until it calls
    /// [`back`](Pool::back). If no other thread looks for requests now, wakes a parked one.
    pub fn away(&self) {
        if self.at_device.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.call_one();
        }
    }

    /// Notes that the calling thread looks for requests again.
    pub fn back(&self) {
        self.at_device.fetch_add(1, Ordering::SeqCst);
    }

    /// Wakes a parked thread, if there is one.
    pub fn call_one(&self) {
        let mut parked = self.parked.load(Ordering::SeqCst);
        while parked != 0 {
            let bit = 1 << parked.trailing_zeros();
            match self.parked.fetch_and(!bit, Ordering::SeqCst) {
                was if was & bit != 0 => {
                    if let Some(thread) = self.threads[bit.trailing_zeros() as usize].get() {
                        thread.unpark();
                    }
                    return;
                }
                was => parked = was & !bit,
            }
        }
    }

    /// If another thread looks for requests, parks the calling thread until it is woken. Returns
    /// whether the thread was parked.
    pub fn step_aside(&self, number: usize) -> bool {
        if self.at_device.load(Ordering::SeqCst) <= 1 {
            return false;
        }
        if self.at_device.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.back();
            return false;
        }
        let bit = 1 << number;
        self.parked.fetch_or(bit, Ordering::SeqCst);
        // The last thread at `/dev/fuse` may have left before the calling thread counted as parked.
        // Then nobody would wake the calling thread, so it does not park.
        if self.at_device.load(Ordering::SeqCst) == 0 {
            self.parked.fetch_and(!bit, Ordering::SeqCst);
        }
        while self.parked.load(Ordering::SeqCst) & bit != 0 && !self.is_stopping() {
            std::thread::park();
        }
        self.back();
        true
    }

    /// Sleeps until `/dev/fuse` may have a request or the pool is to stop.
    pub fn sleep(&self, device: &Device) -> rustix::io::Result<()> {
        let mut fds = [
            PollFd::from_borrowed_fd(device.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.bell.as_fd(), PollFlags::IN),
        ];
        match rustix::event::poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    /// Notes that the file system was unmounted: every thread leaves, and the owner is told.
    pub fn gone(&self) {
        self.stop();
        let _ = rustix::io::write(&self.gone, &1u64.to_ne_bytes());
    }

    /// Becomes readable once the file system has been unmounted.
    pub fn unmounted(&self) -> BorrowedFd<'_> {
        self.gone.as_fd()
    }

    /// Becomes readable once the threads are to leave.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Whether the threads are to leave.
    pub fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Tells every thread to leave once it has answered its request.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        // The write fails only if the bell's counter is full, after 2^64 rings.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        for thread in self.threads.iter().filter_map(OnceLock::get) {
            thread.unpark();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    #[test]
    fn the_only_thread_at_the_device_does_not_step_aside_and_others_come_when_it_leaves() {
        let pool = Arc::new(Pool::new(2).unwrap());
        pool.join(0);
        assert!(!pool.step_aside(0));
        let other = {
            let pool = Arc::clone(&pool);
            std::thread::spawn(move || {
                pool.join(1);
                assert!(pool.step_aside(1));
                assert!(!pool.step_aside(1), "it is the only one now");
            })
        };
        let begun = Instant::now();
        while pool.parked.load(Ordering::SeqCst) == 0 {
            assert!(begun.elapsed() < Duration::from_secs(60));
            std::thread::yield_now();
        }
        pool.away();
        other.join().unwrap();
    }

    #[test]
    fn stopping_wakes_those_that_are_parked() {
        let pool = Arc::new(Pool::new(2).unwrap());
        pool.join(0);
        let other = {
            let pool = Arc::clone(&pool);
            std::thread::spawn(move || {
                pool.join(1);
                pool.step_aside(1);
            })
        };
        pool.stop();
        other.join().unwrap();
        assert!(pool.is_stopping());
    }
}
