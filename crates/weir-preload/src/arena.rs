//! The allocator of the pager, in memory that the pager never manages.

use spinning_top::RawSpinlock;
use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicUsize, Ordering};
use talc::TalcLock;
use talc::source::Claim;

/// Bytes of memory for the start of the pager, and for some buffers.
const SIZE: usize = 16 << 20;

struct Arena(TalcLock<RawSpinlock, Claim>);

#[global_allocator]
static ALLOCATOR: Arena = Arena::new();

/// In a child of a fork: the memory of the child's own allocator, as its first byte and the byte
/// after its last. The child never frees memory of the parent's allocator.
static OF_CHILD: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

impl Arena {
    const fn new() -> Self {
        static mut MEMORY: [u8; SIZE] = [0; SIZE];
        // SAFETY: only the allocator uses this array.
        Arena(TalcLock::new(unsafe { Claim::array(&raw mut MEMORY) }))
    }
}

/// Whether this process's allocator has given this memory out.
fn is_own(at: *mut u8) -> bool {
    let [start, end] = OF_CHILD.each_ref().map(|bound| bound.load(Ordering::Relaxed));
    end == 0 || (start..end).contains(&at.addr())
}

// SAFETY: the lock's allocator does the work. Memory that another process's allocator has given out
// is neither freed nor grown.
unsafe impl GlobalAlloc for Arena {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's arguments are passed on unchanged.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        if is_own(at) {
            // SAFETY: the caller's arguments are passed on unchanged.
            unsafe { self.0.dealloc(at, layout) };
        }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        if is_own(at) {
            // SAFETY: the caller's arguments are passed on unchanged.
            return unsafe { self.0.realloc(at, layout, bytes) };
        }
        // SAFETY: the old memory stays, and has as many bytes as are copied.
        unsafe {
            let new = self.alloc(Layout::from_size_align_unchecked(bytes, layout.align()));
            if !new.is_null() {
                std::ptr::copy_nonoverlapping(at, new, layout.size().min(bytes));
            }
            new
        }
    }
}

/// Maps up to `bytes` bytes of address space. They take no memory before they are used. If the
/// program's address space is limited, there may be room for fewer bytes only.
fn map(bytes: usize) -> Option<(*mut u8, usize)> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let mut bytes = bytes;
    while bytes >= SIZE {
        // SAFETY: a new mapping at an address of the kernel's choice overlaps no other.
        let at = unsafe { libc::syscall(libc::SYS_mmap, 0_usize, bytes, protection, flags, -1, 0_usize) };
        if at > 0 {
            return Some((std::ptr::with_exposed_provenance_mut(at as usize), bytes));
        }
        bytes /= 2;
    }
    None
}

/// Gives the allocator up to `bytes` more bytes. They are mapped before the pager begins, so the
/// pager does not manage them.
pub fn extend(bytes: usize) {
    if let Some((at, bytes)) = map(bytes) {
        // SAFETY: the memory was just mapped, stays mapped, and only the allocator uses it.
        let _ = unsafe { ALLOCATOR.0.lock().claim(at, bytes) };
    }
}

/// Gives a child of a fork an allocator of its own, with up to `bytes` bytes. The parent's
/// allocator may have been in use when the process was copied. Returns the new memory.
pub fn renew(bytes: usize) -> Option<(usize, usize)> {
    let (at, bytes) = map(bytes)?;
    let (start, end) = (at.expose_provenance(), at.addr() + bytes);
    // SAFETY: the memory was just mapped, and stays mapped. No other thread of this child uses the
    // allocator: this thread starts all threads that use it.
    unsafe {
        let new = TalcLock::new(Claim::new(at, bytes));
        std::ptr::write((&raw const ALLOCATOR.0).cast_mut(), new);
    }
    OF_CHILD[0].store(start, Ordering::Relaxed);
    OF_CHILD[1].store(end, Ordering::Relaxed);
    Some((start, end))
}
