//! `weir-bench`, which `weir bench` runs. It is a program of its own, so that the daemon carries
//! none of the code that draws and compares.

#[macro_use]
extern crate weir_cli;

mod cli;
mod run;

use clap::Parser as _;
use cli::Cli;
use std::process::ExitCode;
use weir_cli::failure::{self, Failure};
use weir_core::seal::SealedAllocator;

// This allocator notices an allocation on an I/O thread; see weir_core::seal.
#[global_allocator]
static ALLOCATOR: SealedAllocator = SealedAllocator;

fn main() -> ExitCode {
    failure::end(Cli::try_parse().map_err(Failure::from).and_then(|cli| run::run(&cli)))
}
