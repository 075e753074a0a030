//! `weir bench` runs another program, which is installed beside this one. So the daemon carries
//! none of its code.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use weir_cli::failure::Failure;

/// Replaces this process by the benchmark program; returns only if that fails, with the reason.
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
