//! Memory that stays where it is: mapped once, touched, locked where the system allows it, and, as a
//! memfd, able to outlive the process that filled it.

use crate::available::available;
use crate::swap_safety::locks_all_memory;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

/// A mapping of whole pages, readable and writable by every thread, of zeros when new.
///
/// It hands out a pointer, not a slice: what lies in it is shared (with other threads, with other
/// processes for a memfd), so each user says by its own means who may touch which part and when.
pub struct Memory {
    start: NonNull<u8>,
    bytes: usize,
    fd: Option<OwnedFd>,
    locked: bool,
}

// SAFETY: a `Memory` is an address range and a descriptor; neither belongs to a thread.
unsafe impl Send for Memory {}
// SAFETY: as above; every access to the content goes through raw pointers whose users synchronise.
unsafe impl Sync for Memory {}

impl Memory {
    /// Anonymous memory of this process.
    ///
    /// # Errors
    /// What `mmap` says, `ENOMEM` above all.
    pub fn anonymous(bytes: usize) -> io::Result<Self> {
        let bytes = new_pages(bytes)?;
        // SAFETY: a fresh private mapping at an address of the kernel's choice disturbs nothing.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )?
        };
        Self::settle(start.cast(), bytes, None, Advice::LinuxPopulateWrite)
    }

    /// Memory behind a descriptor, sealed against a change of size: another process that gets the descriptor
    /// can map it, and it lives as long as one process keeps it mapped and locked.
    ///
    /// # Errors
    /// What `memfd_create`, `ftruncate` or `mmap` say.
    pub fn shared(name: &str, bytes: usize) -> io::Result<Self> {
        let bytes = new_pages(bytes)?;
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, bytes as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::map(fd, Advice::LinuxPopulateWrite)
    }

    /// Maps the whole of a memfd that another process made with [`Memory::shared`].
    ///
    /// # Errors
    /// `EINVAL` for a descriptor that is empty or could still shrink under the mapping (which would turn
    /// accesses into SIGBUS); else what `fstat` or `mmap` say.
    pub fn adopt(fd: OwnedFd) -> io::Result<Self> {
        // Its pages are there already. A reader's fault maps those around it too, a writer's one page only: half the time, of
        // which a kernel may be waiting for every millisecond.
        Self::map(fd, Advice::LinuxPopulateRead)
    }

    fn map(fd: OwnedFd, populate: Advice) -> io::Result<Self> {
        if !rustix::fs::fcntl_get_seals(&fd)?.contains(SealFlags::SHRINK) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let bytes = whole_pages(rustix::fs::fstat(&fd)?.st_size as usize)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice; the seal keeps it from shrinking.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &fd,
                0,
            )?
        };
        Self::settle(start.cast(), bytes, Some(fd), populate)
    }

    /// From here on memory is taken without asking whether the machine has it to spare: this process takes the place of one that
    /// had as much and is dead. Where memory is short, `MemAvailable` is 0, for it leaves out what the kernel holds back; the
    /// kernel lets a thread that brings swap back have of that ([`reach_reserves`](crate::swap_safety::reach_reserves)).
    pub fn succeed() {
        SUCCEEDS.store(true, Ordering::Relaxed);
    }

    /// Takes every page now, so that none is taken later on an I/O path, and pins them if allowed.
    fn settle(start: *mut u8, bytes: usize, fd: Option<OwnedFd>, populate: Advice) -> io::Result<Self> {
        let mut memory =
            Memory { start: NonNull::new(start).expect("mmap never returns null"), bytes, fd, locked: false };
        // Fewer TLB misses where the kernel grants it, and a start that is ten times as fast; not worth an error.
        // SAFETY: the range is the mapping just made; this advice does not change its content.
        let _ = unsafe { rustix::mm::madvise(start.cast(), bytes, Advice::LinuxHugepage) };
        // SAFETY: likewise. MADV_POPULATE_WRITE and _READ (5.14) report ENOMEM as an error, where touching would be SIGBUS.
        unsafe { rustix::mm::madvise(start.cast(), bytes, populate)? };
        // To lock it once more would be to walk through all of it once more.
        // SAFETY: likewise; locking changes no content.
        memory.locked = locks_all_memory() || unsafe { rustix::mm::mlock(start.cast(), bytes) }.is_ok();
        Ok(memory)
    }

    /// The length that memory for `bytes` bytes has.
    pub fn whole(bytes: usize) -> usize {
        bytes.next_multiple_of(crate::PAGE_SIZE)
    }

    /// Where it begins; page-aligned.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Its length in bytes, a multiple of the page size.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Never true; a mapping has at least a page.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Whether it is pinned in RAM. False where `RLIMIT_MEMLOCK` forbids it: fine for a test, not for swap.
    pub fn is_locked(&self) -> bool {
        self.locked
    }

    /// A descriptor that others can map to read, and not to write, for [`Memory::shared`] memory.
    ///
    /// From here on only the owner's mode bit opens the memory anew, and only to read: who is not the same user has
    /// no way to write it. (The same user, or root, could change the mode; they could as well trace this process. A seal
    /// would stop them, and with them the process that is to take the memory over.)
    ///
    /// # Errors
    /// What `fchmod` or `open` say; `EBADF` for memory without a descriptor.
    pub fn read_only(&self) -> io::Result<OwnedFd> {
        let fd = self.fd().ok_or(rustix::io::Errno::BADF)?;
        rustix::fs::fchmod(fd, Mode::RUSR)?;
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// The descriptor to hand to another process, for [`Memory::shared`] memory.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by us, and whoever used its pointer borrowed or owned `self`.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Memory({}, {}{})",
            crate::ByteSize(self.bytes as u64),
            if self.fd.is_some() { "shared" } else { "private" },
            if self.locked { ", locked" } else { "" }
        )
    }
}

/// Whether this process takes the place of one that had as much memory.
static SUCCEEDS: AtomicBool = AtomicBool::new(false);

/// The length to take for `bytes` bytes, if there is that much: populating more than there is would not fail, it would set the
/// OOM killer on somebody, in a cgroup with a limit on this process itself. Not for memory that is adopted: that is taken already.
fn new_pages(bytes: usize) -> io::Result<usize> {
    let bytes = whole_pages(bytes)?;
    // Asking reads files: half of the time that a daemon's connections took to start.
    let asks = !SUCCEEDS.load(Ordering::Relaxed);
    match asks.then(available).flatten() {
        Some(available) if bytes as u64 > available => Err(io::Error::from_raw_os_error(libc::ENOMEM)),
        _ => Ok(bytes),
    }
}

fn whole_pages(bytes: usize) -> io::Result<usize> {
    match bytes.checked_next_multiple_of(crate::PAGE_SIZE) {
        Some(rounded) if rounded > 0 => Ok(rounded),
        _ => Err(io::Error::from_raw_os_error(libc::EINVAL)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_seen_by_a_second_mapping_and_outlives_the_first() {
        let first = Memory::shared("weir-test", 10_000).unwrap();
        assert_eq!(first.len(), 12_288);
        let second = Memory::adopt(first.fd().unwrap().try_clone_to_owned().unwrap()).unwrap();
        // SAFETY: both mappings are three pages long and only this thread uses them.
        unsafe { first.as_ptr().add(9_999).write(7) };
        drop(first);
        // SAFETY: as above.
        assert_eq!(unsafe { second.as_ptr().add(9_999).read() }, 7);
    }

    #[test]
    fn memory_that_is_adopted_is_mapped_and_locked_to_the_last_page() {
        let first = Memory::shared("weir-test", 64 * crate::PAGE_SIZE).unwrap();
        let second = Memory::adopt(first.fd().unwrap().try_clone_to_owned().unwrap()).unwrap();
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let at = format!("{:x}-", second.as_ptr().addr());
        let of = |key: &str| {
            let mapping = smaps.lines().skip_while(|line| !line.starts_with(&at));
            let line = mapping.skip(1).find_map(|line| line.strip_prefix(key)).expect("a mapping of ours");
            line.trim().strip_suffix(" kB").and_then(|kib| kib.parse::<usize>().ok()).expect("KiB")
        };
        assert_eq!(of("Rss:"), 256);
        if second.is_locked() {
            assert_eq!(of("Locked:"), of("Pss:"));
        }
    }

    #[test]
    fn a_read_only_descriptor_shows_what_is_written_and_cannot_be_mapped_to_write() {
        let memory = Memory::shared("weir-test", 4096).unwrap();
        let fd = memory.read_only().unwrap();
        let map = |protection| {
            let flags = MapFlags::SHARED;
            // SAFETY: a fresh mapping at an address of the kernel's choice.
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), 4096, protection, flags, &fd, 0) }
        };
        let seen = map(ProtFlags::READ).unwrap().cast::<u8>();
        // SAFETY: both mappings are a page long and only this thread uses them.
        let byte = unsafe {
            memory.as_ptr().add(7).write(9);
            seen.add(7).read()
        };
        assert_eq!(byte, 9);
        assert_eq!(map(ProtFlags::READ | ProtFlags::WRITE).unwrap_err(), rustix::io::Errno::ACCESS);
        // SAFETY: the mapping is ours; its protection must not change.
        let raised = unsafe {
            rustix::mm::mprotect(
                seen.cast(),
                4096,
                rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE,
            )
        };
        assert_eq!(raised.unwrap_err(), rustix::io::Errno::ACCESS);
        assert_eq!(rustix::io::write(&fd, &[1]).unwrap_err(), rustix::io::Errno::BADF);
        assert_eq!(rustix::fs::fstat(&fd).unwrap().st_mode & 0o777, 0o400, "nobody opens it to write");
        // SAFETY: the mapping was made above and nothing refers to it any more.
        unsafe { rustix::mm::munmap(seen.cast(), 4096).unwrap() };
    }

    #[test]
    fn a_descriptor_that_could_shrink_under_the_mapping_is_refused() {
        let fd =
            rustix::fs::memfd_create("weir-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        assert_eq!(Memory::adopt(fd).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }

    #[test]
    fn nothing_and_too_much_are_errors() {
        assert!(Memory::anonymous(0).is_err());
        assert!(Memory::anonymous(usize::MAX).is_err());
        assert!(Memory::anonymous(1 << 46).is_err());
    }
}
