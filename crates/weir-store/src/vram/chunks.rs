//! Chunks: where each lies, and how one is taken away while lanes are at work.
//!
//! A lane looks up a chunk's address with one load and then uses it for some hundred nanoseconds (mapped) or until
//! its completion (queued). Taking a chunk away therefore is: withdraw the address, wait until every lane that may
//! have seen it is done, clear the memory, free it. A lane says what it uses in its [`Pin`], a hazard pointer
//! (Michael, 2004) for what it does at once and a pair of counters for what it has in flight; both are plain
//! stores, and [`membarrier`] makes them visible in time.

use super::engine::{Context, DeviceMemory};
use super::mapped::{Allocation, Device};
use super::table::Path;
use super::{Trouble, membarrier};
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering, compiler_fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, Slot};

/// Lanes that a store can have open at once.
pub const LANES_MAX: usize = 256;
/// How long a chunk that is being released waits for lanes that use it.
const QUIESCE_LIMIT: Duration = Duration::from_secs(2);

/// Where chunks' memory comes from.
#[derive(Debug)]
pub struct Source {
    /// Mapped memory, where Vulkan gives it.
    pub gpu: Option<Arc<Device>>,
    /// The card's engines, where CUDA is.
    pub cuda: Option<Arc<Context>>,
}

/// One chunk's memory; the engine's view of it is dropped before what it is a view of.
#[derive(Debug)]
pub struct Memory {
    device: Option<DeviceMemory>,
    mapped: Option<Allocation>,
}

impl Source {
    /// Takes `bytes` of device memory, mapped and imported as far as this machine can.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn take(&self, bytes: u64) -> Result<Memory, Trouble> {
        let Some(gpu) = &self.gpu else {
            let cuda = self.cuda.as_ref().ok_or(Trouble::NoDriver)?;
            return Ok(Memory { device: Some(cuda.allocate(bytes)?), mapped: None });
        };
        let mapped = gpu.allocate(bytes)?;
        let device = match &self.cuda {
            Some(cuda) => Some(cuda.import(mapped.export()?, mapped.bytes)?),
            None => None,
        };
        Ok(Memory { device, mapped: Some(mapped) })
    }
}

impl Memory {
    /// Where the processor sees it; null where it does not.
    pub fn host(&self) -> *mut u8 {
        self.mapped.as_ref().map_or(ptr::null_mut(), |mapped| mapped.host().as_ptr())
    }

    /// Where the card sees it; 0 without CUDA.
    pub fn device(&self) -> u64 {
        self.device.as_ref().map_or(0, |device| device.address)
    }

    /// Both parts, for an owner of its own.
    pub fn into_parts(self) -> (Option<DeviceMemory>, Option<Allocation>) {
        (self.device, self.mapped)
    }

    /// Overwrites it with zeros.
    ///
    /// # Errors
    /// When the card did not do it.
    pub fn clear(&self) -> Result<(), Trouble> {
        match (&self.mapped, &self.device) {
            (Some(mapped), _) => Ok(mapped.clear()?),
            (None, Some(device)) => Ok(device.clear()?),
            (None, None) => Ok(()),
        }
    }

    /// A descriptor that keeps it alive.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn export(&self) -> Result<OwnedFd, Trouble> {
        match (&self.mapped, &self.device) {
            (Some(mapped), _) => Ok(mapped.export()?),
            (None, Some(device)) => Ok(device.export()?),
            (None, None) => Err(Trouble::NoDriver),
        }
    }
}

/// Every chunk of a store.
#[derive(Debug)]
pub struct Chunks {
    /// log2 of the slots in a chunk.
    shift: u32,
    cells: Box<[Cell]>,
    pins: Box<[Pin]>,
}

#[derive(Debug, Default)]
struct Cell {
    host: AtomicPtr<u8>,
    device: AtomicU64,
    memory: Mutex<Option<Memory>>,
}

/// What one lane uses.
#[repr(align(128))]
#[derive(Debug, Default)]
pub struct Pin {
    /// A lane has it.
    open: AtomicBool,
    /// The chunk it touches right now, plus 1.
    touching: AtomicU32,
    /// Operations ever queued and ever handed over, by engine and by ring; each pair in the same order.
    queued: [AtomicU64; 2],
    finished: [AtomicU64; 2],
    /// Pages it ever moved, by path.
    pages: [AtomicU64; 3],
    /// Those of the mapped path that were written.
    stored: AtomicU64,
}

impl Chunks {
    /// `count` chunks of `slots` slots each, a power of two, none of which has memory yet.
    pub fn new(count: usize, slots: u32) -> Self {
        Chunks {
            shift: slots.ilog2(),
            cells: (0..count).map(|_| Cell::default()).collect(),
            pins: (0..LANES_MAX).map(|_| Pin::default()).collect(),
        }
    }

    /// How many chunks there are, with memory or without.
    pub fn count(&self) -> usize {
        self.cells.len()
    }

    /// Chunks that have memory.
    pub fn held(&self) -> usize {
        self.cells
            .iter()
            .filter(|cell| cell.memory.lock().unwrap_or_else(PoisonError::into_inner).is_some())
            .count()
    }

    /// Pages that all lanes ever moved, by path.
    pub fn pages(&self) -> [u64; 3] {
        [0, 1, 2].map(|path| self.pins.iter().map(|pin| pin.pages[path].load(Ordering::Relaxed)).sum())
    }

    /// Pages that all lanes ever wrote through the window.
    pub fn stored(&self) -> u64 {
        self.pins.iter().map(|pin| pin.stored.load(Ordering::Relaxed)).sum()
    }

    /// Lanes that moved pages since the last call with the same `seen`.
    pub fn busy(&self, seen: &mut [u64]) -> usize {
        let moved = |(pin, seen): (&Pin, &mut u64)| {
            let pages = pin.pages.iter().map(|pages| pages.load(Ordering::Relaxed)).sum();
            std::mem::replace(seen, pages) != pages
        };
        self.pins.iter().zip(seen).map(moved).filter(|&moved| moved).count()
    }

    /// A free pin, or `None` when [`LANES_MAX`] lanes are open.
    pub fn open_pin(&self) -> Option<usize> {
        self.pins.iter().position(|pin| !pin.open.swap(true, Ordering::AcqRel))
    }

    /// The pin at `index`.
    pub fn pin(&self, index: usize) -> &Pin {
        &self.pins[index]
    }

    fn split(&self, slot: Slot) -> (usize, usize) {
        ((slot.0 >> self.shift) as usize, (slot.0 as usize & ((1 << self.shift) - 1)) * PAGE_SIZE)
    }

    /// Calls `use_it` with the slot's address in the mapping, which stays valid until it returns. `None`: the
    /// chunk has no mapped memory.
    #[inline]
    pub fn with_host<T>(&self, pin: &Pin, slot: Slot, use_it: impl FnOnce(*mut u8) -> T) -> Option<T> {
        let (chunk, offset) = self.split(slot);
        let cell = self.cells.get(chunk)?;
        pin.touching.store(chunk as u32 + 1, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        let host = cell.host.load(Ordering::Acquire);
        // SAFETY: the chunk is at least `offset` and a page long.
        let result = (!host.is_null()).then(|| use_it(unsafe { host.add(offset) }));
        pin.touching.store(0, Ordering::Release);
        pin.count(Path::Mapped, 1);
        result
    }

    /// The slot's address on the card, valid until the operation is counted as finished. `None`: the chunk has no
    /// memory, and nothing was counted.
    #[inline]
    pub fn begin(&self, pin: &Pin, way: Way, slot: Slot) -> Option<u64> {
        let (chunk, offset) = self.split(slot);
        let cell = self.cells.get(chunk)?;
        let (queued, way) = (pin.queued[way as usize].load(Ordering::Relaxed), way as usize);
        pin.queued[way].store(queued + 1, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        let device = cell.device.load(Ordering::Acquire);
        if device == 0 {
            pin.queued[way].store(queued, Ordering::Relaxed);
            return None;
        }
        Some(device + offset as u64)
    }

    /// Takes back what [`begin`](Self::begin) counted: the operation goes another way.
    #[inline]
    pub fn cancel(&self, pin: &Pin, way: Way) {
        let queued = &pin.queued[way as usize];
        queued.store(queued.load(Ordering::Relaxed) - 1, Ordering::Release);
    }

    /// Gives a chunk memory. It may be used as soon as this returns.
    pub fn install(&self, chunk: usize, memory: Memory) {
        let cell = &self.cells[chunk];
        let mut held = cell.memory.lock().unwrap_or_else(PoisonError::into_inner);
        cell.host.store(memory.host(), Ordering::Release);
        cell.device.store(memory.device(), Ordering::Release);
        *held = Some(memory);
    }

    /// Whether the chunk has memory.
    pub fn has(&self, chunk: usize) -> bool {
        self.cells[chunk].memory.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Takes a chunk's memory away, once no lane uses it; still holding what was in it. `Ok(None)`: it had none.
    ///
    /// # Errors
    /// A lane did not finish what it has in flight. The chunk is as it was.
    pub fn withdraw(&self, chunk: usize) -> Result<Option<Memory>, Trouble> {
        let cell = &self.cells[chunk];
        let mut held = cell.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(memory) = held.as_ref() else { return Ok(None) };
        cell.host.store(ptr::null_mut(), Ordering::Release);
        cell.device.store(0, Ordering::Release);
        membarrier::all_threads();
        let since = Instant::now();
        let in_use = |pin: &&Pin| pin.touching.load(Ordering::Acquire) == chunk as u32 + 1;
        for pin in &self.pins {
            let queued = [0, 1].map(|way| pin.queued[way].load(Ordering::Acquire));
            let busy =
                || in_use(&pin) || (0..2).any(|way| pin.finished[way].load(Ordering::Acquire) < queued[way]);
            while pin.open.load(Ordering::Acquire) && busy() {
                if since.elapsed() > QUIESCE_LIMIT {
                    cell.host.store(memory.host(), Ordering::Release);
                    cell.device.store(memory.device(), Ordering::Release);
                    return Err(Trouble::LaneBusy);
                }
                std::thread::yield_now();
            }
        }
        Ok(held.take())
    }

    /// A descriptor of a chunk's memory; `Ok(None)` when it has none.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn export(&self, chunk: usize) -> Result<Option<OwnedFd>, Trouble> {
        let held = self.cells[chunk].memory.lock().unwrap_or_else(PoisonError::into_inner);
        held.as_ref().map(Memory::export).transpose()
    }
}

/// The two ways that answer later.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// Copy-engine batches.
    Engine = 0,
    /// The resident kernel.
    Ring = 1,
}

impl Pin {
    /// Counts operations as handed over.
    #[inline]
    pub fn finish(&self, way: Way, operations: u64) {
        let finished = &self.finished[way as usize];
        finished.store(finished.load(Ordering::Relaxed) + operations, Ordering::Release);
        self.count(if way == Way::Ring { Path::Ring } else { Path::Engine }, operations);
    }

    fn count(&self, path: Path, operations: u64) {
        let pages = &self.pages[path as usize];
        pages.store(pages.load(Ordering::Relaxed) + operations, Ordering::Relaxed);
    }

    /// Counts a write through the window.
    #[inline]
    pub fn count_stored(&self) {
        self.stored.store(self.stored.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// The lane is closed: nothing of it is in flight any more.
    pub fn close(&self) {
        for way in 0..2 {
            self.finished[way].store(self.queued[way].load(Ordering::Relaxed), Ordering::Release);
        }
        self.open.store(false, Ordering::Release);
    }
}
