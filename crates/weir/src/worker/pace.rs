//! How fast chunks are emptied: not faster than leaves room for those who use the rest.

use std::time::{Duration, Instant};
use weir_core::PAGE_SIZE;

/// Bytes a second that all threads together move out.
pub const RATE: f64 = 12e9;
/// Being ahead by less is not worth a sleep.
const AHEAD: Duration = Duration::from_micros(100);

/// The volume is in use where it moves more pages a second.
const IDLE_PAGES_PER_S: f64 = 5000.0;
/// How long what can wait rests where the volume is in use.
pub const REST: Duration = Duration::from_millis(20);

/// Whether a volume that moved so many pages in this time is in use.
pub fn is_in_use(pages: u64, time: Duration) -> bool {
    pages as f64 / time.as_secs_f64().max(1e-3) > IDLE_PAGES_PER_S
}

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
