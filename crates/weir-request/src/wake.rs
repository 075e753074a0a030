//! The one place where a thread waits for a lane.

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use std::os::fd::BorrowedFd;
use std::time::Duration;
use weir_device::{POLL_EVERY, PageLane, WAKE_FDS_MAX};

/// How long a thread sleeps at most that descriptors wake earlier.
const LONGEST: Timespec = Timespec { tv_sec: 0, tv_nsec: POLL_EVERY.as_nanos() as i64 };

/// Looks in vain without a nap: a fraction of a millisecond.
const LOOKS: u32 = 1000;

/// How long a thread sleeps that has looked often enough. `sched_yield` would not do: a real-time thread that yields comes before
/// every ordinary one, which may be what it waits for.
const NAP: Duration = Duration::from_micros(50);

/// Rests of a thread between its looks for what no descriptor announces.
#[derive(Debug, Default)]
pub struct Rest {
    looks: u32,
}

impl Rest {
    /// Rests until the next look: for some processor cycles, and after many looks in vain for a nap.
    pub fn until_next(&mut self) {
        if self.looks < LOOKS {
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

    /// Waits until `lane` may have something to hand over, or `also` is readable; for [`POLL_EVERY`] at most.
    ///
    /// # Errors
    /// What `poll(2)` says, but for a signal: an interrupted sleep is a short one.
    pub fn wait<L: PageLane>(&mut self, lane: &L, also: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
        if lane.must_poll() {
            self.until_next();
            return Ok(());
        }
        let mut wake = also.into_iter().chain(lane.wake_fds());
        let Some(first) = wake.next() else {
            self.until_next();
            return Ok(());
        };
        let mut fds: [PollFd<'_>; 1 + WAKE_FDS_MAX] =
            std::array::from_fn(|_| PollFd::from_borrowed_fd(first, PollFlags::IN));
        let mut count = 1;
        for (slot, fd) in fds[1..].iter_mut().zip(wake) {
            *slot = PollFd::from_borrowed_fd(fd, PollFlags::IN);
            count += 1;
        }
        match rustix::event::poll(&mut fds[..count], Some(&LONGEST)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno),
        }
    }
}
