//! The errors of the daemon and of requests to it. Each has a [kind](ErrorKind) for programs, a
//! sentence for people, and a cause.

use serde::{Deserialize, Serialize};
use std::error::Error as Cause;
use std::fmt;
use weir_core::chain;
use weir_store::{OpenError, OpenErrorKind};

/// An error: the failed action and its cause.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    /// A text that names the thing, the value seen and the next step. `None`: the text of the cause
    /// has all of that.
    context: Option<String>,
    source: Option<Box<dyn Cause + Send + Sync>>,
}

/// The kind of an error, by which a caller decides. The error's text is for people and may change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorKind {
    /// The configuration asks for something that is refused.
    Config,
    /// A store cannot be opened, for the reason in the [`OpenErrorKind`].
    Store(OpenErrorKind),
    /// The volume cannot be made, or taken over.
    Volume,
    /// A front end cannot serve.
    FrontEnd,
    /// The keeper cannot be reached, or breaks its protocol.
    Keeper,
    /// The system denies a protection.
    Protection,
    /// The control socket, or the metrics' socket, cannot be made.
    Control,
    /// No daemon of this version answers at a control socket.
    Unreachable,
    /// A daemon refuses a request.
    Refused,
    /// A daemon is stopping, and so changes nothing any more.
    Stopping,
    /// Memory cannot be given back or taken now.
    Memory,
    /// The kernel's NBD client refuses, or the server that it should connect to refuses.
    Attach,
    /// The system denies something else, such as a thread.
    System,
}

/// The classes of errors, for other programs. `weir` has an exit code for each class.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// An operation failed.
    Failed,
    /// The request or the configuration is refused.
    Usage,
    /// There is not enough memory or room. A smaller request may succeed.
    NoRoom,
}

impl Error {
    /// Makes an error without a cause.
    pub fn new(kind: ErrorKind, what: impl Into<String>) -> Self {
        Error { kind, context: Some(what.into()), source: None }
    }

    /// Makes an error with the text of its cause.
    pub fn of(kind: ErrorKind, source: impl Cause + Send + Sync + 'static) -> Self {
        Error { kind, context: None, source: Some(Box::new(source)) }
    }

    /// Makes an error with the text `what`, a colon, and the text of its cause.
    pub fn because(
        kind: ErrorKind,
        what: impl Into<String>,
        source: impl Cause + Send + Sync + 'static,
    ) -> Self {
        Error { kind, context: Some(what.into()), source: Some(Box::new(source)) }
    }

    /// Returns this error of an action. If the action could not be undone, the text also has what
    /// is `left` of it, and why.
    #[must_use]
    pub fn unless_undone(self, undone: Result<(), Error>, left: impl FnOnce() -> String) -> Self {
        let Err(error) = undone else { return self };
        let context = format!("{}; {}: {}", chain(&self), left(), chain(&error));
        Error { kind: self.kind, context: Some(context), source: None }
    }

    /// The error's kind.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The class of the error's kind.
    pub fn class(&self) -> Class {
        match self.kind {
            ErrorKind::Config => Class::Usage,
            ErrorKind::Store(OpenErrorKind::NoMemory { .. }) => Class::NoRoom,
            _ => Class::Failed,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.context, &self.source) {
            (Some(context), _) => f.write_str(context),
            (None, Some(source)) => source.fmt(f),
            (None, None) => Ok(()),
        }
    }
}

impl Cause for Error {
    fn source(&self) -> Option<&(dyn Cause + 'static)> {
        let source = self.source.as_deref().map(|source| source as &(dyn Cause + 'static));
        match self.context {
            Some(_) => source,
            None => source.and_then(Cause::source),
        }
    }
}

impl From<OpenError> for Error {
    fn from(error: OpenError) -> Self {
        Error::of(ErrorKind::Store(error.kind), error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_its_context_and_its_cause_each_said_once() {
        let cause =
            || OpenError::io("host:1GiB", "no memory", std::io::Error::from_raw_os_error(libc::ENOMEM));
        let text = chain(&cause());
        assert_eq!(chain(&Error::from(cause())), text);
        assert_eq!(
            chain(&Error::because(ErrorKind::Volume, "taking over", cause())),
            format!("taking over: {text}")
        );
        assert_eq!(chain(&Error::new(ErrorKind::System, "alone")), "alone");
        assert_eq!(Error::from(cause()).kind(), ErrorKind::Store(cause().kind));
        let left = || "a is left".to_owned();
        let error = Error::new(ErrorKind::System, "alone").unless_undone(Ok(()), left);
        assert_eq!(chain(&error), "alone");
        let undone = Err(Error::because(ErrorKind::Volume, "undoing", cause()));
        let error = error.unless_undone(undone, left);
        assert_eq!(
            (chain(&error), error.kind()),
            (format!("alone; a is left: undoing: {text}"), ErrorKind::System)
        );
    }
}
