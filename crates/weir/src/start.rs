//! Shows the progress of a start, and can end it early. Taking memory, or writing the room of a
//! file, takes up to two seconds a GiB.

use indicatif::{ProgressBar, ProgressStyle};
use std::fmt::Display;
use std::io::{self, IsTerminal as _};
use std::time::{Duration, Instant};
use weir_core::log::{Level, Log};
use weir_core::{ByteSize, unlocked};

/// A start that is over within this time needs no bar.
const WORTH: Duration = Duration::from_millis(500);
/// A plain line says this often how far the start is.
const LINE_EVERY: Duration = Duration::from_secs(5);
/// The first word of such a line.
pub const LINE: &str = "starting: ";

/// Shows how far a start is: a bar on a terminal, a line now and then elsewhere. Ends the start
/// when a signal asks for that.
pub struct Start<'a> {
    log: Option<Log>,
    /// Returns the signal that came, if one did.
    told: Box<dyn FnMut() -> Option<i32> + 'a>,
    ended_by: Option<i32>,
}

impl<'a> Start<'a> {
    /// A start that ends early when `told` returns a signal.
    pub fn new(log: &Log, told: impl FnMut() -> Option<i32> + 'a) -> Self {
        Start { log: Some(Log::clone(log)), told: Box::new(told), ended_by: None }
    }

    /// A start that shows nothing and cannot be ended.
    pub fn silent() -> Self {
        Start { log: None, told: Box::new(|| None), ended_by: None }
    }

    /// The signal that ended the start.
    pub fn ended_by(&self) -> Option<i32> {
        self.ended_by
    }

    /// Returns a callback that takes the progress of `what`.
    pub fn watch(&mut self, what: &dyn Display) -> impl FnMut(u64, u64) -> io::Result<()> {
        let mut shown = Shown::new(self.log.clone(), what.to_string());
        move |done, all| {
            self.ended_by = self.ended_by.or_else(&mut self.told);
            if self.ended_by.is_some() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            shown.show(done, all);
            Ok(())
        }
    }
}

/// The bar or the lines of one store.
struct Shown {
    log: Option<Log>,
    what: String,
    is_terminal: bool,
    bar: Option<ProgressBar>,
    begun: Instant,
    said: Instant,
}

impl Shown {
    fn new(log: Option<Log>, what: String) -> Self {
        let now = Instant::now();
        Shown { log, what, is_terminal: io::stderr().is_terminal(), bar: None, begun: now, said: now }
    }

    fn show(&mut self, done: u64, all: u64) {
        let Some(log) = &self.log else { return };
        if !self.is_terminal {
            if self.said.elapsed() >= LINE_EVERY {
                self.said = Instant::now();
                let (what, done, all) = (&self.what, ByteSize(done), ByteSize(all));
                log(Level::Info, format_args!("{LINE}{done} of {all} of {what}"));
            }
            return;
        }
        if self.bar.is_none() && self.begun.elapsed() >= WORTH {
            let style = ProgressStyle::with_template("{msg} {bar:30} {bytes} of {total_bytes}, {eta} left")
                .expect("right");
            let bar = ProgressBar::new(all).with_style(style).with_message(self.what.clone());
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

/// Warns once if the system keeps this process from locking some memory, and says how much.
pub fn warn_of_unlocked_memory(log: &Log) {
    let bytes = unlocked();
    if bytes > 0 {
        log(
            Level::Warning,
            format_args!(
                "{} of memory is not locked, so the system may write pages to its swap in the clear: raise RLIMIT_MEMLOCK (ulimit -l unlimited; systemd: LimitMEMLOCK=infinity), or grant CAP_IPC_LOCK",
                ByteSize(bytes)
            ),
        );
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
        let mut shown = Shown::new(Some(log), "host:8GiB".to_owned());
        shown.is_terminal = false;
        shown.said = Instant::now().checked_sub(LINE_EVERY).expect("a clock that has run for longer");
        (0..3).for_each(|done| shown.show(done << 30, 8 << 30));
        assert_eq!(*lines.lock().expect("no panic"), ["starting: 0B of 8GiB of host:8GiB"]);
    }

    #[test]
    fn a_start_ends_by_the_signal_that_comes_and_stays_ended() {
        let mut signals = vec![None, Some(15), None].into_iter();
        let mut start = Start { log: None, told: Box::new(move || signals.next()?), ended_by: None };
        let mut watch = start.watch(&"host:1GiB");
        assert!(watch(1, 3).is_ok());
        assert_eq!(
            [watch(2, 3), watch(3, 3)].map(|end| end.map_err(|error| error.kind())),
            [Err(io::ErrorKind::Interrupted); 2]
        );
        drop(watch);
        assert_eq!(start.ended_by(), Some(15));
    }
}
