//! How an error of the daemon ends the program.

use weir_cli::failure::Failure;
use weir_core::chain;
use weir_daemon::{Error, ErrorKind};
use weir_store::OpenErrorKind;

/// The failure that tells of `error`, with the exit code of its kind.
pub fn of(error: impl Into<Error>) -> Failure {
    let error = error.into();
    let reason = chain(&error);
    match error.kind() {
        ErrorKind::Config => Failure::Usage(reason),
        ErrorKind::Store(OpenErrorKind::NoMemory { .. }) => Failure::NoRoom(reason),
        _ => Failure::Failed(reason),
    }
}
