//! `weir give-back` and `weir take`: ask the daemon, and show its progress.

use crate::cli::{Amount, MemoryOptions};
use crate::progress::Shown;
use crate::{failure, on};
use std::path::PathBuf;
use weir_cli::failure::Failure;
use weir_core::ByteSize;
use weir_daemon::control::{self, Request};

/// Asks the daemon to give memory back.
pub fn give_back(options: &MemoryOptions) -> Result<(), Failure> {
    ask(options, false, "gave back")
}

/// Asks the daemon to take memory again.
pub fn take(options: &MemoryOptions) -> Result<(), Failure> {
    ask(options, true, "took")
}

/// The control socket of a daemon that is probably running, or else that of a cache.
fn find() -> PathBuf {
    let (daemon, cache) = (control::find(), crate::cache::default_socket());
    if !daemon.exists() && on::parts::among(&daemon).is_none() && cache.exists() { cache } else { daemon }
}

fn ask(options: &MemoryOptions, take: bool, did: &str) -> Result<(), Failure> {
    let path = options.control.clone().unwrap_or_else(find);
    if let Some(directory) = on::parts::among(&path) {
        let work = if take { on::parts::take } else { on::parts::give_back };
        return work(&directory, options.amount);
    }
    let bytes = match options.amount {
        Some(Amount::Size(size)) => Some(size.0),
        _ => None,
    };
    let request = match (take, options.sleep) {
        (false, false) => Request::GiveBack { bytes },
        (true, false) => Request::Take { bytes },
        (false, true) => Request::Sleep,
        (true, true) => Request::Wake,
    };
    let what = if take { "taking" } else { "giving back" };
    let mut shown = Shown::new(what, move |far, left| eprintln!("{what}: {far}{left}"));
    let outcome = control::ask_for(&path, request, |far| shown.show(far.bytes, far.total_bytes));
    drop(shown);
    let moved = outcome.map_err(failure::of)?;
    if take && moved.bytes == 0 && moved.left_bytes == 0 {
        let why = if options.sleep { " for a sleep" } else { "" };
        println!("nothing is given back{why}, so there is nothing to take");
        return Ok(());
    }
    let rate = moved.bytes as f64 / moved.seconds.max(1e-6) / 1e9;
    let pages = if take { String::new() } else { format!(", {} pages moved", moved.pages) };
    print!("{did} {} in {:.2} s ({rate:.1} GB/s{pages})", ByteSize(moved.bytes), moved.seconds);
    match moved.left_bytes {
        0 => println!(),
        left => println!("; {} more once the card's owner leaves it", ByteSize(left)),
    }
    Ok(())
}
