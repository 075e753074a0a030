//! The seam between what keeps pages and what asks for them.
//!
//! A [`PageDevice`] is a row of numbered pages, shared by threads. Each thread has a [`PageLane`]
//! of its own, by which it reads, writes, discards, zeroes and flushes pages in batches, each
//! operation under a [`Ticket`]. No operation waits:
//!
//! 1. An operation answers [`Progress::Done`] where it could be done at once, else
//!    [`Progress::Queued`].
//! 2. [`submit`](PageLane::submit) starts what was queued, and ends the batch where nothing is left
//!    in flight.
//! 3. [`poll`](PageLane::poll) hands over what has finished. Time enters here alone.
//!
//! A device may stand on another: its lane holds one of the other's and passes on what it does not
//! change. So a lane never sleeps and reads no clock. It says by which descriptors it wakes its
//! owner ([`wake_fds`](PageLane::wake_fds)), and whether something is under way that none of them
//! announces ([`must_poll`](PageLane::must_poll)).

mod word;

pub use word::{ANSWER_WITHIN, Done, Fault, POLL_EVERY, Progress, Ticket};

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;
use weir_core::{PageBytes, PageNo};

/// Descriptors that a lane names at most.
pub const WAKE_FDS_MAX: usize = 16;

/// A row of numbered pages.
pub trait PageDevice: Send + Sync + fmt::Debug {
    /// A thread's way into it.
    type Lane: PageLane;
    /// Why a lane could not be opened.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Opens a lane for one thread. It takes all its memory now.
    ///
    /// # Errors
    /// When there is no room for one more, or no memory for it.
    fn open(self: &Arc<Self>) -> Result<Self::Lane, Self::Error>;
}

/// One thread's way into a page device.
///
/// Operations that are in flight together have no order. From the first operation to the
/// [`submit`](PageLane::submit) that finds nothing in flight is one batch: end it before you wait
/// for anything.
pub trait PageLane: Send {
    /// Keeps pages in place; see [`pin`](PageLane::pin).
    type Guard<'a>: PageGuard
    where
        Self: 'a;

    /// The device's size in pages.
    fn pages(&self) -> u32;

    /// Announces a batch, so that the device can choose its way before the first operation. A hint:
    /// nothing has to be announced that will be done, nor done that was announced. A device that
    /// does not heed it leaves the iterator alone.
    fn announce(&mut self, _coming: impl Iterator<Item = Coming>) {}

    /// Reads a page. With [`Progress::Done`] `out` holds it; with [`Progress::Queued`] `out` is
    /// untouched, and the page comes with the completion. What is handed out has been verified.
    fn read(&mut self, ticket: Ticket, page: PageNo, out: &mut PageBytes) -> Progress;

    /// Reads as many pages from `first` on into `out` as it can at once; returns how many. The
    /// others are for [`read`](PageLane::read).
    fn read_run(&mut self, first: PageNo, out: &mut [PageBytes]) -> usize;

    /// Begins to read up to `count` pages from `first` on, as one operation where that is cheaper.
    /// Returns how many; the others are for [`read`](PageLane::read). Each comes with a completion
    /// of its own, with tickets from `ticket` on.
    fn queue_reads(&mut self, _ticket: Ticket, _first: PageNo, _count: usize) -> usize {
        0
    }

    /// Writes a whole page. `bytes` may be reused as soon as this returns.
    fn write(&mut self, ticket: Ticket, page: PageNo, bytes: &PageBytes) -> Progress;

    /// Writes `bytes` into a page from byte `offset` on, atomically: the rest keeps what it holds
    /// when this takes effect.
    fn write_part(&mut self, ticket: Ticket, page: PageNo, offset: usize, bytes: &[u8]) -> Progress;

    /// Writes as many of `pages`, from the first on, as it can at once, to `first` and those after
    /// it; returns how many. The others are for [`write`](PageLane::write).
    fn write_run(&mut self, first: PageNo, pages: &[PageBytes]) -> usize;

    /// Begins to write as many of `pages` to `first` and those after it as are cheaper written as
    /// one operation. Returns how many; the others are for [`write`](PageLane::write). All have one
    /// completion together.
    fn queue_writes(&mut self, _ticket: Ticket, _first: PageNo, _pages: &[PageBytes]) -> usize {
        0
    }

    /// Whether it has [`discard`](PageLane::discard) and [`zero`](PageLane::zero). Without, nobody
    /// calls them, and a request for either is refused.
    const CLEARS: bool = true;

    /// Whether [`flush`](PageLane::flush) has anything to wait for.
    const FLUSHES: bool = false;

    /// Forgets pages `first..first + count`: they read as zeros, and take no room. In time that
    /// grows with `count`.
    fn discard(&mut self, _first: PageNo, _count: u32) {}

    /// Makes pages `first..first + count` zeros that count as written. In time that grows with
    /// `count`.
    fn zero(&mut self, _first: PageNo, _count: u32) {}

    /// Answers when every write that was acknowledged before, by any lane, is as safe as the device
    /// can make it.
    fn flush(&mut self, ticket: Ticket) -> Progress;

    /// Keeps pages in place, to look at them where they lie. It holds back what is freed meanwhile,
    /// so for a millisecond or two at most.
    fn pin(&mut self) -> Self::Guard<'_>;

    /// Gives up the writes under way that `whose` says yes to: they take no effect from here on,
    /// and are handed over with [`Fault::Forsaken`].
    fn forsake(&mut self, whose: impl Fn(Ticket) -> bool);

    /// Whether the page is known to read as zeros without looking for it.
    fn known_zero(&self, page: PageNo) -> bool;

    /// Starts what has been queued, and ends the batch if nothing is in flight.
    fn submit(&mut self);

    /// Hands over every operation that has finished. Never waits, and knows no time but `now`.
    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>));

    /// Operations queued and not yet handed over.
    fn in_flight(&self) -> usize;

    /// Descriptors that become readable when [`poll`](PageLane::poll) has something to hand over:
    /// at most [`WAKE_FDS_MAX`].
    fn wake_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>>;

    /// Whether something is in flight that no descriptor announces, so that its owner must poll
    /// again soon.
    fn must_poll(&self) -> bool;
}

/// Keeps what [`view`](PageGuard::view) shows in place, for as long as it lives.
pub trait PageGuard {
    /// A read of the page without I/O. A page shown as bytes has been verified.
    fn view(&self, page: PageNo) -> View<'_>;

    /// Says that [`view`](PageGuard::view) of this page will follow that of one or two others.
    fn prefetch(&self, _page: PageNo) {}

    /// Counts `pages` pages as read that have been looked at through this guard, `faults` of them
    /// in vain.
    fn count_reads(&self, _pages: u64, _faults: u64) {}
}

/// The result of a read that touches no store, or the store that it must touch.
pub enum View<'a> {
    /// The page, verified, where it lies.
    Bytes(&'a PageBytes),
    /// Every 32-bit word of the page has this value.
    Fill(u32),
    /// It must be read by [`PageLane::read`].
    Elsewhere,
    /// It cannot be read.
    Fault(Fault),
}

/// A part of a batch that is announced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Coming {
    /// So many pages from this one on will be read.
    Reads(PageNo, u32),
    /// So many pages will be written.
    Writes(u32),
}
