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
    let commands = commands(&program, program.get_name());
    let write = || {
        clap_mangen::generate_to(program, directory)?;
        commands.iter().try_for_each(|(name, usage)| {
            let path = directory.join(format!("{name}.1"));
            let page = with_usage(&fs::read_to_string(&path)?, usage) + &section_of(&examples(name));
            fs::write(path, page)
        })
    };
    write().map_err(|error: io::Error| {
        Failure::Failed(format!(
            "cannot write man pages to {shown}: {error}; name a directory that you may write"
        ))
    })
}

/// The name of a command's man page and the usage of the command, and those of its subcommands.
fn commands(command: &Command, name: &str) -> Vec<(String, String)> {
    let usage = command.clone().bin_name(name.replace('-', " ")).render_usage().to_string();
    let usage = usage.trim_start_matches("Usage:").trim().to_owned();
    let below = command.get_subcommands().filter(|below| !below.is_hide_set() && below.get_name() != "help");
    let below = below.flat_map(|below| commands(below, &format!("{name}-{}", below.get_name())));
    std::iter::once((name.to_owned(), usage)).chain(below).collect()
}

/// A man page whose synopsis is the usage that the help shows too: the generator's own leaves the
/// values of options out. What the generator calls extra are notes.
fn with_usage(page: &str, usage: &str) -> String {
    const SYNOPSIS: &str = ".SH SYNOPSIS\n";
    let page = page.replace(".SH EXTRA\n", ".SH NOTES\n");
    match page.split_once(SYNOPSIS) {
        Some((before, after)) => {
            let rest = after.find(".SH ").map_or("", |at| &after[at..]);
            format!("{before}{SYNOPSIS}.nf\n{}\n.fi\n{rest}", escaped(usage))
        }
        None => page,
    }
}

/// The text with dashes and backslashes escaped, which have a meaning of their own in roff.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('-', "\\-")
}

fn section_of(examples: &[(String, String)]) -> String {
    let line = |(command, about): &(String, String)| format!(".TP\n\\fB{}\\fR\n{about}\n", escaped(command));
    ".SH EXAMPLES\n".to_owned() + &examples.iter().map(line).collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Arg, arg};

    #[test]
    fn a_synopsis_shows_the_values_of_options_and_what_stands_behind_the_dashes() {
        let run = Command::new("run")
            .arg(arg!(--resident <SIZE> "limit").required(true))
            .arg(Arg::new("PROGRAM").last(true).num_args(1..).required(true))
            .after_help("more");
        let program = Command::new("weir").subcommand(run);
        let directory = std::env::temp_dir().join(format!("weir-manual-{}", std::process::id()));
        pages(program, &directory, |_| vec![("weir run --x".into(), "Runs.".into())]).unwrap();
        let page = fs::read_to_string(directory.join("weir-run.1")).unwrap();
        fs::remove_dir_all(&directory).unwrap();
        let synopsis = ".SH SYNOPSIS\n.nf\nweir run \\-\\-resident <SIZE> \\-\\- <PROGRAM>...\n.fi\n";
        assert!(page.contains(synopsis), "{page}");
        assert!(page.contains(".SH NOTES\n") && !page.contains(".SH EXTRA"), "{page}");
        assert!(page.ends_with(".SH EXAMPLES\n.TP\n\\fBweir run \\-\\-x\\fR\nRuns.\n"), "{page}");
    }
}
