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
    static WITHIN_CLAIMS: std::cell::Cell<Option<fn()>> = const { std::cell::Cell::new(None) };
    static WITHIN_PUBLICATIONS: std::cell::Cell<Option<fn()>> = const { std::cell::Cell::new(None) };
}

/// From now on, each claim of a slot in this thread calls `others`. The claim has then read the
/// slot's record, and has not yet done the exchange that claims the slot. At that point another
/// processor may do anything. Simulators use this function; a release build leaves it out.
#[cfg(all(debug_assertions, not(loom)))]
pub fn run_within_claims(others: Option<fn()>) {
    WITHIN_CLAIMS.set(others);
}

/// From now on, each publication of a page in this thread calls `others`. At that point the map
/// names the page's new slot, and the old slot is not retired yet. Simulators use this function, as
/// they use [`run_within_claims`].
#[cfg(all(debug_assertions, not(loom)))]
pub fn run_within_publications(others: Option<fn()>) {
    WITHIN_PUBLICATIONS.set(others);
}

#[inline]
pub(crate) fn others_may_run_within_a_claim() {
    #[cfg(all(debug_assertions, not(loom)))]
    if let Some(others) = WITHIN_CLAIMS.get() {
        others();
    }
}

#[inline]
pub(crate) fn others_may_run_within_a_publication() {
    #[cfg(all(debug_assertions, not(loom)))]
    if let Some(others) = WITHIN_PUBLICATIONS.get() {
        others();
    }
}
