//! A page-addressed volume over an ordered list of stores.
//!
//! A page takes a slot when it is first written, in the first store that has room. It frees the
//! slot when it is discarded, or when its content becomes one repeated value. Every write goes to a
//! *new* slot: the content first, then the slot's record (page and checksum), then one 64-bit store
//! into the page map. So a crash, or a reader, at any instant finds the old page or the new one,
//! and never a torn one. A slot is used again only after every lane that might still be reading it
//! has moved on (see `epoch.rs`).
//!
//! Any number of [volumes](Volume) share the stores of a [`Pool`], each with pages of its own.
//! Threads share a volume; each opens a [`Lane`] of its own. Lanes share no lock, and allocate
//! nothing once open. Nothing here starts a thread, sleeps, spins or reads a clock. Time comes in
//! by [`Lane::poll`], and a lane's owner decides how to wait.
//!
//! ```
//! use std::sync::Arc;
//! use weir_core::{PAGE_SIZE, PageNo};
//! use weir_store::{Host, Progress};
//! use weir_volume::{Config, Volume};
//!
//! let config = Config { pages: 1000, lanes: 2, depth: 32 };
//! let store = Arc::new(Host::new(config.slots())?);
//! let volume = Volume::create(config, vec![store])?;
//! let mut lane = volume.lane()?;
//!
//! let (page, mut back) = ([7; PAGE_SIZE], [0; PAGE_SIZE]);
//! assert_eq!(lane.write(0, PageNo(42), &page), Progress::Done(Ok(())));
//! assert_eq!(lane.read(1, PageNo(42), &mut back), Progress::Done(Ok(())));
//! lane.submit(); // ends the batch
//! assert_eq!(back, page);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod batch;
#[cfg_attr(loom, allow(dead_code))]
mod blocks;
mod chunks;
mod closing;
#[cfg_attr(loom, allow(dead_code))]
mod compact;
mod compress;
mod device;
mod entry;
#[cfg_attr(loom, allow(dead_code))]
mod epoch;
mod give_back;
mod lane;
#[cfg_attr(loom, allow(dead_code))]
mod lend;
#[cfg_attr(loom, allow(dead_code))]
mod looking;
mod map;
mod members;
mod mover;
mod pack;
mod quarantine;
#[cfg_attr(loom, allow(dead_code))]
mod ranges;
mod records;
mod recover;
#[cfg_attr(loom, allow(dead_code))]
mod seats;
mod status;
mod sync;
mod volume;

pub use batch::BatchCounts;
pub use chunks::{ChunkCounts, ChunkState, ChunkStatus, Note};
pub use compact::Sparse;
pub use compress::Compression;
pub use entry::STORES_MAX;
pub use give_back::GiveBackError;
pub use lane::{Guard, Lane};
pub use lend::{Lender, Loan, Window};
pub use mover::{Awaited, Moved, Mover, Step, Task};
pub use ranges::PAGES_MAX;
pub use recover::{Kept, KeptFds, TakenOver};
pub use status::{StoreStatus, VolumeStatus};
#[cfg(all(debug_assertions, not(loom)))]
pub use sync::{run_within_claims, run_within_publications};
pub use volume::{Removal, Volume};
pub use weir_device::View;

use epoch::Epochs;
use map::Map;
use members::Members;
use quarantine::Quarantine;
use ranges::Ranges;
use records::Records;
use seats::{LaneSeat, Seats};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;
use weir_core::{ByteSize, PAGE_SIZE};
use weir_store::{OpenError, OpenErrorKind, Store};

/// The size of a pool, and the load for which it has room.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Number of pages that all volumes may have together.
    pub pages: u32,
    /// Largest number of lanes that may be open at once. [`slack`](Config::slack) has a part for
    /// each, which a lane takes when it is opened. A [`Lender`] takes a part of the slack too.
    pub lanes: usize,
    /// Number of operations that each lane may have in flight at slow stores.
    pub depth: usize,
}

impl Config {
    /// Number of slots that the stores need together, so that a write always finds one. Each page
    /// takes one slot. A write under way takes a new slot, and the page's old slot stays taken
    /// until it may be reused.
    pub fn slots(&self) -> u32 {
        self.pages.saturating_add(self.slack())
    }

    /// The part of [`slots`](Config::slots) that is for writes under way. It does not depend on the
    /// number of open lanes.
    pub fn slack(&self) -> u32 {
        u32::try_from(self.lanes).unwrap_or(u32::MAX).saturating_mul(self.lane_slots())
    }

    /// Number of slots for the operations that one lane has under way.
    pub fn lane_slots(&self) -> u32 {
        u32::try_from(self.depth + lane::HINTS).unwrap_or(u32::MAX)
    }
}

/// The reason why a volume could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// The size is larger than the stores can hold, or than a volume can be.
    #[error(
        "a volume of {} needs {} in its stores ({} of that for writes under way), and they have {}: make it smaller or the stores larger",
        pages_as_size(*.pages), pages_as_size(*.needed), pages_as_size(.needed - .pages), pages_as_size(*.available)
    )]
    TooLarge {
        /// Number of pages asked for.
        pages: u32,
        /// Number of slots that a volume of this size needs.
        needed: u32,
        /// Number of slots that the stores have.
        available: u32,
    },
    /// No volume can have this number of pages or stores.
    #[error(
        "a volume has 1 to {} pages and 1 to {} stores; asked for {pages} pages on {stores} stores",
        PAGES_MAX,
        entry::STORES_MAX
    )]
    Shape {
        /// Number of pages asked for.
        pages: u32,
        /// Number of stores given.
        stores: usize,
    },
    /// The system does not let this process map the page map, which has an address for every
    /// possible page number.
    #[error(
        "cannot map {size} of addresses for the page map: limits must allow 20GiB of address space (ulimit -v), 17GiB of file size (ulimit -f) and, without CAP_IPC_LOCK, 20GiB of locked memory (ulimit -l)",
        size = ByteSize(Map::BYTES as u64)
    )]
    Space(#[source] std::io::Error),
    /// There is no memory for the page map or the slot records.
    #[error("cannot take {size} of memory for the page map and slot records", size = ByteSize(*.bytes))]
    Memory {
        /// Number of bytes that could not be taken.
        bytes: u64,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// The pool has promised its room to other volumes.
    #[error(
        "the pool has room for {} more, and {} are asked for: remove or shrink a volume, or take memory again that was given back",
        pages_as_size(*.free), pages_as_size(*.pages)
    )]
    NoRoom {
        /// Number of pages asked for, beside those that volumes have.
        pages: u32,
        /// Number of pages that the pool has room for.
        free: u32,
    },
    /// No range of free page numbers is long enough.
    #[error(
        "no page numbers for {} lie side by side free, at most for {}: make the volume smaller, or remove another",
        pages_as_size(*.pages), pages_as_size(*.longest)
    )]
    NoRange {
        /// Number of pages asked for.
        pages: u32,
        /// Number of pages of the longest free range.
        longest: u32,
    },
    /// The new size could not be noted for the next daemon.
    #[error("cannot note the volume for the next daemon")]
    Note(#[source] std::io::Error),
    /// A volume cannot shrink or be removed while somebody holds it.
    #[error("the volume is in use, and shrinks or goes only when nobody uses it: close what uses it first")]
    InUse,
    /// An earlier daemon's pages do not fit this configuration.
    #[error("cannot take over the pages of the former daemon: {0}")]
    Kept(String),
}

/// The range of the page map's bytes that holds the entries of these pages of a pool, in whole
/// pages of memory. A keeper must lock that range.
pub fn map_bytes_of(pages: &std::ops::Range<u32>) -> std::ops::Range<u64> {
    let (offset, bytes) = map::words(pages);
    let [start, end] = [offset / PAGE_SIZE, (offset + bytes).div_ceil(PAGE_SIZE)];
    (start * PAGE_SIZE) as u64..(end * PAGE_SIZE) as u64
}

fn pages_as_size(pages: u32) -> ByteSize {
    ByteSize(u64::from(pages) * PAGE_SIZE as u64)
}

/// Stores, and the map of the pages in them, for any number of [volumes](Volume).
pub struct Pool {
    config: Config,
    map: Map,
    /// The page numbers of each volume. Of all lanes only movers take this lock. Any other lane
    /// uses pages of one volume, whose range stays while the lane holds the volume.
    ranges: Mutex<Ranges>,
    /// The lock of whoever changes a volume's size. It can be held for long, since the change takes
    /// memory and waits for the keeper.
    changing: Mutex<()>,
    tiers: Vec<Tier>,
    epochs: Epochs,
    seats: Seats,
    /// Number of pages for which the pool promises no slot.
    vacant: AtomicU32,
    /// Whether there is a lender.
    lending: AtomicBool,
    /// The algorithm by which lanes compress, if they do.
    compression: OnceLock<Compression>,
    /// The clock that times sampled operations.
    stopwatch: OnceLock<fn() -> Instant>,
    /// Number of dropped lanes that still have their seats.
    closing: AtomicUsize,
    /// The callback that is told when pages have left packs.
    when_left: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// A store and its records.
struct Tier {
    store: Arc<dyn Store>,
    records: Records,
    quarantine: Quarantine,
    members: Members,
}

impl Tier {
    fn new(store: Arc<dyn Store>, records: Records) -> Self {
        let members = Members::of(&*store);
        Tier { store, records, quarantine: Quarantine::default(), members }
    }
}

impl Pool {
    /// Makes a pool over `stores`, which are filled in this order. It has no volume yet.
    ///
    /// # Errors
    /// Fails when the stores are too small for [`Config::slots`], or memory is missing for map and
    /// records.
    pub fn create(config: Config, stores: Vec<Arc<dyn Store>>) -> Result<Arc<Self>, CreateError> {
        check(&config, &stores)?;
        let bytes = 8 * stores.iter().map(|store| u64::from(store.slots())).sum::<u64>();
        let memory = |source| CreateError::Memory { bytes, source };
        let map = Map::new().map_err(CreateError::Space)?;
        let records: Result<Vec<_>, _> =
            stores.iter().map(|store| Records::new(store.slots(), chunks::count(&**store))).collect();
        let tiers = stores
            .into_iter()
            .zip(records.map_err(memory)?)
            .map(|(store, records)| Tier::new(store, records));
        Ok(Self::assemble(config, map, tiers.collect()))
    }

    fn assemble(config: Config, map: Map, tiers: Vec<Tier>) -> Arc<Self> {
        Arc::new(Pool {
            config,
            map,
            ranges: Mutex::default(),
            changing: Mutex::default(),
            tiers,
            epochs: Epochs::new(),
            seats: Seats::new(config.slack()),
            vacant: AtomicU32::new(0),
            lending: AtomicBool::new(false),
            compression: OnceLock::new(),
            stopwatch: OnceLock::new(),
            closing: AtomicUsize::new(0),
            when_left: OnceLock::new(),
        })
    }

    /// The pool's configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Number of pages of all volumes together.
    pub fn pages(&self) -> u32 {
        self.ranges().pages()
    }

    /// From now on lanes compress pages, if several of them then fit into one slot. Call this
    /// before the first lane is opened.
    ///
    /// # Panics
    /// Panics when a lane is open.
    pub fn compress(&self, compression: Compression) {
        let open = self.seats.iter().any(LaneSeat::is_taken);
        assert!(!open, "a lane that is open would not understand what others have compressed");
        self.tiers.iter().for_each(|tier| tier.records.begin_packs());
        let _ = self.compression.set(compression);
    }

    /// The compression algorithm, if pages are compressed.
    pub fn compression(&self) -> Option<Compression> {
        self.compression.get().copied()
    }

    /// From now on the pool times a sample of the operations by `clock`, for the latencies in
    /// [`status`](Pool::status). A pool has no clock of its own, so without this call none is
    /// timed. Only the first call counts.
    pub fn time_with(&self, clock: fn() -> Instant) {
        let _ = self.stopwatch.set(clock);
    }

    /// Takes slots of the slack, for a lane's writes under way or for pages that are lent.
    pub(crate) fn take_slack(&self, wanted: u32) -> Result<(), OpenError> {
        let take = || self.seats.take_slack(wanted);
        let taken = take().or_else(|left| match self.stopwatch.get() {
            // A dropped lane gives its slack back once the stores have finished its operations.
            Some(clock) => {
                self.close_lanes(clock());
                take()
            }
            None => Err(left),
        });
        taken.map_err(|left| {
            let [asked, left_size, all] = [wanted, left, self.config.slack()].map(pages_as_size);
            let what = format!(
                "{asked} for writes under way are wanted, and {left_size} of {all} are left: close a connection or thread, or configure more"
            );
            OpenError::new(OpenErrorKind::Slack { wanted, left }, "volume", what)
        })
    }

    fn release_seat(&self, seat: usize) {
        self.seats.release(seat);
        self.seats.give_slack(self.config.lane_slots());
    }

    /// The pool's stores, in order.
    pub fn stores(&self) -> impl Iterator<Item = &Arc<dyn Store>> {
        self.tiers.iter().map(|tier| &tier.store)
    }

    /// Bytes of the page map's memory.
    pub fn map_bytes(&self) -> u64 {
        8 * self.ranges().words() + self.map.refused()
    }

    /// Bytes of the page map that the system refused to take back so far.
    pub fn map_bytes_refused(&self) -> u64 {
        self.map.refused()
    }

    /// Bytes of memory that the pool takes besides its stores: page map, slot records and their
    /// counts.
    pub fn memory_bytes(&self) -> u64 {
        let records =
            self.tiers.iter().map(|tier| tier.records.memory().len() + tier.records.overhead_bytes());
        self.map_bytes() + records.sum::<usize>() as u64
    }

    /// Whether map and records are locked in RAM, as they must be for a swap device.
    pub fn is_locked(&self) -> bool {
        self.map.memory().is_locked() && self.tiers.iter().all(|tier| tier.records.memory().is_locked())
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stores: Vec<_> = self.tiers.iter().map(|tier| tier.store.name()).collect();
        write!(f, "Pool({} over {stores:?})", pages_as_size(self.config.pages))
    }
}

fn check(config: &Config, stores: &[Arc<dyn Store>]) -> Result<(), CreateError> {
    let pages = config.pages;
    if pages == 0 || pages > PAGES_MAX || stores.is_empty() || stores.len() > entry::STORES_MAX {
        return Err(CreateError::Shape { pages, stores: stores.len() });
    }
    let available = stores.iter().fold(0u32, |sum, store| sum.saturating_add(store.slots()));
    let needed = config.slots();
    if needed > available {
        return Err(CreateError::TooLarge { pages, needed, available });
    }
    Ok(())
}
