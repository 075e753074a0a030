//! Takes of memory that was given back: one chunk a turn. Other jobs run between two turns, since a
//! card's owner may wait for memory.
//!
//! A give-back that runs between two turns is younger than the take, and goes first: the take wants
//! no more of the memory that the give-back is about.

use super::job::{Job, JobKind, stopping, unmoved};
use super::workers::{Chunk, Taking, Workers, upto};
use crate::control::Moved;
use crate::error::Error;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};
use weir_core::{ByteSize, chain};
use weir_store::Fault;
use weir_volume::{ChunkState, GiveBackError, Note};

impl Workers {
    fn takes(&self) -> MutexGuard<'_, Vec<Taking>> {
        self.takes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs one turn of a take, which takes one chunk. `None`: the take needs another turn.
    pub(super) fn take(&self, job: &Arc<Job>) -> Option<Result<Moved, Error>> {
        let mut takes = self.takes();
        let begun = takes.iter().position(|it| it.job.as_ptr() == Arc::as_ptr(job));
        let begun = begun.map(|at| takes.swap_remove(at));
        drop(takes);
        let mut taking = begun.unwrap_or_else(|| self.begin_take(job));
        if self.is_stopping() {
            return Some(Err(stopping()));
        }
        let outcome = self.take_next(job, &mut taking);
        if outcome.is_ok() && !taking.rest.is_empty() {
            self.takes().push(taking);
            return None;
        }
        Some(self.end_take(job, &taking, outcome))
    }

    /// Removes from the takes under way what the give-back `by` is about: the chunks of the
    /// governor's card, or all chunks.
    pub(super) fn overrule_takes(&self, by: &Job) {
        for Taking { kind, rest, left_bytes, overruled, .. } in &mut *self.takes() {
            // A wake leaves the chunks of a governor's card to the governor.
            let to_governor = *kind == JobKind::Wake && by.only.is_some();
            rest.retain(|chunk| {
                let stays = by.only.is_some_and(|card| card != self.card(chunk));
                *left_bytes += if !stays && to_governor { chunk.bytes() } else { 0 };
                *overruled |= !stays && !to_governor;
                stays
            });
        }
    }

    fn begin_take(&self, job: &Arc<Job>) -> Taking {
        let mut away = match job.kind {
            JobKind::Wake => self.woken(),
            _ => self.chunks(ChunkState::GivenBack, job.only),
        };
        // Chunks that another take wants come last. So two takes of some bytes take the sum.
        away.sort_by_key(|chunk| self.takes().iter().any(|other| other.wants(chunk)));
        let wanted = match job.bytes {
            Some(wanted) => upto(&away, |sum, _| sum < wanted),
            None => away,
        };
        let total = wanted.iter().map(|chunk| chunk.bytes()).sum();
        job.reach.total_bytes.store(total, Ordering::Relaxed);
        if total > 0 {
            // The take's end begins the promotion anew.
            self.promotion.end();
        }
        let rest = wanted.into();
        let (job, kind, began) = (Arc::downgrade(job), job.kind, self.clock().now());
        Taking { job, kind, began, rest, left_bytes: 0, overruled: false }
    }

    /// Takes the next chunk, if there is one. The error says why the take ends here.
    fn take_next(&self, job: &Job, taking: &mut Taking) -> Result<(), String> {
        let Some(chunk) = taking.rest.pop_front() else { return Ok(()) };
        let room = if job.kind == JobKind::Wake { self.room(self.card(&chunk)) } else { None };
        // The card has too little free memory for its owner. So leave the chunk to the governor,
        // which takes it later.
        if room.is_some_and(|room| !room.has_recovered()) {
            taking.left_bytes += chunk.bytes();
            return Ok(());
        }
        match self.mover(0).take(chunk.store, chunk.chunk) {
            Ok(()) => {
                job.reach.bytes.fetch_add(chunk.bytes(), Ordering::Relaxed);
                self.takes().iter_mut().for_each(|other| other.leave(&chunk));
                Ok(())
            }
            Err(GiveBackError::Store(Fault::Full)) if room.is_some() => {
                taking.left_bytes += chunk.bytes();
                Ok(())
            }
            Err(error) => {
                let store = self.pool().stores().nth(chunk.store).map_or("", |store| store.name());
                let (why, again) = (chain(&error), again(job));
                Err(format!("{store} has no more now ({why}); end what uses it, then weir take {again}"))
            }
        }
    }

    fn end_take(&self, job: &Job, taking: &Taking, outcome: Result<(), String>) -> Result<Moved, Error> {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let (taken, total) = (read(&job.reach.bytes), read(&job.reach.total_bytes));
        let seconds = (self.clock().now() - taking.began).as_secs_f64();
        self.taken.add(taken, seconds);
        if total > 0 {
            self.promotion.begin(self);
        }
        let (taken_size, total) = (ByteSize(taken), ByteSize(total));
        if let Err(trouble) = outcome {
            return Err(unmoved(format!("took {taken_size} of {total}: {trouble}")));
        }
        // The governor looks again at its card before it takes more.
        if taking.overruled && job.only.is_none() {
            return Err(unmoved(format!(
                "took {taken_size} of {total}: memory was given back meanwhile, and that goes first; weir take {} takes the rest",
                again(job)
            )));
        }
        Ok(Moved { bytes: taken, left_bytes: taking.left_bytes, pages: 0, seconds })
    }

    /// Notes that the machine has slept. Returns the chunks that were given back for that, so that
    /// they are taken again. On a card with a governor, the governor may take these chunks from
    /// here on. So a chunk does not stay away for ever if it cannot be taken now or the daemon
    /// dies. On other cards a chunk counts as given back for the sleep until it is taken.
    fn woken(&self) -> Vec<Chunk> {
        let mut asleep = self.chunks(ChunkState::GivenBack, None);
        asleep.retain(|it| it.note.asleep);
        let (governed, mut woken): (Vec<_>, Vec<_>) =
            asleep.into_iter().partition(|it| self.room(self.card(it)).is_some());
        self.note(&governed, |_| Note { unasked: true, asleep: false });
        woken.extend(governed.into_iter().filter(|it| !it.note.unasked));
        woken
    }
}

impl Taking {
    fn wants(&self, chunk: &Chunk) -> bool {
        self.rest.iter().any(|it| it.is(chunk))
    }

    /// Leaves out a chunk that another take has taken.
    fn leave(&mut self, chunk: &Chunk) {
        let before = self.rest.len();
        self.rest.retain(|it| !it.is(chunk));
        if self.rest.len() < before
            && let Some(job) = self.job.upgrade()
        {
            job.reach.total_bytes.fetch_sub(chunk.bytes(), Ordering::Relaxed);
        }
    }
}

/// The amount for a `weir take` that takes the rest.
fn again(job: &Job) -> &'static str {
    if job.kind == JobKind::Wake { "--sleep" } else { "all" }
}

#[cfg(test)]
mod tests {
    use super::super::workers::tests::{CARD, CHUNK, Owner, ask, refused, workers, workers_of};
    use super::*;
    use weir_core::PAGE_SIZE;

    /// Gives all chunks back. The card then has enough free memory for them.
    fn all_away(workers: &Arc<Workers>, owner: &Owner, kind: JobKind) {
        assert_eq!(ask(workers, kind, None).bytes, 4 * CHUNK);
        owner.free.store(6 * CHUNK, Ordering::Relaxed);
    }

    /// Has `job` come while the next chunk is taken.
    fn comes(workers: &Arc<Workers>, owner: &Owner, job: &Arc<Job>) {
        let (workers, job) = (Arc::clone(workers), Arc::clone(job));
        owner.when_taken(move || assert!(workers.queue().schedule(&job), "it is new"));
    }

    /// A give-back of one chunk, for a client or for the governor of the card.
    fn give_back(workers: &Arc<Workers>, governed: bool) -> Arc<Job> {
        match governed {
            false => Job::new(workers, JobKind::GiveBack, Some(CHUNK)),
            true => Job::governed(workers, JobKind::GiveBack, CHUNK, CARD),
        }
    }

    fn moved(job: &Job) -> u64 {
        job.reach.bytes.load(Ordering::Relaxed)
    }

    #[test]
    fn another_job_runs_before_a_long_take_ends() {
        let (workers, owner) = workers();
        all_away(&workers, &owner, JobKind::GiveBack);
        let other = Job::new(&workers, JobKind::Take, Some(CHUNK));
        comes(&workers, &owner, &other);
        let all = Job::new(&workers, JobKind::Take, None);
        let done = Arc::clone(&all).run_on(&workers, &mut |_| {}).expect("it is done");
        // Each take counts what it has taken itself.
        assert_eq!((done.bytes, done.left_bytes, moved(&other)), (3 * CHUNK, 0, CHUNK));
        assert_eq!(all.reach.total_bytes.load(Ordering::Relaxed), 3 * CHUNK);
        assert_eq!(workers.chunk_counts(CARD), (4, 0));
        workers.stop();
    }

    #[test]
    fn two_takes_of_some_bytes_take_the_sum() {
        let (workers, owner) = workers();
        all_away(&workers, &owner, JobKind::GiveBack);
        let other = Job::new(&workers, JobKind::Take, Some(2 * CHUNK));
        comes(&workers, &owner, &other);
        assert_eq!(ask(&workers, JobKind::Take, Some(2 * CHUNK)).bytes, 2 * CHUNK);
        ask(&workers, JobKind::Take, Some(0));
        assert_eq!((moved(&other), workers.chunk_counts(CARD).0), (2 * CHUNK, 4));
        workers.stop();
    }

    #[test]
    fn a_give_back_meanwhile_ends_a_take_whose_caller_hears_of_it() {
        for governed in [false, true] {
            let (workers, owner) = workers();
            all_away(&workers, &owner, JobKind::GiveBack);
            let give_back = give_back(&workers, governed);
            comes(&workers, &owner, &give_back);
            let why = refused(&workers, JobKind::Take);
            let says =
                "took 4MiB of 16MiB: memory was given back meanwhile, and that goes first; weir take all";
            assert!(why.starts_with(says), "{why}");
            assert_eq!((moved(&give_back), workers.chunk_counts(CARD).0), (CHUNK, 0));
            assert_eq!(ask(&workers, JobKind::Take, None).bytes, 4 * CHUNK, "later, nothing is in its way");
            workers.stop();
        }
    }

    #[test]
    fn a_give_back_that_is_refused_ends_a_take_only_if_a_card_is_short() {
        let chunk_pages = (CHUNK / PAGE_SIZE as u64) as u32;
        for governed in [false, true] {
            // The store below has room for no page of the device. So memory can be given back only
            // while the pages are vacant.
            let (workers, owner) = workers_of(4 * chunk_pages, 4 * chunk_pages);
            workers.pool().set_vacant(4 * chunk_pages);
            all_away(&workers, &owner, JobKind::GiveBack);
            workers.pool().set_vacant(0);
            let give_back = give_back(&workers, governed);
            comes(&workers, &owner, &give_back);
            if governed {
                let why = refused(&workers, JobKind::Take);
                assert!(why.contains("took 4MiB of 16MiB"), "{why}");
            } else {
                assert_eq!(ask(&workers, JobKind::Take, None).bytes, 4 * CHUNK);
            }
            assert_eq!(moved(&give_back), 0);
            workers.stop();
        }
    }

    #[test]
    fn what_a_card_needs_while_a_wake_takes_is_left_to_the_governor() {
        let (workers, owner) = workers();
        all_away(&workers, &owner, JobKind::Sleep);
        comes(&workers, &owner, &Job::governed(&workers, JobKind::GiveBack, CHUNK, CARD));
        let woken = ask(&workers, JobKind::Wake, None);
        assert_eq!((woken.bytes, woken.left_bytes), (CHUNK, 3 * CHUNK));
        assert_eq!(workers.chunk_counts(CARD), (0, 4));
        workers.stop();
    }

    #[test]
    fn a_daemon_that_stops_ends_a_take_after_its_chunk() {
        let (workers, owner) = workers();
        all_away(&workers, &owner, JobKind::GiveBack);
        let stopped = Arc::clone(&workers);
        owner.when_taken(move || {
            let stops = Arc::clone(&stopped);
            std::thread::spawn(move || stops.stop());
            while !stopped.is_stopping() {
                std::thread::yield_now();
            }
        });
        let why = refused(&workers, JobKind::Take);
        assert!(why.contains("the daemon is stopping"), "{why}");
        workers.stop();
        assert_eq!(workers.chunk_counts(CARD).0, 1);
    }
}
