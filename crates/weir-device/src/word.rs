//! The types by which a device and its user describe an operation.

use std::time::Duration;
use weir_core::PageBytes;

/// A caller's number for one of its operations, which comes back with the completion.
pub type Ticket = u32;

/// Longest time until an operation is answered, whatever the device does, if the lane is polled
/// once in [`POLL_EVERY`]. A kernel gives its connection up after a much longer time.
pub const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// Longest sleep between two polls while operations are under way.
pub const POLL_EVERY: Duration = Duration::from_millis(200);

/// The result of a call that begins an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Progress {
    /// The operation is finished, with this result, and no completion follows. With an error
    /// nothing was begun.
    Done(Result<(), Fault>),
    /// The operation waits for `submit`; its completion comes by `poll`.
    Queued,
    /// The lane has no room: submit, poll, and try again.
    Full,
}

/// A finished operation.
#[derive(Debug)]
pub struct Done<'a> {
    /// The ticket that was given when the operation was queued.
    pub ticket: Ticket,
    /// The operation's result.
    pub result: Result<(), Fault>,
    /// A successful read's content. `None` for writes and faults.
    pub page: Option<&'a PageBytes>,
}

/// The reason why one operation failed. It is small and `Copy`: the I/O path carries it without
/// allocating.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Fault {
    /// The device or the system refused the operation, with this errno.
    #[error("I/O error {0}")]
    Io(i32),
    /// The slot's memory is gone: its chunk was released, or its device is lost.
    #[error("the store no longer holds this slot")]
    Lost,
    /// No answer came in time. The operation may still take effect.
    #[error("no answer in time")]
    Timeout,
    /// The content that was read is not what was written.
    #[error("checksum mismatch")]
    Corrupt,
    /// The store does not have this operation.
    #[error("not supported by this store")]
    Unsupported,
    /// No slot is free for the write.
    #[error("no free slot")]
    Full,
    /// The write had no effect, since its client has gone.
    #[error("its client has gone")]
    Forsaken,
}
