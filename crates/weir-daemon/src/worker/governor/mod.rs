//! The governor: keeps memory free for each card's owner, by its [`Policy`].
//!
//! The governor looks often while a program allocates, and seldom at rest. A program that comes to
//! the card opens its device file, and that wakes the governor.

mod arrivals;
mod policy;

use super::job::{Job, JobKind};
use super::workers::{Card, Workers};
use crate::error::{Error, ErrorKind};
use arrivals::Arrivals;
use policy::{Look, Policy, Step};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use weir_core::log::{Level, Log};

/// One card of one store.
#[derive(Debug)]
struct Governed {
    card: Card,
    policy: Policy,
    look_at: Duration,
    /// Whether the governor has logged that nothing can be given back.
    said: bool,
}

/// The governor's thread; `None` if no store lies on a card that reports its free memory.
#[derive(Debug)]
pub struct Governor {
    arrivals: Arrivals,
    thread: JoinHandle<()>,
}

impl Governor {
    /// Starts the governor, if there is a card to govern.
    ///
    /// # Errors
    /// Fails when no thread can be had.
    pub fn start(workers: &Arc<Workers>, log: &Log) -> Result<Option<Self>, Error> {
        let cards: Vec<Governed> = workers
            .cards()
            .map(|card| Governed { card, policy: Policy::default(), look_at: Duration::ZERO, said: false })
            .collect();
        if cards.is_empty() {
            return Ok(None);
        }
        let arrivals = Arrivals::new().map_err(|error| Error::of(ErrorKind::System, error))?;
        let (workers, log, watched) = (Arc::clone(workers), Arc::clone(log), arrivals.clone());
        let thread = std::thread::Builder::new()
            .name("weir-governor".into())
            .spawn(move || govern(&workers, cards, &watched, &log))
            .map_err(|error| Error::of(ErrorKind::System, error))?;
        Ok(Some(Governor { arrivals, thread }))
    }

    /// Ends the governor.
    pub fn stop(self) {
        self.arrivals.end();
        // Ignore a panic of the governor: the daemon ends all the same.
        let _ = self.thread.join();
    }
}

fn govern(workers: &Arc<Workers>, mut cards: Vec<Governed>, arrivals: &Arrivals, log: &Log) {
    let began = workers.clock().now();
    let mut newcomer = false;
    while !workers.is_stopping() {
        let now = workers.clock().now() - began;
        for governed in &mut cards {
            if newcomer || now >= governed.look_at {
                governed.look(workers, newcomer, arrivals.are_told(), began, log);
            }
        }
        let next = cards.iter().map(|governed| governed.look_at).min().unwrap_or_default();
        // This thread has opened device files itself, and the watch has reported that like a
        // program's arrival. So forget these reports.
        arrivals.forget();
        let now = workers.clock().now() - began;
        newcomer = arrivals.wait(next.saturating_sub(now), workers.clock());
    }
}

impl Governed {
    fn look(&mut self, workers: &Arc<Workers>, newcomer: bool, told: bool, began: Instant, log: &Log) {
        let now = |workers: &Workers| workers.clock().now() - began;
        let Some(room) = workers.room(self.card) else {
            self.look_at = now(workers) + Duration::from_secs(1);
            return;
        };
        let (held, away) = workers.chunk_counts(self.card);
        let look = Look { at: now(workers), room, held, away, newcomer, told };
        let (step, again) = self.policy.step(&look);
        let (kind, chunks) = match step {
            Step::Nothing => {
                self.look_at = now(workers) + again;
                return;
            }
            Step::GiveBack(chunks) => (JobKind::GiveBack, chunks),
            Step::Take(chunks) => (JobKind::Take, chunks),
        };
        let bytes = u64::from(chunks) * room.chunk;
        let outcome = Job::governed(workers, kind, bytes, self.card).run_on(workers, &mut |_| ());
        // Count the chunks anew: a job that ended early may have given back or taken some.
        let moved = workers.chunk_counts(self.card).0.abs_diff(held);
        if let Err(why) = outcome
            && !self.said
            && !workers.is_stopping()
        {
            self.said = true;
            (log)(Level::Warning, format_args!("memory is short on the card, and {why}"));
        }
        self.said &= moved == 0;
        let free = workers.room(self.card).map(|room| room.free);
        self.policy.done(now(workers), step, moved, free);
        self.look_at = now(workers) + again;
    }
}
