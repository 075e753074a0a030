//! How a negotiation ends without transmission.

use super::{OPTION_SKIP_MAX, OPTIONS_MAX};
use std::fmt;

/// Why a negotiation ended without transmission.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    /// The client said goodbye.
    Abort,
    /// The client's flags hold ones that the server did not offer.
    ClientFlags(u32),
    /// An option does not begin as options do.
    Magic(u64),
    /// An option announces more data than any has.
    OptionLength {
        /// The option's number.
        option: u32,
        /// The length it announced.
        length: u32,
    },
    /// More options than any client needs.
    TooManyOptions,
    /// `EXPORT_NAME` for an export that does not exist; it has no error reply.
    NoSuchExport,
    /// `EXPORT_NAME` where TLS is required; it has no error reply.
    TlsRequired,
    /// `EXPORT_NAME` while every connection is in use; it has no error reply.
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
