//! A server's counts: each thread counts its own work, and a reader adds them up.

use weir_core::metrics::Counter;

/// One connection thread's counters; the thread is their only writer.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub connections: Counter,
    pub requests: Counter,
    pub reads: Counter,
    pub writes: Counter,
    pub trims: Counter,
    pub errors: Counter,
    pub bytes_read: Counter,
    pub bytes_written: Counter,
    pub batches: Counter,
}

/// A server's counts at one moment, since its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Number of connections being served.
    pub connected: u64,
    /// Largest number of connections that can be served at once.
    pub connections_max: u64,
    /// Number of connections that have reached transmission.
    pub connections: u64,
    /// Number of requests of every kind.
    pub requests: u64,
    /// Number of reads.
    pub reads: u64,
    /// Number of writes.
    pub writes: u64,
    /// Number of trims and write-zeroes.
    pub trims: u64,
    /// Number of requests answered with an error.
    pub errors: u64,
    /// Number of bytes that all reads asked for.
    pub bytes_read: u64,
    /// Number of bytes in all writes.
    pub bytes_written: u64,
    /// Number of batches; `requests / batches` requests came together on average.
    pub batches: u64,
}

impl Stats {
    pub(super) fn add(&mut self, counters: &Counters) {
        self.connections += counters.connections.get();
        self.requests += counters.requests.get();
        self.reads += counters.reads.get();
        self.writes += counters.writes.get();
        self.trims += counters.trims.get();
        self.errors += counters.errors.get();
        self.bytes_read += counters.bytes_read.get();
        self.bytes_written += counters.bytes_written.get();
        self.batches += counters.batches.get();
    }
}
