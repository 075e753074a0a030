//! A write-back cache in front of a disk, as a page device.
//!
//! A [`Cache`] keeps pages of a *home* in the frames of a volume over a fast store. The home is a
//! file or a disk on which page `n` lies at `n`. As in any volume, each cached page has a checksum,
//! and every write goes to a new slot. The [`Directory`] names the frame of each cached page. It
//! takes 8 bytes a frame, and the volume's page map and slot records take 16. So a cached page
//! takes 24 bytes of memory, and a page that is not cached takes none.
//!
//! Each thread has a [`CacheLane`]. One [`WriteBack`] writes dirty pages home, step by step. Lanes
//! and write-back share words that change by compare-and-exchange, and no lock. Before a page is
//! read or written at its home, a lane takes the page's frame exclusively, or the write-back marks
//! the frame as being written. So the home never has two writes of a page under way, nor a read
//! beside a write.
//!
//! Nothing here starts a thread or reads a clock, and only [`WriteBack::wait`] sleeps.
//!
//! **Meaning of a flush.** Every page written before the flush is at home, and the home has flushed
//! its own cache. A power failure may lose any write since the last flush, as on a disk that caches
//! writes.

mod directory;
mod entry;
mod lane;
mod reclaim;
mod status;
mod stream;
mod trace;
mod write_back;

pub use directory::{Directory, WAYS};
pub use lane::CacheLane;
pub use reclaim::{Reclaim, ReclaimError, Reclaimed, Reclaimer};
pub use status::CacheStatus;
pub use trace::Trace;
pub use write_back::{Next, WriteBack};

use rustix::event::EventfdFlags;
use status::Counters;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use stream::Streams;
use trace::Recorder;
use weir_core::{ByteSize, PAGE_SIZE};
use weir_device::{Fault, PageDevice};
use weir_store::{OpenError, OpenErrorKind, Store};
use weir_volume::{CreateError, Volume};

/// Largest number of lanes: a claim in the directory has 8 bits for a lane's number.
pub const LANES_MAX: usize = 250;

/// The destination of written pages: the cache, the home, or both.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mode {
    /// A write goes into the cache at once, and the write-back writes it to the home later.
    #[default]
    WriteBack,
    /// Writes go into the cache and home before they are acknowledged. So the loss of the cache
    /// loses no page.
    WriteThrough,
    /// A write goes to the home only, and the cache drops its copy of the page.
    WriteAround,
}

impl Mode {
    const ALL: [(Mode, &'static str); 3] = [
        (Mode::WriteBack, "write-back"),
        (Mode::WriteThrough, "write-through"),
        (Mode::WriteAround, "write-around"),
    ];
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::ALL[*self as usize].1)
    }
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|(_, name)| *name == text);
        known.map(|(mode, _)| mode).ok_or_else(|| "accepted: write-back, write-through, write-around".into())
    }
}

/// The settings of a cache.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Largest number of lanes that may be open at once, up to [`LANES_MAX`].
    pub lanes: usize,
    /// Number of operations that each lane may have in flight.
    pub depth: usize,
    /// The destination of written pages: the cache, the home, or both.
    pub mode: Mode,
    /// A stream of more pages than this in a row bypasses the cache; 0: no stream does.
    pub stream_pages: u32,
    /// Per cent of the frames that may be dirty before the write-back begins.
    pub dirty_high: u8,
    /// Per cent of the frames that are still dirty when the write-back ends.
    pub dirty_low: u8,
}

impl Config {
    /// Default of [`dirty_high`](Config::dirty_high).
    pub const DIRTY: u8 = 50;
    /// The same before a log that is not durable. Such a log has no copy of a dirty page. So the
    /// more pages are dirty, the less its cleaner moves.
    pub const DIRTY_BEFORE_SCRATCH_LOG: u8 = 70;

    /// These settings with a write-back that begins at `per_cent` dirty frames, and ends once a
    /// tenth of the frames is clean again.
    #[must_use]
    pub fn with_dirty(self, per_cent: u8) -> Self {
        Config { dirty_high: per_cent, dirty_low: per_cent.saturating_sub(10), ..self }
    }
}

impl Default for Config {
    /// The defaults: a stream bypasses the cache after 4 MiB. The write-back begins at 50 % dirty
    /// frames and ends at 40 %.
    fn default() -> Self {
        let mode = Mode::default();
        Config { lanes: 4, depth: 64, mode, stream_pages: 1024, dirty_high: 0, dirty_low: 0 }
            .with_dirty(Config::DIRTY)
    }
}

/// The reason why a cache could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The store is too small for one set of frames.
    #[error(
        "{store} has {} and a cache needs {} there ({} of that for writes under way): make it larger",
        ByteSize(*.has), ByteSize(*.needs), ByteSize(*.slack)
    )]
    TooSmall {
        /// The store's name.
        store: String,
        /// Bytes that the store has.
        has: u64,
        /// Bytes that the cache needs at least.
        needs: u64,
        /// How many of the needed bytes are for writes under way.
        slack: u64,
    },
    /// A cache cannot have these settings.
    #[error(
        "a cache has 1 to {LANES_MAX} lanes, and watermarks of at most 90 per cent, the lower first; asked for {0}"
    )]
    Shape(String),
    /// The store cannot hold the cached pages.
    #[error(transparent)]
    Frames(#[from] CreateError),
    /// A lane of the store or of the home could not be opened.
    #[error(transparent)]
    Lane(#[from] OpenError),
    /// There is not enough memory for the index.
    #[error("cannot take memory for the cache's index")]
    Memory(#[source] std::io::Error),
}

/// A cache in front of a home; see the [crate's introduction](crate).
pub struct Cache {
    directory: Directory,
    frames: Arc<Volume>,
    home: Arc<dyn Store>,
    config: Config,
    mode: AtomicU8,
    streams: Streams,
    recorder: Arc<Recorder>,
    seats: Box<[Seat]>,
    write_back: status::WriteBackCounters,
    /// Number of the last flush that was asked for.
    flush_wanted: AtomicU64,
    /// Number of the last flush that has been answered, times 2; plus 1 if it succeeded.
    flush_done: AtomicU64,
    /// Whether all dirty pages must go home, because the cache is about to end.
    drains: AtomicBool,
    /// Bytes of its store that the cache may use.
    size: AtomicU64,
    /// Wakes the thread that drives the write-back.
    bell: OwnedFd,
    asleep: AtomicBool,
}

/// A lane's seat in the cache: whether a lane has it, and that lane's counts.
#[derive(Default)]
#[repr(align(128))]
struct Seat {
    taken: AtomicBool,
    counters: Counters,
}

impl Cache {
    /// Makes an empty cache over `store` in front of `home`. Only the cache may use `store` from
    /// then on.
    ///
    /// # Errors
    /// Fails when the store is too small, or memory is missing.
    pub fn create(
        store: Arc<dyn Store>,
        home: Arc<dyn Store>,
        config: Config,
    ) -> Result<Arc<Self>, CacheError> {
        let Config { lanes, depth, dirty_high, dirty_low, .. } = config;
        if lanes == 0 || lanes > LANES_MAX || dirty_high > 90 || dirty_low > dirty_high {
            let shape = format!("{lanes} lanes, {dirty_low} and {dirty_high} per cent");
            return Err(CacheError::Shape(shape));
        }
        // The write-back and the reclaimer need a lane of the volume too.
        let mut shape = weir_volume::Config { pages: WAYS, lanes: lanes + 2, depth };
        if store.slots() < shape.slots() {
            let bytes = |slots: u32| u64::from(slots) * PAGE_SIZE as u64;
            return Err(CacheError::TooSmall {
                store: store.name().to_owned(),
                has: bytes(store.slots()),
                needs: bytes(shape.slots()),
                slack: bytes(shape.slack()),
            });
        }
        let directory = Directory::new(store.slots() - shape.slack()).map_err(CacheError::Memory)?;
        shape.pages = directory.frames();
        let frames = Volume::create(shape, vec![store])?;
        let size = frames.chunks(0).map(|chunk| chunk.bytes()).sum();
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| CacheError::Memory(errno.into()))?;
        Ok(Arc::new(Cache {
            directory,
            frames,
            home,
            config,
            mode: AtomicU8::new(config.mode as u8),
            streams: Streams::new(config.stream_pages),
            recorder: Arc::default(),
            seats: (0..lanes).map(|_| Seat::default()).collect(),
            write_back: status::WriteBackCounters::default(),
            flush_wanted: AtomicU64::new(0),
            flush_done: AtomicU64::new(1),
            drains: AtomicBool::new(false),
            size: AtomicU64::new(size),
            bell,
            asleep: AtomicBool::new(false),
        }))
    }

    /// The cache's size in pages: that of the home.
    pub fn pages(&self) -> u32 {
        self.home.slots()
    }

    /// The cache's size in bytes.
    pub fn bytes(&self) -> u64 {
        u64::from(self.pages()) * PAGE_SIZE as u64
    }

    /// Number of pages that are dirty, or whose write to the home has not ended.
    pub fn dirty(&self) -> u32 {
        self.directory.dirty()
    }

    /// The destination of written pages: the cache, the home, or both.
    pub fn mode(&self) -> Mode {
        Mode::ALL[usize::from(self.mode.load(Ordering::Relaxed))].0
    }

    /// Changes the destination of written pages. In each mode but write-back, all dirty pages are
    /// also written home.
    pub fn set_mode(&self, mode: Mode) {
        self.mode.store(mode as u8, Ordering::Relaxed);
        self.ring();
    }

    /// From here on the write-back writes all dirty pages home, for instance because the cache is
    /// about to end.
    pub fn drain(&self) {
        self.drains.store(true, Ordering::Relaxed);
        self.ring();
    }

    /// Begins to record which pages requests use. `None`: another trace is being recorded. The
    /// first call takes memory for the recorder.
    pub fn trace(&self) -> Option<Trace> {
        self.recorder.begin()
    }

    /// Whether all dirty pages must go home.
    fn must_clean(&self) -> bool {
        self.drains.load(Ordering::Relaxed) || self.mode() != Mode::WriteBack || self.directory.leaves()
    }

    /// Number of frames that are `per_cent` per cent of those that take pages.
    fn share(&self, per_cent: u8) -> u32 {
        (u64::from(self.directory.limit()) * u64::from(per_cent) / 100) as u32
    }

    /// Ends a lane's use of a frame that other users may share. `wrote` tells that the frame's
    /// content is now newer than the home's.
    fn leave(&self, frame: u32, wrote: bool) {
        self.directory.leave(frame, wrote);
        if wrote {
            self.has_dirt();
        }
    }

    /// Notes that a page is dirty. If too many pages are, wakes the thread that drives the
    /// write-back.
    fn has_dirt(&self) {
        let most = if self.must_clean() { 0 } else { self.share(self.config.dirty_high) };
        if self.directory.dirty() > most && self.asleep.load(Ordering::SeqCst) {
            self.ring();
        }
    }

    /// Wakes the thread that drives the write-back.
    fn ring(&self) {
        if self.asleep.swap(false, Ordering::SeqCst) {
            // The write fails only if the counter is full. Then the descriptor is readable already,
            // and wakes the thread.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
    }

    fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Asks the write-back for a flush: every page written before goes home, and the home flushes.
    /// Returns the flush's number, for [`flush_result`](Cache::flush_result).
    pub fn ask_for_flush(&self) -> u64 {
        let number = self.flush_wanted.fetch_add(1, Ordering::SeqCst) + 1;
        self.ring();
        number
    }

    /// The result of flush `number`, or `None` while it is under way.
    pub fn flush_result(&self, number: u64) -> Option<Result<(), Fault>> {
        let answered = self.flush_done.load(Ordering::SeqCst);
        let result =
            if answered & 1 == 1 { Ok(()) } else { Err(Fault::Io(rustix::io::Errno::IO.raw_os_error())) };
        (number <= answered / 2).then_some(result)
    }
}

impl PageDevice for Cache {
    type Lane = CacheLane;
    type Error = OpenError;

    fn pages(&self) -> u32 {
        self.pages()
    }

    fn open(self: &Arc<Self>) -> Result<CacheLane, OpenError> {
        let free = self.seats.iter().position(|seat| !seat.taken.swap(true, Ordering::Acquire));
        let Some(seat) = free else {
            let what = format!("all {} lanes are in use; configure more", self.seats.len());
            return Err(OpenError::new(OpenErrorKind::InUse, "cache", what));
        };
        CacheLane::open(Arc::clone(self), seat)
            .inspect_err(|_| self.seats[seat].taken.store(false, Ordering::Release))
    }
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cache({:?} of {})", self.directory, self.home.name())
    }
}
