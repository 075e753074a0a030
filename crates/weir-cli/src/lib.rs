//! The parts that the command lines of Weir's programs share: errors on one line, exit codes,
//! output that may be closed, man pages and completions. A guard undoes changes to the machine.

pub mod failure;
pub mod guard;
pub mod manual;

use std::time::Duration;

/// Seconds that the `left` units of some work will take at the speed so far; `None` before the
/// first is done.
pub fn seconds_left(elapsed: Duration, done: u64, left: u64) -> Option<u64> {
    (done > 0).then(|| (elapsed.as_secs_f64() * left as f64 / done as f64).ceil() as u64)
}

/// Prints as the standard library's macro does, but never panics. If the reader has closed the pipe
/// (`weir status | head -1`), nothing is lost. Any other error is reported at the end.
#[macro_export]
macro_rules! print {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        $crate::failure::printed(write!(std::io::stdout(), $($text)*));
    }};
}

/// Prints a line, and never panics, as this crate's `print` does.
#[macro_export]
macro_rules! println {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        $crate::failure::printed(writeln!(std::io::stdout(), $($text)*));
    }};
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_is_by_the_speed_so_far() {
        assert_eq!(seconds_left(Duration::from_secs(10), 100, 50), Some(5));
        assert_eq!(seconds_left(Duration::from_secs(10), 0, 50), None);
    }
}
