//! How fast chunks are emptied: not faster than leaves room for those who use the rest.

use std::time::{Duration, Instant};
use weir_core::PAGE_SIZE;

/// Bytes a second that all threads together move out.
pub const RATE: f64 = 12e9;
/// Being ahead by less is not worth a sleep.
const AHEAD: Duration = Duration::from_micros(100);

/// One thread's pace.
#[derive(Debug)]
pub struct Pace {
    began: Instant,
    moved: u64,
    /// Bytes a second.
    rate: f64,
}

impl Pace {
    /// The pace of one of `threads`.
    pub fn of(threads: usize) -> Self {
        Pace { began: Instant::now(), moved: 0, rate: RATE / threads.max(1) as f64 }
    }

    /// Counts `pages`, and sleeps where they came too early.
    pub fn step(&mut self, pages: u32) {
        self.moved += u64::from(pages) * PAGE_SIZE as u64;
        let due = Duration::from_secs_f64(self.moved as f64 / self.rate);
        let ahead = due.saturating_sub(self.began.elapsed());
        if ahead > AHEAD {
            std::thread::sleep(ahead);
        }
    }
}
