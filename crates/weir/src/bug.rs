//! A bug that was found ends the process: what lives also serves.
//!
//! A thread that panics alone would leave its requests unanswered, and whoever waits for them (for
//! swap, everybody) would wait for ever; a keeper sees a living process, and a kernel a server. A
//! process that is dead is replaced, and its pages with it come back. Where nobody replaces it, its
//! clients have an error instead of a wait, and no page is read that a bug may have made wrong.

use std::panic::PanicHookInfo;
use std::thread;
use std::time::Duration;
use weir_core::log::{Level, Log};

/// How long this process's own relay of lines has for the last one.
const LAST_LINE: Duration = Duration::from_millis(200);

/// From here on a panic of any thread is one line of the log and the end of the process. `relayed`:
/// a thread of this process carries the log's lines on.
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

/// Without allocating: it may be an I/O thread.
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
