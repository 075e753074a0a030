//! The epochs, which say when a freed slot may be used again: once no lane can be reading the slot
//! any more.
//!
//! Epoch-based reclamation (Fraser, "Practical lock-freedom", 2004), reduced to the needs of a
//! volume: no callbacks. The slot's own record keeps the epoch of its
//! retirement. So any lane may reuse any slot, and no slot waits for a sleeping thread.
//!
//! The pins of lanes that open later come in new blocks ([`Blocks`]).
//!
//! No slot is reused while a lane may read it, for the following reason. A lane that retires a slot
//! first unlinks it from the map. *Then* it reads the global epoch, and notes it in the slot's
//! record as `e`. The slot may be reused when `e < safe`. [`Epochs::safe`] first moves the global
//! epoch past `e`, then looks at every pin. A lane that is pinned at `e` or before at this look
//! holds the slot back. A lane that is not pinned at the look pins later, by a store and a full
//! fence. It reads the map after that, and finds the slot unlinked. The same holds for a lane whose
//! pin did not exist at the look, because a lane makes its pin before its fence.

use crate::blocks::{Blocks, Item};
use crate::sync::{AtomicU64, Ordering, fence};

const UNPINNED: u64 = u64::MAX;

/// A lane's pin, in a cache line of its own. Two pins in one line would slow each other down on
/// every batch.
#[repr(align(128))]
pub(crate) struct Pin(AtomicU64);

impl Default for Pin {
    fn default() -> Self {
        Pin(AtomicU64::new(UNPINNED))
    }
}

impl Pin {
    /// Ends the pin.
    #[inline]
    pub fn end(&self) {
        self.0.store(UNPINNED, Ordering::Release);
    }
}

/// The epochs of one volume's lanes.
pub(crate) struct Epochs {
    global: AtomicU64,
    pins: Blocks<Pin>,
}

impl Epochs {
    pub fn new() -> Self {
        Epochs { global: AtomicU64::new(1), pins: Blocks::new() }
    }

    /// The pin of the lane in this seat.
    pub fn pin_of(&self, seat: usize) -> Item<Pin> {
        self.pins.item(seat)
    }

    /// Pins a lane: from here to the [`end`](Pin::end) of its pin, slots that it finds in the map
    /// are not reused. If the lane is pinned already, slots that it found before may be reused from
    /// here on.
    #[inline]
    pub fn pin(&self, pin: &Pin) -> u64 {
        let now = self.global.load(Ordering::Relaxed);
        // This store is a release, as in `end`: all reads under the former pin happen before it.
        pin.0.store(now, Ordering::Release);
        fence(Ordering::SeqCst);
        now
    }

    /// Returns the present epoch, for a lane that is pinned already. A slot that the lane finds in
    /// the map after this call is retired in this epoch or later. The reason is the one order of
    /// all `SeqCst` operations. There this load comes first, then the unlinking of the slot, and
    /// then the load of the slot's epoch.
    #[inline]
    pub fn look(&self) -> u64 {
        let now = self.global.load(Ordering::SeqCst);
        fence(Ordering::SeqCst);
        now
    }

    /// Moves a pinned lane's pin on to an epoch that [`look`](Epochs::look) returned. The lane's
    /// reads of slots that it found before it called `look` must have ended.
    #[inline]
    pub fn move_on(&self, pin: &Pin, epoch: u64) {
        pin.0.store(epoch, Ordering::Release);
    }

    /// The epoch with which a slot is retired. Read it after a `SeqCst` operation has unlinked the
    /// slot from the map.
    #[inline]
    pub fn now(&self) -> u64 {
        self.global.load(Ordering::SeqCst)
    }

    /// Moves the global epoch on. Returns an epoch: slots that were retired before it may be
    /// reused.
    pub fn safe(&self) -> u64 {
        let now = self.global.fetch_add(1, Ordering::SeqCst) + 1;
        fence(Ordering::SeqCst);
        self.pins.iter().map(|pin| pin.0.load(Ordering::Acquire)).fold(now, u64::min)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_pin_holds_back_what_was_retired_since_and_nothing_older() {
        let epochs = Epochs::new();
        let pin = epochs.pin_of(1);
        let before = epochs.now();
        assert!(before < epochs.safe(), "nobody is pinned");
        epochs.pin(&pin);
        let during = epochs.now();
        assert!(before < epochs.safe(), "retired before the pin");
        assert!(during >= epochs.safe(), "the lane may be looking");
        pin.end();
        assert!(during < epochs.safe());
    }
}

/// Run the models with `RUSTFLAGS="--cfg loom" cargo test -p weir-volume --lib --release loom`.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn loom_a_slot_is_never_reused_while_a_lane_reads_it() {
        loom::model(|| {
            // In the model `map` names slot 1 or 2, and `content` of slot 1 turns to 99 when it is
            // reused.
            let epochs = Arc::new(Epochs::new());
            let map = Arc::new(AtomicU64::new(1));
            let content = Arc::new(AtomicU64::new(11));
            let reader = {
                let (epochs, map, content) = (Arc::clone(&epochs), Arc::clone(&map), Arc::clone(&content));
                thread::spawn(move || {
                    // This thread may make its pin, in a new block, while the other thread looks at
                    // all pins.
                    let pin = epochs.pin_of(1);
                    epochs.pin(&pin);
                    if map.load(Ordering::Acquire) == 1 {
                        assert_eq!(content.load(Ordering::Relaxed), 11, "the slot was reused under a reader");
                    }
                    pin.end();
                })
            };
            map.swap(2, Ordering::SeqCst);
            let retired = epochs.now();
            if retired < epochs.safe() {
                content.store(99, Ordering::Relaxed);
            }
            reader.join().unwrap();
        });
    }

    #[test]
    fn loom_a_pin_that_moves_on_still_holds_back_what_was_found_since_it_looked() {
        // Models a lane that always has a read under way. One read begins before `look` and ends
        // before `move_on`. The other begins after `look` and ends last.
        loom::model(|| {
            let epochs = Arc::new(Epochs::new());
            let map = Arc::new(AtomicU64::new(1));
            let content = Arc::new(AtomicU64::new(11));
            let reader = {
                let (epochs, map, content) = (Arc::clone(&epochs), Arc::clone(&map), Arc::clone(&content));
                thread::spawn(move || {
                    let pin = epochs.pin_of(0);
                    epochs.pin(&pin);
                    let before = map.load(Ordering::Acquire);
                    let epoch = epochs.look();
                    let since = map.load(Ordering::Acquire);
                    if before == 1 {
                        assert_eq!(
                            content.load(Ordering::Relaxed),
                            11,
                            "reused under the read that was under way"
                        );
                    }
                    epochs.move_on(&pin, epoch);
                    if since == 1 {
                        assert_eq!(content.load(Ordering::Relaxed), 11, "reused under the read begun since");
                    }
                    pin.end();
                })
            };
            map.swap(2, Ordering::SeqCst);
            let retired = epochs.now();
            // A writer asks for a safe epoch again and again. In the model it asks twice.
            if retired < epochs.safe() || retired < epochs.safe() {
                content.store(99, Ordering::Relaxed);
            }
            reader.join().unwrap();
        });
    }
}
