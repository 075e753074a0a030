//! The counts of a coming batch by store. From these counts each store chooses how to do its part
//! of the batch.

use crate::Volume;
use crate::entry::{Place, STORES_MAX};
use crate::lane::StoreLane;
use weir_core::PageNo;

/// Counts a batch's reads and writes by store, to announce them. The counts are only a hint: a page
/// can move before it is read, and the batch need not have exactly the counted pages.
pub struct BatchCounts<'a> {
    volume: &'a Volume,
    stores: &'a mut [StoreLane],
    reads: [usize; STORES_MAX],
    writes: usize,
    /// The store in which the lane last claimed a slot. Unless this store becomes full, the lane
    /// most likely claims its next slot there too.
    taker: usize,
}

impl<'a> BatchCounts<'a> {
    pub(crate) fn new(volume: &'a Volume, stores: &'a mut [StoreLane], taker: usize) -> Self {
        BatchCounts { volume, stores, reads: [0; STORES_MAX], writes: 0, taker }
    }

    /// Counts pages that will be read. Pages that lie in no store cost nothing.
    pub fn reads(&mut self, pages: impl IntoIterator<Item = PageNo>) {
        let range = self.volume.range();
        let pages = pages.into_iter().map(|page| range.start + page.0);
        for page in pages.filter(|page| *page < range.end).map(PageNo) {
            if let Place::Stored { store, .. } = self.volume.map.load(page).place() {
                self.reads[store] += 1;
            }
        }
    }

    /// Counts `pages` pages that will be written.
    pub fn writes(&mut self, pages: usize) {
        self.writes += pages;
    }

    /// Tells each store its counts.
    pub fn announce(self) {
        for (at, store) in self.stores.iter_mut().enumerate() {
            let writes = if at == self.taker { self.writes } else { 0 };
            if self.reads[at] + writes > 0 {
                store.lane.plan(self.reads[at], writes);
            }
        }
    }
}
