//! Removals of volumes, and of their last pages: the workers discard the pages.

use crate::control::Progress;
use crate::environment::Clock;
use crate::error::{Error, ErrorKind};
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use weir_core::PAGE_SIZE;
use weir_queue::{Item, Queue, Work, has_item};
use weir_volume::{Mover, Removal, Volume};

/// Number of pages that are discarded in a row. The slots of these pages become free afterwards.
const PAGES_AT_ONCE: u32 = 4096;
/// Time for which one run discards pages. Then other jobs run: a card's owner may wait for memory.
const TURN: Duration = Duration::from_millis(5);
/// Time between two looks at whether the daemon stops.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The threads that discard pages.
pub trait Discarders: Send + Sync + fmt::Debug {
    /// The queue of the thread that discards.
    fn queue(&self) -> &Queue;

    /// Calls `of` with the mover of the thread that discards.
    fn with_mover(&self, of: &mut dyn FnMut(&mut Mover));

    /// Whether the threads are to end.
    fn is_stopping(&self) -> bool;

    /// The clock by which a turn ends.
    fn clock(&self) -> &dyn Clock;
}

#[derive(Debug)]
struct Discard {
    item: Item<Discard>,
    by: Arc<dyn Discarders>,
    /// The removal, and the channel to the thread that waits for its end.
    work: Mutex<Option<(Removal, Sender<Removal>)>>,
    /// Number of pages that are not discarded yet.
    left: AtomicU32,
}

has_item!(Discard, item);

impl Work for Discard {
    type Pointer = Arc<Discard>;

    fn run(this: Arc<Discard>) {
        let clock = this.by.clock();
        let begun = clock.now();
        let mut work = this.work.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((removal, _)) = &mut *work else { return };
        let mut has_ended = false;
        this.by.with_mover(&mut |mover| {
            while !has_ended && !this.by.is_stopping() {
                has_ended = mover.remove(removal, PAGES_AT_ONCE);
                this.left.store(removal.pages_left(), Ordering::Relaxed);
                if clock.now() - begun >= TURN {
                    break;
                }
            }
        });
        let goes_on = !has_ended && !this.by.is_stopping();
        if goes_on && this.by.queue().schedule(&this) {
            return;
        }
        if let Some((removal, ended)) = work.take()
            && has_ended
        {
            // The caller of `discard` may have left because the daemon stops.
            let _ = ended.send(removal);
        }
    }
}

/// Has one of the threads discard the pages. Waits until the thread has ended that work, and calls
/// `tell` meanwhile.
pub fn discard(
    by: Arc<dyn Discarders>,
    removal: Removal,
    tell: &mut dyn FnMut(Progress),
) -> Result<Option<Arc<Volume>>, Error> {
    let pages = removal.pages_left();
    let (end, ended) = channel();
    let work = Mutex::new(Some((removal, end)));
    let job = Arc::new(Discard { item: Item::new(), by, work, left: AtomicU32::new(pages) });
    if !job.by.queue().schedule(&job) {
        return Err(stopping());
    }
    loop {
        match ended.recv_timeout(LOOK_EVERY) {
            Ok(removal) => return Ok(removal.rest().expect("it has ended")),
            Err(RecvTimeoutError::Timeout) if !job.by.is_stopping() => {
                let [total_bytes, bytes] = [pages, pages - job.left.load(Ordering::Relaxed)]
                    .map(|pages| u64::from(pages) * PAGE_SIZE as u64);
                tell(Progress { bytes, total_bytes, pages: bytes / PAGE_SIZE as u64 });
            }
            Err(_) => return Err(stopping()),
        }
    }
}

/// The error of a change that the daemon's end has interrupted.
pub fn stopping() -> Error {
    Error::new(ErrorKind::Stopping, "the daemon is stopping, so the volume does not change now")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::tests::Quick;
    use std::sync::OnceLock;
    use weir_store::Host;
    use weir_volume::{Config, Pool};

    /// A thread that sleeps for the time of a turn before each turn in which it discards pages.
    /// Until `job` has run, the thread also schedules `job` in each turn.
    #[derive(Debug)]
    struct Slow {
        queue: Queue,
        pool: Arc<Pool>,
        job: Arc<Job>,
        clock: Arc<Quick>,
    }

    /// A job that notes how much room the pool has when it runs.
    #[derive(Debug)]
    struct Job {
        item: Item<Job>,
        pool: Arc<Pool>,
        room: OnceLock<u32>,
    }

    has_item!(Job, item);

    impl Work for Job {
        type Pointer = Arc<Job>;

        fn run(this: Arc<Job>) {
            let _ = this.room.set(this.pool.free_pages());
        }
    }

    impl Discarders for Slow {
        fn queue(&self) -> &Queue {
            &self.queue
        }

        fn with_mover(&self, of: &mut dyn FnMut(&mut Mover)) {
            if self.job.room.get().is_none() {
                self.queue.schedule(&self.job);
            }
            self.clock.sleep(TURN);
            of(&mut self.pool.mover().expect("a lane"));
        }

        fn is_stopping(&self) -> bool {
            false
        }

        fn clock(&self) -> &dyn Clock {
            &*self.clock
        }
    }

    #[test]
    fn another_job_runs_before_a_long_removal_ends() {
        let config = Config { pages: 3 * PAGES_AT_ONCE, lanes: 1, depth: 4 };
        let host = Host::new(config.slots()).expect("memory");
        let pool = Pool::create(config, vec![Arc::new(host)]).expect("a pool");
        let volume = pool.volume(config.pages).expect("room");
        let removal = volume.shrink(0, |_| Ok(())).expect("nobody has it");
        let queue = Queue::builder().name("weir-worker").shards(1).start().expect("a thread");
        let job = Arc::new(Job { item: Item::new(), pool: Arc::clone(&pool), room: OnceLock::new() });
        let slow = Slow { queue, pool: Arc::clone(&pool), job: Arc::clone(&job), clock: Quick::new() };
        assert!(discard(Arc::new(slow), removal, &mut |_| {}).expect("it ends").is_none());
        assert_eq!((job.room.get(), pool.free_pages()), (Some(&0), 3 * PAGES_AT_ONCE));
    }
}
