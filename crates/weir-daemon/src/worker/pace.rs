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

/// Runs a task of a mover, by the machine's clock. Tells `goes_on` how many pages each step moved.
///
/// # Errors
/// Fails with the reason for which the task ended early.
pub fn drive(
    mover: &mut Mover,
    task: Task,
    mut goes_on: impl FnMut(u32) -> bool,
) -> Result<Moved, GiveBackError> {
    let mut rest = Rest::default();
    mover.begin(task)?;
    loop {
        match mover.step(Instant::now()) {
            Step::More { moved } => {
                rest.end();
                if !goes_on(moved) {
                    mover.stop();
                }
            }
            Step::Waits(Awaited::Stores | Awaited::Lanes, _) => rest.until_next(),
            Step::Waits(Awaited::Loans, _) => std::thread::sleep(LOAN_REST),
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
