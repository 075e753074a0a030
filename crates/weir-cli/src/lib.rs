//! Parts that the command lines of Weir's programs share: errors on one line with their exit codes,
//! standard output that nobody reads on, man pages and completions, and the guard that puts the
//! machine back.

pub mod failure;
pub mod guard;
pub mod manual;

/// As the standard library's, but nothing panics: where nobody reads on (`weir status | head -1`)
/// nothing is lost, and what cannot be written for another reason is said at the end.
#[macro_export]
macro_rules! print {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        $crate::failure::printed(write!(std::io::stdout(), $($text)*));
    }};
}

/// Likewise.
#[macro_export]
macro_rules! println {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        $crate::failure::printed(writeln!(std::io::stdout(), $($text)*));
    }};
}
