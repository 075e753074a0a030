//! `weir cache`: keeps pages of a disk in a fast store, and serves them as a file that a loop
//! device turns into a disk.
//!
//! `create` and `open` are processes in the foreground, as `weir serve` is. `check` reads a home
//! that nobody uses. The other subcommands send requests to the control socket.

mod check;
mod control;
mod create;
mod home;
mod marks;
mod options;
mod report;

pub use options::CacheCommand;

use crate::progress;
use control::{Answer, Request, ask};
use indicatif::ProgressBar;
use std::io::{self, IsTerminal as _};
use std::time::{Duration, Instant};
use weir_cli::failure::Failure;
use weir_core::ByteSize;

/// Time between two lines about a detach's progress where no bar can be drawn.
const LINE_EVERY: Duration = Duration::from_secs(5);

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
        CacheCommand::Flush { control } => ask(&control.path(), &Request::Flush, &mut |_| {}),
        CacheCommand::Mode { mode, control } => {
            ask(&control.path(), &Request::Mode { mode: mode.to_string() }, &mut |_| {})
        }
        CacheCommand::Detach { control } => {
            let mut shown = Shown::default();
            let detached = ask(&control.path(), &Request::Detach, &mut |answer| shown.show(answer));
            shown.end();
            detached
        }
    }
}

/// Shows how far a detach is: a bar on a terminal, a line now and then elsewhere.
#[derive(Default)]
struct Shown {
    bar: Option<ProgressBar>,
    total: u64,
    said: Option<Instant>,
}

impl Shown {
    fn show(&mut self, answer: &Answer) {
        let Some(dirty) = answer.dirty_bytes else { return };
        self.total = self.total.max(dirty);
        let done = self.total - dirty;
        if io::stderr().is_terminal() {
            let bar = self.bar.get_or_insert_with(|| {
                ProgressBar::new(0).with_style(progress::style()).with_message("writing home")
            });
            bar.set_length(self.total);
            bar.set_position(done);
        } else if self.said.is_none_or(|said| said.elapsed() >= LINE_EVERY) {
            self.said = Some(Instant::now());
            eprintln!("detaching: {} of {} are at home", ByteSize(done), ByteSize(self.total));
        }
    }

    fn end(&self) {
        self.bar.iter().for_each(ProgressBar::finish_and_clear);
    }
}
