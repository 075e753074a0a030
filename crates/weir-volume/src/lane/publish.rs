//! Writes a page's new content into its new slot, and publishes the slot in the map.

use super::Lane;
use super::count::count;
use crate::Pool;
use crate::entry::{Entry, Place};
use crate::records::Occupant;
use crate::status::LaneMetrics;
use crate::sync::others_may_run_within_a_publication;
use weir_core::{Checksum, PageBytes, PageNo, Slot, uniform_value};
use weir_store::{Fault, Progress};

/// Largest number of times that a write waits for a poll because other lanes go on writing its
/// page. Meanwhile the lane's owner can notice that the write's client has gone. The write that has
/// waited so often takes effect without another look: if its client leaves right then, it may
/// replace a newer one. So the number is as large as its counter allows.
const LOOKS_MAX: u8 = u8::MAX;

pub(super) enum Written {
    Published,
    /// Another lane wrote the page since the entry was read.
    Overtaken,
    Queued,
    Full,
    Failed(Fault),
}

impl Lane {
    /// Writes `bytes` to `page` with this generation. If the store finishes at once, publishes the
    /// page under `condition`, as [`publish`](Lane::publish) says. Returns the outcome, and the
    /// page's new entry if a slot was found.
    pub(super) fn write_from(
        &mut self,
        op: u32,
        page: PageNo,
        bytes: &PageBytes,
        generation: u32,
        condition: Option<Entry>,
    ) -> (Written, Entry) {
        if let Some(value) = uniform_value(bytes) {
            let entry = Entry::new(Place::Fill(value), generation);
            return (self.take_effect(op, page, entry, condition), entry);
        }
        let Some((store, slot)) = self.claim(page) else {
            // If this lane has operations under way, they may hold slots, so the caller must poll
            // them first. Otherwise other lanes may hold slots, and the write waits for one.
            let full = if self.holds_slots() || self.waits_for_slot() {
                Written::Full
            } else {
                Written::Failed(self.no_slot())
            };
            return (full, Entry::default());
        };
        // Prefetch the slot that the next write most likely uses. Writing to memory that is not in
        // the CPU's cache takes longer than the rest of a write.
        if let Some(next) = self.stores[store].hints.first() {
            self.stores[store].lane.prepare(next);
        }
        let entry = Entry::new(Place::Stored { store, slot }, generation);
        let checksum = Checksum::of(bytes, page, generation);
        // The record is complete before the content is in the slot. That is safe, because no lane
        // reads the slot until the map names it.
        self.pool.tiers[store].records.fill_in(slot, Occupant { page, checksum });
        let outcome = match self.stores[store].lane.write(op, slot, bytes) {
            Progress::Done(Ok(())) => {
                let written = self.take_effect(op, page, entry, condition);
                if let Written::Overtaken = written {
                    self.unclaim(entry);
                }
                written
            }
            Progress::Done(Err(fault)) => {
                self.unclaim(entry);
                Written::Failed(fault)
            }
            Progress::Full => {
                self.unclaim(entry);
                Written::Full
            }
            Progress::Queued => {
                self.under_way += 1;
                Written::Queued
            }
        };
        (outcome, entry)
    }

    /// Publishes a write that needs no store any more, or keeps it for the next poll if writes are
    /// [held](Lane::hold). A page that moves has no client, so it is not held.
    fn take_effect(&mut self, op: u32, page: PageNo, entry: Entry, condition: Option<Entry>) -> Written {
        if self.holds && condition.is_none() && self.ops[op as usize].looks < LOOKS_MAX {
            self.finished.push((op, Ok(())));
            return Written::Queued;
        }
        if self.publish(page, entry, condition) { Written::Published } else { Written::Overtaken }
    }

    /// Makes `entry` the page's entry, and frees the slot of the old entry. Without `condition`, it
    /// succeeds only if no lane has written the page since `entry` got its generation. With
    /// `condition`, for a page that moves, it succeeds only if the page's entry equals it. Returns
    /// `false` if nothing was changed.
    ///
    /// Every write of a page increases its generation by one, also when several lanes write it at
    /// once. A move keeps the generation. So if an entry is the same at two reads, it names the
    /// same content, unless 2^26 writes came between.
    pub(super) fn publish(&mut self, page: PageNo, entry: Entry, condition: Option<Entry>) -> bool {
        let map = &self.pool.map;
        let is_pack = match entry.place() {
            Place::Stored { store, slot } if self.packing.is_some() => {
                self.pool.tiers[store].records.is_pack(slot)
            }
            _ => false,
        };
        let old = match condition {
            Some(was) if self.pool.replace(page, was, entry) => was,
            Some(_) => return false,
            None => loop {
                let was = map.load(page);
                if entry.generation() != was.next_generation() {
                    return false;
                }
                if map.replace(page, was, entry) {
                    break was;
                }
            },
        };
        others_may_run_within_a_publication();
        let metrics = &self.metrics;
        match entry.place() {
            Place::Stored { .. } => {
                count(&metrics.stored);
                if is_pack {
                    count(&metrics.packed);
                }
            }
            Place::Fill(_) => count(&metrics.filled),
            Place::Empty | Place::Lost => {}
        }
        match old.place() {
            Place::Stored { store, slot } => {
                count(&metrics.unstored);
                let retired = self.pool.tiers[store].records.retire(slot, || self.pool.epochs.now());
                if retired.pack {
                    count(&metrics.unpacked);
                    metrics.unpacks.add(u64::from(retired.freed));
                    self.left_pack();
                }
                if retired.freed {
                    self.stores[store].hints.push(slot);
                }
            }
            Place::Fill(_) => count(&metrics.unfilled),
            Place::Empty | Place::Lost => {}
        }
        true
    }

    /// Publishes the page that a slow store has written for `op`. The client may have left this
    /// lane meanwhile, and written the page again by another lane. Then this older write must not
    /// replace the newer one. So if another lane has written the page, the entry gets a new
    /// generation and is returned. The next poll then tries again, at most [`LOOKS_MAX`] times.
    /// Until then the lane's owner can notice that the client has left.
    pub(super) fn publish_slow(&mut self, op: u32, page: PageNo, mut entry: Entry) -> Option<Entry> {
        while !self.publish(page, entry, None) {
            let now = self.pool.map.load(page).next_generation();
            entry = self.pool.renew(page, entry, now);
            if self.ops[op as usize].looks < LOOKS_MAX {
                return Some(entry);
            }
        }
        None
    }

    /// Makes the next poll try again to publish the write of `op`, because another lane has written
    /// its page meanwhile.
    pub(super) fn wait_for_look(&mut self, op: u32) {
        self.ops[op as usize].looks += 1;
        self.overtaken.push(op);
    }

    /// Frees the slot of an entry whose write has failed with `fault`. If that write may still
    /// change the slot, the slot is freed once the write has settled.
    pub(super) fn unclaim_failed(&mut self, entry: Entry, fault: Fault) {
        match (fault, entry.place()) {
            (Fault::Timeout, Place::Stored { .. }) => self.unsettled += 1,
            _ => self.unclaim(entry),
        }
    }

    /// Frees the slot of an entry that was never published. If the slot has a pack, the entry's
    /// page only leaves the pack.
    pub(super) fn unclaim(&self, entry: Entry) {
        if let Place::Stored { store, slot } = entry.place() {
            self.pool.retire_unpublished(store, slot, self.metrics());
        }
    }
}

impl Pool {
    /// Frees a slot that the map never named. If the slot has a pack, only one page leaves it:
    /// other pages of the pack may have been published and read. `metrics` counts a pack whose last
    /// page has left.
    pub(crate) fn retire_unpublished(&self, store: usize, slot: Slot, metrics: &LaneMetrics) {
        let records = &self.tiers[store].records;
        let retired = records.retire(slot, || if records.has_packs() { self.epochs.now() } else { 0 });
        metrics.unpacks.add(u64::from(retired.freed && retired.pack));
    }

    /// Gives `entry`, which is not yet published, the generation `generation`. Renews the checksum
    /// in the slot's record too.
    #[cold]
    pub(super) fn renew(&self, page: PageNo, entry: Entry, generation: u32) -> Entry {
        if let Place::Stored { store, slot } = entry.place() {
            let records = &self.tiers[store].records;
            let written = records.occupant(slot).expect("the slot was claimed for this entry");
            if written.is_pack() {
                return Entry::new(entry.place(), generation);
            }
            let checksum = written.checksum.renewed(page, entry.generation(), generation);
            records.fill_in(slot, Occupant { page, checksum });
        }
        Entry::new(entry.place(), generation)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::{Config, Volume};
    use std::sync::Arc;
    use std::time::Instant;
    use weir_core::{ByteSize, PAGE_SIZE, PageBytes, PageNo};
    use weir_store::{Progress, Sim, SimUrl};

    fn content(seed: u8) -> PageBytes {
        std::array::from_fn(|at| (at as u8).wrapping_mul(seed))
    }

    #[test]
    fn a_page_that_only_moves_overtakes_no_write_and_keeps_its_generation() {
        let config = Config { pages: 8, lanes: 3, depth: 8 };
        let size = ByteSize(u64::from(config.slots()) * PAGE_SIZE as u64);
        let sim = Arc::new(Sim::open(SimUrl { size, delay: 1, ..SimUrl::default() }).expect("memory"));
        let volume = Volume::create(config, vec![sim]).expect("a volume");
        let [mut writer, mut mover, mut reader] = [(); 3].map(|()| volume.lane().expect("a lane"));
        let polls = |lane: &mut crate::Lane| {
            let mut polls = 0;
            while lane.in_flight() > 0 {
                lane.submit();
                lane.poll(Instant::now(), &mut |done| assert_eq!(done.result, Ok(())));
                polls += 1;
            }
            lane.submit();
            polls
        };
        let page = PageNo(5);
        assert_eq!(writer.write(0, page, &content(3)), Progress::Queued);
        assert_eq!(polls(&mut writer), 1);
        let was = volume.map.load(page);
        assert_eq!(writer.write(0, page, &content(7)), Progress::Queued);
        writer.submit();
        assert_eq!(mover.move_page(0, page, was.place()), Progress::Queued);
        polls(&mut mover);
        let moved = volume.map.load(page);
        assert!(moved.place() != was.place() && moved.generation() == was.generation(), "{was:?}, {moved:?}");
        let mut back = [0; PAGE_SIZE];
        assert_eq!(reader.read(0, page, &mut back), Progress::Queued);
        reader.submit();
        reader
            .poll(Instant::now(), &mut |done| back = *done.page.expect("it can be proven where it lies now"));
        assert!(back == content(3));
        assert_eq!(polls(&mut writer), 1, "nobody has written the page since");
        assert_eq!(volume.map.load(page).generation(), was.next_generation());
    }
}
