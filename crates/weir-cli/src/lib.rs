//! The parts that the command lines of Weir's programs share: errors on one line, exit codes,
//! output that may be closed, man pages and completions. A guard undoes changes to the machine.

pub mod failure;
pub mod guard;
pub mod manual;

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
