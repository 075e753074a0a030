//! The progress of long work: a bar on a terminal, a line now and then elsewhere.

use indicatif::{ProgressBar, ProgressStyle};
use std::time::{Duration, Instant};
use weir_cli::seconds_left;
use weir_core::ByteSize;
use weir_core::log::{Level, Log};
use weir_daemon::Bar;

/// Time after which a start shows a bar.
const WORTH: Duration = Duration::from_millis(500);
/// Time after which a wait is shown.
const WORTH_A_WAIT: Duration = Duration::from_secs(1);
/// Time between two lines of progress where no bar can be drawn.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Makes the bars that [`weir_daemon::Start`] shows: one for each store that a starting daemon
/// opens.
pub fn show(log: &Log) -> impl Fn(String) -> Bar + use<> {
    let log = Log::clone(log);
    move |what| {
        let (log, name) = (Log::clone(&log), what.clone());
        let say = move |far: &str, left: &str| {
            log(Level::Info, format_args!("starting: {far} of {name}{left}"));
        };
        let mut shown = Shown::new(what, say).after(WORTH);
        Box::new(move |done, all| shown.show(done, all))
    }
}

/// Prints a line: how much is done, and the time left.
type Say = dyn FnMut(&str, &str);

/// Shows work that is counted in bytes: how much is done, how fast, and the time left. Dropping it
/// draws the last state, and removes the bar.
pub struct Shown {
    /// The bar. It is hidden where none can be drawn: in a file, a pipe, or a terminal without a
    /// cursor.
    bar: ProgressBar,
    /// Time after which the bar is drawn.
    after: Duration,
    is_drawn: bool,
    begun: Instant,
    said: Instant,
    /// Prints a line. It gets two texts: how far the work is ("1GiB of 8GiB"), and then a comma and
    /// the time left. If that time is not known, the second text is empty.
    say: Box<Say>,
}

impl Shown {
    /// Begins to show `what`.
    pub fn new(what: impl Into<String>, say: impl FnMut(&str, &str) + 'static) -> Self {
        let template = "{msg} {bar:30} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
        let style = ProgressStyle::with_template(template).expect("a valid template");
        let bar = ProgressBar::new(0).with_style(style).with_message(what.into());
        let now = Instant::now();
        let (after, say) = (Duration::ZERO, Box::new(say));
        Shown { bar, after, is_drawn: false, begun: now, said: now, say }
    }

    /// Draws no bar before the work has taken this long.
    pub fn after(mut self, after: Duration) -> Self {
        self.after = after;
        self
    }

    /// Shows that `done` bytes of `all` are done.
    pub fn show(&mut self, done: u64, all: u64) {
        if self.bar.is_hidden() {
            if self.said.elapsed() >= LINE_EVERY {
                self.said = Instant::now();
                let left = seconds_left(self.begun.elapsed(), done, all.saturating_sub(done));
                let left = left.map_or(String::new(), |seconds| format!(", about {seconds} s left"));
                (self.say)(&format!("{} of {}", ByteSize(done), ByteSize(all)), &left);
            }
        } else if self.is_drawn || self.begun.elapsed() >= self.after {
            self.is_drawn = true;
            self.bar.set_length(all);
            self.bar.set_position(done);
        }
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        if self.is_drawn {
            self.bar.force_draw();
            self.bar.finish_and_clear();
        }
    }
}

/// Shows a wait whose end is not known, only its longest time.
pub struct Waiting {
    what: String,
    bar: ProgressBar,
    begun: Instant,
    said: Instant,
    limit: Duration,
}

impl Waiting {
    /// Begins to wait for `what`, for no longer than `limit`.
    pub fn new(what: impl Into<String>, limit: Duration) -> Self {
        let template = format!("{{msg}} {{bar:30}} {{elapsed}}, for {} s at most", limit.as_secs());
        let style = ProgressStyle::with_template(&template).expect("a valid template");
        let (what, now) = (what.into(), Instant::now());
        let bar = ProgressBar::new(limit.as_millis() as u64).with_style(style);
        let bar = bar.with_message(format!("waiting for {what}"));
        Waiting { what, bar, begun: now, said: now, limit }
    }

    /// Shows that the wait goes on: moves the bar, or prints a line now and then where no bar can
    /// be drawn.
    pub fn look(&mut self) {
        if let Some(line) = self.line_due() {
            eprintln!("weir: {line}");
        }
    }

    fn line_due(&mut self) -> Option<String> {
        let elapsed = self.begun.elapsed();
        if !self.bar.is_hidden() {
            if elapsed >= WORTH_A_WAIT {
                self.bar.set_position(elapsed.as_millis() as u64);
            }
            return None;
        }
        (self.said.elapsed() >= LINE_EVERY).then(|| {
            self.said = Instant::now();
            let (now, most) = (elapsed.as_secs(), self.limit.as_secs());
            format!("waiting for {}: {now} s of {most} s at most", self.what)
        })
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    /// A time in the past: if work began then, its first line is due now.
    fn long_ago() -> Instant {
        Instant::now().checked_sub(LINE_EVERY).expect("a clock that has run for longer")
    }

    #[test]
    fn where_no_bar_can_be_drawn_a_line_now_and_then_says_how_far_it_is() {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let heard = Arc::clone(&lines);
        let say =
            move |far: &str, left: &str| heard.lock().expect("no panic").push(format!("{far} of it{left}"));
        let mut shown = Shown::new("it", say);
        shown.bar = ProgressBar::hidden();
        for done in [0, 1, 2, 8] {
            shown.show(done << 30, 8 << 30);
        }
        assert!(lines.lock().expect("no panic").is_empty(), "none is due");
        shown.said = long_ago();
        shown.show(0, 8 << 30);
        shown.show(1 << 30, 8 << 30);
        (shown.said, shown.begun) = (long_ago(), long_ago());
        shown.show(8 << 30, 8 << 30);
        let lines = lines.lock().expect("no panic");
        assert_eq!(*lines, ["0B of 8GiB of it", "8GiB of 8GiB of it, about 0 s left"]);
    }

    #[test]
    fn a_wait_says_now_and_then_how_long_it_may_take() {
        let mut waiting = Waiting::new("the next daemon", Duration::from_secs(60));
        waiting.bar = ProgressBar::hidden();
        assert_eq!(waiting.line_due(), None);
        (waiting.said, waiting.begun) = (long_ago(), long_ago());
        let line = waiting.line_due().expect("a line is due");
        assert!(
            line.starts_with("waiting for the next daemon: ") && line.ends_with(" s of 60 s at most"),
            "{line}"
        );
        assert_eq!(waiting.line_due(), None);
    }
}
