//! A log over disks, as a store: the log takes writes of pages in any order, and writes long
//! segments one after another.
//!
//! A [`Log`] stands on a store, which may be a stripe of disks. The log has a row of slots of its
//! own. For each slot a map names the place of its page in the store below, in 4 bytes. A written
//! page is appended to a *segment*. The map names the new place once the write has been answered.
//! So a write that fails or lands late damages nothing. The last page of a segment is its
//! *summary*: the page number and checksum of each place. Each read is verified by the summary.
//!
//! Each lane appends to a segment of its own, so lanes share no lock. Segments lie on the members
//! of a stripe in turns. Pages that are written again leave holes in old segments. The [`Cleaner`]
//! moves the remaining pages of such a segment and makes the segment free. The cleaner has no
//! thread of its own: its owner calls its steps.
//!
//! A log is *scratch* or *durable*. A [scratch](Log::create) log ends with its process. A
//! [durable](Log::make) log has a superblock and a journal, and can be [opened](Log::open) again.
//! After a power cut it has every page that was written before the last flush that succeeded. The
//! cleaner does its flushes. [`check`] verifies a durable log while nobody uses it.
//! docs/log-format.md describes the format.
//!
//! No function of this crate starts a thread or reads a clock. Few functions sleep:
//! [`Cleaner::wait`], and those that make, open and check a durable log.

mod append;
mod blocking;
mod check;
mod cleaner;
mod commit;
mod config;
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
pub use config::{Config, DamagedError, LogError};
pub use status::{DurableStatus, LogStatus};
pub use superblock::MAGIC;

use config::{AHEAD, DURABLE_AHEAD, RESERVE};
use durable::Durable;
use lane::LogLane;
use rustix::event::EventfdFlags;
use segment::Segments;
use size::{Kind, Sizes};
use status::Counters;
use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use summary::{Rows, Summary};
use weir_core::{ByteSize, PAGE_SIZE};
use weir_store::{Lane, OpenError, OpenErrorKind, State, Store};
use words::Words;

/// A log over a store; see the [crate's introduction](crate). A clone is the same log.
#[derive(Clone)]
pub struct Log {
    shared: Arc<Shared>,
}

/// The state that a log's lanes and its cleaner share.
struct Shared {
    name: String,
    below: Arc<dyn Store>,
    shape: Shape,
    /// For each page its place plus 1; 0: it was never written.
    map: Words,
    segments: Segments,
    rows: Rows,
    /// The parts that only a durable log has.
    durable: Option<Durable>,
    /// A random number, by which a scratch log knows its summaries from those that an earlier log
    /// left on the same disks.
    number: u64,
    /// Number of lanes that can still be opened.
    seats: AtomicU32,
    counters: Counters,
    /// Whether the log is full: the cleaner can make no segment free.
    is_full: AtomicBool,
    /// An eventfd that wakes the thread which drives the cleaner.
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
    /// Makes an empty scratch log over `below`. Only the log may use `below` from then on.
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
            number: RandomState::new().hash_one(0),
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

    /// The log's counts. Reads one word of memory for each segment.
    pub fn status(&self) -> LogStatus {
        self.shared.status()
    }
}

impl Shared {
    /// The place of a page; `None`: the page was never written.
    fn find(&self, page: u32) -> Option<u32> {
        self.map.at(page as usize).load(SeqCst).checked_sub(1)
    }

    /// The place of a page, and the life of its segment.
    fn find_with_life(&self, page: u32) -> Option<(u32, u32)> {
        loop {
            let place = self.find(page)?;
            let life = self.segments.word(self.shape.split(place).0).life();
            // The page was at this place before and after the look at the life. A segment with a
            // live page begins no other life. So `life` is the life in which the page was written.
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

    /// Notes that nobody needs the content of a page until the page is written again.
    fn discard(&self, page: u32) {
        if let Some(before) = self.map.at(page as usize).swap(0, SeqCst).checked_sub(1) {
            self.die(before);
        }
    }

    /// Notes that the cleaner has copied a page. Returns false if a lane wrote the page anew
    /// meanwhile.
    fn rename(&self, page: u32, from: u32, to: u32) -> bool {
        self.segments.add_live(self.shape.split(to).0);
        let moved = self.map.at(page as usize).compare_exchange(from + 1, to + 1, SeqCst, SeqCst).is_ok();
        self.die(if moved { from } else { to });
        moved
    }

    /// Notes that the page at this place is dead.
    fn die(&self, place: u32) {
        let (segment, _) = self.shape.split(place);
        if self.segments.drop_live(segment) {
            self.free(segment);
        }
    }

    /// Drops the row of a segment without a live page, and makes the segment dead or free.
    fn free(&self, segment: u32) {
        self.rows.forget(&self.segments, segment);
        self.segments.end(segment);
    }

    /// The number of free segments below which the cleaner works.
    fn low(&self) -> u32 {
        RESERVE + self.shape.lanes + if self.durable.is_some() { DURABLE_AHEAD } else { AHEAD }
    }

    /// The part of the log's identity that its summaries and its journal carry.
    fn identity(&self) -> u64 {
        self.durable.as_ref().map_or(self.number, |durable| durable.superblock.short_identity())
    }

    /// Whether a summary is of this log, and of this life of its segment. Another one proves
    /// nothing: a disk may have lost all writes of this life.
    fn is_its(&self, summary: &Summary<'_>, life: u32) -> bool {
        summary.life() == life && summary.identity() == self.identity()
    }

    /// The version for a write that begins; 0: the log is scratch.
    fn next_version(&self) -> u64 {
        self.durable.as_ref().map_or(0, Durable::next_version)
    }

    /// Wakes the thread that drives the cleaner, if too few segments are free.
    fn ring(&self) {
        if self.segments.free() < self.low() {
            self.wake();
        }
    }

    fn wake(&self) {
        if self.asleep.swap(false, SeqCst) {
            // The write fails only if the eventfd's counter is full. Then the descriptor is
            // readable already, and wakes the thread.
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

    /// A log always counts as online. If a disk has failed, each operation on it fails.
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
