//! A work queue that wakes its worker once per burst.
//!
//! Items are embedded in the caller's own data, so scheduling allocates nothing and cannot fail for
//! want of memory. Any number of threads schedule. One worker runs the items, each thread's in the
//! order in which the thread scheduled them. The contract is that of NVIDIA's `nv_kthread_q`, which
//! the GPU driver's interrupt handlers use:
//!
//! - an item that is pending already is not queued twice: [`Queue::schedule`] returns false, and
//!   the item's coming run sees everything that the calling thread did before the call;
//! - an item is out of the queue before its function runs, so the function may schedule it again,
//!   or drop it;
//! - [`Queue::flush`] returns once everything scheduled before it has run, and everything that
//!   those runs scheduled; an item for which `schedule` returned false counts too;
//! - [`Queue::stop`] refuses later items and runs earlier ones.
//!
//! ```
//! use std::sync::Arc;
//! use std::sync::atomic::{AtomicU32, Ordering};
//! use weir_queue::{Item, Queue, Work, has_item};
//!
//! /// A display that draws its newest frame when it gets round to it.
//! struct Display {
//!     newest: AtomicU32,
//!     drawn: AtomicU32,
//!     redraw: Item<Display>,
//! }
//! has_item!(Display, redraw);
//!
//! impl Work for Display {
//!     type Pointer = Arc<Display>;
//!     fn run(this: Arc<Display>) {
//!         this.drawn.store(this.newest.load(Ordering::Relaxed), Ordering::Relaxed);
//!     }
//! }
//!
//! let queue = Queue::builder().name("redraw").start()?;
//! let display = Arc::new(Display { newest: 0.into(), drawn: 0.into(), redraw: Item::new() });
//! for frame in 1..=1000 {
//!     display.newest.store(frame, Ordering::Relaxed);
//!     queue.schedule(&display); // false if a redraw is pending: that one draws this frame
//! }
//! queue.flush();
//! assert_eq!(display.drawn.load(Ordering::Relaxed), 1000);
//! println!("{} redraws, {} wakes", queue.metrics().items, queue.metrics().wakes);
//! # Ok::<(), weir_queue::StartError>(())
//! ```
//!
//! For values instead of embedded items there is [`channel`], built on the same stacks: its
//! [`Receiver::drain`] hands a whole burst to one callback.
//!
//! # Speed
//!
//! - **One wake per burst.** The worker marks itself asleep in the same word that a push exchanges.
//!   So a push knows without another load whether it must wake the worker. While the worker runs,
//!   no push makes a system call.
//! - **One exchange takes everything.** The worker takes a whole [`stack::Stack`] at once and
//!   reverses it.
//! - **Producers share no cache line.** Each thread pushes to one of a few stacks, by its number.
//!   If two threads exchange one word, the line that travels between them costs 30 ns an item, more
//!   than everything else together.
//! - **The worker does not hurry.** After a small batch it lets some hundred nanoseconds pass
//!   before it looks again. Without that pause, its looks would take the cache line of the stack's
//!   head from the producers at each push, and halve the throughput.
//!
//! # Checks
//!
//! [loom](https://docs.rs/loom) explores every interleaving of the stack, the sleeper and the
//! item's claim, and as many of the whole queue's as time allows. Miri runs every test. Property
//! tests compare queue and channel with simple models of them. The README has the commands.

#![cfg_attr(not(feature = "std"), no_std)]

extern crate alloc;

#[cfg(feature = "std")]
mod channel;
#[cfg(feature = "std")]
mod flush;
mod item;
#[cfg(feature = "std")]
mod metrics;
#[cfg(feature = "std")]
mod node;
#[cfg(feature = "std")]
mod queue;
#[cfg(feature = "std")]
mod shards;
#[cfg(feature = "std")]
mod sleeper;
pub mod stack;
mod sync;
#[cfg(feature = "std")]
mod worker;

#[cfg(feature = "std")]
pub use channel::{Batch, Closed, Receiver, SendError, Sender, channel};
pub use item::{Exclusive, HasItem, Item, Pointer, SharedPointer, Work};
#[cfg(feature = "std")]
pub use metrics::Metrics;
#[cfg(feature = "std")]
pub use queue::{Builder, MAX_SHARDS, Queue, StartError};
