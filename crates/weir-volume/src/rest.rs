//! Rests of a thread that waits for another.
//!
//! The other may take a microsecond, so it looks again at once; or the thread that must
//! bring it may wait for this very processor. `sched_yield` does not help there: a real-time thread
//! that yields comes before every ordinary one.

use std::time::Duration;

/// How long a thread sleeps that has looked often enough.
const NAP: Duration = Duration::from_micros(50);

/// Counts the looks in vain of one wait.
#[derive(Debug, Default)]
pub(crate) struct Rest {
    looks: u32,
}

impl Rest {
    /// Rests until the next look: for some processor cycles up to `eager` times, then for a nap.
    pub fn until_next(&mut self, eager: u32) {
        if self.looks < eager {
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
