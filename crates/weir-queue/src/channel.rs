//! A bounded channel of values, built on the queue's stacks: every sender has its own stacks and
//! its own slots.
//!
//! A slot has room for one value of one sender, and moves in a circle. The sender takes the slot
//! from its private list, writes the value, and pushes the slot to a stack of full slots. The
//! receiver takes that whole stack, reads the values, and pushes the slots to a stack of empty
//! ones. When the sender's private list is empty, the sender takes the whole stack of empty slots.
//! So a send is one exchange on a cache line that no other sender touches. Nothing is allocated
//! once a sender was made. Neither stack has the ABA problem, because each is only ever taken as a
//! whole.

use core::cell::UnsafeCell;
use core::fmt;
use core::iter::once;
use core::mem::MaybeUninit;
use core::ptr::NonNull;
use core::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::sync::Arc;

use crate::metrics::{Counters, Metrics};
use crate::shards::Padded;
use crate::sleeper::Sleeper;
use crate::stack::{Chain, Link, Pushed, Stack};
use crate::sync::{AtomicUsize, pause};
use crate::worker::{LINGER, SMALL_BATCH};

/// Number of read slots that the receiver collects before it returns them to their sender in one
/// exchange.
const GIVE_BACK: usize = 64;

/// Makes a channel for values of `T`, in which each sender has room for `capacity` of them (at
/// least one).
///
/// Each sender's values arrive in the order in which it sent them. Cloning a [`Sender`] makes
/// another, with its own room. Each sender takes memory for `capacity` values of `T`, and for as
/// many pointers.
///
/// ```
/// let (mut sender, mut receiver) = weir_queue::channel(128);
/// let mut other = sender.clone();
/// let worker = std::thread::spawn(move || {
///     let mut pages = Vec::new();
///     // Everything that waits, in one call; then everything that came meanwhile.
///     while let Ok(()) = receiver.drain(|batch| pages.extend(batch)) {}
///     pages.sort();
///     pages
/// });
/// sender.send(7).unwrap();
/// other.send(9).unwrap();
/// drop((sender, other));
/// assert_eq!(worker.join().unwrap(), [7, 9]);
/// ```
pub fn channel<T: Send>(capacity: usize) -> (Sender<T>, Receiver<T>) {
    let shared = Arc::new(Shared {
        joining: Padded::default(),
        sleeper: Sleeper::new(),
        senders: AtomicUsize::new(0),
        counters: Padded::default(),
    });
    let receiver = Receiver {
        shared: Arc::clone(&shared),
        readers: Vec::new(),
        at: 0,
        left: 0,
        last_batch: 0,
        spins: 0,
        linger: LINGER,
    };
    (Sender::join(shared, capacity.max(1)), receiver)
}

/// The state that all ends of a channel share.
struct Shared {
    /// The lanes that the receiver does not know yet.
    joining: Padded<Stack>,
    /// Lets the receiver sleep while the channel is empty.
    sleeper: Sleeper,
    senders: AtomicUsize,
    counters: Padded<Counters>,
}

/// The state that one sender and the receiver share.
#[repr(C)]
struct Lane<T> {
    /// The link that is in `Shared::joining` until the receiver has seen the lane. It is the first
    /// field, so that a pointer to it is a pointer to the lane.
    joining: Link,
    /// Slots with values, on their way to the receiver.
    full: Padded<Stack>,
    /// Slots on their way back to the sender.
    empty: Padded<Stack>,
    /// Lets the sender sleep until the receiver returns a slot.
    sleeper: Sleeper,
    slots: Box<[Slot<T>]>,
}

#[repr(C)]
struct Slot<T> {
    link: Link,
    value: UnsafeCell<MaybeUninit<T>>,
}

// SAFETY: a slot belongs to the sender or to the receiver, never to both; the stacks hand it over
// with its content.
unsafe impl<T: Send> Sync for Lane<T> {}
// SAFETY: a slot belongs to one side at a time, and nothing in a lane belongs to a thread.
unsafe impl<T: Send> Send for Lane<T> {}

/// The sending end of a channel. Every clone has its own room for values and its own order.
pub struct Sender<T: Send> {
    shared: Arc<Shared>,
    lane: Arc<Lane<T>>,
    /// Slots that came back from the receiver.
    free: Chain,
    /// The index of the first slot that was never used. All later slots are unused too.
    fresh: usize,
}

// SAFETY: only the sender has the chain of free slots, and the chain moves with the sender.
unsafe impl<T: Send> Send for Sender<T> {}

/// The receiving end of a channel.
pub struct Receiver<T: Send> {
    shared: Arc<Shared>,
    readers: Vec<Reader<T>>,
    /// The index of the reader whose values come next.
    at: usize,
    /// Number of values that were taken from the lanes and not yet received.
    left: usize,
    last_batch: usize,
    spins: u32,
    linger: u32,
}

/// The receiver's side of a lane.
struct Reader<T> {
    lane: Arc<Lane<T>>,
    taken: Chain,
    /// The list of slots that were read and not yet returned: newest, oldest, and their number.
    read: Option<(NonNull<Link>, NonNull<Link>, usize)>,
}

// SAFETY: only the receiver has the chains, and the chains move with the receiver.
unsafe impl<T: Send> Send for Receiver<T> {}

/// The reason why a value was not sent, with the value itself.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum SendError<T> {
    /// The sender's room is used up until the receiver catches up.
    Full(T),
    /// The receiver is gone.
    Closed(T),
}

/// All senders are gone, and everything that they sent was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed;

impl<T> SendError<T> {
    /// The value that was not sent.
    pub fn into_inner(self) -> T {
        match self {
            SendError::Full(value) | SendError::Closed(value) => value,
        }
    }
}

impl<T> fmt::Display for SendError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SendError::Full(_) => "the channel is full; send again once the receiver has caught up",
            SendError::Closed(_) => "the channel is closed: its receiver is gone",
        })
    }
}

impl<T> fmt::Debug for SendError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SendError::Full(_) => "Full(..)",
            SendError::Closed(_) => "Closed(..)",
        })
    }
}

impl<T> std::error::Error for SendError<T> {}

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the channel is closed: its senders are gone, and nothing is left in it")
    }
}

impl std::error::Error for Closed {}

impl<T: Send> Sender<T> {
    /// Makes a new sender, and announces it to the receiver.
    fn join(shared: Arc<Shared>, capacity: usize) -> Self {
        shared.senders.fetch_add(1, Relaxed);
        let slot = || Slot { link: Link::new(), value: UnsafeCell::new(MaybeUninit::uninit()) };
        let lane = Arc::new(Lane {
            joining: Link::new(),
            full: Padded::default(),
            empty: Padded::default(),
            sleeper: Sleeper::new(),
            slots: (0..capacity).map(|_| slot()).collect(),
        });
        let raw = Arc::into_raw(Arc::clone(&lane)).cast_mut();
        // SAFETY: a new lane's link is in no stack. The receiver's reference, from `into_raw`,
        // keeps it valid.
        match unsafe { shared.joining.0.push(NonNull::new_unchecked(raw).cast()) } {
            Pushed::Queued => {}
            Pushed::Asleep => shared.sleeper.wake(),
            Pushed::Closed => {
                lane.full.0.close();
                lane.empty.0.close();
                // SAFETY: the reference was turned raw above, and the receiver will not take it.
                drop(unsafe { Arc::from_raw(raw) });
            }
        }
        Sender { shared, lane, free: Chain::default(), fresh: 0 }
    }

    /// Sends `value` without waiting. The call is lock-free, allocates nothing, and makes a system
    /// call only when the receiver sleeps.
    ///
    /// # Errors
    /// Fails with [`SendError::Full`] when this sender's room is used up, and with
    /// [`SendError::Closed`] when the receiver is gone.
    #[inline]
    pub fn try_send(&mut self, value: T) -> Result<(), SendError<T>> {
        let Some(slot) = self.slot() else {
            // Ask the stack `empty` whether the receiver is gone. The stack `full` would not do:
            // when it is closed, it looks open for an instant while the receiver takes its links.
            let closed = self.lane.empty.0.is_closed();
            return Err(if closed { SendError::Closed(value) } else { SendError::Full(value) });
        };
        // SAFETY: a slot from `slot` belongs to this sender alone until it is pushed.
        unsafe { (*slot.as_ref().value.get()).write(value) };
        // SAFETY: the slot is in no stack, and the lane outlives it.
        match unsafe { self.lane.full.0.push(slot.cast()) } {
            Pushed::Queued => Ok(()),
            Pushed::Asleep => {
                self.shared.sleeper.wake();
                Ok(())
            }
            Pushed::Closed => {
                // SAFETY: the slot was not pushed, so the value is still in it. The slot is not
                // used again.
                let value = unsafe { (*slot.as_ref().value.get()).assume_init_read() };
                Err(SendError::Closed(value))
            }
        }
    }

    /// Sends `value`, and waits while this sender's room is used up.
    ///
    /// # Errors
    /// Fails with [`SendError::Closed`] when the receiver is gone.
    pub fn send(&mut self, mut value: T) -> Result<(), SendError<T>> {
        loop {
            match self.try_send(value) {
                Err(SendError::Full(back)) => value = back,
                done => return done,
            }
            self.lane.sleeper.wait(once(&self.lane.empty.0), 0);
        }
    }

    /// Takes a slot to write a value to. `None`: the receiver has not returned one.
    #[inline]
    fn slot(&mut self) -> Option<NonNull<Slot<T>>> {
        if let Some(link) = self.free.next() {
            return Some(link.cast());
        }
        if let Some(slot) = self.lane.slots.get(self.fresh) {
            self.fresh += 1;
            return Some(NonNull::from(slot));
        }
        self.free = self.lane.empty.0.take();
        self.free.next().map(NonNull::cast)
    }
}

impl<T: Send> Clone for Sender<T> {
    /// Makes another sender with the same capacity.
    fn clone(&self) -> Self {
        Sender::join(Arc::clone(&self.shared), self.lane.slots.len())
    }
}

impl<T: Send> Drop for Sender<T> {
    fn drop(&mut self) {
        let mut asleep = self.lane.full.0.close();
        if self.shared.senders.fetch_sub(1, AcqRel) == 1 {
            asleep |= self.shared.joining.0.close();
        }
        if asleep {
            self.shared.sleeper.wake();
        }
    }
}

impl<T: Send> Receiver<T> {
    /// Sets the number of looks at an empty channel before sleeping; the default is 0.
    pub fn spin(&mut self, looks: u32) {
        self.spins = looks;
    }

    /// Sets the number of processor pauses after a small batch, before the next look; the default
    /// is 64.
    pub fn linger(&mut self, pauses: u32) {
        self.linger = pauses;
    }

    /// Waits for values, and hands all of them to `callback`. Values that the callback leaves in
    /// the batch come first the next time.
    ///
    /// # Errors
    /// Fails with [`Closed`] when all senders are gone and all their values were received.
    pub fn drain<R>(&mut self, callback: impl FnOnce(Batch<'_, T>) -> R) -> Result<R, Closed> {
        self.wait()?;
        Ok(callback(Batch(self)))
    }

    /// The values that have arrived already. Does not wait.
    pub fn try_drain(&mut self) -> Batch<'_, T> {
        if self.left == 0 {
            self.sweep();
        }
        Batch(self)
    }

    /// Waits for a value.
    ///
    /// # Errors
    /// Fails with [`Closed`] when all senders are gone and all their values were received.
    #[inline]
    pub fn recv(&mut self) -> Result<T, Closed> {
        self.wait()?;
        Ok(self.next().expect("the wait ends with a value, or closed"))
    }

    /// The channel's counts so far.
    pub fn metrics(&self) -> Metrics {
        self.shared.counters.0.read(self.shared.sleeper.wakes())
    }

    /// Waits until a value can be received: until `left` is not 0.
    #[inline]
    fn wait(&mut self) -> Result<(), Closed> {
        while self.left == 0 {
            if self.last_batch > 0 && self.last_batch < SMALL_BATCH {
                (0..self.linger).for_each(|_| pause());
            }
            self.last_batch = self.sweep();
            if self.left == 0 {
                if self.readers.is_empty() && self.shared.joining.0.is_finished() {
                    return Err(Closed);
                }
                let lanes = self.readers.iter().map(|reader| &reader.lane.full.0);
                self.shared.sleeper.wait(once(&self.shared.joining.0).chain(lanes), self.spins);
            }
        }
        Ok(())
    }

    /// Takes the values of every lane once, and returns how many. Called only when all values taken
    /// earlier were received.
    fn sweep(&mut self) -> usize {
        for link in self.shared.joining.0.take() {
            // SAFETY: `joining` contains only lanes turned raw, each once.
            let lane = unsafe { Arc::from_raw(link.cast::<Lane<T>>().as_ptr()) };
            self.readers.push(Reader { lane, taken: Chain::default(), read: None });
        }
        self.at = 0;
        self.readers.retain_mut(|reader| {
            let finished = reader.lane.full.0.is_finished();
            reader.taken = reader.lane.full.0.take();
            self.left += reader.taken.len();
            !finished
        });
        if self.left > 0 {
            self.shared.counters.0.batch(self.left);
        }
        self.left
    }

    /// The next value of the batch; `None`: all were received.
    #[inline]
    fn next(&mut self) -> Option<T> {
        while self.left > 0 {
            if let Some(value) = self.readers[self.at].next() {
                self.left -= 1;
                if self.left == 0 {
                    self.readers[self.at].give_back();
                }
                return Some(value);
            }
            self.readers[self.at].give_back();
            self.at += 1;
        }
        None
    }
}

impl<T> Reader<T> {
    #[inline]
    fn next(&mut self) -> Option<T> {
        let link = self.taken.next()?;
        // SAFETY: a slot in `full` holds a value, and it was taken once, so the receiver may read
        // it.
        let value = unsafe { (*link.cast::<Slot<T>>().as_ref().value.get()).assume_init_read() };
        self.read = match self.read {
            None => Some((link, link, 1)),
            Some((newest, oldest, count)) => {
                // SAFETY: the link was taken, so it is valid, and in no stack.
                unsafe { link.as_ref() }.follow(newest);
                Some((link, oldest, count + 1))
            }
        };
        if self.read.is_some_and(|(_, _, count)| count == GIVE_BACK) {
            self.give_back();
        }
        Some(value)
    }

    /// Returns the slots read so far to their sender.
    #[inline]
    fn give_back(&mut self) {
        if let Some((newest, oldest, _)) = self.read.take() {
            // SAFETY: the slots were read, and are in no stack; their lane outlives them.
            if unsafe { self.lane.empty.0.push_list(newest, oldest) } == Pushed::Asleep {
                self.lane.sleeper.wake();
            }
        }
    }
}

impl<T: Send> Drop for Receiver<T> {
    fn drop(&mut self) {
        self.shared.joining.0.close();
        loop {
            // Close the lanes before the first slot goes back. So a sender that waits for a slot
            // learns of the end, and sends nothing more.
            for reader in &self.readers {
                reader.lane.full.0.close();
                if reader.lane.empty.0.close() {
                    reader.lane.sleeper.wake();
                }
            }
            while self.next().is_some() {}
            if self.readers.is_empty() && self.shared.joining.0.is_finished() {
                break;
            }
            self.sweep();
        }
    }
}

/// The values that had arrived when the receiver looked, each sender's in order. Values that are
/// not taken come first in the next batch.
pub struct Batch<'a, T: Send>(&'a mut Receiver<T>);

impl<T: Send> Iterator for Batch<'_, T> {
    type Item = T;

    #[inline]
    fn next(&mut self) -> Option<T> {
        self.0.next()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.0.left, Some(self.0.left))
    }
}

impl<T: Send> ExactSizeIterator for Batch<'_, T> {}

impl<T: Send> fmt::Debug for Sender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender").field("room", &self.lane.slots.len()).finish_non_exhaustive()
    }
}

impl<T: Send> fmt::Debug for Receiver<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receiver").field("metrics", &self.metrics()).finish_non_exhaustive()
    }
}

impl<T: Send> fmt::Debug for Batch<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Batch").field(&self.len()).finish()
    }
}
