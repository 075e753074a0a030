//! Many pages in a row, read or written at once.
//!
//! Read one by one, each page's copy waits for memory that is far away, and the checksum then goes
//! over the copy. Here a page is asked for two pages ahead, proven where it lies, which brings it
//! near, and copied from there.
//!
//! Written one by one, each page's publication waits until the page has arrived in memory that is
//! far away. So a group of pages gets all its slots first, then all its content, past the caches,
//! then waits once, and is published.

use super::claim::LONG;
use super::count::Places;
use super::{Lane, fill};
use crate::entry::{Entry, Place};
use crate::records::Occupant;
use weir_core::{Checksum, PageBytes, PageNo, uniform_value};
use weir_device::View;

/// Pages of a group: enough to make the wait cheap, and few beside the slots that a lane remembers
/// having freed.
const GROUP: usize = 16;
/// Fewer pages than this are as well written one by one.
pub(crate) const LEAST: usize = 4;

/// How many pages ahead a page is asked for.
const AHEAD: usize = 2;

impl Lane {
    /// Reads as many pages from `first` on into `out` as lie in memory and can be proven there;
    /// returns how many. The others are for [`read`](Lane::read), which knows how to wait, to queue
    /// and to fail.
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

    /// Writes as many of `pages`, from the first on, as can be written at once, to `first` and
    /// those after it; returns how many. The others are for [`write`](Lane::write), which knows how
    /// to wait, to queue and to fail, and gives them slots side by side where there are such.
    pub fn write_run(&mut self, first: PageNo, pages: &[PageBytes]) -> usize {
        let mut done = 0;
        (self.long, self.barren) = (if pages.len() < LONG { 0 } else { pages.len() as u32 }, false);
        // Compressed pages wait for company in a way of their own.
        if self.packing.as_ref().is_some_and(|packing| packing.compresses()) {
            return 0;
        }
        // Most likely the store that will take them; a wrong guess costs one claim.
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
            // Never waiting for a slot while holding some: others might wait for these.
            let place = match uniform_value(bytes) {
                Some(value) => Some(Place::Fill(value)),
                None => self.claim_now(page).map(|(store, slot)| Place::Stored { store, slot }),
            };
            let Some(place) = place else { break };
            entries[claimed] = Entry::new(place, self.volume.map.load(page).next_generation());
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
                self.volume.tiers[store].records.fill_in(slot, Occupant { page, checksum });
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
