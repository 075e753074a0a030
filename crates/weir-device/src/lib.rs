//! The interface between page devices and their users.
//!
//! A [`PageDevice`] is a row of numbered pages that threads share. Each thread has a [`PageLane`]
//! of its own. Through its lane the thread reads, writes, discards, zeroes and flushes pages in
//! batches, each operation under a [`Ticket`]. No operation waits. Its steps are these:
//!
//! 1. An operation returns [`Progress::Done`] if it was done at once, else [`Progress::Queued`].
//! 2. [`submit`](PageLane::submit) starts the queued operations. If no operation is queued or in
//!    flight, it ends the present batch.
//! 3. [`poll`](PageLane::poll) hands over finished operations. Only `poll` is told the time.
//!
//! A device may stand on another device. Its lane then has a lane of the other device, and passes
//! on operations that it does not change. A lane never sleeps and reads no clock. It names the
//! descriptors that wake its owner ([`wake_fds`](PageLane::wake_fds)). It also tells whether an
//! operation is under way that no descriptor announces ([`must_poll`](PageLane::must_poll)).

mod word;

pub use word::{ANSWER_WITHIN, Done, Fault, POLL_EVERY, Progress, Ticket};

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;
use weir_core::{PageBytes, PageNo};

/// Largest number of descriptors by which a lane can wake its owner.
pub const WAKE_FDS_MAX: usize = 16;

/// A row of numbered pages.
pub trait PageDevice: Send + Sync + fmt::Debug {
    /// A lane: one thread's access to the device.
    type Lane: PageLane;
    /// The error when a lane could not be opened.
    type Error: std::error::Error + Send + Sync + 'static;

    /// The device's size in pages.
    fn pages(&self) -> u32;

    /// Opens a lane for one thread. This call allocates all the memory that the lane ever uses.
    ///
    /// # Errors
    /// Fails when there is no room for one more lane, or no memory for it.
    fn open(self: &Arc<Self>) -> Result<Self::Lane, Self::Error>;
}

/// A lane: one thread's access to a page device.
///
/// Operations that are in flight together have no order. A batch lasts from the first operation to
/// the [`submit`](PageLane::submit) that finds nothing in flight. End it before you wait for
/// anything.
pub trait PageLane: Send {
    /// The guard that keeps pages in place; see [`pin`](PageLane::pin).
    type Guard<'a>: PageGuard
    where
        Self: 'a;

    /// The device's size in pages.
    fn pages(&self) -> u32;

    /// Announces a batch, so that the device can choose a way to do it before the first operation.
    /// This is only a hint: other operations may follow, and announced ones may be missing. A
    /// device without a use for it does not run the iterator.
    fn announce(&mut self, _coming: impl Iterator<Item = Coming>) {}

    /// Reads a page. With [`Progress::Done`] `out` holds the page. With [`Progress::Queued`] `out`
    /// is unchanged, and the page comes with the completion. Every page that is handed over has
    /// been verified.
    fn read(&mut self, ticket: Ticket, page: PageNo, out: &mut PageBytes) -> Progress;

    /// Reads pages from `first` on into `out`, as far as it can without a wait. Returns the number
    /// of pages read. Read the other pages by [`read`](PageLane::read).
    fn read_run(&mut self, first: PageNo, out: &mut [PageBytes]) -> usize;

    /// Begins to read up to `count` pages from `first` on, as one operation if that is cheaper.
    /// Returns the number of pages begun. Read the others by [`read`](PageLane::read). Each page
    /// has its own completion, with tickets from `ticket` on.
    fn queue_reads(&mut self, _ticket: Ticket, _first: PageNo, _count: usize) -> usize {
        0
    }

    /// Writes a whole page. `bytes` may be reused as soon as this returns.
    fn write(&mut self, ticket: Ticket, page: PageNo, bytes: &PageBytes) -> Progress;

    /// Writes `bytes` into a page from byte `offset` on, atomically. No other write of the page
    /// comes between, so the rest of the page keeps the latest content.
    fn write_part(&mut self, ticket: Ticket, page: PageNo, offset: usize, bytes: &[u8]) -> Progress;

    /// Writes `pages` to page `first` and the pages after it. Stops before the first page that it
    /// cannot write without a wait. Returns the number of pages written. Write the other pages by
    /// [`write`](PageLane::write).
    fn write_run(&mut self, first: PageNo, pages: &[PageBytes]) -> usize;

    /// Begins to write `pages` to page `first` and the pages after it, as one operation if that is
    /// cheaper. Returns the number of pages begun, from the first on. Write the others by
    /// [`write`](PageLane::write). All pages that were begun have one completion together.
    fn queue_writes(&mut self, _ticket: Ticket, _first: PageNo, _pages: &[PageBytes]) -> usize {
        0
    }

    /// Whether the lane has [`discard`](PageLane::discard) and [`zero`](PageLane::zero). If it has
    /// not, nobody calls them, and a request to discard or to zero is refused.
    const CLEARS: bool = true;

    /// Whether [`flush`](PageLane::flush) has anything to wait for.
    const FLUSHES: bool = false;

    /// Discards pages `first..first + count`: they read as zeros, and take no room. The call's time
    /// grows with `count`.
    fn discard(&mut self, _first: PageNo, _count: u32) {}

    /// Makes pages `first..first + count` zeros. With `holes` they then count as discarded,
    /// otherwise as written. In both cases the call itself counts as a write of these pages. Its
    /// time grows with `count`.
    fn zero(&mut self, _first: PageNo, _count: u32, _holes: bool) {}

    /// Completes once every write that any lane acknowledged before is safe, as far as the device
    /// can make it safe.
    fn flush(&mut self, ticket: Ticket) -> Progress;

    /// Makes a guard that keeps pages in place, to read them where they lie. It holds back slots
    /// that are freed meanwhile, so keep it for a millisecond or two at most.
    fn pin(&mut self) -> Self::Guard<'_>;

    /// Calls `whose` with the ticket of each write under way, and gives up those for which it
    /// returns true. They take no effect from here on, and end with [`Fault::Forsaken`].
    fn forsake(&mut self, whose: impl Fn(Ticket) -> bool);

    /// From here on, or no longer, a write takes no effect before the next poll, even if it could
    /// do so at once. The owner of writes that have waited looks for their client before that poll.
    /// It [forsakes](PageLane::forsake) them if the client has gone. A device whose writes cannot
    /// be stopped does nothing here.
    fn hold(&mut self, _holds: bool) {}

    /// Whether the page may have content. A page without content reads as zeros, and takes no room
    /// in a store.
    fn mapped(&self, _page: PageNo) -> bool {
        true
    }

    /// Whether the page is known to read as zeros, without a look into a store.
    fn known_zero(&self, page: PageNo) -> bool;

    /// Starts the queued operations. If no operation is queued or in flight, ends the present
    /// batch.
    fn submit(&mut self);

    /// Hands over every finished operation. Never waits. Takes `now` for the present time, and
    /// reads no clock.
    fn poll(&mut self, now: Instant, done: &mut dyn FnMut(Done<'_>));

    /// Number of operations that were queued and not yet handed over.
    fn in_flight(&self) -> usize;

    /// Descriptors that become readable when [`poll`](PageLane::poll) has something to hand over:
    /// at most [`WAKE_FDS_MAX`].
    fn wake_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>>;

    /// Whether an operation is in flight that no descriptor announces, so that the lane's owner
    /// must poll again soon.
    fn must_poll(&self) -> bool;
}

/// A guard: as long as it lives, pages that [`view`](PageGuard::view) shows stay in place.
pub trait PageGuard {
    /// Reads the page without I/O. If the result holds the page's bytes, they have been verified.
    fn view(&self, page: PageNo) -> View<'_>;

    /// Prefetches a page for a coming [`view`](PageGuard::view), one or two pages ahead.
    fn prefetch(&self, _page: PageNo) {}

    /// Adds `pages` to the device's count of reads, for pages that this guard was asked to show.
    /// `faults` of them could not be read.
    fn count_reads(&self, _pages: u64, _faults: u64) {}
}

/// The result of a read without I/O.
pub enum View<'a> {
    /// The page's bytes in the memory where the device keeps them, verified.
    Bytes(&'a PageBytes),
    /// Every 32-bit word of the page has this value.
    Fill(u32),
    /// The page lies in a store, and must be read by [`PageLane::read`].
    Elsewhere,
    /// The page cannot be read.
    Fault(Fault),
}

/// One announcement about a batch: a run of pages to read, or a number of pages to write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Coming {
    /// The lane will read pages from this page number on, as many as the second value says.
    Reads(PageNo, u32),
    /// The lane will write as many pages as this value says.
    Writes(u32),
}
