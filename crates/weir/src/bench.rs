//! `weir bench`: another program, which lies beside this one, so that the daemon carries none of
//! what it needs.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use weir_cli::failure::Failure;

/// Becomes that program; returns only why not.
pub fn run(arguments: &[OsString]) -> Failure {
    let program = match std::env::current_exe() {
        Ok(weir) => weir.with_file_name("weir-bench"),
        Err(error) => {
            return Failure::Failed(format!("cannot tell where this program lies: {error}; mount /proc"));
        }
    };
    let error = Command::new(&program).args(arguments).exec();
    let shown = program.display();
    Failure::Failed(match error.kind() {
        io::ErrorKind::NotFound => {
            format!("{shown} is not there; build it (cargo build --release) and put it beside weir")
        }
        _ => format!("cannot run {shown}: {error}; reinstall weir"),
    })
}
