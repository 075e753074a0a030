//! The share server's counts, for status and tests.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of a running server. One thread writes them.
#[derive(Debug, Default)]
pub struct Stats {
    pub(super) sessions: AtomicU64,
    pub(super) sessions_ended: AtomicU64,
    pub(super) violations: AtomicU64,
    pub(super) turned_away: AtomicU64,
    pub(super) reads: AtomicU64,
    pub(super) writes: AtomicU64,
    pub(super) faults: AtomicU64,
    pub(super) taken: AtomicU64,
    pub(super) in_place: AtomicU64,
    pub(super) given: AtomicU64,
    pub(super) reclaimed: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) over_quota: AtomicU64,
    pub(super) double_frees: AtomicU64,
    pub(super) sleeps: AtomicU64,
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident)*) => {
        impl Stats {
            $($(#[$doc])* pub fn $name(&self) -> u64 { self.$name.load(Ordering::Relaxed) })*
        }
    };
}

counters! {
    /// Clients that were accepted.
    sessions
    /// Number of clients that have gone.
    sessions_ended
    /// Number of clients that were disconnected because they violated the format.
    violations
    /// Clients that were refused.
    turned_away
    /// Number of pages read.
    reads
    /// Number of pages written.
    writes
    /// Pages that could not be read or written.
    faults
    /// Number of pages and frames that clients were lent.
    taken
    /// Number of pages that clients were lent in place, in the stores' memory.
    in_place
    /// Number of lent pages and frames that clients have returned.
    given
    /// Number of lent pages and frames taken back from clients that went away.
    reclaimed
    /// Number of returned tokens that the client did not hold.
    refused
    /// Number of requests refused because the client had its full quota of frames.
    over_quota
    /// Frames that came back and were already free. A number above 0 means a bug.
    double_frees
    /// Times that the server's thread went to sleep.
    sleeps
}

impl Stats {
    /// Number of pages and frames that clients hold now.
    pub fn out(&self) -> u64 {
        self.taken() - self.given() - self.reclaimed()
    }
}

/// Adds to a counter that only the calling thread writes. So it needs no locked instruction.
pub(super) fn add(counter: &AtomicU64, more: u64) {
    counter.store(counter.load(Ordering::Relaxed) + more, Ordering::Relaxed);
}
