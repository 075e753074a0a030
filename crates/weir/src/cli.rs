//! The command line. Man pages and completions are made from these definitions, and the configuration file's keys
//! are the names of these flags.

use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;

/// Lets memory overflow where you chose: into idle GPU memory, host memory or files.
#[derive(Debug, Parser)]
#[command(name = "weir", version, propagate_version = true, max_term_width = 100)]
#[command(after_help = "Exit codes: 0 done, 1 failed, 2 usage.")]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What the program can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Say what this machine offers, and what to do about what it lacks.
    Doctor(DoctorOptions),

    /// Print completions for a shell.
    Completions {
        /// The shell that is to complete.
        shell: clap_complete::Shell,
    },

    /// Write the man pages into a directory.
    Man {
        /// Where to; it is made where it does not exist.
        directory: PathBuf,
    },
}

/// How `doctor` reports.
#[derive(Debug, Clone, Copy, Args)]
pub struct DoctorOptions {
    /// Print one JSON object ("schema": 1) instead of lines.
    #[arg(long)]
    pub json: bool,
}
