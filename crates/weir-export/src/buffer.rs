//! Memory of a front end's thread: it is taken, touched and (if allowed) locked before the process
//! is sealed.

use std::io;
use std::ops::{Deref, DerefMut};
use weir_core::{Memory, PageBytes};

/// A page-aligned byte buffer in memory that stays resident.
#[derive(Debug)]
pub struct Buffer(Memory);

impl Buffer {
    /// Makes a buffer of at least `bytes` zeros, in whole pages.
    ///
    /// # Errors
    /// Fails when there is not enough memory.
    pub fn new(bytes: usize) -> io::Result<Buffer> {
        Memory::anonymous(bytes).map(Buffer)
    }

    /// A pointer to the buffer's start, for several users of the buffer. They must agree by other
    /// means who accesses which bytes, and when.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.0.as_ptr()
    }

    /// Whether the buffer is locked in RAM.
    pub fn is_locked(&self) -> bool {
        self.0.is_locked()
    }

    /// The buffer's bytes as pages.
    pub fn pages(&self) -> &[PageBytes] {
        self.as_chunks().0
    }

    /// The buffer's bytes as pages, to be changed.
    pub fn pages_mut(&mut self) -> &mut [PageBytes] {
        self.as_chunks_mut().0
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is private to this value, `len` bytes long, initialised, and lives as
        // long as `self`; shared references only coexist with shared references, as `deref_mut`
        // borrows `self` exclusively.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), self.0.len()) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_ptr(), self.0.len()) }
    }
}
