//! The time limit of a lane's operations.

use std::time::{Duration, Instant};

/// The clocks of a lane's operations, which have numbers. When the time of an operation is over,
/// the lane tells its caller of a timeout. From then on the operation counts as late, until the
/// device has ended it.
#[derive(Debug)]
pub struct Lateness {
    /// The time that the device has for an operation.
    pub limit: Duration,
    clocks: Box<[Clock]>,
    /// Operations that were submitted since the last poll. Their time limit has not begun.
    unstamped: Vec<usize>,
    /// The earliest time at which an operation under way reaches its limit.
    due: Option<Instant>,
    late: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Clock {
    /// The operation was not submitted, or no poll has seen it yet.
    Rests,
    /// The time of the first poll after the operation was submitted.
    Since(Instant),
    /// The caller was told that the operation has timed out, while the device still has it.
    Late,
}

impl Lateness {
    /// Clocks for operations `0..depth`.
    pub fn new(depth: usize, limit: Duration) -> Self {
        let clocks = vec![Clock::Rests; depth].into();
        Lateness { limit, clocks, unstamped: Vec::with_capacity(depth), due: None, late: 0 }
    }

    /// Notes that an operation was submitted. Its time begins at the next [`stamp`](Self::stamp).
    pub fn submitted(&mut self, operation: usize) {
        self.unstamped.push(operation);
    }

    /// Starts the time limit of operations that were submitted since the last poll.
    pub fn stamp(&mut self, now: Instant) {
        self.unstamped.drain(..).for_each(|operation| self.clocks[operation] = Clock::Since(now));
    }

    /// Calls `late` with each operation whose time is over, once.
    pub fn expire(&mut self, now: Instant, mut late: impl FnMut(usize)) {
        if self.due.is_some_and(|due| now < due) {
            return;
        }
        let mut next = now + self.limit;
        for (operation, clock) in self.clocks.iter_mut().enumerate() {
            let Clock::Since(started) = *clock else { continue };
            if now < started + self.limit {
                next = next.min(started + self.limit);
                continue;
            }
            *clock = Clock::Late;
            self.late += 1;
            late(operation);
        }
        self.due = Some(next);
    }

    /// Whether an operation was answered as timed out, and the device still has it.
    pub fn is_late(&self, operation: usize) -> bool {
        self.clocks[operation] == Clock::Late
    }

    /// Notes that the device has ended an operation. Returns whether it was late.
    pub fn end(&mut self, operation: usize) -> bool {
        let was_late = self.is_late(operation);
        self.clocks[operation] = Clock::Rests;
        self.late -= usize::from(was_late);
        was_late
    }

    /// Number of operations that were answered as timed out, and that the device still has.
    pub fn late(&self) -> usize {
        self.late
    }
}
