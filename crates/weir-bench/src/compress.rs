//! `weir bench compress`: what compression costs a page, and what it holds less.
//!
//! The same pages go through three volumes on host memory by turns: plain (the control), lz4, zstd. They are of four kinds, by
//! turns too: this program's own file, numbers below 2^24 in 64 bits, words, and noise. Written 32 to a batch, as a kernel
//! that swaps does, and read one by one in no order. Times are the thread's own on its processor, for that is what
//! compression takes.

use crate::report::{Report, Row, Runs};
use rustix::time::{ClockId, clock_gettime};
use std::sync::Arc;
use weir_core::{PAGE_SIZE, PageBytes, PageNo};
use weir_store::{Fault, Host, OpenError, Progress};
use weir_volume::{Compression, Config, CreateError, Lane, Volume};

/// What to measure.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Bytes of pages.
    pub bytes: u64,
    /// Times that each volume is filled and read.
    pub runs: usize,
}

/// Why it could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum CompressError {
    /// No such volume can be made.
    #[error("cannot make the volume")]
    Volume(#[from] CreateError),
    /// The store or a lane could not be opened.
    #[error("cannot open the store")]
    Store(#[from] OpenError),
    /// This program cannot be read.
    #[error("cannot read /proc/self/exe")]
    Program(#[from] std::io::Error),
    /// A page could not be written or read.
    #[error("page {0} failed: {1}")]
    Page(u32, Fault),
    /// A page came back as something else.
    #[error("page {0} is not what was written")]
    Wrong(u32),
}

const BATCH: u32 = 32;

/// Measures.
///
/// # Errors
/// When there is not enough memory, or a page is wrong.
pub fn run(plan: &Plan) -> Result<Report, CompressError> {
    let pages = u32::try_from(plan.bytes / PAGE_SIZE as u64).unwrap_or(u32::MAX).max(BATCH);
    let contents = Contents { program: std::fs::read("/proc/self/exe")? };
    let kinds = [None, Some(Compression::Lz4), Some(Compression::Zstd)];
    let mut results = kinds.map(|_| (Runs::default(), Runs::default(), 0.0));
    for _ in 0..plan.runs {
        for (kind, (writes, reads, ratio)) in kinds.iter().zip(&mut results) {
            let config = Config { pages, lanes: 1, depth: BATCH as usize };
            let volume = Volume::create(config, vec![Arc::new(Host::new(config.slots())?)])?;
            kind.iter().for_each(|with| volume.compress(*with));
            let mut lane = volume.lane()?;
            // Twice: the first time the store's memory is new.
            write_all(&mut lane, &contents, pages)?;
            writes.push(write_all(&mut lane, &contents, pages)?);
            reads.push(read_all(&mut lane, &contents, pages)?);
            let status = volume.status();
            *ratio = status.stored as f64 / f64::from(status.stores[0].used);
        }
    }
    let mut report = Report::new("compress", plan.runs);
    let [plain, lz4, zstd] = results;
    for (name, (writes, reads, ratio)) in [("lz4", lz4), ("zstd", zstd)] {
        let rows = [
            Row::higher(name, "stored_per_held", ratio).beside("plain", plain.2),
            Row::lower(name, "write_cpu_us", writes.median()).beside("plain", plain.0.median()),
            Row::lower(name, "read_cpu_us", reads.median()).beside("plain", plain.1.median()),
        ];
        report.rows.extend(rows);
    }
    Ok(report)
}

/// Microseconds a page.
fn write_all(lane: &mut Lane, contents: &Contents, pages: u32) -> Result<f64, CompressError> {
    let mut took = 0.0;
    for first in (0..pages).step_by(BATCH as usize) {
        let batch = first..(first + BATCH).min(pages);
        let bytes: Vec<_> = batch.clone().map(|page| contents.page(page)).collect();
        let begun = thread_us();
        for (page, bytes) in batch.zip(&bytes) {
            loop {
                match lane.write(page, PageNo(page), bytes) {
                    Progress::Done(Err(fault)) => return Err(CompressError::Page(page, fault)),
                    Progress::Done(Ok(())) | Progress::Queued => break,
                    Progress::Full => settle(lane)?,
                }
            }
        }
        settle(lane)?;
        took += thread_us() - begun;
    }
    Ok(took / f64::from(pages))
}

/// What this thread has spent on a processor, in microseconds.
fn thread_us() -> f64 {
    let spent = clock_gettime(ClockId::ThreadCPUTime);
    spent.tv_sec as f64 * 1e6 + spent.tv_nsec as f64 / 1e3
}

fn settle(lane: &mut Lane) -> Result<(), CompressError> {
    let mut failed = None;
    loop {
        lane.submit();
        if lane.in_flight() == 0 {
            return failed.map_or(Ok(()), |(page, fault)| Err(CompressError::Page(page, fault)));
        }
        lane.poll(&mut |done| failed = done.result.err().map(|fault| (done.ticket, fault)).or(failed));
    }
}

/// Microseconds a page.
fn read_all(lane: &mut Lane, contents: &Contents, pages: u32) -> Result<f64, CompressError> {
    let (mut took, mut found) = (0.0, vec![[0; PAGE_SIZE]; BATCH as usize]);
    for first in (0..pages).step_by(BATCH as usize) {
        let asked = |at: usize| (mix(u64::from(first) + at as u64) % u64::from(pages)) as u32;
        let begun = thread_us();
        for (at, bytes) in found.iter_mut().enumerate() {
            let page = asked(at);
            match lane.read(page, PageNo(page), bytes) {
                Progress::Done(Ok(())) => {}
                Progress::Done(Err(fault)) => return Err(CompressError::Page(page, fault)),
                Progress::Queued | Progress::Full => return Err(CompressError::Wrong(page)),
            }
            lane.submit();
        }
        took += thread_us() - begun;
        if let Some(at) = (0..found.len()).find(|&at| found[at] != contents.page(asked(at))) {
            return Err(CompressError::Wrong(asked(at)));
        }
    }
    Ok(took / f64::from(pages.next_multiple_of(BATCH)))
}

/// What pages hold.
struct Contents {
    program: Vec<u8>,
}

const WORDS: [&str; 16] = [
    "page ", "slot ", "volume ", "store ", "the ", "of ", "and ", "memory ", "kernel ", "fault ", "write ",
    "read ", "a ", "is ", "swap ", "thread ",
];

impl Contents {
    fn page(&self, page: u32) -> PageBytes {
        let mut bytes = [0; PAGE_SIZE];
        let seed = u64::from(page) << 32;
        match page % 4 {
            0 => {
                let pages = (self.program.len() / PAGE_SIZE).max(1);
                let from = self.program.chunks(PAGE_SIZE).nth(page as usize / 4 % pages).unwrap_or(&[]);
                bytes[..from.len()].copy_from_slice(from);
                // Twice the same page would be none the less two pages.
                bytes[..4].copy_from_slice(&page.to_le_bytes());
            }
            1 => numbers(&mut bytes, seed, (1 << 24) - 1),
            2 => {
                let (mut at, mut turn) = (0, seed);
                while at < PAGE_SIZE {
                    let word = WORDS[mix(turn) as usize % WORDS.len()].as_bytes();
                    let take = word.len().min(PAGE_SIZE - at);
                    bytes[at..at + take].copy_from_slice(&word[..take]);
                    (at, turn) = (at + take, turn + 1);
                }
            }
            _ => numbers(&mut bytes, seed, u64::MAX),
        }
        bytes
    }
}

fn numbers(bytes: &mut PageBytes, seed: u64, mask: u64) {
    for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&(mix(seed | at as u64) & mask).to_le_bytes());
    }
}

/// SplitMix64, without its state.
fn mix(seed: u64) -> u64 {
    let z = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_algorithms_hold_the_same_pages_in_less() {
        let report = run(&Plan { bytes: 1 << 20, runs: 1 }).expect("a few pages");
        assert_eq!(report.rows.len(), 6);
        for row in report.rows.iter().filter(|row| row.metric == "stored_per_held") {
            assert!(row.value > 1.05, "{}: {}", row.id, row.value);
        }
    }
}
