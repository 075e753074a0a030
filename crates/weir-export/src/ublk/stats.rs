//! A device's counts. Each queue's thread counts its own work, and a reader adds the counts up.

use weir_core::metrics::Counter;

/// One queue thread's counters; the thread is their only writer.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub requests: Counter,
    pub swap: Counter,
    pub reads: Counter,
    pub writes: Counter,
    pub discards: Counter,
    pub errors: Counter,
    pub batches: Counter,
}

/// A device's counts at one moment, since its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Number of requests of every kind.
    pub requests: u64,
    /// Number of requests that were the kernel's own swapping.
    pub swap: u64,
    /// Number of reads.
    pub reads: u64,
    /// Number of writes.
    pub writes: u64,
    /// Number of discards and writes of zeros.
    pub discards: u64,
    /// Number of requests answered with an error.
    pub errors: u64,
    /// Number of batches; `requests / batches` requests came together on average.
    pub batches: u64,
}

impl Stats {
    pub(super) fn add(&mut self, counters: &Counters) {
        self.requests += counters.requests.get();
        self.swap += counters.swap.get();
        self.reads += counters.reads.get();
        self.writes += counters.writes.get();
        self.discards += counters.discards.get();
        self.errors += counters.errors.get();
        self.batches += counters.batches.get();
    }
}
