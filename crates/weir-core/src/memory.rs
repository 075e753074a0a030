//! Memory that stays resident. It is mapped once, touched, and locked if the system allows that. A
//! memfd can outlive the process that filled it.

use crate::available::available;
use crate::swap_safety::locks_all_memory;
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, SeekFrom};
use rustix::mm::{Advice, MapFlags, MlockFlags, MprotectFlags, ProtFlags};
use rustix::process::{Resource, Rlimit};
use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A mapping of whole pages, readable and writable by every thread, all zeros when new.
///
/// The mapping hands out a pointer, not a slice: its content is shared with other threads, and for
/// a memfd with other processes. So each user ensures by its own means who may access which part
/// and when.
pub struct Memory {
    start: NonNull<u8>,
    bytes: usize,
    fd: Option<OwnedFd>,
    /// The parts that have pages and could not be locked. No two of them overlap or touch.
    unlocked: Mutex<Vec<Range<usize>>>,
}

// SAFETY: a `Memory` is an address range and a descriptor; neither belongs to a thread.
unsafe impl Send for Memory {}
// SAFETY: as for Send; every access to the content goes through raw pointers whose users
// synchronise.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps memory of this process alone, and takes all its pages.
    ///
    /// # Errors
    /// Fails with the error of `mmap`, above all `ENOMEM`.
    pub fn anonymous(bytes: usize) -> io::Result<Self> {
        let bytes = new_pages(bytes)?;
        let memory = Self::map(bytes, None)?;
        memory.take(0, bytes, &mut unwatched)?;
        Ok(memory)
    }

    /// Takes memory behind a descriptor, sealed against a change of size. Another process that gets
    /// the descriptor can map it. The memory exists as long as a process maps it or holds the
    /// descriptor, and stays in RAM as long as one has it locked.
    ///
    /// # Errors
    /// Fails with the error of `memfd_create`, `ftruncate` or `mmap`.
    pub fn shared(name: &str, bytes: usize) -> io::Result<Self> {
        Self::shared_watched(name, bytes, &mut unwatched)
    }

    /// Does the same as [`Memory::shared`], with progress reports and a way to stop, for a large
    /// amount.
    ///
    /// # Errors
    /// Fails as [`Memory::shared`] does, and with the error of `watch`; the memory is freed first.
    pub fn shared_watched(name: &str, bytes: usize, watch: Watch<'_>) -> io::Result<Self> {
        let bytes = new_pages(bytes)?;
        let memory = Self::map(bytes, Some(sealed_memfd(name, bytes)?))?;
        memory.take(0, bytes, watch)?;
        Ok(memory)
    }

    /// Maps `bytes` bytes behind a descriptor as [`Memory::shared`] does, and takes no page yet:
    /// [`Memory::take_more`] does, part by part. Other processes map it by [`Memory::adopt`].
    ///
    /// # Errors
    /// Fails with the error of `memfd_create`, `ftruncate` or `mmap`.
    pub fn sparse(name: &str, bytes: usize) -> io::Result<Self> {
        let bytes = whole_pages(bytes)?;
        Self::map(bytes, Some(sealed_memfd(name, bytes)?))
    }

    /// Takes the pages of a part of [`sparse`](Memory::sparse) memory, if the machine has that
    /// much.
    ///
    /// # Errors
    /// Fails as [`Memory::take`] does, and with `ENOMEM` if the machine has too little.
    ///
    /// # Panics
    /// Panics when the range is outside of the mapping.
    pub fn take_more(&self, offset: usize, bytes: usize) -> io::Result<()> {
        self.take(offset, new_pages(bytes)?, &mut unwatched)
    }

    /// Gives the whole pages of a part back to the system, here and in every process that has
    /// mapped them. They read as zeros from here on, and count no longer as unlocked.
    ///
    /// # Errors
    /// Fails with the error of `fallocate`, and with `EBADF` for memory without a descriptor.
    pub fn punch(&self, offset: usize, bytes: usize) -> io::Result<()> {
        let fd = self.fd().ok_or(rustix::io::Errno::BADF)?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(fd, flags, offset as u64, bytes as u64)?;
        self.note(offset..offset + bytes, true);
        Ok(())
    }

    /// Maps the whole of a memfd that another process made with [`Memory::shared`]. Only pages that
    /// exist are populated. A hole is memory that was given back, and stays so until
    /// [`Memory::take`].
    ///
    /// # Errors
    /// Fails with `EINVAL` for a descriptor that is empty or could still shrink under the mapping
    /// (which would turn accesses into SIGBUS); else with the error of `fstat` or `mmap`.
    pub fn adopt(fd: OwnedFd) -> io::Result<Self> {
        if !rustix::fs::fcntl_get_seals(&fd)?.contains(SealFlags::SHRINK) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let bytes = whole_pages(rustix::fs::fstat(&fd)?.st_size as usize)?;
        let memory = Self::map(bytes, Some(fd))?;
        memory.populate_again(0, bytes)?;
        Ok(memory)
    }

    /// From here on this process takes memory without a check that the machine has so much free. A
    /// process calls this function if it takes over from a dead process that had as much memory.
    /// When memory is short, the check would fail: `MemAvailable` is then 0, since it leaves out
    /// the kernel's reserve. A thread that brings swap back may use that reserve
    /// ([`reach_reserves`](crate::swap_safety::reach_reserves)).
    pub fn take_over() {
        TAKES_OVER.store(true, Ordering::Relaxed);
    }

    /// Maps address space without a page of memory. Pages are locked once they are populated, if
    /// that is allowed, and are never part of a core file.
    fn map(bytes: usize, fd: Option<OwnedFd>) -> io::Result<Self> {
        // Map without access first. Otherwise, if `mlockall` covers later mappings, the mapping
        // would be populated at once, holes too.
        let (anywhere, none) = (std::ptr::null_mut(), ProtFlags::empty());
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps no other; a seal
        // keeps a descriptor's file from shrinking.
        let start = unsafe {
            match &fd {
                Some(fd) => rustix::mm::mmap(anywhere, bytes, none, MapFlags::SHARED, fd, 0)?,
                None => rustix::mm::mmap_anonymous(anywhere, bytes, none, MapFlags::PRIVATE)?,
            }
        };
        let start = NonNull::new(start.cast()).expect("mmap never returns null");
        let memory = Memory { start, bytes, fd, unlocked: Mutex::default() };
        let at = memory.start.as_ptr().cast();
        // SAFETY: the range is the mapping just made, and neither this call nor those below change
        // its content.
        unsafe { rustix::mm::madvise(at, bytes, Advice::LinuxDontDump)? };
        // If the kernel grants huge pages, TLB misses are fewer, and the start is ten times as
        // fast. A failure is not worth an error. SAFETY: the range is the mapping just made.
        let _ = unsafe { rustix::mm::madvise(at, bytes, Advice::LinuxHugepage) };
        if locks_all_memory() {
            // `mlockall` has locked the mapping already. With ONFAULT its pages are populated only
            // when they are taken. SAFETY: the range is the mapping just made.
            let _ = unsafe { rustix::mm::mlock_with(at, bytes, MlockFlags::ONFAULT) };
        }
        // SAFETY: the range is the mapping just made, and nothing refers to it yet.
        unsafe { rustix::mm::mprotect(at, bytes, MprotectFlags::READ | MprotectFlags::WRITE)? };
        Ok(memory)
    }

    /// Takes the pages of a range, so that none is taken later on an I/O path. It goes piece by
    /// piece, with several threads if there is much to do. Existing content stays.
    ///
    /// # Errors
    /// Fails with the error of `madvise`, above all `ENOMEM`, or of `watch`. A part of the pages
    /// may be taken then.
    ///
    /// # Panics
    /// Panics when the range is outside of the mapping.
    pub fn take(&self, offset: usize, bytes: usize, watch: Watch<'_>) -> io::Result<()> {
        self.lock(offset, bytes);
        let populate = |at, bytes| self.advise(offset + at, bytes, Advice::LinuxPopulateWrite);
        in_pieces(bytes, &populate, watch)
    }

    /// Maps the pages of a range that another process has taken. So these pages are locked in this
    /// process too, and accesses on an I/O path cause no page fault later.
    ///
    /// # Errors
    /// Fails with the error of `lseek` or `madvise`.
    ///
    /// # Panics
    /// Panics when the range is outside of the mapping.
    pub fn populate_again(&self, offset: usize, bytes: usize) -> io::Result<()> {
        self.each_part(offset, bytes, |at, bytes| {
            self.lock(at, bytes);
            // Populate by reading, which takes half as long as by writing. A page fault for reading
            // also maps the neighbouring pages, and a page fault for writing does not. The time
            // matters, since the kernel may be waiting for this memory.
            self.advise(at, bytes, Advice::LinuxPopulateRead)
        })
    }

    /// Calls `of` for each part of the range that has pages, with the part's offset and length in
    /// bytes.
    ///
    /// # Errors
    /// Fails with the error of `lseek` or of the function `of`, and with `EBADF` for memory without
    /// a descriptor.
    pub fn each_part(
        &self,
        offset: usize,
        bytes: usize,
        mut of: impl FnMut(usize, usize) -> io::Result<()>,
    ) -> io::Result<()> {
        let (mut at, end) = (offset, offset + bytes);
        let fd = self.fd().ok_or(rustix::io::Errno::BADF)?;
        while at < end {
            let data = match rustix::fs::seek(fd, SeekFrom::Data(at as u64)) {
                Err(rustix::io::Errno::NXIO) => break,
                from => from? as usize,
            };
            if data >= end {
                break;
            }
            let hole = (rustix::fs::seek(fd, SeekFrom::Hole(data as u64))? as usize).min(end);
            of(data, hole - data)?;
            at = hole;
        }
        Ok(())
    }

    /// Locks a part of the mapping: its pages stay in RAM once they are populated. If that is not
    /// allowed, counts the part as unlocked. Callers lock only parts that have pages, since the
    /// whole part counts against `RLIMIT_MEMLOCK`.
    ///
    /// The kernel splits a mapping at each end of a locked part, and a process may have 65,530
    /// mappings. So whole units are locked, as long as `RLIMIT_MEMLOCK` allows it, and stay locked.
    fn lock(&self, offset: usize, bytes: usize) {
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes), "outside of the memory");
        let lock = |start: usize, end: usize| {
            // SAFETY: the range is inside the mapping, and locking changes no content.
            unsafe {
                rustix::mm::mlock_with(self.as_ptr().add(start).cast(), end - start, MlockFlags::ONFAULT)
            }
        };
        let end = offset + bytes;
        let unit = (self.bytes / 1000).next_multiple_of(LOCK_UNIT_LEAST).max(LOCK_UNIT_LEAST);
        let units = (offset / unit * unit, end.next_multiple_of(unit).min(self.bytes));
        let locked = lock(units.0, units.1).or_else(|_| lock(offset, end));
        self.note(offset..end, locked.is_ok() || locks_all_memory());
    }

    /// Notes whether a part is locked. True: the part has no unlocked page. False: the part has
    /// pages that cannot be locked.
    fn note(&self, part: Range<usize>, is_locked: bool) {
        let mut unlocked = self.unlocked();
        if is_locked && unlocked.is_empty() {
            return;
        }
        let before = bytes_of(&unlocked);
        let rest = |it: &Range<usize>| [it.start..it.end.min(part.start), it.start.max(part.end)..it.end];
        *unlocked = unlocked.iter().flat_map(rest).filter(|it| !it.is_empty()).collect();
        if !is_locked {
            unlocked.push(part);
        }
        // Other threads may count the bytes of other memories meanwhile. So add only the
        // difference, which may be negative.
        UNLOCKED.fetch_add(bytes_of(&unlocked).wrapping_sub(before), Ordering::Relaxed);
    }

    fn unlocked(&self) -> MutexGuard<'_, Vec<Range<usize>>> {
        self.unlocked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Populates a range by MADV_POPULATE_WRITE or MADV_POPULATE_READ (Linux 5.14). They report
    /// missing memory as ENOMEM, while touching a page would end in SIGBUS.
    fn advise(&self, offset: usize, bytes: usize, advice: Advice) -> io::Result<()> {
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes), "outside of the memory");
        // SAFETY: the range is inside the mapping, and populating changes no content.
        unsafe { rustix::mm::madvise(self.as_ptr().add(offset).cast(), bytes, advice)? };
        Ok(())
    }

    /// `bytes`, rounded up to whole pages.
    pub fn whole(bytes: usize) -> usize {
        bytes.next_multiple_of(crate::PAGE_SIZE)
    }

    /// The address of the mapping's first byte, which is page-aligned.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The mapping's length in bytes, a multiple of the page size.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Always false: a mapping has at least a page.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Whether all that was taken is locked in RAM. It is not if `RLIMIT_MEMLOCK` forbids it, which
    /// is fine for a test, but not for swap.
    pub fn is_locked(&self) -> bool {
        self.unlocked().is_empty()
    }

    /// A descriptor for [`Memory::shared`] memory that others can map for reading, and not for
    /// writing.
    ///
    /// After this call, only processes of this process's user can open the memory anew, and only
    /// for reading: the file mode says so. So nobody can get write access with the new descriptor.
    /// (This user or root could change the mode, but either can trace this process anyway.
    /// `F_SEAL_WRITE` on the memfd would stop them too. But it would also stop the process that is
    /// to take the memory over.)
    ///
    /// # Errors
    /// Fails with the error of `fchmod` or `open`; with `EBADF` for memory without a descriptor.
    pub fn read_only(&self) -> io::Result<OwnedFd> {
        let fd = self.fd().ok_or(rustix::io::Errno::BADF)?;
        rustix::fs::fchmod(fd, Mode::RUSR)?;
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// The descriptor of [`Memory::shared`] memory, for another process.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        UNLOCKED.fetch_sub(bytes_of(&self.unlocked()), Ordering::Relaxed);
        // SAFETY: this value made the mapping, and users of its pointer borrowed or owned `self`.
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
            if self.is_locked() { ", locked" } else { "" }
        )
    }
}

fn bytes_of(parts: &[Range<usize>]) -> u64 {
    parts.iter().map(|part| part.len() as u64).sum()
}

/// Bytes of this process's [`Memory`] that could not be locked in RAM: the kernel may write them to
/// the machine's swap.
pub fn unlocked() -> u64 {
    UNLOCKED.load(Ordering::Relaxed)
}

static UNLOCKED: AtomicU64 = AtomicU64::new(0);

/// Parts of a memory are locked in units of a thousandth of it, and of this many bytes at least. So
/// a page map of 16 GiB becomes about a thousand mappings at most, whichever parts are taken.
const LOCK_UNIT_LEAST: usize = 1 << 20;

/// A function that long work calls with its progress: bytes done, and bytes in total. If the
/// function returns an error, the work stops.
pub type Watch<'a> = &'a mut dyn FnMut(u64, u64) -> io::Result<()>;

/// A [`Watch`] that ignores the progress and never stops the work.
///
/// # Errors
/// Never fails.
pub fn unwatched(_: u64, _: u64) -> io::Result<()> {
    Ok(())
}

/// Bytes that one thread takes in one piece. A piece lasts some hundredths of a second, and the
/// work can be stopped after each.
const PIECE: usize = 64 << 20;
/// Largest number of threads that take memory at a time. The kernel zeroes memory that is taken,
/// and a few processors zero it as fast as the memory allows.
const WORKERS_MOST: usize = 16;
/// Bytes of stack of a thread that takes memory: enough for a system call, and few, because all of
/// it may be locked in RAM.
const WORKERS_STACK: usize = 64 << 10;

/// Does `bytes` bytes of work in pieces, on all processors. The calling thread does its share, and
/// calls `watch`.
fn in_pieces(
    bytes: usize,
    work: &(dyn Fn(usize, usize) -> io::Result<()> + Sync),
    watch: Watch<'_>,
) -> io::Result<()> {
    let pieces = bytes.div_ceil(PIECE);
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let one = || -> Option<io::Result<()>> {
        let at = next.fetch_add(1, Ordering::Relaxed);
        let from = (at < pieces).then(|| at * PIECE)?;
        let length = PIECE.min(bytes - from);
        let worked = work(from, length);
        done.fetch_add(length, Ordering::Relaxed);
        // Set the counter of begun pieces past the end, so that no thread begins another piece.
        worked.inspect_err(|_| next.store(pieces, Ordering::Relaxed)).into()
    };
    // The number of processors is read from files, which takes time. A single piece needs no second
    // thread, so the files are not read for it.
    let workers = if pieces > 1 { std::thread::available_parallelism().map_or(1, usize::from) } else { 1 };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..pieces.min(workers).min(WORKERS_MOST))
            .map_while(|_| {
                let builder = std::thread::Builder::new().stack_size(WORKERS_STACK);
                // If no thread can be started, this thread does all the work, only slower.
                builder.spawn_scoped(scope, || std::iter::from_fn(one).collect::<io::Result<()>>()).ok()
            })
            .collect();
        let mut mine = Ok(());
        while let Some(worked) = one() {
            mine = worked.and_then(|()| watch(done.load(Ordering::Relaxed) as u64, bytes as u64));
            if mine.is_err() {
                next.store(pieces, Ordering::Relaxed);
                break;
            }
        }
        let theirs = others.into_iter().map(|other| other.join().expect("populating does not panic"));
        theirs.fold(mine, Result::and)
    })
}

/// Makes a memfd of `bytes` bytes that has no page yet. Its size cannot change.
///
/// # Errors
/// Fails with the error of `memfd_create`, `ftruncate` or `fcntl`, and with `EFBIG` if the hard
/// limit on file sizes is lower.
pub fn sealed_memfd(name: &str, bytes: usize) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    allow_size(bytes as u64)?;
    rustix::fs::ftruncate(&fd, bytes as u64)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Raises this process's soft limit on file sizes, if a memfd of `bytes` bytes would exceed it.
/// Fails if the hard limit is lower, since the kernel would end the process by a signal (SIGXFSZ).
fn allow_size(bytes: u64) -> io::Result<()> {
    let limit = rustix::process::getrlimit(Resource::Fsize);
    let is_above = |limit: Option<u64>| limit.is_some_and(|limit| bytes > limit);
    if is_above(limit.maximum) {
        return Err(rustix::io::Errno::FBIG.into());
    }
    if is_above(limit.current) {
        rustix::process::setrlimit(Resource::Fsize, Rlimit { current: limit.maximum, ..limit })?;
    }
    Ok(())
}

/// Whether this process replaces a daemon that had as much memory as this process takes.
static TAKES_OVER: AtomicBool = AtomicBool::new(false);

/// Rounds `bytes` up to whole pages. Fails with `ENOMEM` if the machine has less memory available.
/// Populating more would not fail. Instead the OOM killer would end a process, and in a cgroup with
/// a limit it would be this one. For memory of [`Memory::adopt`] nobody calls this, since its pages
/// exist already.
fn new_pages(bytes: usize) -> io::Result<usize> {
    let bytes = whole_pages(bytes)?;
    // A process that takes over does not ask how much memory is available. To read that from files
    // took half of the time that the daemon's connections needed to start.
    let asks = !TAKES_OVER.load(Ordering::Relaxed);
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

    /// Number of this process's mappings that begin within `memory`.
    fn mappings(memory: &Memory) -> usize {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let within = memory.as_ptr() as usize..memory.as_ptr() as usize + memory.len();
        let starts =
            maps.lines().map(|line| usize::from_str_radix(line.split('-').next().unwrap(), 16).unwrap());
        starts.filter(|start| within.contains(start)).count()
    }

    #[test]
    fn parts_that_come_and_go_all_over_a_memory_do_not_use_up_the_mappings_of_the_process() {
        let memory = Memory::sparse("weir-test", 256 << 20).unwrap();
        let next = Memory::adopt(memory.fd().unwrap().try_clone_to_owned().unwrap()).unwrap();
        for part in 0..2048 {
            let offset = part * 631 % 2048 * (128 << 10);
            memory.take_more(offset, 4096).unwrap();
            next.populate_again(offset, 4096).unwrap();
            memory.punch(offset, 4096).unwrap();
        }
        assert!(memory.is_locked() || unlocked() > 0);
        for memory in [&memory, &next] {
            assert!(mappings(memory) <= 512, "{} mappings", mappings(memory));
        }
    }

    #[test]
    fn shared_memory_is_seen_by_a_second_mapping_and_outlives_the_first() {
        let first = Memory::shared("weir-test", 10_000).unwrap();
        assert_eq!(first.len(), 12_288);
        let second = Memory::adopt(first.fd().unwrap().try_clone_to_owned().unwrap()).unwrap();
        // SAFETY: both mappings are three pages long and only this thread uses them.
        unsafe { first.as_ptr().add(9_999).write(7) };
        drop(first);
        // SAFETY: both mappings are three pages long and only this thread uses them.
        assert_eq!(unsafe { second.as_ptr().add(9_999).read() }, 7);
    }

    #[test]
    fn memory_that_is_adopted_is_mapped_and_locked_to_the_last_page() {
        let first = Memory::shared("weir-test", 64 * crate::PAGE_SIZE).unwrap();
        let second = Memory::adopt(first.fd().unwrap().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(smaps(&second, "Rss:"), "256 kB");
        if second.is_locked() {
            assert_eq!(smaps(&second, "Locked:"), smaps(&second, "Pss:"));
        }
    }

    /// The sum of a field in smaps over all parts of a mapping of this process.
    fn smaps(memory: &Memory, key: &str) -> String {
        let kib = |value: String| value.trim_end_matches(" kB").parse::<u64>().expect("a size");
        format!("{} kB", smaps_parts(memory, key).into_iter().map(kib).sum::<u64>())
    }

    /// The value of a field, from each entry of smaps that belongs to the mapping. If only parts of
    /// a mapping are locked, smaps has several entries for it.
    fn smaps_parts(memory: &Memory, key: &str) -> Vec<String> {
        let range = memory.as_ptr().addr()..memory.as_ptr().addr() + memory.len();
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let (mut values, mut is_ours) = (Vec::new(), false);
        for line in smaps.lines() {
            let start = line.split_once('-').and_then(|(start, _)| usize::from_str_radix(start, 16).ok());
            is_ours = start.map_or(is_ours, |start| range.contains(&start));
            values.extend(line.strip_prefix(key).filter(|_| is_ours).map(|value| value.trim().to_owned()));
        }
        assert!(!values.is_empty(), "a mapping of ours");
        values
    }

    fn blocks(memory: &Memory) -> i64 {
        rustix::fs::fstat(memory.fd().unwrap()).unwrap().st_blocks
    }

    #[test]
    fn memory_that_was_given_back_stays_away_when_it_is_adopted_and_is_pinned_again_when_it_is_taken() {
        let first = Memory::shared("weir-test", 64 * crate::PAGE_SIZE).unwrap();
        let hole = (16 * crate::PAGE_SIZE, 32 * crate::PAGE_SIZE);
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(first.fd().unwrap(), flags, hole.0 as u64, hole.1 as u64).unwrap();
        let given = blocks(&first);
        let second = Memory::adopt(first.fd().unwrap().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(blocks(&first), given);
        assert_eq!(smaps(&second, "Rss:"), "128 kB");
        first.take(hole.0, hole.1, &mut unwatched).unwrap();
        assert_eq!(smaps(&second, "Rss:"), "128 kB", "nobody has told the second yet");
        second.populate_again(hole.0, hole.1).unwrap();
        assert_eq!(smaps(&second, "Rss:"), "256 kB");
        if second.is_locked() {
            assert_eq!(smaps(&second, "Locked:"), smaps(&second, "Pss:"));
        }
    }

    #[test]
    fn sparse_memory_has_only_the_pages_that_were_taken_and_a_second_mapping_of_it_too() {
        let page = crate::PAGE_SIZE;
        let first = Memory::sparse("weir-test", 16 << 30).unwrap();
        assert_eq!(blocks(&first), 0);
        first.take_more(1 << 30, 8 * page).unwrap();
        first.take_more(15 << 30, 4 * page).unwrap();
        // SAFETY: the page is inside the mapping and was taken; only this thread uses it.
        unsafe { first.as_ptr().add(1 << 30).write(7) };
        let second = Memory::adopt(first.fd().unwrap().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(blocks(&first) as usize * 512, 12 * page);
        assert_eq!(smaps(&second, "Rss:"), "48 kB");
        // SAFETY: the page is inside the mapping and was taken; only this thread uses it.
        assert_eq!(unsafe { second.as_ptr().add(1 << 30).read() }, 7);
        second.punch(1 << 30, 8 * page).unwrap();
        assert_eq!(blocks(&first) as usize * 512, 4 * page);
        assert_eq!(smaps(&first, "Rss:"), "16 kB", "gone from both");
        first.take_more(1 << 30, page).unwrap();
        // SAFETY: the page is inside the mapping and was taken; only this thread uses it.
        assert_eq!(unsafe { first.as_ptr().add(1 << 30).read() }, 0);
        assert!(Memory::anonymous(page).unwrap().punch(0, page).is_err(), "it has no descriptor");
    }

    #[test]
    fn what_could_not_be_locked_counts_once_and_only_while_it_has_pages() {
        let memory = Memory::sparse("weir-test", 64 * crate::PAGE_SIZE).unwrap();
        let counted = || bytes_of(&memory.unlocked()) / crate::PAGE_SIZE as u64;
        let page = |at: usize| at * crate::PAGE_SIZE;
        for (part, is_locked, pages) in [
            (8..16, false, 8),
            (12..20, false, 12),
            (10..14, true, 8),
            (0..64, true, 0),
            (0..4, false, 4),
            (60..64, false, 8),
        ] {
            memory.note(page(part.start)..page(part.end), is_locked);
            assert_eq!(counted(), pages, "{part:?}");
        }
        assert!(!memory.is_locked() && unlocked() >= page(8) as u64);
        memory.punch(page(2), page(60)).unwrap();
        assert_eq!(counted(), 4, "what was given back has no pages");
        memory.punch(0, page(64)).unwrap();
        assert!(memory.is_locked());
    }

    #[test]
    fn no_memory_is_part_of_a_core_file() {
        let shared = Memory::shared("weir-test", 10_000).unwrap();
        let adopted = Memory::adopt(shared.fd().unwrap().try_clone_to_owned().unwrap()).unwrap();
        for memory in [&shared, &adopted, &Memory::anonymous(10_000).unwrap()] {
            for flags in smaps_parts(memory, "VmFlags:") {
                assert!(flags.split(' ').any(|flag| flag == "dd"), "{memory:?}: {flags}");
            }
        }
    }

    #[test]
    fn whoever_watches_hears_of_every_piece_and_can_end_it() {
        let bytes = 3 * PIECE + crate::PAGE_SIZE;
        let mut heard = Vec::new();
        let mut listen = |done, all| {
            heard.push((done, all));
            Ok(())
        };
        let memory = Memory::shared_watched("weir-test", bytes, &mut listen).unwrap();
        assert_eq!(blocks(&memory) as usize * 512, bytes, "every page is there");
        assert!(heard.is_sorted() && heard.iter().all(|(done, all)| done <= all && *all == bytes as u64));
        assert!(!heard.is_empty());

        let mut heard = 0;
        let mut end = |_, _| {
            heard += 1;
            Err(io::ErrorKind::Interrupted.into())
        };
        let error = Memory::shared_watched("weir-test", bytes, &mut end).unwrap_err();
        assert_eq!((error.kind(), heard), (io::ErrorKind::Interrupted, 1));
    }

    #[test]
    fn a_piece_that_fails_ends_the_others_with_its_error() {
        let begun = AtomicUsize::new(0);
        let work = |at, _| {
            begun.fetch_add(1, Ordering::Relaxed);
            if at == 0 { Err(io::Error::from_raw_os_error(libc::ENOMEM)) } else { Ok(()) }
        };
        let error = in_pieces(1 << 50, &work, &mut unwatched).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOMEM));
        assert!(begun.load(Ordering::Relaxed) < (1 << 50) / PIECE, "the rest is left alone");
    }

    #[test]
    fn a_read_only_descriptor_shows_what_is_written_and_cannot_be_mapped_to_write() {
        let memory = Memory::shared("weir-test", 4096).unwrap();
        let fd = memory.read_only().unwrap();
        let map = |protection| {
            let flags = MapFlags::SHARED;
            // SAFETY: a fresh mapping at an address of the kernel's choice overlaps no other.
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
        // SAFETY: this test made the mapping. The call is expected to fail, and to change nothing.
        let raised =
            unsafe { rustix::mm::mprotect(seen.cast(), 4096, MprotectFlags::READ | MprotectFlags::WRITE) };
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
