//! Reference counts of one table's pages, which need no atomics.

use alloc::vec;
use alloc::vec::Vec;

use super::{PageCounts, Regions};
use crate::token::Place;

/// The bit of a page's byte that tells that `rest` has another part of the page's count.
const MORE: u8 = 1 << 7;
/// The highest count that a page's byte holds by itself.
const FULL: u8 = MORE - 1;
/// The part of a page's count that moves to `rest` when the page's byte is full, and back when the
/// byte is empty. It is half of the byte's range, so that a count which goes up and down by one
/// need not be moved each time.
const MOVED: u8 = 64;

/// Counts of the pages that one table lends. Each page has a byte, so that the counts stay in the
/// cache, and four more bytes for pages with more than 127 references at once. The system gives the
/// memory, all zeros, when it is first written. So the counts of a page that was never lent take no
/// memory, and neither do four bytes that are not needed.
#[derive(Clone, Debug)]
pub struct OwnedCounts {
    regions: Regions,
    bytes: Vec<u8>,
    rest: Vec<u32>,
}

impl OwnedCounts {
    /// Makes counts for the pages of at most 256 regions. `region_pages[n]` is the number of pages
    /// of region `n`.
    pub fn new(region_pages: &[u32]) -> Self {
        let (regions, pages) = Regions::new(region_pages);
        OwnedCounts { regions, bytes: vec![0; pages], rest: vec![0; pages] }
    }

    /// Number of references to a page that are held now, or `None` if there is no such page.
    pub fn of(&self, place: Place) -> Option<u64> {
        let index = self.regions.index(place)?;
        Some(u64::from(self.bytes[index] & FULL) + u64::from(MOVED) * u64::from(self.rest[index]))
    }

    /// Bytes of memory that the counts take if every page has had more than 127 references at once.
    /// If none has, they take a fifth of that.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.bytes[..]) + size_of_val(&self.rest[..]) + size_of_val(&self.regions.spans[..])
    }

    #[cold]
    fn spill(&mut self, index: usize) {
        // One in `rest` stands for [`MOVED`] references. `rest` cannot overflow: for so many
        // references the slots alone would take 2 TiB, and no table has room for them.
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
