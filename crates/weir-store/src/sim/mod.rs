//! `sim:`: a simulated store. Its URL says which faults it has, and a seed decides when they come.
//! Such a store shows that the rest of Weir survives a bad store.
//!
//! The store fails as hardware does. Operations report an error. Writes are acknowledged and not
//! done, or done wrong. Operations overtake one another. The whole store is suddenly lost. The
//! store counts its faults, so that a test can compare them with the counters of the store's user.

mod chance;
mod lane;
mod url;

pub use url::SimUrl;

use crate::{Fault, Keep, Lane, OpenError, OpenErrorKind, Reclaim, State, Store, Survive};
use lane::SimLane;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use weir_core::{PAGE_SIZE, PageBytes, Slot};

/// A simulated store, which fails as its [`SimUrl`] says.
#[derive(Debug)]
pub struct Sim {
    name: String,
    lanes: AtomicU64,
    shared: Arc<Shared>,
}

/// The number of faults of each kind that a [`Sim`] has injected since it was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Injected {
    /// Number of reads that failed with EIO.
    pub read_errors: u64,
    /// Number of writes that failed with EIO.
    pub write_errors: u64,
    /// Number of writes that were acknowledged and stored with a flipped bit.
    pub corrupt_writes: u64,
    /// Number of writes that were acknowledged and not done.
    pub lost_writes: u64,
    /// Number of reads that succeeded with another content than the last acknowledged write's: a
    /// checksum must notice each.
    pub damaged_reads: u64,
    /// Operations that found the store gone.
    pub gone: u64,
    /// Operations that found their chunk released: a mistake of the store's user.
    pub released: u64,
}

/// The damage to a slot's content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Damage {
    /// A bit of the content differs from the written page.
    Corrupt,
    /// The content is that of an earlier write: the last acknowledged write was not done.
    Stale,
}

struct Cell {
    page: PageBytes,
    damage: Option<Damage>,
    /// Whether the slot holds zeros, whatever is in `page`: its chunk was released.
    is_blank: bool,
}

impl Cell {
    fn of(page: PageBytes) -> Self {
        Cell { page, damage: None, is_blank: false }
    }

    /// The content of the slot.
    fn page(&mut self) -> &mut PageBytes {
        if std::mem::take(&mut self.is_blank) {
            self.page = [0; PAGE_SIZE];
        }
        &mut self.page
    }
}

struct Shared {
    url: SimUrl,
    /// Each slot has a lock: a simulated store may be slow, and needs no unsafe code.
    cells: Box<[Mutex<Cell>]>,
    chunk_slots: u32,
    released: Box<[AtomicBool]>,
    operations: AtomicU64,
    lost: AtomicBool,
    /// Whether submitted writes of a dropped lane will land later.
    outlives_lanes: AtomicBool,
    /// Whether the store hangs: no operation finishes.
    hangs: AtomicBool,
    is_away: AtomicBool,
    fails_flushes: AtomicBool,
    drains: AtomicBool,
    orphans: Mutex<Vec<(Slot, PageBytes)>>,
    /// The contents of each slot that was written since the last flush, the oldest first; `None`:
    /// not recorded.
    unflushed: Mutex<Option<BTreeMap<u32, Vec<PageBytes>>>>,
    counts: Counts,
}

#[derive(Default)]
struct Counts {
    read_errors: AtomicU64,
    write_errors: AtomicU64,
    corrupt_writes: AtomicU64,
    lost_writes: AtomicU64,
    damaged_reads: AtomicU64,
    gone: AtomicU64,
    released: AtomicU64,
}

impl Sim {
    /// Opens a store as `url` says, full of zeros.
    ///
    /// # Errors
    /// Fails when there is no memory for the slots, or when the size of a chunk is invalid.
    pub fn open(url: SimUrl) -> Result<Self, OpenError> {
        let name = url.to_string();
        let slots = (url.size.0 / PAGE_SIZE as u64) as usize;
        let chunk_slots = (url.chunk.unwrap_or(url.size).0 / PAGE_SIZE as u64).min(slots as u64) as u32;
        if slots == 0 || chunk_slots == 0 {
            return Err(OpenError::new(
                OpenErrorKind::Layout,
                name,
                "size and chunk must hold a page at least",
            ));
        }
        let mut cells = Vec::new();
        if cells.try_reserve_exact(slots).is_err() {
            return Err(OpenError::no_memory(name, url.size.0, std::io::ErrorKind::OutOfMemory));
        }
        cells.resize_with(slots, || Mutex::new(Cell::of([0; PAGE_SIZE])));
        let chunks = (slots as u32).div_ceil(chunk_slots);
        let shared = Shared {
            url,
            cells: cells.into(),
            chunk_slots,
            released: (0..chunks).map(|_| AtomicBool::new(false)).collect(),
            operations: AtomicU64::new(0),
            lost: AtomicBool::new(false),
            outlives_lanes: AtomicBool::new(false),
            hangs: AtomicBool::new(false),
            is_away: AtomicBool::new(false),
            fails_flushes: AtomicBool::new(false),
            drains: AtomicBool::new(false),
            orphans: Mutex::default(),
            unflushed: Mutex::default(),
            counts: Counts::default(),
        };
        Ok(Sim { name, lanes: AtomicU64::new(0), shared: Arc::new(shared) })
    }

    /// The faults injected so far.
    pub fn injected(&self) -> Injected {
        let counts = &self.shared.counts;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Injected {
            read_errors: read(&counts.read_errors),
            write_errors: read(&counts.write_errors),
            corrupt_writes: read(&counts.corrupt_writes),
            lost_writes: read(&counts.lost_writes),
            damaged_reads: read(&counts.damaged_reads),
            gone: read(&counts.gone),
            released: read(&counts.released),
        }
    }

    /// Whether the store has the memory of a chunk.
    pub fn holds(&self, chunk: u32) -> bool {
        let released = self.shared.released.get(chunk as usize);
        released.is_some_and(|released| !released.load(Ordering::SeqCst))
    }

    /// Returns how the present content of `slot` is damaged, or `None` if it is not.
    pub fn damage(&self, slot: Slot) -> Option<Damage> {
        self.shared.cells.get(slot.0 as usize).and_then(|cell| hold(cell).damage)
    }

    /// With `true`, submitted writes of a dropped lane stay under way until [`land`](Sim::land)
    /// completes them, as a disk does with the writes of a killed process. With `false` they are
    /// never done.
    pub fn let_writes_outlive_lanes(&self, outlive: bool) {
        self.shared.outlives_lanes.store(outlive, Ordering::SeqCst);
    }

    /// Number of writes of dropped lanes that have not landed yet.
    pub fn orphans(&self) -> usize {
        hold(&self.shared.orphans).len()
    }

    /// Completes a write of a lane that was dropped before the write finished. `at` is its index
    /// among all such writes.
    pub fn land(&self, at: usize) {
        let (slot, page) = hold(&self.shared.orphans).swap_remove(at);
        if !self.shared.is_lost() {
            *hold(&self.shared.cells[slot.0 as usize]).page() = page;
        }
    }

    /// From here on the store acts as a disk with a cache that a power failure empties; see
    /// [`cut_power`](Sim::cut_power).
    pub fn forget_without_power(&self) {
        *hold(&self.shared.unflushed) = Some(BTreeMap::new());
    }

    /// Cuts the power. Each slot written since the last flush then holds one of its contents since
    /// that flush. For each slot, `choose` gets the number of contents, and returns the index of
    /// one.
    pub fn cut_power(&self, choose: &mut dyn FnMut(usize) -> usize) {
        let Some(unflushed) = &mut *hold(&self.shared.unflushed) else { return };
        for (slot, contents) in std::mem::take(unflushed) {
            let page = contents[choose(contents.len())];
            *hold(&self.shared.cells[slot as usize]) = Cell::of(page);
        }
    }

    /// Cuts the power, and tears pages. Each slot written since the last flush then holds one of
    /// its contents since that flush, or a mixture of them by sectors of 512 bytes. A slot's
    /// contents include those of dropped lanes' writes that are still under way. `choose` gets a
    /// number of possibilities, and returns the index of one.
    pub fn tear_power(&self, choose: &mut dyn FnMut(usize) -> usize) {
        let Some(unflushed) = &mut *hold(&self.shared.unflushed) else { return };
        for (slot, page) in std::mem::take(&mut *hold(&self.shared.orphans)) {
            let before = *hold(&self.shared.cells[slot.0 as usize]).page();
            unflushed.entry(slot.0).or_insert_with(|| vec![before]).push(page);
        }
        for (slot, contents) in std::mem::take(unflushed) {
            let mut page = contents[0];
            match contents.get(choose(contents.len() + 1)) {
                Some(content) => page = *content,
                None => {
                    for at in (0..PAGE_SIZE).step_by(512) {
                        let sector = at..at + 512;
                        page[sector.clone()].copy_from_slice(&contents[choose(contents.len())][sector]);
                    }
                }
            }
            *hold(&self.shared.cells[slot as usize]) = Cell::of(page);
        }
    }

    /// With `true`, flushes fail from here on.
    pub fn fail_flushes(&self, fail: bool) {
        self.shared.fails_flushes.store(fail, Ordering::SeqCst);
    }

    /// Changes the content of a slot, as a disk does whose content decays.
    pub fn change(&self, slot: Slot, change: impl FnOnce(&mut PageBytes)) {
        change(hold(&self.shared.cells[slot.0 as usize]).page());
    }

    /// Sets whether the store hangs, as a disk does that retries. While it hangs, operations that
    /// are due end with [`Fault::Timeout`], and the writes among them land afterwards. Only a store
    /// with a `delay` or a `latency` can hang: without them every operation is done at once.
    pub fn hang(&self, hangs: bool) {
        self.shared.hangs.store(hangs, Ordering::SeqCst);
    }

    /// Sets whether the store is out of reach: then it is [`State::Unreachable`], and it
    /// [hangs](Sim::hang).
    pub fn part(&self, is_away: bool) {
        self.shared.is_away.store(is_away, Ordering::SeqCst);
        self.hang(is_away);
    }

    /// Sets whether the owner of the store's memory wants it back. If so, the store is
    /// [`State::Draining`].
    pub fn drain(&self, drains: bool) {
        self.shared.drains.store(drains, Ordering::SeqCst);
    }

    /// Loses the store now, with all its pages.
    pub fn kill(&self) {
        self.shared.lost.store(true, Ordering::SeqCst);
    }
}

impl Store for Sim {
    fn name(&self) -> &str {
        &self.name
    }

    fn slots(&self) -> u32 {
        self.shared.cells.len() as u32
    }

    fn lane(&self, depth: usize) -> Result<Box<dyn Lane>, OpenError> {
        let number = self.lanes.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(SimLane::new(Arc::clone(&self.shared), number, depth)))
    }

    fn state(&self, _member: u32) -> State {
        match () {
            () if self.shared.is_lost() => State::Lost,
            () if self.shared.is_away.load(Ordering::SeqCst) => State::Unreachable,
            () if self.shared.drains.load(Ordering::SeqCst) => State::Draining,
            () => State::Online,
        }
    }

    fn unfit_for_swap(&self) -> Option<String> {
        None
    }

    fn reclaim(&self) -> Option<&dyn Reclaim> {
        Some(self)
    }

    fn survive(&self) -> Option<&dyn Survive> {
        Some(self)
    }
}

/// A simulated daemon ends while its process lives on. So a simulated store survives it without a
/// keeper.
impl Survive for Sim {
    /// Does nothing, since a keeper cannot hold a simulated store.
    fn keep_with(&self, _keep: Arc<dyn Keep>, _held: bool) -> std::io::Result<()> {
        Ok(())
    }

    fn is_quiet(&self) -> bool {
        self.orphans() == 0
    }

    fn forget(&self) {}
}

impl Reclaim for Sim {
    fn chunk_slots(&self) -> u32 {
        self.shared.chunk_slots
    }

    fn release(&self, chunk: u32) -> Result<(), Fault> {
        let cells = self.shared.chunk(chunk)?;
        self.shared.released[chunk as usize].store(true, Ordering::SeqCst);
        for cell in cells {
            let mut cell = hold(cell);
            (cell.damage, cell.is_blank) = (None, true);
        }
        Ok(())
    }

    fn take(&self, chunk: u32) -> Result<(), Fault> {
        self.shared.chunk(chunk)?;
        self.shared.released[chunk as usize].store(false, Ordering::SeqCst);
        Ok(())
    }
}

impl Shared {
    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::SeqCst)
    }

    /// The content of a slot. Fails if the store or the slot's chunk is gone.
    fn cell(&self, slot: Slot) -> Result<&Mutex<Cell>, Fault> {
        let gone = |count: &AtomicU64| {
            count.fetch_add(1, Ordering::Relaxed);
            Fault::Lost
        };
        if self.is_lost() {
            return Err(gone(&self.counts.gone));
        }
        let chunk = self.released.get((slot.0 / self.chunk_slots) as usize);
        let released = chunk.is_none_or(|released| released.load(Ordering::SeqCst));
        let cell = self.cells.get(slot.0 as usize).filter(|_| !released);
        cell.ok_or_else(|| gone(&self.counts.released))
    }

    fn chunk(&self, chunk: u32) -> Result<&[Mutex<Cell>], Fault> {
        let first = chunk as usize * self.chunk_slots as usize;
        let end = (first + self.chunk_slots as usize).min(self.cells.len());
        if self.is_lost() || first >= end { Err(Fault::Lost) } else { Ok(&self.cells[first..end]) }
    }

    /// Counts an operation. After as many as the URL says, loses the store, or panics.
    fn count_operation(&self) {
        let earlier = self.operations.fetch_add(1, Ordering::Relaxed);
        if self.url.die_after.is_some_and(|limit| earlier >= limit) {
            self.lost.store(true, Ordering::SeqCst);
        }
        assert!(self.url.panic_after.is_none_or(|limit| earlier < limit), "as the store's URL says");
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.url)
    }
}

/// Locks a cell even after a panic in another thread: a cell's content is replaced as a whole, so
/// it is never torn.
fn hold<T>(cell: &Mutex<T>) -> MutexGuard<'_, T> {
    cell.lock().unwrap_or_else(PoisonError::into_inner)
}
