//! The endings that a connection can have.

use super::super::transmission::Violation;
use std::fmt;

/// How a connection ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ending {
    /// The client asked for a disconnect.
    Disconnect,
    /// The client closed the connection, or the server is going down.
    Closed,
    /// The client closed the connection in the middle of a request, or the server is going down.
    Torn,
    /// The client violated the protocol.
    Violation(Violation),
    /// The system reports an error.
    Broken(rustix::io::Errno),
    /// The client does not read its replies, so a send has timed out.
    Stalled,
    /// A page could no longer be verified after the header of its reply had been sent.
    Lost,
}

impl Ending {
    /// Whether the client left in a usual way: it disconnected, or closed the connection between
    /// two requests.
    pub fn is_usual(&self) -> bool {
        matches!(self, Ending::Disconnect | Ending::Closed)
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ending::Disconnect => f.write_str("the client disconnected"),
            Ending::Closed => f.write_str("the connection was closed"),
            Ending::Torn => f.write_str("the client left in the middle of a request"),
            Ending::Violation(violation) => write!(f, "{violation}"),
            // Print the number only: the error's name comes from libc, which allocates.
            Ending::Broken(errno) => write!(f, "the connection broke: errno {}", errno.raw_os_error()),
            Ending::Stalled => f.write_str("the client does not read its replies; connection dropped"),
            Ending::Lost => f.write_str("a page was lost while it was being sent; connection dropped"),
        }
    }
}

impl From<rustix::io::Errno> for Ending {
    fn from(errno: rustix::io::Errno) -> Self {
        match errno {
            // EAGAIN is the socket's own timeout on sends.
            rustix::io::Errno::AGAIN => Ending::Stalled,
            // The client closed the connection with bytes unread or replies under way.
            rustix::io::Errno::CONNRESET | rustix::io::Errno::PIPE => Ending::Closed,
            errno => Ending::Broken(errno),
        }
    }
}
