//! The devices that clients can ask for in a negotiation.

use super::Export;

/// The devices that clients can ask for, by name.
pub trait Catalog {
    /// A client's hold on a device: while it lives the device is not removed.
    type Device;

    /// The device of this name, and what clients are told of it; the empty name is the default
    /// device.
    fn find(&self, name: &[u8]) -> Option<(Export, Self::Device)>;

    /// Calls `each` with the name and the description of every device, in an order that stays.
    fn list(&self, each: &mut dyn FnMut(&str, &str));
}

/// A catalog of one device. It has a name, and it is the default device too.
impl Catalog for Export {
    type Device = ();

    fn find(&self, name: &[u8]) -> Option<(Export, ())> {
        (name.is_empty() || name == self.name.as_bytes()).then(|| (self.clone(), ()))
    }

    fn list(&self, each: &mut dyn FnMut(&str, &str)) {
        each(&self.name, &self.description);
    }
}
