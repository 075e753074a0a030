//! Channels that Rust programs use: a job is sent as a function and its argument, and the worker
//! calls it.

use std::thread::{self, JoinHandle};

use super::QueueError;
use super::design::{Design, Port};
use super::jobs;

pub(super) const NAMES: [&str; 4] = [CROSSBEAM, FLUME, STD, KANAL];
pub(super) const CROSSBEAM: &str = "crossbeam";
pub(super) const FLUME: &str = "flume";
pub(super) const STD: &str = "std";
pub(super) const KANAL: &str = "kanal";

/// A function and its argument.
pub(super) type Message = (fn(u64), u64);

/// An unbounded channel.
pub(super) trait Channel: 'static {
    type Sender: Clone + Send + 'static;
    type Receiver: Send + 'static;
    fn open() -> (Self::Sender, Self::Receiver);
    fn send(sender: &Self::Sender, message: Message);
    fn receive(receiver: &Self::Receiver) -> Option<Message>;
}

macro_rules! channel {
    ($name:ident, $open:path, $sender:ty, $receiver:ty) => {
        pub(super) struct $name;
        impl Channel for $name {
            type Sender = $sender;
            type Receiver = $receiver;
            fn open() -> (Self::Sender, Self::Receiver) {
                $open()
            }
            fn send(sender: &Self::Sender, message: Message) {
                sender.send(message).expect("the worker receives until the last sender is gone");
            }
            fn receive(receiver: &Self::Receiver) -> Option<Message> {
                receiver.recv().ok()
            }
        }
    };
}

channel!(
    Crossbeam,
    crossbeam_channel::unbounded,
    crossbeam_channel::Sender<Message>,
    crossbeam_channel::Receiver<Message>
);
channel!(Flume, flume::unbounded, flume::Sender<Message>, flume::Receiver<Message>);
channel!(Std, std::sync::mpsc::channel, std::sync::mpsc::Sender<Message>, std::sync::mpsc::Receiver<Message>);
channel!(Kanal, kanal::unbounded, kanal::Sender<Message>, kanal::Receiver<Message>);

/// A channel with its worker.
pub(super) struct ChannelQueue<C: Channel> {
    sender: C::Sender,
    worker: JoinHandle<()>,
}

pub(super) struct ChannelPort<C: Channel>(C::Sender);

impl<C: Channel> Design for ChannelQueue<C> {
    type Job = ();
    type Port = ChannelPort<C>;

    fn job() {}

    fn start() -> Result<Self, QueueError> {
        let (sender, receiver) = C::open();
        let work = move || {
            while let Some((function, argument)) = C::receive(&receiver) {
                function(argument);
            }
        };
        Ok(ChannelQueue { sender, worker: thread::spawn(work) })
    }

    fn port(&self, _: &'static [()]) -> ChannelPort<C> {
        ChannelPort(self.sender.clone())
    }

    fn finish(self) -> Option<f64> {
        drop(self.sender);
        self.worker.join().expect("a channel's worker does not panic");
        None
    }
}

impl<C: Channel> Port for ChannelPort<C> {
    fn schedule(&mut self, _: usize, stamp: u64) {
        C::send(&self.0, (jobs::job, stamp));
    }
}
