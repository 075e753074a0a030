//! What is asked of the worker: one job at a time, with its progress and its outcome.

use super::crew::{Card, Crew};
use crate::control::{Moved, Progress};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;
use weir_queue::{Item, Work, has_item};

/// How often whoever waits for a job hears of it.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// What is to be done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wish {
    GiveBack,
    Take,
}

/// A job, in the queue or at work.
#[derive(Debug)]
pub struct Job {
    item: Item<Job>,
    crew: Arc<Crew>,
    pub wish: Wish,
    /// How much; `None`: all.
    pub bytes: Option<u64>,
    /// The card whose memory it is about, where the governor asks; less than asked for is then welcome too.
    pub only: Option<Card>,
    pub reach: Reach,
    outcome: Mutex<Option<Result<Moved, String>>>,
    ended: Condvar,
}

/// How far a job is.
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
        let outcome = this.crew.run(&this);
        *this.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
        this.ended.notify_all();
    }
}

impl Job {
    /// Somebody's wish.
    pub fn new(crew: &Arc<Crew>, wish: Wish, bytes: Option<u64>) -> Arc<Self> {
        Self::about(crew, wish, bytes, None)
    }

    /// The governor's.
    pub fn governed(crew: &Arc<Crew>, wish: Wish, bytes: u64, card: Card) -> Arc<Self> {
        Self::about(crew, wish, Some(bytes), Some(card))
    }

    fn about(crew: &Arc<Crew>, wish: Wish, bytes: Option<u64>, only: Option<Card>) -> Arc<Self> {
        Arc::new(Job {
            item: Item::new(),
            crew: Arc::clone(crew),
            wish,
            bytes,
            only,
            reach: Reach::default(),
            outcome: Mutex::new(None),
            ended: Condvar::new(),
        })
    }

    /// Queues it and waits for its end.
    pub fn run_on(self: Arc<Self>, crew: &Crew, tell: &mut dyn FnMut(Progress)) -> Result<Moved, String> {
        if !crew.queue().schedule(&self) {
            return Err("the daemon is stopping".into());
        }
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(outcome) = outcome.take() {
                return outcome;
            }
            if crew.is_stopping() {
                return Err("the daemon is stopping; what was under way is whole".into());
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
