//! The `nv_kthread_q` before pull request 1050: a list under a lock, and a semaphore that is raised
//! for every item.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::thread::{self, JoinHandle};

use super::QueueError;
use super::design::{Design, Port};
use super::list::{Item, List};

pub(super) const NAME: &str = "semaphore";

/// The counting semaphore of glibc. Raising it takes one atomic operation, and also a system call
/// if a thread waits.
struct Semaphore(NonNull<libc::sem_t>);

// SAFETY: threads may share a semaphore.
unsafe impl Send for Semaphore {}
// SAFETY: threads may share a semaphore.
unsafe impl Sync for Semaphore {}

impl Semaphore {
    fn new() -> Self {
        // SAFETY: a sem_t of zeros may be initialised; it stays at its address in the box.
        let semaphore = unsafe {
            let semaphore = Box::into_raw(Box::new(std::mem::zeroed()));
            libc::sem_init(semaphore, 0, 0);
            NonNull::new_unchecked(semaphore)
        };
        Semaphore(semaphore)
    }

    fn raise(&self) {
        // SAFETY: `new` has initialised the semaphore.
        unsafe { libc::sem_post(self.0.as_ptr()) };
    }

    fn lower(&self) {
        // SAFETY: `new` has initialised the semaphore. A signal may interrupt the wait.
        while unsafe { libc::sem_wait(self.0.as_ptr()) } != 0 {}
    }
}

impl Drop for Semaphore {
    fn drop(&mut self) {
        // SAFETY: no thread waits at the semaphore when its last owner is dropped, and this value
        // owns the box.
        unsafe {
            libc::sem_destroy(self.0.as_ptr());
            drop(Box::from_raw(self.0.as_ptr()));
        }
    }
}

struct Shared {
    list: List,
    semaphore: Semaphore,
    stop: AtomicBool,
}

impl Shared {
    fn work(&self) {
        loop {
            self.semaphore.lower();
            match self.list.pop() {
                Some(item) => item.run(),
                None if self.stop.load(Acquire) => return,
                None => {}
            }
        }
    }
}

/// The semaphore queue, with its worker thread.
pub(super) struct SemaphoreQueue {
    shared: Arc<Shared>,
    worker: JoinHandle<()>,
}

pub(super) struct SemaphorePort {
    shared: Arc<Shared>,
    items: &'static [Item],
}

impl Design for SemaphoreQueue {
    type Job = Item;
    type Port = SemaphorePort;

    fn job() -> Item {
        Item::new()
    }

    fn start() -> Result<Self, QueueError> {
        let shared =
            Arc::new(Shared { list: List::default(), semaphore: Semaphore::new(), stop: false.into() });
        let own = Arc::clone(&shared);
        Ok(SemaphoreQueue { shared, worker: thread::spawn(move || own.work()) })
    }

    fn port(&self, items: &'static [Item]) -> SemaphorePort {
        SemaphorePort { shared: Arc::clone(&self.shared), items }
    }

    fn finish(self) -> Option<f64> {
        self.shared.stop.store(true, Release);
        self.shared.semaphore.raise();
        self.worker.join().expect("the worker of the semaphore design does not panic");
        None
    }
}

impl Port for SemaphorePort {
    fn schedule(&mut self, index: usize, stamp: u64) {
        let item = &self.items[index];
        item.stamp(stamp);
        if self.shared.list.push(item) {
            self.shared.semaphore.raise();
        }
    }
}
