//! The settings of a server, and the errors of its start.

use super::super::mount::MountError;
use super::super::pool::THREADS_MAX;
use std::io;
use std::path::PathBuf;
use std::time::Duration;
use weir_core::swap_safety::Unprotected;
use weir_store::OpenError;

/// The settings of a server.
#[derive(Clone, Debug)]
pub struct Config {
    /// The file's name, if the mount point is a directory.
    pub name: String,
    /// The number of threads that serve: each has a lane and about 2 MiB of locked memory.
    pub threads: usize,
    /// Time that a thread spins for the next request before it sleeps; zero: it sleeps at once.
    pub spin: Duration,
    /// The file is to carry swap. Then every thread must have the I/O flusher flag, unless
    /// [`unsafe_no_flusher`](Config::unsafe_no_flusher) is set.
    pub swap: bool,
    /// Serve swap even with threads that lack the I/O flusher flag.
    pub unsafe_no_flusher: bool,
    /// Whether requests come by io_uring, if the kernel offers them and every page lies in memory.
    /// Such a server cannot be taken over: it has no [`handoffs`](super::Server::handoffs), and if
    /// it is killed, its requests under way fail.
    pub ring: bool,
    /// Whether users other than the one who mounts may use the file system, as far as modes and
    /// owners allow. If a user other than root mounts, `/etc/fuse.conf` must have
    /// `user_allow_other`.
    pub allow_other: bool,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            name: "weir".to_owned(),
            threads: 4,
            spin: Duration::ZERO,
            swap: false,
            unsafe_no_flusher: false,
            ring: true,
            allow_other: false,
        }
    }
}

/// The reason why a server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The connection cannot be mounted.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The server cannot make the file over which it is to mount.
    #[error("cannot make {path}, to mount over it")]
    Point {
        /// The path of the file over which the server is to mount.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The kernel's FUSE is too old, or does not answer.
    #[error("{0}")]
    Kernel(String),
    /// The configuration is invalid.
    #[error("{0}")]
    Config(String),
    /// A thread's lane cannot be opened.
    #[error(transparent)]
    Lane(#[from] OpenError),
    /// A thread lacks the I/O flusher flag, without which it must not serve swap.
    #[error("a thread that would serve swap lacks the I/O flusher flag")]
    Flusher(#[source] Unprotected),
    /// The system has no memory, threads or descriptors left.
    #[error("cannot take memory, threads and descriptors for {0} FUSE threads; ask for fewer")]
    Resources(usize, #[source] io::Error),
}

/// Describes the names that [`is_file_name`] takes.
pub const FILE_NAME: &str =
    "1 to 255 bytes without slash, comma and control characters, and neither . nor ..";

/// Whether a file can have the name: it must be valid in a directory and in a mount's options.
pub fn is_file_name(name: &str) -> bool {
    (1..=255).contains(&name.len())
        && !matches!(name, "." | "..")
        && !name.contains(|letter: char| matches!(letter, '/' | ',') || letter.is_control())
}

/// Refuses an invalid configuration.
pub(super) fn check(config: &Config) -> Result<(), ServeError> {
    if config.threads == 0 || config.threads > THREADS_MAX {
        let error = format!("{} FUSE threads; accepted: 1 to {THREADS_MAX}", config.threads);
        return Err(ServeError::Config(error));
    }
    if !is_file_name(&config.name) {
        let error = format!("the file cannot have the name {:?}; accepted: {FILE_NAME}", config.name);
        return Err(ServeError::Config(error));
    }
    Ok(())
}
