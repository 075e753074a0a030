//! The progress of long work: a bar on a terminal, a line now and then elsewhere.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::{self, IsTerminal as _};
use std::time::{Duration, Instant};
use weir_core::ByteSize;
use weir_core::log::{Level, Log};
use weir_daemon::Bar;

/// Time after which a start shows a bar.
const WORTH: Duration = Duration::from_millis(500);
/// Time between two lines of progress where no bar can be drawn.
const LINE_EVERY: Duration = Duration::from_secs(5);
/// The first word of a line that reports a start's progress.
pub const LINE: &str = "starting: ";

/// The bar of work that is counted in bytes: how much is done, how fast, and the time left.
pub fn style() -> ProgressStyle {
    let template = "{msg} {bar:30} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
    ProgressStyle::with_template(template).expect("a valid template")
}

/// Shows each store of a start, for [`weir_daemon::Start`].
pub fn show(log: &Log) -> impl Fn(String) -> Bar + use<> {
    let log = Log::clone(log);
    move |what| {
        let mut shown = Shown::new(Log::clone(&log), what);
        Box::new(move |done, all| shown.show(done, all))
    }
}

/// The bar or the lines of one store.
struct Shown {
    log: Log,
    what: String,
    is_terminal: bool,
    bar: Option<ProgressBar>,
    begun: Instant,
    said: Instant,
}

impl Shown {
    fn new(log: Log, what: String) -> Self {
        let now = Instant::now();
        Shown { log, what, is_terminal: io::stderr().is_terminal(), bar: None, begun: now, said: now }
    }

    fn show(&mut self, done: u64, all: u64) {
        if !self.is_terminal {
            if self.said.elapsed() >= LINE_EVERY {
                self.said = Instant::now();
                let (what, done, all) = (&self.what, ByteSize(done), ByteSize(all));
                (self.log)(Level::Info, format_args!("{LINE}{done} of {all} of {what}"));
            }
            return;
        }
        if self.bar.is_none() && self.begun.elapsed() >= WORTH {
            let bar = ProgressBar::new(all).with_style(style()).with_message(self.what.clone());
            self.bar = Some(bar.with_elapsed(self.begun.elapsed()));
        }
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        }
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[test]
    fn where_no_bar_can_be_drawn_a_line_now_and_then_says_how_far_it_is() {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let heard = Arc::clone(&lines);
        let log: Log = Arc::new(move |_, line| heard.lock().expect("no panic").push(line.to_string()));
        let mut shown = Shown::new(log, "host:8GiB".to_owned());
        shown.is_terminal = false;
        shown.said = Instant::now().checked_sub(LINE_EVERY).expect("a clock that has run for longer");
        (0..3).for_each(|done| shown.show(done << 30, 8 << 30));
        assert_eq!(*lines.lock().expect("no panic"), ["starting: 0B of 8GiB of host:8GiB"]);
    }
}
