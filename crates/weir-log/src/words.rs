//! 32-bit words that threads share, in locked memory.

use std::io;
use std::sync::atomic::AtomicU32;
use weir_core::Memory;

/// A row of atomic words, all zeros when new.
#[derive(Debug)]
pub(crate) struct Words {
    memory: Memory,
    count: usize,
}

impl Words {
    pub fn new(count: usize) -> io::Result<Self> {
        let memory = Memory::anonymous(count.max(1) * size_of::<u32>())?;
        Ok(Words { memory, count })
    }

    #[inline]
    pub fn at(&self, at: usize) -> &AtomicU32 {
        assert!(at < self.count, "word {at} of {}", self.count);
        // SAFETY: the pointer is inside the mapping (checked above) and aligned (4-byte steps from
        // a page boundary). The word is only ever accessed as an atomic.
        unsafe { &*self.memory.as_ptr().cast::<AtomicU32>().add(at) }
    }

    pub fn bytes(&self) -> u64 {
        self.memory.len() as u64
    }
}
