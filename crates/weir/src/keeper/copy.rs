//! The keeper runs from a copy of the program in memory.
//!
//! An upgrade replaces the program's file while the keeper lives on. A process that runs a removed file keeps its file system
//! from being remounted read-only at the machine's end (fs/super.c, `s_remove_count`), and the next start has to recover it.

use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

/// Says to the copy which file it was copied from.
const ENVIRONMENT: &str = "WEIR_PROGRAM";

/// The file that a new daemon is to come from. `None` before [`run`].
pub fn original() -> Option<PathBuf> {
    std::env::var_os(ENVIRONMENT).map(PathBuf::from)
}

/// Becomes the copy, with the same arguments and the same number. Returns only if that fails, and then nothing is lost by going
/// on as before.
pub fn run() -> io::Error {
    let become_copy = || -> io::Result<io::Error> {
        let original = std::env::current_exe()?;
        let copy = memfd()?;
        io::copy(&mut File::open("/proc/self/exe")?, &mut &copy)?;
        let mut arguments = std::env::args_os();
        let name = arguments.next().unwrap_or_else(|| OsString::from("weir"));
        Ok(Command::new(format!("/proc/self/fd/{}", copy.as_raw_fd()))
            .arg0(name)
            .args(arguments)
            .env(ENVIRONMENT, original)
            .exec())
    };
    become_copy().unwrap_or_else(|error| error)
}

fn memfd() -> io::Result<File> {
    let make = |flags| rustix::fs::memfd_create(c"weir", MemfdFlags::CLOEXEC | flags).map(File::from);
    Ok(match make(MemfdFlags::EXEC) {
        // Before Linux 6.3 every memfd can be executed.
        Err(Errno::INVAL) => make(MemfdFlags::empty())?,
        made => made?,
    })
}
