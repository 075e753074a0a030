//! The seats of lanes, and the slack that they share.
//!
//! A lane's writes under way take slots of the slack, which the pool has promised to no volume. A
//! lane takes its part of the slack when it is opened, and gives it back when its last operation
//! has settled. So no write finds the slack spent, and the size of the pool does not depend on the
//! number of lanes that are open.

use crate::blocks::{Blocks, Item};
use crate::closing::Closing;
use crate::status::LaneMetrics;
use crate::sync::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// A lane's seat: whether it is taken, its counters, and the operations that a dropped lane left.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct LaneSeat {
    taken: AtomicBool,
    /// The counts of all lanes that had this seat, one after another.
    metrics: OnceLock<Arc<LaneMetrics>>,
    pub closing: Mutex<Option<Closing>>,
}

/// All seats of a pool.
pub(crate) struct Seats {
    all: Blocks<LaneSeat>,
    /// Number of slots of the slack that no lane and no lender has taken.
    slack: AtomicU32,
}

impl Seats {
    pub fn new(slack: u32) -> Self {
        Seats { all: Blocks::new(), slack: AtomicU32::new(slack) }
    }

    /// Takes `slots` slots of the slack. If fewer are left, takes none, and `Err` is the number
    /// that is left.
    pub fn take_slack(&self, slots: u32) -> Result<(), u32> {
        let take = |left: u32| left.checked_sub(slots);
        self.slack.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).map(|_| ())
    }

    pub fn give_slack(&self, slots: u32) {
        self.slack.fetch_add(slots, Ordering::AcqRel);
    }

    /// Takes the first free seat, for a lane that has its part of the slack.
    pub fn take(&self) -> usize {
        // If the seat is taken, the exchange fails. A failed exchange writes nothing to the seat's
        // cache line, which the lane in that seat uses too.
        let free = |seat: &usize| {
            let taken = &self.seat(*seat).taken;
            taken.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        (0..).find(free).expect("seats have no end")
    }

    pub fn release(&self, seat: usize) {
        self.seat(seat).taken.store(false, Ordering::Release);
    }

    pub fn seat(&self, seat: usize) -> Item<LaneSeat> {
        self.all.item(seat)
    }

    pub fn iter(&self) -> impl Iterator<Item = &LaneSeat> {
        self.all.iter()
    }

    /// The counts of each seat that any lane has had.
    pub fn metrics(&self) -> impl Iterator<Item = &LaneMetrics> {
        self.iter().filter_map(|seat| seat.metrics.get().map(|metrics| &**metrics))
    }
}

impl LaneSeat {
    pub fn is_taken(&self) -> bool {
        self.taken.load(Ordering::Acquire)
    }

    /// The counts of a lane in this seat, of a pool with `stores` stores.
    pub fn metrics(&self, stores: usize) -> Arc<LaneMetrics> {
        Arc::clone(self.metrics.get_or_init(|| Arc::new(LaneMetrics::new(stores))))
    }
}

/// Run the models with `RUSTFLAGS="--cfg loom" cargo test -p weir-volume --lib --release loom`.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// Plays a lane that opens, works alone in its seat, and closes. Returns whether it opened.
    fn open(seats: &Seats, here: &[AtomicU32; 2]) -> bool {
        if seats.take_slack(5).is_err() {
            return false;
        }
        let seat = seats.take();
        assert_eq!(here[seat].fetch_add(1, Ordering::Relaxed), 0, "another lane is in the seat");
        here[seat].fetch_sub(1, Ordering::Relaxed);
        seats.release(seat);
        seats.give_slack(5);
        true
    }

    #[test]
    fn loom_no_two_lanes_share_a_seat_or_a_slot_of_the_slack_and_nothing_is_lost() {
        for lanes in [1, 2] {
            loom::model(move || {
                let seats = Arc::new(Seats::new(5 * lanes + 4));
                let here = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
                let other = {
                    let (seats, here) = (Arc::clone(&seats), Arc::clone(&here));
                    thread::spawn(move || open(&seats, &here))
                };
                let opened = [open(&seats, &here), other.join().unwrap()];
                assert!(opened == [true; 2] || lanes == 1 && opened.contains(&true), "{opened:?}");
                assert_eq!(seats.take_slack(5 * lanes + 5), Err(5 * lanes + 4));
                assert!(seats.iter().all(|seat| !seat.is_taken()));
            });
        }
    }
}
