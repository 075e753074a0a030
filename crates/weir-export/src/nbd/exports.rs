//! The devices that a server offers, by name.

use super::handshake::{Catalog, Export};
use std::sync::Arc;
use weir_core::PAGE_SIZE;
use weir_device::{PageDevice, PageLane};
use weir_store::OpenError;

/// The devices that a server offers, by name. They may come and go while the server runs.
///
/// The server opens a lane for each of its threads when it starts. While a thread serves a client,
/// its lane leads to that client's device. Between two clients it leads to no device.
pub trait Exports: Send + Sync + 'static {
    /// A thread's access to any of the devices.
    type Lane: PageLane + 'static;

    /// A client's hold on a device: while it lives the device is not removed, and does not shrink.
    /// An I/O thread drops it, so its drop must not free memory.
    type Device: Send + 'static;

    /// Opens a lane that leads to no device yet.
    ///
    /// # Errors
    /// Fails when there is no room for one more lane, or no memory for it.
    fn open(&self) -> Result<Self::Lane, OpenError>;

    /// The device of this name, and what clients are told of it; the empty name is the default
    /// device. Names have at most [`NAME_MAX`](super::handshake::NAME_MAX) bytes.
    fn find(&self, name: &[u8]) -> Option<(Export, Self::Device)>;

    /// Calls `each` with the name and the description of every device, in an order that stays. A
    /// long list is sent in parts, and this function is called again for each part.
    fn list(&self, each: &mut dyn FnMut(&str, &str));

    /// Makes a lane without operations under way lead to `device`; `None`: to no device. An I/O
    /// thread calls this, so it must neither take nor free memory.
    fn turn(&self, lane: &mut Self::Lane, device: Option<&Self::Device>);
}

/// A server's only device: it has a name, and it is the default device too.
#[derive(Debug)]
pub struct Single<D> {
    device: Arc<D>,
    name: String,
    description: String,
    read_only: bool,
}

impl<D> Single<D> {
    /// The device, with the name and the description that clients see.
    pub fn new(device: &Arc<D>, name: &str, description: &str, read_only: bool) -> Self {
        Single {
            device: Arc::clone(device),
            name: name.to_owned(),
            description: description.to_owned(),
            read_only,
        }
    }
}

impl<D> Exports for Single<D>
where
    D: PageDevice<Error = OpenError> + 'static,
    D::Lane: 'static,
{
    type Lane = D::Lane;
    type Device = ();

    fn open(&self) -> Result<D::Lane, OpenError> {
        self.device.open()
    }

    fn find(&self, name: &[u8]) -> Option<(Export, ())> {
        let export = || Export {
            name: self.name.clone(),
            description: self.description.clone(),
            bytes: u64::from(self.device.pages()) * PAGE_SIZE as u64,
            read_only: self.read_only,
            clears: D::Lane::CLEARS,
        };
        (name.is_empty() || name == self.name.as_bytes()).then(|| (export(), ()))
    }

    fn list(&self, each: &mut dyn FnMut(&str, &str)) {
        each(&self.name, &self.description);
    }

    /// Does nothing: a lane has its device from the start.
    fn turn(&self, _lane: &mut D::Lane, _device: Option<&()>) {}
}

impl<E: Exports> Catalog for E {
    type Device = E::Device;

    fn find(&self, name: &[u8]) -> Option<(Export, E::Device)> {
        Exports::find(self, name)
    }

    fn list(&self, each: &mut dyn FnMut(&str, &str)) {
        Exports::list(self, each);
    }
}
