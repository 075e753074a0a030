//! Atomics and threads: the standard ones, or loom's when `--cfg loom` checks every interleaving.

#[cfg(not(loom))]
pub(crate) use core::sync::atomic::{AtomicPtr, AtomicUsize};
#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicPtr, AtomicUsize};

#[cfg(all(feature = "std", loom))]
pub(crate) use loom::{sync::Mutex, thread};
#[cfg(all(feature = "std", not(loom)))]
pub(crate) use std::{sync::Mutex, thread};

/// Tells the processor, or the model checker, that this thread waits for another.
#[cfg(feature = "std")]
#[inline]
pub(crate) fn pause() {
    #[cfg(not(loom))]
    core::hint::spin_loop();
    #[cfg(loom)]
    loom::thread::yield_now();
}
