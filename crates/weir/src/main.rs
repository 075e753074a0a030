//! Weir lets memory overflow where you chose: into GPU memory that sits idle, into host memory, into files.
//!
//! This is the program: one command line, one daemon in the foreground, and what asks the daemon things. What it
//! does with pages is in the crates below it.

mod cli;
mod doctor;
mod failure;
mod manual;

use clap::Parser as _;
use cli::{Cli, Command};
use failure::Failure;
use std::process::ExitCode;

fn main() -> ExitCode {
    let outcome = Cli::try_parse().map_err(Failure::from).and_then(run);
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn run(cli: Cli) -> Result<(), Failure> {
    match cli.command {
        Command::Doctor(options) => doctor::run(options),
        Command::Completions { shell } => manual::completions(shell),
        Command::Man { directory } => manual::pages(&directory),
    }
}
