//! The counts of a cache.

use crate::{Cache, Mode};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use weir_core::metrics::Counter;

/// Sizes of writes to the home that are told apart: 1 page, 2 to 3, 4 to 7, ..., 256 and more.
const SIZES: usize = 9;

/// A lane's counts.
#[derive(Default)]
pub(crate) struct Counters {
    pub read_hits: Counter,
    pub read_misses: Counter,
    pub write_hits: Counter,
    pub write_misses: Counter,
    pub bypassed: Counter,
    pub faults: Counter,
}

/// The write-back's counts.
#[derive(Default)]
pub(crate) struct WriteBackCounters {
    pub pages: AtomicU64,
    pub rows: [AtomicU64; SIZES],
    pub failed: AtomicU64,
    pub flushes: AtomicU64,
    pub flushes_failed: AtomicU64,
}

impl WriteBackCounters {
    /// Counts a row of pages side by side that went home together.
    pub fn row(&self, pages: u64) {
        self.pages.fetch_add(pages, Relaxed);
        if let Some(size) = pages.checked_ilog2() {
            self.rows[(size as usize).min(SIZES - 1)].fetch_add(1, Relaxed);
        }
    }
}

/// A cache at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CacheStatus {
    /// The place that writes go to.
    pub mode: Mode,
    /// Pages of the home.
    pub pages: u32,
    /// Pages that the cache can hold.
    pub frames: u32,
    /// Pages that it holds.
    pub used: u32,
    /// Pages of these that are newer than the home's.
    pub dirty: u32,
    /// Bytes of its index, with the page map and slot records of its volume.
    pub index_bytes: u64,
    /// Pages read that were there.
    pub read_hits: u64,
    /// Pages read that were not.
    pub read_misses: u64,
    /// Pages written that were there.
    pub write_hits: u64,
    /// Pages written that were not.
    pub write_misses: u64,
    /// Pages of streams that were not there and went past the cache.
    pub bypassed: u64,
    /// Pages that could not be read or written.
    pub faults: u64,
    /// Pages written back.
    pub written_back: u64,
    /// Rows of pages side by side that were written back together: of 1 page, 2 to 3, 4 to 7, ...,
    /// 256 and more.
    pub rows: [u64; SIZES],
    /// Pages that could not be written back, each time.
    pub write_back_failed: u64,
    /// Flushes of the home.
    pub flushes: u64,
    /// Those of them that failed.
    pub flushes_failed: u64,
}

impl Cache {
    /// How it is. Looks at each frame.
    pub fn status(&self) -> CacheStatus {
        let sum = |count: fn(&Counters) -> &Counter| {
            self.seats.iter().map(|seat| count(&seat.counters).get()).sum::<u64>()
        };
        let write_back = &self.write_back;
        CacheStatus {
            mode: self.mode(),
            pages: self.pages(),
            frames: self.directory.frames(),
            used: self.directory.used(),
            dirty: self.dirty(),
            index_bytes: self.directory.memory_bytes() + self.frames.memory_bytes(),
            read_hits: sum(|of| &of.read_hits),
            read_misses: sum(|of| &of.read_misses),
            write_hits: sum(|of| &of.write_hits),
            write_misses: sum(|of| &of.write_misses),
            bypassed: sum(|of| &of.bypassed),
            faults: sum(|of| &of.faults),
            written_back: write_back.pages.load(Relaxed),
            rows: std::array::from_fn(|size| write_back.rows[size].load(Relaxed)),
            write_back_failed: write_back.failed.load(Relaxed),
            flushes: write_back.flushes.load(Relaxed),
            flushes_failed: write_back.flushes_failed.load(Relaxed),
        }
    }
}
