//! Promotion: moves pages to faster stores once these have room again. It moves a few at a time,
//! while the volume is idle.

use super::pace::{REST, drive, is_in_use};
use super::workers::Workers;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};
use weir_queue::{Item, Work, has_item};
use weir_volume::Task;

/// Time for which one run of the job moves pages before it lets other jobs run.
const TURN: Duration = Duration::from_millis(5);

/// The job that schedules itself until no page is left to promote.
#[derive(Debug)]
pub struct Promotion {
    item: Item<Promotion>,
    workers: Weak<Workers>,
    at: Mutex<Progress>,
}

/// The progress of the promotion.
#[derive(Debug)]
struct Progress {
    /// The store whose pages are promoted now; 0: there is nothing to do.
    store: usize,
    slot: u32,
    operations: u64,
    looked: Instant,
}

has_item!(Promotion, item);

impl Work for Promotion {
    type Pointer = Arc<Promotion>;

    fn run(this: Arc<Promotion>) {
        let Some(workers) = this.workers.upgrade() else { return };
        if this.turn(&workers) && !workers.is_stopping() {
            workers.queue().schedule(&this);
        }
    }
}

impl Promotion {
    pub fn new(workers: Weak<Workers>, now: Instant) -> Arc<Self> {
        let at = Progress { store: 0, slot: 0, operations: 0, looked: now };
        Arc::new(Promotion { item: Item::new(), workers, at: Mutex::new(at) })
    }

    /// Begins to promote pages, because a faster store may have room again. The pages of the second
    /// store come first.
    pub fn begin(self: &Arc<Self>, workers: &Workers) {
        let mut at = self.at.lock().unwrap_or_else(PoisonError::into_inner);
        *at = Progress {
            store: 1,
            slot: 0,
            operations: workers.pool().operations(),
            looked: workers.clock().now(),
        };
        drop(at);
        workers.queue().schedule(self);
    }

    /// Drops the rest of the promotion, because the daemon gives memory back.
    pub fn end(&self) {
        self.at.lock().unwrap_or_else(PoisonError::into_inner).store = 0;
    }

    /// Moves pages for [`TURN`]; returns whether there are more to move.
    fn turn(&self, workers: &Workers) -> bool {
        let mut at = self.at.lock().unwrap_or_else(PoisonError::into_inner);
        if at.store == 0 || at.store >= workers.pool().stores().count() {
            return false;
        }
        let operations = workers.pool().operations();
        let now = workers.clock().now();
        let in_use = is_in_use(operations.wrapping_sub(at.operations), now - at.looked);
        (at.operations, at.looked) = (operations, now);
        if in_use {
            drop(at);
            workers.clock().sleep(REST);
            return true;
        }
        let mut mover = workers.mover(0);
        let Progress { store, slot, looked, .. } = &mut *at;
        while workers.clock().now() - *looked < TURN && !workers.is_stopping() {
            let moved =
                drive(&mut mover, workers.clock(), Task::MoveUp { from: *store, next: *slot }, |_| true);
            *slot = mover.next();
            match moved {
                Ok(moved) if moved.more => {}
                // No page of this store is left to promote, or no faster store has room. Go on with
                // the pages of the next store.
                Ok(_) => {
                    (*store, *slot) = (*store + 1, 0);
                    break;
                }
                // A page that cannot be read stays in its slot, and its next reader gets the error.
                Err(_) => {}
            }
        }
        true
    }
}
