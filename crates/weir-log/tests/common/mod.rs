//! Pages that show whether they are torn, for the models of this folder.

use weir_core::{PAGE_SIZE, PageBytes};

/// A page that repeats `value`.
pub fn content(value: u64) -> PageBytes {
    let mut bytes = [0; PAGE_SIZE];
    bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&value.to_ne_bytes()));
    bytes
}
