//! The counts of a log.

use crate::Shared;
use crate::segment::{SEGMENT_BYTES, State};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The counts of all lanes and of the cleaner. Each is added to once for some dozens of pages.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub written: AtomicU64,
    pub moved: AtomicU64,
    pub summaries: AtomicU64,
    pub cleaned: AtomicU64,
    pub live_cleaned: AtomicU64,
    pub summary_reads: AtomicU64,
    pub corrupt: AtomicU64,
    pub write_errors: AtomicU64,
    pub waits: AtomicU64,
}

/// A log at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogStatus {
    /// Its size in pages.
    pub pages: u32,
    /// Pages of the store below.
    pub below_pages: u32,
    /// Pages that were written at least once.
    pub live: u64,
    /// Segments in all.
    pub segments: u32,
    /// Segments without a live page.
    pub free: u32,
    /// Segments that are appended to, or whose writes have no answer.
    pub open: u32,
    /// Segments of which a page cannot be moved.
    pub stuck: u32,
    /// Pages that were handed to it.
    pub written: u64,
    /// Pages that the cleaner has copied.
    pub moved: u64,
    /// Summaries that were written.
    pub summaries: u64,
    /// Segments that the cleaner has made free.
    pub cleaned: u64,
    /// Pages that were live in those as the cleaner began.
    pub live_cleaned: u64,
    /// Summaries that were read for a read.
    pub summary_reads: u64,
    /// Pages that were not what their summary says.
    pub corrupt: u64,
    /// Writes below that failed.
    pub write_errors: u64,
    /// Writes of each member that failed.
    pub member_errors: Vec<u32>,
    /// Times that a write found no free segment.
    pub waits: u64,
    /// Bytes of memory that the map takes.
    pub map_bytes: u64,
    /// Bytes of memory that segments and summaries take.
    pub segment_bytes: u64,
}

impl LogStatus {
    /// Pages that went to the store below, for each that was handed over.
    pub fn amplification(&self) -> f64 {
        let all = self.written + self.moved + self.summaries;
        if self.written == 0 { 1.0 } else { all as f64 / self.written as f64 }
    }
}

impl Shared {
    pub(crate) fn status(&self) -> LogStatus {
        let segments = &self.segments;
        let (mut live, mut open, mut stuck) = (0, 0, 0);
        for segment in 0..segments.count() {
            let word = segments.word(segment);
            live += u64::from(word.live());
            open += u32::from(word.state() == State::Open);
            stuck += u32::from(word.state() == State::Stuck);
        }
        let counters = &self.counters;
        LogStatus {
            pages: self.shape.pages,
            below_pages: self.below.slots(),
            live,
            segments: segments.count(),
            free: segments.free(),
            open,
            stuck,
            written: counters.written.load(Relaxed),
            moved: counters.moved.load(Relaxed),
            summaries: counters.summaries.load(Relaxed),
            cleaned: counters.cleaned.load(Relaxed),
            live_cleaned: counters.live_cleaned.load(Relaxed),
            summary_reads: counters.summary_reads.load(Relaxed),
            corrupt: counters.corrupt.load(Relaxed),
            write_errors: counters.write_errors.load(Relaxed),
            member_errors: (0..segments.members()).map(|member| segments.failures(member)).collect(),
            waits: counters.waits.load(Relaxed),
            map_bytes: self.map.bytes(),
            segment_bytes: u64::from(segments.count()) * SEGMENT_BYTES + self.rows.bytes(),
        }
    }
}
