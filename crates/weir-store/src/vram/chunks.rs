//! Chunks: where each lies, and how one is taken away while lanes are at work.
//!
//! A lane looks up a chunk's address with one load and then uses it for some hundred nanoseconds (mapped) or until
//! its completion (queued). Taking a chunk away therefore is: withdraw the address, wait until every lane that may
//! have seen it is done, clear the memory, free it. A lane says what it uses in its [`Pin`], a hazard pointer
//! (Michael, 2004) for what it does at once and a pair of counters for what it has in flight; both are plain
//! stores, and [`membarrier`] makes them visible in time.

use super::engine::{Context, DeviceMemory};
use super::mapped::copy::prefetch_lines;
use super::mapped::{Allocation, Device};
use super::table::Path;
use super::{Trouble, membarrier};
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering, compiler_fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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

impl Source {
    /// Takes over memory that another process allocated in the same way and that `fd` keeps alive.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn adopt(&self, fd: OwnedFd, bytes: u64) -> Result<Memory, Trouble> {
        let Some(gpu) = &self.gpu else {
            let cuda = self.cuda.as_ref().ok_or(Trouble::NoDriver)?;
            return Ok(Memory { device: Some(cuda.adopt(&fd, bytes)?), mapped: None });
        };
        // An import owns its descriptor, so each gets one.
        let second = match &self.cuda {
            Some(cuda) => Some((cuda, fd.try_clone().map_err(|_| Trouble::NoDriver)?)),
            None => None,
        };
        let mapped = gpu.adopt(fd, bytes)?;
        let device = match second {
            Some((cuda, fd)) => Some(cuda.import(fd, mapped.bytes)?),
            None => None,
        };
        Ok(Memory { device, mapped: Some(mapped) })
    }
}

impl Memory {
    /// Bytes as the driver rounded them.
    pub fn allocation_bytes(&self) -> u64 {
        let device = self.device.as_ref().map_or(0, |device| device.bytes);
        self.mapped.as_ref().map_or(device, |mapped| mapped.bytes)
    }

    /// Where the processor sees it; null where it does not.
    pub fn host(&self) -> *mut u8 {
        let host = self.mapped.as_ref().and_then(Allocation::host);
        host.map_or(ptr::null_mut(), NonNull::as_ptr)
    }

    /// Where the card sees it: an address for CUDA, a buffer for a transfer queue; 0 if only the processor sees it.
    pub fn device(&self) -> u64 {
        match (&self.device, &self.mapped) {
            (Some(device), _) => device.address,
            (None, Some(mapped)) if mapped.host().is_none() => mapped.buffer(),
            _ => 0,
        }
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
    hot: Arc<Hot>,
    /// What each chunk's place leads to.
    memory: Box<[Mutex<Option<Memory>>]>,
}

/// All that operations look at, in one piece of memory. After a pause every page of memory that is touched costs a walk of the
/// page tables, which is more than the line in it: so this is one huge page where the kernel grants one.
#[derive(Debug)]
pub struct Hot {
    memory: weir_core::Memory,
    /// log2 of the slots in a chunk.
    shift: u32,
    chunks: u32,
}

/// What concerns every chunk.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct Gate {
    /// The card is gone.
    pub lost: AtomicBool,
    /// The resident kernel is on the card. To be believed for a choice of path only: the ring has its own protocol.
    pub resident: AtomicBool,
    /// The watching thread sleeps for long: whoever moves a page wakes it.
    pub asleep: AtomicBool,
    /// Pins that were ever open: those at and above this were not.
    pins_used: AtomicU32,
}

/// Where a chunk is; null and 0 where it is not.
#[derive(Debug)]
struct Place {
    host: AtomicPtr<u8>,
    device: AtomicU64,
}

/// What one lane uses.
#[repr(C, align(128))]
#[derive(Debug)]
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
    /// Those of the other paths that were written.
    sent: AtomicU64,
    /// What it writes are neighbours.
    runs: AtomicBool,
}

impl Hot {
    /// Bytes of a huge page; there is room for sixty thousand chunks beside the pins.
    const BYTES: usize = 2 << 20;

    fn new(chunks: usize, slots: u32) -> io::Result<Arc<Self>> {
        let used = size_of::<Gate>() + size_of::<Pin>() * LANES_MAX + size_of::<Place>() * chunks;
        let memory = weir_core::Memory::anonymous(used.max(Self::BYTES))?;
        Ok(Arc::new(Hot { memory, shift: slots.ilog2(), chunks: chunks as u32 }))
    }

    /// What concerns every chunk.
    #[inline]
    pub fn gate(&self) -> &Gate {
        // SAFETY: the memory begins with the gate; all of it is atomics, for which zeros are right, and it is aligned to a
        // page and lives as long as `self`.
        unsafe { &*self.memory.as_ptr().cast::<Gate>() }
    }

    #[inline]
    fn pins(&self) -> &[Pin] {
        // SAFETY: as above; the pins follow the gate, whose size is a multiple of their alignment.
        unsafe {
            std::slice::from_raw_parts(self.memory.as_ptr().add(size_of::<Gate>()).cast::<Pin>(), LANES_MAX)
        }
    }

    #[inline]
    fn places(&self) -> &[Place] {
        let offset = size_of::<Gate>() + size_of::<Pin>() * LANES_MAX;
        // SAFETY: as above; the places follow the pins.
        unsafe {
            std::slice::from_raw_parts(self.memory.as_ptr().add(offset).cast::<Place>(), self.chunks as usize)
        }
    }

    /// The pin at `index`.
    #[inline]
    pub fn pin(&self, index: usize) -> &Pin {
        &self.pins()[index]
    }

    /// What the lane with the pin at `index` needs of all this, in one line.
    pub fn site(self: &Arc<Self>, index: usize) -> Site {
        let places = NonNull::from(self.places()).cast();
        let (gate, pin) = (NonNull::from(self.gate()), NonNull::from(self.pin(index)));
        Site { gate, pin, places, chunks: self.chunks, shift: self.shift, _hot: Arc::clone(self) }
    }
}

/// One lane's view of [`Hot`]: addresses, so that nothing lies between it and what it leads to.
#[derive(Debug)]
pub struct Site {
    gate: NonNull<Gate>,
    pin: NonNull<Pin>,
    places: NonNull<Place>,
    chunks: u32,
    shift: u32,
    /// Keeps what the addresses lead to.
    _hot: Arc<Hot>,
}

// SAFETY: everything behind the addresses is atomics, and `_hot` keeps it.
unsafe impl Send for Site {}

impl Site {
    /// What concerns every chunk.
    #[inline]
    pub fn gate(&self) -> &Gate {
        // SAFETY: `_hot` keeps it.
        unsafe { self.gate.as_ref() }
    }

    /// Starts to bring near what an operation touches.
    #[inline]
    pub fn prefetch(&self) {
        prefetch_lines(self.gate.as_ptr().cast(), 1);
        prefetch_lines(self.pin.as_ptr().cast(), 2);
        prefetch_lines(self.places.as_ptr().cast(), 1);
    }

    /// This lane's pin.
    #[inline]
    pub fn pin(&self) -> &Pin {
        // SAFETY: `_hot` keeps it.
        unsafe { self.pin.as_ref() }
    }

    #[inline]
    fn place(&self, slot: Slot) -> Option<(usize, &Place, usize)> {
        let (chunk, within) = (slot.0 >> self.shift, slot.0 as usize & ((1 << self.shift) - 1));
        // SAFETY: `_hot` keeps them, `chunks` of them.
        (chunk < self.chunks).then(|| unsafe {
            (chunk as usize, self.places.add(chunk as usize).as_ref(), within * PAGE_SIZE)
        })
    }

    /// Calls `use_it` with the slot's address in the mapping, which stays valid until it returns. `None`: the
    /// chunk has no mapped memory.
    #[inline]
    pub fn with_host<T>(&self, slot: Slot, use_it: impl FnOnce(*mut u8) -> T) -> Option<T> {
        let (pin, (chunk, place, offset)) = (self.pin(), self.place(slot)?);
        pin.touching.store(chunk as u32 + 1, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        let host = place.host.load(Ordering::Acquire);
        // SAFETY: the chunk is at least `offset` and a page long.
        let result = (!host.is_null()).then(|| use_it(unsafe { host.add(offset) }));
        pin.touching.store(0, Ordering::Release);
        pin.count(Path::Mapped, 1);
        result
    }

    /// The slot's chunk on the card and its offset there, valid until the operation is counted as finished. `None`: the
    /// chunk has no memory, and nothing was counted.
    #[inline]
    pub fn begin(&self, way: Way, slot: Slot) -> Option<(u64, u64)> {
        let (pin, (_, place, offset)) = (self.pin(), self.place(slot)?);
        let (queued, way) = (pin.queued[way as usize].load(Ordering::Relaxed), way as usize);
        pin.queued[way].store(queued + 1, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        let device = place.device.load(Ordering::Acquire);
        if device == 0 {
            pin.queued[way].store(queued, Ordering::Relaxed);
            return None;
        }
        Some((device, offset as u64))
    }

    /// Takes back what [`begin`](Self::begin) counted: the operation goes another way.
    #[inline]
    pub fn cancel(&self, way: Way) {
        let queued = &self.pin().queued[way as usize];
        queued.store(queued.load(Ordering::Relaxed) - 1, Ordering::Release);
    }
}

impl Chunks {
    /// `count` chunks of `slots` slots each, a power of two, none of which has memory yet.
    ///
    /// # Errors
    /// When there is no host memory for what describes them.
    pub fn new(count: usize, slots: u32) -> io::Result<Self> {
        let memory = (0..count).map(|_| Mutex::new(None)).collect();
        Ok(Chunks { hot: Hot::new(count, slots)?, memory })
    }

    /// What operations look at.
    pub fn hot(&self) -> &Arc<Hot> {
        &self.hot
    }

    /// How many chunks there are, with memory or without.
    pub fn count(&self) -> usize {
        self.memory.len()
    }

    fn held_memory(&self, chunk: usize) -> MutexGuard<'_, Option<Memory>> {
        self.memory[chunk].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Chunks that have memory.
    pub fn held(&self) -> usize {
        (0..self.count()).filter(|&chunk| self.has(chunk)).count()
    }

    /// The pins that were ever open.
    fn used(&self) -> &[Pin] {
        &self.hot.pins()[..self.hot.gate().pins_used.load(Ordering::Acquire) as usize]
    }

    fn sum(&self, counter: impl Fn(&Pin) -> &AtomicU64) -> u64 {
        self.used().iter().map(|pin| counter(pin).load(Ordering::Relaxed)).sum()
    }

    /// Pages that all lanes ever moved, by path.
    pub fn pages(&self) -> [u64; 3] {
        [0, 1, 2].map(|path| self.sum(|pin| &pin.pages[path]))
    }

    /// Pages that all lanes ever wrote through the window, and by the other ways.
    pub fn written(&self) -> [u64; 2] {
        [self.sum(|pin| &pin.stored), self.sum(|pin| &pin.sent)]
    }

    /// Lanes that moved pages since the last call with the same `seen`, and how many of them write neighbours.
    pub fn busy(&self, seen: &mut [u64]) -> (usize, usize) {
        let (mut busy, mut runs) = (0, 0);
        for (pin, seen) in self.used().iter().zip(seen) {
            let pages = pin.pages.iter().map(|pages| pages.load(Ordering::Relaxed)).sum();
            if std::mem::replace(seen, pages) != pages {
                busy += 1;
                runs += usize::from(pin.runs.load(Ordering::Relaxed));
            }
        }
        (busy, runs)
    }

    /// A free pin, or `None` when [`LANES_MAX`] lanes are open.
    pub fn open_pin(&self) -> Option<usize> {
        let pin = self.hot.pins().iter().position(|pin| !pin.open.swap(true, Ordering::AcqRel))?;
        self.hot.gate().pins_used.fetch_max(pin as u32 + 1, Ordering::AcqRel);
        Some(pin)
    }

    /// The pin at `index`.
    pub fn pin(&self, index: usize) -> &Pin {
        self.hot.pin(index)
    }

    /// Where a chunk's mapped memory begins, until [`unhold`](Self::unhold); meanwhile the chunk cannot be taken away.
    pub fn hold(&self, pin: &Pin, chunk: usize) -> Option<NonNull<u8>> {
        let place = self.hot.places().get(chunk)?;
        pin.touching.store(chunk as u32 + 1, Ordering::Relaxed);
        membarrier::all_threads();
        let host = NonNull::new(place.host.load(Ordering::Acquire));
        if host.is_none() {
            self.unhold(pin);
        }
        host
    }

    /// Lets go of what [`hold`](Self::hold) gave.
    pub fn unhold(&self, pin: &Pin) {
        pin.touching.store(0, Ordering::Release);
    }

    fn show(&self, chunk: usize, host: *mut u8, device: u64) {
        let place = &self.hot.places()[chunk];
        place.host.store(host, Ordering::Release);
        place.device.store(device, Ordering::Release);
    }

    /// Gives a chunk memory. It may be used as soon as this returns.
    pub fn install(&self, chunk: usize, memory: Memory) {
        let mut held = self.held_memory(chunk);
        self.show(chunk, memory.host(), memory.device());
        *held = Some(memory);
    }

    /// Whether the chunk has memory.
    pub fn has(&self, chunk: usize) -> bool {
        self.held_memory(chunk).is_some()
    }

    /// Bytes of a chunk as the driver rounded them; `None` while no chunk has memory.
    pub fn allocation_bytes(&self) -> Option<u64> {
        (0..self.count()).find_map(|chunk| Some(self.held_memory(chunk).as_ref()?.allocation_bytes()))
    }

    /// Takes a chunk's memory away, once no lane uses it; still holding what was in it. `Ok(None)`: it had none.
    ///
    /// # Errors
    /// A lane did not finish what it has in flight. The chunk is as it was.
    pub fn withdraw(&self, chunk: usize) -> Result<Option<Memory>, Trouble> {
        let mut held = self.held_memory(chunk);
        let Some(memory) = held.as_ref() else { return Ok(None) };
        self.show(chunk, ptr::null_mut(), 0);
        membarrier::all_threads();
        let since = Instant::now();
        let in_use = |pin: &&Pin| pin.touching.load(Ordering::Acquire) == chunk as u32 + 1;
        for pin in self.hot.pins() {
            let queued = [0, 1].map(|way| pin.queued[way].load(Ordering::Acquire));
            let busy =
                || in_use(&pin) || (0..2).any(|way| pin.finished[way].load(Ordering::Acquire) < queued[way]);
            while pin.open.load(Ordering::Acquire) && busy() {
                if since.elapsed() > QUIESCE_LIMIT {
                    self.show(chunk, memory.host(), memory.device());
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
        self.held_memory(chunk).as_ref().map(Memory::export).transpose()
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

    /// Counts a write by another way.
    #[inline]
    pub fn count_sent(&self) {
        self.sent.store(self.sent.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Says whether this lane writes neighbours.
    #[inline]
    pub fn note_runs(&self, runs: bool) {
        self.runs.store(runs, Ordering::Relaxed);
    }

    /// The lane is closed: nothing of it is in flight any more.
    pub fn close(&self) {
        for way in 0..2 {
            self.finished[way].store(self.queued[way].load(Ordering::Relaxed), Ordering::Release);
        }
        self.open.store(false, Ordering::Release);
    }
}
