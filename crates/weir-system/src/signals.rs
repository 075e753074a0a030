//! Signals that must not end what carries swap or a mounted file system (signal(7)).

use libc::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use std::ffi::c_int;

/// Signals that a terminal, a session or init sends to end a process. A daemon whose device is in
/// use hears each of them, and stays.
pub const END: [c_int; 4] = [SIGTERM, SIGINT, SIGHUP, SIGQUIT];

/// Others that end or stop a process which does not expect them. A process that is stopped (Ctrl-Z,
/// or a line to a terminal that belongs to another job) answers no request, and swap on it stands
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
    // Limits on processor time and on the length of a log.
    libc::SIGXCPU,
    libc::SIGXFSZ,
    libc::SIGTSTP,
    libc::SIGTTIN,
    libc::SIGTTOU,
];

/// Ignores what nobody sends on purpose. Call it before anything listens for a signal, and before
/// there are threads. Programs that this one starts ignore the same, and a handler that is set
/// later is called all the same.
pub fn ignore_strays() {
    STRAY.into_iter().chain(libc::SIGRTMIN()..=libc::SIGRTMAX()).for_each(ignore);
}

/// Ignores a signal, likewise.
pub fn ignore(signal: c_int) {
    // SAFETY: no code of ours runs in a handler; there are no other threads yet, and the signal's
    // number is valid.
    unsafe { libc::signal(signal, libc::SIG_IGN) };
}
