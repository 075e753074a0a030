//! Rests of a thread that waits for another.
//!
//! The other may take a microsecond, so it looks again at once; or the thread that must
//! bring it may wait for this very processor. `sched_yield` does not help there: a real-time thread
//! that yields comes before every ordinary one.

use std::time::Duration;

/// Looks in vain without a nap: a fraction of a millisecond.
const EAGER: u32 = 1000;
/// How long a thread sleeps that has looked often enough.
const NAP: Duration = Duration::from_micros(50);

/// Counts the looks in vain of one wait.
#[derive(Debug, Default)]
pub struct Rest {
    looks: u32,
}

impl Rest {
    /// Rests until the next look: for some processor cycles at first, and once many were in vain
    /// for a nap, in which a thread of a lower rank runs.
    pub fn until_next(&mut self) {
        if self.looks < EAGER {
            self.looks += 1;
            std::hint::spin_loop();
        } else {
            std::thread::sleep(NAP);
        }
    }

    /// The wait is over.
    #[inline]
    pub fn end(&mut self) {
        self.looks = 0;
    }
}
