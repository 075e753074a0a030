//! The area: memory that one client and the server share, with two rings and the frames.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fs::SealFlags;
use rustix::mm::{MapFlags, ProtFlags};
use weir_core::{Memory, PAGE_SIZE, PageBytes};

use crate::wire::{ENTRIES_MAX, ENTRY_WORDS, FRAMES_MAX};

const LINE: usize = 64;
const SUBMITTED: usize = LINE;
const TAKEN: usize = 2 * LINE;
const COMPLETED: usize = 3 * LINE;
const SEEN: usize = 4 * LINE;
const SERVER_ASLEEP: usize = 5 * LINE;
const CLIENT_ASLEEP: usize = 6 * LINE;
const ENTRY_BYTES: usize = ENTRY_WORDS * size_of::<u64>();

/// The layout of an area.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    frames: u32,
    entries: u32,
}

/// One of the two rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ring {
    /// The ring from the client to the server.
    Submissions,
    /// The ring from the server to the client.
    Completions,
}

impl Layout {
    /// Makes a layout; `None` when a number is out of range or `entries` is no power of two.
    pub fn new(frames: u32, entries: u32) -> Option<Self> {
        let fits = (1..=FRAMES_MAX).contains(&frames)
            && (1..=ENTRIES_MAX).contains(&entries)
            && entries.is_power_of_two();
        fits.then_some(Layout { frames, entries })
    }

    /// Number of frames.
    pub fn frames(&self) -> u32 {
        self.frames
    }

    /// Number of entries in each ring.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Bytes of the whole area.
    pub fn bytes(&self) -> usize {
        self.frame(self.frames)
    }

    #[inline]
    fn entry(&self, ring: Ring, number: u32) -> usize {
        let first = match ring {
            Ring::Submissions => 0,
            Ring::Completions => self.entries,
        };
        PAGE_SIZE + (first + number % self.entries) as usize * ENTRY_BYTES
    }

    #[inline]
    fn frame(&self, frame: u32) -> usize {
        let rings = PAGE_SIZE + 2 * self.entries as usize * ENTRY_BYTES;
        rings.next_multiple_of(PAGE_SIZE) + frame as usize * PAGE_SIZE
    }
}

/// A store's memory, mapped for reading: slots of a page each, some of them lent.
#[derive(Debug)]
pub struct Window {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the value is an address range that belongs to no thread; the memory is only read.
unsafe impl Send for Window {}
// SAFETY: the value is an address range that belongs to no thread; the memory is only read.
unsafe impl Sync for Window {}

impl Window {
    /// Maps the window that the server sent.
    ///
    /// # Errors
    /// Fails with `EINVAL` for a descriptor that is empty or could shrink; else with the error of
    /// `mmap`.
    pub fn open(fd: &OwnedFd) -> io::Result<Self> {
        if !rustix::fs::fcntl_get_seals(fd)?.contains(SealFlags::SHRINK) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let bytes = rustix::fs::fstat(fd)?.st_size as usize;
        let (flags, anywhere) = (MapFlags::SHARED, std::ptr::null_mut());
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps no other; the seal
        // keeps its file from shrinking.
        let start = unsafe { rustix::mm::mmap(anywhere, bytes, ProtFlags::READ, flags, fd, 0)? };
        // Other programs' pages must not be in this program's core files. SAFETY: the mapping was
        // just made; the advice changes no content.
        let _ = unsafe { rustix::mm::madvise(start, bytes, rustix::mm::Advice::LinuxDontDump) };
        // Keep the mapping out of child processes: a child is no client, and may later run as
        // another user. SAFETY: the mapping was just made; the advice changes no content.
        let _ = unsafe { rustix::mm::madvise(start, bytes, rustix::mm::Advice::LinuxDontFork) };
        Ok(Window { start: NonNull::new(start.cast()).expect("mmap never returns null"), bytes })
    }

    /// The page at `slot`, if the window has that slot. Read the page only while its token is held.
    #[inline]
    pub fn slot(&self, slot: u32) -> Option<*const PageBytes> {
        let at = slot as usize * PAGE_SIZE;
        // SAFETY: the check above found the page inside the mapping.
        (at < self.bytes).then(|| unsafe { self.start.as_ptr().add(at) }.cast_const().cast())
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: this value made the mapping, and users of its pointers borrowed or owned `self`.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// A mapped area. Reading it is safe whatever the other side writes: indices and entries are
/// atomics, and a frame is bytes.
#[derive(Debug)]
pub struct Area {
    memory: Memory,
    layout: Layout,
}

impl Area {
    /// Makes a new area, all zeros, sealed against a change of size.
    ///
    /// # Errors
    /// Fails with the system's error when there is no memory.
    pub fn create(layout: Layout) -> io::Result<Self> {
        Ok(Area { memory: Memory::shared("weir-share", layout.bytes())?, layout })
    }

    /// Maps the area that the server made.
    ///
    /// # Errors
    /// Fails with `EINVAL` for a descriptor that is too short or could shrink; else with the error
    /// of `mmap`.
    pub fn adopt(fd: OwnedFd, layout: Layout) -> io::Result<Self> {
        let memory = Memory::adopt(fd)?;
        if memory.len() < layout.bytes() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (start, bytes) = (memory.as_ptr().cast(), memory.len());
        // Keep the mapping out of child processes: a child is no client, and may later run as
        // another user. SAFETY: the mapping was just made; the advice changes no content.
        let _ = unsafe { rustix::mm::madvise(start, bytes, rustix::mm::Advice::LinuxDontFork) };
        Ok(Area { memory, layout })
    }

    /// The layout of the area.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The area's descriptor, for the other side.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.memory.fd()
    }

    /// Number of entries written into a ring so far; the side that writes the ring sets it.
    #[inline]
    pub fn written(&self, ring: Ring) -> &AtomicU32 {
        self.index(match ring {
            Ring::Submissions => SUBMITTED,
            Ring::Completions => COMPLETED,
        })
    }

    /// Number of entries read from a ring so far; the side that reads the ring sets it.
    #[inline]
    pub fn read(&self, ring: Ring) -> &AtomicU32 {
        self.index(match ring {
            Ring::Submissions => TAKEN,
            Ring::Completions => SEEN,
        })
    }

    /// A flag: not 0 while the server sleeps and its eventfd must be written.
    #[inline]
    pub fn server_asleep(&self) -> &AtomicU32 {
        self.index(SERVER_ASLEEP)
    }

    /// A flag: not 0 while the client sleeps and needs a byte on its socket.
    #[inline]
    pub fn client_asleep(&self) -> &AtomicU32 {
        self.index(CLIENT_ASLEEP)
    }

    #[inline]
    fn index(&self, at: usize) -> &AtomicU32 {
        // SAFETY: `at` is a multiple of 64 below a page, inside the mapping; the word is only
        // accessed atomically.
        unsafe { AtomicU32::from_ptr(self.memory.as_ptr().add(at).cast()) }
    }

    #[inline]
    fn words(&self, ring: Ring, number: u32) -> &[AtomicU64; ENTRY_WORDS] {
        // SAFETY: `entry` takes the number modulo the ring's size, so the entry is inside the
        // mapping, at a multiple of 32; rings are only accessed atomically.
        unsafe { &*self.memory.as_ptr().add(self.layout.entry(ring, number)).cast() }
    }

    /// Loads entry `number` of a ring, counted from the connection's beginning.
    #[inline]
    pub fn load(&self, ring: Ring, number: u32) -> [u64; ENTRY_WORDS] {
        // Load each word by an expression of its own: `each_ref` and `map` compile to two calls a
        // word.
        let words = self.words(ring, number);
        let load = |at: usize| words[at].load(Ordering::Relaxed);
        [load(0), load(1), load(2), load(3)]
    }

    /// Stores entry `number`. [`Area::written`] then announces it to the other side.
    #[inline]
    pub fn store(&self, ring: Ring, number: u32, entry: [u64; ENTRY_WORDS]) {
        let words = self.words(ring, number);
        for at in 0..ENTRY_WORDS {
            words[at].store(entry[at], Ordering::Relaxed);
        }
    }

    /// The bytes of a frame, for the side that holds it.
    ///
    /// # Panics
    /// Panics when there is no such frame.
    #[inline]
    pub fn frame(&self, frame: u32) -> *mut PageBytes {
        assert!(frame < self.layout.frames, "frame {frame} of {}", self.layout.frames);
        // SAFETY: the check above found the frame inside the mapping.
        unsafe { self.memory.as_ptr().add(self.layout.frame(frame)).cast() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_and_frames_do_not_overlap() {
        for (frames, entries) in [(1, 1), (64, 32), (4096, 4096)] {
            let layout = Layout::new(frames, entries).unwrap();
            let ring = entries as usize * ENTRY_BYTES;
            assert_eq!(layout.entry(Ring::Submissions, 0), PAGE_SIZE);
            assert_eq!(layout.entry(Ring::Submissions, entries), PAGE_SIZE, "a ring goes round");
            assert_eq!(layout.entry(Ring::Completions, 0), PAGE_SIZE + ring);
            assert!(layout.frame(0) >= PAGE_SIZE + 2 * ring && layout.frame(0).is_multiple_of(PAGE_SIZE));
            assert_eq!(layout.bytes(), layout.frame(0) + frames as usize * PAGE_SIZE);
        }
        for (frames, entries) in [(0, 1), (1, 0), (4097, 1), (1, 8192), (1, 3)] {
            assert_eq!(Layout::new(frames, entries), None);
        }
    }

    #[test]
    fn both_sides_see_one_memory() {
        let layout = Layout::new(2, 4).unwrap();
        let server = Area::create(layout).unwrap();
        let client = Area::adopt(server.fd().unwrap().try_clone_to_owned().unwrap(), layout).unwrap();
        client.store(Ring::Submissions, 5, [1, 2, 3, 4]);
        client.written(Ring::Submissions).store(6, Ordering::Release);
        assert_eq!(server.written(Ring::Submissions).load(Ordering::Acquire), 6);
        assert_eq!(server.load(Ring::Submissions, 1), [1, 2, 3, 4]);
        let larger = Layout::new(3, 4).unwrap();
        assert!(Area::adopt(server.fd().unwrap().try_clone_to_owned().unwrap(), larger).is_err());
    }
}
