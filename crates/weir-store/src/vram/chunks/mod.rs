//! Chunks: where each lies, and how one is taken away while lanes are at work.
//!
//! A lane looks up a chunk's address with one load and then uses it for some hundred nanoseconds
//! (mapped) or until its completion (queued). Taking a chunk away therefore is: withdraw the
//! address, wait until every lane that may have seen it is done, clear the memory, free it. A lane
//! says what it uses in its [`Pin`], a hazard pointer (Michael, 2004) for what it does at once and
//! a pair of counters for what it has in flight; both are plain stores, and [`membarrier`] makes
//! them visible in time.

mod hot;
mod memory;

pub use hot::{Hot, LANES_MAX, Pin, Site, Way};
pub use memory::{Memory, Source};

use super::engine::Context;
use super::{Trouble, membarrier};
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a chunk that is being released waits for lanes that use it.
const QUIESCE_LIMIT: Duration = Duration::from_secs(2);

/// Every chunk of a store.
#[derive(Debug)]
pub struct Chunks {
    hot: Arc<Hot>,
    /// The memory behind each chunk's place.
    memory: Box<[Mutex<Option<Memory>>]>,
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

    /// The state that operations read.
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
        // By what lanes see: nobody who asks waits for a chunk that is being imported or taken
        // away.
        self.hot.places().iter().filter(|place| place.is_shown()).count()
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

    /// Lanes that moved pages since the last call with the same `seen`, and how many of them write
    /// neighbours.
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

    /// Lanes that are inside the driver now: which, and for the how-manieth time.
    pub fn inside(&self) -> impl Iterator<Item = (usize, u32)> {
        let inside = |pin: &Pin| pin.inside.load(Ordering::Relaxed);
        self.used().iter().map(inside).enumerate().filter(|(_, count)| count % 2 == 1)
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

    /// Where a chunk's mapped memory begins, until [`unhold`](Self::unhold); meanwhile the chunk
    /// cannot be taken away.
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

    /// Has CUDA see a chunk's memory, if there is any that it does not see. Lanes may use it the
    /// other way meanwhile.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn import(&self, chunk: usize, cuda: &Arc<Context>) -> Result<(), Trouble> {
        let mut held = self.held_memory(chunk);
        let Some(memory) = held.as_mut() else { return Ok(()) };
        memory.import(cuda)?;
        self.show(chunk, memory.host(), memory.device());
        Ok(())
    }

    /// CUDA will not come, so no lane has used its view of any chunk: lets go of that.
    pub fn without_cuda(&self) {
        for chunk in 0..self.count() {
            if let Some(memory) = self.held_memory(chunk).as_mut() {
                memory.forget_cuda();
                self.show(chunk, memory.host(), 0);
            }
        }
    }

    /// Whether no lane has anything in flight by a way that answers later.
    pub fn is_settled(&self) -> bool {
        self.hot.pins().iter().all(|pin| {
            (0..2).all(|way| {
                pin.finished[way].load(Ordering::Acquire) >= pin.queued[way].load(Ordering::Acquire)
            })
        })
    }

    /// Whether the chunk has memory.
    pub fn has(&self, chunk: usize) -> bool {
        self.held_memory(chunk).is_some()
    }

    /// Bytes of a chunk as the driver rounded them; `None` while no chunk has memory.
    pub fn allocation_bytes(&self) -> Option<u64> {
        (0..self.count()).find_map(|chunk| Some(self.held_memory(chunk).as_ref()?.allocation_bytes()))
    }

    /// Takes a chunk's memory away, once no lane uses it; still holding what was in it. `Ok(None)`:
    /// it had none.
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
