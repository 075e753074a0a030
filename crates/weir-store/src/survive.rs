//! How pages outlive the process that wrote them.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// A store that [`reopen`](crate::reopen) finds again, with its pages, after its process has died.
pub trait Survive {
    /// Hands every descriptor that must survive to `keep`, now and whenever one is added. `held`:
    /// it holds those that there are now already, from the process before this one.
    ///
    /// # Errors
    /// When it does not hold something.
    fn keep_with(&self, keep: Arc<dyn Keep>, held: bool) -> io::Result<()>;

    /// Whether nothing that a process before this one began can still change a slot. A dead process
    /// submits nothing more, but what it had submitted may land later, where there is a device
    /// behind it.
    fn is_quiet(&self) -> bool;

    /// The process ends because it was told to. What is kept is not wanted any more, and may be
    /// cleared with the store.
    fn forget(&self);
}

/// The keeper of descriptors that must outlive this process. See [`Survive::keep_with`].
pub trait Keep: Send + Sync + fmt::Debug {
    /// Holds a descriptor under a name that is unique within the store; a memfd (`is_memory`)
    /// mapped and locked.
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
