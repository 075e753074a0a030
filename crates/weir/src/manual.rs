//! Man pages and completions, from the same definitions as the command line.

use crate::cli::Cli;
use crate::failure::{Failure, printed};
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
    printed(io::stdout().write_all(&script));
    Ok(())
}

/// Writes `weir.1` and a page for each subcommand into `directory`.
pub fn pages(directory: &Path) -> Result<(), Failure> {
    let shown = directory.display();
    // Only the last directory: one that is missing above it is a mistake in the path.
    match fs::create_dir(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(Failure::Failed(format!(
                "cannot make {shown}: {error}; make the directory above it first"
            )));
        }
        _ => {}
    }
    clap_mangen::generate_to(Cli::command(), directory).map_err(|error| {
        Failure::Failed(format!(
            "cannot write man pages to {shown}: {error}; name a directory that you may write"
        ))
    })
}
