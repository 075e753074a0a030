//! Man pages and completions, from the same definitions as the command line.

use crate::cli::Cli;
use crate::failure::Failure;
use clap::CommandFactory as _;
use clap_complete::Shell;
use std::fs;
use std::io::{self, Write as _};
use std::path::Path;

/// Prints what a shell needs to complete `weir`.
pub fn completions(shell: Shell) -> Result<(), Failure> {
    // Into memory first: the generator panics where a pipe is closed early.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "weir", &mut script);
    match io::stdout().write_all(&script) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Failure::failed(error)),
        _ => Ok(()),
    }
}

/// Writes `weir.1` and a page for each subcommand into `directory`.
pub fn pages(directory: &Path) -> Result<(), Failure> {
    fs::create_dir_all(directory).and_then(|()| clap_mangen::generate_to(Cli::command(), directory)).map_err(
        |error| Failure::Failed(format!("cannot write man pages to {}: {error}", directory.display())),
    )
}
