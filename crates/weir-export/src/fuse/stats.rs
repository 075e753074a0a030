//! A server's counts: each thread counts for itself, and a reader adds them up.

use weir_core::metrics::Counter;

/// One thread's counters; it is their only writer.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Counters {
    pub requests: Counter,
    pub by_ring: Counter,
    pub reads: Counter,
    pub writes: Counter,
    pub discards: Counter,
    pub errors: Counter,
    pub bytes_read: Counter,
    pub bytes_written: Counter,
    pub calls: Counter,
}

/// A server at one moment. Counts are since its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Threads that serve.
    pub threads: u64,
    /// Requests of every kind.
    pub requests: u64,
    /// Of these, those that came by rings; the others came by `/dev/fuse`.
    pub by_ring: u64,
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Holes punched and ranges zeroed.
    pub discards: u64,
    /// Reads, writes and discards that failed.
    pub errors: u64,
    /// Bytes asked for by reads.
    pub bytes_read: u64,
    /// Bytes sent by writes.
    pub bytes_written: u64,
    /// Times that one thread had another come to share the work.
    pub calls: u64,
}

impl Stats {
    pub(super) fn add(&mut self, counters: &Counters) {
        self.requests += counters.requests.get();
        self.by_ring += counters.by_ring.get();
        self.reads += counters.reads.get();
        self.writes += counters.writes.get();
        self.discards += counters.discards.get();
        self.errors += counters.errors.get();
        self.bytes_read += counters.bytes_read.get();
        self.bytes_written += counters.bytes_written.get();
        self.calls += counters.calls.get();
    }
}
