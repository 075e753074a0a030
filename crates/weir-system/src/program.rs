//! Runs programs of the system that change the machine.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

/// Runs a program in a process group of its own. So a terminal's signals do not end the program
/// half-way, which would leave a half-done change.
///
/// # Errors
/// Fails when the program cannot be started, or does not succeed. The error then has the text that
/// the program wrote to standard error.
pub fn run(command: &mut Command) -> io::Result<()> {
    // util-linux lies in directories that an ordinary user's PATH does not have.
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = [path.to_string_lossy().as_ref(), "/usr/sbin", "/sbin"].join(":");
    let output = command.env("PATH", path).process_group(0).stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ")))
}
