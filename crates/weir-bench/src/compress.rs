//! `weir bench compress`: the time that compression costs a page, and the room that it saves.
//!
//! The same pages go through three volumes on host memory in turns: plain (the control), lz4, zstd.
//! The pages are of four kinds, also in turns: this program's own file, numbers below 2^24 in 64
//! bits, words, and noise. They are written 32 to a batch, as a kernel that swaps does, and read
//! one by one in random order. Times are the thread's processor time, because compression costs
//! only that.
//!
//! After that, pages are replaced at random in two more volumes in turns, each page four times on
//! average. One volume, the control, never compacts. The other compacts its sparse packs whenever a
//! daemon's worker would. Both are compared with the packing before the replacements, which is the
//! best packing there can be.

use crate::report::{Report, Row, Runs};
use crate::steps::Steps;
use rustix::time::{ClockId, clock_gettime};
use std::sync::Arc;
use std::time::Instant;
use weir_core::{PAGE_SIZE, PageBytes, PageNo};
use weir_store::{Fault, Host, OpenError, Progress};
use weir_volume::{Compression, Config, CreateError, Lane, Mover, Step, Task, Volume};

/// The plan of the compression benchmark.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Bytes of the pages that are written to each volume.
    pub bytes: u64,
    /// Number of times that each volume is filled and read.
    pub runs: usize,
}

/// The reason why nothing could be measured.
#[derive(Debug, thiserror::Error)]
pub enum CompressError {
    /// A volume could not be made.
    #[error("cannot make the volume")]
    Volume(#[from] CreateError),
    /// The store or a lane could not be opened.
    #[error("cannot open the store")]
    Store(#[from] OpenError),
    /// This program's own file, which serves as content of pages, cannot be read.
    #[error("cannot read /proc/self/exe")]
    Program(#[from] std::io::Error),
    /// A page could not be written or read.
    #[error("page {0} failed: {1}")]
    Page(u32, Fault),
    /// The volume's sparse packs could not be compacted.
    #[error("a lane of the volume does not come to rest")]
    Gather,
    /// A page was read with wrong content.
    #[error("page {0} is not what was written")]
    Wrong(u32),
}

const BATCH: u32 = 32;

/// Runs the benchmark.
///
/// # Errors
/// Fails when there is not enough memory, or a page is wrong.
pub fn run(plan: &Plan) -> Result<Report, CompressError> {
    let pages = u32::try_from(plan.bytes / PAGE_SIZE as u64).unwrap_or(u32::MAX).max(BATCH);
    let contents = Contents { program: std::fs::read("/proc/self/exe")? };
    let kinds = [None, Some(Compression::Lz4), Some(Compression::Zstd)];
    let mut results = kinds.map(|_| (Runs::default(), Runs::default(), 0.0));
    let mut replaced = [Compression::Lz4, Compression::Zstd].map(|with| (with, Replaced::default()));
    let steps = Steps::new(plan.runs * (kinds.len() + replaced.len()));
    for _ in 0..plan.runs {
        for (kind, (writes, reads, ratio)) in kinds.iter().zip(&mut results) {
            steps.part(kind.map_or("plain".to_owned(), |with| with.to_string()));
            let config = Config { pages, lanes: 1, depth: BATCH as usize };
            let volume = Volume::create(config, vec![Arc::new(Host::new(config.slots())?)])?;
            kind.iter().for_each(|with| volume.compress(*with));
            let mut lane = volume.lane()?;
            // Fill the volume twice, and count the second time. The first time is slower, because
            // it also makes the kernel provide the store's memory.
            write_all(&mut lane, &contents, pages)?;
            writes.push(write_all(&mut lane, &contents, pages)?);
            reads.push(read_all(&mut lane, &contents, pages)?);
            let status = volume.status();
            *ratio = status.stored as f64 / f64::from(status.stores[0].used);
            steps.end();
        }
    }
    for _ in 0..plan.runs {
        for (with, result) in &mut replaced {
            steps.part(format_args!("{with}, replaced"));
            result.measure(*with, &contents, pages)?;
            steps.end();
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
    for (with, Replaced { fresh, alone, gathered, moved, write_us, gather_us }) in replaced {
        let (name, whole) = (format!("{with}_replaced"), fresh.median());
        let rows = [
            Row::higher(&name, "stored_per_held", gathered.median()).beside("left alone", alone.median()),
            Row::higher(&name, "stored_per_fresh", gathered.median() / whole)
                .beside("left alone", alone.median() / whole),
            Row::lower(&name, "moved_per_write", moved.median()),
            Row::lower(&name, "gather_cpu_us_per_write", gather_us.median())
                .beside("write", write_us.median()),
        ];
        report.rows.extend(rows);
    }
    Ok(report)
}

/// The figures of the part of the benchmark in which pages are replaced at random.
#[derive(Default)]
struct Replaced {
    /// Pages per slot: `fresh` after the first writes, `alone` after the replacements in the
    /// control, and `gathered` after them in the volume that compacts.
    fresh: Runs,
    alone: Runs,
    gathered: Runs,
    /// Number of pages that compaction moved, for each page written.
    moved: Runs,
    /// Processor time for each page written, in microseconds.
    write_us: Runs,
    gather_us: Runs,
}

impl Replaced {
    fn measure(&mut self, with: Compression, contents: &Contents, pages: u32) -> Result<(), CompressError> {
        let config = Config { pages, lanes: 2, depth: BATCH as usize };
        let volume = || -> Result<_, CompressError> {
            let volume = Volume::create(config, vec![Arc::new(Host::new(config.slots())?)])?;
            volume.compress(with);
            let (lane, worker) = (volume.lane()?, volume.mover()?);
            Ok((volume, lane, worker))
        };
        let (mut alone, mut gathered) = (volume()?, volume()?);
        write_all(&mut alone.1, contents, pages)?;
        write_all(&mut gathered.1, contents, pages)?;
        self.fresh.push(held(&alone.0));
        let (mut looked, mut moved, mut gather_us, mut write_us) = (None, 0, 0.0, 0.0);
        let turns = pages / BATCH * 4;
        for turn in 0..turns {
            // The draw may give a page twice. The page then has the content that was written last.
            let batch: Vec<u32> = (0..BATCH)
                .map(|at| (mix(u64::from(turn) << 32 | u64::from(at)) % u64::from(pages)) as u32)
                .collect();
            let bytes: Vec<_> = batch.iter().map(|&page| contents.page(page)).collect();
            write_us += write_batch(&mut alone.1, &batch, &bytes)?;
            write_batch(&mut gathered.1, &batch, &bytes)?;
            let begun = thread_us();
            if gathered.0.packs_were_left(&mut looked) {
                moved += gather(&gathered.0, &mut gathered.2)?;
            }
            gather_us += thread_us() - begun;
        }
        let written = f64::from(turns * BATCH);
        self.alone.push(held(&alone.0));
        self.gathered.push(held(&gathered.0));
        self.moved.push(f64::from(moved) / written);
        self.write_us.push(write_us / written);
        self.gather_us.push(gather_us / written);
        read_all(&mut alone.1, contents, pages)?;
        read_all(&mut gathered.1, contents, pages)?;
        Ok(())
    }
}

/// The packing: number of stored pages for each slot in use.
fn held(volume: &Volume) -> f64 {
    let status = volume.status();
    status.stored as f64 / f64::from(status.stores[0].used)
}

/// Compacts the volume's sparse packs, as a daemon's worker does. Returns the number of pages
/// moved.
fn gather(volume: &Volume, mover: &mut Mover) -> Result<u32, CompressError> {
    let (mut moved, mut next) = (0, 0);
    let Some(sparse) = volume.sparse(0) else { return Ok(0) };
    loop {
        mover.begin(Task::Compact { store: 0, next, sparse }).map_err(|_| CompressError::Gather)?;
        let done = loop {
            match mover.step(Instant::now()) {
                Step::More { .. } => {}
                Step::Waits(..) => std::hint::spin_loop(),
                Step::Ended(result) => break result.map_err(|_| CompressError::Gather)?,
            }
        };
        (moved, next) = (moved + done.pages, mover.next());
        if let Some(&(page, fault)) = mover.failed().first() {
            return Err(CompressError::Page(page.0, fault));
        }
        if !done.more {
            return Ok(moved);
        }
    }
}

/// Writes all pages. Returns the processor time for each page, in microseconds.
fn write_all(lane: &mut Lane, contents: &Contents, pages: u32) -> Result<f64, CompressError> {
    let mut took = 0.0;
    for first in (0..pages).step_by(BATCH as usize) {
        let batch: Vec<u32> = (first..(first + BATCH).min(pages)).collect();
        let bytes: Vec<_> = batch.iter().map(|&page| contents.page(page)).collect();
        took += write_batch(lane, &batch, &bytes)?;
    }
    Ok(took / f64::from(pages))
}

/// Writes one batch. Returns the processor time that it took, in microseconds.
fn write_batch(lane: &mut Lane, batch: &[u32], bytes: &[PageBytes]) -> Result<f64, CompressError> {
    let begun = thread_us();
    for (&page, bytes) in batch.iter().zip(bytes) {
        loop {
            match lane.write(page, PageNo(page), bytes) {
                Progress::Done(Err(fault)) => return Err(CompressError::Page(page, fault)),
                Progress::Done(Ok(())) | Progress::Queued => break,
                Progress::Full => settle(lane)?,
            }
        }
    }
    settle(lane)?;
    Ok(thread_us() - begun)
}

/// The processor time of this thread, in microseconds.
fn thread_us() -> f64 {
    let spent = clock_gettime(ClockId::ThreadCPUTime);
    spent.tv_sec as f64 * 1e6 + spent.tv_nsec as f64 / 1e3
}

fn settle(lane: &mut Lane) -> Result<(), CompressError> {
    let mut failed = None;
    loop {
        lane.submit();
        lane.poll(Instant::now(), &mut |done| {
            failed = done.result.err().map(|fault| (done.ticket, fault)).or(failed);
        });
        if lane.in_flight() == 0 {
            lane.submit();
            return failed.map_or(Ok(()), |(page, fault)| Err(CompressError::Page(page, fault)));
        }
    }
}

/// Reads as many pages as there are, at random. Returns the processor time for each page, in
/// microseconds.
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

/// The content that each page has.
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
                // The content begins with the page's number, so that all pages differ.
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

/// SplitMix64's mixing function, without its state.
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
    fn both_algorithms_hold_the_same_pages_in_less_also_when_they_have_been_replaced() {
        let report = run(&Plan { bytes: 8 << 20, runs: 1 }).expect("a few pages");
        assert_eq!(report.rows.len(), 14);
        for row in report.rows.iter().filter(|row| row.metric == "stored_per_held") {
            let is_replaced = row.id.ends_with("replaced");
            let least = if is_replaced { row.control_value.expect("left alone") * 1.01 } else { 1.05 };
            assert!(row.value > least, "{}: {} and not more than {least}", row.id, row.value);
        }
    }
}
