//! Makes a device a swap area. If that fails, the error is a sentence for people.

use std::path::Path;
use weir_cli::failure::Failure;
use weir_core::ByteSize;

/// Makes all of a device a swap area.
///
/// # Errors
/// Fails when the device or the kernel cannot have a swap area.
pub fn make(device: &Path, size: ByteSize) -> Result<(), Failure> {
    weir_system::swap_area::make(device, size)
        .map_err(|error| Failure::Failed(format!("cannot make a swap area on {}: {error}", device.display())))
}
