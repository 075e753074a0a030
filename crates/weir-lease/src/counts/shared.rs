//! Counts that several tables, each on its own thread, share.

use super::{PageCounts, Regions};
use crate::token::Place;

#[cfg(loom)]
use loom::sync::{
    Arc,
    atomic::{AtomicU32, Ordering, fence},
};

#[cfg(not(loom))]
use {
    alloc::sync::Arc,
    core::sync::atomic::{AtomicU32, Ordering, fence},
};

/// References to one page that may be out; as far below the counter's end as threads cannot reach
/// together.
const COUNT_MAX: u32 = u32::MAX / 2;

/// Counts of pages that several tables lend. Give each table a clone. One atomic addition for each
/// reference taken and one for each returned; of all tables exactly one learns that a page's last
/// reference is back.
///
/// ```
/// use weir_lease::{Geometry, Place, SharedCounts, Table};
///
/// // A table for each of two threads; both lend of one region of 1,000 pages.
/// let counts = SharedCounts::new(&[1_000]);
/// let geometry = Geometry { connections: 8, references: 512, quota: 64 };
/// let mut tables = [Table::new(geometry, counts.clone())?, Table::new(geometry, counts.clone())?];
/// let [one, two] = tables.each_mut();
///
/// let (here, there) = (one.open(64)?, two.open(64)?);
/// let (a, b) = (one.take(&here, Place::page(0, 7))?, two.take(&there, Place::page(0, 7))?);
/// assert_eq!(counts.of(Place::page(0, 7)), Some(2));
///
/// // Whoever returns it last hears of it, whichever table that is.
/// assert!(!one.give(&here, a).expect("held").last);
/// assert!(two.give(&there, b).expect("held").last);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// As with an `Arc`, only somebody who knows the page to be alive may take a reference to it: a
/// page whose last return was reported must not be lent again until its owner says so.
#[derive(Clone, Debug)]
pub struct SharedCounts {
    regions: Regions,
    counts: Arc<alloc::boxed::Box<[AtomicU32]>>,
}

impl SharedCounts {
    /// Counts for regions of so many pages each, region 0 first; at most 256 regions.
    pub fn new(region_pages: &[u32]) -> Self {
        let (regions, pages) = Regions::new(region_pages);
        let counts = (0..pages).map(|_| AtomicU32::new(0)).collect();
        SharedCounts { regions, counts: Arc::new(counts) }
    }

    /// References out of a page in all tables, or `None` if there is no such page.
    pub fn of(&self, place: Place) -> Option<u32> {
        self.regions.index(place).map(|index| self.counts[index].load(Ordering::Relaxed))
    }

    /// Bytes that the counts take, once for all clones.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.counts[..]) + size_of_val(&self.regions.spans[..])
    }
}

impl PageCounts for SharedCounts {
    #[inline]
    fn take(&mut self, place: Place) -> bool {
        let Some(index) = self.regions.index(place) else { return false };
        // Relaxed, as in Arc::clone: whoever takes knows the page to be alive by other means.
        if self.counts[index].fetch_add(1, Ordering::Relaxed) >= COUNT_MAX {
            self.counts[index].fetch_sub(1, Ordering::Relaxed);
            return false;
        }
        true
    }

    #[inline]
    fn give(&mut self, place: Place) -> bool {
        let Some(index) = self.regions.index(place) else { return false };
        // As in Arc's drop: every use of the page through any table happens before its owner's next
        // use.
        if self.counts[index].fetch_sub(1, Ordering::Release) == 1 {
            fence(Ordering::Acquire);
            return true;
        }
        false
    }
}
