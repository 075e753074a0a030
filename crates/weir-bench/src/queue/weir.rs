//! weir-queue: items embedded in the caller's data, with the contract of `nv_kthread_q`; and its
//! channel of values.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::thread::{self, JoinHandle};

use weir_queue::{Item, Queue, Receiver, Sender, Work, channel, has_item};

use super::QueueError;
use super::channels::Message;
use super::design::{Design, Port};
use super::jobs;

/// The name of the design whose jobs have an embedded item, on a queue with default settings.
pub(super) const EMBEDDED: &str = "weir";
/// The name of the design whose jobs have an embedded item, on a queue whose worker spins before it
/// sleeps.
pub(super) const SPINNING: &str = "weir-spinning";
/// The name of the design that sends values through weir-queue's channel.
pub(super) const VALUES: &str = "weir-values";

/// Number of values that weir-queue's channel has room for. That channel is bounded, and the
/// channels that it is compared with are not.
const ROOM: usize = 1 << 14;

/// Number of times that the spinning worker looks for an item before it sleeps. All these looks
/// take some milliseconds, which is longer than any gap between items.
const LOOKS: u32 = 100_000;

/// A job with its embedded item. It is as large as a job of the designs with a list, so that no
/// design touches less memory.
pub(super) struct Step {
    item: Item<Step>,
    argument: AtomicU64,
}
has_item!(Step, item);

impl Work for Step {
    type Pointer = &'static Step;
    fn run(this: &'static Step) {
        jobs::job(this.argument.load(Relaxed));
    }
}

/// A queue of items; `LOOKS` is the argument of [`weir_queue::Builder::spin`].
pub(super) struct EmbeddedQueue<const LOOKS: u32>(Arc<Queue>);
pub(super) type Embedded = EmbeddedQueue<0>;
pub(super) type Spinning = EmbeddedQueue<LOOKS>;

pub(super) struct EmbeddedPort {
    queue: Arc<Queue>,
    steps: &'static [Step],
}

impl<const LOOKS: u32> Design for EmbeddedQueue<LOOKS> {
    type Job = Step;
    type Port = EmbeddedPort;

    fn job() -> Step {
        Step { item: Item::new(), argument: AtomicU64::new(0) }
    }

    fn start() -> Result<Self, QueueError> {
        Ok(EmbeddedQueue(Arc::new(Queue::builder().spin(LOOKS).start()?)))
    }

    fn port(&self, steps: &'static [Step]) -> EmbeddedPort {
        EmbeddedPort { queue: Arc::clone(&self.0), steps }
    }

    fn finish(self) -> Option<f64> {
        self.0.stop();
        Some(self.0.metrics().items_per_batch())
    }
}

impl Port for EmbeddedPort {
    fn schedule(&mut self, index: usize, stamp: u64) {
        let step = &self.steps[index];
        step.argument.store(stamp, Relaxed);
        self.queue.schedule(&step);
    }
}

/// A channel of values, with a worker that drains it.
pub(super) struct Values {
    sender: Sender<Message>,
    worker: JoinHandle<f64>,
}

pub(super) struct ValuesPort(Sender<Message>);

impl Design for Values {
    type Job = ();
    type Port = ValuesPort;

    fn job() {}

    fn start() -> Result<Self, QueueError> {
        let (sender, mut receiver): (_, Receiver<Message>) = channel(ROOM);
        let work = move || {
            while let Ok(()) =
                receiver.drain(|batch| batch.for_each(|(function, argument)| function(argument)))
            {
            }
            receiver.metrics().items_per_batch()
        };
        Ok(Values { sender, worker: thread::spawn(work) })
    }

    fn port(&self, _: &'static [()]) -> ValuesPort {
        ValuesPort(self.sender.clone())
    }

    fn finish(self) -> Option<f64> {
        drop(self.sender);
        Some(self.worker.join().expect("the worker of the channel does not panic"))
    }
}

impl Port for ValuesPort {
    fn schedule(&mut self, _: usize, stamp: u64) {
        self.0.send((jobs::job, stamp)).expect("the worker receives until the last sender is gone");
    }
}
