//! Shows pages where they lie, without a copy.

use super::Lane;
use super::count::{Places, Started};
use super::located::Located;
use crate::entry::Place;
use weir_core::PageNo;
use weir_device::View;
use weir_store::Fault;

/// A guard that keeps pages in place while [`view`](Guard::view) shows them. It holds back every
/// slot that is freed meanwhile, so it should not live longer than a millisecond or two.
pub struct Guard<'a> {
    pub(crate) lane: &'a mut Lane,
    /// The guard's start time, if the guard is one of the sampled operations that are timed.
    started: Option<Started>,
    /// The number of pages in each store that the guard has shown.
    shown: Places,
}

impl Lane {
    /// Makes a guard that keeps pages in place, to read them where they lie.
    pub fn pin(&mut self) -> Guard<'_> {
        self.enter();
        let started = self.sample();
        Guard { lane: self, started, shown: Places::default() }
    }
}

impl Guard<'_> {
    /// Shows a page without I/O. A page shown as bytes has been verified.
    pub fn view(&self, page: PageNo) -> View<'_> {
        self.show(&self.lane.pool.locate(self.lane.at(page)))
    }

    #[inline]
    pub(crate) fn show(&self, located: &Located) -> View<'_> {
        let view = self.find(located);
        // The caller reads a page that cannot be shown, and that read counts the page.
        if !matches!(view, View::Elsewhere) {
            self.shown.add(located.entry.place());
        }
        view
    }

    #[inline]
    fn find(&self, located: &Located) -> View<'_> {
        match located.entry.place() {
            Place::Empty => View::Fill(0),
            Place::Fill(value) => View::Fill(value),
            Place::Lost => View::Fault(Fault::Lost),
            Place::Stored { store, slot } => {
                // SAFETY: the map named the slot after this lane was pinned, so no lane claims it.
                // So it is not written, nor its chunk released, before the pin ends. The result
                // borrows the guard, and the guard's end is the pin's end.
                match unsafe { self.lane.stores[store].lane.view(slot) } {
                    None => View::Elsewhere,
                    Some(_) if located.packed => View::Elsewhere,
                    Some(bytes) => match located.verify(bytes) {
                        Ok(()) => View::Bytes(bytes),
                        Err(fault) => View::Fault(fault),
                    },
                }
            }
        }
    }

    /// Prefetches the page's record and its first bytes, for a [`view`](Guard::view) that follows
    /// after one or two others.
    #[inline]
    pub fn prefetch(&self, page: PageNo) {
        let pool = &self.lane.pool;
        if let Place::Stored { store, slot } = pool.map.load(self.lane.at(page)).place() {
            pool.tiers[store].records.prefetch(slot);
            // SAFETY: the map names the slot and this lane is pinned, as in `view`.
            if let Some(bytes) = unsafe { self.lane.stores[store].lane.view(slot) } {
                weir_core::prefetch(bytes);
            }
        }
    }

    /// Counts `pages` pages as read through this guard, and `faults` as failed. If the guard is
    /// timed, its time is divided equally among the pages.
    pub fn count_reads(&self, pages: u64, faults: u64) {
        let metrics = self.lane.metrics();
        metrics.read_faults.add(faults);
        metrics.reads_ended(pages, &self.shown, self.started);
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.lane.leave();
    }
}
