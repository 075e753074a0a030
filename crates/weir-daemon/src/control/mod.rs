//! The daemon's control socket: one request a connection, a line of JSON each way.
//!
//! A request is `{"schema":1,"request":NAME,...}`. Its name decides on the answer:
//!
//! - `status`: a [`Status`] on one line;
//! - `give-back` and `take` (with `"bytes":N`, or without: all), `give-back-spare`, `sleep` and
//!   `wake`: any number of lines `{"schema":1,"progress":{...}}`, then one line
//!   `{"schema":1,"result":{...}}`;
//! - `volume-create` and `volume-resize` (with `"name":NAME,"bytes":N`), `volume-remove` (with
//!   `"name":NAME`): the same. A volume that is created without `bytes` has all the room left;
//! - `attached` (with the fields of an [`Attachment`]) and `detached` (with `"device":N`):
//!   `{"schema":1}`;
//! - `limit` (with `"pid":N,"bytes":N`) and `evict` (with `"pid":N`): `{"schema":1}`, once the
//!   program's pager has been told.
//!
//! A request that the daemon cannot do gets the answer `{"schema":1,"error":"..."}`, where
//! `"stopping":true` says that the reason is the daemon's end. Only the socket's owner may use the
//! socket (mode 0600).

mod client;
mod condition;
mod health;
mod metrics;
mod program;
mod scrape;
mod server;
mod status;

pub use client::{ask_for, attached, detached, order, programs, status};
pub use condition::Condition;
pub use program::{Program, printable};
pub use scrape::Endpoint;
pub use server::Server;
pub use status::{
    Background, Chunks, CpuLatency, Export, Io, Looks, NamedVolume, Protection, Status, Store, Traffic,
    Volume,
};

use crate::attach::Attachment;
use crate::error::{Error, ErrorKind};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;
use weir_pager::link::Order;

/// The version of the messages, and of the output of `weir status --json`.
pub const SCHEMA: u32 = 1;

/// Longest time that either side waits for the other.
const PATIENCE: Duration = Duration::from_secs(5);

/// The system's run-time directory. `weir on` keeps its files there.
pub const SYSTEM: &str = "/run/weir";

/// The control socket's file name in a run-time directory.
pub const SOCKET: &str = "control.sock";

/// Longest request, in bytes.
const REQUEST_MOST: u64 = 4096;

/// A request to the daemon.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case")]
pub enum Request {
    /// Report the daemon's status.
    Status,
    /// Give `bytes` of memory back, or all that can be given back.
    GiveBack {
        /// Number of bytes; `None`: all.
        #[serde(default)]
        bytes: Option<u64>,
    },
    /// Give back all memory that no volume needs.
    GiveBackSpare,
    /// Take `bytes` of memory again, or all that was given back.
    Take {
        /// Number of bytes; `None`: all.
        #[serde(default)]
        bytes: Option<u64>,
    },
    /// Give all memory back, until the machine has slept.
    Sleep,
    /// Take again the memory that [`Sleep`](Self::Sleep) gave back, as far as there is room for it.
    Wake,
    /// Make a volume.
    VolumeCreate {
        /// The volume's name.
        name: String,
        /// The volume's size; `None`: all the room that is left.
        #[serde(default)]
        bytes: Option<u64>,
    },
    /// Give a volume another size.
    VolumeResize {
        /// The volume's name.
        name: String,
        /// The volume's new size.
        bytes: u64,
    },
    /// Remove a volume with all that it holds.
    VolumeRemove {
        /// The volume's name.
        name: String,
    },
    /// Remember a device that the kernel has connected to this daemon.
    Attached(Attachment),
    /// Forget a device that the kernel has disconnected.
    Detached {
        /// The device's number.
        device: u32,
    },
    /// Keep at most this many bytes of a bounded program resident.
    Limit {
        /// The program's process ID.
        pid: u32,
        /// Largest number of bytes that may be resident from now on.
        bytes: u64,
    },
    /// Move all resident memory of a bounded program out.
    Evict {
        /// The number of the program's process.
        pid: u32,
    },
}

/// A daemon's answers to requests at its control socket.
pub trait Service: Send + Sync + 'static {
    /// Reports the daemon's status.
    fn status(&self) -> Status;

    /// Gives memory back. Calls `tell` with the progress.
    ///
    /// # Errors
    /// Fails with one line: the thing that is missing, and the next step.
    fn give_back(&self, bytes: Option<u64>, tell: &mut dyn FnMut(Progress)) -> Result<Moved, Error>;

    /// Gives back all memory that no volume needs.
    ///
    /// # Errors
    /// Fails as [`give_back`](Service::give_back) does.
    fn give_back_spare(&self, tell: &mut dyn FnMut(Progress)) -> Result<Moved, Error>;

    /// Asks the daemon to take memory again.
    ///
    /// # Errors
    /// Fails as [`give_back`](Service::give_back) does.
    fn take(&self, bytes: Option<u64>, tell: &mut dyn FnMut(Progress)) -> Result<Moved, Error>;

    /// Gives all memory back until the machine has slept.
    ///
    /// # Errors
    /// Fails as [`give_back`](Service::give_back) does.
    fn sleep(&self, tell: &mut dyn FnMut(Progress)) -> Result<Moved, Error>;

    /// Takes again the memory that was given back before the machine slept, if the cards' owners do
    /// not use it now.
    ///
    /// # Errors
    /// Fails as [`give_back`](Service::give_back) does.
    fn wake(&self, tell: &mut dyn FnMut(Progress)) -> Result<Moved, Error>;

    /// Makes a volume of this name and size in bytes; `None`: all the room that is left.
    ///
    /// # Errors
    /// Fails with one line: the reason, and the next step. Then no volume has changed, or the line
    /// says what is left.
    fn create_volume(&self, name: &str, bytes: Option<u64>) -> Result<Moved, Error>;

    /// Gives a volume another size in bytes.
    ///
    /// # Errors
    /// Fails as [`create_volume`](Service::create_volume) does.
    fn resize_volume(&self, name: &str, bytes: u64, tell: &mut dyn FnMut(Progress)) -> Result<Moved, Error>;

    /// Removes a volume with all that it holds.
    ///
    /// # Errors
    /// Fails as [`create_volume`](Service::create_volume) does.
    fn remove_volume(&self, name: &str, tell: &mut dyn FnMut(Progress)) -> Result<Moved, Error>;

    /// Remembers a device that the kernel has connected.
    ///
    /// # Errors
    /// Fails with one line that names the thing that is missing.
    fn attached(&self, device: Attachment) -> Result<(), Error>;

    /// Forgets a device that the kernel has disconnected.
    ///
    /// # Errors
    /// Fails with one line that names the thing that is missing.
    fn detached(&self, device: u32) -> Result<(), Error>;

    /// Passes an order to the pager of a bounded program.
    ///
    /// # Errors
    /// Fails with one line: the process, and the reason why it does not get the order.
    fn order(&self, pid: u32, order: Order) -> Result<(), Error>;
}

/// The answer to a request that succeeded and has nothing to report.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
struct Acknowledged {
    schema: u32,
}

/// The progress of a long request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Progress {
    /// Bytes of memory given back or taken so far.
    pub bytes: u64,
    /// Bytes of memory that the whole request will give back or take.
    pub total_bytes: u64,
    /// Number of pages moved for the request so far.
    pub pages: u64,
}

/// The outcome of a long request.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Moved {
    /// Bytes of memory given back or taken.
    pub bytes: u64,
    /// Bytes that were given back before the machine slept and not taken again, because the cards'
    /// owners use them now. The governor takes them later.
    #[serde(default)]
    pub left_bytes: u64,
    /// Number of pages moved for the request.
    pub pages: u64,
    /// Seconds that the request took.
    pub seconds: f64,
}

/// One line of the answer to a long request.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Line {
    Progress(Progress),
    Result(Moved),
    Error(String),
}

/// One line of an answer, with the schema's version.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Reply {
    schema: u32,
    #[serde(flatten)]
    line: Line,
}

/// The answer to a request that cannot be served, with the reason.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Refusal {
    schema: u32,
    error: String,
    /// Whether the reason is that the daemon stops.
    #[serde(default)]
    stopping: bool,
}

/// Finds the control socket for a client that names none. It is the socket of the user's own
/// daemon. If only the socket of `weir on` exists, it is that one.
pub fn find() -> PathBuf {
    let own = default_path();
    let system = Path::new(SYSTEM).join(SOCKET);
    if !own.exists() && system.exists() { system } else { own }
}

/// The default control socket: in the user's own run-time directory, or in the system's.
pub fn default_path() -> PathBuf {
    default_directory().join(SOCKET)
}

/// The user's own run-time directory, or the system's.
pub fn default_directory() -> PathBuf {
    let directory = std::env::var_os("XDG_RUNTIME_DIR").filter(|directory| !directory.is_empty());
    directory.map_or_else(|| PathBuf::from(SYSTEM), |directory| PathBuf::from(directory).join("weir"))
}

/// Makes the directory of `path` if it is a run-time directory: the user's own or the system's. No
/// other directory is made.
pub fn make_run_time_directory(path: &Path) -> Result<(), Error> {
    let directories = [default_directory(), PathBuf::from(SYSTEM)];
    let Some(directory) = directories.iter().find(|directory| path.parent() == Some(directory)) else {
        return Ok(());
    };
    make_directory(directory).map_err(|error| {
        let what = format!(
            "cannot make {} for {}: {error}; run it as root, or name another place",
            directory.display(),
            path.display()
        );
        Error::new(ErrorKind::Control, what)
    })
}

/// Makes a directory that its owner alone may use, like the sockets in it.
fn make_directory(directory: &Path) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}
