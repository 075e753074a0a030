//! Flushing: one marker to the end of each stack, and the wait until the worker has run them all.

use core::ptr::NonNull;
use core::sync::atomic::Ordering::{Acquire, Release};

use crate::item::RawItem;
use crate::queue::MAX_SHARDS;
use crate::stack::{Link, Pushed};
use crate::sync::{AtomicUsize, thread};
use crate::worker::Core;

/// Lies on the flushing thread's stack until the worker has run it.
#[repr(C)]
struct Marker<'a> {
    item: RawItem,
    waiter: &'a Waiter,
}

struct Waiter {
    /// Markers that have not run yet.
    left: AtomicUsize,
    thread: thread::Thread,
}

/// Runs a [`Marker`].
///
/// # Safety
/// `link` is the first field of a valid marker.
unsafe fn arrive(link: NonNull<Link>) {
    // SAFETY: the marker is repr(C) and begins with its item, which begins with its link. The
    // flushing thread keeps markers and waiter until `left` is 0.
    let waiter = unsafe { (*link.cast::<Marker<'_>>().as_ptr()).waiter };
    let thread = waiter.thread.clone();
    if waiter.left.fetch_sub(1, Release) == 1 {
        // The waiter may be gone by now; the handle is our own.
        thread.unpark();
    }
}

impl Core {
    /// Waits until all that was pushed before has run; false if the queue was closed by then, and
    /// the caller has to wait for the worker's end instead.
    pub(crate) fn pass_marker(&self) -> bool {
        let waiter = Waiter { left: AtomicUsize::new(0), thread: thread::current() };
        let markers: [Marker<'_>; MAX_SHARDS] =
            core::array::from_fn(|_| Marker { item: RawItem::new(arrive), waiter: &waiter });
        let mut open = true;
        // Counted in before they are pushed, so that none arrives at 0 too early.
        waiter.left.store(self.shards.iter().count(), Release);
        for (stack, marker) in self.shards.iter().zip(&markers) {
            // SAFETY: a marker is pushed once, and this function does not return before all have
            // run.
            match unsafe { stack.push(NonNull::from(marker).cast()) } {
                Pushed::Queued => {}
                Pushed::Asleep => self.sleeper.wake(),
                Pushed::Closed => {
                    open = false;
                    waiter.left.fetch_sub(1, Release);
                }
            }
        }
        while waiter.left.load(Acquire) > 0 {
            thread::park();
        }
        open
    }
}
