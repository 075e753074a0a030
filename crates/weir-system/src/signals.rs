//! Signals that must not end a process that serves swap or a mounted file system (signal(7)).

use libc::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use std::ffi::c_int;

/// Signals that a terminal, a session or init sends to end a process. A daemon whose device is in
/// use handles each of them, and stays.
pub const END: [c_int; 4] = [SIGTERM, SIGINT, SIGHUP, SIGQUIT];

/// Other signals that end or stop a process that does not expect them. A stopped process (by
/// Ctrl-Z, or by writing to a terminal of another job) answers no request, and swap on it stands
/// still.
const STRAY: [c_int; 14] = [
    libc::SIGPIPE,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGALRM,
    libc::SIGVTALRM,
    libc::SIGPROF,
    libc::SIGIO,
    libc::SIGSTKFLT,
    libc::SIGPWR,
    // The kernel sends SIGXCPU and SIGXFSZ at the limits of processor time and of a file's length.
    libc::SIGXCPU,
    libc::SIGXFSZ,
    libc::SIGTSTP,
    libc::SIGTTIN,
    libc::SIGTTOU,
];

/// Ignores signals that are never sent on purpose. Call it before any handler is set, and before
/// there are threads. Programs that this one starts ignore them too. A handler that is set later
/// works all the same.
pub fn ignore_strays() {
    STRAY.into_iter().chain(libc::SIGRTMIN()..=libc::SIGRTMAX()).for_each(ignore);
}

/// Ignores one signal, in this program and in those that it starts. Call it before there are
/// threads.
pub fn ignore(signal: c_int) {
    // SAFETY: no code of this program runs in a handler; there are no other threads yet, and the
    // signal's number is valid.
    unsafe { libc::signal(signal, libc::SIG_IGN) };
}
