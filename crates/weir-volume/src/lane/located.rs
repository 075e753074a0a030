//! The place where a page was found, and the checksum that proves its content.

use crate::Pool;
use crate::entry::{Entry, Place};
use crate::pack;
use weir_core::{Checksum, PageBytes, PageNo};
use weir_store::Fault;

/// A page's place and the checksum that proves its content. Valid while the lane is pinned.
#[derive(Clone, Copy)]
pub(crate) struct Located {
    pub(super) page: PageNo,
    pub(crate) entry: Entry,
    /// The checksum from the slot's record, read while the map named the slot. The record may be
    /// gone by the time the content arrives.
    pub(super) checksum: Option<Checksum>,
    /// The page lies in a pack with others, and the checksum is the pack's.
    pub(super) packed: bool,
}

impl Pool {
    /// Finds a page's place and its checksum. The calling lane must be pinned.
    ///
    /// The slot's record is read after the map named the slot. No lane can claim the slot
    /// meanwhile. But another lane may replace the page and retire the slot, and then the slot's
    /// record has no checksum any more. In that case the map already names the place of the new
    /// content, which is found instead.
    #[inline]
    pub(crate) fn locate(&self, page: PageNo) -> Located {
        let mut entry = self.map.load(page);
        loop {
            let Place::Stored { store, slot } = entry.place() else {
                return Located { page, entry, checksum: None, packed: false };
            };
            if let Some(occupant) = self.tiers[store].records.occupant(slot) {
                let packed = occupant.is_pack();
                // A pack's record names no page. The pack's content tells whether the page is in
                // it.
                let checksum = (packed || occupant.page == page).then_some(occupant.checksum);
                return Located { page, entry, checksum, packed };
            }
            let now = self.map.load(page);
            if now == entry {
                return Located { page, entry, checksum: None, packed: false };
            }
            entry = now;
        }
    }

    /// Does what [`locate`](Pool::locate) does, for a mover; `None` if no volume has the page. The
    /// lock of the ranges is held meanwhile: to look at the entry of a page that no volume has
    /// would take memory.
    pub(super) fn locate_in_volume(&self, page: PageNo) -> Option<Located> {
        let ranges = self.ranges();
        ranges.has(page).then(|| self.locate(page))
    }
}

impl Located {
    /// Checks that `bytes` are the page's content, if the page lies in a store.
    #[inline]
    pub(super) fn verify(&self, bytes: &PageBytes) -> Result<(), Fault> {
        let right = match self.entry.place() {
            Place::Stored { .. } if self.packed => self.checksum == Some(pack::checksum(bytes)),
            Place::Stored { .. } => {
                self.checksum == Some(Checksum::of(bytes, self.page, self.entry.generation()))
            }
            _ => true,
        };
        if right { Ok(()) } else { Err(Fault::Corrupt) }
    }
}
