//! Files whose pages stay in memory.

use rustix::mm::{MapFlags, ProtFlags};
use std::fs::File;
use std::io;
use std::ptr::NonNull;

/// The first pages of a file, held in memory until this is dropped.
///
/// A file on tmpfs and a memfd are memory that the kernel swaps out like any other. What must be
/// read while the device that they may have been swapped out to is down has to be held so.
#[derive(Debug)]
pub struct Resident {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: an address range that nobody reads or writes; it belongs to no thread.
unsafe impl Send for Resident {}

impl Resident {
    /// Holds the first `bytes` bytes of `file`, whole pages of them, or all that it has.
    ///
    /// # Errors
    /// `ENOMEM` or `EPERM` where `RLIMIT_MEMLOCK` is too small and `CAP_IPC_LOCK` missing; `EINVAL`
    /// for a file that is empty.
    pub fn hold(file: &File, bytes: u64) -> io::Result<Self> {
        let bytes =
            usize::try_from(file.metadata()?.len().min(bytes)).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice. It is never read here, so a
        // file that shrinks hurts nobody.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, file, 0)?
        };
        let held = Resident { start: NonNull::new(start.cast()).expect("mmap never returns null"), bytes };
        // SAFETY: the mapping just made; locking, which reads every page in, changes no content.
        unsafe { rustix::mm::mlock(start, bytes)? };
        Ok(held)
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        // SAFETY: the mapping that `hold` made, which nobody else knows.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
