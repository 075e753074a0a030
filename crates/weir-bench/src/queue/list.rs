//! The list that both designs of `nv_kthread_q` use: items embedded in the caller's data, linked
//! under a lock.

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering::*};
use std::sync::{Mutex, PoisonError};

use super::jobs;

/// An item: its link, whether it is pending, its function and the function's argument.
pub(super) struct Item {
    next: AtomicPtr<Item>,
    pending: AtomicBool,
    function: fn(u64),
    argument: AtomicU64,
}

impl Item {
    pub(super) fn new() -> Self {
        Item {
            next: AtomicPtr::default(),
            pending: AtomicBool::new(false),
            function: jobs::job,
            argument: AtomicU64::new(0),
        }
    }

    pub(super) fn stamp(&self, stamp: u64) {
        self.argument.store(stamp, Relaxed);
    }

    /// Runs an item that was taken out of its list; it may be scheduled again from here on.
    pub(super) fn run(&self) {
        let argument = self.argument.load(Relaxed);
        self.pending.store(false, Release);
        (self.function)(argument);
    }
}

/// A list of items in the order in which they came.
#[derive(Default)]
pub(super) struct List(Mutex<Ends>);

/// The first and the last item; null in an empty list.
struct Ends {
    first: *mut Item,
    last: *mut Item,
}

// SAFETY: the pointers are to items that live for ever, and that threads may share.
unsafe impl Send for Ends {}

impl Default for Ends {
    fn default() -> Self {
        Ends { first: ptr::null_mut(), last: ptr::null_mut() }
    }
}

/// The item that a link points to.
fn item(link: *mut Item) -> Option<&'static Item> {
    // SAFETY: a list contains only items that were pushed, and these live for ever.
    unsafe { link.as_ref() }
}

impl List {
    /// Appends `new`. Returns false if it is pending already.
    pub(super) fn push(&self, new: &'static Item) -> bool {
        let mut ends = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if new.pending.load(Relaxed) {
            return false;
        }
        new.pending.store(true, Relaxed);
        new.next.store(ptr::null_mut(), Relaxed);
        let link = ptr::from_ref(new).cast_mut();
        match item(ends.last) {
            Some(last) => last.next.store(link, Relaxed),
            None => ends.first = link,
        }
        ends.last = link;
        true
    }

    /// Takes the first item out of the list.
    pub(super) fn pop(&self) -> Option<&'static Item> {
        let mut ends = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let first = item(ends.first)?;
        ends.first = first.next.load(Relaxed);
        if ends.first.is_null() {
            ends.last = ptr::null_mut();
        }
        Some(first)
    }

    /// Takes all items out of the list at once.
    pub(super) fn splice(&self) -> Spliced {
        let ends = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        Spliced(ends.first)
    }
}

/// An iterator over items that were taken out of a list all at once. It keeps their order.
pub(super) struct Spliced(*mut Item);

impl Iterator for Spliced {
    type Item = &'static Item;

    fn next(&mut self) -> Option<&'static Item> {
        let first = item(self.0)?;
        self.0 = first.next.load(Relaxed);
        Some(first)
    }
}
