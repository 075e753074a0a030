//! Mounts a FUSE connection: by mount(2) if that is allowed, else by `fusermount3`.

mod dead;

use super::device::Device;
use dead::{Life, life};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType,
};
use std::ffi::CString;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The programs that mount on behalf of users who may not call mount(2).
const FUSERMOUNT: [&str; 2] = ["fusermount3", "fusermount"];

/// The second half of the file system's type: `fuse.` comes before it.
const SUBTYPE: &str = "weir";

/// The reason why nothing could be mounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The kernel has no FUSE, or this process has no access to it.
    #[error("cannot open /dev/fuse; load the module fuse (modprobe fuse), and see its mode")]
    Device(#[source] io::Error),
    /// The mount point is no file or directory.
    #[error("cannot mount on {path}: {source}")]
    Point {
        /// The mount point.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file system that is mounted at this path does not answer.
    #[error(
        "what is mounted on {0} does not answer, and its server may live; wait for it or end it, then run umount -f {0}"
    )]
    Silent(PathBuf),
    /// A daemon that has ended left its mount at this path.
    #[error("{0} is a mount point whose server is gone; run fusermount3 -u {0} (or umount {0})")]
    Stale(PathBuf),
    /// The system or `fusermount3` refused to mount.
    #[error("cannot mount on {path}: {reason}")]
    Refused {
        /// The mount point.
        path: PathBuf,
        /// The reason that the system or `fusermount3` gave.
        reason: String,
    },
}

/// A mounted connection. Dropping it unmounts.
#[derive(Debug)]
pub struct Mount {
    point: PathBuf,
    by_fusermount: bool,
    /// Whether dropping this value unmounts the file system.
    armed: bool,
}

/// The options of a mount.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// The name that `df` shows as the device.
    pub source: &'a str,
    /// Whether the kernel checks permissions by mode and owner.
    pub default_permissions: bool,
    /// Whether other users than the one who mounts may use the file system.
    pub allow_other: bool,
    /// Bytes of the largest read.
    pub read_max: u32,
}

impl Options<'_> {
    /// The option that says which users the kernel lets in. mount(2) and `fusermount3` both take
    /// it.
    fn access(&self) -> String {
        let words = [(self.default_permissions, ",default_permissions"), (self.allow_other, ",allow_other")];
        words.into_iter().filter_map(|(is_set, word)| is_set.then_some(word)).collect()
    }
}

impl Mount {
    /// Mounts a connection on a file or directory; the mount's root is of the same kind. The mount
    /// of a dead server must have been removed.
    ///
    /// # Errors
    /// Fails with a [`MountError`].
    pub fn new(point: &Path, options: &Options<'_>) -> Result<(Mount, Device), MountError> {
        let failed = |source| MountError::Point { path: point.to_owned(), source };
        let meta = std::fs::metadata(point).map_err(failed)?;
        let absolute = std::fs::canonicalize(point).map_err(failed)?;
        let device = Device::open().map_err(MountError::Device)?;
        let kind = if meta.is_dir() { 0o040000 } else { 0o100000 };
        match mount(&device, &absolute, kind, options) {
            Ok(()) => Ok((Mount { point: absolute, by_fusermount: false, armed: true }, device)),
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::PERM.raw_os_error()) => {
                let device = fusermount(&absolute, options)?;
                Ok((Mount { point: absolute, by_fusermount: true, armed: true }, device))
            }
            Err(error) => Err(MountError::Refused { path: point.to_owned(), reason: error.to_string() }),
        }
    }

    /// Takes over a mount that another process made. Dropping the returned value leaves the file
    /// system mounted; [`unmount`](Self::unmount) unmounts it.
    ///
    /// # Errors
    /// Fails when the path does not exist.
    pub fn adopt(point: &Path) -> io::Result<Mount> {
        // Do not canonicalise the path. A look at the mount would wait for its server, which is
        // this process.
        let point = std::path::absolute(point)?;
        Ok(Mount { point, by_fusermount: rustix::process::geteuid().as_raw() != 0, armed: false })
    }

    /// The path of the mount point.
    pub fn point(&self) -> &Path {
        &self.point
    }

    /// Unmounts the file system. A program that has a file open there keeps the file until the
    /// connection ends.
    ///
    /// # Errors
    /// Fails with the system's error.
    pub fn unmount(mut self) -> io::Result<()> {
        self.armed = true;
        self.undo()
    }

    /// Unmounts the file system if no program has anything open there.
    ///
    /// # Errors
    /// Fails with `EBUSY` if a program has something open there, or with the system's error.
    pub(super) fn unmount_unused(&self) -> io::Result<()> {
        if self.by_fusermount {
            return run_fusermount(&["-u", "--"], &self.point);
        }
        Ok(rustix::mount::unmount(&self.point, UnmountFlags::NOFOLLOW)?)
    }

    /// Whether dropping this value leaves the file system mounted.
    pub(super) fn stays(&self) -> bool {
        !self.armed
    }

    /// Leaves the file system mounted.
    pub fn leave(mut self) {
        self.armed = false;
    }

    fn undo(&mut self) -> io::Result<()> {
        if !std::mem::take(&mut self.armed) || !is_mounted(&self.point) {
            return Ok(());
        }
        if !self.by_fusermount {
            let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
            return Ok(rustix::mount::unmount(&self.point, flags)?);
        }
        run_fusermount(&["-u", "-z", "--"], &self.point)
    }
}

/// Runs `fusermount3`, the distribution's set-uid program, on `point`.
fn run_fusermount(arguments: &[&str], point: &Path) -> io::Result<()> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for program in FUSERMOUNT {
        match Command::new(program).args(arguments).arg(point).stdin(Stdio::null()).output() {
            Ok(output) if output.status.success() => return Ok(()),
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stderr);
                last = io::Error::other(text.lines().last().unwrap_or("it failed").trim().to_owned());
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => last = error,
        }
    }
    Err(last)
}

impl Drop for Mount {
    fn drop(&mut self) {
        // A drop cannot report an error. The next server finds a dead mount when it starts.
        let _ = self.undo();
    }
}

/// A mount point at which killed servers may leave mounts. The process that outlives all servers
/// has this value, to remove those mounts.
#[derive(Debug)]
pub struct Left {
    point: PathBuf,
    /// Whether nothing was at the path before the first server started. If so, a server made the
    /// file that is there now.
    vacant: bool,
}

impl Left {
    /// Notes whether there is anything at the mount point. Call this before the first server
    /// starts.
    pub fn before(point: &Path) -> Left {
        // Check for a mount first: a look at the file of a mount might wait for ever.
        let vacant = !std::path::absolute(point).is_ok_and(|point| is_mounted(&point))
            && std::fs::symlink_metadata(point).is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        Left { point: point.to_owned(), vacant }
    }

    /// Does what [`before`](Self::before) does, for a process that did not see the first server
    /// start. An empty file without a mount then counts as one that a server made.
    pub fn by_others(point: &Path) -> Left {
        Left { point: point.to_owned(), vacant: true }
    }

    /// The mount points beside `point`: files whose name is the name of `point`, a dot, and more
    /// text. If the file that such a mount covers is empty, [`clear`](Left::clear) takes it for one
    /// that a server made.
    pub fn beside(point: &Path) -> Vec<Left> {
        let Some((parent, name)) = point.parent().zip(point.file_name()) else { return Vec::new() };
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        // The kernel names mounts by paths without symbolic links.
        let Ok(parent) = parent.canonicalize() else { return Vec::new() };
        let begin = [name.as_bytes(), b"."].concat();
        let entries = std::fs::read_dir(&parent).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name()).filter(|name| name.as_bytes().starts_with(&begin));
        let points = names.map(|name| parent.join(name)).filter(|point| is_mounted(point));
        points.map(|point| Left { point, vacant: true }).collect()
    }

    /// Removes a dead mount, and the file under it if a server made the file. Call this once every
    /// server is gone.
    pub fn clear(self) {
        match life(&self.point) {
            Life::Alive => {}
            Life::Silent => return,
            // If the mount cannot be removed, the next server reports that at its start.
            found => drop(clear_dead(&self.point, found)),
        }
        let empty = |meta: std::fs::Metadata| meta.is_file() && meta.len() == 0;
        if self.vacant && std::fs::symlink_metadata(&self.point).is_ok_and(empty) {
            let _ = std::fs::remove_file(&self.point);
        }
    }
}

/// Unmounts the file system at `point` if its server is gone. Call it before any other look at
/// `point`: the kernel may let such a look wait for ever.
///
/// # Errors
/// Fails with [`MountError::Stale`] if the mount is none of Weir's, or cannot be removed. Fails
/// with [`MountError::Silent`] if the server does not answer and may still live.
pub(super) fn replace_dead(point: &Path) -> Result<(), MountError> {
    match life(point) {
        Life::Alive => Ok(()),
        Life::Silent => Err(MountError::Silent(point.to_owned())),
        found @ (Life::Dead | Life::Kept) => clear_dead(point, found),
    }
}

/// Removes a mount whose server is gone, if it was one of this program's.
fn clear_dead(point: &Path, found: Life) -> Result<(), MountError> {
    let stale = || MountError::Stale(point.to_owned());
    let mount = Mount::adopt(point).map_err(|_| stale())?;
    if !mounted(&mount.point).is_some_and(|mounted| mounted.is_ours()) {
        return Err(stale());
    }
    if found == Life::Kept {
        // A forced unmount ends the connection, even if it returns "busy" because a program waits.
        let _ = rustix::mount::unmount(&mount.point, UnmountFlags::FORCE | UnmountFlags::NOFOLLOW);
    }
    mount.unmount().map_err(|_| stale())
}

/// A mount's entry in `/proc/self/mountinfo`.
struct Mounted {
    /// The type of the file system.
    kind: String,
    /// The minor number of the file system's device. The kernel numbers FUSE connections by it.
    device: u32,
}

impl Mounted {
    /// Whether Weir made the mount: the file system has Weir's type.
    fn is_ours(&self) -> bool {
        self.kind == format!("fuse.{SUBTYPE}")
    }
}

/// The mount at `point`, which is absolute.
fn mounted(point: &Path) -> Option<Mounted> {
    let table = std::fs::read("/proc/self/mountinfo").ok()?;
    let escaped = escape(point.as_os_str().as_bytes());
    let mut lines = table.split(|byte| *byte == b'\n').map(|line| line.split(|byte| *byte == b' '));
    // Of several mounts at one path, the last line is that of the topmost.
    let mut top = lines.rfind(|fields| fields.clone().nth(4) == Some(&escaped[..]))?;
    let device = String::from_utf8_lossy(top.nth(2)?).split_once(':')?.1.parse().ok()?;
    top.find(|field| *field == b"-")?;
    Some(Mounted { kind: String::from_utf8_lossy(top.next()?).into_owned(), device })
}

/// Whether something is mounted at `point`, which is absolute.
pub fn is_mounted(point: &Path) -> bool {
    mounted(point).is_some()
}

/// Whether a file system of this program is mounted at `point`, an absolute path, and its server
/// lives or may live.
pub fn is_served(point: &Path) -> bool {
    mounted(point).is_some_and(|mounted| mounted.is_ours())
        && matches!(life(point), Life::Alive | Life::Silent)
}

/// Escapes a path as mountinfo does: blanks and backslashes in octal.
fn escape(path: &[u8]) -> Vec<u8> {
    let mut escaped = Vec::with_capacity(path.len());
    for &byte in path {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' => escaped.extend(format!("\\{byte:03o}").bytes()),
            byte => escaped.push(byte),
        }
    }
    escaped
}

fn mount(device: &Device, point: &Path, kind: u32, options: &Options<'_>) -> io::Result<()> {
    let access = options.access();
    let data = format!(
        "fd={},rootmode={kind:o},user_id={},group_id={},max_read={}{access}",
        device.as_fd().as_raw_fd(),
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw(),
        options.read_max,
    );
    let data = CString::new(data).expect("no zero in it");
    let fstype = format!("fuse.{SUBTYPE}");
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    Ok(rustix::mount::mount(options.source, point, fstype.as_str(), flags, data.as_c_str())?)
}

/// Runs `fusermount3`, the distribution's set-uid program. It mounts the file system and passes the
/// connection's descriptor to this process.
fn fusermount(point: &Path, options: &Options<'_>) -> Result<Device, MountError> {
    let refused = |reason: String| MountError::Refused { path: point.to_owned(), reason };
    let failed = |error: io::Error| refused(error.to_string());
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(|errno| failed(errno.into()))?;
    // The child inherits the socket by number. Another child started at this instant would inherit
    // it too, and close it when it ends.
    rustix::io::fcntl_setfd(&theirs, rustix::io::FdFlags::empty()).map_err(|errno| failed(errno.into()))?;
    let access = options.access();
    let words = format!(
        "rw,nosuid,nodev,fsname={},subtype={SUBTYPE},max_read={}{access}",
        options.source, options.read_max
    );
    let mut said = None;
    for program in FUSERMOUNT {
        let run = Command::new(program)
            .args(["-o", &words, "--"])
            .arg(point)
            .env("_FUSE_COMMFD", theirs.as_raw_fd().to_string())
            .stdin(Stdio::null())
            .output();
        match run {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
            Ok(output) if output.status.success() => {
                drop(theirs);
                return receive(&ours).map_err(failed);
            }
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stderr);
                said = Some(text.lines().last().unwrap_or("it failed").trim().to_owned());
                break;
            }
        }
    }
    let missing = "only root may mount without fusermount3; install the package fuse3, or run as root";
    Err(refused(said.unwrap_or_else(|| missing.to_owned())))
}

/// Receives the descriptor that fusermount sends.
fn receive(socket: impl AsFd) -> io::Result<Device> {
    let mut byte = [0; 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let buffers = &mut [IoSliceMut::new(&mut byte)];
    rustix::net::recvmsg(socket, buffers, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    Device::adopt(fd.ok_or_else(|| io::Error::other("fusermount sent no descriptor"))?)
}

/// The owner of a mount point: the mount gets the same owner.
pub fn owner(point: &Path) -> (u32, u32) {
    std::fs::metadata(point).map_or((0, 0), |meta| (meta.uid(), meta.gid()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_found_by_the_names_that_mountinfo_gives_them() {
        assert_eq!(escape(b"/a b\\c"), b"/a\\040b\\134c");
        assert_eq!(mounted(Path::new("/proc")).map(|mounted| mounted.kind).as_deref(), Some("proc"));
        assert!(!is_mounted(Path::new("/proc/self")));
    }
}
