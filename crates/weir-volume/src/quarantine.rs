//! Slots that nobody may use yet, because a write of a daemon that has died may still land in them.
//!
//! Such a write went to a slot that was claimed and not yet published: its record is in use and the
//! map does not name it. To use the slot at once would be to let the device choose which of two
//! writes comes last. Slots that the map names, and free ones, are in no danger: a write is
//! published, and its slot freed again, only after it has ended.
//!
//! Quarantined slots look used until their store says that the dead daemon's I/O is over. Of one
//! daemon there are at most as many as operations that can be under way, which is part of what
//! [`Config::slack`](crate::Config::slack) sets aside. Where daemon after daemon dies over a disk
//! that hangs, each has less under way there: what is in quarantine and what it adds stay within
//! that part.

use crate::lane::HINTS;
use crate::{Tier, Volume};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use weir_core::Slot;
use weir_store::Survive;

/// One store's.
#[derive(Debug, Default)]
pub(crate) struct Quarantine {
    /// How many, so that whoever looks pays for nothing where there are none.
    count: AtomicU32,
    slots: Mutex<Vec<Slot>>,
}

impl Quarantine {
    /// Puts these slots aside. Nobody else may be using the volume.
    pub fn fill(&mut self, slots: Vec<Slot>) {
        *self.count.get_mut() = slots.len() as u32;
        self.slots = Mutex::new(slots);
    }
}

impl Tier {
    /// Whether any slot is in quarantine. Once there is none there never will be.
    pub(crate) fn is_quarantined(&self) -> bool {
        self.quarantine.count.load(Ordering::Relaxed) > 0
    }

    /// Whether nothing that a daemon before began can still change a slot. Of a store that does not
    /// say nobody knows.
    pub(crate) fn is_quiet(&self) -> bool {
        self.store.survive().is_some_and(Survive::is_quiet)
    }

    /// Frees the slots in quarantine, if their time is over. Waits for nobody: one caller is
    /// enough.
    fn end_quarantine(&self) {
        if !self.is_quarantined() || !self.is_quiet() {
            return;
        }
        if let Ok(mut slots) = self.quarantine.slots.try_lock() {
            // Frees no memory: this may be an I/O thread.
            slots.drain(..).for_each(|slot| self.records.free_slot(slot, 0));
            self.quarantine.count.store(0, Ordering::Relaxed);
        }
    }
}

impl Volume {
    /// Frees what a daemon before had under way when it died, where that can no longer change
    /// anything.
    pub(crate) fn end_quarantines(&self) {
        self.tiers.iter().for_each(Tier::end_quarantine);
    }

    /// How many writes a lane may have under way at stores with slots in quarantine. Should this
    /// daemon die too, they are added to those. One at least, so that pages go out while the disk
    /// does something, until half of what lanes need besides is used up.
    #[cold]
    pub(crate) fn share_in_quarantine(&self) -> u32 {
        let held: u32 = self.tiers.iter().map(|tier| tier.quarantine.count.load(Ordering::Relaxed)).sum();
        share(held, self.config.lanes as u32, self.config.depth as u32)
    }
}

fn share(held: u32, lanes: u32, depth: u32) -> u32 {
    let each = (lanes * depth).saturating_sub(held) / lanes;
    let most = lanes * (depth + HINTS as u32 / 2);
    each.max(u32::from(held + lanes <= most))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::share;
    use crate::{Config, lane::HINTS};

    #[test]
    fn however_many_daemons_die_the_lanes_of_the_next_find_the_slots_that_they_need() {
        for (lanes, depth) in [(1, 1), (2, 16), (17, 256), (64, 300)] {
            let config = Config { pages: 1, lanes, depth };
            let (lanes, depth) = (lanes as u32, depth as u32);
            let (mut held, mut deaths) = (0, 0);
            while share(held, lanes, depth) > 0 {
                held += lanes * share(held, lanes, depth);
                deaths += 1;
                assert!(held + lanes * HINTS as u32 / 2 <= config.slack(), "{held} after {deaths} deaths");
            }
            assert!(deaths > 30, "a daemon may write after {deaths} deaths");
        }
    }
}
