//! Pages that outlive the process that wrote them.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// A store that [`reopen`](crate::reopen) finds again, with its pages, after its process has died.
pub trait Survive {
    /// Hands every descriptor that must survive to `keep`, now and whenever one is added. `held`:
    /// the keeper already holds the present ones, from the process before this one.
    ///
    /// # Errors
    /// Fails when the keeper cannot hold a descriptor.
    fn keep_with(&self, keep: Arc<dyn Keep>, held: bool) -> io::Result<()>;

    /// Whether no operation of an earlier process can change a slot any more. A dead process
    /// submits nothing more, but a store with a device may still do its earlier operations.
    fn is_quiet(&self) -> bool;

    /// Notes that the process ends because it was told to. So the memory that the keeper holds is
    /// no longer needed, and may be cleared with the store.
    fn forget(&self);
}

/// The keeper of descriptors that must outlive this process. See [`Survive::keep_with`].
pub trait Keep: Send + Sync + fmt::Debug {
    /// Holds a descriptor under a name that is unique within the store. A memfd (`is_memory`) is
    /// also mapped and locked.
    ///
    /// # Errors
    /// Fails when the keeper cannot hold the descriptor, or is gone.
    fn hold(&self, name: &str, fd: BorrowedFd<'_>, is_memory: bool) -> io::Result<()>;

    /// Notes that the memory under `name` has new pages in a range, so that the keeper locks them
    /// too.
    ///
    /// # Errors
    /// Fails when the keeper is gone.
    fn took(&self, _name: &str, _offset: u64, _bytes: u64) -> io::Result<()> {
        Ok(())
    }

    /// Closes the descriptor that the keeper holds under `name`.
    ///
    /// # Errors
    /// Fails when the keeper is gone.
    fn let_go(&self, name: &str) -> io::Result<()>;
}
