//! The counts of a cache.

use crate::{Cache, Mode};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use weir_core::metrics::Counter;
use weir_volume::{ChunkState, ChunkStatus};

/// Number of size classes of writes to the home: 1 page, 2 to 3, 4 to 7, ..., 256 and more.
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
    /// Counts one run of neighbouring pages that went home together.
    pub fn row(&self, pages: u64) {
        self.pages.fetch_add(pages, Relaxed);
        if let Some(size) = pages.checked_ilog2() {
            self.rows[(size as usize).min(SIZES - 1)].fetch_add(1, Relaxed);
        }
    }
}

/// A cache's counts at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CacheStatus {
    /// The destination of written pages: the cache, the home, or both.
    pub mode: Mode,
    /// Number of pages of the home.
    pub pages: u32,
    /// Number of pages that the cache can hold with all of its memory.
    pub frames: u32,
    /// Number of pages that the cache can hold now.
    pub open: u32,
    /// Bytes of the cache's store.
    pub store_bytes: u64,
    /// Bytes of its store that the cache may use.
    pub size_bytes: u64,
    /// Bytes that were given back, of those that the cache may use.
    pub given_back_bytes: u64,
    /// Number of pages in the cache.
    pub used: u32,
    /// Number of cached pages that are newer than the home's.
    pub dirty: u32,
    /// Bytes of the cache's directory, and of the page map and slot records of the volume that has
    /// the frames.
    pub index_bytes: u64,
    /// Number of reads of a page that found it cached.
    pub read_hits: u64,
    /// Number of reads of a page that did not find it cached.
    pub read_misses: u64,
    /// Number of writes of a page that found it cached.
    pub write_hits: u64,
    /// Number of writes of a page that did not find it cached.
    pub write_misses: u64,
    /// Number of pages of streams that bypassed the cache, and were not cached before.
    pub bypassed: u64,
    /// Number of reads and writes of a page that failed.
    pub faults: u64,
    /// Number of pages that were written back.
    pub written_back: u64,
    /// Number of runs of neighbouring pages that were written back together, by length: 1 page, 2
    /// to 3, 4 to 7, ..., 256 and more.
    pub rows: [u64; SIZES],
    /// Number of failed write-backs of a page.
    pub write_back_failed: u64,
    /// Number of flushes of the home.
    pub flushes: u64,
    /// Number of flushes of the home that failed.
    pub flushes_failed: u64,
}

impl Cache {
    /// The cache's status. Reads each frame's word.
    pub fn status(&self) -> CacheStatus {
        let sum = |count: fn(&Counters) -> &Counter| {
            self.seats.iter().map(|seat| count(&seat.counters).get()).sum::<u64>()
        };
        let write_back = &self.write_back;
        let bytes = |state| self.chunks(state).iter().map(ChunkStatus::bytes).sum::<u64>();
        let (away, size) = (bytes(ChunkState::GivenBack), self.size.load(Relaxed));
        let store_bytes = self.frames.chunks(0).map(|chunk| chunk.bytes()).sum::<u64>();
        CacheStatus {
            mode: self.mode(),
            pages: self.pages(),
            frames: self.directory.frames(),
            open: self.directory.limit(),
            store_bytes,
            size_bytes: size,
            given_back_bytes: away.saturating_sub(store_bytes - size),
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
