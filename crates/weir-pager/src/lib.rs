//! Anonymous memory of this process in less RAM than it takes.
//!
//! A [`Pager`] is one thread. It registers memory with userfaultfd, keeps at most a limit of it
//! resident, and moves blocks of 2 MiB out and in by reference (`UFFDIO_MOVE`, Linux 6.8): a block
//! that is a huge page stays one. What is not resident lies in a [`Store`]. The kernel tells the
//! thread of every `munmap`, `mremap` and `madvise`, whoever calls it, so memory may be freed and
//! moved by any allocator behind its back.
//!
//! The thread must never wait for itself: nothing that it or its store touches may lie in memory
//! that it manages. A program whose memory is managed as a whole ([`Scope::Process`]) therefore
//! needs a global allocator of its own for it; `weir-preload` is that.

mod ledger;
mod maps;
mod pager;
mod policy;
mod share;
mod uffd;

pub use ledger::Ledger;
pub use pager::{Options, Pager, Scope, Stats};
pub use share::ShareStore;
pub use uffd::{Event, Stopped, Uffd};

use policy::Policy;
use std::io;
use weir_core::{PAGE_SIZE, PageBytes};

/// Whether this process may have a pager.
///
/// # Errors
/// [`Error::Denied`] or [`Error::Kernel`].
pub fn probe() -> Result<(), Error> {
    uffd::Uffd::open().map(drop)
}

/// The files of a run in its directory: the daemon's socket, the [`Ledger`], and a socket for lines
/// that pagers have for people, a datagram each.
pub mod directory {
    #![allow(missing_docs)] // the introduction says what they are
    pub const SHARE: &str = "share";
    pub const LEDGER: &str = "ledger";
    pub const MESSAGES: &str = "messages";
}

/// Bytes of a block: a huge page.
pub const BLOCK: usize = 2 << 20;
/// Its pages.
pub const BLOCK_PAGES: usize = BLOCK / PAGE_SIZE;

/// Tells people something in a line. It is called on the pager's thread, so it must not wait for
/// the program: a pipe that one of its threads is writing into is such a wait.
pub type Tell = Box<dyn FnMut(&str)>;

/// The store of blocks that are not resident. Used by one thread.
pub trait Store {
    /// Room for a block: the number of its first page. `None` when there is none.
    fn claim(&mut self) -> Option<u64>;

    /// Gives the room back.
    fn release(&mut self, first: u64);

    /// Writes a page. `bytes` may be reused as soon as this returns.
    ///
    /// # Errors
    /// When it is known already that pages cannot be kept.
    fn write(&mut self, page: u64, bytes: &PageBytes) -> io::Result<()>;

    /// Waits until every page written before is kept.
    ///
    /// # Errors
    /// When one of them is not.
    fn settle(&mut self) -> io::Result<()>;

    /// Reads pages from `first` on.
    ///
    /// # Errors
    /// When one of them cannot be had.
    fn read(&mut self, first: u64, out: &mut [PageBytes]) -> io::Result<()>;
}

/// Why no pager could be started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// This process may not use userfaultfd.
    #[error("userfaultfd is denied; run as root, or make /dev/userfaultfd accessible (chmod 666)")]
    Denied(#[source] io::Error),
    /// The kernel cannot move pages.
    #[error("the kernel's userfaultfd cannot move pages; Linux 6.8 or newer is needed")]
    Kernel(#[source] io::Error),
    /// The limit is too small to work with.
    #[error("a resident limit of {bytes} bytes is too small; accepted: 32MiB or more")]
    Limit {
        /// As given.
        bytes: usize,
    },
    /// The store could not be opened.
    #[error("{0}")]
    Store(String),
    /// A system call failed.
    #[error("the pager cannot start")]
    System(#[from] io::Error),
}
