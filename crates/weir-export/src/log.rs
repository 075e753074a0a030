//! Lines for the operator, from threads that must not allocate.

use rustix::io::Errno;
use std::fmt::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How much a line matters.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Level {
    /// Something went wrong, on our side or a client's.
    Warning,
    /// Something happened.
    Info,
}

/// Where lines go. Called on I/O threads: it must not allocate and should not wait.
pub type Log = Arc<dyn Fn(Level, fmt::Arguments<'_>) + Send + Sync>;

/// A log that writes each line to standard error in one write, without allocating; longer lines than
/// [`LINE_MAX`] are cut. Lines below `least` are left out. Where standard error does not wait (`O_NONBLOCK`), lines that it does
/// not take are lost, and the next one that it takes is preceded by how many they were.
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

/// Whether the line was taken, or will never be.
fn say(line: fmt::Arguments<'_>) -> bool {
    let mut text = Line::default();
    // A line that does not fit is cut: `Line` reports the overflow and keeps what fitted.
    let _ = write!(text, "weir: {line}");
    text.end();
    rustix::io::write(rustix::stdio::stderr(), &text.bytes[..text.len]) != Err(Errno::AGAIN)
}

/// The longest line, with its end.
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
        self.bytes[self.len..self.len + take].copy_from_slice(&text.as_bytes()[..take]);
        self.len += take;
        if take == text.len() { Ok(()) } else { Err(fmt::Error) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_is_too_long_is_cut_and_still_ends() {
        let mut line = Line::default();
        assert!(write!(line, "{:600}", 'x').is_err());
        line.end();
        assert_eq!((line.len, line.bytes[LINE_MAX - 1]), (LINE_MAX, b'\n'));

        let mut line = Line::default();
        write!(line, "short {}", 1).unwrap();
        line.end();
        assert_eq!(&line.bytes[..line.len], b"short 1\n");
    }
}
