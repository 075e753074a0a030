//! Chance, and pages that show whether they are torn, for the models of this folder.

use weir_core::{PAGE_SIZE, PageBytes};

pub struct Chance(pub u64);

impl Chance {
    /// The next number, less than `below`.
    pub fn below(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) * below) >> 31
    }
}

/// A page that repeats `value`.
pub fn content(value: u64) -> PageBytes {
    let mut bytes = [0; PAGE_SIZE];
    bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&value.to_ne_bytes()));
    bytes
}
