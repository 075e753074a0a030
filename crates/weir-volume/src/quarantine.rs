//! Slots in quarantine: no lane may use them, because a write of a dead daemon may still change
//! them.
//!
//! A slot is in quarantine if its record is in use and the map does not name the slot: a write of
//! the dead daemon had claimed it, and was not published. If the slot were used at once, the device
//! would decide which of two writes comes last. Slots that the map names, and free slots, are safe:
//! a write is published, and its old slot freed, only after it has ended.
//!
//! A quarantined slot looks used until its store says that the dead daemon's I/O is over. A daemon
//! leaves at most as many such slots as it can have operations under way, and
//! [`Config::slack`](crate::Config::slack) has room for these. Several daemons may die one after
//! another while a disk hangs. Then each may have fewer writes under way at that disk than the one
//! before. So the slots of all of them fit into that room.
//!
//! This room is enough until 32 daemons have died, see [`Config::quarantine`]. After that, pages
//! can still be read. But a write that needs a slot of a store with quarantined slots ends with
//! [`Fault::Timeout`](weir_store::Fault). Once the dead daemons' I/O at that store is over, the
//! next write succeeds again.

use crate::lane::HINTS;
use crate::{Config, Pool, Tier};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use weir_core::Slot;
use weir_store::Survive;

/// The quarantined slots of one store.
#[derive(Debug, Default)]
pub(crate) struct Quarantine {
    /// The number of quarantined slots. While it is 0, nobody needs to take the lock of the slots.
    count: AtomicU32,
    slots: Mutex<Vec<Slot>>,
}

impl Quarantine {
    /// Puts these slots into quarantine. No other thread may be using the pool.
    pub fn fill(&mut self, slots: Vec<Slot>) {
        *self.count.get_mut() = slots.len() as u32;
        self.slots = Mutex::new(slots);
    }
}

impl Tier {
    /// Whether any slot is in quarantine. Once the quarantine is empty, it stays empty.
    pub(crate) fn is_quarantined(&self) -> bool {
        self.quarantine.count.load(Ordering::Relaxed) > 0
    }

    /// Whether no write of an earlier daemon can still change a slot of this store. False if the
    /// store cannot tell.
    pub(crate) fn is_quiet(&self) -> bool {
        self.store.survive().is_some_and(Survive::is_quiet)
    }

    /// Frees the slots in quarantine, if the dead daemon's I/O is over. If another thread has the
    /// lock, that thread frees them.
    fn end_quarantine(&self) {
        if !self.is_quarantined() || !self.is_quiet() {
            return;
        }
        if let Ok(mut slots) = self.quarantine.slots.try_lock() {
            // Frees no memory, because an I/O thread may run this.
            slots.drain(..).for_each(|slot| self.records.free_slot(slot, 0));
            self.quarantine.count.store(0, Ordering::Relaxed);
        }
    }
}

impl Config {
    /// Largest number of slots in quarantine with which every lane may still write a page. The
    /// first daemon that dies leaves at most [`depth`](Config::depth) slots for each lane. Each
    /// later daemon that dies adds one slot for each lane. So the quarantine of one store has more
    /// slots only after 32 daemons have died without an answer from the store. Where several stores
    /// owe an answer, each of them adds at most `depth` slots for each lane to that, once.
    pub fn quarantine(&self) -> u32 {
        (self.lanes as u32).saturating_mul((self.depth + HINTS / 2 - 1) as u32)
    }
}

impl Pool {
    /// Number of slots in quarantine, in all stores together.
    pub fn quarantined(&self) -> u32 {
        self.tiers.iter().map(|tier| tier.quarantine.count.load(Ordering::Relaxed)).sum()
    }

    /// Frees the slots of writes that an earlier daemon had under way when it died, once those
    /// writes can no longer change anything.
    pub(crate) fn end_quarantines(&self) {
        self.tiers.iter().for_each(Tier::end_quarantine);
    }

    /// Number of writes that a lane may have under way at stores with slots in quarantine. If this
    /// daemon dies too, its writes add to the quarantine, so the number falls as the quarantine
    /// grows. Lanes have [`HINTS`] spare slots each. While half of all spare slots are not in
    /// quarantine, the number is at least 1. So lanes can still write pages while a disk has not
    /// ended the dead daemon's writes.
    #[cold]
    pub(crate) fn share_in_quarantine(&self) -> u32 {
        share(self.quarantined(), &self.config)
    }
}

fn share(held: u32, config: &Config) -> u32 {
    let (lanes, depth) = (config.lanes as u32, config.depth as u32);
    let each = (lanes * depth).saturating_sub(held) / lanes;
    each.max(u32::from(held <= config.quarantine()))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::share;
    use crate::{Config, lane::HINTS};

    #[test]
    fn however_many_daemons_die_the_lanes_of_the_next_find_the_slots_that_they_need() {
        for (lanes, depth) in [(1, 1), (2, 16), (17, 256), (64, 300)] {
            let config = Config { pages: 1, lanes, depth };
            let lanes = lanes as u32;
            let (mut held, mut deaths) = (0, 0);
            while share(held, &config) > 0 {
                held += lanes * share(held, &config);
                deaths += 1;
                assert!(held + lanes * HINTS as u32 / 2 <= config.slack(), "{held} after {deaths} deaths");
            }
            assert_eq!(deaths, 33, "each of 32 daemons that die leaves the next one room for writes");
        }
    }
}
