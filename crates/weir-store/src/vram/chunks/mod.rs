//! Chunks: the place of each, and how its memory is removed while lanes work.
//!
//! A lane loads a chunk's address once. It then uses the address for some hundred nanoseconds
//! (mapped), or until its completion (queued). Removing a chunk's memory has these steps: withdraw
//! the address, wait for every lane that may have seen it, clear the memory, free it. A lane notes
//! in its [`Pin`] what it uses. For mapped copies that is a hazard pointer (Michael, 2004), and for
//! operations in flight a pair of counters. Both are plain stores, and [`membarrier`] makes them
//! visible in time.

mod hot;
mod memory;

pub use hot::{Hot, LANES_MAX, Pin, Site, Way};
pub use memory::{ChunkMemory, Source};

use super::engine::Context;
use super::{Trouble, membarrier};
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Longest time that the release of a chunk waits for lanes that use it.
const QUIESCE_LIMIT: Duration = Duration::from_secs(2);

/// All chunks of a store.
#[derive(Debug)]
pub struct Chunks {
    hot: Arc<Hot>,
    /// The memory of each chunk.
    memory: Box<[Mutex<Option<ChunkMemory>>]>,
}

impl Chunks {
    /// Makes `count` chunks of `slots` slots each, a power of two, all without memory at first.
    ///
    /// # Errors
    /// Fails when there is no host memory for the tables.
    pub fn new(count: usize, slots: u32) -> io::Result<Self> {
        let memory = (0..count).map(|_| Mutex::new(None)).collect();
        Ok(Chunks { hot: Hot::new(count, slots)?, memory })
    }

    /// The state that operations read.
    pub fn hot(&self) -> &Arc<Hot> {
        &self.hot
    }

    /// Number of chunks, with memory or without.
    pub fn count(&self) -> usize {
        self.memory.len()
    }

    fn held_memory(&self, chunk: usize) -> MutexGuard<'_, Option<ChunkMemory>> {
        self.memory[chunk].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of chunks that have memory.
    pub fn held(&self) -> usize {
        // Count the addresses in the state that lanes read, which needs no lock. With a lock, the
        // caller would wait while a chunk is imported or removed.
        self.hot.places().iter().filter(|place| place.is_shown()).count()
    }

    /// All pins that were ever open. Those that are closed now will be used again.
    fn used(&self) -> &[Pin] {
        &self.hot.pins()[..self.hot.gate().pins_used.load(Ordering::Acquire) as usize]
    }

    fn sum(&self, counter: impl Fn(&Pin) -> &AtomicU64) -> u64 {
        self.used().iter().map(|pin| counter(pin).load(Ordering::Relaxed)).sum()
    }

    /// Number of pages that all lanes have moved, by path.
    pub fn pages(&self) -> [u64; 3] {
        [0, 1, 2].map(|path| self.sum(|pin| &pin.pages[path]))
    }

    /// Number of pages that all lanes have written through the window, and number of those written
    /// by engine or ring.
    pub fn written(&self) -> [u64; 2] {
        [self.sum(|pin| &pin.stored), self.sum(|pin| &pin.sent)]
    }

    /// Number of lanes that moved pages since the caller's last call, and how many of them write
    /// neighbours. `seen` carries each lane's count of pages from one call to the next.
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

    /// The lanes that are inside the driver now, each with a count that changes whenever the lane
    /// enters or leaves the driver.
    pub fn inside(&self) -> impl Iterator<Item = (usize, u32)> {
        let inside = |pin: &Pin| pin.inside.load(Ordering::Relaxed);
        self.used().iter().map(inside).enumerate().filter(|(_, count)| count % 2 == 1)
    }

    /// Takes a free pin; `None` if [`LANES_MAX`] lanes are open.
    pub fn open_pin(&self) -> Option<usize> {
        let pin = self.hot.pins().iter().position(|pin| !pin.open.swap(true, Ordering::AcqRel))?;
        self.hot.gate().pins_used.fetch_max(pin as u32 + 1, Ordering::AcqRel);
        Some(pin)
    }

    /// Pin number `index`: the chunks that one lane uses.
    pub fn pin(&self, index: usize) -> &Pin {
        self.hot.pin(index)
    }

    /// The address of a chunk's mapped memory. The chunk cannot be removed until
    /// [`unhold`](Self::unhold).
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

    /// Ends one [`hold`](Self::hold).
    pub fn unhold(&self, pin: &Pin) {
        pin.touching.store(0, Ordering::Release);
    }

    fn show(&self, chunk: usize, host: *mut u8, device: u64) {
        let place = &self.hot.places()[chunk];
        place.host.store(host, Ordering::Release);
        place.device.store(device, Ordering::Release);
    }

    /// Gives a chunk memory, which may be used as soon as this returns.
    pub fn install(&self, chunk: usize, memory: ChunkMemory) {
        let mut held = self.held_memory(chunk);
        self.show(chunk, memory.host(), memory.device());
        *held = Some(memory);
    }

    /// Makes CUDA import a chunk's memory, if it has not done so yet. Meanwhile lanes may use the
    /// chunk through the window.
    ///
    /// # Errors
    /// Fails with the driver's error.
    pub fn import(&self, chunk: usize, cuda: &Arc<Context>) -> Result<(), Trouble> {
        let mut held = self.held_memory(chunk);
        let Some(memory) = held.as_mut() else { return Ok(()) };
        memory.import(cuda)?;
        self.show(chunk, memory.host(), memory.device());
        Ok(())
    }

    /// Drops the descriptors that chunks keep for an import by CUDA, because CUDA cannot be opened.
    /// No lane has used CUDA so far.
    pub fn without_cuda(&self) {
        for chunk in 0..self.count() {
            if let Some(memory) = self.held_memory(chunk).as_mut() {
                memory.forget_cuda();
                self.show(chunk, memory.host(), 0);
            }
        }
    }

    /// Whether no lane has an operation in flight by engine or ring.
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

    /// Bytes of a chunk as the driver rounded them; `None` if no chunk has memory.
    pub fn allocation_bytes(&self) -> Option<u64> {
        (0..self.count()).find_map(|chunk| Some(self.held_memory(chunk).as_ref()?.allocation_bytes()))
    }

    /// Removes a chunk's memory, with its content, once no lane uses it. `Ok(None)`: the chunk had
    /// no memory.
    ///
    /// # Errors
    /// Fails when a lane did not finish its operations in flight. The chunk is unchanged then.
    pub fn withdraw(&self, chunk: usize) -> Result<Option<ChunkMemory>, Trouble> {
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

    /// Exports a descriptor of a chunk's memory; `Ok(None)` if the chunk has no memory.
    ///
    /// # Errors
    /// Fails with the driver's error.
    pub fn export(&self, chunk: usize) -> Result<Option<OwnedFd>, Trouble> {
        self.held_memory(chunk).as_ref().map(ChunkMemory::export).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::super::mapped::Device;
    use super::*;

    #[test]
    fn without_a_driver_there_is_no_memory_and_what_a_lane_uses_stays() {
        let error = Source::new(None, None).take(1 << 20).unwrap_err().to_string();
        assert_eq!(error, "neither Vulkan nor CUDA is there");
        let gpu = Device::find(0, true, false).expect("lavapipe, from mesa-vulkan-drivers");
        let source = Source::new(Some(Arc::new(gpu)), None);
        let chunks = Chunks::new(1, 256).unwrap();
        chunks.install(0, source.take(1 << 20).unwrap());
        let pin = chunks.pin(chunks.open_pin().unwrap());
        let address = chunks.hold(pin, 0).expect("it has memory");
        let error = chunks.withdraw(0).unwrap_err().to_string();
        assert_eq!(error, "a lane did not finish its operations in time");
        assert_eq!(chunks.hold(pin, 0), Some(address), "it is there as before");
        chunks.unhold(pin);
        assert!(chunks.withdraw(0).unwrap().is_some() && !chunks.has(0));
    }
}
