//! The state that operations read: where chunks are, and which of them each lane uses.

use crate::vram::mapped::copy::prefetch_lines;
use crate::vram::table::Path;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering, compiler_fence};
use weir_core::{PAGE_SIZE, Slot};

/// Lanes that a store can have open at once.
pub const LANES_MAX: usize = 256;

/// All that operations look at, in one piece of memory. After a pause every page of memory that is
/// touched costs a walk of the page tables, which is more than the line in it: so this is one huge
/// page where the kernel grants one.
#[derive(Debug)]
pub struct Hot {
    memory: weir_core::Memory,
    /// log2 of the slots in a chunk.
    shift: u32,
    chunks: u32,
}

/// The state of all chunks together.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct Gate {
    /// The card is gone.
    pub lost: AtomicBool,
    /// The resident kernel is on the card. To be believed for a choice of path only: the ring has
    /// its own protocol.
    pub resident: AtomicBool,
    /// The watching thread sleeps for long: whoever moves a page wakes it.
    pub asleep: AtomicBool,
    /// The parts opened behind the first operations are there: lanes that wait for theirs
    /// have them.
    pub joined: AtomicBool,
    /// Pins that were ever open: those at and above this were not.
    pub(super) pins_used: AtomicU32,
}

/// The addresses of a chunk; null and 0 if it has none.
#[derive(Debug)]
pub(super) struct Place {
    pub host: AtomicPtr<u8>,
    pub device: AtomicU64,
}

impl Place {
    /// Whether there is memory.
    pub fn is_shown(&self) -> bool {
        !self.host.load(Ordering::Relaxed).is_null() || self.device.load(Ordering::Relaxed) != 0
    }
}

/// The chunks that one lane uses.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct Pin {
    /// A lane has it.
    pub(super) open: AtomicBool,
    /// The chunk it touches right now, plus 1.
    pub(super) touching: AtomicU32,
    /// Operations ever queued and ever handed over, by engine and by ring; each pair in the same
    /// order.
    pub(super) queued: [AtomicU64; 2],
    pub(super) finished: [AtomicU64; 2],
    /// Pages it ever moved, by path.
    pub(super) pages: [AtomicU64; 3],
    /// Those of the mapped path that were written.
    pub(super) stored: AtomicU64,
    /// Those of the other paths that were written.
    pub(super) sent: AtomicU64,
    /// Its writes go to neighbouring slots.
    pub(super) runs: AtomicBool,
    /// Odd while the lane is inside the driver; it counts.
    pub(super) inside: AtomicU32,
}

impl Hot {
    /// Bytes of a huge page; there is room for sixty thousand chunks beside the pins.
    const BYTES: usize = 2 << 20;

    pub(super) fn new(chunks: usize, slots: u32) -> io::Result<Arc<Self>> {
        let used = size_of::<Gate>() + size_of::<Pin>() * LANES_MAX + size_of::<Place>() * chunks;
        let memory = weir_core::Memory::anonymous(used.max(Self::BYTES))?;
        Ok(Arc::new(Hot { memory, shift: slots.ilog2(), chunks: chunks as u32 }))
    }

    /// The state of all chunks together.
    #[inline]
    pub fn gate(&self) -> &Gate {
        // SAFETY: the memory begins with the gate; all of it is atomics, for which zeros are right,
        // and it is aligned to a page and lives as long as `self`.
        unsafe { &*self.memory.as_ptr().cast::<Gate>() }
    }

    #[inline]
    pub(super) fn pins(&self) -> &[Pin] {
        // SAFETY: as above; the pins follow the gate, whose size is a multiple of their alignment.
        unsafe {
            std::slice::from_raw_parts(self.memory.as_ptr().add(size_of::<Gate>()).cast::<Pin>(), LANES_MAX)
        }
    }

    #[inline]
    pub(super) fn places(&self) -> &[Place] {
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

    /// The part of all this that the lane with the pin at `index` needs, in one line.
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
    /// The state of all chunks together.
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

    /// Calls `use_it` with the slot's address in the mapping, which stays valid until it returns.
    /// `None`: the chunk has no mapped memory.
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

    /// Slots from this one on that lie side by side, in one chunk.
    #[inline]
    pub fn left_in_chunk(&self, slot: Slot) -> usize {
        let chunk = 1 << self.shift;
        chunk - (slot.0 as usize & (chunk - 1))
    }

    /// The chunk on the card of `pages` slots from `slot` on, which are all in it, and the offset
    /// there; valid until so many operations are counted as finished. `None`: the chunk has no
    /// memory, and nothing was counted.
    #[inline]
    pub fn begin(&self, way: Way, slot: Slot, pages: usize) -> Option<(u64, u64)> {
        let (pin, (_, place, offset)) = (self.pin(), self.place(slot)?);
        let (queued, way) = (pin.queued[way as usize].load(Ordering::Relaxed), way as usize);
        pin.queued[way].store(queued + pages as u64, Ordering::Relaxed);
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

    /// Counts pages that are written by another way.
    #[inline]
    pub fn count_sent(&self, pages: usize) {
        self.sent.store(self.sent.load(Ordering::Relaxed) + pages as u64, Ordering::Relaxed);
    }

    /// The lane goes into the driver, or has come out of it.
    #[inline]
    pub fn pass(&self) {
        self.inside.store(self.inside.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
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
