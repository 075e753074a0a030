//! Places that keep pages.
//!
//! A [`Store`] is a row of numbered [`Slot`]s of [`PAGE_SIZE`](weir_core::PAGE_SIZE) bytes. It keeps what it
//! was given and knows nothing of what the pages mean: which page lies in which slot, checksums, and what
//! happens when a store fails are the volume's business.
//!
//! A store is used through [`Lane`]s, one for each thread that uses it. A lane shares no lock with another
//! lane, takes all the memory it needs when it is opened, and never allocates afterwards. Queueing, submission
//! and completion are three steps, so that a batch reaches the device in one go and several stores
//! can work at once:
//!
//! 1. [`Lane::plan`] says what is coming; [`Lane::write`] and [`Lane::read`] queue operations. A store that can
//!    do one at once (memory that the CPU reaches) does it there and answers [`Progress::Done`].
//! 2. [`Lane::submit`] rings the doorbell for what was queued.
//! 3. [`Lane::poll`] hands each finished operation to a callback, with its own result.

#[cfg(feature = "conformance")]
pub mod conformance;
mod error;
mod file;
mod host;
mod open;
mod sim;
mod url;
pub mod vram;

pub use error::OpenError;
pub use file::{FileStore, FileUrl, StripeUrl, is_left_over};
pub use host::Host;
pub use open::{open, open_watched, reopen};
pub use sim::{Damage, Injected, Sim, SimUrl};
pub use url::{StoreUrl, UrlError, UrlProblem};
pub use vram::VramUrl;
pub use weir_device::{ANSWER_WITHIN, Done, Fault, POLL_EVERY, Progress, Ticket};

use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use weir_core::{PageBytes, Slot};

/// A row of slots that keep pages.
pub trait Store: Send + Sync + fmt::Debug {
    /// The store as a URL of the command line, for logs and status: `host:8GiB`, `vram:0`.
    fn name(&self) -> &str;

    /// Slots it has, used or free. Constant while the store is open.
    fn slots(&self) -> u32;

    /// Slots a chunk has: the unit in which [`release`](Store::release) and [`take`](Store::take) move memory.
    /// The last chunk may be shorter.
    fn chunk_slots(&self) -> u32 {
        self.slots()
    }

    /// Opens a lane for one thread, with room for `depth` operations in flight.
    ///
    /// # Errors
    /// When memory for it cannot be had (locked, pinned or on the device).
    fn lane(&self, depth: usize) -> Result<Box<dyn Lane>, OpenError>;

    /// Whether it can be relied on now.
    fn state(&self) -> State {
        State::Online
    }

    /// Gives a chunk's memory back to its owner. The caller has emptied it; what it held reads as a fault from
    /// here on. Slow (milliseconds): call it from a worker.
    ///
    /// # Errors
    /// When the store cannot release memory by parts.
    fn release(&self, _chunk: u32) -> Result<(), Fault> {
        Err(Fault::Unsupported)
    }

    /// How much of each card is left to its owner, `None` for a card that does not say; empty where the store lies on none. Costs
    /// some ten microseconds a card: for a governor that looks a few times a second.
    fn headroom(&self) -> Vec<Option<vram::Headroom>> {
        Vec::new()
    }

    /// Which card a chunk lies on: an index into [`headroom`](Store::headroom).
    fn card(&self, _chunk: u32) -> usize {
        0
    }

    /// The condition of each of its parts that can fail by itself, a card for example; empty where nothing is to be said.
    fn conditions(&self) -> Vec<Condition> {
        Vec::new()
    }

    /// Has `tell` called whenever a part's condition changes, once for each change, by a thread that may wait.
    fn when_changed(&self, _tell: TellChange) {}

    /// What must outlive this process for [`reopen`] to find the pages again; a keeper holds it. Empty where the pages end
    /// with the process.
    fn keepsakes(&self) -> Vec<Keepsake<'_>> {
        Vec::new()
    }

    /// Has all that must outlive this process held by `keep`, and what comes and goes later too. `held`: it holds what there
    /// is now already, from a process before this one.
    ///
    /// # Errors
    /// When it does not hold something.
    fn keep_with(&self, keep: Arc<dyn Keep>, held: bool) -> io::Result<()> {
        let keepsakes = if held { Vec::new() } else { self.keepsakes() };
        keepsakes.iter().try_for_each(|it| keep.hold(&it.name, it.fd, it.is_memory))
    }

    /// What its opening took until the first operation, stage by stage; empty where that is not worth a line.
    fn stages(&self) -> Vec<(&'static str, Duration)> {
        Vec::new()
    }

    /// Calls `tell` once what the store opens behind its first operations is there, or will not come; at once where it is over
    /// already, for each part of it, and never where there is nothing of the kind.
    fn when_joined(&self, _tell: Tell) {}

    /// The process ends because it was told to: what is kept is not wanted any more, and may be cleared with the store.
    fn forget(&self) {}

    /// A descriptor of memory in which slot `n` lies at byte `n * PAGE_SIZE`, to be mapped to read by other processes. `None`
    /// where pages lie otherwise. Reading a slot there is right only while its content stays.
    ///
    /// # Errors
    /// What the system says.
    fn window(&self) -> io::Result<Option<OwnedFd>> {
        Ok(None)
    }

    /// Whether nothing that a process before this one began can still change a slot. A dead process submits nothing more, but
    /// what it had submitted may land later, where there is a device behind it.
    fn is_quiet(&self) -> bool {
        true
    }

    /// Why the kernel must not swap onto it, with the next step; `None` where it may.
    fn unfit_for_swap(&self) -> Option<String> {
        None
    }

    /// Takes memory for a released chunk again. Slow: call it from a worker.
    ///
    /// # Errors
    /// When there is none now.
    fn take(&self, _chunk: u32) -> Result<(), Fault> {
        Err(Fault::Unsupported)
    }
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

/// Who is told how the opening of a store went on; see [`Store::when_joined`].
pub type Tell = Arc<dyn Fn(&Joined) + Send + Sync>;

/// The callback for changes; see [`Store::when_changed`].
pub type TellChange = Arc<dyn Fn(&Condition) + Send + Sync>;

/// How a part of a store is, since when, and why.
#[derive(Clone, PartialEq, Debug)]
pub struct Condition {
    /// Its name: `NVIDIA H200, driver 580.159.04`.
    pub part: String,
    /// Whether it can be relied on.
    pub state: State,
    /// The ways to it that it has now.
    pub ways: Vec<&'static str>,
    /// Each fast way that it has not, and why.
    pub missing: Vec<(&'static str, String)>,
    /// Since when it is so.
    pub since: SystemTime,
    /// The reason for the change; `None`: it was opened.
    pub why: Option<String>,
    /// Another process could reach all that is kept of it.
    pub wants_another_process: bool,
}

/// How what a store opens behind its first operations went.
#[derive(Clone, Debug)]
pub struct Joined {
    /// The store, or the part of it.
    pub store: String,
    /// What each stage took.
    pub stages: Vec<(&'static str, Duration)>,
    /// What is not there, and why.
    pub missing: Option<String>,
    /// Since the opening of the store began.
    pub after: Duration,
}

/// Who holds what must outlive this process. See [`Store::keep_with`].
pub trait Keep: Send + Sync + fmt::Debug {
    /// Holds a descriptor under a name that is unique within the store; a memfd (`is_memory`) mapped and locked.
    ///
    /// # Errors
    /// When it cannot, or is gone.
    fn hold(&self, name: &str, fd: BorrowedFd<'_>, is_memory: bool) -> io::Result<()>;

    /// Hears that memory held under that name has pages again in a range where it had none, so that
    /// they are locked there too.
    ///
    /// # Errors
    /// When it is gone.
    fn took(&self, _name: &str, _offset: u64, _bytes: u64) -> io::Result<()> {
        Ok(())
    }

    /// Closes what it held under that name.
    ///
    /// # Errors
    /// When it is gone.
    fn let_go(&self, name: &str) -> io::Result<()>;
}

/// A piece of a store that a keeper holds across the daemon's death.
#[derive(Debug)]
pub struct Keepsake<'a> {
    /// What it is, unique within the store.
    pub name: String,
    /// Its descriptor.
    pub fd: BorrowedFd<'a>,
    /// Whether it is a memfd, which must be mapped and locked to stay in RAM; else holding it open is enough.
    pub is_memory: bool,
}

/// A store's condition, as status shows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// Takes pages and gives them back.
    Online,
    /// Gives pages back; takes no new ones.
    Draining,
    /// Gone, with all it held: every operation faults.
    Lost,
}

/// One thread's way into a store.
///
/// Operations that are in flight together have no order, whichever lanes they are in: a read beside a write of
/// its slot finds either content or a mixture, and two writes leave either. A caller that cares waits for the first.
/// A dropped lane has no effect any more: what it had in flight has finished, or never will. Only a device that hangs may still write
/// slots whose writes had not [settled](Lane::settled).
pub trait Lane: Send {
    /// Announces a batch, so that the store can choose its path before the first operation of it. Optional.
    fn plan(&mut self, _reads: usize, _writes: usize) {}

    /// Whether [`plan`](Lane::plan) makes a difference, so that callers need not count batches for nothing.
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
    /// While the reference lives, no lane may write the slot and nobody release its chunk. (Reads and
    /// writes through the other calls may race: they copy, and a torn copy fails its checksum.)
    unsafe fn view(&self, _slot: Slot) -> Option<&PageBytes> {
        None
    }

    /// Says that a write of the slot may follow soon, so that memory that the CPU writes can be brought near it. Does
    /// nothing to the slot.
    fn prepare(&self, _slot: Slot) {}

    /// Whether the store has [`write_past_caches`](Lane::write_past_caches).
    fn writes_past_caches(&self) -> bool {
        false
    }

    /// Writes a page into a slot at once and past the caches, in no order: others see it after [`settle`](Lane::settle). For
    /// long runs of pages.
    ///
    /// # Errors
    /// As a completed [`write`](Lane::write); `Unsupported` where the store has no such way.
    fn write_past_caches(&mut self, _slot: Slot, _page: &PageBytes) -> Result<(), Fault> {
        Err(Fault::Unsupported)
    }

    /// Waits until what was [written past the caches](Lane::write_past_caches) is there for everybody.
    fn settle(&mut self) {}

    /// Starts everything queued since the last call.
    fn submit(&mut self) {}

    /// Hands over every operation that has finished, in any order. Never waits, and knows no time but `now`. An operation's time runs from
    /// the first poll after its submission: one that has not finished within [`ANSWER_WITHIN`] is handed over with [`Fault::Timeout`]. If it is a write, it may still change its slot until
    /// [`settled`](Lane::settled) names it.
    fn poll(&mut self, _now: Instant, _done: &mut dyn FnMut(Done<'_>)) {}

    /// Names the slots of writes that were handed over with [`Fault::Timeout`] and have ended since, as the last poll found. Nobody
    /// else may use such a slot before.
    fn settled(&mut self, _free: &mut dyn FnMut(Slot)) {}

    /// Operations started or queued and not yet handed over.
    fn in_flight(&self) -> usize {
        0
    }

    /// Becomes readable when [`poll`](Lane::poll) has something to hand over. `None`: the thread must poll.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
