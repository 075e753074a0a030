//! The counts of a log.

use crate::Shared;
use crate::segment::State;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The counts of all lanes and of the cleaner.
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

/// The counts that only a durable log has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DurableStatus {
    /// The number that tells the log from all others.
    pub identity: u128,
    /// Number of segments without a live page that wait for a commit.
    pub dead: u32,
    /// Number of commits: for flushes, and to free segments.
    pub commits: u64,
    /// Number of flushes that failed.
    pub failed_flushes: u64,
    /// Number of checkpoints: commits that named all segments in use.
    pub checkpoints: u64,
    /// Number of pages that were written to the journal.
    pub journal_pages: u64,
}

/// A log's counts at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogStatus {
    /// The log's size in pages.
    pub pages: u32,
    /// Number of pages of the store below.
    pub below_pages: u32,
    /// Number of pages that were written, and not discarded since.
    pub live: u64,
    /// Number of all segments.
    pub segments: u32,
    /// Number of segments that a lane or the cleaner can take for new pages.
    pub free: u32,
    /// Number of segments that a lane or the cleaner fills, or whose writes have no answer.
    pub open: u32,
    /// Number of segments with a page that cannot be moved.
    pub stuck: u32,
    /// Number of pages that lanes have written to the log.
    pub written: u64,
    /// Number of pages that the cleaner has copied.
    pub moved: u64,
    /// Number of summaries that were written.
    pub summaries: u64,
    /// Number of segments that the cleaner has made free.
    pub cleaned: u64,
    /// Number of live pages in the segments that the cleaner has chosen, counted when it chose
    /// each.
    pub live_cleaned: u64,
    /// Number of summaries that were read from disk for a read of a page.
    pub summary_reads: u64,
    /// Number of pages that did not match their summary.
    pub corrupt: u64,
    /// Number of failed writes to the store below.
    pub write_errors: u64,
    /// Number of failed writes to each member.
    pub member_errors: Vec<u32>,
    /// Number of times that a write found no free segment.
    pub waits: u64,
    /// Bytes of memory that the map takes.
    pub map_bytes: u64,
    /// Bytes of memory that segments and summaries take.
    pub segment_bytes: u64,
    /// The counts that only a durable log has.
    pub durable: Option<DurableStatus>,
}

impl LogStatus {
    /// Number of pages written to the store below for each page that was written to the log.
    pub fn amplification(&self) -> f64 {
        let journal = self.durable.map_or(0, |durable| durable.journal_pages);
        let all = self.written + self.moved + self.summaries + journal;
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
            segment_bytes: segments.bytes() + self.rows.bytes(),
            durable: self.durable.as_ref().map(|durable| DurableStatus {
                identity: durable.superblock.identity,
                dead: segments.dead(),
                commits: durable.counters.commits.load(Relaxed),
                failed_flushes: durable.counters.failed.load(Relaxed),
                checkpoints: durable.counters.checkpoints.load(Relaxed),
                journal_pages: durable.counters.pages.load(Relaxed),
            }),
        }
    }
}
