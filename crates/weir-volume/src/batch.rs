//! A batch that a lane is about to do, counted by store: each chooses its way by how much comes to
//! it.

use crate::Volume;
use crate::entry::{Place, STORES_MAX};
use crate::lane::StoreLane;
use weir_core::PageNo;

/// The reads and writes of a batch, while it is being counted. A hint: pages may move before they
/// are read, and nothing has to be counted that will be done, nor done that was counted.
pub struct Batch<'a> {
    volume: &'a Volume,
    stores: &'a mut [StoreLane],
    reads: [usize; STORES_MAX],
    writes: usize,
    /// The store that the last new slot was taken from: the next will be its too, but for the one
    /// time that it is full.
    taker: usize,
}

impl<'a> Batch<'a> {
    pub(crate) fn new(volume: &'a Volume, stores: &'a mut [StoreLane], taker: usize) -> Self {
        Batch { volume, stores, reads: [0; STORES_MAX], writes: 0, taker }
    }

    /// These pages will be read. Those that lie in no store cost nothing.
    pub fn reads(&mut self, pages: impl IntoIterator<Item = PageNo>) {
        for page in pages {
            if let Place::Stored { store, .. } = self.volume.map.load(page).place() {
                self.reads[store] += 1;
            }
        }
    }

    /// So many pages will be written.
    pub fn writes(&mut self, pages: usize) {
        self.writes += pages;
    }

    /// Tells the stores.
    pub fn announce(self) {
        for (at, store) in self.stores.iter_mut().enumerate() {
            let writes = if at == self.taker { self.writes } else { 0 };
            if self.reads[at] + writes > 0 {
                store.lane.plan(self.reads[at], writes);
            }
        }
    }
}
