//! Front ends of a volume, for programs that use block devices.
//!
//! [`nbd`] speaks the Network Block Device protocol: to the kernel's own client (swap, file
//! systems), to QEMU, and to everything built on libnbd. [`share`] lends pages to local programs,
//! which use them in place.

pub mod buffer;
pub mod fuse;
pub mod nbd;
pub mod share;
mod spin;
pub mod ublk;
