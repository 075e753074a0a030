//! A log over disks, as a store: pages in any order are written as long segments, one after
//! another.
//!
//! A [`Log`] stands on a store, which may be a stripe of disks. It has a row of slots of its own. A
//! map says for each slot where its page lies below: 4 bytes a page. A written page is appended to
//! a *segment*, and the map names its new place once the write has been answered. So a write that
//! fails, or lands late, damages nothing. The last page of a segment is its *summary*: it says
//! which page lies in each place, with its checksum. Each read is verified by that.
//!
//! Each lane appends to a segment of its own, so lanes share no lock. Segments lie on the members
//! of a stripe in turns. Pages that are written again leave holes. The [`Cleaner`] moves the rest
//! of a segment and makes the segment free. It is a step function that its owner drives.
//!
//! A log is *scratch* or *durable*. A [scratch](Log::create) log ends with its process. A
//! [durable](Log::make) one has a superblock and a journal, and is [opened](Log::open) again: after
//! a power cut it has every page that was written before the last flush that succeeded. Its flushes
//! are the cleaner's work too. [`check`] verifies it while nobody uses it. docs/log-format.md has
//! the format.
//!
//! Nothing starts a thread or reads a clock. [`Cleaner::wait`] sleeps, and so does what makes, opens
//! and checks a durable log.

mod append;
mod blocking;
mod check;
mod cleaner;
mod commit;
mod durable;
mod journal;
mod lane;
mod recover;
mod segment;
mod size;
mod status;
mod summary;
mod superblock;
mod words;

pub use blocking::Clock;
pub use check::{BadPage, CheckReport, check};
pub use cleaner::{Cleaner, Next};
pub use recover::DamagedError;
pub use status::{DurableStatus, LogStatus};
pub use superblock::MAGIC;

use durable::Durable;
use lane::LogLane;
use rustix::event::EventfdFlags;
use segment::Segments;
use size::{Kind, Sizes};
use status::Counters;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use summary::Rows;
use weir_core::{ByteSize, PAGE_SIZE};
use weir_store::{Lane, OpenError, OpenErrorKind, State, Store};
use words::Words;

/// Number of free segments that only the cleaner takes.
const RESERVE: u32 = 4;
/// Number of free segments that the cleaner provides for the writers, besides one for each lane.
const AHEAD: u32 = 8;
/// The same in a durable log, where a segment is free only after a commit.
const DURABLE_AHEAD: u32 = 32;

/// The settings of a log.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The log's size in pages; 0: four fifths of the pages that its segments hold.
    pub pages: u32,
    /// Pages of a segment with its summary, at most 285.
    pub segment_pages: u32,
    /// Number of members of the store below, on which segments lie in turns.
    pub members: u32,
    /// Most lanes that may be open at once.
    pub lanes: u32,
    /// Number of summaries in memory; 0: as many as bring map and summaries to 1 GiB for 1 TiB of
    /// the store below. If a segment's summary is not in memory, a read also reads it from disk.
    pub summaries: u32,
}

impl Default for Config {
    /// The defaults: segments of 1 MiB over one member.
    fn default() -> Self {
        Config { pages: 0, segment_pages: 256, members: 1, lanes: 8, summaries: 0 }
    }
}

/// The reason why a log could not be made.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// A segment has too many pages or too few, or there is no member or lane.
    #[error("a log has segments of 2 to 285 pages, a member and a lane; asked for {0}")]
    Shape(String),
    /// The log would have more pages than the cleaner can handle.
    #[error(
        "{store} has room for {} pages of a log, with what its cleaner needs for itself; asked for {asked}: make the log smaller, or the store larger",
        most
    )]
    TooSmall {
        /// The name of the store below.
        store: String,
        /// Number of pages that it has room for.
        most: u32,
        /// Number of pages that were asked for.
        asked: u32,
    },
    /// The store below gives no lane.
    #[error(transparent)]
    Lane(#[from] OpenError),
    /// There is no memory for the map.
    #[error("cannot take memory for the log's map")]
    Memory(#[source] io::Error),
    /// The store below carries no durable log.
    #[error("{0} carries no durable log; weir cache create --durable makes one")]
    NoLog(String),
    /// A later version of Weir made the durable log.
    #[error("{store} carries a durable log of format {version}; this version of Weir reads 1: use a later one")]
    Later {
        /// The name of the store below.
        store: String,
        /// The format's version.
        version: u32,
    },
    /// The disks are not those of the log, or not in its order.
    #[error("{store}: {what}")]
    Members {
        /// The name of the store below.
        store: String,
        /// What is wrong, and the next step.
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
        /// The reason why it failed.
        fault: weir_store::Fault,
    },
    /// The caller ended it.
    #[error("stopped before it was done")]
    Stopped(#[source] io::Error),
}

/// A log over a store; see the [crate's introduction](crate). A clone is the same log.
#[derive(Clone)]
pub struct Log {
    shared: Arc<Shared>,
}

/// The state that lanes and cleaner share.
struct Shared {
    name: String,
    below: Arc<dyn Store>,
    shape: Shape,
    /// For each page its place plus 1; 0: it was never written.
    map: Words,
    segments: Segments,
    rows: Rows,
    /// What a durable log has besides.
    durable: Option<Durable>,
    /// Number of lanes that may still be opened.
    seats: AtomicU32,
    counters: Counters,
    /// Whether no segment can be made free.
    is_full: AtomicBool,
    /// Wakes the thread that drives the cleaner.
    bell: OwnedFd,
    asleep: AtomicBool,
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    pages: u32,
    segment_pages: u32,
    lanes: u32,
}

impl Shape {
    /// Number of pages that a segment holds: all but its summary.
    fn places(self) -> u32 {
        self.segment_pages - 1
    }

    /// Splits a place into its segment, and its index in the segment.
    fn split(self, place: u32) -> (u32, u32) {
        (place / self.segment_pages, place % self.segment_pages)
    }

    fn place(self, segment: u32, at: u32) -> u32 {
        segment * self.segment_pages + at
    }
}

impl Log {
    /// Makes an empty log over `below`, which only the log may use.
    ///
    /// # Errors
    /// Fails when the store is too small, or memory is missing.
    pub fn create(below: Arc<dyn Store>, config: Config) -> Result<Self, LogError> {
        let sizes = Sizes::of(below.name(), below.slots(), &config, Kind::Scratch)?;
        let map = Words::new(sizes.pages as usize).map_err(LogError::Memory)?;
        Self::over(below, &config, &sizes, Segments::new(sizes.segments, config.members), map, None)
    }

    fn over(
        below: Arc<dyn Store>,
        config: &Config,
        sizes: &Sizes,
        segments: Segments,
        map: Words,
        durable: Option<Durable>,
    ) -> Result<Self, LogError> {
        let Config { segment_pages, lanes, .. } = *config;
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| LogError::Memory(errno.into()))?;
        let shared = Arc::new(Shared {
            name: format!("log over {}", below.name()),
            below,
            shape: Shape { pages: sizes.pages, segment_pages, lanes },
            map,
            segments,
            rows: Rows::new(sizes.rows, segment_pages - 1, durable.is_some()).map_err(LogError::Memory)?,
            durable,
            seats: AtomicU32::new(lanes),
            counters: Counters::default(),
            is_full: AtomicBool::new(false),
            bell,
            asleep: AtomicBool::new(false),
        });
        Ok(Log { shared })
    }

    /// The log's size in bytes.
    pub fn bytes(&self) -> u64 {
        u64::from(self.shared.shape.pages) * PAGE_SIZE as u64
    }

    /// The log's status. Looks at each segment.
    pub fn status(&self) -> LogStatus {
        self.shared.status()
    }
}

impl Shared {
    /// The place of a page.
    fn find(&self, page: u32) -> Option<u32> {
        self.map.at(page as usize).load(SeqCst).checked_sub(1)
    }

    /// The place of a page, and the life of its segment.
    fn find_with_life(&self, page: u32) -> Option<(u32, u32)> {
        loop {
            let place = self.find(page)?;
            let life = self.segments.word(self.shape.split(place).0).life();
            // The page was there in this life: a segment with a live page begins no other life.
            if self.find(page) == Some(place) {
                return Some((place, life));
            }
        }
    }

    /// Notes that a page has been written to a place.
    fn publish(&self, page: u32, place: u32) {
        self.segments.add_live(self.shape.split(place).0);
        let before = self.map.at(page as usize).swap(place + 1, SeqCst);
        if let Some(before) = before.checked_sub(1) {
            self.die(before);
        }
    }

    /// Notes that a page has been copied. False: it was written anew meanwhile.
    fn rename(&self, page: u32, from: u32, to: u32) -> bool {
        self.segments.add_live(self.shape.split(to).0);
        let moved = self.map.at(page as usize).compare_exchange(from + 1, to + 1, SeqCst, SeqCst).is_ok();
        self.die(if moved { from } else { to });
        moved
    }

    /// Notes that no page is read at this place any more.
    fn die(&self, place: u32) {
        let (segment, _) = self.shape.split(place);
        if self.segments.drop_live(segment) {
            self.free(segment);
        }
    }

    /// Handles a segment whose last page has died.
    fn free(&self, segment: u32) {
        self.rows.forget(&self.segments, segment);
        self.segments.end(segment);
    }

    /// The number of free segments below which the cleaner works.
    fn low(&self) -> u32 {
        RESERVE + self.shape.lanes + if self.durable.is_some() { DURABLE_AHEAD } else { AHEAD }
    }

    /// The part of a durable log's identity that its summaries and its journal carry.
    fn identity(&self) -> u64 {
        self.durable.as_ref().map_or(0, |durable| durable.superblock.short_identity())
    }

    /// The number of a write that begins; 0: the log is scratch.
    fn next_version(&self) -> u64 {
        self.durable.as_ref().map_or(0, Durable::next_version)
    }

    /// Wakes the thread that drives the cleaner, if there is something to do.
    fn ring(&self) {
        if self.segments.free() < self.low() {
            self.wake();
        }
    }

    fn wake(&self) {
        if self.asleep.swap(false, SeqCst) {
            // This fails only if the counter is full, and then the bell rings already.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
    }

    fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

impl Store for Log {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn slots(&self) -> u32 {
        self.shared.shape.pages
    }

    fn lane(&self, depth: usize) -> Result<Box<dyn Lane>, OpenError> {
        let taken = self.shared.seats.fetch_update(SeqCst, SeqCst, |seats| seats.checked_sub(1));
        if taken.is_err() {
            let what = format!("all {} lanes are in use; configure more", self.shared.shape.lanes);
            return Err(OpenError::new(OpenErrorKind::InUse, self.name(), what));
        }
        match LogLane::open(Arc::clone(&self.shared), depth) {
            Ok(lane) => Ok(Box::new(lane)),
            Err(error) => {
                self.shared.seats.fetch_add(1, SeqCst);
                Err(error)
            }
        }
    }

    /// Always online: a disk that fails reports it for each operation.
    fn state(&self, _member: u32) -> State {
        State::Online
    }

    fn unfit_for_swap(&self) -> Option<String> {
        self.shared.below.unfit_for_swap()
    }
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.shared.name, ByteSize(self.bytes()))
    }
}
