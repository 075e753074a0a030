//! A cache's answers to `weir give-back` and `weir take`: chunks of its store go to their owner and
//! come again, one request after another.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::thread;
use std::time::{Duration, Instant};
use weir_cache::{Cache, CacheError, Reclaim, ReclaimError, Reclaimer};
use weir_cli::failure::chain;
use weir_core::{ByteSize, PAGE_SIZE};
use weir_daemon::control::{Moved, Progress};
use weir_volume::{ChunkState, ChunkStatus};

/// Time between two reports of a job's progress to its client.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// A request for memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Job {
    /// Give back this many bytes; `None`: all.
    GiveBack(Option<u64>),
    /// Take this many bytes; `None`: all that was given back.
    Take(Option<u64>),
    /// Give all memory back until the machine has slept.
    Sleep,
    /// Take again the memory that was given back for the sleep.
    Wake,
}

/// The memory of a cache.
pub struct Memory {
    cache: Arc<Cache>,
    /// The store's name.
    store: String,
    desk: Mutex<Desk>,
    ends: AtomicBool,
}

/// The present request's access to the memory.
struct Desk {
    reclaimer: Reclaimer,
    /// The chunks that were given back for a sleep.
    slept: Vec<u32>,
}

impl Memory {
    /// The memory of `cache`, over the store of this name.
    ///
    /// # Errors
    /// Fails when the cache has no lane left for this.
    pub fn new(cache: &Arc<Cache>, store: &str) -> Result<Self, CacheError> {
        let desk = Desk { reclaimer: Reclaimer::open(cache)?, slept: Vec::new() };
        Ok(Memory {
            cache: Arc::clone(cache),
            store: store.to_owned(),
            desk: Mutex::new(desk),
            ends: AtomicBool::new(false),
        })
    }

    /// Ends the present request soon, and refuses all later ones, because the cache ends.
    pub fn end(&self) {
        self.ends.store(true, Ordering::SeqCst);
    }

    /// Does a request after those before it. Calls `tell` with the progress.
    ///
    /// # Errors
    /// Fails with one line: what is in the way, and the next step.
    pub fn run(&self, job: Job, tell: &mut dyn FnMut(Progress)) -> Result<Moved, String> {
        let begun = Instant::now();
        let mut desk = self.wait_for_turn(tell)?;
        let moved = match job {
            Job::GiveBack(_) | Job::Sleep => self.give_back(&mut desk, job, tell),
            Job::Take(_) | Job::Wake => self.take(&mut desk, job, tell),
        }?;
        Ok(Moved { seconds: begun.elapsed().as_secs_f64(), ..moved })
    }

    fn wait_for_turn(&self, tell: &mut dyn FnMut(Progress)) -> Result<MutexGuard<'_, Desk>, String> {
        loop {
            if self.ends.load(Ordering::SeqCst) {
                return Err("the cache is about to end".to_owned());
            }
            match self.desk.try_lock() {
                Ok(desk) => return Ok(desk),
                Err(TryLockError::Poisoned(desk)) => return Ok(desk.into_inner()),
                Err(TryLockError::WouldBlock) => {}
            }
            tell(Progress { bytes: 0, total_bytes: 0, pages: 0 });
            thread::sleep(TELL_EVERY);
        }
    }

    fn give_back(&self, desk: &mut Desk, job: Job, tell: &mut dyn FnMut(Progress)) -> Result<Moved, String> {
        let held = self.cache.chunks(ChunkState::Held);
        let there = bytes_of(&held);
        if held.is_empty() && self.cache.chunks(ChunkState::GivenBack).is_empty() {
            let store = &self.store;
            return Err(format!("{store} gives no memory back; host:, file: and vram: stores do"));
        }
        let wanted = match job {
            Job::GiveBack(Some(wanted)) if wanted > there => {
                let (wanted, there) = (ByteSize(wanted), ByteSize(there));
                return Err(format!(
                    "cannot give back {wanted}: only {there} is held; ask for that, or for all"
                ));
            }
            Job::GiveBack(Some(wanted)) => upto(held, wanted),
            _ => held,
        };
        match job {
            Job::Sleep => desk.slept.extend(wanted.iter().map(|chunk| chunk.chunk)),
            // All of the memory is to stay away, also what is away for a sleep.
            Job::GiveBack(None) => desk.slept.clear(),
            _ => {}
        }
        let total = bytes_of(&wanted);
        desk.reclaimer.give_back(wanted);
        self.drive(desk, total, tell).map_err(|(given, error)| {
            let next = match error {
                ReclaimError::Stuck { .. } => {
                    "; their home does not take them, or a client has them all the time: weir cache status and the kernel's log say more"
                }
                _ => "",
            };
            format!("gave back {given} of {}: {}{next}", ByteSize(total), chain(&error))
        })
    }

    fn take(&self, desk: &mut Desk, job: Job, tell: &mut dyn FnMut(Progress)) -> Result<Moved, String> {
        let mut away = self.cache.chunks(ChunkState::GivenBack);
        if job == Job::Wake {
            away.retain(|chunk| desk.slept.contains(&chunk.chunk));
        }
        let wanted = match job {
            Job::Take(Some(wanted)) => upto(away, wanted),
            _ => away,
        };
        let total = bytes_of(&wanted);
        desk.reclaimer.take(wanted);
        let result = self.drive(desk, total, tell);
        let still_away = self.cache.chunks(ChunkState::GivenBack);
        desk.slept.retain(|slept| still_away.iter().any(|chunk| chunk.chunk == *slept));
        result.map_err(|(taken, error)| {
            let (store, again) = (&self.store, if job == Job::Wake { "--sleep" } else { "all" });
            format!(
                "took {taken} of {}: {store} has no more now ({}); end what uses it, then weir take {again}",
                ByteSize(total),
                chain(&error)
            )
        })
    }

    /// Has the job go on until it ends. After an error, returns the bytes that were moved too.
    fn drive(
        &self,
        desk: &mut Desk,
        total_bytes: u64,
        tell: &mut dyn FnMut(Progress),
    ) -> Result<Moved, (ByteSize, ReclaimError)> {
        let reclaimer = &mut desk.reclaimer;
        let mut told = Instant::now();
        loop {
            let now = Instant::now();
            if self.ends.load(Ordering::SeqCst) {
                reclaimer.stop();
            }
            let step = reclaimer.step(now);
            let done = reclaimer.done();
            match step {
                Reclaim::Ended(Ok(())) => {
                    return Ok(Moved { bytes: done.bytes, left_bytes: 0, pages: done.pages, seconds: 0.0 });
                }
                Reclaim::Ended(Err(error)) => return Err((ByteSize(done.bytes), error)),
                Reclaim::Waits(until) => thread::sleep(until.saturating_duration_since(now)),
                Reclaim::More => {}
            }
            if told.elapsed() >= TELL_EVERY {
                tell(Progress { bytes: done.bytes, total_bytes, pages: done.pages });
                told = Instant::now();
            }
        }
    }
}

/// The first chunks that have so many bytes together.
fn upto(mut chunks: Vec<ChunkStatus>, bytes: u64) -> Vec<ChunkStatus> {
    let mut sum = 0;
    chunks.retain(|chunk| {
        let is_wanted = sum < bytes;
        sum += bytes_of(std::slice::from_ref(chunk));
        is_wanted
    });
    chunks
}

fn bytes_of(chunks: &[ChunkStatus]) -> u64 {
    chunks.iter().map(|chunk| u64::from(chunk.slots) * PAGE_SIZE as u64).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_cache::Config;
    use weir_store::{Host, Lane, OpenError, State, Store};

    /// A store that cannot give memory back.
    #[derive(Debug)]
    struct Whole(Host);

    impl Store for Whole {
        fn name(&self) -> &str {
            "whole"
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
    }

    fn memory(store: Arc<dyn Store>) -> Memory {
        let home = Arc::new(Host::new(64).unwrap());
        Memory::new(&Cache::create(store, home, Config::default()).unwrap(), "the store").unwrap()
    }

    #[test]
    fn a_cache_over_a_store_that_gives_no_memory_back_says_so() {
        let memory = memory(Arc::new(Whole(Host::new(2048).unwrap())));
        let refused = memory.run(Job::GiveBack(None), &mut |_| {}).unwrap_err();
        assert_eq!(refused, "the store gives no memory back; host:, file: and vram: stores do");
        assert_eq!(memory.run(Job::Take(None), &mut |_| {}).unwrap().bytes, 0);
    }

    #[test]
    fn a_request_for_memory_at_a_cache_that_ends_is_refused() {
        let memory = memory(Arc::new(Host::new(2048).unwrap()));
        memory.end();
        let refused = memory.run(Job::GiveBack(None), &mut |_| {}).unwrap_err();
        assert_eq!(refused, "the cache is about to end");
    }

    #[test]
    fn two_requests_run_one_after_the_other_and_the_second_is_told_that_it_waits() {
        let memory = memory(Arc::new(Host::new(2048).unwrap()));
        let first = memory.desk.lock().unwrap();
        thread::scope(|scope| {
            let (told, tell) = std::sync::mpsc::channel();
            let memory = &memory;
            let second = scope.spawn(move || {
                memory.run(Job::GiveBack(None), &mut |_| {
                    let _ = told.send(());
                })
            });
            tell.recv().unwrap();
            assert_eq!(memory.cache.chunks(ChunkState::Held).len(), 1, "it waits");
            drop(first);
            assert_eq!(second.join().unwrap().unwrap().bytes, 2048 * PAGE_SIZE as u64);
        });
        let again = memory.run(Job::GiveBack(None), &mut |_| {}).unwrap();
        assert_eq!(again.bytes, 0, "there is no more");
    }
}
