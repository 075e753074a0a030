//! The export that an NBD server offers.

use super::super::wire::transmission_flag;

/// The export, as clients see it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Export {
    /// The name that clients ask for, of at most [`NAME_MAX`](super::NAME_MAX) bytes. By the empty
    /// name they ask for the default export, which has a name too.
    pub name: String,
    /// A description for people, of at most [`NAME_MAX`](super::NAME_MAX) bytes.
    pub description: String,
    /// The export's size in bytes.
    pub bytes: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether pages can be discarded and zeroed.
    pub clears: bool,
}

impl Export {
    /// The transmission flags for a connection with or without structured replies.
    pub fn flags(&self, structured: bool) -> u16 {
        use transmission_flag::{
            CAN_MULTI_CONN, HAS_FLAGS, READ_ONLY, SEND_CACHE, SEND_DF, SEND_FAST_ZERO, SEND_FLUSH, SEND_FUA,
            SEND_TRIM, SEND_WRITE_ZEROES,
        };
        let always = HAS_FLAGS | SEND_FLUSH | SEND_FUA | CAN_MULTI_CONN | SEND_CACHE;
        let access = match self {
            Export { read_only: true, .. } => READ_ONLY,
            Export { clears: true, .. } => SEND_TRIM | SEND_WRITE_ZEROES | SEND_FAST_ZERO,
            _ => 0,
        };
        always | access | if structured { SEND_DF } else { 0 }
    }
}
