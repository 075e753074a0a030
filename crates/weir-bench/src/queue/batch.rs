//! The `nv_kthread_q` of pull request 1050. A producer that raises the number of pending items from
//! 0 wakes the worker, which then takes all items of the list together. A condition variable stands
//! for the kernel's wait queue.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use super::QueueError;
use super::design::{Design, Port};
use super::list::{Item, List};

pub(super) const NAME: &str = "batch";

#[derive(Default)]
struct Shared {
    list: List,
    pending: AtomicUsize,
    /// The mutex of the condition variable on which the worker sleeps. It guards nothing else.
    lock: Mutex<()>,
    wait_queue: Condvar,
    stop: AtomicBool,
}

impl Shared {
    fn wake(&self) {
        // Take the lock before the wake-up, as a wait queue does. The worker holds the lock from
        // its last check until it sleeps, so it cannot miss the wake-up.
        drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.wait_queue.notify_one();
    }

    fn work(&self) {
        loop {
            if self.pending.load(Acquire) == 0 {
                let mut held = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
                while self.pending.load(Acquire) == 0 {
                    if self.stop.load(Acquire) {
                        return;
                    }
                    held = self.wait_queue.wait(held).unwrap_or_else(PoisonError::into_inner);
                }
            }
            let mut ran = 0;
            for item in self.list.splice() {
                item.run();
                ran += 1;
            }
            self.pending.fetch_sub(ran, AcqRel);
        }
    }
}

/// The batching queue of pull request 1050, with its worker thread.
pub(super) struct BatchQueue {
    shared: Arc<Shared>,
    worker: JoinHandle<()>,
}

pub(super) struct BatchPort {
    shared: Arc<Shared>,
    items: &'static [Item],
}

impl Design for BatchQueue {
    type Job = Item;
    type Port = BatchPort;

    fn job() -> Item {
        Item::new()
    }

    fn start() -> Result<Self, QueueError> {
        let shared = Arc::new(Shared::default());
        let own = Arc::clone(&shared);
        Ok(BatchQueue { shared, worker: thread::spawn(move || own.work()) })
    }

    fn port(&self, items: &'static [Item]) -> BatchPort {
        BatchPort { shared: Arc::clone(&self.shared), items }
    }

    fn finish(self) -> Option<f64> {
        self.shared.stop.store(true, Release);
        self.shared.wake();
        self.worker.join().expect("the worker of the batch design does not panic");
        None
    }
}

impl Port for BatchPort {
    fn schedule(&mut self, index: usize, stamp: u64) {
        let item = &self.items[index];
        item.stamp(stamp);
        if self.shared.list.push(item) && self.shared.pending.fetch_add(1, AcqRel) == 0 {
            self.shared.wake();
        }
    }
}
