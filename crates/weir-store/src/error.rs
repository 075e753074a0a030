//! Errors of opening a store: a [kind](OpenErrorKind) for programs and a sentence for people. For
//! one operation see [`Fault`](crate::Fault).

use std::io::{Error, ErrorKind};
use weir_core::ByteSize;

/// The reason why a store, or a lane into one, could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("store {store}: {what}")]
pub struct OpenError {
    /// The kind of reason why the opening failed.
    pub kind: OpenErrorKind,
    /// The store's URL.
    pub store: String,
    /// A sentence for people, in one line: the thing that is wrong, the value seen and the next
    /// step.
    pub what: String,
    /// The system's error, if there is one.
    #[source]
    pub source: Option<Error>,
}

/// The kind of an error, by which a caller decides what to do. The sentence is for people and may
/// change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpenErrorKind {
    /// Not enough memory or room was free: a smaller store may be possible.
    NoMemory {
        /// Number of bytes that were asked for.
        wanted: u64,
        /// Bytes that were available, if known.
        had: u64,
    },
    /// The card, disk or file does not exist, or its driver is missing.
    NoDevice,
    /// Another process has the store, or every lane is taken.
    InUse,
    /// A volume has too few slots left for the writes that one more lane could have under way.
    Slack {
        /// Number of slots that the caller asked for.
        wanted: u32,
        /// Number of slots that were free.
        left: u32,
    },
    /// The system denies this process access to the file, disk or card.
    Denied,
    /// The request does not fit the file or device: it is another kind of file, has foreign
    /// content, or has pages of another version.
    Layout,
    /// The device or the system failed.
    Io,
}

/// The message when the system gives a store no descriptor, thread, key or memory. The cause
/// follows it.
pub const DENIED: &str =
    "the system denies a descriptor, a thread or memory; raise the limits of this process (ulimit -a)";

impl OpenError {
    /// An error of `store` that comes from no system call.
    pub fn new(kind: OpenErrorKind, store: impl Into<String>, what: impl Into<String>) -> Self {
        OpenError { kind, store: store.into(), what: what.into(), source: None }
    }

    /// An error of `store` for which the system gave a reason; the reason decides the kind.
    pub fn io(store: impl Into<String>, what: impl Into<String>, source: impl Into<Error>) -> Self {
        let source = source.into();
        let kind = match (source.kind(), source.raw_os_error()) {
            (ErrorKind::NotFound, _) | (_, Some(libc::ENXIO | libc::ENODEV)) => OpenErrorKind::NoDevice,
            (ErrorKind::ResourceBusy | ErrorKind::WouldBlock, _) => OpenErrorKind::InUse,
            (ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem, _) => OpenErrorKind::Denied,
            _ => OpenErrorKind::Io,
        };
        OpenError { kind, store: store.into(), what: what.into(), source: Some(source) }
    }

    /// An error of `store`, which could not get `bytes` bytes of memory.
    pub fn no_memory(store: impl Into<String>, bytes: u64, source: impl Into<Error>) -> Self {
        let what = format!("cannot take {} of memory; ask for less, or free some", ByteSize(bytes));
        let kind = OpenErrorKind::NoMemory { wanted: bytes, had: weir_core::available().unwrap_or(0) };
        OpenError { kind, ..OpenError::io(store, what, source) }
    }
}
