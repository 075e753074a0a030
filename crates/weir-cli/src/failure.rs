//! Failures of the program. Each is one line on standard error, and an exit code that scripts can
//! rely on. Code 1: the program failed. Code 2: it was called wrongly. Code 3: there is too little
//! memory or room.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::fmt::Display;
use std::io::{self, Write as _};
use std::process::ExitCode;
use std::sync::OnceLock;
pub use weir_core::chain;

/// The exit code of [`Failure::NoRoom`].
pub const NO_ROOM: u8 = 3;

/// The reason why the program ends early.
#[derive(Debug)]
pub enum Failure {
    /// The program failed. The text names the thing, the value seen and the next step.
    Failed(String),
    /// The command line or the configuration asks for something that does not exist.
    Usage(String),
    /// There is not as much memory or room as was asked for. A smaller amount may work.
    NoRoom(String),
    /// Everything has been printed already; only the exit code is left.
    Said,
    /// The program ends with the exit code of a child process, which has printed everything.
    Ended(u8),
    /// The user asked for help or the version, or gets help because arguments are missing (exit
    /// code 2). Clap returns these texts as errors.
    Asked(clap::Error),
}

/// Prints the failure, if the outcome is one, and returns the exit code.
pub fn end(outcome: Result<(), Failure>) -> ExitCode {
    match outcome {
        // The work was done, but standard output may have refused what it printed.
        Ok(()) => all_printed().map_or_else(Failure::report, |()| ExitCode::SUCCESS),
        Err(Failure::Said) => all_printed().err().unwrap_or(Failure::Said).report(),
        Err(failure) => failure.report(),
    }
}

impl Failure {
    /// Makes a failure of the work itself, with this reason.
    pub fn failed(reason: impl Display) -> Self {
        Failure::Failed(reason.to_string())
    }

    /// Prints the failure, and returns the exit code.
    pub fn report(self) -> ExitCode {
        match self {
            Failure::Failed(reason) => {
                say(&reason);
                ExitCode::from(1)
            }
            Failure::Usage(reason) => {
                say(&reason);
                ExitCode::from(2)
            }
            Failure::NoRoom(reason) => {
                say(&reason);
                ExitCode::from(NO_ROOM)
            }
            Failure::Said => ExitCode::from(1),
            Failure::Ended(code) => ExitCode::from(code),
            Failure::Asked(text) => {
                // If standard output is closed (`weir --help | head -1`), nothing is lost. So an
                // error is not reported.
                let _ = text.print();
                ExitCode::from(text.exit_code() as u8)
            }
        }
    }
}

/// The error with which standard output refused a line.
static UNPRINTED: OnceLock<io::Error> = OnceLock::new();

/// Notes the result of printing a line on standard output. A closed reader is no failure.
pub fn printed(result: io::Result<()>) {
    if let Err(error) = result
        && error.kind() != io::ErrorKind::BrokenPipe
    {
        let _ = UNPRINTED.set(error);
    }
}

/// Checks that standard output took every line; fails with the error if not.
fn all_printed() -> Result<(), Failure> {
    let said = |error| format!("cannot write to standard output: {error}; part of the answer is missing");
    UNPRINTED.get().map_or(Ok(()), |error| Err(Failure::Failed(said(error))))
}

/// Prints one line, if standard error takes it.
fn say(reason: &str) {
    let _ = writeln!(io::stderr(), "weir: {}", with_next_step(&one_line(reason)));
}

/// Adds the next step to an error that says descriptors ran out. Any call can fail for this reason,
/// and the next step is always the same.
fn with_next_step(reason: &str) -> String {
    let none_left = io::Error::from(rustix::io::Errno::MFILE).to_string();
    let what = if reason == none_left { "cannot start: " } else { "" };
    let next =
        if reason.contains(&none_left) { "; raise the limit of open files (ulimit -n 1024)" } else { "" };
    format!("{what}{reason}{next}")
}

impl From<clap::Error> for Failure {
    fn from(error: clap::Error) -> Self {
        use ErrorKind::*;
        match error.kind() {
            DisplayHelp | DisplayVersion | DisplayHelpOnMissingArgumentOrSubcommand => Failure::Asked(error),
            _ => Failure::Usage(complaint(&error)),
        }
    }
}

/// Clap's error on one line. The usage text after it is left out, unless an argument is missing.
pub fn complaint(error: &clap::Error) -> String {
    let text = without_login(error);
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let end = ["\n\nUsage:", "\n\nFor more information"].into_iter().filter_map(|mark| text.find(mark)).min();
    let (said, rest) = text.split_at(end.unwrap_or(text.len()));
    let mut parts: Vec<String> = said.split("\n\n").map(one_line).collect();
    let usage = rest.lines().find_map(|line| line.strip_prefix("Usage: "));
    match error.kind() {
        ErrorKind::MissingRequiredArgument => parts.extend(usage.map(|usage| format!("usage: {usage}"))),
        ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand if parts.len() == 1 => {
            let is_command = |word: &&str| word.starts_with(|letter: char| letter.is_ascii_lowercase());
            let command = usage.map(|usage| usage.split(' ').take_while(is_command).collect::<Vec<_>>());
            parts.extend(command.map(|words| format!("{} --help lists what is accepted", words.join(" "))));
        }
        _ => {}
    }
    // Replaces the standard library's words for a text that is no number.
    let said = parts.join("; ").replace("invalid digit found in string", "not a whole number");
    said.replace("number too large to fit in target type", "too large a number")
}

/// Clap's error, with `***` in the place of a login that a URL has. Logs keep what a program says.
fn without_login(error: &clap::Error) -> String {
    let mut text = error.to_string();
    for kind in [ContextKind::InvalidValue, ContextKind::InvalidArg] {
        if let Some(ContextValue::String(value)) = error.get(kind)
            && let Some((scheme, rest)) = value.split_once("://")
            && let Some((_, address)) = rest.rsplit_once('@')
        {
            text = text.replace(value, &format!("{scheme}://***@{address}"));
        }
    }
    text
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
