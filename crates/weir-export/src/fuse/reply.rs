//! The destination of an answer: `/dev/fuse`, or an io_uring's entry.

use super::wire::OutHeader;
use rustix::io::Errno;
use std::io::IoSlice;

/// Largest number of slices of an answer: a header, and the pages of the largest read. Such a read
/// may begin and end in the middle of a page.
pub const SLICES_MAX: usize = 2 + 256;

/// The header of an answer with `body` bytes.
pub fn header(unique: u64, body: usize) -> [u8; OutHeader::BYTES] {
    OutHeader { len: (OutHeader::BYTES + body) as u32, error: 0, unique }.encode()
}

/// Sends the answer to a request.
pub trait Reply {
    /// Sends an answer: its header, then its body.
    ///
    /// # Errors
    /// Fails when the connection is broken. An answer that no program waits for any more is no
    /// error.
    fn send(&self, slices: &[IoSlice<'_>]) -> rustix::io::Result<()>;

    /// Answers a request with a structure, or with an empty body.
    ///
    /// # Errors
    /// Fails as [`send`](Reply::send) does.
    fn answer(&self, unique: u64, body: &[u8]) -> rustix::io::Result<()> {
        self.send(&[IoSlice::new(&header(unique, body.len())), IoSlice::new(body)])
    }

    /// Answers a request with an error.
    ///
    /// # Errors
    /// Fails as [`send`](Reply::send) does.
    fn refuse(&self, unique: u64, errno: Errno) -> rustix::io::Result<()> {
        let header =
            OutHeader { len: OutHeader::BYTES as u32, error: -errno.raw_os_error(), unique }.encode();
        self.send(&[IoSlice::new(&header)])
    }
}
