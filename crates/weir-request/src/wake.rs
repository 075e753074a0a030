//! The functions that wait for a lane.

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use std::os::fd::BorrowedFd;
use std::time::Duration;
use weir_core::Rest;
use weir_device::{POLL_EVERY, PageLane, WAKE_FDS_MAX};

/// Waits until `lane` may have completions or `also` is readable, for [`POLL_EVERY`] at most.
/// `rest` sets the pauses if no descriptor announces the lane's completions.
///
/// # Errors
/// Fails as [`sleep`] does.
pub fn wait<L: PageLane>(rest: &mut Rest, lane: &L, also: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    wait_with(rest, lane, also.map(readable))
}

/// Waits until `lane` may have completions or `to` takes more bytes, for [`POLL_EVERY`] at most.
///
/// # Errors
/// Fails as [`sleep`] does.
pub fn wait_for_room<L: PageLane>(rest: &mut Rest, lane: &L, to: BorrowedFd<'_>) -> Result<(), Errno> {
    wait_with(rest, lane, Some(PollFd::from_borrowed_fd(to, PollFlags::OUT)))
}

fn wait_with<L: PageLane>(rest: &mut Rest, lane: &L, also: Option<PollFd<'_>>) -> Result<(), Errno> {
    let nobody_wakes = also.is_none() && lane.wake_fds().next().is_none();
    if lane.must_poll() || nobody_wakes {
        rest.until_next();
        return Ok(());
    }
    sleep_with(lane, also, Some(POLL_EVERY))
}

/// Sleeps until a descriptor of `lane`, or `also`, is readable. Sleeps for `most` at most, and for
/// [`POLL_EVERY`] at most while the lane has operations in flight.
///
/// # Errors
/// Fails with the error of `poll(2)`. A signal is no error: it only makes the sleep shorter.
pub fn sleep<L: PageLane>(
    lane: &L,
    also: Option<BorrowedFd<'_>>,
    most: Option<Duration>,
) -> Result<(), Errno> {
    sleep_with(lane, also.map(readable), most)
}

fn sleep_with<L: PageLane>(lane: &L, also: Option<PollFd<'_>>, most: Option<Duration>) -> Result<(), Errno> {
    let mut wake = also.into_iter().chain(lane.wake_fds().map(readable));
    let Some(first) = wake.next() else { return Ok(()) };
    let mut fds: [PollFd<'_>; 1 + WAKE_FDS_MAX] = std::array::from_fn(|_| first.clone());
    let mut count = 1;
    for (slot, fd) in fds[1..].iter_mut().zip(wake) {
        *slot = fd;
        count += 1;
    }
    let answer = (lane.in_flight() > 0).then_some(POLL_EVERY);
    let most = most.into_iter().chain(answer).min();
    let most =
        most.map(|most| Timespec { tv_sec: most.as_secs() as i64, tv_nsec: most.subsec_nanos().into() });
    match rustix::event::poll(&mut fds[..count], most.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno),
    }
}

fn readable(fd: BorrowedFd<'_>) -> PollFd<'_> {
    PollFd::from_borrowed_fd(fd, PollFlags::IN)
}
