//! Log lines for the operator, from threads that must not allocate.

use rustix::io::Errno;
use std::fmt::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The importance of a log line.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Level {
    /// A failure, of Weir or of a client.
    Warning,
    /// An event that is no failure.
    Info,
}

/// A function that takes log lines. I/O threads call it, so it must not allocate, and should not
/// wait.
pub type Log = Arc<dyn Fn(Level, fmt::Arguments<'_>) + Send + Sync>;

/// A log that writes each line to standard error in one write, without allocating. It cuts lines
/// longer than [`LINE_MAX`], and leaves out lines below `least`. If standard error is non-blocking
/// (`O_NONBLOCK`), it may refuse lines, which are lost. The next line that it takes comes after a
/// count of the lost ones.
pub fn to_stderr(least: Level) -> Log {
    let lost = AtomicU64::new(0);
    Arc::new(move |level, line| {
        if level > least {
            return;
        }
        let before = lost.swap(0, Ordering::Relaxed);
        if before > 0 && !say(format_args!("{before} lines before this one were lost: nobody took them")) {
            lost.fetch_add(before, Ordering::Relaxed);
        }
        if !say(line) {
            lost.fetch_add(1, Ordering::Relaxed);
        }
    })
}

/// Limits the log lines of a server about its clients. Lines beyond `most` in a period are only
/// counted, and the next period's first line says how many they were. So a client cannot flood the
/// log.
pub struct Throttle {
    log: Log,
    server: &'static str,
    most: u32,
    period: Duration,
    begun: Instant,
    lines: u32,
    swallowed: u32,
}

impl Throttle {
    /// Makes a limit for log lines about events of clients: 20 lines a second.
    pub fn new(log: Log, server: &'static str) -> Self {
        let (period, begun) = (Duration::from_secs(1), Instant::now());
        Throttle { log, server, most: 20, period, begun, lines: 0, swallowed: 0 }
    }

    /// Makes a limit for log lines about a condition that lasts and is found again and again: one
    /// line a minute.
    pub fn condition(log: Log, server: &'static str) -> Self {
        Throttle { most: 1, period: Duration::from_secs(60), ..Throttle::new(log, server) }
    }

    /// Writes a line to the log, or only counts it if the period's limit is reached.
    pub fn line(&mut self, level: Level, line: fmt::Arguments<'_>) {
        let server = self.server;
        if self.begun.elapsed() >= self.period {
            if self.swallowed > 0 {
                (self.log)(level, format_args!("{server}: {} more lines like the last", self.swallowed));
            }
            (self.begun, self.lines, self.swallowed) = (Instant::now(), 0, 0);
        }
        self.lines += 1;
        if self.lines <= self.most {
            (self.log)(level, format_args!("{server}: {line}"));
        } else {
            self.swallowed += 1;
        }
    }
}

/// Writes a line to standard error. Returns false only if standard error has no room for the line
/// now.
fn say(line: fmt::Arguments<'_>) -> bool {
    let mut text = Line::default();
    // A line that does not fit is cut: `Line` reports the overflow, and holds the part that fits.
    let _ = write!(text, "weir: {line}");
    text.end();
    rustix::io::write(rustix::stdio::stderr(), &text.bytes[..text.len]) != Err(Errno::AGAIN)
}

/// Bytes of the longest line, its newline included.
pub const LINE_MAX: usize = 512;

struct Line {
    bytes: [u8; LINE_MAX],
    len: usize,
}

impl Default for Line {
    fn default() -> Self {
        Line { bytes: [0; LINE_MAX], len: 0 }
    }
}

impl Line {
    fn end(&mut self) {
        let at = self.len.min(LINE_MAX - 1);
        self.bytes[at] = b'\n';
        self.len = at + 1;
    }
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let take = text.len().min(LINE_MAX - self.len);
        let taken = &mut self.bytes[self.len..self.len + take];
        taken.copy_from_slice(&text.as_bytes()[..take]);
        // Replace control characters: a name that a client chose must stay on its line, and must
        // not control a terminal.
        taken.iter_mut().filter(|byte| byte.is_ascii_control()).for_each(|byte| *byte = b'?');
        self.len += take;
        if take == text.len() { Ok(()) } else { Err(fmt::Error) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_lines_is_counted_and_a_condition_is_said_once_a_period() {
        let said = Arc::new(std::sync::Mutex::new(Vec::new()));
        let heard = Arc::clone(&said);
        let log: Log = Arc::new(move |_, line| heard.lock().unwrap().push(line.to_string()));
        let mut flood =
            Throttle { period: Duration::from_secs(3600), ..Throttle::new(Arc::clone(&log), "x") };
        for number in 0..1000 {
            flood.line(Level::Warning, format_args!("{number}"));
        }
        assert_eq!(said.lock().unwrap().len(), 20);
        said.lock().unwrap().clear();
        flood.period = Duration::ZERO;
        flood.line(Level::Warning, format_args!("later"));
        assert_eq!(*said.lock().unwrap(), ["x: 980 more lines like the last", "x: later"]);
        said.lock().unwrap().clear();
        let mut condition = Throttle { period: Duration::from_secs(3600), ..Throttle::condition(log, "x") };
        (0..1000).for_each(|_| condition.line(Level::Warning, format_args!("no descriptors")));
        assert_eq!(*said.lock().unwrap(), ["x: no descriptors"]);
    }

    #[test]
    fn a_line_that_is_too_long_is_cut_and_still_ends() {
        let mut line = Line::default();
        assert!(write!(line, "{:600}", 'x').is_err());
        line.end();
        assert_eq!((line.len, line.bytes[LINE_MAX - 1]), (LINE_MAX, b'\n'));

        let mut line = Line::default();
        write!(line, "named a\nb\x1b[2J").unwrap();
        line.end();
        assert_eq!(&line.bytes[..line.len], b"named a?b?[2J\n");

        let mut line = Line::default();
        write!(line, "short {}", 1).unwrap();
        line.end();
        assert_eq!(&line.bytes[..line.len], b"short 1\n");
    }
}
