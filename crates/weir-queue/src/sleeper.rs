//! The wait of a consumer for links: it looks at its stacks some times, then sleeps until a push or
//! a close wakes it.

use core::sync::atomic::Ordering::Relaxed;

use crate::stack::Stack;
use crate::sync::{AtomicUsize, Mutex, pause, thread};

/// The thread to wake. The lock is taken only to go to sleep and to wake: never by a push that
/// finds its consumer awake.
pub(crate) struct Sleeper {
    thread: Mutex<Option<thread::Thread>>,
    /// Number of sleeps so far; only the consumer writes it.
    sleeps: AtomicUsize,
}

impl Sleeper {
    pub(crate) fn new() -> Self {
        Sleeper { thread: Mutex::new(None), sleeps: AtomicUsize::new(0) }
    }

    /// Wakes the consumer. Does nothing if it has never slept.
    #[cold]
    pub(crate) fn wake(&self) {
        if let Some(thread) = self.thread.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).as_ref() {
            thread.unpark();
        }
    }

    /// Number of times that the consumer went to sleep and was woken.
    pub(crate) fn wakes(&self) -> u64 {
        self.sleeps.load(Relaxed) as u64
    }

    /// Returns once one of `stacks` has a link, or is closed. It first polls `spins` times, then
    /// sleeps. Only the one consumer calls it.
    pub(crate) fn wait<'a, I>(&self, stacks: I, spins: u32)
    where
        I: Iterator<Item = &'a Stack> + Clone,
    {
        for _ in 0..spins {
            if stacks.clone().any(|stack| !stack.is_empty()) {
                return;
            }
            pause();
        }
        // Store the thread before a stack is marked asleep. So a producer that finds the mark also
        // finds the thread.
        *self.thread.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(thread::current());
        if stacks.clone().all(Stack::sleep) {
            // If every stack is closed, no stack has the mark, and no producer would wake this
            // thread.
            let nothing_came = || stacks.clone().all(Stack::is_empty) && stacks.clone().any(Stack::is_asleep);
            if nothing_came() {
                self.sleeps.store(self.sleeps.load(Relaxed) + 1, Relaxed);
            }
            while nothing_came() {
                thread::park();
            }
        }
        stacks.for_each(Stack::awake);
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use crate::stack::{Link, Pushed};
    use core::ptr::NonNull;
    use loom::sync::Arc;

    #[test]
    fn a_consumer_of_two_stacks_sleeps_through_no_push() {
        loom::model(|| {
            let shared = Arc::new(([Stack::new(), Stack::new()], Sleeper::new()));
            let producer = thread::spawn({
                let shared = Arc::clone(&shared);
                move || {
                    let link = NonNull::from(Box::leak(Box::new(Link::new())));
                    // SAFETY: the link was leaked, and is pushed once.
                    if unsafe { shared.0[1].push(link) } == Pushed::Asleep {
                        shared.1.wake();
                    }
                }
            });
            shared.1.wait(shared.0.iter(), 0);
            assert_eq!(shared.0.iter().map(|stack| stack.take().len()).sum::<usize>(), 1);
            producer.join().unwrap();
        });
    }

    #[test]
    fn a_consumer_sleeps_through_no_close() {
        loom::model(|| {
            let shared = Arc::new(([Stack::new(), Stack::new()], Sleeper::new()));
            let closer = thread::spawn({
                let shared = Arc::clone(&shared);
                move || {
                    if shared.0.iter().fold(false, |asleep, stack| stack.close() | asleep) {
                        shared.1.wake();
                    }
                }
            });
            while !shared.0.iter().all(Stack::is_finished) {
                shared.1.wait(shared.0.iter(), 0);
                loom::thread::yield_now();
            }
            closer.join().unwrap();
        });
    }
}
