//! The state that operations read: the places of chunks, and the chunks that each lane uses.

use crate::vram::mapped::copy::prefetch_lines;
use crate::vram::table::Path;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering, compiler_fence};
use weir_core::{PAGE_SIZE, Slot};

/// Largest number of lanes that a store can have open at once.
pub const LANES_MAX: usize = 256;

/// Everything that operations read, in one piece of memory. After a pause, the first access to each
/// memory page needs a walk of the page tables, which takes longer than the access itself. So the
/// piece is one huge page if the kernel grants one.
#[derive(Debug)]
pub struct Hot {
    memory: weir_core::Memory,
    /// The logarithm (base 2) of a chunk's slots.
    shift: u32,
    chunks: u32,
}

/// The state of all chunks together.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct Gate {
    /// Whether the card is lost.
    pub lost: AtomicBool,
    /// Whether the resident kernel is on the card. Lanes read this only to choose a path: the ring
    /// has its own protocol.
    pub resident: AtomicBool,
    /// Whether the watching thread is in a long sleep. If so, a lane that reads or writes a page
    /// wakes the thread.
    pub asleep: AtomicBool,
    /// Whether the parts that open after the first operations (CUDA's engine and ring) are open.
    /// Then each lane that waits for its own parts takes them.
    pub joined: AtomicBool,
    /// Number of pins at the start of the list that have been open at some time. All later pins
    /// never were.
    pub(super) pins_used: AtomicU32,
}

/// The addresses of a chunk's memory; null and 0 for a chunk without memory.
#[derive(Debug)]
pub(super) struct Addresses {
    pub host: AtomicPtr<u8>,
    pub device: AtomicU64,
}

impl Addresses {
    /// Whether the chunk has memory.
    pub fn is_shown(&self) -> bool {
        !self.host.load(Ordering::Relaxed).is_null() || self.device.load(Ordering::Relaxed) != 0
    }
}

/// The chunks that one lane uses.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct Pin {
    /// Whether a lane has the pin.
    pub(super) open: AtomicBool,
    /// The number of the chunk that the lane accesses right now, plus 1; 0 for none.
    pub(super) touching: AtomicU32,
    /// Number of operations queued, by engine and by ring; and number of those handed over, in the
    /// same order.
    pub(super) queued: [AtomicU64; 2],
    pub(super) finished: [AtomicU64; 2],
    /// Counts of all pages that the lane moved, by path.
    pub(super) pages: [AtomicU64; 3],
    /// Number of pages that the lane wrote through the window.
    pub(super) stored: AtomicU64,
    /// Number of pages that the lane wrote by engine or ring.
    pub(super) sent: AtomicU64,
    /// Whether the lane writes neighbouring slots.
    pub(super) runs: AtomicBool,
    /// A counter that is odd while the lane is inside the driver.
    pub(super) inside: AtomicU32,
}

impl Hot {
    /// Bytes of a huge page. Besides the lanes' pins, it has room for the addresses of sixty
    /// thousand chunks.
    const BYTES: usize = 2 << 20;

    pub(super) fn new(chunks: usize, slots: u32) -> io::Result<Arc<Self>> {
        let used = size_of::<Gate>() + size_of::<Pin>() * LANES_MAX + size_of::<Addresses>() * chunks;
        let memory = weir_core::Memory::anonymous(used.max(Self::BYTES))?;
        Ok(Arc::new(Hot { memory, shift: slots.ilog2(), chunks: chunks as u32 }))
    }

    /// The state of all chunks together.
    #[inline]
    pub fn gate(&self) -> &Gate {
        // SAFETY: the memory begins with the `Gate`. All of it is atomics, for which zeros are
        // valid. It is aligned to a page and lives as long as `self`.
        unsafe { &*self.memory.as_ptr().cast::<Gate>() }
    }

    #[inline]
    pub(super) fn pins(&self) -> &[Pin] {
        // SAFETY: in this memory the pins follow the `Gate`, and the size of `Gate` is a multiple
        // of their alignment. All of it is atomics, and it lives as long as `self`.
        unsafe {
            std::slice::from_raw_parts(self.memory.as_ptr().add(size_of::<Gate>()).cast::<Pin>(), LANES_MAX)
        }
    }

    #[inline]
    pub(super) fn places(&self) -> &[Addresses] {
        let offset = size_of::<Gate>() + size_of::<Pin>() * LANES_MAX;
        // SAFETY: in this memory the `Addresses` of all chunks follow the pins. All of the memory
        // is atomics, and it lives as long as `self`.
        unsafe {
            std::slice::from_raw_parts(
                self.memory.as_ptr().add(offset).cast::<Addresses>(),
                self.chunks as usize,
            )
        }
    }

    /// Pin number `index`: the chunks that one lane uses.
    #[inline]
    pub fn pin(&self, index: usize) -> &Pin {
        &self.pins()[index]
    }

    /// The addresses that the lane with the pin at `index` needs, in one cache line.
    pub fn site(self: &Arc<Self>, index: usize) -> Site {
        let places = NonNull::from(self.places()).cast();
        let (gate, pin) = (NonNull::from(self.gate()), NonNull::from(self.pin(index)));
        Site { gate, pin, places, chunks: self.chunks, shift: self.shift, _hot: Arc::clone(self) }
    }
}

/// One lane's pointers into [`Hot`]. With them, an operation reaches the state that it needs
/// without loading another pointer first.
#[derive(Debug)]
pub struct Site {
    gate: NonNull<Gate>,
    pin: NonNull<Pin>,
    places: NonNull<Addresses>,
    chunks: u32,
    shift: u32,
    /// Keeps the memory alive that the pointers point to.
    _hot: Arc<Hot>,
}

// SAFETY: all memory at the addresses is atomics, and `_hot` keeps it.
unsafe impl Send for Site {}

impl Site {
    /// The state of all chunks together.
    #[inline]
    pub fn gate(&self) -> &Gate {
        // SAFETY: `_hot` keeps the memory in which the `Gate` lies.
        unsafe { self.gate.as_ref() }
    }

    /// Prefetches the memory that an operation accesses.
    #[inline]
    pub fn prefetch(&self) {
        prefetch_lines(self.gate.as_ptr().cast(), 1);
        prefetch_lines(self.pin.as_ptr().cast(), 2);
        prefetch_lines(self.places.as_ptr().cast(), 1);
    }

    /// This lane's pin.
    #[inline]
    pub fn pin(&self) -> &Pin {
        // SAFETY: `_hot` keeps the memory of the pin.
        unsafe { self.pin.as_ref() }
    }

    #[inline]
    fn place(&self, slot: Slot) -> Option<(usize, &Addresses, usize)> {
        let (chunk, within) = (slot.0 >> self.shift, slot.0 as usize & ((1 << self.shift) - 1));
        // SAFETY: `_hot` keeps the memory of the places, of which there are `chunks`.
        (chunk < self.chunks).then(|| unsafe {
            (chunk as usize, self.places.add(chunk as usize).as_ref(), within * PAGE_SIZE)
        })
    }

    /// Calls `use_it` with the slot's address in the mapping. The address is valid until `use_it`
    /// returns. `None`: the chunk has no mapped memory.
    #[inline]
    pub fn with_host<T>(&self, slot: Slot, use_it: impl FnOnce(*mut u8) -> T) -> Option<T> {
        let (pin, (chunk, place, offset)) = (self.pin(), self.place(slot)?);
        pin.touching.store(chunk as u32 + 1, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        let host = place.host.load(Ordering::Acquire);
        // SAFETY: the chunk has at least `offset` + `PAGE_SIZE` bytes.
        let result = (!host.is_null()).then(|| use_it(unsafe { host.add(offset) }));
        pin.touching.store(0, Ordering::Release);
        pin.count(Path::Mapped, 1);
        result
    }

    /// Number of slots from `slot` to the end of its chunk, with `slot` itself. They lie side by
    /// side in memory.
    #[inline]
    pub fn left_in_chunk(&self, slot: Slot) -> usize {
        let chunk = 1 << self.shift;
        chunk - (slot.0 as usize & (chunk - 1))
    }

    /// Begins an operation on `pages` slots from `slot` on, which all lie in one chunk. Returns the
    /// chunk's address on the card, and the offset in it. Both are valid until the operation is
    /// counted as finished. `None`: the chunk has no memory, and nothing was counted.
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

    /// Takes back what [`begin`](Self::begin) counted for an operation that then took another path.
    #[inline]
    pub fn cancel(&self, way: Way) {
        let queued = &self.pin().queued[way as usize];
        queued.store(queued.load(Ordering::Relaxed) - 1, Ordering::Release);
    }
}

/// The two paths whose operations complete later.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// The copy engine, which does operations in batches.
    Engine = 0,
    /// The ring, which the resident kernel serves.
    Ring = 1,
}

impl Pin {
    /// Counts operations that were handed over.
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

    /// Counts pages that the lane writes by engine or ring.
    #[inline]
    pub fn count_sent(&self, pages: usize) {
        self.sent.store(self.sent.load(Ordering::Relaxed) + pages as u64, Ordering::Relaxed);
    }

    /// Notes that the lane enters the driver, or leaves it.
    #[inline]
    pub fn pass(&self) {
        self.inside.store(self.inside.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Notes whether this lane writes runs of neighbouring slots.
    #[inline]
    pub fn note_runs(&self, runs: bool) {
        self.runs.store(runs, Ordering::Relaxed);
    }

    /// Closes the pin: the lane has nothing in flight any more.
    pub fn close(&self) {
        for way in 0..2 {
            self.finished[way].store(self.queued[way].load(Ordering::Relaxed), Ordering::Release);
        }
        self.open.store(false, Ordering::Release);
    }
}
