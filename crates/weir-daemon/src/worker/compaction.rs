//! Compaction: moves the remaining pages of half-empty packs together. It moves a few at a time,
//! and only after lanes have reported that pages left a pack.

use super::pace::{REST, drive, is_in_use};
use super::workers::Workers;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;
use weir_queue::{Item, Work, has_item};
use weir_volume::{GiveBackError, Pool, Sparse, Task};

/// Time for which one run of the job moves pages before it lets other jobs run. With the pauses
/// while the volume is in use, compaction takes a tenth of one processor.
const TURN: Duration = Duration::from_millis(2);

/// The job that schedules itself until no pack is worth compacting any more.
#[derive(Debug)]
pub struct Compaction {
    item: Item<Compaction>,
    workers: Weak<Workers>,
    at: Mutex<Progress>,
}

/// The progress of the compaction.
#[derive(Debug, Default)]
struct Progress {
    sweep: Option<Sweep>,
    /// Whether a pass over a store's slots was begun when `looked` was noted last.
    swept: bool,
    /// The number of pages that had left their packs when the job last looked.
    looked: Option<u64>,
    operations: u64,
}

/// One pass over a store's slots.
#[derive(Clone, Copy, Debug)]
struct Sweep {
    store: usize,
    slot: u32,
    sparse: Sparse,
}

has_item!(Compaction, item);

impl Work for Compaction {
    type Pointer = Arc<Compaction>;

    fn run(this: Arc<Compaction>) {
        let Some(workers) = this.workers.upgrade() else { return };
        if this.turn(&workers) && !workers.is_stopping() {
            workers.queue().schedule(&this);
        }
    }
}

impl Compaction {
    pub fn new(workers: Weak<Workers>) -> Arc<Self> {
        Arc::new(Compaction { item: Item::new(), workers, at: Mutex::default() })
    }

    /// Makes `workers` run the compaction from now on. It runs at once for the packs of an earlier
    /// daemon, and after each report that pages left a pack.
    pub fn begin(self: &Arc<Self>, workers: &Workers) {
        if workers.pool().compression().is_none() {
            return;
        }
        let this = Arc::clone(self);
        workers.pool().when_packs_are_left(Box::new(move || {
            if let Some(workers) = this.workers.upgrade() {
                workers.queue().schedule(&this);
            }
        }));
        workers.queue().schedule(self);
    }

    /// Moves pages for [`TURN`]; returns whether there are more to move.
    fn turn(&self, workers: &Workers) -> bool {
        let mut at = self.at.lock().unwrap_or_else(PoisonError::into_inner);
        let pool = workers.pool();
        let began = workers.clock().now();
        if at.sweep.is_none() {
            if !pool.packs_were_left(&mut at.looked) {
                return false;
            }
            at.sweep = sweep_from(pool, 0);
            at.swept = at.sweep.is_some();
            at.operations = pool.operations();
        }
        let mut mover = workers.mover(0);
        while let Some(Sweep { store, slot, sparse }) = at.sweep {
            // A page that cannot be read stays in its pack, and its readers get the error.
            let task = Task::Compact { store, next: slot, sparse };
            at.sweep = match drive(&mut mover, workers.clock(), task, |_| !workers.is_stopping()) {
                Ok(done) if done.more => Some(Sweep { store, slot: mover.next(), sparse }),
                Err(GiveBackError::Stopped) => return false,
                Ok(_) | Err(_) => sweep_from(pool, store + 1),
            };
            if workers.clock().now() - began >= TURN {
                break;
            }
        }
        drop(mover);
        if at.sweep.is_none() {
            if std::mem::take(&mut at.swept) {
                workers.room_was_made();
            }
            return false;
        }
        let moved = pool.operations().wrapping_sub(at.operations);
        drop(at);
        if is_in_use(moved, workers.clock().now() - began) {
            workers.clock().sleep(REST);
        }
        self.at.lock().unwrap_or_else(PoisonError::into_inner).operations = pool.operations();
        true
    }
}

/// Begins a pass over the slots of a store that wastes too much room in packs: the first such store
/// from number `first` on.
fn sweep_from(pool: &Pool, first: usize) -> Option<Sweep> {
    (first..pool.stores().count())
        .find_map(|store| Some(Sweep { store, slot: 0, sparse: pool.sparse(store)? }))
}
