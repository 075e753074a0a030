//! The daemon's control socket: one request a connection, a line of JSON each way.
//!
//! `{"schema":1,"request":"status"}` is answered by a [`Status`] on one line, anything else by
//! `{"schema":1,"error":"..."}`. The socket is its owner's alone (mode 0600).

mod client;
mod server;
mod status;

pub use client::status;
pub use server::Server;
pub use status::{Export, Io, Protection, Status, Store, Volume};

use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// The version of what travels and of what `weir status --json` prints.
pub const SCHEMA: u32 = 1;

/// How long either side waits for the other.
const PATIENCE: Duration = Duration::from_secs(5);

/// Longest request.
const REQUEST_MOST: u64 = 4096;

/// What can be asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case")]
enum Request {
    /// How are you?
    Status,
}

/// A request that cannot be answered, and why.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Refusal {
    schema: u32,
    error: String,
}

/// Where the daemon listens unless told otherwise: the user's own run-time directory, or the system's.
pub fn default_path() -> PathBuf {
    let directory = std::env::var_os("XDG_RUNTIME_DIR").filter(|directory| !directory.is_empty());
    directory
        .map_or_else(|| PathBuf::from("/run/weir"), |directory| PathBuf::from(directory).join("weir"))
        .join("control.sock")
}
