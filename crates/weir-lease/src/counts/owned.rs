//! Counts with one owner: plain additions to bytes.

use alloc::vec;
use alloc::vec::Vec;

use super::{PageCounts, Regions};
use crate::token::Place;

/// Set in a page's byte while more of its count lies in `rest`.
const MORE: u8 = 1 << 7;
/// The most that a byte counts itself.
const FULL: u8 = MORE - 1;
/// The count that moves to `rest` when a byte is full, and comes back when it is empty. Half of it,
/// so that a count that goes up and down by one does not move anything each time.
const MOVED: u8 = 64;

/// Counts of the pages that one table lends: a byte a page, which is what keeps them in the cache,
/// and four more for pages that are out more than 127 times at once. Memory comes zeroed from the
/// system, which gives it when it is first written: so pages that were never lent take none, and
/// neither do four bytes that are not needed.
#[derive(Clone, Debug)]
pub struct OwnedCounts {
    regions: Regions,
    bytes: Vec<u8>,
    rest: Vec<u32>,
}

impl OwnedCounts {
    /// Counts for regions of so many pages each, region 0 first; at most 256 regions.
    pub fn new(region_pages: &[u32]) -> Self {
        let (regions, pages) = Regions::new(region_pages);
        OwnedCounts { regions, bytes: vec![0; pages], rest: vec![0; pages] }
    }

    /// References out of a page, or `None` if there is no such page.
    pub fn of(&self, place: Place) -> Option<u64> {
        let index = self.regions.index(place)?;
        Some(u64::from(self.bytes[index] & FULL) + u64::from(MOVED) * u64::from(self.rest[index]))
    }

    /// Bytes that the counts take when every page has been out more than 127 times at once; a fifth
    /// of it when none has.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.bytes[..]) + size_of_val(&self.rest[..]) + size_of_val(&self.regions.spans[..])
    }

    #[cold]
    fn spill(&mut self, index: usize) {
        // 2^32 times 64 references do not fit any table: its slots alone would take 2 TiB.
        self.rest[index] += 1;
        self.bytes[index] = MORE | (FULL - MOVED);
    }

    #[cold]
    fn refill(&mut self, index: usize) {
        self.rest[index] -= 1;
        self.bytes[index] = MOVED | if self.rest[index] > 0 { MORE } else { 0 };
    }
}

impl PageCounts for OwnedCounts {
    #[inline]
    fn take(&mut self, place: Place) -> bool {
        let Some(index) = self.regions.index(place) else { return false };
        if self.bytes[index] & FULL == FULL {
            self.spill(index);
        }
        self.bytes[index] += 1;
        true
    }

    #[inline]
    fn give(&mut self, place: Place) -> bool {
        let Some(index) = self.regions.index(place) else { return false };
        if self.bytes[index] == MORE {
            self.refill(index);
        }
        debug_assert!(self.bytes[index] & FULL > 0, "a page came back that was not out: {place:?}");
        self.bytes[index] = self.bytes[index].saturating_sub(1);
        self.bytes[index] == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: Place = Place::page(0, 1);

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 256 }))]

        #[test]
        fn a_count_goes_up_and_down_by_one_however_high(turns in prop::collection::vec(0u32..700, 1..if cfg!(miri) { 2 } else { 6 })) {
            let mut counts = OwnedCounts::new(&[2]);
            let mut out = 0u64;
            for (turn, target) in turns.into_iter().chain([0]).enumerate() {
                while out != u64::from(target) {
                    if out < u64::from(target) {
                        prop_assert!(counts.take(PAGE));
                        out += 1;
                    } else {
                        out -= 1;
                        prop_assert_eq!(counts.give(PAGE), out == 0, "turn {}", turn);
                    }
                    prop_assert_eq!(counts.of(PAGE), Some(out));
                }
            }
            prop_assert_eq!(counts.of(Place::page(0, 0)), Some(0));
        }
    }
}
