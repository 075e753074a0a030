//! Items, which a queue links. An item is embedded in the caller's own data, and the queue finds
//! the owner of an item from the item's address.
//!
//! The traits follow the kernel's own Rust bindings (`rust/kernel/workqueue.rs`: `Work`, `HasWork`,
//! `WorkItem`).

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::marker::PhantomData;
use core::ops::Deref;
use core::ptr::NonNull;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use crate::stack::Link;
use crate::sync::AtomicUsize;

/// A field of a `T`, by which a queue links the `T` and runs its work. A type with several items
/// tells them apart by `ID`.
#[repr(transparent)]
pub struct Item<T, const ID: u64 = 0> {
    pub(crate) raw: RawItem,
    owner: PhantomData<fn(T)>,
}

/// An item without its owner's type, as the worker sees it.
#[repr(C)]
pub(crate) struct RawItem {
    /// This is the first field, so that a pointer to the link is a pointer to the item.
    pub(crate) link: Link,
    /// The bits `PENDING`, `PLACED` and `AWAITED`. The bits above them count how often a claim of
    /// the item has ended.
    state: AtomicUsize,
    run: unsafe fn(NonNull<Link>, &Unplaced),
}

/// The item has been claimed for a push, or pushed already, and the worker has not taken it yet.
const PENDING: usize = 1;
/// The item was pushed: its place in the queue is decided.
const PLACED: usize = 2;
/// A thread found the item pending before the item was placed, and [`Unplaced`] counts the item.
const AWAITED: usize = 4;
const RELEASES: usize = 8;

/// The number of a queue's items that a thread found pending before they were placed in a stack.
///
/// A thread may find an item pending that another thread has claimed and is about to push. If the
/// first thread then flushes, the flush must wait for that item too. So a flush first waits until
/// this number is 0. It is above 0 only for the few instructions between claim and push.
pub(crate) type Unplaced = AtomicUsize;

/// The right to push an item that was claimed. The number is the item's state at the time of the
/// claim.
#[must_use]
pub(crate) struct Claim(usize);

/// A type that embeds an [`Item`]. Implement it with [`has_item!`](crate::has_item), which checks
/// the field's type.
///
/// # Safety
/// An `Item<Self, ID>` must lie `OFFSET` bytes into every `Self`.
pub unsafe trait HasItem<const ID: u64 = 0>: Sized {
    /// The offset of the item in its owner, in bytes.
    const OFFSET: usize;
}

/// Implements [`HasItem`] for a type's field: `has_item!(Frame, present)`, or `has_item!(Frame,
/// retry, 1)` for another item of the same type.
#[macro_export]
macro_rules! has_item {
    ($owner:ty, $field:ident) => {
        $crate::has_item!($owner, $field, 0);
    };
    ($owner:ty, $field:ident, $id:expr) => {
        // SAFETY: `offset_of!` takes a field of the type itself, and the `const _` before it checks
        // the field's type.
        unsafe impl $crate::HasItem<{ $id }> for $owner {
            const OFFSET: usize = {
                const _: fn(&$owner) -> &$crate::Item<$owner, { $id }> = |owner| &owner.$field;
                ::core::mem::offset_of!($owner, $field)
            };
        }
    };
}

/// The work that a queue does for an item's owner.
pub trait Work<const ID: u64 = 0>: HasItem<ID> {
    /// The pointer by which a queue holds the owner: `Arc<Self>`, `&'static Self`, or `Box<Self>`.
    type Pointer: Pointer<Target = Self>;

    /// Runs on the queue's worker. The item is in no queue by then, so it may be scheduled again,
    /// or dropped.
    fn run(this: Self::Pointer);
}

/// A pointer by which a queue holds an item's owner.
///
/// # Safety
/// `into_raw` must return a pointer to the value, which may neither move nor die until `from_raw`
/// takes the pointer back.
pub unsafe trait Pointer: Deref<Target: Sized> + Send + 'static {
    /// Whether other pointers to the value may exist. If so, several threads may schedule the
    /// value's item, which then needs a flag for "pending".
    const SHARED: bool;

    /// Turns the pointer into a raw one.
    fn into_raw(self) -> NonNull<Self::Target>;

    /// Turns a raw pointer back into the pointer that it came from.
    ///
    /// # Safety
    /// `raw` must come from [`Pointer::into_raw`] of this type, once for each call.
    unsafe fn from_raw(raw: NonNull<Self::Target>) -> Self;
}

/// A pointer that can be cloned. So a thread may schedule an item that another thread has scheduled
/// already.
pub trait SharedPointer: Pointer + Clone {}

/// A pointer that is the only one to its value. So its item cannot be pending already, and needs no
/// flag.
pub trait Exclusive: Pointer {}

// SAFETY: the raw pointer owns one reference count.
unsafe impl<T: Send + Sync + 'static> Pointer for Arc<T> {
    const SHARED: bool = true;

    fn into_raw(self) -> NonNull<T> {
        // SAFETY: an Arc is never null.
        unsafe { NonNull::new_unchecked(Arc::into_raw(self).cast_mut()) }
    }

    unsafe fn from_raw(raw: NonNull<T>) -> Self {
        // SAFETY: the caller guarantees that the pointer comes from `into_raw`.
        unsafe { Arc::from_raw(raw.as_ptr()) }
    }
}

// SAFETY: a value that is borrowed for ever neither moves nor dies.
unsafe impl<T: Sync + 'static> Pointer for &'static T {
    const SHARED: bool = true;

    fn into_raw(self) -> NonNull<T> {
        NonNull::from(self)
    }

    unsafe fn from_raw(raw: NonNull<T>) -> Self {
        // SAFETY: the caller guarantees that the pointer comes from `into_raw`, so the borrow is
        // for ever.
        unsafe { raw.as_ref() }
    }
}

// SAFETY: the raw pointer owns the value.
unsafe impl<T: Send + 'static> Pointer for Box<T> {
    const SHARED: bool = false;

    fn into_raw(self) -> NonNull<T> {
        // SAFETY: a Box is never null.
        unsafe { NonNull::new_unchecked(Box::into_raw(self)) }
    }

    unsafe fn from_raw(raw: NonNull<T>) -> Self {
        // SAFETY: the caller guarantees that the pointer comes from `into_raw`.
        unsafe { Box::from_raw(raw.as_ptr()) }
    }
}

impl<T: Send + Sync + 'static> SharedPointer for Arc<T> {}
impl<T: Sync + 'static> SharedPointer for &'static T {}
impl<T: Send + 'static> Exclusive for Box<T> {}

impl<T: Work<ID>, const ID: u64> Item<T, ID> {
    /// Makes an item that is in no queue, to be embedded in a `T`.
    #[must_use]
    pub fn new() -> Self {
        Item { raw: RawItem::new(run::<T, ID>), owner: PhantomData }
    }
}

impl<T, const ID: u64> Item<T, ID> {
    /// Whether the item is scheduled and its function has not begun. The answer may be out of date
    /// when the caller reads it, so [`Queue::schedule`](crate::Queue::schedule) does not rely on
    /// it.
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.raw.state.load(Acquire) & PENDING != 0
    }
}

impl<T: Work<ID>, const ID: u64> Default for Item<T, ID> {
    fn default() -> Self {
        Item::new()
    }
}

impl<T, const ID: u64> core::fmt::Debug for Item<T, ID> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Item").field("pending", &self.is_pending()).finish_non_exhaustive()
    }
}

impl Claim {
    /// Notes that `item` has been pushed. The item may have run meanwhile, and been claimed again.
    #[inline]
    pub(crate) fn placed(self, item: &RawItem, unplaced: &Unplaced) {
        let mut state = self.0;
        while let Err(now) = item.state.compare_exchange(state, self.0 | PLACED, Release, Relaxed) {
            if now != self.0 | AWAITED {
                return;
            }
            state = now;
        }
        if state != self.0 {
            unplaced.fetch_sub(1, Release);
        }
    }
}

impl RawItem {
    pub(crate) fn new(run: unsafe fn(NonNull<Link>, &Unplaced)) -> Self {
        RawItem { link: Link::new(), state: AtomicUsize::new(0), run }
    }

    /// Claims the item for a push. Returns `None` if the item is pending already. Both outcomes are
    /// one atomic exchange, and the worker's own exchange comes after it. So the coming run sees
    /// everything that the caller did before.
    #[inline]
    pub(crate) fn claim(&self, unplaced: &Unplaced) -> Option<Claim> {
        let found = self.state.fetch_or(PENDING, AcqRel);
        if found & PENDING == 0 {
            return Some(Claim(found | PENDING));
        }
        if found & (PLACED | AWAITED) == 0 {
            self.await_place(found, unplaced);
        }
        None
    }

    /// Counts an item that is claimed and not placed yet. Leaves the count unchanged if the item
    /// was placed meanwhile.
    #[cold]
    fn await_place(&self, claimed: usize, unplaced: &Unplaced) {
        // Count the item before AWAITED is set: a thread that finds AWAITED subtracts the item from
        // the count immediately.
        unplaced.fetch_add(1, Relaxed);
        if self.state.compare_exchange(claimed, claimed | AWAITED, AcqRel, Acquire).is_err() {
            // The item has been placed in the queue meanwhile, or another thread has set AWAITED
            // and counted the item. So take this count back.
            unplaced.fetch_sub(1, Relaxed);
        }
    }

    /// Ends the claim of an item that was not pushed after all, or that the worker has taken.
    #[inline]
    pub(crate) fn release(&self, unplaced: &Unplaced) {
        let mut state = self.state.load(Relaxed);
        loop {
            let next = (state & !(RELEASES - 1)).wrapping_add(RELEASES);
            match self.state.compare_exchange_weak(state, next, AcqRel, Relaxed) {
                Ok(_) => break,
                Err(now) => state = now,
            }
        }
        if state & AWAITED != 0 {
            unplaced.fetch_sub(1, Release);
        }
    }
}

/// Runs the item that begins with `link`.
///
/// # Safety
/// `link` must be the first field of a valid [`RawItem`] that was pushed and taken once.
#[inline]
pub(crate) unsafe fn run_link(link: NonNull<Link>, unplaced: &Unplaced) {
    // SAFETY: the item is repr(C) and begins with its link.
    let function = unsafe { (*link.cast::<RawItem>().as_ptr()).run };
    // SAFETY: an item's function expects that item's link.
    unsafe { function(link, unplaced) }
}

/// The item within `owner`.
#[inline]
pub(crate) fn item_of<T: HasItem<ID>, const ID: u64>(owner: NonNull<T>) -> NonNull<RawItem> {
    // SAFETY: OFFSET lies within the owner, by HasItem's contract.
    unsafe { owner.byte_add(T::OFFSET).cast() }
}

/// Finds the owner of a link, and runs the owner's work.
///
/// # Safety
/// `link` must be the link of item `ID` in a `T`, and must have been taken once. A pointer to that
/// `T` must have been turned raw for the queue.
unsafe fn run<T: Work<ID>, const ID: u64>(link: NonNull<Link>, unplaced: &Unplaced) {
    // SAFETY: the item lies OFFSET bytes into its owner.
    let owner: NonNull<T> = unsafe { link.byte_sub(T::OFFSET).cast() };
    if T::Pointer::SHARED {
        // SAFETY: the queue's own pointer keeps the owner alive until `from_raw` below.
        unsafe { item_of::<T, ID>(owner).as_ref() }.release(unplaced);
    }
    // SAFETY: a link is pushed once for each pointer turned raw.
    T::run(unsafe { T::Pointer::from_raw(owner) });
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use crate::stack::{Pushed, Stack};
    use loom::sync::Arc;

    struct Shared {
        item: RawItem,
        marker: Link,
        stack: Stack,
        unplaced: Unplaced,
        written: AtomicUsize,
    }

    fn shared() -> Arc<Shared> {
        Arc::new(Shared {
            item: RawItem::new(|_, _| ()),
            marker: Link::new(),
            stack: Stack::new(),
            unplaced: Unplaced::new(0),
            written: AtomicUsize::new(0),
        })
    }

    /// Schedules the item as a queue does: false if it is pending.
    fn schedule(shared: &Shared) -> bool {
        let Some(claim) = shared.item.claim(&shared.unplaced) else { return false };
        // SAFETY: this thread has claimed the item and not pushed it yet, so it is in no stack. It
        // lives until the loom test has ended, and nothing takes links after that.
        assert_eq!(unsafe { shared.stack.push(NonNull::from(&shared.item.link)) }, Pushed::Queued);
        claim.placed(&shared.item, &shared.unplaced);
        true
    }

    /// Takes all links as a worker does. Returns how many of them were the item's.
    fn run_all(shared: &Shared) -> usize {
        let taken = shared.stack.take();
        taken
            .filter(|&link| link == NonNull::from(&shared.item.link))
            .inspect(|_| shared.item.release(&shared.unplaced))
            .count()
    }

    #[test]
    fn whoever_is_told_pending_wrote_before_the_run_reads() {
        loom::model(|| {
            let shared = shared();
            assert!(schedule(&shared));
            let scheduler = loom::thread::spawn({
                let shared = Arc::clone(&shared);
                move || {
                    shared.written.store(1, Relaxed);
                    !schedule(&shared)
                }
            });
            // The worker takes the item out of the queue, and then runs its function, which reads
            // `written`.
            assert_eq!(run_all(&shared), 1);
            let seen = shared.written.load(Relaxed);
            let told_pending = scheduler.join().unwrap();
            assert!(!told_pending || seen == 1);
        });
    }

    #[test]
    fn of_two_schedulers_one_claims() {
        loom::model(|| {
            let shared = shared();
            let other = loom::thread::spawn({
                let shared = Arc::clone(&shared);
                move || schedule(&shared)
            });
            assert!(schedule(&shared) ^ other.join().unwrap());
            assert_eq!(shared.unplaced.load(Relaxed), 0);
        });
    }

    #[test]
    fn a_marker_that_follows_a_refusal_follows_the_item() {
        loom::model(|| {
            let shared = shared();
            let other = loom::thread::spawn({
                let shared = Arc::clone(&shared);
                move || schedule(&shared)
            });
            let refused = !schedule(&shared);
            while shared.unplaced.load(Acquire) > 0 {
                loom::thread::yield_now();
            }
            // SAFETY: the marker is pushed once. It lives until the loom test has ended, and
            // nothing takes links after that.
            assert_eq!(unsafe { shared.stack.push(NonNull::from(&shared.marker)) }, Pushed::Queued);
            let first = shared.stack.take().next();
            assert!(!refused || first == Some(NonNull::from(&shared.item.link)));
            assert_eq!(refused, other.join().unwrap());
        });
    }

    #[test]
    fn an_item_that_runs_meanwhile_is_counted_down_once() {
        loom::model(|| {
            let shared = shared();
            let others = [(); 2].map(|()| {
                let shared = Arc::clone(&shared);
                loom::thread::spawn(move || usize::from(schedule(&shared)))
            });
            let mut runs = run_all(&shared);
            let scheduled: usize = others.into_iter().map(|other| other.join().unwrap()).sum();
            runs += run_all(&shared);
            assert_eq!(runs, scheduled);
            assert_eq!(shared.unplaced.load(Relaxed), 0);
        });
    }
}
