//! Requests to a server, and its answers.

use super::super::transmission::Request;
use super::super::wire::{Errno, command, command_flag};

/// A request for the server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation<'a> {
    /// Read a range.
    Read {
        /// The offset of the range's first byte.
        offset: u64,
        /// The range's length in bytes.
        length: u32,
        /// Whether the server must answer in one chunk.
        unfragmented: bool,
    },
    /// Write a range.
    Write {
        /// The offset of the first byte to write.
        offset: u64,
        /// The bytes to write.
        data: &'a [u8],
        /// Whether to wait until the data are on permanent storage (FUA).
        fua: bool,
    },
    /// Wait until all acknowledged writes are safe.
    Flush,
    /// Discard a range.
    Trim {
        /// The offset of the range's first byte.
        offset: u64,
        /// The range's length in bytes.
        length: u32,
    },
    /// Make a range zeros.
    WriteZeroes {
        /// The offset of the range's first byte.
        offset: u64,
        /// The range's length in bytes.
        length: u32,
        /// Whether the server must fail unless zeroing is faster than writing.
        fast: bool,
        /// Whether to keep the range allocated.
        no_hole: bool,
    },
    /// Announce that a range will be read.
    Cache {
        /// The offset of the range's first byte.
        offset: u64,
        /// The range's length in bytes.
        length: u32,
    },
    /// Ask which parts of a range are holes.
    BlockStatus {
        /// The offset of the range's first byte.
        offset: u64,
        /// The range's length in bytes.
        length: u32,
        /// Whether the server may answer with one extent only (NBD_CMD_FLAG_REQ_ONE).
        one: bool,
    },
}

impl<'a> Operation<'a> {
    /// A read whose answer may come in several chunks.
    pub fn read(offset: u64, length: u32) -> Self {
        Operation::Read { offset, length, unfragmented: false }
    }

    /// A write that need not wait for permanent storage.
    pub fn write(offset: u64, data: &'a [u8]) -> Self {
        Operation::Write { offset, data, fua: false }
    }

    pub(super) fn request(&self, cookie: u64) -> Request {
        let flag = |set: bool, flag: u16| if set { flag } else { 0 };
        let (command, flags, offset, length) = match *self {
            Operation::Read { offset, length, unfragmented } => {
                (command::READ, flag(unfragmented, command_flag::DF), offset, length)
            }
            Operation::Write { offset, data, fua } => {
                (command::WRITE, flag(fua, command_flag::FUA), offset, data.len() as u32)
            }
            Operation::Flush => (command::FLUSH, 0, 0, 0),
            Operation::Trim { offset, length } => (command::TRIM, 0, offset, length),
            Operation::WriteZeroes { offset, length, fast, no_hole } => {
                let flags = flag(fast, command_flag::FAST_ZERO) | flag(no_hole, command_flag::NO_HOLE);
                (command::WRITE_ZEROES, flags, offset, length)
            }
            Operation::Cache { offset, length } => (command::CACHE, 0, offset, length),
            Operation::BlockStatus { offset, length, one } => {
                (command::BLOCK_STATUS, flag(one, command_flag::REQ_ONE), offset, length)
            }
        };
        Request { flags, command, cookie, offset, length }
    }
}

/// A part of the export, and its state by `base:allocation`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// The extent's length in bytes.
    pub length: u32,
    /// The extent's [`extent_flag`](crate::nbd::wire::extent_flag)s.
    pub flags: u32,
}

/// A finished request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reply {
    /// The cookie that [`Client::queue`](super::Client::queue) returned for the request.
    pub cookie: u64,
    /// Whether the request succeeded.
    pub result: Result<(), Errno>,
    /// A successful read's data.
    pub data: Vec<u8>,
    /// A successful block status's extents.
    pub extents: Vec<Extent>,
    /// Number of chunks in the reply; 1 for a simple reply.
    pub chunks: u32,
}
