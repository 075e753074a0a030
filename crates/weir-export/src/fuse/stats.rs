//! A server's counts: each thread counts its own work, and a reader adds them up.

use weir_core::metrics::Counter;

/// One thread's counters; the thread is their only writer.
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

/// A server's counts at one moment, since its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Number of threads that serve.
    pub threads: u64,
    /// Number of requests of every kind.
    pub requests: u64,
    /// Number of requests that came by io_uring; the others came by `/dev/fuse`.
    pub by_ring: u64,
    /// Number of reads.
    pub reads: u64,
    /// Number of writes.
    pub writes: u64,
    /// Number of requests to punch a hole or to zero a range.
    pub discards: u64,
    /// Number of reads, writes and discards that failed.
    pub errors: u64,
    /// Number of bytes that all reads asked for.
    pub bytes_read: u64,
    /// Number of bytes in all writes.
    pub bytes_written: u64,
    /// Times that a thread woke a parked one to share the work.
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
