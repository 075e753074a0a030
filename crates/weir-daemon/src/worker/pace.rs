//! The speed at which chunks are emptied: it leaves bandwidth for the clients of the other chunks.

use crate::environment::Clock;
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, Rest};
use weir_volume::{Awaited, GiveBackError, Moved, Mover, Step, Task};

/// Largest number of bytes a second that all threads together move out.
pub const RATE: f64 = 12e9;
/// Pause between two passes over a chunk that has pages on loan to a program. Each pass goes
/// through the whole chunk.
const LOAN_REST: Duration = Duration::from_millis(1);
/// A thread sleeps only if it is ahead of its pace by more than this.
const AHEAD: Duration = Duration::from_micros(100);

/// A volume counts as in use if it moves more pages a second than this.
const IDLE_PAGES_PER_S: f64 = 5000.0;
/// While the volume is in use, work that can wait pauses for this long.
pub const REST: Duration = Duration::from_millis(20);

/// Whether a volume that moved this many pages in this time is in use.
pub fn is_in_use(pages: u64, time: Duration) -> bool {
    pages as f64 / time.as_secs_f64().max(1e-3) > IDLE_PAGES_PER_S
}

/// Runs a task of a mover, by `clock`. Tells `goes_on` how many pages each step moved.
///
/// # Errors
/// Fails with the reason for which the task ended early.
pub fn drive(
    mover: &mut Mover,
    clock: &dyn Clock,
    task: Task,
    mut goes_on: impl FnMut(u32) -> bool,
) -> Result<Moved, GiveBackError> {
    let mut rest = Rest::default();
    mover.begin(task)?;
    loop {
        match mover.step(clock.now()) {
            Step::More { moved } => {
                rest.end();
                if !goes_on(moved) {
                    mover.stop();
                }
            }
            Step::Waits(Awaited::Stores | Awaited::Lanes, _) => rest.until_next_by(|nap| clock.sleep(nap)),
            Step::Waits(Awaited::Loans, _) => clock.sleep(LOAN_REST),
            Step::Ended(result) => return result,
        }
    }
}

/// One thread's pace.
#[derive(Debug)]
pub struct Pace<'a> {
    clock: &'a dyn Clock,
    began: Instant,
    moved: u64,
    /// The thread's rate in bytes a second.
    rate: f64,
}

impl<'a> Pace<'a> {
    /// The pace of each of `threads` threads.
    pub fn of(threads: usize, clock: &'a dyn Clock) -> Self {
        Pace { clock, began: clock.now(), moved: 0, rate: RATE / threads.max(1) as f64 }
    }

    /// Counts `pages`. Sleeps if the thread has moved them faster than its rate.
    pub fn step(&mut self, pages: u32) {
        self.moved += u64::from(pages) * PAGE_SIZE as u64;
        let due = Duration::from_secs_f64(self.moved as f64 / self.rate);
        let ahead = due.saturating_sub(self.clock.now() - self.began);
        if ahead > AHEAD {
            self.clock.sleep(ahead);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::tests::Quick;
    use std::sync::Arc;
    use weir_core::PageNo;
    use weir_store::{Host, Progress};
    use weir_volume::{Config, Lane, Loan, Pool, Volume};

    /// The longest wait of a give-back.
    const LANES_WAIT: Duration = Duration::from_secs(10);
    const TICK: Duration = Duration::from_millis(10);

    /// A clock that jumps ahead whenever a thread waits for it, by a tick at least.
    #[derive(Debug)]
    struct Ticking(Arc<Quick>);

    impl Clock for Ticking {
        fn now(&self) -> Instant {
            self.0.now()
        }

        fn sleep(&self, time: Duration) {
            self.0.sleep(time.max(TICK));
        }

        fn wait(&self, fds: &mut [rustix::event::PollFd<'_>], most: Duration) {
            self.0.wait(fds, most.max(TICK));
        }
    }

    /// A volume over two stores of one chunk each, and a lane that has written page 0.
    fn volume() -> (Arc<Volume>, Lane) {
        let config = Config { pages: 64, lanes: 3, depth: 4 };
        let store = || Arc::new(Host::new(config.slots()).expect("memory")) as _;
        let volume = Volume::create(config, vec![store(), store()]).expect("a volume");
        let mut lane = volume.lane().expect("a lane");
        // A page of equal bytes would take no slot.
        let page = std::array::from_fn(|at| at as u8);
        assert_eq!(lane.write(0, PageNo(0), &page), Progress::Done(Ok(())));
        lane.submit();
        (volume, lane)
    }

    /// Gives the first store's chunk back, and returns the time that has passed by its clock.
    fn give_back(pool: &Arc<Pool>) -> (Result<Moved, GiveBackError>, Duration) {
        let clock = Ticking(Quick::new());
        pool.begin_give_back(0, &[0]).expect("the other store has room");
        let mut mover = pool.mover().expect("a lane");
        let result = drive(&mut mover, &clock, Task::GiveBack { store: 0, chunk: 0 }, |_| true);
        (result, clock.0.passed())
    }

    fn ends_in_time((result, passed): (Result<Moved, GiveBackError>, Duration)) {
        assert!(matches!(result, Err(GiveBackError::Busy)), "{result:?}");
        // With another clock among them, far more time passes, or far less.
        assert!((LANES_WAIT..LANES_WAIT + 3 * TICK).contains(&passed), "{passed:?}");
    }

    #[test]
    fn a_give_back_waits_for_a_busy_lane_by_the_clock_of_the_environment() {
        let (volume, mut lane) = volume();
        // The lane's batch goes on, so nobody may take away what it reads.
        assert_eq!(lane.read(0, PageNo(0), &mut [0; PAGE_SIZE]), Progress::Done(Ok(())));
        ends_in_time(give_back(volume.pool()));
        lane.submit();
        let (moved, passed) = give_back(volume.pool());
        assert_eq!((moved.expect("nobody is in the way").pages, passed), (1, Duration::ZERO));
    }

    #[test]
    fn a_give_back_waits_for_a_loan_by_the_clock_of_the_environment() {
        let (volume, mut lane) = volume();
        let (mut lender, _windows) = volume.pool().lender(1, 1).expect("a lender");
        let guard = lane.pin();
        assert!(matches!(guard.lend(PageNo(0), &mut lender), Loan::Lent { .. }));
        drop(guard);
        lane.submit();
        ends_in_time(give_back(volume.pool()));
    }
}
