//! Pages seen where they lie.

use super::Lane;
use super::count::{Places, Started};
use super::located::Located;
use crate::entry::Place;
use weir_core::PageNo;
use weir_device::View;
use weir_store::Fault;

/// Keeps what [`view`](Guard::view) shows in place, for as long as it lives. It holds back every
/// slot that is freed meanwhile, so not for longer than a millisecond or two.
pub struct Guard<'a> {
    pub(crate) lane: &'a mut Lane,
    /// When it began, where it is one of those that are timed.
    started: Option<Started>,
    /// The places of the pages that it has shown.
    shown: Places,
}

impl Lane {
    /// Keeps pages in place, to look at them where they lie.
    pub fn pin(&mut self) -> Guard<'_> {
        self.enter();
        let started = self.sample();
        Guard { lane: self, started, shown: Places::default() }
    }
}

impl Guard<'_> {
    /// A read of the page without I/O. A page shown as bytes has been verified.
    pub fn view(&self, page: PageNo) -> View<'_> {
        self.show(&self.lane.volume.locate(page))
    }

    #[inline]
    pub(crate) fn show(&self, located: &Located) -> View<'_> {
        let view = self.find(located);
        // A page elsewhere is counted when it has been read from there.
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
                // SAFETY: the map named the slot after this lane was pinned, so no lane claims it,
                // and so nobody writes it or releases its chunk, before the pin ends; the result
                // borrows the guard, whose end that is.
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

    /// Says that [`view`](Guard::view) of this page will follow that of one or two others: brings
    /// its record and its head near.
    #[inline]
    pub fn prefetch(&self, page: PageNo) {
        let volume = &self.lane.volume;
        if let Place::Stored { store, slot } = volume.map.load(page).place() {
            volume.tiers[store].records.prefetch(slot);
            // SAFETY: the map names the slot and this lane is pinned, as in `view`.
            if let Some(bytes) = unsafe { self.lane.stores[store].lane.view(slot) } {
                weir_core::prefetch(bytes);
            }
        }
    }

    /// Counts `pages` pages that have been looked at through this guard since it began, `faults` of
    /// them in vain. A page of those that are timed took its share of the time.
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
