//! The sizes of a log's parts, and the memory that they take: arithmetic, no I/O.

use crate::config::{AHEAD, Config, DURABLE_AHEAD, LogError, OPEN_MAX, RESERVE};
use crate::journal::NAMES_MAX;
use crate::segment::{GENERATIONS, SEGMENT_BYTES};
use crate::summary::{PLACES_MAX, Rows};
use crate::superblock::SEGMENT_LEAST;
use weir_core::PAGE_SIZE;

/// A log may take this many bytes of memory for each page of the store below: 1 GiB for 1 TiB.
const BYTES_A_PAGE: u64 = 4;
/// Number of pages up to which a log is opened in one pass, even if that exceeds the bound on
/// memory.
const PASS_LEAST: u64 = 4 << 20;

/// Whether a log is scratch, a new durable one, or a durable one that exists.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Scratch,
    /// A durable log that is being made.
    New,
    /// A durable log that exists, with this number of segments in each half of its journal.
    Made(u32),
}

/// The sizes of a log's parts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Sizes {
    /// Number of pages of the store below.
    pub slots: u32,
    pub segments: u32,
    /// Number of segments of each half of the journal; 0: the log is scratch.
    pub half: u32,
    /// Largest number of pages that the log may have.
    pub most: u32,
    /// The log's size in pages.
    pub pages: u32,
    /// Number of summaries in memory.
    pub rows: u32,
    places: u32,
}

impl Sizes {
    /// The sizes of the parts of a log over a store of `slots` pages.
    pub fn of(name: &str, slots: u32, config: &Config, kind: Kind) -> Result<Self, LogError> {
        let Config { segment_pages, members, lanes, .. } = *config;
        let least = if kind == Kind::Scratch { 2 } else { SEGMENT_LEAST };
        if !(least..=PLACES_MAX + 1).contains(&segment_pages) || members == 0 || lanes == 0 {
            let what = format!("{segment_pages} pages, {members} members, {lanes} lanes");
            return Err(LogError::Shape(what));
        }
        let segments = slots / segment_pages;
        let is_durable = kind != Kind::Scratch;
        let half = match kind {
            Kind::Scratch => 0,
            Kind::New => Self::half(segments, segment_pages, lanes),
            Kind::Made(half) => half,
        };
        let reserved = if is_durable { members.saturating_add(half.saturating_mul(2)) } else { 0 };
        let spare = Self::spare(lanes, is_durable);
        let places = segment_pages - 1;
        // Some segments hold no pages of the log: reserved segments, the cleaner's free ones, and
        // open ones. One more in fifty is set aside, since a segment ends early when a write to it
        // fails.
        let taken = spare.saturating_add(reserved).saturating_add(segments / 50);
        let most = segments.saturating_sub(taken).saturating_mul(places);
        let usual = (u64::from(segments.saturating_sub(reserved)) * u64::from(places) * 4 / 5) as u32;
        let asked = match config.pages {
            0 if most > 0 => usual.min(most),
            0 => usual,
            pages => pages,
        };
        if asked == 0 || asked > most {
            return Err(LogError::TooSmall { store: name.to_owned(), most, asked });
        }
        let mut sizes = Sizes { slots, segments, half, most, pages: asked, rows: 0, places };
        let least = (spare * 2).min(segments);
        let rows = match config.summaries {
            0 => {
                let left = sizes.bound().saturating_sub(sizes.memory());
                (left / Rows::row_bytes(places, is_durable)).min(segments.into()) as u32
            }
            summaries => summaries.min(segments),
        };
        sizes.rows = rows.max(least);
        Ok(sizes)
    }

    /// Number of segments of each half of the journal. A half has room for two checkpoints, and for
    /// the records of all open segments.
    fn half(segments: u32, segment_pages: u32, lanes: u32) -> u32 {
        let checkpoint = segments.div_ceil(NAMES_MAX as u32);
        let open = (lanes.saturating_add(1)).saturating_mul(OPEN_MAX as u32);
        (checkpoint * 2 + open.max(segment_pages * 5)).div_ceil(segment_pages)
    }

    /// Number of segments that the size of the log does not count: those that the cleaner keeps
    /// free, and those that are open.
    fn spare(lanes: u32, is_durable: bool) -> u32 {
        let ahead = if is_durable { DURABLE_AHEAD } else { AHEAD };
        (RESERVE + ahead + GENERATIONS as u32).saturating_add(lanes.saturating_mul(2))
    }

    /// The bound on the log's memory. Small logs may take more, because they need some summaries in
    /// any case.
    pub fn bound(&self) -> u64 {
        u64::from(self.slots) * BYTES_A_PAGE
    }

    /// Bytes of memory that the log takes: for its map, the records of segments, the summaries, and
    /// a commit.
    pub fn memory(&self) -> u64 {
        let is_durable = self.half > 0;
        let marks = if is_durable { u64::from(self.segments.div_ceil(64)) * 8 } else { 0 };
        // Map and summaries take whole pages of memory.
        (u64::from(self.pages) * 4).next_multiple_of(PAGE_SIZE as u64)
            + u64::from(self.segments) * SEGMENT_BYTES
            + marks
            + self.commit_bytes()
            + u64::from(self.rows) * Rows::row_bytes(self.places, is_durable)
            + PAGE_SIZE as u64
    }

    /// Bytes of memory for the pages of a commit, and for the dead segments that it names.
    fn commit_bytes(&self) -> u64 {
        let pages = u64::from(self.half) * u64::from(self.places + 1);
        if self.half > 0 { pages * PAGE_SIZE as u64 + u64::from(self.segments) * 4 } else { 0 }
    }

    /// Number of pages whose newest version one pass finds while a log is opened. Summaries and
    /// commits take no memory yet at that time, so a pass may use the memory that they will take.
    pub fn pass(&self) -> u64 {
        // Memory that an opening takes besides the versions. It is for the map, and for the record
        // and the life of each segment.
        let taken = u64::from(self.pages) * 4 + u64::from(self.segments) * (SEGMENT_BYTES + 8);
        (self.bound().saturating_sub(taken) / 8).max(PASS_LEAST.min(self.pages.into()))
    }

    /// Bytes of memory while the log is opened.
    #[cfg(test)]
    fn opening(&self) -> u64 {
        let pass = self.pass().min(self.pages.into()) * 8;
        u64::from(self.pages) * 4 + u64::from(self.segments) * (SEGMENT_BYTES + 8) + pass
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::Words;

    const GIB: u64 = 1 << 30;
    const TIB: u64 = 1 << 40;

    fn sizes(bytes: u64, kind: Kind) -> Sizes {
        let slots = u32::try_from(bytes / PAGE_SIZE as u64).unwrap_or(u32::MAX - 1);
        Sizes::of("a disk", slots, &Config { lanes: 6, ..Config::default() }, kind).unwrap()
    }

    #[test]
    fn a_log_takes_one_gib_of_memory_for_one_tib_of_disk_while_it_runs_and_while_it_opens() {
        for kind in [Kind::Scratch, Kind::New] {
            for bytes in [64 * GIB, 256 * GIB, TIB, 8 * TIB, 16 * TIB] {
                let (sizes, bound) = (sizes(bytes, kind), bytes / 1024);
                assert!(sizes.memory() <= bound, "{bytes}: {} of {bound}, {sizes:?}", sizes.memory());
                assert!(sizes.memory() > bound * 3 / 4, "the bound is used: {sizes:?}");
                assert!(sizes.opening() <= bound + PASS_LEAST * 8, "{bytes}: {sizes:?}");
            }
        }
        // A small log may take more than the bound: up to 16 MiB more.
        for bytes in [GIB, 16 * GIB] {
            let sizes = sizes(bytes, Kind::New);
            assert!(sizes.memory() <= bytes / 1024 + (16 << 20), "{bytes}: {} {sizes:?}", sizes.memory());
        }
    }

    #[test]
    fn what_is_taken_is_no_more_than_was_reckoned() {
        for mib in 0..4 {
            let sizes = sizes(64 * GIB + mib * (1 << 20), Kind::Scratch);
            let map = Words::new(sizes.pages as usize).unwrap().bytes();
            let rows = Rows::new(sizes.rows, sizes.places, false).unwrap().bytes();
            let taken = map + rows + u64::from(sizes.segments) * SEGMENT_BYTES;
            assert!(taken <= sizes.memory() && sizes.memory() <= sizes.bound(), "{taken}: {sizes:?}");
        }
    }

    #[test]
    fn a_half_of_the_journal_has_room_for_a_checkpoint_of_every_segment_and_as_much_again() {
        for bytes in [GIB / 4, 16 * GIB, TIB, 16 * TIB] {
            let sizes = sizes(bytes, Kind::New);
            let checkpoint = sizes.segments.div_ceil(NAMES_MAX as u32);
            assert!(sizes.half * (sizes.places + 1) >= checkpoint * 2 + 7 * OPEN_MAX as u32);
            let part = f64::from(sizes.half * 2) / f64::from(sizes.segments);
            assert!(bytes < 16 * GIB || part < 0.001, "the journal is a small part of the disk: {part}");
        }
    }
}
