//! The settings of a log, and the reasons why a log cannot be made or opened.

use std::io;
use weir_store::OpenError;

/// Largest number of segments that one appender has open at once.
pub(crate) const OPEN_MAX: usize = 16;
/// Number of free segments that only the cleaner may take.
pub(crate) const RESERVE: u32 = 4;
/// Number of free segments that the cleaner provides for the writers of a scratch log, besides one
/// for each lane.
pub(crate) const AHEAD: u32 = 8;
/// Number of free segments that the cleaner provides for the writers of a durable log, besides one
/// for each lane. A segment of a durable log is free only after a commit.
pub(crate) const DURABLE_AHEAD: u32 = 32;

/// The settings of a log.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The log's size in pages; 0: four fifths of the pages that its segments hold.
    pub pages: u32,
    /// Number of pages of a segment, its summary included; at most 285.
    pub segment_pages: u32,
    /// Number of members of the store below, on which segments lie in turns.
    pub members: u32,
    /// Largest number of lanes that may be open at once.
    pub lanes: u32,
    /// Number of summaries in memory. 0: as many as fit if the log takes 1 GiB of memory for 1 TiB
    /// of the store below. If a segment's summary is not in memory, a read also reads it from disk.
    pub summaries: u32,
}

impl Default for Config {
    /// The defaults: segments of 1 MiB over one member.
    fn default() -> Self {
        Config { pages: 0, segment_pages: 256, members: 1, lanes: 8, summaries: 0 }
    }
}

/// The reason why a log could not be made, opened or checked.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// A segment has too many pages or too few, or there is no member or lane.
    #[error(
        "a log has segments of 2 to 285 pages (8 at least if it is durable), a member and a lane; asked for {0}"
    )]
    Shape(String),
    /// The store below is too small for a log of this size, with the free segments that its cleaner
    /// needs.
    #[error(
        "{store} has room for {} pages of a log, with what its cleaner needs for itself; asked for {asked}: make the log smaller, or the store larger",
        most
    )]
    TooSmall {
        /// The name of the store below.
        store: String,
        /// Largest number of pages of a log that the store below has room for.
        most: u32,
        /// Number of pages of the log that was asked for.
        asked: u32,
    },
    /// The store below gives no lane.
    #[error(transparent)]
    Lane(#[from] OpenError),
    /// There is no memory for the log's map or summaries.
    #[error("cannot take memory for the log's map")]
    Memory(#[source] io::Error),
    /// There is no durable log on the store below.
    #[error("{0} carries no durable log; weir cache create --durable makes one")]
    NoLog(String),
    /// A later version of Weir made the durable log.
    #[error(
        "{store} carries a durable log of format {version}; this version of Weir reads 1: use a later one"
    )]
    Later {
        /// The name of the store below.
        store: String,
        /// The version of the log's format on the disks.
        version: u32,
    },
    /// The disks are not those of the log, or not in the order in which they were named when it was
    /// made.
    #[error("{store}: {what}")]
    Members {
        /// The name of the store below.
        store: String,
        /// The reason why the disks are refused, and what the operator can do.
        what: String,
    },
    /// The durable log is damaged.
    #[error("{0}; weir cache check says what is left")]
    Damaged(#[source] DamagedError),
    /// The store below cannot be written.
    #[error("cannot write to {store}: {fault}")]
    Write {
        /// The name of the store below.
        store: String,
        /// The reason why the write failed.
        fault: weir_store::Fault,
    },
    /// The caller's progress callback asked to stop.
    #[error("stopped before it was done")]
    Stopped(#[source] io::Error),
}

/// The damage that was found in a durable log.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DamagedError {
    /// Both copies of the superblock are damaged.
    #[error("disk {0} of the log: both copies of the superblock are damaged")]
    Superblock(u32),
    /// One copy of the superblock is damaged, and the other is whole.
    #[error("disk {0} of the log: a copy of the superblock is damaged; the other is whole")]
    Copy(u32),
    /// The journal has no complete checkpoint.
    #[error("the journal has no complete checkpoint")]
    NoCheckpoint,
    /// The journal lacks a commit that was complete, as a later commit or a confirmation shows.
    #[error(
        "the journal is damaged: commit {last} is the last one that is whole, and commit {seen} was made"
    )]
    Journal {
        /// The number of the last commit that is whole.
        last: u64,
        /// The highest number of a commit that was found.
        seen: u64,
    },
    /// A page of the journal names a segment, a life, a generation or a version that the log cannot
    /// have.
    #[error("the journal is damaged: it says of segment {0} what cannot be")]
    Entry(u32),
    /// The summary of a segment in use is damaged.
    #[error("segment {0} is in use, and its summary is damaged")]
    Summary(u32),
    /// A summary has a record with a page or a version that the log cannot have.
    #[error("the summary of segment {0} says of a page what cannot be")]
    Record(u32),
}
