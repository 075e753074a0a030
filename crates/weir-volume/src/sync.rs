//! The atomics of the standard library, or loom's when a model is being checked.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU8, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU8, AtomicU64, Ordering, fence};

#[cfg(all(debug_assertions, not(loom)))]
thread_local! {
    static OTHERS: std::cell::Cell<Option<fn()>> = const { std::cell::Cell::new(None) };
}

/// Has `others` run, in this thread, within each claim of a slot: between the look at a record and
/// the exchange that claims it, where another processor may do anything. For simulators; a release
/// build leaves it out.
#[cfg(all(debug_assertions, not(loom)))]
pub fn run_within_claims(others: Option<fn()>) {
    OTHERS.set(others);
}

#[inline]
pub(crate) fn others_may_run() {
    #[cfg(all(debug_assertions, not(loom)))]
    if let Some(others) = OTHERS.get() {
        others();
    }
}
