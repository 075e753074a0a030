//! Weir lets memory overflow where you chose: into GPU memory that sits idle, into host memory,
//! into files.
//!
//! This is the program: the command line, the daemon in the foreground, and the commands that ask a
//! daemon. The crates below it handle pages.

#[cfg_attr(not(test), macro_use)]
extern crate weir_cli;

mod attach;
mod bench;
mod cache;
mod cli;
mod complete;
mod compress;
mod config;
mod doctor;
mod examples;
mod failure;
mod front_ends;
mod give_back;
mod journal;
mod mount;
mod on;
mod progress;
mod run;
mod serve;
mod some_store;
mod stack;
mod status;
mod trial;
mod volume;

use clap::{CommandFactory as _, Parser as _};
use cli::{Cli, Command};
use std::process::ExitCode;
use weir_cli::failure::Failure;
use weir_cli::{guard, manual};
use weir_core::seal::SealedAllocator;

// This allocator notices an allocation on an I/O thread; see weir_core::seal.
#[global_allocator]
static ALLOCATOR: SealedAllocator = SealedAllocator;

fn main() -> ExitCode {
    // The name that `ps` and `top` show, and by which other programs know a daemon. Without it, a
    // program that was started from a copy in memory would have the name of that copy's descriptor.
    let _ = rustix::thread::set_name(c"weir");
    weir_cli::failure::end(Cli::try_parse().map_err(Failure::from).and_then(run))
}

fn run(cli: Cli) -> Result<(), Failure> {
    match cli.command {
        Command::Try(options) => guard::run(None, || trial::run(&options)),
        Command::Serve(options) => serve::run(options),
        Command::GiveBack(options) => give_back::give_back(&options),
        Command::Take(options) => give_back::take(&options),
        Command::On(options) => on::on(&options),
        Command::Off(options) => on::off(&options),
        Command::Restart(options) => on::restart(&options),
        Command::Top(options) => on::top(&options),
        Command::Battery(options) => on::battery(&options),
        Command::Status(options) => status::run(&options),
        Command::Volume { command } => volume::run(command),
        Command::Cache { command } => cache::run(&command),
        Command::Stack { command } => stack::run(&command),
        Command::Attach(options) => attach::attach(options),
        Command::Detach(options) => attach::detach(&options),
        Command::Mount(options) => mount::run(&options),
        Command::Run(options) => run::run(&options),
        Command::Vm(options) => run::vm(options),
        Command::Limit(options) => run::limit(&options),
        Command::Evict(options) => run::evict(options),
        Command::Doctor(options) => doctor::run(options),
        Command::LookAtCards { store } => {
            weir_daemon::cards::run(&store);
            Ok(())
        }
        Command::Bench { arguments } => Err(bench::run(&arguments)),
        Command::Completions { shell } => {
            manual::completions(Cli::command(), shell, |script| complete::with_stores(shell, script));
            Ok(())
        }
        Command::Man { directory } => manual::pages(Cli::command(), &directory, examples::of),
    }
}
