//! Work beside the I/O path: memory given back to its owner, taken again, pages brought back up,
//! and shared slots filled again.
//!
//! One queue takes the jobs, so they never run side by side; the threads of a few others help it to
//! empty chunks. All of them sleep until there is something to do. Each has a lane of the volume.
//! The governor asks them to keep a card's owner well served.

mod compaction;
mod governor;
mod job;
mod pace;
mod promotion;
mod workers;

use crate::control::{Background, Moved, Progress};
use crate::keeper;
use governor::Governor;
use job::{Job, Wish};
use std::sync::{Arc, Mutex, PoisonError};
use weir_cli::failure::Failure;
use weir_core::log::Log;
use weir_volume::Volume;
use workers::Workers;

/// Threads that empty chunks, at most: on the GPUs measured two or three fill the bus.
const THREADS_MOST: usize = 4;

/// Lanes of the volume that the worker takes: one a thread.
pub fn lanes() -> usize {
    (keeper::processors() / 4).clamp(1, THREADS_MOST)
}

/// The worker of a daemon.
#[derive(Debug)]
pub struct Worker {
    workers: Arc<Workers>,
    governor: Mutex<Option<Governor>>,
}

impl Worker {
    /// Starts the threads; they sleep. `lends` says of each store whether it gives its memory back
    /// when asked.
    ///
    /// # Errors
    /// When there is no lane or no thread for them.
    pub fn start(volume: &Arc<Volume>, lends: &[bool], log: &Log) -> Result<Self, Failure> {
        let workers = Workers::start(volume, lends)?;
        let governor = Mutex::new(Governor::start(&workers, log)?);
        Ok(Worker { workers, governor })
    }

    /// Gives `bytes` back to their owner, or with `None` all that can be. Returns when it is done;
    /// `tell` is called meanwhile.
    ///
    /// # Errors
    /// One line: what is missing, and the next step.
    pub fn give_back(&self, bytes: Option<u64>, tell: &mut dyn FnMut(Progress)) -> Result<Moved, String> {
        Job::new(&self.workers, Wish::GiveBack, bytes).run_on(&self.workers, tell)
    }

    /// Takes `bytes` of what was given back again, or with `None` all of it, and brings pages back
    /// up afterwards.
    ///
    /// # Errors
    /// As [`give_back`](Worker::give_back).
    pub fn take(&self, bytes: Option<u64>, tell: &mut dyn FnMut(Progress)) -> Result<Moved, String> {
        Job::new(&self.workers, Wish::Take, bytes).run_on(&self.workers, tell)
    }

    /// Gives everything back until the machine has slept. What somebody gave back before stays
    /// theirs.
    ///
    /// # Errors
    /// As [`give_back`](Worker::give_back).
    pub fn sleep(&self, tell: &mut dyn FnMut(Progress)) -> Result<Moved, String> {
        Job::new(&self.workers, Wish::Sleep, None).run_on(&self.workers, tell)
    }

    /// Takes again what went for a sleep, as far as the cards' owners leave it; the rest is the
    /// governor's.
    ///
    /// # Errors
    /// As [`give_back`](Worker::give_back).
    pub fn wake(&self, tell: &mut dyn FnMut(Progress)) -> Result<Moved, String> {
        Job::new(&self.workers, Wish::Wake, None).run_on(&self.workers, tell)
    }

    /// Ends its threads, after the batch of pages that each is at. Idempotent.
    pub fn stop(&self) {
        self.workers.stop();
        if let Some(governor) = self.governor.lock().unwrap_or_else(PoisonError::into_inner).take() {
            governor.stop();
        }
    }

    /// Its counts so far.
    pub fn status(&self) -> Background {
        self.workers.status()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop();
    }
}
