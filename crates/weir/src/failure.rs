//! How the program ends when it does not end well: one line on standard error, and an exit code that scripts can
//! rely on (1 it failed, 2 it was asked wrongly).

use std::error::Error;
use std::fmt::Display;
use std::io::{self, Write as _};
use std::process::ExitCode;

/// Why the program ends early.
#[derive(Debug)]
pub enum Failure {
    /// Something did not work. The text names the thing, the value seen and the next step.
    Failed(String),
    /// The command line or the configuration asks for something that does not exist.
    Usage(String),
    /// Everything has been said already; only the exit code is left.
    Said,
    /// Help or version, or help in place of an answer (exit code 2): clap hands them over as errors.
    Asked(clap::Error),
}

impl Failure {
    /// A failure of the work itself.
    pub fn failed(reason: impl Display) -> Self {
        Failure::Failed(reason.to_string())
    }

    /// Says it, and gives the exit code.
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
            Failure::Said => ExitCode::from(1),
            Failure::Asked(text) => {
                // Standard output may be closed (`weir --help | head -1`): nothing is lost then.
                let _ = text.print();
                ExitCode::from(text.exit_code() as u8)
            }
        }
    }
}

/// One line, if standard error takes it.
fn say(reason: &str) {
    let _ = writeln!(io::stderr(), "weir: {}", one_line(reason));
}

impl From<clap::Error> for Failure {
    fn from(error: clap::Error) -> Self {
        use clap::error::ErrorKind::*;
        match error.kind() {
            DisplayHelp | DisplayVersion | DisplayHelpOnMissingArgumentOrSubcommand => Failure::Asked(error),
            _ => Failure::Usage(complaint(&error)),
        }
    }
}

/// An error with everything behind it, for people.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// What clap complains of, without the usage text after it, on one line.
pub fn complaint(error: &clap::Error) -> String {
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let end = ["\n\nUsage:", "\n\nFor more information"].into_iter().filter_map(|mark| text.find(mark)).min();
    let paragraphs = text[..end.unwrap_or(text.len())].split("\n\n").map(one_line);
    paragraphs.collect::<Vec<_>>().join("; ")
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
