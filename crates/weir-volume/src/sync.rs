//! The atomics of the standard library, or loom's when a model is being checked.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{
    AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
#[cfg(not(loom))]
pub(crate) use std::sync::OnceLock;
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{
    AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};

/// A `OnceLock` for models, since loom has none. Another thread sees the value by loom's rules of
/// memory order.
#[cfg(loom)]
pub(crate) struct OnceLock<T> {
    is_set: AtomicBool,
    value: std::sync::OnceLock<T>,
}

#[cfg(loom)]
impl<T> OnceLock<T> {
    pub fn new() -> Self {
        OnceLock { is_set: AtomicBool::new(false), value: std::sync::OnceLock::new() }
    }

    pub fn get(&self) -> Option<&T> {
        self.is_set.load(Ordering::Acquire).then(|| self.value.get()).flatten()
    }

    pub fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
        if self.get().is_none() {
            // If two threads make a value, both get the value of the first that comes here.
            let made = make();
            self.value.get_or_init(|| made);
            self.is_set.swap(true, Ordering::AcqRel);
        }
        self.value.get().expect("it is set")
    }
}

#[cfg(all(debug_assertions, not(loom)))]
thread_local! {
    static OTHERS: std::cell::Cell<Option<fn()>> = const { std::cell::Cell::new(None) };
}

/// Makes each claim of a slot in this thread call `others`. The call comes after the look at the
/// slot's record, and before the exchange that claims the slot. At that point another processor may
/// do anything. For simulators; a release build leaves it out.
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
