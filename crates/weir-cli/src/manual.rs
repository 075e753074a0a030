//! Man pages and completions, from the same definitions as the command line.

use crate::failure::{Failure, printed};
use clap::Command;
use clap_complete::Shell;
use std::fs;
use std::io::{self, Write as _};
use std::path::Path;

/// Prints the script with which a shell completes a program's arguments.
pub fn completions(mut program: Command, shell: Shell) {
    // Generate into memory first: the generator panics if a pipe is closed early.
    let mut script = Vec::new();
    let name = program.get_name().to_owned();
    clap_complete::generate(shell, &mut program, name, &mut script);
    printed(io::stdout().write_all(&script));
}

/// Writes the man page of a program and of each of its subcommands into `directory`.
///
/// # Errors
/// Fails when the directory cannot be made or written to.
pub fn pages(program: Command, directory: &Path) -> Result<(), Failure> {
    let shown = directory.display();
    // Make only the last directory: a missing one above it is a mistake in the path.
    match fs::create_dir(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(Failure::Failed(format!(
                "cannot make {shown}: {error}; make the directory above it first"
            )));
        }
        _ => {}
    }
    clap_mangen::generate_to(program, directory).map_err(|error| {
        Failure::Failed(format!(
            "cannot write man pages to {shown}: {error}; name a directory that you may write"
        ))
    })
}
