//! The queue itself: a worker thread with the contract of `nv_kthread_q`.

use std::io;
use std::sync::Arc;

use crate::item::{Exclusive, SharedPointer, Work, item_of};
use crate::metrics::{Counters, Metrics};
use crate::node::Processors;
use crate::shards::{Padded, Shards};
use crate::sleeper::Sleeper;
use crate::stack::Pushed;
use crate::sync::{Mutex, thread};
use crate::worker::{Core, LINGER, Patience};

/// The most stacks that [`Builder::shards`] gives a queue.
pub const MAX_SHARDS: usize = 16;

/// A work queue with one worker thread. Dropping the queue stops it.
pub struct Queue {
    core: Arc<Core>,
    worker: thread::ThreadId,
    handle: Mutex<Option<thread::JoinHandle<()>>>,
}

/// The settings of a queue that is to be started.
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder {
    name: String,
    shards: usize,
    spins: u32,
    linger: u32,
    node: Option<u32>,
}

/// The reason why a queue did not start.
#[derive(Debug)]
#[non_exhaustive]
pub enum StartError {
    /// The system gave no thread.
    Thread(io::Error),
    /// The worker cannot be pinned to this NUMA node: it does not exist, has no processors, or the
    /// process may not use them.
    Node(u32, io::Error),
}

impl std::fmt::Display for StartError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            StartError::Thread(_) => {
                f.write_str("no thread for the queue's worker; check the limit on processes")
            }
            StartError::Node(node, _) => {
                write!(
                    f,
                    "NUMA node {node} has no processors for the queue's worker; leave the node out or see lscpu"
                )
            }
        }
    }
}

impl std::error::Error for StartError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            StartError::Thread(error) | StartError::Node(_, error) => Some(error),
        }
    }
}

impl Default for Builder {
    fn default() -> Self {
        Builder { name: "weir-queue".to_owned(), shards: 8, spins: 0, linger: LINGER, node: None }
    }
}

impl Builder {
    /// Sets the worker thread's name. The kernel shows the first 15 bytes.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Sets the number of stacks for producers, rounded up to a power of two and at most
    /// [`MAX_SHARDS`]; the default is 8. With one stack, items of different threads also run in the
    /// order in which they were scheduled.
    pub fn shards(mut self, shards: usize) -> Self {
        self.shards = shards.clamp(1, MAX_SHARDS);
        self
    }

    /// Sets the number of looks at an empty queue before the worker sleeps; the default is 0. A
    /// look takes some 20 to 50 ns, while a wake-up adds 2 to 60 us of latency.
    pub fn spin(mut self, looks: u32) -> Self {
        self.spins = looks;
        self
    }

    /// Sets the number of processor pauses after a small batch, before the worker looks again. The
    /// default is 64, which is less than a microsecond. 0 gives the least latency under load, and
    /// half the throughput.
    pub fn linger(mut self, pauses: u32) -> Self {
        self.linger = pauses;
        self
    }

    /// Pins the worker, and the memory that it touches first, to NUMA node `node`.
    #[cfg(feature = "numa")]
    pub fn node(mut self, node: u32) -> Self {
        self.node = Some(node);
        self
    }

    /// Starts the worker.
    ///
    /// # Errors
    /// Fails with a [`StartError`] when the system gives no thread, or the worker cannot run on the
    /// node that was asked for.
    pub fn start(self) -> Result<Queue, StartError> {
        let core = Arc::new(Core {
            shards: Shards::new(self.shards),
            sleeper: Sleeper::new(),
            counters: Padded(Counters::default()),
            unplaced: Padded::default(),
        });
        let (shared, patience) = (Arc::clone(&core), Patience { spins: self.spins, linger: self.linger });
        let place = self.node.map(Processors::of).transpose()?;
        let (placed, placing) = std::sync::mpsc::channel();
        let on_node = place.is_some();
        let work = move || {
            let outcome = place.map_or(Ok(()), |processors| processors.keep());
            let ready = outcome.is_ok();
            // The send fails if the starting thread does not wait for the outcome. That thread
            // waits only if a node was asked for. Without a node the outcome is always a success.
            let _ = placed.send(outcome);
            if ready {
                shared.work(patience);
            }
        };
        let handle = thread::Builder::new().name(self.name).spawn(work).map_err(StartError::Thread)?;
        if on_node && let Ok(Err(error)) = placing.recv() {
            return Err(error);
        }
        Ok(Queue { core, worker: handle.thread().id(), handle: Mutex::new(Some(handle)) })
    }
}

impl Queue {
    /// The settings of a new queue.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Schedules the item in `owner` to run once. Returns false if it is pending already, or the
    /// queue has stopped. The queue takes a clone of `owner` only when it returns true.
    ///
    /// If the item is pending, a later flush by this thread waits until the item has run.
    ///
    /// The call is lock-free, allocates nothing, and makes a system call only when the worker
    /// sleeps. For an owner with several items, write `queue.schedule::<_, 1>(&owner)`.
    #[inline]
    pub fn schedule<P, const ID: u64>(&self, owner: &P) -> bool
    where
        P: SharedPointer,
        P::Target: Work<ID, Pointer = P>,
    {
        // SAFETY: the owner is borrowed, so its item is valid.
        let item = unsafe { item_of::<P::Target, ID>(std::ptr::NonNull::from(&**owner)).as_ref() };
        let unplaced = &self.core.unplaced.0;
        let Some(claim) = item.claim(unplaced) else { return false };
        let raw = owner.clone().into_raw();
        // SAFETY: this thread has claimed the item and not pushed it yet, so the item is in no
        // stack. The clone keeps the item valid until it has run.
        let accepted = unsafe { self.push(item_of::<P::Target, ID>(raw)) };
        if accepted {
            claim.placed(item, unplaced);
        } else {
            item.release(unplaced);
            // SAFETY: `into_raw` above made the pointer. The queue has refused the item, so only
            // this function has the pointer.
            drop(unsafe { P::from_raw(raw) });
        }
        accepted
    }

    /// Gives `owner` to the queue, to run once. An owned item cannot be pending. So this call does
    /// one atomic exchange fewer than [`Queue::schedule`], and so does the later run of the item.
    ///
    /// ```
    /// use std::sync::mpsc;
    /// use weir_queue::{Item, Queue, Work, has_item};
    ///
    /// struct Write {
    ///     page: u32,
    ///     done: mpsc::Sender<u32>,
    ///     item: Item<Write>,
    /// }
    /// has_item!(Write, item);
    ///
    /// impl Work for Write {
    ///     type Pointer = Box<Write>;
    ///     fn run(this: Box<Write>) {
    ///         let _ = this.done.send(this.page);
    ///     }
    /// }
    ///
    /// let (done, results) = mpsc::channel();
    /// let queue = Queue::builder().name("writer").start()?;
    /// for page in 0..100 {
    ///     let job = Box::new(Write { page, done: done.clone(), item: Item::new() });
    ///     assert!(queue.give(job).is_ok(), "refused, and given back, once the queue has stopped");
    /// }
    /// drop(done);
    /// assert!(results.iter().eq(0..100), "in the order in which this thread gave them");
    /// # Ok::<(), weir_queue::StartError>(())
    /// ```
    ///
    /// # Errors
    /// Returns the owner if the queue has stopped.
    #[inline]
    pub fn give<P, const ID: u64>(&self, owner: P) -> Result<(), P>
    where
        P: Exclusive,
        P::Target: Work<ID, Pointer = P>,
    {
        let raw = owner.into_raw();
        // SAFETY: `owner` was the only pointer to its value, so the item is in no stack. The raw
        // pointer keeps the item valid until it has run.
        if unsafe { self.push(item_of::<P::Target, ID>(raw)) } {
            Ok(())
        } else {
            // SAFETY: `into_raw` above made the pointer. The queue has refused the item, so only
            // this function has the pointer.
            Err(unsafe { P::from_raw(raw) })
        }
    }

    /// Pushes an item; false if the queue has stopped.
    ///
    /// # Safety
    /// The same as for [`Stack::push`](crate::stack::Stack::push).
    #[inline]
    unsafe fn push(&self, item: std::ptr::NonNull<crate::item::RawItem>) -> bool {
        // SAFETY: an item begins with its link; the caller guarantees the rest.
        match unsafe { self.core.shards.push(item.cast()) } {
            Pushed::Queued => true,
            Pushed::Asleep => {
                self.core.sleeper.wake();
                true
            }
            Pushed::Closed => false,
        }
    }

    /// Returns once everything that was scheduled before has run, and everything that those runs
    /// scheduled. So an item that schedules itself once more has run twice. Several threads may
    /// flush at once.
    ///
    /// A call from the worker itself returns false without waiting: otherwise the worker would wait
    /// for itself, a deadlock. Any other call returns true.
    pub fn flush(&self) -> bool {
        if thread::current().id() == self.worker {
            return false;
        }
        for _ in 0..2 {
            if !self.core.pass_marker() {
                self.join();
                return true;
            }
        }
        true
    }

    /// Refuses items from now on, runs the accepted ones, and ends the worker. A call from the
    /// worker itself returns before the worker's end. A second call does nothing.
    pub fn stop(&self) {
        if self.core.shards.close() {
            self.core.sleeper.wake();
        }
        if thread::current().id() != self.worker {
            self.join();
        }
    }

    /// Waits for the worker's end.
    fn join(&self) {
        let mut handle = self.handle.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(handle) = handle.take() {
            handle.join().expect("the worker catches what its items throw");
        }
    }

    /// The queue's counts so far.
    pub fn metrics(&self) -> Metrics {
        self.core.counters.0.read(self.core.sleeper.wakes())
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.stop();
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").field("metrics", &self.metrics()).finish_non_exhaustive()
    }
}
