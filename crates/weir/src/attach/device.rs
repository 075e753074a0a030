//! The kernel's NBD devices by netlink (include/uapi/linux/nbd-netlink.h, drivers/block/nbd.c).
//!
//! By netlink no thread is parked in an ioctl, and a connection that died can be replaced while the
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

/// The kernel's orders for the sockets that it gets.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// The device's size in bytes.
    pub bytes: u64,
    /// The transmission flags that the server named.
    pub flags: u16,
    /// How long one request may take before its connection is given up.
    pub request_timeout: Duration,
    /// How long requests wait for a new connection when none is left, before they fail.
    pub reconnect_timeout: Duration,
}

/// The kernel's NBD client.
#[derive(Debug)]
pub struct Kernel(Family);

impl Kernel {
    /// Reaches it.
    ///
    /// # Errors
    /// `ENOENT` where the module nbd is neither built in nor loaded.
    pub fn open() -> io::Result<Self> {
        Family::open("nbd", 1).map(Kernel)
    }

    /// Connects a device to a server by sockets that are in transmission. Returns its number; the
    /// kernel picks a free device for `None`.
    ///
    /// # Errors
    /// `EBUSY` when the device is in use, `EPERM` without `CAP_SYS_ADMIN`.
    pub fn connect(&mut self, index: Option<u32>, terms: &Terms, sockets: &[OwnedFd]) -> io::Result<u32> {
        let attributes = at(index)
            .u64(SIZE_BYTES, terms.bytes)
            .u64(BLOCK_SIZE_BYTES, weir_core::PAGE_SIZE as u64)
            .u64(SERVER_FLAGS, terms.flags.into());
        let answer = self.0.call(CONNECT, &with_sockets(attributes, terms, sockets))?;
        u32_in(&answer, INDEX).or(index).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "the kernel does not say which device it connected")
        })
    }

    /// Replaces the dead connections of a device by these. Sockets for which there is none are not
    /// used, which the kernel does not tell.
    ///
    /// # Errors
    /// `EINVAL` when it is not connected.
    pub fn reconnect(&mut self, index: u32, terms: &Terms, sockets: &[OwnedFd]) -> io::Result<()> {
        self.0.call(RECONFIGURE, &with_sockets(at(Some(index)), terms, sockets)).map(drop)
    }

    /// Lets a device go. What it had not yet written is lost, so nothing may use it.
    ///
    /// # Errors
    /// `EINVAL` when it is not connected.
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

/// News from the kernel's NBD client: it has given a connection up.
#[derive(Debug)]
pub struct DeadLinks(Events);

impl DeadLinks {
    /// Listens from here on.
    ///
    /// # Errors
    /// As [`Kernel::open`].
    pub fn open() -> io::Result<Self> {
        Events::join("nbd", "nbd_mc_group").map(DeadLinks)
    }

    /// Hands over the devices that have lost a connection since the last call.
    ///
    /// # Errors
    /// `ENOBUFS` when the kernel could not say all of it.
    pub fn take(&self, mut device: impl FnMut(u32)) -> io::Result<()> {
        // It is the only thing that this group is told.
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
