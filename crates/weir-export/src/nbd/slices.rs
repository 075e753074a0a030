//! A bounded list of byte slices, gathered for one `sendmsg`.

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{SendAncillaryBuffer, SendFlags};
use std::io::IoSlice;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

/// Largest number of slices of one `sendmsg`; the kernel takes 1024. This number is enough for a
/// piece of a long read together with many short reads, and cheap to set up.
pub(super) const SLICES_MAX: usize = 256;

/// The slices of one `sendmsg`, at most `MAX`. A new list is an array of `MAX` empty slices, so it
/// takes less time to make one with a small `MAX`.
pub(super) struct Slices<'a, const MAX: usize = SLICES_MAX> {
    list: [IoSlice<'a>; MAX],
    len: usize,
    bytes: usize,
}

impl<'a, const MAX: usize> Slices<'a, MAX> {
    pub fn new() -> Self {
        Slices { list: [IoSlice::new(&[]); MAX], len: 0, bytes: 0 }
    }

    /// Number of slices that still fit.
    pub fn room(&self) -> usize {
        MAX - self.len
    }

    /// Appends a slice; the caller has checked that there is room.
    pub fn push(&mut self, slice: &'a [u8]) {
        self.list[self.len] = IoSlice::new(slice);
        self.len += 1;
        self.bytes += slice.len();
    }

    /// Reserves a place for a slice that [`set`](Slices::set) will fill in.
    pub fn reserve(&mut self) -> usize {
        self.push(&[]);
        self.len - 1
    }

    /// Puts a slice into a place that [`reserve`](Slices::reserve) returned.
    pub fn set(&mut self, at: usize, slice: &'a [u8]) {
        self.bytes += slice.len() - self.list[at].len();
        self.list[at] = IoSlice::new(slice);
    }

    /// A mark to which [`rewind`](Slices::rewind) returns.
    pub fn mark(&self) -> (usize, usize) {
        (self.len, self.bytes)
    }

    /// Removes the slices that were pushed since `mark`.
    pub fn rewind(&mut self, mark: (usize, usize)) {
        (self.len, self.bytes) = mark;
    }

    /// Sends the bytes that the client takes within `patience`, and copies the rest to the front of
    /// `rest`, which must be large enough. Returns the rest's length.
    ///
    /// # Errors
    /// Fails when the connection is broken.
    pub fn send_or_copy(
        &mut self,
        socket: BorrowedFd<'_>,
        rest: &mut [u8],
        patience: Duration,
    ) -> rustix::io::Result<usize> {
        let mut list = &mut self.list[..self.len];
        let mut deadline = None;
        while self.bytes > 0 {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::sendmsg(socket, list, &mut SendAncillaryBuffer::default(), flags) {
                Ok(sent) => {
                    self.bytes -= sent;
                    IoSlice::advance_slices(&mut list, sent);
                }
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
            if self.bytes > 0
                && !wait_for_room(socket, *deadline.get_or_insert_with(|| Instant::now() + patience))?
            {
                break;
            }
        }
        let mut copied = 0;
        if self.bytes > 0 {
            for slice in list {
                rest[copied..copied + slice.len()].copy_from_slice(slice);
                copied += slice.len();
            }
        }
        Ok(copied)
    }

    /// Sends the bytes of all slices, from byte number `sent` on, and adds the number of bytes sent
    /// to `sent`. Returns whether all bytes have been sent. With `wait` it waits until the client
    /// has taken all of them.
    ///
    /// # Errors
    /// Fails when the connection is broken, or the client takes nothing within the socket's
    /// timeout.
    pub fn send(&mut self, socket: BorrowedFd<'_>, sent: &mut usize, wait: bool) -> rustix::io::Result<bool> {
        let mut list = &mut self.list[..self.len];
        IoSlice::advance_slices(&mut list, *sent);
        let may_wait = if wait { SendFlags::empty() } else { SendFlags::DONTWAIT };
        let flags = SendFlags::NOSIGNAL | may_wait;
        while *sent < self.bytes {
            match rustix::net::sendmsg(socket, list, &mut SendAncillaryBuffer::default(), flags) {
                Ok(taken) => {
                    *sent += taken;
                    IoSlice::advance_slices(&mut list, taken);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) if !wait => return Ok(false),
                Err(errno) => return Err(errno),
            }
        }
        Ok(true)
    }
}

/// Sleeps until the socket has room or the deadline has passed; returns whether there is room.
fn wait_for_room(socket: BorrowedFd<'_>, deadline: Instant) -> rustix::io::Result<bool> {
    let left = deadline.saturating_duration_since(Instant::now());
    let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    match rustix::event::poll(&mut [PollFd::from_borrowed_fd(socket, PollFlags::OUT)], Some(&timeout)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(true),
        Err(errno) => Err(errno),
    }
}

/// Copies `bytes` to the front of the free part of a buffer, shortens that part, and returns the
/// copy.
pub(super) fn take_front<'a>(free: &mut &'a mut [u8], bytes: &[u8]) -> &'a [u8] {
    let (front, rest) = std::mem::take(free).split_at_mut(bytes.len());
    *free = rest;
    front.copy_from_slice(bytes);
    front
}
