//! Reference counts that several tables share, each table on a thread of its own.

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

/// Largest number of references to one page. It is half of the counter's range, so threads that
/// count beyond it for a moment cannot make the counter overflow.
const COUNT_MAX: u32 = u32::MAX / 2;

/// Counts of pages that several tables lend. Give each table a clone. A reference costs an atomic
/// addition when it is taken, and an atomic subtraction when it is returned. Exactly one of all
/// tables learns that a page's last reference has come back.
///
/// ```
/// use weir_lease::{Geometry, Place, SharedCounts, Table};
///
/// // Two threads have a table each. Both tables lend pages of one region of 1,000 pages.
/// let counts = SharedCounts::new(&[1_000]);
/// let geometry = Geometry { connections: 8, references: 512, quota: 64 };
/// let mut tables = [Table::new(geometry, counts.clone())?, Table::new(geometry, counts.clone())?];
/// let [one, two] = tables.each_mut();
///
/// let (here, there) = (one.open(64)?, two.open(64)?);
/// let (a, b) = (one.take(&here, Place::page(0, 7))?, two.take(&there, Place::page(0, 7))?);
/// assert_eq!(counts.of(Place::page(0, 7)), Some(2));
///
/// // The table that gets the last reference back reports that.
/// assert!(!one.give(&here, a).expect("held").last);
/// assert!(two.give(&there, b).expect("held").last);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// As with an `Arc`, only a holder that knows the page to be alive may take a reference to it. A
/// page whose last return was reported must not be lent again until its owner allows it.
#[derive(Clone, Debug)]
pub struct SharedCounts {
    regions: Regions,
    counts: Arc<alloc::boxed::Box<[AtomicU32]>>,
}

impl SharedCounts {
    /// Makes counts for the pages of at most 256 regions. `region_pages[n]` is the number of pages
    /// of region `n`.
    pub fn new(region_pages: &[u32]) -> Self {
        let (regions, pages) = Regions::new(region_pages);
        let counts = (0..pages).map(|_| AtomicU32::new(0)).collect();
        SharedCounts { regions, counts: Arc::new(counts) }
    }

    /// Number of references to a page in all tables, or `None` if there is no such page.
    pub fn of(&self, place: Place) -> Option<u32> {
        self.regions.index(place).map(|index| self.counts[index].load(Ordering::Relaxed))
    }

    /// Bytes of the counts, which all clones share.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.counts[..]) + size_of_val(&self.regions.spans[..])
    }
}

impl PageCounts for SharedCounts {
    #[inline]
    fn take(&mut self, place: Place) -> bool {
        let Some(index) = self.regions.index(place) else { return false };
        // Relaxed suffices, as in Arc::clone: the taker knows by other means that the page is
        // alive.
        if self.counts[index].fetch_add(1, Ordering::Relaxed) >= COUNT_MAX {
            self.counts[index].fetch_sub(1, Ordering::Relaxed);
            return false;
        }
        true
    }

    #[inline]
    fn give(&mut self, place: Place) -> bool {
        let Some(index) = self.regions.index(place) else { return false };
        // As in Arc's drop: every use of the page through any table happens before the next use by
        // the page's owner.
        if self.counts[index].fetch_sub(1, Ordering::Release) == 1 {
            fence(Ordering::Acquire);
            return true;
        }
        false
    }
}
