//! The progress of a benchmark: a bar on a terminal, and nothing elsewhere.

use indicatif::{HumanDuration, ProgressBar, ProgressState, ProgressStyle};
use std::fmt::{Display, Write};
use std::time::Duration;
use weir_cli::seconds_left;

/// A bar on standard error. It has the part of the benchmark that runs, the share of all runs that
/// have ended, and the time left. The bar is drawn when a part begins, when a run ends, and by
/// threads that only wait. So the drawing disturbs no measurement. Dropping this value removes the
/// bar.
pub(crate) struct Steps(ProgressBar);

impl Steps {
    /// Begins a benchmark of `count` runs.
    pub fn new(count: usize) -> Self {
        let style = ProgressStyle::with_template("{msg} {bar:30} {percent}% in {elapsed}{left}");
        let style = style.expect("a valid template").with_key("left", write_left);
        Steps(ProgressBar::new(count as u64).with_style(style))
    }

    /// Names the part that begins.
    pub fn part(&self, name: impl Display) {
        self.0.set_message(name.to_string());
    }

    /// Moves the progress bar on by one run, which has ended.
    pub fn end(&self) {
        self.0.inc(1);
    }

    /// Prints a line on standard error, above the bar.
    pub fn say(&self, line: impl Display) {
        self.0.suspend(|| eprintln!("{line}"));
    }
}

/// Writes the time left, once a run has ended.
fn write_left(state: &ProgressState, out: &mut dyn Write) {
    let left = state.len().unwrap_or(0).saturating_sub(state.pos());
    if let Some(seconds) = seconds_left(state.elapsed(), state.pos(), left) {
        // If the write fails, the bar lacks the time left, and nothing else is lost.
        let _ = write!(out, ", {:#} left", HumanDuration(Duration::from_secs(seconds)));
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
