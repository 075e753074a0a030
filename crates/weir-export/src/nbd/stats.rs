//! A server's counts: each thread counts for itself, and a reader adds them up.

use weir_core::metrics::Counter;

/// One queue thread's counters; it is their only writer.
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

/// A server at one moment. Counts are since its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Connections being served.
    pub connected: u64,
    /// Connections that can be served at once.
    pub connections_max: u64,
    /// Connections that have reached transmission.
    pub connections: u64,
    /// Requests of every kind.
    pub requests: u64,
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Trims and write-zeroes.
    pub trims: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Bytes asked for by reads.
    pub bytes_read: u64,
    /// Bytes sent by writes.
    pub bytes_written: u64,
    /// Times that requests were received; `requests / batches` came together on average.
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
