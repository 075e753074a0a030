//! The speed at which chunks are emptied: it leaves bandwidth for the clients of the other chunks.

use crate::environment::Clock;
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, Rest};
use weir_volume::{Awaited, Driver};

/// Bytes a second that all threads together move out.
pub const RATE: f64 = 12e9;
/// Pause between two passes over a chunk of which a program uses pages in place: each pass goes
/// through the whole chunk.
const LOAN_REST: Duration = Duration::from_millis(1);
/// A thread sleeps only if it is ahead of its pace by more than this.
const AHEAD: Duration = Duration::from_micros(100);

/// A volume counts as in use if it moves more pages a second than this.
const IDLE_PAGES_PER_S: f64 = 5000.0;
/// Pause of work that can wait, while the volume is in use.
pub const REST: Duration = Duration::from_millis(20);

/// Whether a volume that moved this many pages in this time is in use.
pub fn is_in_use(pages: u64, time: Duration) -> bool {
    pages as f64 / time.as_secs_f64().max(1e-3) > IDLE_PAGES_PER_S
}

/// Drives a mover by the machine's clock. `goes_on` gets the pages of each batch, and says whether
/// to go on.
pub fn drive<F: FnMut(u32) -> bool>(goes_on: F) -> Drive<F> {
    Drive { goes_on, rest: Rest::default() }
}

/// Drives a mover by the machine's clock; see [`drive`].
pub struct Drive<F> {
    goes_on: F,
    rest: Rest,
}

impl<F: FnMut(u32) -> bool> Driver for Drive<F> {
    fn now(&mut self) -> Instant {
        Instant::now()
    }

    fn goes_on(&mut self, moved: u32) -> bool {
        self.rest.end();
        (self.goes_on)(moved)
    }

    fn rest(&mut self, awaited: Awaited) {
        match awaited {
            Awaited::Stores | Awaited::Lanes => self.rest.until_next(),
            Awaited::Loans => std::thread::sleep(LOAN_REST),
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

    /// Counts `pages`, and sleeps if they were moved too early.
    pub fn step(&mut self, pages: u32) {
        self.moved += u64::from(pages) * PAGE_SIZE as u64;
        let due = Duration::from_secs_f64(self.moved as f64 / self.rate);
        let ahead = due.saturating_sub(self.clock.now() - self.began);
        if ahead > AHEAD {
            self.clock.sleep(ahead);
        }
    }
}
