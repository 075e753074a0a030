//! The endings of a negotiation that does not lead to transmission.

use super::{OPTION_SKIP_MAX, OPTIONS_MAX};
use std::fmt;

/// The reason why a negotiation ended without transmission.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    /// The client ended the negotiation.
    Abort,
    /// The client's flags contain some that the server did not offer.
    ClientFlags(u32),
    /// An option does not begin with the magic number.
    Magic(u64),
    /// An option announces more data than any option has.
    OptionLength {
        /// The option's number.
        option: u32,
        /// The length of data that the option announces, in bytes.
        length: u32,
    },
    /// The client sent more options than any client needs.
    TooManyOptions,
    /// The client used `EXPORT_NAME` for an export that does not exist; that option has no error
    /// reply.
    NoSuchExport,
    /// The client used `EXPORT_NAME` where TLS is required; that option has no error reply.
    TlsRequired,
    /// The client used `EXPORT_NAME` while every connection was in use; that option has no error
    /// reply.
    NoRoom,
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ending::Abort => f.write_str("the client ended the negotiation"),
            Ending::ClientFlags(flags) => write!(f, "client flags {flags:#x} were not offered"),
            Ending::Magic(magic) => write!(f, "an option begins with {magic:#x}, not with IHAVEOPT"),
            Ending::OptionLength { option, length } => {
                write!(f, "option {option} announces {length} bytes of data; {OPTION_SKIP_MAX} is the limit")
            }
            Ending::TooManyOptions => write!(f, "more than {OPTIONS_MAX} options"),
            Ending::NoSuchExport => f.write_str("NBD_OPT_EXPORT_NAME asks for an export that does not exist"),
            Ending::TlsRequired => f.write_str("NBD_OPT_EXPORT_NAME without TLS, which is required"),
            Ending::NoRoom => f.write_str("every connection is in use; raise the limit of connections"),
        }
    }
}
