//! The progress of a benchmark: a bar on a terminal, and nothing elsewhere.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar that counts the runs of a benchmark as they end. Dropping it removes the bar.
pub(crate) struct Steps(ProgressBar);

impl Steps {
    /// Begins a benchmark of `count` runs.
    pub fn new(count: usize) -> Self {
        let style = ProgressStyle::with_template("{bar:30} {pos} of {len} runs in {elapsed}, {eta} left");
        Steps(ProgressBar::new(count as u64).with_style(style.expect("a valid template")))
    }

    /// Moves the progress bar on by one run, which has ended.
    pub fn end(&self) {
        self.0.inc(1);
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
