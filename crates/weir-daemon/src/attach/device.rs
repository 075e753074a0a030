//! The kernel's NBD devices, driven by netlink (include/uapi/linux/nbd-netlink.h,
//! drivers/block/nbd.c).
//!
//! Netlink needs no thread that stays in an ioctl. It can also replace a dead connection while the
//! device stays.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;
use weir_system::netlink::{Attributes, Events, Family, u32_in};

const CONNECT: u8 = 1;
const DISCONNECT: u8 = 2;
const RECONFIGURE: u8 = 3;

const INDEX: u16 = 1;
const SIZE_BYTES: u16 = 2;
const BLOCK_SIZE_BYTES: u16 = 3;
const TIMEOUT: u16 = 4;
const SERVER_FLAGS: u16 = 5;
const SOCKETS: u16 = 7;
const DEAD_CONN_TIMEOUT: u16 = 8;
const SOCK_ITEM: u16 = 1;
const SOCK_FD: u16 = 1;

/// Settings of a device, which the kernel gets together with the sockets.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// The device's size in bytes.
    pub bytes: u64,
    /// The transmission flags that the server named.
    pub flags: u16,
    /// Time that one request may take before the kernel gives its connection up.
    pub request_timeout: Duration,
    /// How long requests wait for a new connection when none is left, before they fail.
    pub reconnect_timeout: Duration,
}

/// The kernel's NBD client.
#[derive(Debug)]
pub struct Kernel(Family);

impl Kernel {
    /// Opens netlink to the kernel's NBD client.
    ///
    /// # Errors
    /// Fails with `ENOENT` where the module nbd is neither built in nor loaded.
    pub fn open() -> io::Result<Self> {
        Family::open("nbd", 1).map(Kernel)
    }

    /// Connects a device to a server by sockets that are past the NBD handshake. Returns its
    /// number; the kernel picks a free device for `None`.
    ///
    /// # Errors
    /// Fails with `EBUSY` when the device is in use, `EPERM` without `CAP_SYS_ADMIN`.
    pub fn connect(&mut self, index: Option<u32>, terms: &Terms, sockets: &[OwnedFd]) -> io::Result<u32> {
        let attributes = at(index)
            .u64(SIZE_BYTES, terms.bytes)
            .u64(BLOCK_SIZE_BYTES, weir_core::PAGE_SIZE as u64)
            .u64(SERVER_FLAGS, terms.flags.into());
        let answer = self.0.call(CONNECT, &with_sockets(attributes, terms, sockets))?;
        connected(&answer, index)
    }

    /// Gives the kernel new sockets for the dead connections of a device. The kernel drops a socket
    /// that it has no dead connection for, and does not say so.
    ///
    /// # Errors
    /// Fails with `EINVAL` when the device is not connected.
    pub fn reconnect(&mut self, index: u32, terms: &Terms, sockets: &[OwnedFd]) -> io::Result<()> {
        self.0.call(RECONFIGURE, &with_sockets(at(Some(index)), terms, sockets)).map(drop)
    }

    /// Disconnects a device. The device's unwritten data is lost, so nothing may use the device.
    ///
    /// # Errors
    /// Fails with `EINVAL` when the device is not connected.
    pub fn disconnect(&mut self, index: u32) -> io::Result<()> {
        self.0.call(DISCONNECT, &at(Some(index))).map(drop)
    }
}

fn at(index: Option<u32>) -> Attributes {
    index.map_or_else(Attributes::default, |index| Attributes::default().u32(INDEX, index))
}

fn with_sockets(attributes: Attributes, terms: &Terms, sockets: &[OwnedFd]) -> Attributes {
    let items = sockets.iter().fold(Attributes::default(), |items, socket| {
        let item = Attributes::default().u32(SOCK_FD, socket.as_raw_fd() as u32);
        items.nested(SOCK_ITEM, &item)
    });
    attributes
        .u64(TIMEOUT, terms.request_timeout.as_secs())
        .u64(DEAD_CONN_TIMEOUT, terms.reconnect_timeout.as_secs())
        .nested(SOCKETS, &items)
}

/// The device of an answer; if the answer names none, the device that was asked for.
fn connected(answer: &[u8], asked: Option<u32>) -> io::Result<u32> {
    u32_in(answer, INDEX).or(asked).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, "the kernel does not say which device it connected")
    })
}

/// Messages in which the kernel's NBD client reports that it has given a connection up.
#[derive(Debug)]
pub struct DeadLinks(Events);

impl DeadLinks {
    /// Subscribes to the messages that come from now on.
    ///
    /// # Errors
    /// Fails as [`Kernel::open`] does.
    pub fn open() -> io::Result<Self> {
        Events::join("nbd", "nbd_mc_group").map(DeadLinks)
    }

    /// Hands over the devices that have lost a connection since the last call.
    ///
    /// # Errors
    /// Fails with `ENOBUFS` when the kernel had to drop some messages.
    pub fn take(&self, mut device: impl FnMut(u32)) -> io::Result<()> {
        // A lost connection is the only event of this netlink group.
        self.0.take(|event| {
            if let Some(index) = u32_in(event, INDEX) {
                device(index);
            }
        })
    }
}

impl AsFd for DeadLinks {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_without_a_device_names_the_one_that_was_asked_for_or_none() {
        assert_eq!(connected(&[], Some(3)).unwrap(), 3);
        let error = connected(&[], None).unwrap_err().to_string();
        assert_eq!(error, "the kernel does not say which device it connected");
    }
}
