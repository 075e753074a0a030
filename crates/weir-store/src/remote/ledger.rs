//! The ledger: for each slot the stamp of its newest write that a node has kept, and a mark for
//! each copy that lacks it.
//!
//! A copy lacks a write if its node was away or has not answered yet, or if the node's process has
//! been replaced since. A mark may be wrong: the node may have the copy nevertheless. But a copy
//! without a mark was certainly written.

use super::url::COPIES_MAX;
use std::sync::atomic::{AtomicU64, Ordering};
use weir_core::Slot;

/// The bit of a slot's word that marks the first copy. The bit below it marks the second.
const FIRST: u64 = 1 << 63;
/// The bits of a slot's word that hold the stamp.
const STAMP: u64 = (1 << (64 - COPIES_MAX)) - 1;

/// The entries of all slots of a store.
pub(super) struct Ledger {
    words: Box<[AtomicU64]>,
    copies: usize,
    /// Number of slots that lack a copy.
    lacking: AtomicU64,
}

/// A slot's stamp and marks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Entry(u64);

impl Entry {
    /// The stamp of the slot's newest write; 0: the slot was never written.
    pub(super) fn stamp(self) -> u64 {
        self.0 & STAMP
    }

    /// Whether the copy may lack the slot's newest write.
    pub(super) fn lacks(self, copy: usize) -> bool {
        self.0 & mark(copy) != 0
    }

    /// Whether some copy may lack the slot's newest write.
    pub(super) fn lacks_any(self) -> bool {
        self.0 & !STAMP != 0
    }
}

fn mark(copy: usize) -> u64 {
    FIRST >> copy
}

impl Ledger {
    /// Makes a ledger for `slots` slots with `copies` copies each. `None` if there is not enough
    /// memory.
    pub(super) fn new(slots: u32, copies: usize) -> Option<Self> {
        let mut words = Vec::new();
        words.try_reserve_exact(slots as usize).ok()?;
        words.resize_with(slots as usize, || AtomicU64::new(0));
        Some(Ledger { words: words.into(), copies, lacking: AtomicU64::new(0) })
    }

    pub(super) fn slots(&self) -> u32 {
        self.words.len() as u32
    }

    pub(super) fn get(&self, slot: Slot) -> Entry {
        Entry(self.words[slot.0 as usize].load(Ordering::Acquire))
    }

    /// Number of slots that lack a copy.
    pub(super) fn lacking(&self) -> u64 {
        self.lacking.load(Ordering::Relaxed)
    }

    /// Notes that a copy's node has kept the write with this stamp.
    pub(super) fn kept(&self, slot: Slot, copy: usize, stamp: u64) {
        let others = (0..self.copies).map(mark).sum::<u64>() & !mark(copy);
        self.change(slot, |old| match stamp.cmp(&Entry(old).stamp()) {
            std::cmp::Ordering::Greater => stamp | others,
            std::cmp::Ordering::Equal => old & !mark(copy),
            std::cmp::Ordering::Less => old,
        });
    }

    /// Notes that a copy's node may have lost the slot. Returns false if that was noted already.
    pub(super) fn lost(&self, slot: Slot, copy: usize) -> bool {
        let old = self.change(slot, |old| if Entry(old).stamp() == 0 { old } else { old | mark(copy) });
        old.stamp() != 0 && !old.lacks(copy)
    }

    /// Changes a slot's word. Returns what it was.
    fn change(&self, slot: Slot, change: impl Fn(u64) -> u64) -> Entry {
        let word = &self.words[slot.0 as usize];
        let changed = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| Some(change(old)));
        let old = changed.expect("the change is never refused");
        match (Entry(old).lacks_any(), Entry(change(old)).lacks_any()) {
            (false, true) => _ = self.lacking.fetch_add(1, Ordering::Relaxed),
            (true, false) => _ = self.lacking.fetch_sub(1, Ordering::Relaxed),
            _ => {}
        }
        Entry(old)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_lacks_a_write_until_its_node_has_kept_it() {
        let ledger = Ledger::new(4, 2).unwrap();
        let state = || {
            let entry = ledger.get(Slot(1));
            (entry.stamp(), entry.lacks(0), entry.lacks(1), ledger.lacking())
        };
        assert!(!ledger.lost(Slot(1), 0));
        assert_eq!(state(), (0, false, false, 0), "nothing was there to lose");
        ledger.kept(Slot(1), 1, 7);
        assert_eq!(state(), (7, true, false, 1));
        ledger.kept(Slot(1), 0, 7);
        assert_eq!(state(), (7, false, false, 0));
        ledger.kept(Slot(1), 0, 9);
        assert_eq!(state(), (9, false, true, 1));
        ledger.kept(Slot(1), 1, 8);
        assert_eq!(state(), (9, false, true, 1), "an older write says nothing of the newest");
        assert!(ledger.lost(Slot(1), 0) && !ledger.lost(Slot(1), 0));
        assert_eq!(state(), (9, true, true, 1));
        ledger.kept(Slot(1), 1, 9);
        assert_eq!(state(), (9, true, false, 1));
    }
}
