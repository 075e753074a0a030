//! A device's counts: each queue's thread counts for itself, and a reader adds them up.

use weir_core::metrics::Counter;

/// One queue thread's counters; it is their only writer.
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

/// A device at one moment. Counts are since its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Requests of every kind.
    pub requests: u64,
    /// Of these, the kernel's own swapping.
    pub swap: u64,
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Discards and writes of zeros.
    pub discards: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Times that requests were taken; `requests / batches` came together on average.
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
