//! Stores, which keep pages in numbered slots.
//!
//! A [`Store`] is a row of numbered [`Slot`]s of [`PAGE_SIZE`](weir_core::PAGE_SIZE) bytes. It
//! keeps the pages that it is given, and does not know their meaning. The volume handles the rest:
//! which page lies in which slot, checksums, and what happens when a store fails.
//!
//! Threads use a store through [`Lane`]s, one each. A lane shares no lock with another lane, takes
//! all its memory when it is opened, and never allocates afterwards. Queueing, submission and
//! completion are three steps. So a batch reaches the device in one go, and several stores can work
//! at once:
//!
//! 1. [`Lane::plan`] announces a batch; [`Lane::write`] and [`Lane::read`] queue operations. A
//!    store that can do an operation at once (in memory that the CPU reaches) does so and returns
//!    [`Progress::Done`].
//! 2. [`Lane::submit`] starts the queued operations.
//! 3. [`Lane::poll`] hands each finished operation to a callback, with its own result.

#[cfg(feature = "conformance")]
pub mod conformance;
mod error;
mod file;
mod host;
mod lateness;
mod open;
mod reclaim;
mod remote;
mod report;
mod sim;
mod stripe;
mod survive;
mod url;
pub mod vram;

pub use error::{DENIED, OpenError, OpenErrorKind};
pub use file::{FileStore, FileUrl, MemberTraffic, StripeUrl, is_left_over};
pub use host::Host;
pub use lateness::Lateness;
pub use open::{open, open_watched, reopen};
pub use reclaim::{Headroom, Reclaim};
#[cfg(feature = "fuzz")]
pub use remote::fuzz;
pub use remote::{RemoteCounts, RemoteStore, RemoteUrl};
pub use report::{Condition, Joined, Report, Tell, TellChange};
pub use sim::{Damage, Injected, Sim, SimUrl};
pub use stripe::{Deal, Stripe};
pub use survive::{Keep, Survive};
pub use url::{StoreUrl, UrlError, UrlProblem};
pub use vram::VramUrl;
pub use weir_device::{ANSWER_WITHIN, Done, Fault, POLL_EVERY, Progress, Ticket};

use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Instant;
use weir_core::{PageBytes, Slot};

/// A row of slots that keep pages. Its further abilities are found by [`reclaim`](Store::reclaim),
/// [`survive`](Store::survive), [`share`](Store::share) and [`report`](Store::report): each returns
/// `None` if the store lacks it.
///
/// A store has members, each of which fails by itself: a card, a disk, a node. A slot always lies
/// on the same member.
pub trait Store: Send + Sync + fmt::Debug {
    /// The store as a URL of the command line, for logs and status: `host:8GiB`, `vram:0`.
    fn name(&self) -> &str;

    /// Number of slots, used or free. Constant while the store is open, except that a raw disk may
    /// grow ([`FileStore::grow`]).
    fn slots(&self) -> u32;

    /// Opens a lane for one thread, with room for `depth` operations in flight.
    ///
    /// # Errors
    /// Fails when memory for the lane cannot be had (locked, pinned or on the device).
    fn lane(&self, depth: usize) -> Result<Box<dyn Lane>, OpenError>;

    /// Number of members, numbered from 0. Constant while the store is open.
    fn members(&self) -> u32 {
        1
    }

    /// The member on which a slot lies.
    fn member(&self, _slot: Slot) -> u32 {
        0
    }

    /// The state of a member. The volume asks for it at each write, so it must take no longer than
    /// one load from memory.
    fn state(&self, member: u32) -> State;

    /// The reason why the kernel must not swap onto the store, with the next step; `None` if it
    /// may.
    fn unfit_for_swap(&self) -> Option<String>;

    /// The ability to give memory back to its owner.
    fn reclaim(&self) -> Option<&dyn Reclaim> {
        None
    }

    /// The ability to keep pages beyond the process's life. A store without it loses its pages with
    /// the process.
    fn survive(&self) -> Option<&dyn Survive> {
        None
    }

    /// The ability to share its memory with other processes.
    fn share(&self) -> Option<&dyn Share> {
        None
    }

    /// The ability to report its members' conditions.
    fn report(&self) -> Option<&dyn Report> {
        None
    }

    /// Deletes the pages that the store would leave on other machines. Its owner calls this once,
    /// when nobody uses a lane any more.
    fn end(&self) {}
}

/// A store whose memory other processes can map.
pub trait Share {
    /// A descriptor of memory in which slot `n` lies at byte `n * PAGE_SIZE`. Other processes may
    /// map it for reading. A slot read there is right only while its content does not change.
    ///
    /// # Errors
    /// Fails with the system's error.
    fn window(&self) -> io::Result<OwnedFd>;
}

/// The way in which a file's room is prepared before it takes pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Room {
    /// The file system reserves the blocks, but does not write them. So a write never fails because
    /// the disk is full.
    Reserved,
    /// The blocks are written too. Otherwise the first write of each block is a transaction of its
    /// file system, which takes memory. A kernel that swaps cannot afford that.
    Written,
}

/// The present state of a store's member; a later variant is worse. The volume acts on each as
/// follows:
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum State {
    /// The member takes pages and returns them.
    Online,
    /// The member returns pages. It takes new ones only when no online member has a free slot.
    Draining,
    /// The member cannot be reached for now, and still holds its pages. Its operations wait or end
    /// with [`Fault::Timeout`]. Its slots count as room, but it takes no new page.
    Unreachable,
    /// The member is gone, with all pages. Every operation on its slots ends with [`Fault::Lost`],
    /// and its slots no longer count as room.
    Lost,
}

/// A lane: one thread's access to a store.
///
/// Operations that are in flight together have no order, even in different lanes. A read beside a
/// write of its slot finds the old content, the new content or a mixture. Of two writes beside each
/// other, either may be the last. A caller that needs an order waits for the first.
///
/// A dropped lane has no more effect: its operations in flight have finished, or never will. Only a
/// device that hangs may still write slots whose writes had not [settled](Lane::settled).
pub trait Lane: Send {
    /// Announces a batch, so that the store can choose its path before the batch's first operation.
    /// Optional.
    fn plan(&mut self, _reads: usize, _writes: usize) {}

    /// Whether [`plan`](Lane::plan) has an effect. If not, callers need not count the operations of
    /// a batch for it.
    fn heeds_plan(&self) -> bool {
        false
    }

    /// Queues the write of a page into a slot. `page` may be reused as soon as this returns.
    fn write(&mut self, ticket: Ticket, slot: Slot, page: &PageBytes) -> Progress;

    /// Queues the read of a slot. With [`Progress::Done`] the content is in `page`. With
    /// [`Progress::Queued`] `page` is unchanged, and the content comes with the completion.
    fn read(&mut self, ticket: Ticket, slot: Slot, page: &mut PageBytes) -> Progress;

    /// The slot's content where it lies, for stores whose memory the CPU reads as fast as its own
    /// RAM.
    ///
    /// # Safety
    /// While the reference lives, no lane may write the slot, and its chunk must not be released.
    /// (Reads and writes by other calls may race: they copy, and a torn copy fails its checksum.)
    unsafe fn view(&self, _slot: Slot) -> Option<&PageBytes> {
        None
    }

    /// Prefetches a slot's memory, because a write may follow soon. Does nothing if the CPU does
    /// not write that memory itself, and never changes the slot.
    fn prepare(&self, _slot: Slot) {}

    /// Largest number of adjacent slots that one read or write may name now; 0 if each slot needs
    /// an operation of its own.
    fn run_room(&self, _write: bool) -> usize {
        0
    }

    /// Queues the read of `count` slots from `first` on, at most [`run_room`](Lane::run_room), as
    /// one operation. Returns the number of slots in the operation, counted from `first`. If it is
    /// 0, nothing was queued, and [`read`](Lane::read) returns the reason. Each page has a
    /// completion of its own, in the order of the slots, all with this ticket.
    fn read_run(&mut self, _ticket: Ticket, _first: Slot, _count: usize) -> usize {
        0
    }

    /// Queues the write of `pages` into the slots from `first` on as one operation, with the rules
    /// of [`read_run`](Lane::read_run).
    fn write_run(&mut self, _ticket: Ticket, _first: Slot, _pages: &[PageBytes]) -> usize {
        0
    }

    /// Returns two numbers of writes to queue: before the next [`submit`](Lane::submit), and before
    /// each later one. With these numbers, a write costs the least. `None`: the numbers make no
    /// difference.
    fn best_runs(&self) -> Option<(usize, usize)> {
        None
    }

    /// Whether the store has [`write_past_caches`](Lane::write_past_caches).
    fn writes_past_caches(&self) -> bool {
        false
    }

    /// Writes a page into a slot at once, past the caches. Other threads see the pages in any
    /// order, and all of them after [`settle`](Lane::settle). It is for long runs of pages.
    ///
    /// # Errors
    /// Fails as a completed [`write`](Lane::write) does, and with `Unsupported` if the store has no
    /// write past the caches.
    fn write_past_caches(&mut self, _slot: Slot, _page: &PageBytes) -> Result<(), Fault> {
        Err(Fault::Unsupported)
    }

    /// Waits until pages that were [written past the caches](Lane::write_past_caches) are visible
    /// to every thread.
    fn settle(&mut self) {}

    /// Tells the store that nobody needs the slot's content until the slot is written again. So a
    /// store that moves pages need not move this one. Until the next write, a read of the slot
    /// finds the old content, or zeros. A write that is under way may take effect in spite of this
    /// call, and a read that is under way may fail.
    fn discard(&mut self, _slot: Slot) {}

    /// Queues a flush. After it, every write that any lane completed before is safe against a power
    /// failure. Only one may be under way. It takes as long as the device needs: the limit
    /// [`ANSWER_WITHIN`] does not apply. Memory has nothing to flush.
    fn flush(&mut self, _ticket: Ticket) -> Progress {
        Progress::Done(Ok(()))
    }

    /// Starts the operations queued since the last call.
    fn submit(&mut self) {}

    /// Hands over every finished operation, in any order. Never waits, and reads no clock: `now` is
    /// the present time. The time limit of an operation begins at the first poll after its
    /// submission. If the operation has not finished within [`ANSWER_WITHIN`], it ends with
    /// [`Fault::Timeout`]. A write that ended so may still change its slot until
    /// [`settled`](Lane::settled) names the slot. A lane with nothing in flight may not be polled
    /// until it is given another operation.
    fn poll(&mut self, _now: Instant, _done: &mut dyn FnMut(Done<'_>)) {}

    /// Names the slots of writes that ended with [`Fault::Timeout`] and have been completed since,
    /// as the last poll found. Until a slot is named, no other page may use it.
    fn settled(&mut self, _free: &mut dyn FnMut(Slot)) {}

    /// Number of operations that were queued or started, and not yet handed over.
    fn in_flight(&self) -> usize {
        0
    }

    /// A descriptor that becomes readable when [`poll`](Lane::poll) has something to hand over.
    /// `None`: the thread must poll.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
