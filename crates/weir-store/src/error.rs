//! How stores fail: [`OpenError`] for people, once, at start; [`Fault`] for one operation, without allocation.

use weir_core::ByteSize;

/// Why a store, or a lane into one, could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("store {store}: {what}")]
pub struct OpenError {
    /// The store's URL.
    pub store: String,
    /// The thing, the value seen and the next step, in one line.
    pub what: String,
    /// What the system said, if it did.
    #[source]
    pub source: Option<std::io::Error>,
}

impl OpenError {
    /// An error of `store` that no system call stands behind.
    pub fn new(store: impl Into<String>, what: impl Into<String>) -> Self {
        OpenError { store: store.into(), what: what.into(), source: None }
    }

    /// An error of `store` for which the system gave a reason.
    pub fn io(store: impl Into<String>, what: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        OpenError { store: store.into(), what: what.into(), source: Some(source.into()) }
    }

    /// `bytes` could not be had.
    pub fn no_memory(store: impl Into<String>, bytes: u64, source: impl Into<std::io::Error>) -> Self {
        let what = format!("cannot take {} of memory; ask for less, or free some", ByteSize(bytes));
        OpenError::io(store, what, source)
    }
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
