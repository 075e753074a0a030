//! The model: the content that every page must have.

use std::rc::Rc;
use weir_core::{PAGE_SIZE, PageBytes};

/// A page's acknowledged content.
#[derive(Clone, PartialEq, Eq)]
pub enum Content {
    /// The page was never written, or was discarded.
    Nothing,
    Bytes(Rc<PageBytes>),
    /// The page's checksum was destroyed: reads fail until it is written again.
    Lost,
}

impl Content {
    pub fn bytes(&self) -> PageBytes {
        match self {
            Content::Nothing => [0; PAGE_SIZE],
            Content::Bytes(bytes) => **bytes,
            Content::Lost => panic!("a lost page was given a content"),
        }
    }

    /// This content with `patch` at `offset`.
    pub fn patched(&self, offset: usize, patch: &[u8]) -> Content {
        let mut bytes = self.bytes();
        bytes[offset..offset + patch.len()].copy_from_slice(patch);
        Content::Bytes(Rc::new(bytes))
    }
}

/// A page that no other write has: every word depends on `serial`.
pub fn unique(serial: u32) -> PageBytes {
    let mut bytes = [0; PAGE_SIZE];
    for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
        let value = (u64::from(serial) << 32 | at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// A page of one value.
pub fn uniform(value: u32) -> PageBytes {
    let mut bytes = [0; PAGE_SIZE];
    bytes.chunks_exact_mut(4).for_each(|word| word.copy_from_slice(&value.to_ne_bytes()));
    bytes
}

/// A page that no other write has, and that compresses to between a fiftieth and three quarters of
/// its size.
pub fn squeezable(serial: u32) -> PageBytes {
    let mut bytes = unique(serial);
    let noise = 8 << (serial % 9);
    for (at, byte) in bytes.iter_mut().enumerate().skip(noise) {
        *byte = (serial as u8).wrapping_add((at / 64) as u8);
    }
    bytes
}
