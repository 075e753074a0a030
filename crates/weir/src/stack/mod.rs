//! `weir stack`: the kernel's own cache (bcache) over its own stripe (md raid0), with a block
//! device of Weir as the cache.
//!
//! The journal records each step before it is done. `destroy` first writes the pages home that only
//! the cache has. Then it undoes the steps in reverse. If a create or destroy is interrupted, the
//! next one undoes the remaining steps.

mod create;
mod destroy;
mod kernel;
#[cfg(test)]
mod model;
mod options;
mod report;
mod state;
mod superblock;
mod system;

pub use options::StackCommand;

use weir_cli::failure::Failure;

/// Runs the subcommand.
pub fn run(command: &StackCommand) -> Result<(), Failure> {
    match command {
        StackCommand::Create(options) => create::run(options),
        StackCommand::Status { json, runtime } => report::run(&runtime.path, *json),
        StackCommand::Destroy(options) => destroy::run(options),
    }
}
