//! A cache's answers to `weir give-back` and `weir take`: chunks of its store go to their owner and
//! come again, one request after another.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::thread;
use std::time::{Duration, Instant};
use weir_cache::{Cache, CacheError, Reclaim, ReclaimError, Reclaimer};
use weir_cli::failure::chain;
use weir_core::ByteSize;
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
    /// Use this many bytes of the store from now on; `None`: all.
    Resize(Option<u64>),
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

    /// Does a request after all earlier requests have ended. Calls `tell` with the progress. If
    /// `tell` returns false, the client has gone: a resize ends soon, and any other job goes on.
    ///
    /// # Errors
    /// Fails with one line: what is in the way, and the next step.
    pub fn run(&self, job: Job, tell: &mut dyn FnMut(Progress) -> bool) -> Result<Moved, String> {
        let begun = Instant::now();
        let mut desk = self.wait_for_turn(tell)?;
        let moved = match job {
            Job::GiveBack(_) | Job::Sleep => self.give_back(&mut desk, job, tell),
            Job::Take(_) | Job::Wake => self.take(&mut desk, job, tell),
            Job::Resize(bytes) => self.resize(&mut desk, bytes, tell),
        }?;
        Ok(Moved { seconds: begun.elapsed().as_secs_f64(), ..moved })
    }

    fn wait_for_turn(&self, tell: &mut dyn FnMut(Progress) -> bool) -> Result<MutexGuard<'_, Desk>, String> {
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

    /// Refuses a store that gives no memory back.
    fn refuse_whole(&self) -> Result<(), String> {
        let are_none = |state| self.cache.chunks(state).is_empty();
        if are_none(ChunkState::Held) && are_none(ChunkState::GivenBack) {
            let store = &self.store;
            return Err(format!("{store} gives no memory back; host:, file: and vram: stores do"));
        }
        Ok(())
    }

    fn resize(
        &self,
        desk: &mut Desk,
        bytes: Option<u64>,
        tell: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<Moved, String> {
        self.refuse_whole()?;
        let total = desk.reclaimer.resize(bytes.unwrap_or(u64::MAX));
        self.drive(desk, (total, true), tell).map_err(|(_, error)| {
            let (size, all) = (self.cache.status().size_bytes, "all".to_owned());
            let (size, wanted) = (ByteSize(size), bytes.map_or(all, |bytes| ByteSize(bytes).to_string()));
            format!(
                "the cache uses {size} of its store now, not {wanted}: {}; weir cache resize {wanted} goes on",
                chain(&error)
            )
        })
    }

    fn give_back(
        &self,
        desk: &mut Desk,
        job: Job,
        tell: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<Moved, String> {
        self.refuse_whole()?;
        let held = self.cache.chunks(ChunkState::Held);
        let there = bytes_of(&held);
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
            // The user wants all of the memory to stay given back. So the memory that was given
            // back for a sleep is not taken after the sleep.
            Job::GiveBack(None) => desk.slept.clear(),
            _ => {}
        }
        let total = bytes_of(&wanted);
        desk.reclaimer.give_back(wanted);
        self.drive(desk, (total, false), tell).map_err(|(given, error)| {
            let next = match error {
                ReclaimError::Stuck { .. } => {
                    "; their home does not take them, or a client has them all the time: weir cache status and the kernel's log say more"
                }
                _ => "",
            };
            format!("gave back {given} of {}: {}{next}", ByteSize(total), chain(&error))
        })
    }

    fn take(
        &self,
        desk: &mut Desk,
        job: Job,
        tell: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<Moved, String> {
        let mut away = self.cache.chunks(ChunkState::GivenBack);
        if job == Job::Wake {
            away.retain(|chunk| desk.slept.contains(&chunk.chunk));
        }
        let away = desk.reclaimer.fitting(away);
        let wanted = match job {
            Job::Take(Some(wanted)) => upto(away, wanted),
            _ => away,
        };
        let total = bytes_of(&wanted);
        desk.reclaimer.take(wanted);
        let result = self.drive(desk, (total, false), tell);
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

    /// Runs the job's steps until the job ends. With `ends_with_client`, the job stops when `tell`
    /// returns false. After an error, also returns the number of bytes that were given back or
    /// taken before the error.
    fn drive(
        &self,
        desk: &mut Desk,
        (total_bytes, ends_with_client): (u64, bool),
        tell: &mut dyn FnMut(Progress) -> bool,
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
                let listens = tell(Progress { bytes: done.bytes, total_bytes, pages: done.pages });
                if ends_with_client && !listens {
                    reclaimer.stop();
                }
                told = Instant::now();
            }
        }
    }
}

/// The first chunks of the list, as many as are needed for this number of bytes.
fn upto(mut chunks: Vec<ChunkStatus>, bytes: u64) -> Vec<ChunkStatus> {
    let mut sum = 0;
    chunks.retain(|chunk| {
        let is_wanted = sum < bytes;
        sum += chunk.bytes();
        is_wanted
    });
    chunks
}

fn bytes_of(chunks: &[ChunkStatus]) -> u64 {
    chunks.iter().map(ChunkStatus::bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_cache::Config;
    use weir_core::PAGE_SIZE;
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
        let refused = memory.run(Job::GiveBack(None), &mut |_| true).unwrap_err();
        assert_eq!(refused, "the store gives no memory back; host:, file: and vram: stores do");
        assert_eq!(memory.run(Job::Take(None), &mut |_| true).unwrap().bytes, 0);
    }

    #[test]
    fn a_request_for_memory_at_a_cache_that_ends_is_refused() {
        let memory = memory(Arc::new(Host::new(2048).unwrap()));
        memory.end();
        let refused = memory.run(Job::GiveBack(None), &mut |_| true).unwrap_err();
        assert_eq!(refused, "the cache is about to end");
    }

    #[test]
    fn two_requests_run_one_after_the_other_and_the_second_is_told_that_it_waits() {
        let memory = memory(Arc::new(Host::new(2048).unwrap()));
        let first = memory.desk.lock().unwrap();
        thread::scope(|scope| {
            let (told, tell) = std::sync::mpsc::channel();
            let memory = &memory;
            let second = scope.spawn(move || memory.run(Job::GiveBack(None), &mut |_| told.send(()).is_ok()));
            tell.recv().unwrap();
            assert_eq!(memory.cache.chunks(ChunkState::Held).len(), 1, "it waits");
            drop(first);
            assert_eq!(second.join().unwrap().unwrap().bytes, 2048 * PAGE_SIZE as u64);
        });
        let again = memory.run(Job::GiveBack(None), &mut |_| true).unwrap();
        assert_eq!(again.bytes, 0, "there is no more");
    }

    /// A cache over this many chunks of 4 MiB.
    fn chunks(count: u64) -> Memory {
        let url = format!("sim:seed=1,size={}MiB,chunk=4MiB", 4 * count);
        memory(weir_store::open(&url.parse().unwrap()).unwrap())
    }

    fn sizes(memory: &Memory) -> (u64, u64) {
        let status = memory.cache.status();
        (status.size_bytes >> 20, bytes_of(&memory.cache.chunks(ChunkState::Held)) >> 20)
    }

    fn run(memory: &Memory, job: Job) -> u64 {
        memory.run(job, &mut |_| true).unwrap().bytes >> 20
    }

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_size_lasts_whatever_is_taken_and_comes_twice_without_effect() {
        let memory = chunks(8);
        // Sizes are rounded up to whole chunks.
        assert_eq!((run(&memory, Job::Resize(Some(17 * MIB))), sizes(&memory)), (12, (20, 20)));
        assert_eq!((run(&memory, Job::Resize(Some(17 * MIB))), sizes(&memory)), (0, (20, 20)), "twice");
        assert_eq!((run(&memory, Job::Take(None)), sizes(&memory)), (0, (20, 20)), "nothing is given back");
        assert_eq!((run(&memory, Job::GiveBack(None)), sizes(&memory)), (20, (20, 0)));
        assert_eq!((run(&memory, Job::Take(None)), sizes(&memory)), (20, (20, 20)), "as much as its size");
        assert_eq!((run(&memory, Job::Resize(None)), sizes(&memory)), (12, (32, 32)));
        assert_eq!((run(&memory, Job::Resize(Some(0))), sizes(&memory)), (32, (0, 0)));
        assert_eq!((run(&memory, Job::Resize(Some(u64::MAX))), sizes(&memory)), (32, (32, 32)));
    }

    #[test]
    fn what_was_given_back_to_somebody_stays_away_when_the_size_changes() {
        let memory = chunks(8);
        run(&memory, Job::GiveBack(Some(16 * MIB)));
        assert_eq!((run(&memory, Job::Resize(Some(24 * MIB))), sizes(&memory)), (0, (24, 16)));
        assert_eq!((run(&memory, Job::Resize(Some(28 * MIB))), sizes(&memory)), (4, (28, 20)));
        assert_eq!((run(&memory, Job::Sleep), sizes(&memory)), (20, (28, 0)));
        assert_eq!((run(&memory, Job::Resize(Some(8 * MIB))), sizes(&memory)), (0, (8, 0)));
        assert_eq!((run(&memory, Job::Wake), sizes(&memory)), (8, (8, 8)));
    }

    #[test]
    fn a_resize_whose_client_goes_ends_and_the_cache_keeps_the_size_that_it_has_then() {
        let memory = chunks(8);
        let mut lane = weir_device::PageDevice::open(&memory.cache).unwrap();
        // Nothing writes the dirty pages home in this test, so their frames cannot be closed.
        for page in 0..64 {
            let bytes = std::array::from_fn(|at| (at / 64 + page) as u8);
            let _ = weir_device::PageLane::write(&mut lane, 0, weir_core::PageNo(page as u32), &bytes);
        }
        assert!(memory.cache.dirty() > 0);
        let refused = memory.run(Job::Resize(Some(0)), &mut |_| false).unwrap_err();
        let (size, held) = sizes(&memory);
        assert!(size == held && size > 0, "{size} {held}");
        let words = format!("the cache uses {size}MiB of its store now, not 0B: it was stopped");
        assert!(refused.starts_with(&words), "{refused}");
    }
}
