//! Tokens as they are sent to connections, and the places that they stand for.

use core::fmt;

/// Number of a token's bits that name a slot of its connection.
pub(crate) const INDEX_BITS: u32 = 12;
/// Number of a token's bits that count how often its connection has used the slot (its lap).
pub(crate) const LAP_BITS: u32 = 32 - INDEX_BITS;
/// Largest number of references that one connection may hold at a time: as many as a token's slot
/// bits can name.
pub const QUOTA_MAX: u32 = 1 << INDEX_BITS;
/// Largest number of pages of one region: 256 GiB of 4 KiB pages.
pub const REGION_PAGES_MAX: u32 = 1 << 26;
/// Largest number of fragments of a page that a place can tell apart: 64 bytes each in a page of 4
/// KiB.
pub const FRAGMENTS_MAX: u8 = 1 << 6;

/// One reference to a page, as its connection sees it: 32 bits that mean nothing to another
/// connection.
///
/// The low 12 bits name a slot, the others the lap in which the slot was taken. Tokens taken one
/// after the other mostly differ by one. So a connection that returns them in order needs one
/// [`TokenRange`] for many.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Token(pub u32);

impl Token {
    pub(crate) const fn new(lap: u32, index: u32) -> Self {
        Token(lap << INDEX_BITS | index)
    }

    pub(crate) const fn index(self) -> u32 {
        self.0 & (QUOTA_MAX - 1)
    }

    pub(crate) const fn lap(self) -> u32 {
        self.0 >> INDEX_BITS
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({:#010x}: slot {}, lap {})", self.0, self.index(), self.lap())
    }
}

/// `count` consecutive tokens from `start` on: the unit in which references are returned, as in
/// `struct dmabuf_token` of Linux (include/uapi/linux/uio.h).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TokenRange {
    /// The first token.
    pub start: Token,
    /// Number of tokens, at least one.
    pub count: u32,
}

impl From<Token> for TokenRange {
    fn from(start: Token) -> Self {
        TokenRange { start, count: 1 }
    }
}

/// The place behind a token: a fragment of a page of a region.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Place {
    /// The region (a dma-buf binding, a shared area, a GPU), one of 256.
    pub region: u8,
    /// The page in the region, less than [`REGION_PAGES_MAX`].
    pub page: u32,
    /// The part of the page, less than [`FRAGMENTS_MAX`]. The table stores the number and does not
    /// use it. A page stays out until every fragment of it has come back.
    pub fragment: u8,
}

impl Place {
    /// The place of a whole page, which is the page's fragment 0.
    pub const fn page(region: u8, page: u32) -> Self {
        Place { region, page, fragment: 0 }
    }

    /// Whether the word of a slot has enough bits for the place.
    pub(crate) const fn fits(self) -> bool {
        self.page < REGION_PAGES_MAX && self.fragment < FRAGMENTS_MAX
    }
}
