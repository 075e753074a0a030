//! The sealed allocator, which notices an allocation on an I/O thread.
//!
//! A thread that serves swap must not allocate: without free memory the allocation waits for
//! reclaim, and reclaim waits for the thread. So all memory is taken first, then the process is
//! sealed. From then on an allocation (or release) on a thread inside [`on_io_thread`] is a bug. In
//! tests it aborts ([`Policy::Abort`]). In the field it is counted ([`Policy::Count`]), since going
//! on is the lesser evil.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// The effect of an allocation on an I/O thread once the process is sealed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Policy {
    /// The allocation is counted, and goes through.
    Count = 1,
    /// The process aborts with a line that gives the reason.
    Abort = 2,
}

const OPEN: u8 = 0;

static POLICY: AtomicU8 = AtomicU8::new(OPEN);
static VIOLATIONS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    // The thread-local value is const and without Drop. So reading it never allocates, not even
    // inside the allocator.
    static ON_IO_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Seals the process: allocations of I/O threads are bugs from now on.
pub fn seal(policy: Policy) {
    POLICY.store(policy as u8, Ordering::Relaxed);
}

/// The policy that the environment asks for: `WEIR_SEAL=abort` (the tests set it), else counting.
pub fn policy_from_environment() -> Policy {
    if std::env::var_os("WEIR_SEAL").is_some_and(|value| value == "abort") {
        Policy::Abort
    } else {
        Policy::Count
    }
}

/// Number of allocations and releases of I/O threads since the process was sealed: any but zero is
/// a bug.
pub fn violations() -> u64 {
    VIOLATIONS.load(Ordering::Relaxed)
}

/// Runs `work` as an I/O thread does: once the process is sealed, an allocation in `work` is a bug.
pub fn on_io_thread<T>(work: impl FnOnce() -> T) -> T {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            ON_IO_THREAD.set(self.0);
        }
    }
    let _restore = Restore(ON_IO_THREAD.replace(true));
    work()
}

/// The system allocator, with the check for allocations on I/O threads. A program uses it by
/// `#[global_allocator] static ALLOCATOR: SealedAllocator = SealedAllocator;`.
#[derive(Debug)]
pub struct SealedAllocator;

impl SealedAllocator {
    #[inline]
    fn check() {
        // The check is one thread-local load for every allocation of the process: under a
        // nanosecond.
        if ON_IO_THREAD.get() {
            Self::violation();
        }
    }

    #[cold]
    fn violation() {
        let policy = POLICY.load(Ordering::Relaxed);
        if policy == OPEN {
            return;
        }
        VIOLATIONS.fetch_add(1, Ordering::Relaxed);
        if policy == Policy::Abort as u8 {
            // Do not use std here: its panic code allocates.
            let line = b"weir: an I/O thread touched the allocator after the process was sealed\n";
            let _ = rustix::io::write(rustix::stdio::stderr(), line);
            std::process::abort();
        }
    }
}

// SAFETY: every call is passed to `System` unchanged.
unsafe impl GlobalAlloc for SealedAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::check();
        // SAFETY: the caller keeps the contract of `GlobalAlloc`, which `System` has too.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::check();
        // SAFETY: the caller keeps the contract of `GlobalAlloc`, which `System` has too.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        Self::check();
        // SAFETY: the caller keeps the contract of `GlobalAlloc`, which `System` has too.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Self::check();
        // SAFETY: the caller keeps the contract of `GlobalAlloc`, which `System` has too.
        unsafe { System.realloc(pointer, layout, size) }
    }
}
