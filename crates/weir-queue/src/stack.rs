//! The lock-free core: a stack that many threads push to, and that one thread empties as a whole.
//!
//! The head is one word with the whole state. It has the newest link, or says that the stack is
//! empty, that it is empty and its consumer sleeps, or that it is closed. So a push is one
//! compare-and-swap. The same instruction tells the producer whether it must wake the consumer, and
//! no second variable must be ordered against the first. The consumer reverses the taken stack
//! once, which gives first-in first-out order.
//!
//! The structure is that of the kernel's `llist` (`include/linux/llist.h`); the marks for sleeping
//! and closed are new here.

use core::ptr::{self, NonNull};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::sync::AtomicPtr;

/// The link of an item, which holds the stack together. An item is in at most one stack at a time.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Link {
    next: AtomicPtr<Link>,
}

/// A stack of links: many threads push them, and one takes all at once.
#[derive(Debug, Default)]
pub struct Stack {
    head: AtomicPtr<Link>,
}

/// The state of the stack that a push found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Pushed {
    /// The link is in the stack, and the consumer will find it.
    Queued,
    /// The link is in the stack, and the consumer sleeps. This thread, and no other, must wake it.
    Asleep,
    /// The stack is closed; the link still belongs to the caller.
    Closed,
}

/// The head of an empty stack whose consumer sleeps.
const ASLEEP: usize = 1;
/// The bit in the head that marks the stack as closed. The head may also have links that were not
/// taken yet.
const CLOSED: usize = 2;

fn asleep() -> *mut Link {
    ptr::without_provenance_mut(ASLEEP)
}

fn closed() -> *mut Link {
    ptr::without_provenance_mut(CLOSED)
}

/// The newest link in a head, without the marks for asleep and closed. It is null if the stack is
/// empty.
fn newest(head: *mut Link) -> *mut Link {
    head.map_addr(|address| address & !(ASLEEP | CLOSED))
}

fn is_closed(head: *mut Link) -> bool {
    head.addr() & CLOSED != 0
}

impl Link {
    /// Makes a link that is in no stack.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Link { next: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Makes a link that is in no stack.
    #[cfg(loom)]
    pub fn new() -> Self {
        Link { next: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Puts `older` behind this link in a list that is built for [`Stack::push_list`]. This link
    /// must be in no stack.
    #[inline]
    pub fn follow(&self, older: NonNull<Link>) {
        self.next.store(older.as_ptr(), Relaxed);
    }
}

impl Stack {
    /// Makes an empty, open stack.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Stack { head: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Makes an empty, open stack.
    #[cfg(loom)]
    pub fn new() -> Self {
        Stack { head: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Pushes `link`, lock-free, from any thread. The caller's earlier writes are visible to the
    /// thread that takes the link.
    ///
    /// # Safety
    /// `link` must be valid and in no stack. It must stay valid and unmoved until [`Stack::take`]
    /// has handed it out, unless the stack was closed. After the return, `link` may already be
    /// gone.
    #[inline]
    pub unsafe fn push(&self, link: NonNull<Link>) -> Pushed {
        // SAFETY: a single link is a list from itself to itself; the caller guarantees the rest.
        unsafe { self.push_list(link, link) }
    }

    /// Pushes a whole list in one exchange. [`Link::follow`] has linked it from `newest_link` to
    /// `oldest`.
    ///
    /// # Safety
    /// The same as for [`Stack::push`], for every link of the list.
    #[inline]
    pub unsafe fn push_list(&self, newest_link: NonNull<Link>, oldest: NonNull<Link>) -> Pushed {
        let mut head = self.head.load(Relaxed);
        loop {
            if is_closed(head) {
                return Pushed::Closed;
            }
            // SAFETY: the link is valid, and belongs to the caller until the exchange below
            // succeeds.
            unsafe { oldest.as_ref() }.next.store(newest(head), Relaxed);
            match self.head.compare_exchange_weak(head, newest_link.as_ptr(), Release, Relaxed) {
                Ok(_) if head == asleep() => return Pushed::Asleep,
                Ok(_) => return Pushed::Queued,
                Err(now) => head = now,
            }
        }
    }

    /// Takes every link, oldest first. Only the one consumer calls it.
    #[inline]
    pub fn take(&self) -> Chain {
        if newest(self.head.load(Relaxed)).is_null() {
            return Chain::default();
        }
        let head = self.head.swap(ptr::null_mut(), Acquire);
        let mut chain = Chain::reversed(newest(head));
        if is_closed(head) {
            // The exchange opened the stack for an instant. Close it again, and append the items
            // that were pushed meanwhile.
            let late = Chain::reversed(newest(self.head.swap(closed(), Acquire)));
            chain.len += late.len;
            // SAFETY: the newest link of `head` is the last of `chain`, and belongs to the
            // consumer.
            match unsafe { newest(head).as_ref() } {
                Some(last) => last.next.store(late.first, Relaxed),
                None => chain.first = late.first,
            }
        }
        chain
    }

    /// Whether the stack has no link to take.
    #[inline]
    pub fn is_empty(&self) -> bool {
        newest(self.head.load(Acquire)).is_null()
    }

    /// Marks the consumer asleep, unless the stack is closed. Returns false if there is a link to
    /// take, and then the consumer must not sleep. Only the one consumer calls it.
    pub fn sleep(&self) -> bool {
        match self.head.compare_exchange(ptr::null_mut(), asleep(), Acquire, Acquire) {
            Ok(_) => true,
            Err(head) => newest(head).is_null(),
        }
    }

    /// Whether the consumer is still marked asleep: since [`Stack::sleep`] nothing was pushed, and
    /// the stack was not closed.
    pub fn is_asleep(&self) -> bool {
        self.head.load(Acquire) == asleep()
    }

    /// Removes the mark that [`Stack::sleep`] made, if it is still there.
    pub fn awake(&self) {
        // A failed exchange means that a push or a close has replaced the mark already.
        let _ = self.head.compare_exchange(asleep(), ptr::null_mut(), Relaxed, Relaxed);
    }

    /// Marks the stack as closed. Returns true if the consumer sleeps and the caller must wake it.
    /// Links in the stack can still be taken. While the consumer takes them, the stack loses the
    /// mark for an instant. A push in that instant succeeds, and its link is taken too. No push
    /// succeeds once [`Stack::is_finished`] has returned true.
    pub fn close(&self) -> bool {
        let mut head = self.head.load(Relaxed);
        loop {
            let marked = newest(head).map_addr(|address| address | CLOSED);
            match self.head.compare_exchange_weak(head, marked, Release, Relaxed) {
                Ok(_) => return head == asleep(),
                Err(now) => head = now,
            }
        }
    }

    /// Whether the stack is closed.
    pub fn is_closed(&self) -> bool {
        is_closed(self.head.load(Acquire))
    }

    /// Whether the stack is closed and everything was taken. Only the one consumer calls it.
    pub fn is_finished(&self) -> bool {
        self.head.load(Acquire) == closed()
    }
}

/// Links taken from a stack, oldest first. The chain reads a link's successor before it hands the
/// link out. So the link's owner may free it or push it again at once. Links that are not handed
/// out are lost: run the chain to its end.
#[derive(Debug)]
#[must_use]
pub struct Chain {
    first: *mut Link,
    len: usize,
}

impl Default for Chain {
    fn default() -> Self {
        Chain { first: ptr::null_mut(), len: 0 }
    }
}

impl Chain {
    /// Makes a chain, oldest first, of the links from `newest` on.
    fn reversed(newest: *mut Link) -> Self {
        let mut chain = Chain::default();
        let mut link = newest;
        // SAFETY: links in a stack are valid, and the consumer owns the links that it has taken.
        while let Some(taken) = unsafe { link.as_ref() } {
            let older = taken.next.load(Relaxed);
            taken.next.store(chain.first, Relaxed);
            chain.first = link;
            chain.len += 1;
            link = older;
        }
        chain
    }
}

impl Iterator for Chain {
    type Item = NonNull<Link>;

    #[inline]
    fn next(&mut self) -> Option<NonNull<Link>> {
        let link = NonNull::new(self.first)?;
        // SAFETY: the link was taken and not yet handed out, so it is valid and belongs to the
        // chain.
        self.first = unsafe { link.as_ref() }.next.load(Relaxed);
        self.len -= 1;
        Some(link)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.len, Some(self.len))
    }
}

impl ExactSizeIterator for Chain {}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn push(stack: &Stack, link: &Link) -> Pushed {
        // SAFETY: the tests' links outlive their stacks and are pushed once.
        unsafe { stack.push(NonNull::from(link)) }
    }

    fn addresses(chain: Chain) -> Vec<*const Link> {
        chain.map(|link| link.as_ptr().cast_const()).collect()
    }

    #[test]
    fn what_was_pushed_first_comes_out_first() {
        let links = [Link::new(), Link::new(), Link::new()];
        let stack = Stack::new();
        for link in &links {
            assert_eq!(push(&stack, link), Pushed::Queued);
        }
        let chain = stack.take();
        assert_eq!(chain.len(), 3);
        assert_eq!(addresses(chain), links.each_ref().map(ptr::from_ref));
        assert!(stack.is_empty());
        assert_eq!(stack.take().len(), 0);
    }

    #[test]
    fn a_list_goes_in_as_a_whole_and_on_top() {
        let links = [Link::new(), Link::new(), Link::new()];
        let stack = Stack::new();
        assert_eq!(push(&stack, &links[0]), Pushed::Queued);
        links[2].follow(NonNull::from(&links[1]));
        // SAFETY: the tests' links outlive their stacks and are pushed once.
        let pushed = unsafe { stack.push_list(NonNull::from(&links[2]), NonNull::from(&links[1])) };
        assert_eq!(pushed, Pushed::Queued);
        assert_eq!(addresses(stack.take()), links.each_ref().map(ptr::from_ref));
    }

    #[test]
    fn only_the_first_push_after_sleep_has_to_wake() {
        let links = [Link::new(), Link::new()];
        let stack = Stack::new();
        assert!(stack.sleep());
        assert!(stack.is_asleep() && stack.is_empty());
        assert_eq!(push(&stack, &links[0]), Pushed::Asleep);
        assert!(!stack.is_asleep());
        assert_eq!(push(&stack, &links[1]), Pushed::Queued);
        assert!(!stack.sleep(), "a stack with links in it is no place to sleep at");
        assert_eq!(stack.take().len(), 2);
    }

    #[test]
    fn a_mark_taken_back_wakes_nobody() {
        let link = Link::new();
        let stack = Stack::new();
        assert!(stack.sleep());
        stack.awake();
        assert_eq!(push(&stack, &link), Pushed::Queued);
        stack.awake();
        assert_eq!(addresses(stack.take()), [ptr::from_ref(&link)]);
    }

    #[test]
    fn a_closed_stack_refuses_but_gives_out_what_it_holds() {
        let links = [Link::new(), Link::new()];
        let stack = Stack::new();
        assert_eq!(push(&stack, &links[0]), Pushed::Queued);
        assert!(!stack.close());
        assert_eq!(push(&stack, &links[1]), Pushed::Closed);
        assert!(!stack.is_finished());
        assert_eq!(addresses(stack.take()), [ptr::from_ref(&links[0])]);
        assert!(stack.is_finished());
        assert_eq!(push(&stack, &links[1]), Pushed::Closed);
        assert!(stack.sleep() && !stack.is_asleep(), "nothing can come, so there is nothing to be woken for");
    }

    #[test]
    fn closing_under_a_sleeper_says_to_wake_it() {
        let stack = Stack::new();
        assert!(stack.sleep());
        assert!(stack.close());
        assert!(!stack.close());
        assert!(stack.is_finished() && !stack.is_asleep());
    }
}
