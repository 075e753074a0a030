//! Items: what a queue links. They are embedded in the caller's own data, and a queue gets from an
//! item back to its owner.
//!
//! The traits follow the kernel's own Rust bindings (`rust/kernel/workqueue.rs`: `Work`, `HasWork`,
//! `WorkItem`).

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::marker::PhantomData;
use core::ops::Deref;
use core::ptr::NonNull;
use core::sync::atomic::Ordering::AcqRel;

use crate::stack::Link;
use crate::sync::AtomicBool;

/// A place in a queue, embedded in a `T`. A type with several items tells them apart by `ID`.
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
    pending: AtomicBool,
    run: unsafe fn(NonNull<Link>),
}

/// A type that embeds an [`Item`]. Implement it with [`has_item!`](crate::has_item), which checks
/// the field's type.
///
/// # Safety
/// An `Item<Self, ID>` must lie `OFFSET` bytes into every `Self`.
pub unsafe trait HasItem<const ID: u64 = 0>: Sized {
    /// The offset of the item, in bytes.
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
        // SAFETY: `offset_of!` takes a field of the type itself, and the constant within checks the
        // field's type.
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
    /// Whether others may point to the value too, so that its item needs a flag that says it is
    /// pending.
    const SHARED: bool;

    /// Turns the pointer into a raw one.
    fn into_raw(self) -> NonNull<Self::Target>;

    /// Turns a raw pointer back.
    ///
    /// # Safety
    /// `raw` must come from [`Pointer::into_raw`] of this type, once for each call.
    unsafe fn from_raw(raw: NonNull<Self::Target>) -> Self;
}

/// A pointer that can be cloned, so that one item can be scheduled while it is pending already.
pub trait SharedPointer: Pointer + Clone {}

/// The only pointer to its value. An item behind it cannot be pending already, and needs no flag
/// for that.
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
    /// when the caller reads it; [`Queue::schedule`](crate::Queue::schedule) decides for itself.
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.raw.pending.load(core::sync::atomic::Ordering::Acquire)
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

impl RawItem {
    pub(crate) fn new(run: unsafe fn(NonNull<Link>)) -> Self {
        RawItem { link: Link::new(), pending: AtomicBool::new(false), run }
    }

    /// Claims the item for a push; false if it is pending. It is always an exchange, never a load
    /// first: the worker's own exchange then reads from this one. So for a caller that is told
    /// "pending", the coming run sees everything that the caller did before.
    #[inline]
    pub(crate) fn claim(&self) -> bool {
        !self.pending.swap(true, AcqRel)
    }

    /// Ends the claim of an item that was not pushed, or that has been taken.
    #[inline]
    pub(crate) fn release(&self) {
        self.pending.swap(false, AcqRel);
    }
}

/// Runs the item that begins with `link`.
///
/// # Safety
/// `link` must be the first field of a valid [`RawItem`] that was pushed and taken once.
#[inline]
pub(crate) unsafe fn run_link(link: NonNull<Link>) {
    // SAFETY: the item is repr(C) and begins with its link.
    let function = unsafe { (*link.cast::<RawItem>().as_ptr()).run };
    // SAFETY: an item's function expects that item's link.
    unsafe { function(link) }
}

/// The item within `owner`.
#[inline]
pub(crate) fn item_of<T: HasItem<ID>, const ID: u64>(owner: NonNull<T>) -> NonNull<RawItem> {
    // SAFETY: OFFSET lies within the owner, by HasItem's contract.
    unsafe { owner.byte_add(T::OFFSET).cast() }
}

/// Gets from a link back to its owner, and does the owner's work.
///
/// # Safety
/// `link` must be that of item `ID` of a `T` which was turned raw for the queue, and must have been
/// taken once.
unsafe fn run<T: Work<ID>, const ID: u64>(link: NonNull<Link>) {
    // SAFETY: the item lies OFFSET bytes into its owner.
    let owner: NonNull<T> = unsafe { link.byte_sub(T::OFFSET).cast() };
    if T::Pointer::SHARED {
        // SAFETY: the queue's own pointer keeps the owner alive until `from_raw` below.
        unsafe { item_of::<T, ID>(owner).as_ref() }.release();
    }
    // SAFETY: a link is pushed once for each pointer turned raw.
    T::run(unsafe { T::Pointer::from_raw(owner) });
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use core::sync::atomic::Ordering::Relaxed;
    use loom::sync::atomic::AtomicUsize;

    #[test]
    fn whoever_is_told_pending_wrote_before_the_run_reads() {
        loom::model(|| {
            let shared = loom::sync::Arc::new((RawItem::new(|_| ()), AtomicUsize::new(0)));
            assert!(shared.0.claim());
            let scheduler = loom::thread::spawn({
                let shared = loom::sync::Arc::clone(&shared);
                move || {
                    shared.1.store(1, Relaxed);
                    !shared.0.claim()
                }
            });
            // The worker takes the item out of the queue, and then runs the function, which reads.
            shared.0.release();
            let seen = shared.1.load(Relaxed);
            let told_pending = scheduler.join().unwrap();
            assert!(!told_pending || seen == 1);
        });
    }

    #[test]
    fn of_two_schedulers_one_claims() {
        loom::model(|| {
            let item = loom::sync::Arc::new(RawItem::new(|_| ()));
            let other = loom::thread::spawn({
                let item = loom::sync::Arc::clone(&item);
                move || item.claim()
            });
            assert!(item.claim() ^ other.join().unwrap());
        });
    }
}
