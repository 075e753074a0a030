//! Places that keep pages.
//!
//! A [`Store`] is a row of numbered [`Slot`]s of [`PAGE_SIZE`](weir_core::PAGE_SIZE) bytes. It
//! keeps what it was given and knows nothing of what the pages mean: which page lies in which slot,
//! checksums, and what happens when a store fails are the volume's business.
//!
//! A store is used through [`Lane`]s, one for each thread that uses it. A lane shares no lock with
//! another lane, takes all the memory it needs when it is opened, and never allocates afterwards.
//! Queueing, submission and completion are three steps, so that a batch reaches the device in one
//! go and several stores can work at once:
//!
//! 1. [`Lane::plan`] says what is coming; [`Lane::write`] and [`Lane::read`] queue operations. A
//!    store that can do one at once (memory that the CPU reaches) does it there and answers
//!    [`Progress::Done`].
//! 2. [`Lane::submit`] rings the doorbell for what was queued.
//! 3. [`Lane::poll`] hands each finished operation to a callback, with its own result.

#[cfg(feature = "conformance")]
pub mod conformance;
mod error;
mod file;
mod host;
mod open;
mod reclaim;
mod report;
mod sim;
mod stripe;
mod survive;
mod url;
pub mod vram;

pub use error::{OpenError, OpenErrorKind};
pub use file::{FileStore, FileUrl, MemberTraffic, StripeUrl, is_left_over};
pub use host::Host;
pub use open::{open, open_watched, reopen};
pub use reclaim::{Headroom, Reclaim};
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

/// A row of slots that keep pages. What it can do besides is found by [`reclaim`](Store::reclaim),
/// [`survive`](Store::survive), [`share`](Store::share) and [`report`](Store::report): `None` there
/// means that it cannot.
///
/// A store has members that fail each by itself: a card, a disk, a node. A slot lies on one member
/// for good.
pub trait Store: Send + Sync + fmt::Debug {
    /// The store as a URL of the command line, for logs and status: `host:8GiB`, `vram:0`.
    fn name(&self) -> &str;

    /// Slots it has, used or free. Constant while the store is open.
    fn slots(&self) -> u32;

    /// Opens a lane for one thread, with room for `depth` operations in flight.
    ///
    /// # Errors
    /// When memory for it cannot be had (locked, pinned or on the device).
    fn lane(&self, depth: usize) -> Result<Box<dyn Lane>, OpenError>;

    /// How many members it has, numbered from 0. Constant while the store is open.
    fn members(&self) -> u32 {
        1
    }

    /// The member on which a slot lies.
    fn member(&self, _slot: Slot) -> u32 {
        0
    }

    /// The state of a member. Asked for each write: it costs a load.
    fn state(&self, member: u32) -> State;

    /// Why the kernel must not swap onto it, with the next step; `None` where it may.
    fn unfit_for_swap(&self) -> Option<String>;

    /// Giving memory back to its owner.
    fn reclaim(&self) -> Option<&dyn Reclaim> {
        None
    }

    /// Keeping pages beyond the process. A store that has not this survives nothing.
    fn survive(&self) -> Option<&dyn Survive> {
        None
    }

    /// Showing its memory to other processes.
    fn share(&self) -> Option<&dyn Share> {
        None
    }

    /// Telling how it is.
    fn report(&self) -> Option<&dyn Report> {
        None
    }
}

/// A store whose memory other processes can map.
pub trait Share {
    /// A descriptor of memory in which slot `n` lies at byte `n * PAGE_SIZE`, to be mapped to read
    /// by other processes. Reading a slot there is right only while its content stays.
    ///
    /// # Errors
    /// What the system says.
    fn window(&self) -> io::Result<OwnedFd>;
}

/// How the room of a file is made ready before it takes pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Room {
    /// Its blocks are set aside, so that the device never meets a full disk.
    Reserved,
    /// They are written too: else the first write of each is a transaction of its file system,
    /// which takes memory. A kernel that swaps needs it so.
    Written,
}

/// How a member of a store is now; a later variant is worse. What a volume does with each:
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum State {
    /// It takes pages and gives them back.
    Online,
    /// It gives pages back. New pages go there only when no member that is online has a slot.
    Draining,
    /// It cannot be reached for now, and keeps what it holds. Its operations wait or end with
    /// [`Fault::Timeout`]. Its pages stay its pages, its slots count as room, and no new page goes
    /// there.
    Unreachable,
    /// It is gone, with all it held: every operation on its slots is a [`Fault::Lost`], and its
    /// slots are no room any more.
    Lost,
}

/// One thread's way into a store.
///
/// Operations that are in flight together have no order, whichever lanes they are in: a read beside
/// a write of its slot finds either content or a mixture, and two writes leave either. A caller
/// that cares waits for the first. A dropped lane has no effect any more: what it had in flight has
/// finished, or never will. Only a device that hangs may still write slots whose writes had not
/// [settled](Lane::settled).
pub trait Lane: Send {
    /// Announces a batch, so that the store can choose its path before the first operation of it.
    /// Optional.
    fn plan(&mut self, _reads: usize, _writes: usize) {}

    /// Whether [`plan`](Lane::plan) makes a difference, so that callers need not count batches for
    /// nothing.
    fn heeds_plan(&self) -> bool {
        false
    }

    /// Queues the write of a page into a slot. `page` may be reused as soon as this returns.
    fn write(&mut self, ticket: Ticket, slot: Slot, page: &PageBytes) -> Progress;

    /// Queues the read of a slot. With [`Progress::Done`] the content is in `page`; with
    /// [`Progress::Queued`] `page` is untouched and the content comes with the completion.
    fn read(&mut self, ticket: Ticket, slot: Slot, page: &mut PageBytes) -> Progress;

    /// The slot's content where it lies, for stores whose memory the CPU reads as fast as its own.
    ///
    /// # Safety
    /// While the reference lives, no lane may write the slot and nobody release its chunk. (Reads
    /// and writes through the other calls may race: they copy, and a torn copy fails its checksum.)
    unsafe fn view(&self, _slot: Slot) -> Option<&PageBytes> {
        None
    }

    /// Says that a write of the slot may follow soon, so that memory that the CPU writes can be
    /// brought near it. Does nothing to the slot.
    fn prepare(&self, _slot: Slot) {}

    /// Pages of slots side by side that one operation may name now, to write or to read; 0 where
    /// each is an operation of its own.
    fn run_room(&self, _write: bool) -> usize {
        0
    }

    /// Queues the read of `count` slots from `first` on, at most [`run_room`](Lane::run_room), as
    /// one operation. Returns how many of them it has taken, from the first on; 0: none, and
    /// [`read`](Lane::read) says why. Each page comes with a completion of its own, in the order of
    /// the slots, all with this ticket.
    fn read_run(&mut self, _ticket: Ticket, _first: Slot, _count: usize) -> usize {
        0
    }

    /// Queues the write of `pages` into the slots from `first` on, likewise.
    fn write_run(&mut self, _ticket: Ticket, _first: Slot, _pages: &[PageBytes]) -> usize {
        0
    }

    /// After how many writes a [`submit`](Lane::submit) is cheapest, and after how many more each
    /// time from then on. `None`: one is as good as another.
    fn best_runs(&self) -> Option<(usize, usize)> {
        None
    }

    /// Whether the store has [`write_past_caches`](Lane::write_past_caches).
    fn writes_past_caches(&self) -> bool {
        false
    }

    /// Writes a page into a slot at once and past the caches, in no order: others see it after
    /// [`settle`](Lane::settle). For long runs of pages.
    ///
    /// # Errors
    /// As a completed [`write`](Lane::write); `Unsupported` where the store has no such way.
    fn write_past_caches(&mut self, _slot: Slot, _page: &PageBytes) -> Result<(), Fault> {
        Err(Fault::Unsupported)
    }

    /// Waits until what was [written past the caches](Lane::write_past_caches) is there for
    /// everybody.
    fn settle(&mut self) {}

    /// Queues a flush: every write that any lane handed over as done before is safe against a power
    /// failure afterwards. One at a time. It takes as long as the device takes: [`ANSWER_WITHIN`]
    /// is not for it. Memory has nothing to flush.
    fn flush(&mut self, _ticket: Ticket) -> Progress {
        Progress::Done(Ok(()))
    }

    /// Starts everything queued since the last call.
    fn submit(&mut self) {}

    /// Hands over every operation that has finished, in any order. Never waits, and knows no time
    /// but `now`. An operation's time runs from the first poll after its submission: one that has
    /// not finished within [`ANSWER_WITHIN`] is handed over with [`Fault::Timeout`]. If it is a
    /// write, it may still change its slot until [`settled`](Lane::settled) names it.
    fn poll(&mut self, _now: Instant, _done: &mut dyn FnMut(Done<'_>)) {}

    /// Names the slots of writes that were handed over with [`Fault::Timeout`] and have ended
    /// since, as the last poll found. Nobody else may use such a slot before.
    fn settled(&mut self, _free: &mut dyn FnMut(Slot)) {}

    /// Operations started or queued and not yet handed over.
    fn in_flight(&self) -> usize {
        0
    }

    /// Becomes readable when [`poll`](Lane::poll) has something to hand over. `None`: the thread
    /// must poll.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
