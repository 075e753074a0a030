//! Slots that nobody may use yet, because a write of a daemon that has died may still land in them.
//!
//! Such a write went to a slot that was claimed and not yet published: its record is in use and the map does not name it. To
//! use the slot at once would be to let the device choose which of two writes comes last. Slots that the map names,
//! and free ones, are in no danger: a write is published, and its slot freed again, only after it has ended.
//!
//! Quarantined slots look used until their store says that the dead daemon's I/O is over. There are at most as many as operations that
//! can be under way, which is part of what [`Config::slack`](crate::Config::slack) sets aside.

use crate::{Tier, Volume};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use weir_core::Slot;

/// One store's.
#[derive(Debug, Default)]
pub(crate) struct Quarantine {
    /// So that whoever looks pays for nothing where there are none.
    any: AtomicBool,
    slots: Mutex<Vec<Slot>>,
}

impl Quarantine {
    /// Puts these slots aside. Nobody else may be using the volume.
    pub fn fill(&mut self, slots: Vec<Slot>) {
        *self.any.get_mut() = !slots.is_empty();
        self.slots = Mutex::new(slots);
    }
}

impl Tier {
    /// Whether any slot is in quarantine. Once there is none there never will be.
    pub(crate) fn is_quarantined(&self) -> bool {
        self.quarantine.any.load(Ordering::Relaxed)
    }

    /// Frees the slots in quarantine, if their time is over. Waits for nobody: one caller is enough.
    fn end_quarantine(&self) {
        if !self.is_quarantined() || !self.store.is_quiet() {
            return;
        }
        if let Ok(mut slots) = self.quarantine.slots.try_lock() {
            // Frees no memory: this may be an I/O thread.
            slots.drain(..).for_each(|slot| self.records.free_slot(slot, 0));
            self.quarantine.any.store(false, Ordering::Relaxed);
        }
    }
}

impl Volume {
    /// Frees what a daemon before had under way when it died, where that can no longer change anything.
    pub(crate) fn end_quarantines(&self) {
        self.tiers.iter().for_each(Tier::end_quarantine);
    }
}
