//! Man pages and completions, from the same definitions as the command line.

use crate::failure::{Failure, printed};
use clap::Command;
use clap_complete::Shell;
use std::fs;
use std::io::{self, Write as _};
use std::path::Path;

/// Prints the script with which a shell completes a program's arguments. `more` may change the
/// script's text before it is printed.
pub fn completions(mut program: Command, shell: Shell, more: impl Fn(String) -> String) {
    // Generate into memory first: the generator panics if a pipe is closed early.
    let mut script = Vec::new();
    let name = program.get_name().to_owned();
    clap_complete::generate(shell, &mut program, name, &mut script);
    let script = more(String::from_utf8_lossy(&script).into_owned());
    printed(io::stdout().write_all(script.as_bytes()));
}

/// Writes the man page of a program and of each of its subcommands into `directory`. `examples`
/// names the commands of a page, `weir-on` for example, each with a line about it.
///
/// # Errors
/// Fails when the directory cannot be made or written to.
pub fn pages(
    program: Command,
    directory: &Path,
    examples: impl Fn(&str) -> Vec<(String, String)>,
) -> Result<(), Failure> {
    let shown = directory.display();
    // Make only the last directory of the path. If one above it is missing, the path is probably
    // wrong.
    match fs::create_dir(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(Failure::Failed(format!(
                "cannot make {shown}: {error}; make the directory above it first"
            )));
        }
        _ => {}
    }
    let names = names(&program, program.get_name());
    let write = || {
        clap_mangen::generate_to(program, directory)?;
        names.iter().try_for_each(|name| add_examples(directory, name, &examples(name)))
    };
    write().map_err(|error: io::Error| {
        Failure::Failed(format!(
            "cannot write man pages to {shown}: {error}; name a directory that you may write"
        ))
    })
}

/// The name of a command's man page, and the names of its subcommands' pages.
fn names(command: &Command, name: &str) -> Vec<String> {
    let below = command.get_subcommands().filter(|below| !below.is_hide_set() && below.get_name() != "help");
    let below = below.flat_map(|below| names(below, &format!("{name}-{}", below.get_name())));
    std::iter::once(name.to_owned()).chain(below).collect()
}

fn add_examples(directory: &Path, name: &str, examples: &[(String, String)]) -> io::Result<()> {
    let mut section = ".SH EXAMPLES\n".to_owned();
    for (command, about) in examples {
        // Escape dashes and backslashes, which have a meaning of their own in roff.
        let command = command.replace('\\', "\\\\").replace('-', "\\-");
        section += &format!(".TP\n\\fB{command}\\fR\n{about}\n");
    }
    let mut page = fs::OpenOptions::new().append(true).open(directory.join(format!("{name}.1")))?;
    page.write_all(section.as_bytes())
}
