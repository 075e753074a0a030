//! Ends the process when a bug is found, so that no process lives on without serving.
//!
//! If only the panicking thread ended, its requests would stay unanswered. Their clients would wait
//! for ever; for swap, that is every program. The keeper would see a living process, and the kernel
//! a server. A keeper replaces a dead process, and its pages come back. Without a keeper the
//! clients get an error instead of a wait. No client reads a page that the bug may have made wrong.

use std::panic::PanicHookInfo;
use std::thread;
use std::time::Duration;
use weir_core::log::{Level, Log};

/// Time that this process's log relay gets for the last line.
const LAST_LINE: Duration = Duration::from_millis(200);

/// From here on a panic of any thread writes one line to the log and ends the process. `relayed`: a
/// thread of this process relays the log's lines.
pub fn end_process(log: &Log, relayed: bool) {
    let log = log.clone();
    std::panic::set_hook(Box::new(move |bug| {
        say(&log, bug);
        if relayed {
            thread::sleep(LAST_LINE);
        }
        std::process::abort();
    }));
}

/// Writes the panic's line without allocating: the panicking thread may be an I/O thread.
fn say(log: &Log, bug: &PanicHookInfo<'_>) {
    let thread = thread::current();
    let (name, text) = (thread.name().unwrap_or("a thread"), bug.payload_as_str().unwrap_or("no reason"));
    let Some(at) = bug.location() else {
        return (log)(Level::Warning, format_args!("ending, for there is a bug: {name}: {text}"));
    };
    (log)(
        Level::Warning,
        format_args!("ending, for there is a bug at {}:{}: {name}: {text}", at.file(), at.line()),
    );
}
