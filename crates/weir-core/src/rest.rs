//! Pauses of a thread that waits for another thread.
//!
//! The other thread may take only a microsecond, so the waiting thread looks again at once. But the
//! other thread may also wait for this very processor. `sched_yield` does not help then: a
//! real-time thread that yields still runs before every ordinary one.

use std::time::Duration;

/// Number of looks of a waiting thread before its first nap. Together the looks take a fraction of
/// a millisecond.
const EAGER: u32 = 1000;
/// Length of a waiting thread's naps, once it has looked `EAGER` times.
const NAP: Duration = Duration::from_micros(50);

/// A thread's wait for another thread. Counts how often the thread has looked in vain.
#[derive(Debug, Default)]
pub struct Rest {
    looks: u32,
}

impl Rest {
    /// Pauses until the next look. At first a pause takes some processor cycles. After many looks
    /// it is a nap, in which a thread of lower priority can run.
    pub fn until_next(&mut self) {
        self.until_next_by(std::thread::sleep);
    }

    /// Does the same as [`until_next`](Self::until_next) with the naps of another clock.
    pub fn until_next_by(&mut self, nap: impl FnOnce(Duration)) {
        if self.looks < EAGER {
            self.looks += 1;
            std::hint::spin_loop();
        } else {
            nap(NAP);
        }
    }

    /// Ends the wait, so that the next one begins with short pauses again.
    #[inline]
    pub fn end(&mut self) {
        self.looks = 0;
    }
}
