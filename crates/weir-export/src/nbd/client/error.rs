//! The errors of an NBD client's connection, or of one request.

use super::super::wire::Errno;
use std::io;

/// The reason why a connection is unusable, or why one request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The server cannot be reached.
    #[error("cannot connect to {address}: is the server running?")]
    Connect {
        /// The address that was tried.
        address: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The connection broke, or the server was silent for too long.
    #[error("the connection broke")]
    Broken(#[from] io::Error),
    /// The server refused the negotiation.
    #[error("the server refused {what}: {message}")]
    Refused {
        /// The feature that was asked for.
        what: &'static str,
        /// The server's error message.
        message: String,
    },
    /// The server violates the protocol.
    #[error("the server breaks the protocol: {0}")]
    Protocol(String),
    /// The server answered this request with an error. The connection is fine.
    #[error("{0}")]
    Failed(Errno),
}
