//! A connection that is being opened. It is mounted first, and then makes its handshake. It is
//! unmounted if a later step fails.

use super::super::device::Device;
use super::super::mount::{Mount, Options};
use super::super::range::IO_MAX;
use super::super::ring::{self, Prepared, Uring};
use super::super::wire::init;
use super::hello::{Wish, greet};
use super::{Config, ServeError};
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use weir_core::log::{Level, Log};
use weir_volume::Volume;

/// A mounted connection, and what else is made before its threads start.
pub(super) struct Opened {
    pub mount: Mount,
    pub connection: Device,
    /// The threads' descriptors of the connection that an earlier server left.
    pub queues: Vec<Device>,
    pub can_resend: bool,
    pub made: bool,
    /// The io_urings of the first threads. Without them, all requests come by `/dev/fuse`.
    pub rings: Vec<Uring>,
}

/// A start that may still fail. Dropping it removes everything that it made.
pub(super) struct Begun {
    pub made: Option<PathBuf>,
}

impl Begun {
    pub fn keep(mut self) {
        self.made = None;
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        if let Some(path) = &self.made {
            let _ = fs::remove_file(path);
        }
    }
}

/// Mounts on `point` and does the handshake, if there is no earlier server to take over. `may_ring`
/// tells that no request waits for a slow store, so that the server may use io_uring.
pub(super) fn mounted(
    may_ring: bool,
    config: &Config,
    point: &Path,
    log: &Log,
) -> Result<Opened, ServeError> {
    let options = Options {
        source: &config.name,
        default_permissions: true,
        allow_other: config.allow_other,
        read_max: IO_MAX,
    };
    // Make the io_urings before the kernel is told of them. From then on the kernel holds all
    // requests back until the io_urings are ready.
    let Prepared { mut rings, io_max } = if config.ring && may_ring {
        ring::prepare(config.threads).unwrap_or_else(|why| {
            log(Level::Info, format_args!("fuse: requests come by /dev/fuse: {why}"));
            Prepared::none()
        })
    } else {
        Prepared::none()
    };
    let (mount, connection) = Mount::new(point, &options)?;
    let offered = greet(&connection, Wish { io_max, ring: !rings.is_empty() })?;
    if offered & init::OVER_IO_URING == 0 {
        rings.clear();
    }
    let can_resend = offered & init::HAS_RESEND != 0 && rings.is_empty();
    Ok(Opened { mount, connection, queues: Vec::new(), can_resend, made: false, rings })
}

/// Whether the page device answers every page at once. A thread with an io_uring is the only one
/// that serves its processors, so it must not wait for a slow store. Behind a thread that read from
/// a disk, 16 requests of one program came at half the rate (measured).
pub(super) fn lies_in_memory(volume: &Volume) -> bool {
    volume.stores().all(|store| store.share().is_some())
}

/// Makes the file to mount over, if it does not exist. Returns whether it made one.
pub(super) fn make(point: &Path) -> Result<bool, ServeError> {
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(point) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        // A dead mount is at the path. Count it as a file for now: a later step examines it.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NOTCONN.raw_os_error()) => Ok(false),
        Err(source) => Err(ServeError::Point { path: point.to_owned(), source }),
    }
}

/// Whether the mount's root is a file. Asks only the mount table: a stat would wait for this
/// process.
pub(super) fn is_file(point: &Path) -> bool {
    // With O_PATH the kernel resolves the path without asking the mount's server. The kernel has
    // known the type of the root inode since the mount.
    use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
    let open = rustix::fs::open(point, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let kind = open.and_then(|fd| {
        rustix::fs::statx(&fd, "", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE)
    });
    kind.is_ok_and(|stat| u32::from(stat.stx_mode) & 0o170000 == 0o100000)
}
