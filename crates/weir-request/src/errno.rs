//! The one table that turns faults into error numbers.

use rustix::io::Errno;
use weir_device::Fault;

/// The errno of a fault for a client. Content that cannot be read or verified is an I/O error,
/// never zeros.
pub fn errno(fault: Fault) -> Errno {
    match fault {
        Fault::Full => Errno::NOSPC,
        Fault::Unsupported => Errno::OPNOTSUPP,
        Fault::Io(_) | Fault::Lost | Fault::Timeout | Fault::Corrupt | Fault::Forsaken => Errno::IO,
    }
}
