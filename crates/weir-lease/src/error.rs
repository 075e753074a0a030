//! Refusals, their reasons, and their counts.

use core::fmt;

use crate::token::Place;
use crate::{BATCH_REFERENCES_MAX, BATCH_TOKENS_MAX};

/// The reason why no connection was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpenError {
    /// All connections that the table has room for are open.
    Full {
        /// The number of connections in the geometry.
        connections: u32,
    },
    /// The quota is zero, or it is more than the geometry allows.
    Quota {
        /// The quota asked for.
        asked: u32,
        /// The largest quota that the table allows.
        limit: u32,
    },
}

/// The reason why no reference was taken. Nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TakeError {
    /// The connection holds as many references as it may: it must return some first.
    Quota {
        /// The connection's quota.
        quota: u32,
    },
    /// The table has no slot left for any connection.
    Exhausted,
    /// There is no such page or fragment, or the page's count is full.
    Place(Place),
    /// The connection is not one of this table's open ones.
    NotOpen,
}

/// The reason why a returned token was refused. A refusal changes nothing but its counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The token was the slot's latest, and has been returned before.
    Repeated,
    /// The slot now stands for a later reference, or was never given out under this token.
    Stale,
    /// The token names no slot that the connection has.
    Unknown,
}

/// The reason why a whole batch was refused before any of it was looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BatchError {
    /// The batch has more than [`BATCH_TOKENS_MAX`] ranges.
    Tokens(usize),
    /// The batch has more than [`BATCH_REFERENCES_MAX`] references in all ranges.
    References(u64),
}

/// Number of refused tokens so far, by reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Refusals {
    /// Number of tokens refused as [`Refusal::Repeated`].
    pub repeated: u64,
    /// Number of tokens refused as [`Refusal::Stale`].
    pub stale: u64,
    /// Number of tokens refused as [`Refusal::Unknown`].
    pub unknown: u64,
}

impl Refusals {
    /// Number of all refused tokens.
    pub const fn total(&self) -> u64 {
        self.repeated + self.stale + self.unknown
    }

    pub(crate) fn count(&mut self, refusal: Refusal) -> Refusal {
        match refusal {
            Refusal::Repeated => self.repeated += 1,
            Refusal::Stale => self.stale += 1,
            Refusal::Unknown => self.unknown += 1,
        }
        refusal
    }
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            OpenError::Full { connections } => {
                write!(f, "all {connections} connections of the table are open: close one, or make it larger")
            }
            OpenError::Quota { asked, limit } => {
                write!(f, "a quota of {asked} references is not possible here: ask for 1 to {limit}")
            }
        }
    }
}

impl fmt::Display for TakeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            TakeError::Quota { quota } => {
                write!(f, "the connection holds its quota of {quota} references: return some first")
            }
            TakeError::Exhausted => {
                f.write_str("the table has no slot left: return references, or make it larger")
            }
            TakeError::Place(place) => {
                write!(f, "there is no {place:?} to lend, or it is out too often already")
            }
            TakeError::NotOpen => {
                f.write_str("the connection is not of this table: use the handle that open() gave")
            }
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Refusal::Repeated => "the token has been returned before: return each token once",
            Refusal::Stale => "the token is out of date: return only tokens that are held",
            Refusal::Unknown => {
                "the token names nothing that this connection has: return only tokens that are held"
            }
        })
    }
}

impl fmt::Display for BatchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BatchError::Tokens(tokens) => {
                write!(f, "a batch of {tokens} ranges is too long: split it by {BATCH_TOKENS_MAX}")
            }
            BatchError::References(references) => {
                write!(
                    f,
                    "a batch of {references} references is too large: split it by {BATCH_REFERENCES_MAX}"
                )
            }
        }
    }
}

impl core::error::Error for OpenError {}
impl core::error::Error for TakeError {}
impl core::error::Error for Refusal {}
impl core::error::Error for BatchError {}
