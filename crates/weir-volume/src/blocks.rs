//! A row of items that grows while others look through it. It grows by blocks, which are made when
//! they are needed and never freed. So a look takes no lock and allocates nothing.

use crate::sync::{AtomicUsize, OnceLock, Ordering};
use std::ops::Deref;
use std::sync::Arc;

/// Number of items of a block. In a loom model it is 1, so that the second item needs a new block.
const BLOCK: usize = if cfg!(loom) { 1 } else { 64 };

/// A row of items that grows by blocks.
pub(crate) struct Blocks<T> {
    first: Arc<Block<T>>,
    /// Number of items up to the last that was ever asked for. A look through the row ends there.
    asked: AtomicUsize,
}

struct Block<T> {
    items: [T; BLOCK],
    next: OnceLock<Arc<Block<T>>>,
}

/// A reference to one item of a row. It keeps the item's block alive.
pub(crate) struct Item<T> {
    block: Arc<Block<T>>,
    at: usize,
}

impl<T: Default> Blocks<T> {
    pub fn new() -> Self {
        Blocks { first: Block::new(), asked: AtomicUsize::new(0) }
    }

    /// The item at `index`. Makes the row's blocks up to this item if they are missing, which takes
    /// memory. So the first call for an item must come from a thread that may allocate.
    pub fn item(&self, index: usize) -> Item<T> {
        let mut block = &self.first;
        for _ in 0..index / BLOCK {
            block = block.next.get_or_init(Block::new);
        }
        self.asked.fetch_max(index + 1, Ordering::AcqRel);
        Item { block: Arc::clone(block), at: index % BLOCK }
    }

    /// The items up to the last that was asked for.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        let mut left = self.asked.load(Ordering::Acquire);
        std::iter::successors(Some(&self.first), |block| block.next.get()).flat_map(move |block| {
            let here = left.min(BLOCK);
            left -= here;
            &block.items[..here]
        })
    }
}

impl<T: Default> Block<T> {
    fn new() -> Arc<Self> {
        Arc::new(Block { items: std::array::from_fn(|_| T::default()), next: OnceLock::new() })
    }
}

impl<T> Deref for Item<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.block.items[self.at % BLOCK]
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn items_stay_where_they_are_while_blocks_come_and_a_look_sees_those_that_were_asked_for() {
        let row = Blocks::<AtomicU32>::new();
        assert_eq!(row.iter().count(), 0);
        let first = row.item(0);
        for index in [3, 200, 64, 63] {
            row.item(index).store(index as u32, Ordering::Relaxed);
        }
        first.store(9, Ordering::Relaxed);
        let seen: Vec<_> = row.iter().map(|item| item.load(Ordering::Relaxed)).collect();
        assert_eq!(seen.len(), 201);
        assert_eq!([0, 3, 63, 64, 65, 200].map(|at| seen[at]), [9, 3, 63, 64, 0, 200]);
    }
}
