//! Files whose pages are held in memory.

use rustix::mm::{MapFlags, ProtFlags};
use std::fs::File;
use std::io;
use std::ptr::NonNull;

/// The first pages of a file, held in memory until this value is dropped.
///
/// The kernel swaps out the pages of a memfd, or of a file on tmpfs, like any other memory. So a
/// file that must be read while the swap device is down must be held here.
#[derive(Debug)]
pub struct Resident {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the value names an address range, and neither reads nor writes it. So any thread may have
// it.
unsafe impl Send for Resident {}

impl Resident {
    /// Holds the first `bytes` bytes of `file`, in whole pages, or the whole file if it is shorter.
    ///
    /// # Errors
    /// Fails with `ENOMEM` or `EPERM` if `RLIMIT_MEMLOCK` is too small and `CAP_IPC_LOCK` missing;
    /// with `EINVAL` for an empty file.
    pub fn hold(file: &File, bytes: u64) -> io::Result<Self> {
        let bytes =
            usize::try_from(file.metadata()?.len().min(bytes)).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice. It is never read here, so a
        // file that shrinks does no harm.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, file, 0)?
        };
        let held = Resident { start: NonNull::new(start.cast()).expect("mmap never returns null"), bytes };
        // SAFETY: the mapping was just made; locking reads every page in, and changes no content.
        unsafe { rustix::mm::mlock(start, bytes)? };
        Ok(held)
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        // SAFETY: `hold` made the mapping, and nothing else refers to it.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
