//! Work beside the I/O path: give-back, take, promotion of pages, and compaction.
//!
//! One queue takes the jobs, so two jobs never run at once. The threads of a few other queues help
//! it to empty chunks. All threads sleep until there is work. Each has a lane of the volume. The
//! governor queues jobs, to keep memory free for a card's owner.

mod compaction;
mod governor;
mod job;
mod pace;
mod promotion;
mod removal;
mod take;
mod workers;

use crate::control::{Background, Moved, Progress};
use crate::environment::Environment;
use crate::error::Error;
use governor::Governor;
use job::{Job, JobKind};
pub use removal::stopping;
use std::sync::{Arc, Mutex, PoisonError};
use weir_volume::{Pool, Removal, Volume};
use workers::Workers;

/// Largest number of threads that empty chunks. On the measured GPUs two or three fill the bus.
const THREADS_MOST: usize = 4;

/// Number of the pool's lanes that the workers take: one a thread.
pub fn lanes(processors: usize) -> usize {
    (processors / 4).clamp(1, THREADS_MOST)
}

/// The workers of a daemon.
#[derive(Debug)]
pub struct Worker {
    workers: Arc<Workers>,
    governor: Mutex<Option<Governor>>,
}

impl Worker {
    /// Starts the threads, which sleep at first. `gives_back` says for each store whether it gives
    /// its memory back on request.
    ///
    /// # Errors
    /// Fails when the pool has no lane left, or no thread can be started.
    pub fn start(pool: &Arc<Pool>, gives_back: &[bool], environment: &Environment) -> Result<Self, Error> {
        let workers = Workers::start(pool, gives_back, environment)?;
        let governor = Mutex::new(Governor::start(&workers, &environment.log)?);
        Ok(Worker { workers, governor })
    }

    /// Gives back `bytes` of memory; `None`: all memory that can be given back. Calls `tell` while
    /// it works, and returns at the end.
    ///
    /// # Errors
    /// The error is one line: what is missing, and the next step.
    pub fn give_back(&self, bytes: Option<u64>, tell: &mut dyn FnMut(Progress)) -> Result<Moved, Error> {
        Job::new(&self.workers, JobKind::GiveBack, bytes).run_on(&self.workers, tell)
    }

    /// Gives back all memory that no volume needs. If the volumes need all memory, nothing happens,
    /// and that is no error.
    ///
    /// # Errors
    /// Fails as [`give_back`](Worker::give_back) does.
    pub fn give_back_spare(&self, tell: &mut dyn FnMut(Progress)) -> Result<Moved, Error> {
        Job::new(&self.workers, JobKind::Spare, None).run_on(&self.workers, tell)
    }

    /// Takes `bytes` of the memory that was given back; `None`: all of it. Promotes pages
    /// afterwards.
    ///
    /// # Errors
    /// Fails as [`give_back`](Worker::give_back) does.
    pub fn take(&self, bytes: Option<u64>, tell: &mut dyn FnMut(Progress)) -> Result<Moved, Error> {
        Job::new(&self.workers, JobKind::Take, bytes).run_on(&self.workers, tell)
    }

    /// Gives all memory back until the machine has slept. Memory that was given back before on
    /// request stays away after the sleep.
    ///
    /// # Errors
    /// Fails as [`give_back`](Worker::give_back) does.
    pub fn sleep(&self, tell: &mut dyn FnMut(Progress)) -> Result<Moved, Error> {
        Job::new(&self.workers, JobKind::Sleep, None).run_on(&self.workers, tell)
    }

    /// Takes again the memory that was given back before the machine slept, if the cards' owners do
    /// not use it now. The governor takes the rest later.
    ///
    /// # Errors
    /// Fails as [`give_back`](Worker::give_back) does.
    pub fn wake(&self, tell: &mut dyn FnMut(Progress)) -> Result<Moved, Error> {
        Job::new(&self.workers, JobKind::Wake, None).run_on(&self.workers, tell)
    }

    /// Discards the pages that a volume is to lose. Calls `tell` while it works. Returns the volume
    /// with the pages that it keeps, or `None` if it keeps no page.
    ///
    /// # Errors
    /// Fails when the daemon stops meanwhile.
    pub fn discard(
        &self,
        removal: Removal,
        tell: &mut dyn FnMut(Progress),
    ) -> Result<Option<Arc<Volume>>, Error> {
        removal::discard(Arc::clone(&self.workers) as _, removal, tell)
    }

    /// Ends the threads, each after its current batch of pages. Idempotent.
    pub fn stop(&self) {
        self.workers.stop();
        if let Some(governor) = self.governor.lock().unwrap_or_else(PoisonError::into_inner).take() {
            governor.stop();
        }
    }

    /// The workers' counts so far.
    pub fn status(&self) -> Background {
        self.workers.status()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop();
    }
}
