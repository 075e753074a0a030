//! Flushing: pushes a marker to each stack, and waits until the worker has run them all.

use core::ptr::NonNull;
use core::sync::atomic::Ordering::{Acquire, Release};

use crate::item::{RawItem, Unplaced};
use crate::queue::MAX_SHARDS;
use crate::stack::{Link, Pushed};
use crate::sync::{AtomicUsize, thread};
use crate::worker::Core;

/// An item that a flush pushes behind all others. It lies in the stack frame of the flushing thread
/// until the worker has run it.
#[repr(C)]
struct Marker<'a> {
    item: RawItem,
    waiter: &'a Waiter,
}

struct Waiter {
    /// Number of markers that have not run yet.
    left: AtomicUsize,
    thread: thread::Thread,
}

/// The function of a [`Marker`]: counts the marker, and wakes the flushing thread after the last
/// one.
///
/// # Safety
/// `link` must be the first field of a valid marker.
unsafe fn arrive(link: NonNull<Link>, _: &Unplaced) {
    // SAFETY: the marker is repr(C) and begins with its item, which begins with its link. The
    // flushing thread holds markers and waiter until `left` is 0.
    let waiter = unsafe { (*link.cast::<Marker<'_>>().as_ptr()).waiter };
    let thread = waiter.thread.clone();
    if waiter.left.fetch_sub(1, Release) == 1 {
        // The waiter may have ended by now, but `thread` is a clone that this thread owns.
        thread.unpark();
    }
}

impl Core {
    /// Waits until all items that were pushed before the call have run. Returns false if the queue
    /// was closed by then; the caller must then wait for the worker's end instead.
    pub(crate) fn pass_marker(&self) -> bool {
        let waiter = Waiter { left: AtomicUsize::new(0), thread: thread::current() };
        let markers: [Marker<'_>; MAX_SHARDS] =
            core::array::from_fn(|_| Marker { item: RawItem::new(arrive), waiter: &waiter });
        let mut open = true;
        // This thread may have found an item pending that another thread has not pushed yet. Wait
        // until it is in its stack.
        while self.unplaced.0.load(Acquire) > 0 {
            thread::yield_now();
        }
        // Count all markers before the first is pushed. Otherwise the count could reach 0 too
        // early.
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
