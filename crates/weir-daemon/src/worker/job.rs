//! Jobs of the workers: one at a time, each with its progress and its outcome.

use super::workers::{Card, Workers};
use crate::control::{Moved, Progress};
use crate::error::{Error, ErrorKind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;
use weir_queue::{Item, Work, has_item};

/// Time between two reports of a job's progress to its client.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// The kind of a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum JobKind {
    GiveBack,
    /// Give back the memory that no volume needs, and no more.
    Spare,
    Take,
    /// Give all memory back until the machine has slept.
    Sleep,
    /// Take again the memory that was given back before the machine slept, and no more.
    Wake,
}

/// A job that waits or runs.
#[derive(Debug)]
pub struct Job {
    item: Item<Job>,
    workers: Arc<Workers>,
    pub kind: JobKind,
    /// Bytes to give back or to take; `None`: all.
    pub bytes: Option<u64>,
    /// The card whose memory the job moves, if the governor asked for the job. Such a job may move
    /// less than requested.
    pub only: Option<Card>,
    pub reach: Reach,
    outcome: Mutex<Option<Result<Moved, Error>>>,
    ended: Condvar,
}

/// The progress of a job.
#[derive(Debug, Default)]
pub struct Reach {
    pub total_bytes: AtomicU64,
    pub bytes: AtomicU64,
    pub pages: AtomicU64,
}

has_item!(Job, item);

impl Work for Job {
    type Pointer = Arc<Job>;

    fn run(this: Arc<Job>) {
        let ending = Ending(Some(&this));
        match this.workers.run(&this) {
            Some(outcome) => ending.with(outcome),
            // Jobs that were queued meanwhile run first.
            None if this.workers.queue().schedule(&this) => ending.later(),
            None => ending.with(Err(stopping())),
        }
    }
}

/// The error for memory that was not given back or taken.
pub fn unmoved(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::Memory, what)
}

/// The error for a job that the daemon's end has interrupted.
pub fn stopping() -> Error {
    unmoved("the daemon is stopping; what was under way is whole")
}

/// Tells the thread that waits for a job that the job has ended. A panic of the job is an end too,
/// and the queue goes on.
struct Ending<'a>(Option<&'a Job>);

impl Ending<'_> {
    /// The job has another turn.
    fn later(mut self) {
        self.0 = None;
    }

    fn with(self, outcome: Result<Moved, Error>) {
        let job = self.0.expect("it has not ended");
        *job.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
    }
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        let Some(job) = self.0 else { return };
        let mut outcome = job.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        outcome.get_or_insert_with(|| {
            Err(unmoved("the worker failed at it, which is a bug: weir status says what was done, the daemon's log why it ended"))
        });
        job.ended.notify_all();
    }
}

impl Job {
    /// A job for a client's request.
    pub fn new(workers: &Arc<Workers>, kind: JobKind, bytes: Option<u64>) -> Arc<Self> {
        Self::about(workers, kind, bytes, None)
    }

    /// A job for the governor.
    pub fn governed(workers: &Arc<Workers>, kind: JobKind, bytes: u64, card: Card) -> Arc<Self> {
        Self::about(workers, kind, Some(bytes), Some(card))
    }

    fn about(workers: &Arc<Workers>, kind: JobKind, bytes: Option<u64>, only: Option<Card>) -> Arc<Self> {
        Arc::new(Job {
            item: Item::new(),
            workers: Arc::clone(workers),
            kind,
            bytes,
            only,
            reach: Reach::default(),
            outcome: Mutex::new(None),
            ended: Condvar::new(),
        })
    }

    /// Queues the job and waits for its end.
    pub fn run_on(
        self: Arc<Self>,
        workers: &Workers,
        tell: &mut dyn FnMut(Progress),
    ) -> Result<Moved, Error> {
        if !workers.queue().schedule(&self) {
            return Err(unmoved("the daemon is stopping"));
        }
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(outcome) = outcome.take() {
                return outcome;
            }
            if workers.is_stopping() {
                return Err(stopping());
            }
            let waited = self.ended.wait_timeout(outcome, TELL_EVERY);
            outcome = waited.unwrap_or_else(PoisonError::into_inner).0;
            let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
            tell(Progress {
                bytes: read(&self.reach.bytes),
                total_bytes: read(&self.reach.total_bytes),
                pages: read(&self.reach.pages),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::tests::quiet;
    use std::time::Instant;
    use weir_core::PAGE_SIZE;
    use weir_store::{Fault, Host, Lane, OpenError, Reclaim, State, Store};
    use weir_volume::{Config, Volume};

    /// A store that panics when a chunk is to be taken.
    #[derive(Debug)]
    struct Bursting(Host);

    impl Store for Bursting {
        fn name(&self) -> &str {
            "bursting"
        }

        fn slots(&self) -> u32 {
            self.0.slots()
        }

        fn lane(&self, depth: usize) -> Result<Box<dyn Lane>, OpenError> {
            self.0.lane(depth)
        }

        fn state(&self, member: u32) -> State {
            self.0.state(member)
        }

        fn unfit_for_swap(&self) -> Option<String> {
            None
        }

        fn reclaim(&self) -> Option<&dyn Reclaim> {
            Some(self)
        }
    }

    impl Reclaim for Bursting {
        fn chunk_slots(&self) -> u32 {
            self.0.chunk_slots()
        }

        fn release(&self, chunk: u32) -> Result<(), Fault> {
            self.0.release(chunk)
        }

        fn take(&self, _chunk: u32) -> Result<(), Fault> {
            panic!("as a bug would");
        }
    }

    #[test]
    fn who_waits_for_a_job_hears_of_a_panic_and_the_next_job_runs() {
        let config = Config { pages: 64, lanes: 1 + super::super::lanes(quiet().processors), depth: 4 };
        let below = Host::new(config.slots()).expect("memory");
        let first = Bursting(Host::new(4 << 20 >> 12).expect("memory"));
        let chunk = u64::from(first.slots()) * PAGE_SIZE as u64;
        let volume = Volume::create(config, vec![Arc::new(first), Arc::new(below)]).expect("a volume");
        let workers = Workers::start(&volume, &[true, false], &quiet()).expect("threads");
        let (ended, end) = std::sync::mpsc::channel();
        let jobs = Arc::clone(&workers);
        std::thread::spawn(move || {
            for kind in [JobKind::GiveBack, JobKind::Take, JobKind::Take] {
                let _ = ended.send(Job::new(&jobs, kind, None).run_on(&jobs, &mut |_| {}));
            }
        });
        let next = || end.recv_timeout(Duration::from_secs(60)).expect("an answer");
        let begun = Instant::now();
        assert_eq!(next().expect("the chunk is given back").bytes, chunk);
        for _ in 0..2 {
            let error = next().expect_err("it panicked");
            assert!(error.to_string().contains("a bug"), "{error}");
        }
        assert!(begun.elapsed() < Duration::from_secs(60));
        workers.stop();
    }
}
