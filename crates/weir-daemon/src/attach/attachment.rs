//! A device that the kernel's NBD client has connected to the daemon. The daemon notes it down, so
//! that the next daemon can connect the device again.

use serde::{Deserialize, Serialize};

/// A connected device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Attachment {
    /// The device's number: 0 is `/dev/nbd0`.
    pub device: u32,
    /// The server's address: `unix:` with an absolute path, or `tcp:`.
    pub address: String,
    /// The export's name.
    pub name: String,
    /// The number of the device's connections.
    pub connections: u16,
    /// Seconds that one request may take before the kernel gives its connection up.
    pub request_timeout: u16,
    /// Seconds that requests wait for a new connection when none is left.
    pub reconnect_timeout: u16,
}
