//! The table's record of one connection besides its slots: its chunks, and its place in the current
//! lap.

use crate::image::CHUNK_SLOTS;
use crate::token::{LAP_BITS, QUOTA_MAX};

/// An open connection of one table. Return it with [`Table::close`](crate::Table::close); one that
/// is only dropped stays open as long as the table.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "a connection that is dropped stays open"]
pub struct Connection {
    pub(crate) index: u32,
}

impl Connection {
    /// The connection's number in the table, from 0. The number of a closed connection is used
    /// again.
    pub const fn index(&self) -> u32 {
        self.index
    }
}

/// The state of one connection in its table. A record has 32 bytes: two records fill a cache line,
/// and no record lies in two lines.
#[derive(Clone, Debug, Default)]
#[repr(C, align(32))]
pub(crate) struct Record {
    /// A bit for each position that has a chunk.
    pub present: u64,
    /// A bit for each position whose chunk has a free slot.
    pub open: u64,
    /// The connection's only chunk, or its directory of chunks by position.
    pub root: u32,
    /// The number of the current lap: how often the connection has gone round its slots.
    pub lap: u32,
    /// The first slot that this lap has not used.
    pub cursor: u16,
    /// Number of references that the connection holds.
    pub held: u16,
    /// Number of references that the connection may hold; 0 while it is closed.
    pub quota: u16,
}

const _: () = assert!(size_of::<Record>() == 32);

/// The bit of a record's `root` that is set if the root is a directory and not a chunk.
const DIRECTORY: u32 = 1 << 31;

/// The root under which a connection finds its chunks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Root {
    /// The connection has only this chunk, or none.
    Chunk(u32),
    /// The connection has several chunks, listed in this directory.
    Directory(u32),
}

impl Record {
    #[inline]
    pub(crate) fn root(&self) -> Root {
        if self.root & DIRECTORY == 0 {
            Root::Chunk(self.root)
        } else {
            Root::Directory(self.root & !DIRECTORY)
        }
    }

    pub(crate) fn set_root(&mut self, root: Root) {
        self.root = match root {
            Root::Chunk(chunk) => chunk,
            Root::Directory(directory) => directory | DIRECTORY,
        };
    }

    #[inline]
    pub(crate) fn has(&self, position: u32) -> bool {
        self.present >> position & 1 != 0
    }

    /// The position of the cursor's chunk, and a mask of slots of that chunk: those that this lap
    /// has not passed.
    #[inline]
    pub(crate) fn ahead(&self) -> (u32, u64) {
        (u32::from(self.cursor) / CHUNK_SLOTS, !0 << (u32::from(self.cursor) % CHUNK_SLOTS))
    }

    /// The position of the first chunk after the cursor's chunk that has a free slot. This lap
    /// still comes to that chunk.
    pub(crate) fn later(&self) -> Option<u32> {
        let (position, _) = self.ahead();
        let later = self.open & (!0 << position << 1);
        (later != 0).then(|| later.trailing_zeros())
    }

    /// Begins the next lap. A slot is taken at most once a lap, so no token of this lap was given
    /// out before.
    pub(crate) fn next_lap(&mut self) {
        self.lap = (self.lap + 1) & ((1 << LAP_BITS) - 1);
        self.cursor = 0;
    }

    /// Moves the cursor behind slot `index`. Returns `true` if the slot is the last that a token
    /// can name.
    #[inline]
    pub(crate) fn pass(&mut self, index: u32) -> bool {
        self.cursor = (index + 1) as u16;
        index + 1 == QUOTA_MAX
    }
}
