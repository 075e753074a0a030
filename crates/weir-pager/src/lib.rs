//! The pager keeps this process's anonymous memory in less RAM than that memory would fill.
//!
//! A [`Pager`] is one thread. It registers memory with userfaultfd, and keeps at most a limit of it
//! resident. It moves blocks of 2 MiB out and in by reference (`UFFDIO_MOVE`, Linux 6.8), so a
//! block that is a huge page stays one. Blocks that are not resident lie in a [`Store`]. The kernel
//! tells the thread of every `munmap`, `mremap` and `madvise` in the process. So any allocator may
//! free and move memory without telling the pager.
//!
//! The pager's thread must never wait for itself. So the pager must not manage memory that this
//! thread or its store touches. If the pager manages all of a program's memory
//! ([`Scope::Process`]), its thread needs an allocator of its own; `weir-preload` has one.

mod digest;
mod kernel;
mod ledger;
pub mod link;
mod maps;
mod pager;
mod policy;
mod share;
mod uffd;

pub use ledger::{Ledger, OWNERS_MOST, Promise};
pub use pager::{Options, Pager, Scope, Stats};
pub use share::ShareStore;
pub use uffd::{Event, Stopped, Uffd};

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use weir_core::{PAGE_SIZE, PageBytes};

/// Checks whether this process may have a pager.
///
/// # Errors
/// Fails with [`Error::Denied`] or [`Error::Kernel`].
pub fn probe() -> Result<(), Error> {
    uffd::Uffd::open().map(drop)
}

/// The names of the files in a run's directory: the daemon's socket, its control socket, the
/// [`Ledger`], the socket for lines that pagers print, and the [`Link`](link::Link)s' socket. On the
/// socket for lines each datagram is one line.
pub mod directory {
    #![allow(missing_docs)] // the introduction says what they are
    pub const SHARE: &str = "share";
    pub const CONTROL: &str = "control";
    pub const LEDGER: &str = "ledger";
    pub const MESSAGES: &str = "messages";
    pub const PROGRAMS: &str = "programs";
}

/// Bytes of a block, which is a huge page.
pub const BLOCK: usize = 2 << 20;
/// Pages of a block.
pub const BLOCK_PAGES: usize = BLOCK / PAGE_SIZE;

/// The pager's connection to the world outside: it prints lines for people, and receives orders
/// from the daemon. The pager's thread calls these methods. So no method may wait for the program,
/// for instance for a thread that should read from a full pipe.
pub trait Outside {
    /// Prints a line for people.
    fn tell(&mut self, line: &str);

    /// Returns the daemon's next order, if one has come.
    fn order(&mut self) -> Option<link::Order> {
        None
    }

    /// Sends a report to the daemon, as the answer to [`Order::Report`](link::Order::Report).
    fn report(&mut self, _: &link::Report) {}

    /// Whether the pager may manage more memory now. It asks before each look for new memory, and
    /// looks again later if not: a fork may be under way that does not [hold](Pager::hold) the
    /// pager.
    fn may_manage(&mut self) -> bool {
        true
    }
}

impl<F: FnMut(&str)> Outside for F {
    fn tell(&mut self, line: &str) {
        self(line);
    }
}

/// The surroundings that a pager has been given. A function that prints lines is enough.
pub type Tell = Box<dyn Outside>;

/// Opens another connection to a store, for the thread that calls it. `None` if there is none now.
pub type OpenLane = Box<dyn FnMut() -> Option<Box<dyn Store>> + Send>;

/// The store of blocks that are not resident. One thread uses it.
pub trait Store {
    /// The ways to further connections, for threads that write and read beside the pager's thread.
    /// On such a connection nothing is claimed or released.
    fn lanes(&mut self) -> Vec<OpenLane> {
        Vec::new()
    }

    /// Claims room for a block, and returns the number of its first page. `None` if there is no
    /// room.
    fn claim(&mut self) -> Option<u64>;

    /// Frees the room of a block.
    fn release(&mut self, first: u64);

    /// Writes `pages` to the page `first` and the pages after it. `pages` may be reused as soon as
    /// this returns.
    ///
    /// # Errors
    /// Fails if the store can tell at once that it cannot keep a page. A later failure is an error
    /// of [`settle`](Self::settle).
    fn write(&mut self, first: u64, pages: &[PageBytes]) -> io::Result<()>;

    /// Waits until every page that was written before is stored.
    ///
    /// # Errors
    /// Fails when one of the pages could not be stored.
    fn settle(&mut self) -> io::Result<()>;

    /// Reads the pages from `first` on into `out`.
    ///
    /// # Errors
    /// Fails when one of the pages cannot be read.
    fn read(&mut self, first: u64, out: &mut [PageBytes]) -> io::Result<()>;

    /// Reads pages that may not be needed. Does not wait for a store that stands still, but for
    /// the writes before.
    ///
    /// # Errors
    /// As [`read`](Self::read), and if the store does not answer in time.
    fn read_ahead(&mut self, first: u64, out: &mut [PageBytes]) -> io::Result<()> {
        self.read(first, out)
    }

    /// From now on a write gives up its wait for a store that stands still while `hurry` is set.
    /// The error is [`Interrupted`](io::ErrorKind::Interrupted) then.
    fn heed(&mut self, hurry: Arc<AtomicBool>) {
        let _ = hurry;
    }
}

/// The reason why no pager could be started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// This process may not use userfaultfd.
    #[error("userfaultfd is denied; run as root, or make /dev/userfaultfd accessible (chmod 666)")]
    Denied(#[source] io::Error),
    /// This kernel cannot move pages by userfaultfd.
    #[error("the kernel's userfaultfd cannot move pages; Linux 6.8 or newer is needed")]
    Kernel(#[source] io::Error),
    /// The limit is too small to work with.
    #[error("a resident limit of {bytes} bytes is too small; accepted: 32MiB or more")]
    Limit {
        /// The requested limit.
        bytes: usize,
    },
    /// A thread cannot have descriptors of its own.
    #[error("a system call that the pager needs is forbidden here, as by a seccomp filter")]
    Forbidden(#[source] io::Error),
    /// The store could not be opened.
    #[error("{0}")]
    Store(String),
    /// A system call failed.
    #[error("the pager cannot start")]
    System(#[from] io::Error),
}
