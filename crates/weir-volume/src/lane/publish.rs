//! A page's new content into its new slot, and the slot into the map.

use super::Lane;
use super::count::count;
use crate::Volume;
use crate::entry::{Entry, Place};
use crate::records::Occupant;
use weir_core::{Checksum, PageBytes, PageNo, uniform_value};
use weir_store::{Fault, Progress};

pub(super) enum Written {
    Published,
    /// Somebody else wrote the page since the entry was read.
    Overtaken,
    Queued,
    Full,
    Failed(Fault),
}

impl Lane {
    /// Writes `bytes` as the successor of entry `was`, and publishes it if the store finishes at once. With `only_if_unchanged`
    /// it takes effect only while the page still is as `was` says. Returns the new entry with the outcome; none where no slot was found.
    pub(super) fn write_from(
        &mut self,
        op: u32,
        page: PageNo,
        bytes: &PageBytes,
        was: Entry,
        only_if_unchanged: bool,
    ) -> (Written, Entry) {
        let condition = only_if_unchanged.then_some(was);
        if let Some(value) = uniform_value(bytes) {
            let entry = Entry::new(Place::Fill(value), was.next_generation());
            let published = self.publish(page, entry, condition);
            return (if published { Written::Published } else { Written::Overtaken }, entry);
        }
        let Some((store, slot)) = self.claim(page) else {
            // With operations under way this lane itself may be what holds slots back: they must be polled first. Otherwise others
            // may, and the write waits.
            let full = if self.holds_slots() || self.waits_for_slot() {
                Written::Full
            } else {
                Written::Failed(self.no_slot())
            };
            return (full, Entry::default());
        };
        // The next write will most likely go there, and writing memory that is far away takes longer than all the rest of a
        // write.
        if let Some(next) = self.stores[store].hints.first() {
            self.stores[store].lane.prepare(next);
        }
        let entry = Entry::new(Place::Stored { store, slot }, was.next_generation());
        let checksum = Checksum::of(bytes, page, entry.generation());
        // The record may be complete before the content is: until the map names the slot, nobody looks.
        self.volume.tiers[store].records.fill_in(slot, Occupant { page, checksum });
        let outcome = match self.stores[store].lane.write(op, slot, bytes) {
            Progress::Done(Ok(())) if self.publish(page, entry, condition) => Written::Published,
            Progress::Done(Ok(())) => Written::Overtaken,
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

    /// Makes `entry` the page's, unless `condition` no longer holds; frees what it replaces, or `entry`'s own slot.
    ///
    /// Every write of a page counts its generation on by one, also when several lanes write it at once, so that no entry of a
    /// page ever comes back (before 2^26 writes) and `condition` means what it says.
    pub(super) fn publish(&mut self, page: PageNo, mut entry: Entry, condition: Option<Entry>) -> bool {
        let map = &self.volume.map;
        let old = match condition {
            Some(was) if map.replace(page, was, entry) => was,
            Some(_) => {
                self.unclaim(entry);
                return false;
            }
            None => loop {
                let was = map.load(page);
                if entry.generation() != was.next_generation() {
                    entry = self.volume.renew(page, entry, was.next_generation());
                }
                if map.replace(page, was, entry) {
                    break was;
                }
            },
        };
        let metrics = self.volume.seat(self.seat);
        match entry.place() {
            Place::Stored { .. } => count(&metrics.stored),
            Place::Fill(_) => count(&metrics.filled),
            Place::Empty | Place::Lost => {}
        }
        match old.place() {
            Place::Stored { store, slot } => {
                count(&metrics.unstored);
                let retired = self.volume.tiers[store].records.retire(slot, || self.volume.epochs.now());
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

    /// Frees the slot of an entry whose write its store has ended with `fault`: at once, or where the write may still land, when it has.
    pub(super) fn unclaim_failed(&mut self, entry: Entry, fault: Fault) {
        match (fault, entry.place()) {
            (Fault::Timeout, Place::Stored { .. }) => self.unsettled += 1,
            _ => self.unclaim(entry),
        }
    }

    /// Frees the slot of an entry that was never published.
    pub(super) fn unclaim(&self, entry: Entry) {
        if let Place::Stored { store, slot } = entry.place() {
            self.volume.tiers[store].records.retire(slot, || 0);
        }
    }
}

impl Volume {
    /// `entry`, not yet published, as generation `generation`.
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
