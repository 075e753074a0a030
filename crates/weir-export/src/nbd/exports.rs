//! The devices that a server offers, by name.

use super::handshake::Export;
use weir_device::PageLane;
use weir_store::OpenError;

/// The devices that a server offers, by name. They may come and go while the server runs.
///
/// The server opens a lane for each of its threads when it starts. A thread turns its lane to the
/// device of each client in turn, and to none between two clients.
pub trait Exports: Send + Sync + 'static {
    /// A thread's access to any of the devices.
    type Lane: PageLane + 'static;

    /// A client's hold on a device: while it lives the device is not removed, and does not shrink.
    /// An I/O thread drops it, so its drop must not free memory.
    type Device: Send + 'static;

    /// Opens a lane that is turned to no device.
    ///
    /// # Errors
    /// Fails when there is no room for one more lane, or no memory for it.
    fn open(&self) -> Result<Self::Lane, OpenError>;

    /// The device of this name, and what clients are told of it; the empty name is the default
    /// device. Names have at most [`NAME_MAX`](super::handshake::NAME_MAX) bytes.
    fn find(&self, name: &[u8]) -> Option<(Export, Self::Device)>;

    /// Calls `each` with the name and the description of every device, in an order that stays. A
    /// long list is sent in parts, and each part asks for the whole list again.
    fn list(&self, each: &mut dyn FnMut(&str, &str));

    /// Turns a lane at rest to a device, or to none. An I/O thread calls this, so it must neither
    /// take nor free memory.
    fn turn(&self, lane: &mut Self::Lane, device: Option<&Self::Device>);
}
