//! Notes of a device that was turned off for a while, by a low battery or for a sleep. `weir on
//! --again` turns the device on again as it was. If the user turns the device on or off by hand
//! meanwhile, the note is dropped.

use super::state::Again;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use weir_cli::failure::Failure;

/// The reasons for which Weir writes a note. Notes lie beside the run-time directory, which is gone
/// while Weir is off.
const WHO: [&str; 2] = ["battery", "sleep"];

/// The path of the note that is written for the reason `who`.
pub fn note(runtime: &Path, who: &str) -> PathBuf {
    runtime.with_extension(who)
}

/// Writes the note of a device that is to come back.
pub fn remember(note: &Path, again: &Again) -> Result<(), Failure> {
    let write = || -> io::Result<()> {
        let text = serde_json::to_vec(again)?;
        let mut file =
            fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(note)?;
        file.write_all(&text)
    };
    write().map_err(|error| Failure::Failed(format!("cannot write {}: {error}", note.display())))
}

/// Turns the device on as the note says; does nothing without a note.
pub fn turn_on(note: &Path) -> Result<(), Failure> {
    let text = match fs::read(note) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        text => text.map_err(Failure::failed)?,
    };
    let again: Again = serde_json::from_slice(&text).map_err(Failure::failed)?;
    // Run `weir on` as a process of its own, which parses the recorded arguments.
    let directory = if again.directory.is_dir() { &*again.directory } else { Path::new("/") };
    let mut on = Command::new("/proc/self/exe");
    let status = on.arg("on").args(again.arguments).current_dir(directory).status();
    if status.map_err(Failure::failed)?.success() { remove(note) } else { Err(Failure::Said) }
}

/// Drops the notes: the user has decided, so nothing comes back by itself.
pub fn forget(runtime: &Path) -> Result<(), Failure> {
    WHO.iter().try_for_each(|who| remove(&note(runtime, who)))
}

fn remove(note: &Path) -> Result<(), Failure> {
    match fs::remove_file(note) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Failure::failed(error)),
        _ => Ok(()),
    }
}
