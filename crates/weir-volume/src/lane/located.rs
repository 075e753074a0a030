//! Where a page was found, and the proof of its content.

use crate::Volume;
use crate::entry::{Entry, Place};
use crate::pack;
use weir_core::{Checksum, PageBytes, PageNo};
use weir_store::Fault;

/// Where a page was found, and what proves its content. Valid while the lane is pinned.
#[derive(Clone, Copy)]
pub(crate) struct Located {
    pub(super) page: PageNo,
    pub(crate) entry: Entry,
    /// As the slot's record said while the map named it; the record itself may be gone by the time
    /// the content arrives.
    pub(super) checksum: Option<Checksum>,
    /// It lies in a pack with others, and the checksum is the pack's.
    pub(super) packed: bool,
}

impl Volume {
    /// Where a page lies, with its checksum. The calling lane is pinned.
    ///
    /// The slot's record is read after the map named the slot. Nobody can claim the slot meanwhile,
    /// but whoever replaced the page may have retired it, and with that its checksum: then the map
    /// already says where the new content is.
    #[inline]
    pub(crate) fn locate(&self, page: PageNo) -> Located {
        let mut entry = self.map.load(page);
        loop {
            let Place::Stored { store, slot } = entry.place() else {
                return Located { page, entry, checksum: None, packed: false };
            };
            if let Some(occupant) = self.tiers[store].records.occupant(slot) {
                let packed = occupant.is_pack();
                // Whether it is one of the pack's pages, the pack itself says.
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
}

impl Located {
    /// Whether `bytes` are the page's content, where that lies in a store.
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
