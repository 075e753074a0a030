//! Many pages in a row in host memory, read or written at once.
//!
//! If pages are read one by one, each page's copy waits for memory that is not in the cache, and
//! then the checksum goes over the copy. Here a page is prefetched two pages ahead. It is verified
//! where it lies, which brings it into the cache, and copied from there.
//!
//! If pages are written one by one, each publication waits until its page has arrived in memory. So
//! a group of pages first gets all its slots, then all its content, past the caches. Then the lane
//! waits once, and publishes them all.

use super::claim::LONG;
use super::count::Places;
use super::{Lane, fill};
use crate::entry::{Entry, Place};
use crate::records::Occupant;
use weir_core::{Checksum, PageBytes, PageNo, uniform_value};
use weir_device::View;

/// Number of pages that are written as one group. The group waits once for all of its pages, which
/// costs little for each. A lane remembers many more freed slots than a group has pages, so it
/// usually has a slot for each page.
const GROUP: usize = 16;
/// Least number of pages in a row for which a run pays. Fewer pages are read or written one by one
/// just as fast.
pub(crate) const LEAST: usize = 4;

/// Distance, in pages, from the page that is handled now to the page that is prefetched meanwhile.
const AHEAD: usize = 2;

impl Lane {
    /// Reads pages from `first` on into `out`, as many as lie in host memory and can be verified
    /// there; returns how many. Read the others by [`read`](Lane::read), which can wait, queue and
    /// fail.
    pub fn read_run(&mut self, first: PageNo, out: &mut [PageBytes]) -> usize {
        let guard = self.pin();
        let mut done = 0;
        for at in 0..out.len() {
            if at + AHEAD < out.len() {
                guard.prefetch(PageNo(first.0 + (at + AHEAD) as u32));
            }
            match guard.view(PageNo(first.0 + at as u32)) {
                View::Bytes(bytes) => out[at].copy_from_slice(bytes),
                View::Fill(value) => fill(&mut out[at], value),
                View::Elsewhere | View::Fault(_) => break,
            }
            done += 1;
        }
        guard.count_reads(done as u64, 0);
        done
    }

    /// Writes `pages` to page `first` and the pages after it, as far as that is done at once.
    /// Returns the number of pages written, from the first on. Write the others by
    /// [`write`](Lane::write), which can wait, queue and fail. After this call, `write` gives them
    /// neighbouring slots if there are any.
    pub fn write_run(&mut self, first: PageNo, pages: &[PageBytes]) -> usize {
        let first = self.run_at(first, pages.len());
        let mut done = 0;
        (self.long, self.barren) = (if pages.len() < LONG { 0 } else { pages.len() as u32 }, false);
        if self.holds {
            return 0;
        }
        // A compressed page must wait in a pack for other pages, and only `write` lets a page wait.
        if self.packing.as_ref().is_some_and(|packing| packing.compresses()) {
            return 0;
        }
        // The store of the last claim most likely takes these pages too. If it does not, one claim
        // was in vain.
        if !self.stores[self.taker].lane.writes_past_caches() {
            return 0;
        }
        while pages.len() - done >= LEAST {
            let group = &pages[done..pages.len().min(done + GROUP)];
            let written = self.write_group(PageNo(first.0 + done as u32), group);
            done += written;
            if written < group.len() {
                break;
            }
        }
        done
    }

    fn write_group(&mut self, first: PageNo, pages: &[PageBytes]) -> usize {
        self.enter();
        let started = self.sample();
        let numbered = || pages.iter().zip((first.0..).map(PageNo));
        let mut entries = [Entry::default(); GROUP];
        let mut claimed = 0;
        for (bytes, page) in numbered() {
            // Never wait for a slot while holding other slots: another lane might wait for those.
            let place = match uniform_value(bytes) {
                Some(value) => Some(Place::Fill(value)),
                None => self.claim_now(page).map(|(store, slot)| Place::Stored { store, slot }),
            };
            let Some(place) = place else { break };
            entries[claimed] = Entry::new(place, self.pool.map.load(page).next_generation());
            claimed += 1;
            if let Place::Stored { store, .. } = place
                && !self.stores[store].lane.writes_past_caches()
            {
                break;
            }
        }
        let mut written = 0;
        for (entry, (bytes, page)) in entries[..claimed].iter().zip(numbered()) {
            if let Place::Stored { store, slot } = entry.place() {
                if self.stores[store].lane.write_past_caches(slot, bytes).is_err() {
                    break;
                }
                let checksum = Checksum::of(bytes, page, entry.generation());
                self.pool.tiers[store].records.fill_in(slot, Occupant { page, checksum });
            }
            written += 1;
        }
        for store in &mut self.stores {
            store.lane.settle();
        }
        let overtaken =
            (0..written).find(|at| !self.publish(PageNo(first.0 + *at as u32), entries[*at], None));
        let written = overtaken.unwrap_or(written);
        for entry in &entries[written..claimed] {
            self.unclaim(*entry);
        }
        let places = Places::default();
        entries[..written].iter().for_each(|entry| places.add(entry.place()));
        self.metrics().writes_ended(written as u64, &places, started);
        written
    }
}
