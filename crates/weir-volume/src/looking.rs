//! The pin of a lane: slots that the lane finds in the map must stay unchanged until its reads have
//! ended.
//!
//! A lane may have reads under way all the time, so its pin cannot wait until there are none. Reads
//! are counted in two groups: those of the pin's epoch, and those begun since. When the first group
//! has ended, the pin moves on to the epoch in which the second began. Writes need no pin: no other
//! lane claims the slot that a lane has claimed.

use crate::epoch::{Epochs, Pin};

/// A lane's pin, and the reads that need it.
#[derive(Debug, Default)]
pub(crate) struct Looking {
    /// The epoch of the pin.
    pinned: Option<u64>,
    /// Number of reads under way whose slots were looked up in the pin's epoch.
    older: usize,
    /// The epoch in which the lane looks slots up in the map now: the pin's epoch or a later one.
    now: u64,
    /// Number of reads under way that began after `now` had moved past the pin's epoch. Their slots
    /// were looked up in epoch `now`.
    newer: usize,
}

impl Looking {
    /// Pins the lane that has `pin`: slots that it finds in the map from here on stay unchanged.
    #[inline]
    pub fn enter(&mut self, epochs: &Epochs, pin: &Pin) {
        let global = epochs.now();
        let current = self.pinned.is_some() && self.now == global;
        if current || self.newer > 0 {
            return;
        }
        if self.pinned.is_none() || self.older == 0 {
            self.now = epochs.pin(pin);
            self.pinned = Some(self.now);
        } else {
            self.now = epochs.look();
        }
    }

    #[inline]
    pub fn is_pinned(&self) -> bool {
        self.pinned.is_some()
    }

    /// Counts a read that begins. Returns the epoch that [`end`](Looking::end) must be given.
    #[inline]
    pub fn begin(&mut self) -> u64 {
        debug_assert!(self.pinned.is_some(), "nothing is found without a pin");
        if self.pinned == Some(self.now) {
            self.older += 1;
        } else {
            self.newer += 1;
        }
        self.now
    }

    /// Counts a read that has ended, and whose content was taken. `began` is the epoch that
    /// [`begin`](Looking::begin) returned for it.
    #[inline]
    pub fn end(&mut self, began: u64, epochs: &Epochs, pin: &Pin) {
        if self.pinned == Some(began) {
            self.older -= 1;
        } else {
            self.newer -= 1;
        }
        if self.older == 0 && self.newer > 0 {
            epochs.move_on(pin, self.now);
            self.pinned = Some(self.now);
            self.older = std::mem::take(&mut self.newer);
        }
    }

    /// Ends the pin, unless a read needs it.
    #[inline]
    pub fn leave(&mut self, pin: &Pin) {
        if self.older + self.newer == 0 && self.pinned.take().is_some() {
            pin.end();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn reads_without_end_let_go_of_what_was_retired_before_them() {
        let (epochs, mut looking) = (Epochs::new(), Looking::default());
        let pin = epochs.pin_of(0);
        looking.enter(&epochs, &pin);
        let mut under_way = looking.begin();
        for _ in 0..10 {
            let retired = epochs.now();
            assert!(retired >= epochs.safe(), "the read under way may have found it");
            looking.enter(&epochs, &pin);
            let next = looking.begin();
            assert!(retired >= epochs.safe());
            looking.end(under_way, &epochs, &pin);
            looking.leave(&pin);
            assert!(retired < epochs.safe(), "the next one was begun after it was retired");
            assert!(epochs.now() > epochs.safe(), "and holds back what is retired now");
            under_way = next;
        }
        looking.end(under_way, &epochs, &pin);
        looking.leave(&pin);
        let retired = epochs.now();
        assert!(retired < epochs.safe(), "nobody looks any more");
    }
}
