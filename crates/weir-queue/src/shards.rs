//! Stacks for producing threads: one for each thread, as long as there are no more threads than
//! stacks.

use core::ptr::NonNull;

use crate::stack::{Chain, Link, Pushed, Stack};

/// A value alone on two cache lines, since Intel's prefetcher fetches lines in pairs.
#[repr(align(128))]
#[derive(Default)]
pub(crate) struct Padded<T>(pub(crate) T);

pub(crate) struct Shards {
    /// The stacks; their number is a power of two.
    stacks: Box<[Padded<Stack>]>,
}

impl Shards {
    pub(crate) fn new(count: usize) -> Self {
        Shards { stacks: (0..count.next_power_of_two()).map(|_| Padded::default()).collect() }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Stack> + Clone {
        self.stacks.iter().map(|padded| &padded.0)
    }

    /// Pushes `link` to the stack that the calling thread always uses. So a thread's items stay in
    /// order.
    ///
    /// # Safety
    /// The same as for [`Stack::push`].
    #[inline]
    pub(crate) unsafe fn push(&self, link: NonNull<Link>) -> Pushed {
        let own = thread_number() & (self.stacks.len() - 1);
        // SAFETY: the caller guarantees the link.
        unsafe { self.stacks[own].0.push(link) }
    }

    /// Empties all stacks, one after the other. Returns the links of each.
    #[inline]
    pub(crate) fn take(&self) -> impl Iterator<Item = Chain> {
        self.iter().map(Stack::take)
    }

    /// Whether no more links can come: all stacks are closed and empty.
    pub(crate) fn are_finished(&self) -> bool {
        self.iter().all(Stack::is_finished)
    }

    /// Closes all stacks; returns true if the consumer sleeps.
    pub(crate) fn close(&self) -> bool {
        self.iter().fold(false, |asleep, stack| stack.close() | asleep)
    }
}

/// A number for the calling thread: threads that start one after the other get consecutive ones.
#[cfg(not(loom))]
#[inline]
fn thread_number() -> usize {
    use core::cell::Cell;
    use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    static THREADS: AtomicUsize = AtomicUsize::new(1);
    thread_local! {
        static NUMBER: Cell<usize> = const { Cell::new(0) };
    }
    #[cold]
    fn first_use() -> usize {
        let number = THREADS.fetch_add(1, Relaxed);
        NUMBER.set(number);
        number
    }
    match NUMBER.get() {
        0 => first_use(),
        number => number,
    }
}

/// The number of the calling thread under the model checker. All threads have the same one, so they
/// share a stack, which is the harder case. And each execution does the same steps.
#[cfg(loom)]
fn thread_number() -> usize {
    0
}
