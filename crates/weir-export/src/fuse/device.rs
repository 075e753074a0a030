//! `/dev/fuse`: one read takes one request, one write sends one reply.

use super::reply::Reply;
use super::wire::{NOTIFY_RESEND, OutHeader};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Updater, opcode};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Descriptors are non-blocking: a thread that must wait polls.
const FLAGS: OFlags = OFlags::RDWR.union(OFlags::CLOEXEC).union(OFlags::NONBLOCK);

/// A descriptor of a FUSE connection. Each has its own queue of requests that were read from it and
/// not yet answered. A reply goes to the descriptor from which its request came.
#[derive(Debug)]
pub struct Device(OwnedFd);

/// The result of a read of `/dev/fuse`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Incoming {
    /// A request was read, of this many bytes.
    Request(usize),
    /// No request waits now.
    Nothing,
    /// The file system was unmounted, or its connection aborted: no more requests come.
    Unmounted,
}

impl Device {
    /// Opens `/dev/fuse`. The descriptor becomes a connection when a file system is mounted with
    /// it.
    ///
    /// # Errors
    /// Fails with `ENOENT` if the kernel has no FUSE.
    pub fn open() -> io::Result<Self> {
        Ok(Device(rustix::fs::open("/dev/fuse", FLAGS, Mode::empty())?))
    }

    /// Takes over a descriptor of an existing connection.
    ///
    /// # Errors
    /// Fails when `fd` is no open descriptor.
    pub fn adopt(fd: OwnedFd) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)?;
        Ok(Device(fd))
    }

    /// Makes another descriptor of the same connection, with a queue of its own.
    ///
    /// # Errors
    /// Fails with the kernel's error.
    pub fn clone_queue(&self) -> io::Result<Self> {
        let clone = Device::open()?;
        let mut source = self.0.as_raw_fd() as u32;
        // SAFETY: FUSE_DEV_IOC_CLONE (fs/fuse/dev.c) reads one u32, a descriptor's number.
        unsafe {
            const CLONE: rustix::ioctl::Opcode = opcode::read::<u32>(229, 0);
            rustix::ioctl::ioctl(&clone.0, Updater::<CLONE, u32>::new(&mut source))?;
        }
        Ok(clone)
    }

    /// Takes the next request if there is one. `into` must have room for the largest request.
    ///
    /// # Errors
    /// Fails with the kernel's error. It is no error if there is nothing to read.
    pub fn read(&self, into: &mut [u8]) -> rustix::io::Result<Incoming> {
        match rustix::io::read(&self.0, into) {
            Ok(bytes) => Ok(Incoming::Request(bytes)),
            // ENOENT: the request was withdrawn while it was being read.
            Err(Errno::AGAIN | Errno::INTR | Errno::NOENT) => Ok(Incoming::Nothing),
            Err(Errno::NODEV | Errno::CONNABORTED) => Ok(Incoming::Unmounted),
            Err(errno) => Err(errno),
        }
    }

    /// Tells the kernel to send again every request that was read from any descriptor of the
    /// connection and has no answer yet (Linux 6.9).
    ///
    /// # Errors
    /// Fails with `EINVAL` on older kernels.
    pub fn resend(&self) -> rustix::io::Result<()> {
        let header = OutHeader { len: OutHeader::BYTES as u32, error: NOTIFY_RESEND, unique: 0 }.encode();
        self.send(&[IoSlice::new(&header)])
    }
}

impl Reply for Device {
    fn send(&self, slices: &[IoSlice<'_>]) -> rustix::io::Result<()> {
        loop {
            match rustix::io::writev(&self.0, slices) {
                // The file system was unmounted meanwhile, or the requesting program was killed. In
                // both cases no program waits for the answer.
                Ok(_) | Err(Errno::NOENT | Errno::NODEV) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
