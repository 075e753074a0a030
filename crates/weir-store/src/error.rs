//! How the opening of a store fails. How an operation does is a [`Fault`](weir_device::Fault).

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
