//! The exit code and the message with which an error of the daemon ends the program.

use weir_cli::failure::Failure;
use weir_core::chain;
use weir_daemon::{Class, Error, StartReport};

/// The failure with the message of `error`, and with the exit code of its [`Class`].
pub fn of(error: impl Into<Error>) -> Failure {
    let error = error.into();
    told(error.class(), chain(&error))
}

/// The failure that a daemon reported at its start. Weir itself wrote that daemon's configuration,
/// so a wrong configuration is not the user's mistake.
pub fn reported(report: StartReport) -> Failure {
    let class = if report.class == Class::NoRoom { Class::NoRoom } else { Class::Failed };
    told(class, report.text)
}

fn told(class: Class, reason: String) -> Failure {
    match class {
        Class::Failed => Failure::Failed(reason),
        Class::Usage => Failure::Usage(reason),
        Class::NoRoom => Failure::NoRoom(reason),
    }
}
