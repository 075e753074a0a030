//! The words in which a device and its user speak of an operation.

use std::time::Duration;
use weir_core::PageBytes;

/// A caller's number for one of its operations; comes back with its completion.
pub type Ticket = u32;

/// Within this time each operation is answered, whatever the device does, if its lane is polled
/// once in [`POLL_EVERY`]. Well below the time after which a kernel gives its connection up.
pub const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// How long who has operations under way sleeps at most before the next poll.
pub const POLL_EVERY: Duration = Duration::from_millis(200);

/// The state of an operation once it was queued.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Progress {
    /// It is finished already, with this result, and no completion follows. With an error nothing
    /// has begun.
    Done(Result<(), Fault>),
    /// It waits for `submit`; its completion comes by `poll`.
    Queued,
    /// The lane has no room: submit, poll, and try again.
    Full,
}

/// A finished operation.
#[derive(Debug)]
pub struct Done<'a> {
    /// As given when it was queued.
    pub ticket: Ticket,
    /// How it went.
    pub result: Result<(), Fault>,
    /// A read's content, where it succeeded. `None` for writes and faults.
    pub page: Option<&'a PageBytes>,
}

/// Why one operation failed. Small and `Copy`: the I/O path carries it without allocating.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Fault {
    /// The device or the system refused, with this errno.
    #[error("I/O error {0}")]
    Io(i32),
    /// The slot's memory is gone: a released chunk, a lost device.
    #[error("the store no longer holds this slot")]
    Lost,
    /// No answer in time. What was asked for may still happen.
    #[error("no answer in time")]
    Timeout,
    /// The content came back and is not what was written.
    #[error("checksum mismatch")]
    Corrupt,
    /// This store cannot do that.
    #[error("not supported by this store")]
    Unsupported,
    /// No free slot anywhere.
    #[error("no free slot")]
    Full,
    /// A write that had no effect, since its client has gone.
    #[error("its client has gone")]
    Forsaken,
}
