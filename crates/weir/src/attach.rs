//! `weir attach` and `weir detach`: connect the kernel's NBD client to a server, and disconnect it.

use crate::cli::{AttachOptions, DetachOptions};
use crate::failure;
use weir_cli::failure::Failure;
use weir_core::log::{self, Level};
use weir_daemon::attach::{self, Attach};

/// Connects a device to a server and prints its name.
pub fn attach(options: AttachOptions) -> Result<(), Failure> {
    let attach = Attach {
        address: options.address,
        device: options.device,
        name: options.name,
        connections: options.connections,
        request_timeout: options.request_timeout,
        reconnect_timeout: options.reconnect_timeout,
        reconnect: options.reconnect,
        control: options.control,
    };
    let index = attach::connect(&attach, &log::to_stderr(Level::Warning)).map_err(failure::of)?;
    println!("/dev/nbd{index}");
    Ok(())
}

/// Disconnects a device, unless something uses it.
pub fn detach(options: &DetachOptions) -> Result<(), Failure> {
    attach::detach(&options.device, options.control.as_deref()).map_err(failure::of)
}
