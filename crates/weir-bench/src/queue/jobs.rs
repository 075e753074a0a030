//! The jobs that every design's worker runs, and the count that tells a round when all have run.

use std::sync::atomic::{AtomicU64, Ordering::*};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, Thread};
use std::time::Instant;

/// The number of jobs in the current round, and the number of them that the worker has run.
pub(super) struct Tally {
    expected: AtomicU64,
    /// Number of jobs that have run; only the worker writes it.
    ran: AtomicU64,
    /// The time when the last job had run, by [`nanos`].
    finished: AtomicU64,
    /// Number of times that the worker slept, as the kernel counted them.
    sleeps: AtomicU64,
    waiter: Mutex<Option<Thread>>,
    latencies: Mutex<Vec<u64>>,
}

pub(super) static TALLY: Tally = Tally {
    expected: AtomicU64::new(0),
    ran: AtomicU64::new(0),
    finished: AtomicU64::new(0),
    sleeps: AtomicU64::new(0),
    waiter: Mutex::new(None),
    latencies: Mutex::new(Vec::new()),
};

/// The job of every design. `scheduled` is the time of its scheduling by [`nanos`], or 0 if latency
/// is not measured.
pub(super) fn job(scheduled: u64) {
    if scheduled != 0 {
        let latency = nanos() - scheduled;
        TALLY.latencies.lock().unwrap_or_else(PoisonError::into_inner).push(latency);
    }
    let ran = TALLY.ran.load(Relaxed) + 1;
    if ran == TALLY.expected.load(Relaxed) {
        TALLY.finish();
    } else {
        TALLY.ran.store(ran, Relaxed);
    }
}

impl Tally {
    /// Begins a round of `jobs`; the calling thread must be the one that calls [`Tally::wait`].
    pub(super) fn expect(&self, jobs: u64) {
        self.ran.store(0, Relaxed);
        self.expected.store(jobs, Relaxed);
        *self.waiter.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread::current());
    }

    /// Waits until all jobs of the round have run.
    pub(super) fn wait(&self) {
        while self.ran.load(Acquire) < self.expected.load(Relaxed) {
            thread::park();
        }
    }

    #[cold]
    fn finish(&self) {
        self.finished.store(nanos(), Relaxed);
        self.sleeps.store(own_sleeps(), Relaxed);
        self.ran.store(self.expected.load(Relaxed), Release);
        if let Some(waiter) = self.waiter.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
            waiter.unpark();
        }
    }

    /// The time when the last job of the round had run. The worker has read the clock for it, since
    /// the thread that waits may wake up late.
    pub(super) fn finished(&self) -> u64 {
        self.finished.load(Relaxed)
    }

    /// Number of times that the worker slept in the round. Each round has a new worker, so the
    /// kernel's count begins at 0.
    pub(super) fn sleeps(&self) -> u64 {
        self.sleeps.load(Relaxed)
    }

    /// Takes out the latencies that were recorded since the last call, in nanoseconds.
    pub(super) fn latencies(&self) -> Vec<u64> {
        std::mem::take(&mut *self.latencies.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Nanoseconds since the first call; never 0.
pub(super) fn nanos() -> u64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64 + 1
}

/// Number of voluntary context switches of the calling thread. The kernel counts them alike for
/// every design.
fn own_sleeps() -> u64 {
    // SAFETY: a rusage of zeros is valid, and getrusage writes no more than one.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
        usage
    };
    usage.ru_nvcsw as u64
}
