//! `weir cache`: keeps pages of a disk in a fast store, and serves them by NBD, ublk or FUSE.
//!
//! `create` and `open` are processes in the foreground, as `weir serve` is. `check` reads a home
//! that nobody uses. The other subcommands send requests to the control socket.

mod check;
mod control;
mod create;
mod front;
mod home;
pub mod marks;
mod memory;
mod options;
mod report;
mod trace;

pub use options::{CacheCommand, default_socket};

use crate::progress::Shown;
use control::{Request, ask};
use weir_cli::failure::Failure;
use weir_core::ByteSize;

/// Runs the subcommand.
pub fn run(command: &CacheCommand) -> Result<(), Failure> {
    match command {
        CacheCommand::Create(options) => create::run(&options.cache, Some(options)),
        CacheCommand::Open(options) => create::run(options, None),
        CacheCommand::Check { home, json } => check::run(home, *json),
        CacheCommand::Status { json, control } => {
            let report = control::status(&control.path())?;
            if *json {
                println!("{}", serde_json::to_string_pretty(&report).map_err(Failure::failed)?);
            } else {
                print!("{report}");
            }
            Ok(())
        }
        CacheCommand::Flush { control } => ask_and_show(control, &Request::Flush, "flushing"),
        CacheCommand::Mode { mode, control } => {
            ask(&control.path(), &Request::Mode { mode: mode.to_string() }, &mut |_| {})
        }
        CacheCommand::Resize { size: Some(size), control, .. } => resize(control, size.0),
        CacheCommand::Resize { control, .. } => {
            ask(&control.path(), &Request::Grow, &mut |_| {})?;
            let report = control::status(&control.path())?;
            println!("the device has {} now", ByteSize(report.device_bytes()));
            Ok(())
        }
        CacheCommand::Trace(options) => trace::run(options),
        CacheCommand::Detach { control } => ask_and_show(control, &Request::Detach, "detaching"),
    }
}

/// Changes how much of its store a cache uses, and shows the progress.
fn resize(control: &options::Control, bytes: Option<u64>) -> Result<(), Failure> {
    let mut shown = Shown::new("resizing", |far, left| eprintln!("resizing: {far}{left}"));
    let outcome = control::resize(&control.path(), bytes, &mut |far| {
        // While this request waits for an earlier one, `total_bytes` is 0, and there is no progress
        // to show.
        if far.total_bytes > 0 {
            shown.show(far.bytes, far.total_bytes);
        }
    });
    drop(shown);
    let moved = outcome?;
    let (size, all) = control::status(&control.path())?.store_bytes();
    let (size, all) = (ByteSize(size), ByteSize(all));
    println!("the cache uses {size} of its store's {all} now, after {:.2} s", moved.seconds);
    Ok(())
}

/// Sends a request that makes the cache write dirty pages home, and shows the progress.
fn ask_and_show(control: &options::Control, request: &Request, doing: &'static str) -> Result<(), Failure> {
    let say = move |far: &str, left: &str| eprintln!("{doing}: {far} are at home{left}");
    let (mut shown, mut total) = (Shown::new(doing, say), 0);
    ask(&control.path(), request, &mut |dirty| {
        // Programs may write to the cache meanwhile. Then more bytes are dirty than before, and the
        // total grows.
        total = dirty.max(total);
        shown.show(total - dirty, total);
    })
}
