//! A batch that a lane is about to do, counted by store. A store chooses how to do the batch by how
//! much comes to it.

use crate::Volume;
use crate::entry::{Place, STORES_MAX};
use crate::lane::StoreLane;
use weir_core::PageNo;

/// The reads and writes of a batch, while they are counted. The counts are a hint: pages may move
/// before they are read. An uncounted page may be read or written, and a counted one may not.
pub struct BatchCounts<'a> {
    volume: &'a Volume,
    stores: &'a mut [StoreLane],
    reads: [usize; STORES_MAX],
    writes: usize,
    /// The store of the last new slot. It is most likely the next slot's store too, unless it
    /// becomes full.
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

    /// Counts this many pages that will be written.
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
