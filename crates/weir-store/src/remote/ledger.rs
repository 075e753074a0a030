//! The ledger: for each slot the stamp of its newest write that a node has kept, and a mark for
//! each copy that lacks it.
//!
//! A copy lacks a write if its node was away or has not answered yet, or if the node's process has
//! been replaced since. A mark may be wrong: the node may have the copy nevertheless. But a copy
//! without a mark was certainly written.
//!
//! An answer that a copy is missing may come late: meanwhile the slot was written again, or the
//! copy was made anew. So such an answer counts only if the slot's word is still the one that was
//! there when the question was sent. The word has a count of the copies that were made anew. So it
//! also changes if a mark is set and taken away again.

use super::url::COPIES_MAX;
use std::sync::atomic::{AtomicU64, Ordering};
use weir_core::Slot;

/// The bit of a slot's word that marks the first copy. The bit below it marks the second.
const FIRST: u64 = 1 << 63;
/// Number of bits of a slot's word that count copies made anew. The count begins again at 0 after
/// 256 of them. A late answer is seconds old, and a copy is made anew a few times in that.
const TURNS: u32 = 8;
/// The lowest bit of that count, and all of its bits. A slot without a stamp has a count of 1 once
/// a write of it was sent.
const TURN: u64 = STAMP + 1;
const TURN_BITS: u64 = !(MARKS | STAMP);
/// The bits of a slot's word that hold the stamp.
const STAMP: u64 = (1 << (64 - COPIES_MAX as u32 - TURNS)) - 1;
/// The bits of a slot's word that mark copies.
const MARKS: u64 = !(u64::MAX >> COPIES_MAX);

/// The entries of all slots of a store.
pub(super) struct Ledger {
    words: Box<[AtomicU64]>,
    copies: usize,
    /// Number of slots that lack a copy.
    lacking: AtomicU64,
}

/// A slot's stamp, marks, and count of copies made anew.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
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
        self.0 & MARKS != 0
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
            std::cmp::Ordering::Greater => old & TURN_BITS | stamp | others,
            std::cmp::Ordering::Equal if Entry(old).lacks(copy) => {
                let turn = old.wrapping_add(TURN) & TURN_BITS;
                turn | old & !TURN_BITS & !mark(copy)
            }
            std::cmp::Ordering::Equal | std::cmp::Ordering::Less => old,
        });
    }

    /// Notes that a write of the slot is about to be sent. A node may do it and never answer.
    pub(super) fn touch(&self, slot: Slot) {
        let _ = self.change(slot, |old| if old == 0 { TURN } else { old });
    }

    /// Whether a node may have a value of the slot.
    pub(super) fn may_have_value(&self, slot: Slot) -> bool {
        self.get(slot) != Entry::default()
    }

    /// Notes that a copy's node may have lost the slot. Returns false if that was noted already.
    pub(super) fn lost(&self, slot: Slot, copy: usize) -> bool {
        let old = self.change(slot, |old| if Entry(old).stamp() == 0 { old } else { old | mark(copy) });
        old.stamp() != 0 && !old.lacks(copy)
    }

    /// Notes that a copy was missing or wrong when the slot's word was `seen`. Returns false if the
    /// word has changed since, or the mark was there already. Then nothing is noted: the copy may
    /// be there by now.
    pub(super) fn was_lost(&self, slot: Slot, copy: usize, seen: Entry) -> bool {
        let is_same = |old: u64| old == seen.0 && seen.stamp() != 0;
        let old = self.change(slot, |old| if is_same(old) { old | mark(copy) } else { old });
        is_same(old.0) && !old.lacks(copy)
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

    #[test]
    fn an_answer_from_before_a_write_or_a_new_copy_changes_nothing() {
        let ledger = Ledger::new(4, 2).unwrap();
        let write = |stamp| (0..2).for_each(|copy| ledger.kept(Slot(1), copy, stamp));
        write(7);
        let seen = ledger.get(Slot(1));
        assert!(ledger.was_lost(Slot(1), 0, seen) && ledger.get(Slot(1)).lacks(0));
        assert!(!ledger.was_lost(Slot(1), 0, seen), "it is marked already");
        // The copy is made anew.
        ledger.kept(Slot(1), 0, 7);
        assert_eq!(ledger.get(Slot(1)).stamp(), seen.stamp());
        for copy in 0..2 {
            assert!(!ledger.was_lost(Slot(1), copy, seen));
        }
        assert!(!ledger.get(Slot(1)).lacks_any());
        let seen = ledger.get(Slot(1));
        write(9);
        assert!(!ledger.was_lost(Slot(1), 1, seen) && ledger.lacking() == 0);
        assert!(ledger.was_lost(Slot(1), 1, ledger.get(Slot(1))));
        assert!(!ledger.was_lost(Slot(2), 1, ledger.get(Slot(2))), "nothing was there to lose");
        assert_eq!((ledger.get(Slot(1)).stamp(), ledger.lacking()), (9, 1));
        ledger.touch(Slot(3));
        let sent = ledger.get(Slot(3));
        assert!(!ledger.was_lost(Slot(3), 0, sent) && ledger.may_have_value(Slot(3)));
        assert!((sent.stamp(), sent.lacks_any()) == (0, false) && !ledger.may_have_value(Slot(0)));
    }

    #[test]
    fn the_count_of_new_copies_never_reaches_the_stamp_or_the_marks() {
        let ledger = Ledger::new(1, 2).unwrap();
        ledger.kept(Slot(0), 1, STAMP);
        for turn in 1..=600 {
            ledger.kept(Slot(0), 0, STAMP);
            assert!(ledger.lost(Slot(0), 0));
            let entry = ledger.get(Slot(0));
            assert_eq!((entry.stamp(), entry.lacks(0), entry.lacks(1)), (STAMP, true, false), "{turn}");
        }
    }
}
