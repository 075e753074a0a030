//! A bounded list of byte slices, gathered for one `sendmsg`.

use rustix::net::{SendAncillaryBuffer, SendFlags};
use std::io::IoSlice;
use std::os::fd::BorrowedFd;

/// Slices of one `sendmsg`; the kernel takes 1024. Enough for three chunks of 256 KiB, and cheap to set up.
pub(super) const SLICES_MAX: usize = 256;

/// What one `sendmsg` will send.
pub(super) struct Slices<'a> {
    list: [IoSlice<'a>; SLICES_MAX],
    len: usize,
    bytes: usize,
}

impl<'a> Slices<'a> {
    pub fn new() -> Self {
        Slices { list: [IoSlice::new(&[]); SLICES_MAX], len: 0, bytes: 0 }
    }

    /// How many more slices fit.
    pub fn room(&self) -> usize {
        SLICES_MAX - self.len
    }

    /// Appends a slice; the caller has seen that there is room.
    pub fn push(&mut self, slice: &'a [u8]) {
        self.list[self.len] = IoSlice::new(slice);
        self.len += 1;
        self.bytes += slice.len();
    }

    /// Keeps a place for a slice that [`set`](Slices::set) will fill in.
    pub fn reserve(&mut self) -> usize {
        self.push(&[]);
        self.len - 1
    }

    /// Fills in a reserved place.
    pub fn set(&mut self, at: usize, slice: &'a [u8]) {
        self.bytes += slice.len() - self.list[at].len();
        self.list[at] = IoSlice::new(slice);
    }

    /// A place to come back to by [`rewind`](Slices::rewind).
    pub fn mark(&self) -> (usize, usize) {
        (self.len, self.bytes)
    }

    /// Forgets what was pushed since `mark`.
    pub fn rewind(&mut self, mark: (usize, usize)) {
        (self.len, self.bytes) = mark;
    }

    /// Sends as much as the socket takes at once, and copies the rest to the front of `rest`, which is large
    /// enough. Returns the rest's length.
    ///
    /// # Errors
    /// When the connection is broken.
    pub fn send_or_copy(&self, socket: BorrowedFd<'_>, rest: &mut [u8]) -> rustix::io::Result<usize> {
        if self.bytes == 0 {
            return Ok(0);
        }
        let list = &self.list[..self.len];
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let mut sent = match rustix::net::sendmsg(socket, list, &mut SendAncillaryBuffer::default(), flags) {
            Ok(sent) => sent,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => 0,
            Err(errno) => return Err(errno),
        };
        let mut copied = 0;
        for slice in list {
            let skip = sent.min(slice.len());
            sent -= skip;
            let left = &slice[skip..];
            rest[copied..copied + left.len()].copy_from_slice(left);
            copied += left.len();
        }
        Ok(copied)
    }

    /// Sends everything, waiting for the client to take it.
    ///
    /// # Errors
    /// When the connection is broken, or the client takes nothing for as long as the socket's timeout.
    pub fn send_all(&mut self, socket: BorrowedFd<'_>) -> rustix::io::Result<()> {
        let mut list = &mut self.list[..self.len];
        while self.bytes > 0 {
            match rustix::net::sendmsg(socket, list, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)
            {
                Ok(sent) => {
                    self.bytes -= sent;
                    IoSlice::advance_slices(&mut list, sent);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }
}

/// Moves the front of a buffer that is being filled behind it: copies `bytes` there and returns the copy.
pub(super) fn take_front<'a>(free: &mut &'a mut [u8], bytes: &[u8]) -> &'a [u8] {
    let (front, rest) = std::mem::take(free).split_at_mut(bytes.len());
    *free = rest;
    front.copy_from_slice(bytes);
    front
}
