//! Counters and latencies. One in [`SAMPLE_EVERY`] operations is timed.

use super::Lane;
use crate::entry::{Place, STORES_MAX};
use crate::status::LaneMetrics;
use std::cell::Cell;
use std::time::{Duration, Instant};
use weir_core::metrics::Counter;
use weir_store::Fault;

/// One in this many operations is timed: reading the clock twice costs a tenth of a write to host
/// memory. The number is a prime, so that no program's own rhythm hides an operation. When it was
/// 16 and a program wrote and read in turn, only the reads were timed.
const SAMPLE_EVERY: u32 = 17;

/// The start time of an operation that is timed, and the clock that tells its end.
#[derive(Clone, Copy)]
pub(super) struct Started {
    at: Instant,
    clock: fn() -> Instant,
}

impl Started {
    fn took(&self) -> Duration {
        (self.clock)().saturating_duration_since(self.at)
    }
}

impl Lane {
    #[inline]
    pub(super) fn sample(&mut self) -> Option<Started> {
        if self.until_sample == 0 {
            self.until_sample = SAMPLE_EVERY;
        }
        self.until_sample -= 1;
        if self.until_sample > 0 {
            None
        } else {
            self.pool.stopwatch.get().map(|clock| Started { at: clock(), clock: *clock })
        }
    }
}

impl LaneMetrics {
    /// Counts the end of one page's read. `place` says in which store the page was found.
    #[inline]
    pub(super) fn read_ended(&self, place: Place, started: Option<Started>, result: Result<(), Fault>) {
        let traffic = self.traffic(place);
        count(&traffic.reads);
        if let Some(started) = started {
            traffic.read_latencies.record(started.took(), 1);
        }
        self.read_failed(result);
    }

    /// Counts a read if it has failed.
    #[inline]
    pub(super) fn read_failed(&self, result: Result<(), Fault>) {
        if let Err(fault) = result {
            count(&self.read_faults);
            if fault == Fault::Corrupt {
                count(&self.corrupt);
            }
        }
    }

    /// Counts `pages` pages that one operation has read. Their faults were counted one by one.
    pub(super) fn run_read(&self, store: usize, pages: u64, started: Option<Started>) {
        let traffic = self.traffic_of(Some(store));
        traffic.reads.add(pages);
        if let Some(started) = started {
            traffic.read_latencies.record(started.took(), 1);
        }
    }

    /// Counts `pages` pages that one operation has written, or could not write.
    pub(super) fn run_written(&self, store: usize, pages: u64, started: Option<Started>, failed: bool) {
        let traffic = self.traffic_of(Some(store));
        traffic.writes.add(pages);
        if let Some(started) = started {
            traffic.write_latencies.record(started.took(), 1);
        }
        if failed {
            self.write_faults.add(pages);
        }
    }

    /// Counts a page that was written to `place`, or could not be written.
    #[inline]
    pub(super) fn write_ended(&self, place: Place, started: Option<Started>, result: Result<(), Fault>) {
        let traffic = self.traffic(place);
        count(&traffic.writes);
        if let Some(started) = started {
            traffic.write_latencies.record(started.took(), 1);
        }
        if result.is_err() {
            count(&self.write_faults);
        }
    }

    /// Counts `pages` pages that were read together. `places` tells in which stores they lay. If
    /// `started` is set, the time since then is divided equally among the pages, and recorded.
    #[inline]
    pub(super) fn reads_ended(&self, pages: u64, places: &Places, started: Option<Started>) {
        places.share_out(pages, |store, pages| self.traffic_of(store).reads.add(pages));
        if let Some(each) = each(pages, started) {
            self.traffic_of(places.most()).read_latencies.record(each, 1);
        }
    }

    /// Counts `pages` pages that were written together. `places` tells in which stores they lie. If
    /// `started` is set, the time since then is divided equally among the pages, and recorded.
    pub(super) fn writes_ended(&self, pages: u64, places: &Places, started: Option<Started>) {
        places.share_out(pages, |store, pages| self.traffic_of(store).writes.add(pages));
        if let Some(each) = each(pages, started) {
            self.traffic_of(places.most()).write_latencies.record(each, 1);
        }
    }
}

fn each(pages: u64, started: Option<Started>) -> Option<Duration> {
    started.filter(|_| pages > 0).map(|started| started.took() / pages as u32)
}

/// Counts of pages by the store in which they lie; the last count is of pages in no store.
#[derive(Default)]
pub(super) struct Places {
    counts: [Cell<u32>; STORES_MAX + 1],
    /// A bit for each store whose count is not 0. Usually only one is set.
    used: Cell<u32>,
    all: Cell<u32>,
}

impl Places {
    #[inline]
    pub(super) fn add(&self, place: Place) {
        let at = match place {
            Place::Stored { store, .. } => store,
            _ => STORES_MAX,
        };
        self.counts[at].set(self.counts[at].get() + 1);
        self.used.set(self.used.get() | 1 << at);
        self.all.set(self.all.get() + 1);
    }

    /// Divides `pages` pages among the stores, in proportion to the pages that were looked up in
    /// each. If `pages` exceeds the pages looked up, the rest counts for no store. If `pages` is
    /// lower, some look-ups were for a request that was then answered in another way.
    #[inline]
    fn share_out(&self, pages: u64, mut give: impl FnMut(Option<usize>, u64)) {
        let all = u64::from(self.all.get());
        if pages > all {
            give(None, pages - all);
        }
        let pages = pages.min(all);
        let (mut lay, mut given) = (0, 0);
        for (store, count) in self.stores() {
            lay += u64::from(count);
            let upto = if lay == all { pages } else { pages * lay / all };
            give(store, upto - given);
            given = upto;
        }
    }

    /// The store with the highest count.
    fn most(&self) -> Option<usize> {
        self.stores().max_by_key(|(_, count)| *count).and_then(|(store, _)| store)
    }

    #[inline]
    fn stores(&self) -> impl Iterator<Item = (Option<usize>, u32)> + '_ {
        let mut left = self.used.get();
        std::iter::from_fn(move || {
            let at = left.trailing_zeros() as usize;
            let count = self.counts.get(at)?.get();
            left &= left - 1;
            Some(((at < STORES_MAX).then_some(at), count))
        })
    }
}

#[inline]
pub(super) fn count(counter: &Counter) {
    counter.add(1);
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_core::Slot;

    #[test]
    fn pages_are_shared_out_as_they_lay_and_none_is_lost() {
        let places = Places::default();
        let shared = |pages| {
            let mut shared = Vec::new();
            places.share_out(pages, |store, pages| shared.push((store, pages)));
            shared
        };
        assert_eq!((shared(0), shared(3)), (vec![], vec![(None, 3)]), "holes that nobody looked at");
        assert_eq!(places.most(), None);
        let stored = |store| Place::Stored { store, slot: Slot(0) };
        for place in [stored(0), stored(15), stored(15), Place::Fill(7), Place::Empty, stored(15)] {
            places.add(place);
        }
        assert_eq!(shared(6), [(Some(0), 1), (Some(15), 3), (None, 2)]);
        assert_eq!(shared(9), [(None, 3), (Some(0), 1), (Some(15), 3), (None, 2)]);
        for pages in 0..6 {
            assert_eq!(shared(pages).iter().map(|(_, pages)| pages).sum::<u64>(), pages);
        }
        assert_eq!(places.most(), Some(15));
    }
}
