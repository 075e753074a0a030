//! Mapped copies without a lane, as a control for the benchmarks. The time that the same copies
//! take more in a lane is the cost of the lane.

use super::gpu::Gpu;
use super::mapped::copy::Copies;
use std::ptr::NonNull;
use std::sync::Arc;
use weir_core::{PAGE_SIZE, PageBytes};

/// The first chunks of a card, which the control of the benchmarks copies to and from directly.
/// While it exists, these chunks cannot be released.
pub struct Bare {
    gpu: Arc<Gpu>,
    chunks: Vec<(usize, NonNull<u8>)>,
    /// The logarithm (base 2) of a chunk's pages.
    shift: u32,
    copies: Copies,
}

// SAFETY: the addresses are plain memory that belongs to no thread, and the pins keep it mapped.
unsafe impl Send for Bare {}

impl Bare {
    /// Holds the first chunks: as many as `pages` pages fill, and at least one. `None` if no chunk
    /// is mapped.
    pub fn open(gpu: &Arc<Gpu>, pages: u32) -> Option<Self> {
        let shift = gpu.chunk_slots().ilog2();
        let mut bare = Bare { gpu: Arc::clone(gpu), chunks: Vec::new(), shift, copies: *gpu.copies() };
        for chunk in 0..(pages as usize >> shift).clamp(1, gpu.chunks().count()) {
            let Some(pin) = gpu.chunks().open_pin() else { break };
            match gpu.chunks().hold(gpu.chunks().pin(pin), chunk) {
                Some(host) => bare.chunks.push((pin, host)),
                None => {
                    gpu.chunks().pin(pin).close();
                    break;
                }
            }
        }
        (!bare.chunks.is_empty()).then_some(bare)
    }

    /// Number of pages in the held chunks.
    pub fn pages(&self) -> u32 {
        (self.chunks.len() as u32) << self.shift
    }

    #[inline]
    fn at(&self, page: u32) -> *mut u8 {
        let (_, host) = self.chunks[(page >> self.shift) as usize];
        // SAFETY: the address is inside the chunk, which its pin keeps.
        unsafe { host.as_ptr().add((page & ((1 << self.shift) - 1)) as usize * PAGE_SIZE) }
    }

    /// Stores a page by a mapped copy.
    #[inline]
    pub fn store(&mut self, at: u32, page: &PageBytes) {
        // SAFETY: the address is a page of the store's memory, which nothing else uses while a
        // control is measured.
        unsafe { self.copies.to_device(page.as_ptr(), self.at(at)) };
    }

    /// Loads a page by a mapped copy.
    #[inline]
    pub fn load(&mut self, at: u32, page: &mut PageBytes) {
        // SAFETY: the address is a page of the store's memory, which nothing else uses while a
        // control is measured.
        unsafe { self.copies.from_device(self.at(at), page.as_mut_ptr()) };
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        let chunks = self.gpu.chunks();
        for &(pin, _) in &self.chunks {
            chunks.unhold(chunks.pin(pin));
            chunks.pin(pin).close();
        }
    }
}
