//! Tokens, as they go over the wire, and the places behind them.

use core::fmt;

/// Bits of a token that name a slot of its connection.
pub(crate) const INDEX_BITS: u32 = 12;
/// Bits of a token that say in which lap over its slots the connection took it.
pub(crate) const LAP_BITS: u32 = 32 - INDEX_BITS;
/// References that one connection may hold at a time: what a token's slot bits can name.
pub const QUOTA_MAX: u32 = 1 << INDEX_BITS;
/// Pages that one region may have: 256 GiB of 4 KiB pages.
pub const REGION_PAGES_MAX: u32 = 1 << 26;
/// Fragments of a page that a place can tell apart: 64 bytes each in a page of 4 KiB.
pub const FRAGMENTS_MAX: u8 = 1 << 6;

/// One reference to a page, as its connection sees it: 32 bits that mean nothing to any other
/// connection.
///
/// The low 12 bits name a slot, the rest the lap in which the slot was taken. Tokens taken one
/// after the other are mostly one apart, so that a connection which returns them in order needs one
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

/// `count` tokens from `start` on, one apart: the unit in which references come back, as in
/// `struct dmabuf_token` of Linux (include/uapi/linux/uio.h).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TokenRange {
    /// The first token.
    pub start: Token,
    /// How many, at least one.
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
    /// The page in it, less than [`REGION_PAGES_MAX`].
    pub page: u32,
    /// Which part of the page, less than [`FRAGMENTS_MAX`]. The table only remembers it: a page is
    /// out until all its fragments are back.
    pub fragment: u8,
}

impl Place {
    /// A whole page, as fragment 0.
    pub const fn page(region: u8, page: u32) -> Self {
        Place { region, page, fragment: 0 }
    }

    /// Whether a slot can hold it.
    pub(crate) const fn fits(self) -> bool {
        self.page < REGION_PAGES_MAX && self.fragment < FRAGMENTS_MAX
    }
}
