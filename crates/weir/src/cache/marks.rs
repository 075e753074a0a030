//! The marks of file systems, partition tables and the like on a home, as wipefs (util-linux) finds
//! them; and those of a durable log, which wipefs does not know.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use weir_cli::failure::Failure;
use weir_core::PAGE_SIZE;
use weir_system::program;

/// The marks of file systems, partition tables and the like on `home`, in one line; empty if it has
/// none.
///
/// # Errors
/// Fails when wipefs cannot tell.
pub fn find(home: &Path) -> Result<String, Failure> {
    let arguments = ["--no-act", "--parsable", "--output", "TYPE,LABEL"];
    let output = command(arguments.iter().map(OsStr::new), home)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| cannot(home, &error))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
        return Err(cannot(home, &io::Error::other(said)));
    }
    let lines = String::from_utf8_lossy(&output.stdout);
    let marks = lines.lines().filter(|line| !line.starts_with('#')).map(|line| {
        let line: String =
            line.chars().map(|letter| if letter.is_control() { '?' } else { letter }).collect();
        match line.split_once(',') {
            Some((kind, "")) => kind.to_owned(),
            Some((kind, label)) => format!("{kind} ({label})"),
            None => line,
        }
    });
    let own = has_log(home).map_err(|error| cannot(home, &error))?.then(|| LOG.to_owned());
    Ok(own.into_iter().chain(marks).collect::<Vec<_>>().join(", "))
}

const LOG: &str = "a durable log (weir cache open serves it)";
/// Offsets of the two copies of a durable log's superblock.
const COPIES: [u64; 2] = [0, 512 << 10];

/// Whether the home is a part of a durable log.
fn has_log(home: &Path) -> io::Result<bool> {
    let file = File::open(home)?;
    let mut found = [0; weir_log::MAGIC.len()];
    for at in COPIES {
        match file.read_exact_at(&mut found, at) {
            Ok(()) if found == weir_log::MAGIC => return Ok(true),
            Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => return Err(error),
            _ => {}
        }
    }
    Ok(false)
}

/// Erases the superblock of a durable log, both copies.
fn wipe_log(home: &Path) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(home)?;
    COPIES.into_iter().try_for_each(|at| file.write_all_at(&[0; PAGE_SIZE], at))?;
    file.sync_all()
}

/// Erases the marks on `home`.
///
/// # Errors
/// Fails with the message of wipefs.
pub fn wipe(home: &Path) -> Result<(), Failure> {
    if let Err(error) = has_log(home).and_then(|has| if has { wipe_log(home) } else { Ok(()) }) {
        let what = format!("cannot erase the durable log on {}: {error}", home.display());
        return Err(Failure::Failed(what));
    }
    program::run(&mut command([OsStr::new("--all")].into_iter(), home)).map_err(|error| cannot(home, &error))
}

fn command<'a>(arguments: impl Iterator<Item = &'a OsStr>, home: &Path) -> Command {
    // util-linux lies in directories that an ordinary user's PATH does not have.
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = [path.to_string_lossy().as_ref(), "/usr/sbin", "/sbin"].join(":");
    let mut command = Command::new("wipefs");
    command.args(arguments).arg("--").arg(home).env("PATH", path).env("LC_ALL", "C");
    command
}

fn cannot(home: &Path, error: &io::Error) -> Failure {
    let home = home.display();
    Failure::Failed(match error.kind() {
        io::ErrorKind::NotFound => {
            format!("cannot tell what {home} carries: wipefs is missing; install util-linux")
        }
        _ => format!("cannot tell what {home} carries: wipefs: {error}"),
    })
}
