//! Finds out whether a mount's server is gone, without waiting for it.
//!
//! A connection ends when its last descriptor is closed. From then on every request to it fails. If
//! requests come by io_uring, the commands in the io_urings also hold the descriptor, and they end
//! with their io_uring. Linux 6.18 once let an io_uring wait for its commands for as long as the
//! connection lived: twenty minutes, until somebody ended the connection by hand. All programs that
//! used the mount waited too. A forced unmount ends such a connection. Weir forces it only if no
//! process has a descriptor of the connection. A connection that a keeper holds between two servers
//! must live.

use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;
use std::{fs, io};
use weir_system::kernel_release::{FUSE_NAMES_CONNECTIONS, version};

/// Longest wait for a server. A live server answers much faster. A kernel needs some of this time
/// to close the connection of a dead server.
const PATIENCE: Duration = Duration::from_secs(2);

/// The state of a mount's server, as far as it is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Life {
    /// The server answers, or no FUSE file system is mounted.
    Alive,
    /// The server does not answer now, and may answer later.
    Silent,
    /// The server is gone, and the kernel reports it.
    Dead,
    /// The server is gone, and the kernel keeps its connection. Every request waits until the
    /// connection is ended.
    Kept,
}

/// Checks the server of the mount at `point`, for at most twice [`PATIENCE`].
pub(super) fn life(point: &Path) -> Life {
    let asked = point.to_owned();
    // Ask with statfs, not with stat: the kernel may answer a stat from cached attributes, without
    // the server.
    match within(move || rustix::fs::statfs(&asked).map(drop)) {
        // ECONNABORTED comes when the server ends while it is asked.
        Some(Err(Errno::NOTCONN | Errno::CONNABORTED)) => Life::Dead,
        Some(_) => Life::Alive,
        None => {
            let ours = std::path::absolute(point).ok().and_then(|point| super::mounted(&point));
            let ours = ours.filter(super::Mounted::is_ours);
            // A time limit, because reading the descriptors of a process in exec waits until the
            // exec ends.
            match ours.and_then(|mounted| within(move || may_be_held(mounted.device))) {
                Some(false) => Life::Kept,
                _ => Life::Silent,
            }
        }
    }
}

/// The result of `ask`, which runs on a thread of its own; `None` if it takes longer than
/// [`PATIENCE`]. Then the thread is left behind, until the kernel answers it.
fn within<T: Send + 'static>(ask: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (answer, answered) = mpsc::channel();
    std::thread::Builder::new().spawn(move || answer.send(ask())).ok()?;
    answered.recv_timeout(PATIENCE).ok()
}

/// Whether a process has, or may have, a descriptor of the connection that is mounted as `device`.
/// A process that this one may not look into counts as a holder, since a live server must never be
/// taken for dead.
fn may_be_held(device: u32) -> bool {
    if !rustix::process::geteuid().is_root() || !names_connections() || !sees_every_process() {
        return true;
    }
    let Ok(processes) = fs::read_dir("/proc") else { return true };
    let mut processes =
        processes.flatten().filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().is_ok());
    processes.any(|process| match fs::read_dir(process.path().join("fd")) {
        Ok(descriptors) => descriptors.flatten().any(|fd| may_be(&process.path(), &fd.file_name(), device)),
        Err(error) => !is_gone(&error),
    })
}

/// Whether descriptor `fd` of a process is, or may be, one of the connection that is mounted as
/// `device`.
fn may_be(process: &Path, fd: &OsStr, device: u32) -> bool {
    let info = match fs::read_link(process.join("fd").join(fd)) {
        Ok(target) if target == Path::new("/dev/fuse") => fs::read_to_string(process.join("fdinfo").join(fd)),
        Ok(_) => return false,
        Err(error) => Err(error),
    };
    match info {
        // A descriptor of `/dev/fuse` without a mount names no connection.
        Ok(info) => connection(&info) == Some(device),
        // Process 1 serves no disks, so it holds no such descriptor. Some systems hide the
        // descriptors of process 1 even from root, since process 1 has more rights.
        Err(error) => !is_gone(&error) && process != Path::new("/proc/1"),
    }
}

/// Whether the error means that the process has ended, or has closed the descriptor.
fn is_gone(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::NOENT | Errno::SRCH))
}

/// Whether `/proc` lists every process of the machine. That is so in the first PID namespace, whose
/// number is a constant of the kernel (`PROC_PID_INIT_INO`, include/linux/proc_ns.h).
fn sees_every_process() -> bool {
    fs::metadata("/proc/self/ns/pid").is_ok_and(|namespace| namespace.ino() == 0xEFFF_FFFC)
}

/// Whether this kernel says to which connection a mounted descriptor belongs.
fn names_connections() -> bool {
    let release = rustix::system::uname();
    version(&release.release().to_string_lossy()).is_some_and(|version| version >= FUSE_NAMES_CONNECTIONS)
}

/// The connection that a descriptor's `fdinfo` names, by the minor number of its file system's
/// device.
fn connection(info: &str) -> Option<u32> {
    info.lines().find_map(|line| line.strip_prefix("fuse_connection:")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_says_its_connection_where_the_kernel_does() {
        assert_eq!(
            connection("pos:\t0\nflags:\t02100002\nmnt_id:\t24\nino:\t94\nfuse_connection:\t39\n"),
            Some(39)
        );
        assert_eq!(connection("pos:\t0\nflags:\t02100002\n"), None);
    }
}
