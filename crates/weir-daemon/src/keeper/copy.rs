//! The keeper runs from a copy of the program in memory.
//!
//! An upgrade replaces the program's file while the keeper lives on. A process that runs a removed
//! file keeps its file system from being remounted read-only at shutdown (fs/super.c,
//! `s_remove_count`). The next boot then has to recover that file system.

use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Environment variables that tell the copy which file it was copied from, and that file's
/// [`Stamp`].
const ENVIRONMENT: [&str; 2] = ["WEIR_PROGRAM", "WEIR_PROGRAM_STAMP"];

/// The identity of a program's file: its device, inode, size and times. A file that replaces it in
/// an upgrade has another stamp.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stamp(String);

impl Stamp {
    /// The stamp of the file at `path`; `None` if there is no file.
    pub fn of(path: &Path) -> Option<Self> {
        let file = std::fs::metadata(path).ok()?;
        let (changed, nanoseconds) = (file.mtime(), file.mtime_nsec());
        Some(Stamp(format!("{}-{}-{}-{changed}.{nanoseconds}", file.dev(), file.ino(), file.size())))
    }
}

/// Whether this process is the copy.
pub fn is_copy() -> bool {
    std::env::var_os(ENVIRONMENT[0]).is_some()
}

/// The file from which this program was started, and the file's [`Stamp`] at that time. Call this
/// first of all, before an upgrade can replace the file. In the keeper's copy of the program any
/// time will do, since the copy's environment has both.
pub fn original() -> (PathBuf, Option<Stamp>) {
    let own = || PathBuf::from("/proc/self/exe");
    match (std::env::var_os(ENVIRONMENT[0]), std::env::var(ENVIRONMENT[1])) {
        (Some(path), Ok(stamp)) => (path.into(), Some(Stamp(stamp))),
        _ => (std::env::current_exe().unwrap_or_else(|_| own()), Stamp::of(&own())),
    }
}

/// The name of a process that carries swap. At shutdown init does not kill a process whose name
/// begins with @ (<https://systemd.io/ROOT_STORAGE_DAEMONS>).
pub const SWAP_NAME: &str = "@weir";

/// Replaces this process by the copy, with the same arguments and the same process id. Returns only
/// if that fails, and the process can go on as before. With `swap` the process gets the name
/// [`SWAP_NAME`], even if no copy can be made.
pub fn run(swap: bool) -> io::Error {
    let mut arguments = std::env::args_os();
    let own = arguments.next().unwrap_or_else(|| OsString::from("weir"));
    let name = if swap { OsString::from(SWAP_NAME) } else { own.clone() };
    let named = |program: &Path| {
        let mut command = Command::new(program);
        command.arg0(&name).args(std::env::args_os().skip(1));
        command
    };
    let become_copy = || -> io::Result<io::Error> {
        let (original, stamp) = original();
        let stamp = stamp.ok_or(io::ErrorKind::NotFound)?;
        let copy = memfd()?;
        io::copy(&mut File::open("/proc/self/exe")?, &mut &copy)?;
        let path = format!("/proc/self/fd/{}", copy.as_raw_fd());
        Ok(named(Path::new(&path)).env(ENVIRONMENT[0], original).env(ENVIRONMENT[1], stamp.0).exec())
    };
    let error = become_copy().unwrap_or_else(|error| error);
    // No copy could be made. Start this program's own file again, to give the process its new name.
    // The restarted program calls this function once more. There `name` equals `own`, so the
    // function returns.
    if name != own {
        return named(Path::new("/proc/self/exe")).exec();
    }
    error
}

fn memfd() -> io::Result<File> {
    let make = |flags| rustix::fs::memfd_create(c"weir", MemfdFlags::CLOEXEC | flags).map(File::from);
    Ok(match make(MemfdFlags::EXEC) {
        // Before Linux 6.3 the kernel does not know MFD_EXEC, and every memfd can be executed.
        Err(Errno::INVAL) => make(MemfdFlags::empty())?,
        made => made?,
    })
}
