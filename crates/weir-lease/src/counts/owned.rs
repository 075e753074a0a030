//! Counts with one owner: plain additions.

use alloc::vec;
use alloc::vec::Vec;

use super::{PageCounts, Regions};
use crate::token::Place;

/// Counts of the pages that one table lends: four bytes a page, and only where pages were ever lent (memory
/// comes zeroed from the system, which gives it when it is first written). A page can be out 2^32 - 1 times.
#[derive(Clone, Debug)]
pub struct OwnedCounts {
    regions: Regions,
    counts: Vec<u32>,
}

impl OwnedCounts {
    /// Counts for regions of so many pages each, region 0 first; at most 256 regions.
    pub fn new(region_pages: &[u32]) -> Self {
        let (regions, pages) = Regions::new(region_pages);
        OwnedCounts { regions, counts: vec![0; pages] }
    }

    /// References out of a page, or `None` if there is no such page.
    pub fn of(&self, place: Place) -> Option<u32> {
        self.regions.index(place).map(|index| self.counts[index])
    }

    /// Bytes that the counts take when every page has been lent.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.counts[..]) + size_of_val(&self.regions.spans[..])
    }
}

impl PageCounts for OwnedCounts {
    #[inline]
    fn take(&mut self, place: Place) -> bool {
        let Some(count) = self.regions.index(place).and_then(|index| self.counts.get_mut(index)) else {
            return false;
        };
        let Some(more) = count.checked_add(1) else { return false };
        *count = more;
        true
    }

    #[inline]
    fn give(&mut self, place: Place) -> bool {
        let Some(count) = self.regions.index(place).and_then(|index| self.counts.get_mut(index)) else {
            return false;
        };
        debug_assert!(*count > 0, "a page came back that was not out: {place:?}");
        *count = count.saturating_sub(1);
        *count == 0
    }
}
