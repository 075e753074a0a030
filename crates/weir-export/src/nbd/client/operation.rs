//! Requests to a server, and its answers.

use super::super::transmission::Request;
use super::super::wire::{Errno, command, command_flag};

/// A request to be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation<'a> {
    /// Read a range.
    Read {
        /// In bytes.
        offset: u64,
        /// In bytes.
        length: u32,
        /// Ask for the answer in one chunk.
        unfragmented: bool,
    },
    /// Write a range.
    Write {
        /// In bytes.
        offset: u64,
        /// The bytes to write.
        data: &'a [u8],
        /// Wait until it is safe.
        fua: bool,
    },
    /// Wait until everything acknowledged is safe.
    Flush,
    /// Give a range up.
    Trim {
        /// In bytes.
        offset: u64,
        /// In bytes.
        length: u32,
    },
    /// Make a range zeros.
    WriteZeroes {
        /// In bytes.
        offset: u64,
        /// In bytes.
        length: u32,
        /// Only if it is faster than writing.
        fast: bool,
        /// Keep it allocated.
        no_hole: bool,
    },
    /// Say that a range will be read.
    Cache {
        /// In bytes.
        offset: u64,
        /// In bytes.
        length: u32,
    },
    /// Ask which parts of a range are holes.
    BlockStatus {
        /// In bytes.
        offset: u64,
        /// In bytes.
        length: u32,
        /// One extent is enough.
        one: bool,
    },
}

impl<'a> Operation<'a> {
    /// A read that may come in several chunks.
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

/// A part of the export and what `base:allocation` says of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// In bytes.
    pub length: u32,
    /// [`extent_flag`](crate::nbd::wire::extent_flag)s.
    pub flags: u32,
}

/// A finished request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reply {
    /// The cookie that [`Client::queue`](super::Client::queue) returned for it.
    pub cookie: u64,
    /// Whether it succeeded.
    pub result: Result<(), Errno>,
    /// A read's data, where it succeeded.
    pub data: Vec<u8>,
    /// A block status's extents, where it succeeded.
    pub extents: Vec<Extent>,
    /// Chunks that it came in; 1 for a simple reply.
    pub chunks: u32,
}
