//! Streams: long runs of neighbouring pages. A disk serves streams well, and in the cache they
//! would replace all other pages.
//!
//! The table of streams has one word for each hash of an area of 256 pages. The word has the page
//! expected next, and the length of the run so far. Requests of one stream may come a little out of
//! order, since several threads send them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use weir_core::PageNo;

const ROWS: usize = 1024;
const AREA_BITS: u32 = 8;
/// Largest number of pages that a run may skip.
const AHEAD: u32 = 512;
/// A run expects a certain page next. A request for one of this many pages before the expected one
/// begins no other run.
const BEHIND: u32 = 64;

/// Finds streams in the requests of all lanes.
#[derive(Debug)]
pub(crate) struct Streams {
    rows: Box<[AtomicU64]>,
    /// A stream of more pages than this in a row bypasses the cache; 0: no stream does.
    cutoff: u32,
}

impl Streams {
    pub fn new(cutoff: u32) -> Self {
        Streams { rows: (0..ROWS).map(|_| AtomicU64::new(0)).collect(), cutoff }
    }

    fn row(&self, area: u32) -> &AtomicU64 {
        &self.rows[area.wrapping_mul(0x9e37_79b1) as usize >> 22 & (ROWS - 1)]
    }

    /// Notes a request for a page. Returns whether the page belongs to a stream that bypasses the
    /// cache.
    pub fn note(&self, page: PageNo) -> bool {
        if self.cutoff == 0 {
            return false;
        }
        let (page, area) = (page.0, page.0 >> AREA_BITS);
        let row = self.row(area);
        let near = |word: u64| {
            let (next, length) = ((word >> 32) as u32, word as u32);
            let ahead = page.wrapping_sub(next) <= AHEAD;
            let behind = next.wrapping_sub(page) <= BEHIND;
            (length > 0 && (ahead || behind)).then_some((next, length))
        };
        // The table has a word for each area. A stream that enters an area goes on from the word of
        // the area before, and clears that word.
        let enter = || {
            let before = self.row(area.wrapping_sub(1));
            near(before.load(Relaxed)).inspect(|_| before.store(0, Relaxed))
        };
        let found = near(row.load(Relaxed)).or_else(enter);
        let (next, length) = found.unwrap_or((page, 0));
        if page.wrapping_sub(next) > AHEAD {
            // The page lies before the expected page: its request is late, or a repeated read. Such
            // a page does not continue the stream, and does not belong to the stream.
            return false;
        }
        let length = length.saturating_add(1);
        row.store(u64::from(page.wrapping_add(1)) << 32 | u64::from(length), Relaxed);
        length > self.cutoff
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_run_is_a_stream_after_the_cutoff_and_random_pages_are_none() {
        let streams = Streams::new(1024);
        let begins = (5000..9000).find(|page| streams.note(PageNo(*page)));
        assert_eq!(begins, Some(5000 + 1024));
        assert!((6025..20000).all(|page| streams.note(PageNo(page))), "it stays one");
        let mut chance = 1u32;
        let mut random = || {
            chance = chance.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            PageNo(chance)
        };
        assert!((0..1_000_000).all(|_| !streams.note(random())));
    }

    #[test]
    fn a_hot_set_that_is_read_again_and_again_is_no_stream() {
        let streams = Streams::new(256);
        assert!((0..100).all(|_| (0..64).all(|page| !streams.note(PageNo(page)))));
    }

    #[test]
    fn a_stream_that_comes_again_is_one_and_single_pages_where_it_was_are_none() {
        let streams = Streams::new(256);
        let scan = || (0..4096).filter(|page| streams.note(PageNo(*page))).count();
        assert_eq!((scan(), scan()), (4096 - 256, 4096 - 256));
        assert!((0..4096).rev().step_by(7).all(|page| !streams.note(PageNo(page))));
    }

    #[test]
    fn requests_that_overtake_one_another_are_one_stream() {
        let streams = Streams::new(256);
        let pairs = (0..100u32).flat_map(|pair| {
            let first = pair * 64;
            (first + 32..first + 64).chain(first..first + 32)
        });
        let found = pairs.filter(|page| streams.note(PageNo(*page))).count();
        assert!(found > 2500, "{found} of 6400, where half of them are overtaken");
    }

    #[test]
    fn without_a_cutoff_nothing_is_a_stream() {
        let streams = Streams::new(0);
        assert!((0..100_000).all(|page| !streams.note(PageNo(page))));
    }
}
