//! A lane's own memory: one page for each operation that may be in flight. Pages are handed out so
//! that operations queued one after the other lie side by side.

use weir_core::{Memory, PAGE_SIZE, PageBytes};

/// Locked pages, of which some are in use.
#[derive(Debug)]
pub(super) struct Staging {
    memory: Memory,
    /// A bit for each page, set while the page is in use. Bits past the last page are always set.
    used: Box<[u64]>,
    /// The page at which the next search begins: after the last one handed out.
    next: usize,
    pages: usize,
    free: usize,
}

impl Staging {
    pub(super) fn new(pages: usize) -> std::io::Result<Self> {
        let memory = Memory::anonymous(pages * PAGE_SIZE)?;
        let mut used = vec![0u64; pages.div_ceil(64)].into_boxed_slice();
        if let (Some(last), rest @ 1..) = (used.last_mut(), pages % 64) {
            *last = !0 << rest;
        }
        Ok(Staging { memory, used, next: 0, pages, free: pages })
    }

    pub(super) fn in_use(&self) -> usize {
        self.pages - self.free
    }

    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Takes the next free page in turn.
    pub(super) fn take(&mut self) -> Option<usize> {
        if self.free == 0 {
            return None;
        }
        let words = self.used.len();
        let (word, bit) = (self.next / 64, self.next % 64);
        // The search begins at `next` and goes round. So the word that contains `next` is searched
        // twice: first its bits from `next` on, and at the end those before.
        let found = (0..=words).find_map(|step| {
            let at = (word + step) % words;
            let passed = if step == 0 { (1u64 << bit) - 1 } else { 0 };
            let free = !(self.used[at] | passed);
            (free != 0).then(|| at * 64 + free.trailing_zeros() as usize)
        });
        let page = found.expect("a free page, for `free` counts them");
        self.used[page / 64] |= 1 << (page % 64);
        self.free -= 1;
        self.next = (page + 1) % self.pages;
        Some(page)
    }

    /// Frees a staging page.
    pub(super) fn give(&mut self, page: usize) {
        debug_assert!(self.used[page / 64] & 1 << (page % 64) != 0, "page {page} is given back twice");
        self.used[page / 64] &= !(1 << (page % 64));
        self.free += 1;
    }

    /// The address of a staging page.
    pub(super) fn address(&self, page: usize) -> *mut u8 {
        assert!(page < self.pages, "a page of the staging area");
        // SAFETY: the page is inside the mapping, as the assertion says.
        unsafe { self.memory.as_ptr().add(page * PAGE_SIZE) }
    }

    /// The content of a staging page.
    ///
    /// # Safety
    /// No I/O on the page may be in flight.
    pub(super) unsafe fn page(&mut self, page: usize) -> &mut PageBytes {
        // SAFETY: `address` checks bounds, and pages are aligned. The caller guarantees that the
        // kernel does not use the page, and `&mut self` excludes other users.
        unsafe { &mut *self.address(page).cast::<PageBytes>() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn pages_taken_in_a_row_lie_in_a_row() {
        let mut staging = Staging::new(100).unwrap();
        let first: Vec<usize> = (0..100).map(|_| staging.take().unwrap()).collect();
        assert_eq!(first, (0..100).collect::<Vec<_>>());
        assert_eq!(staging.take(), None);
        (10..90).for_each(|page| staging.give(page));
        let second: Vec<usize> = (0..80).map(|_| staging.take().unwrap()).collect();
        assert_eq!(second, (10..90).collect::<Vec<_>>());
    }

    proptest! {
        #[test]
        fn a_page_is_in_one_hand_at_a_time(
            pages in 1usize..200, steps in proptest::collection::vec(any::<Option<prop::sample::Index>>(), 1..600),
        ) {
            let mut staging = Staging::new(pages).unwrap();
            let mut held = BTreeSet::new();
            for step in steps {
                match step {
                    Some(index) if !held.is_empty() => {
                        let page = *index.get(&held.iter().copied().collect::<Vec<_>>());
                        held.remove(&page);
                        staging.give(page);
                    }
                    _ => match staging.take() {
                        Some(page) => prop_assert!(page < pages && held.insert(page)),
                        None => prop_assert_eq!(held.len(), pages),
                    },
                }
                prop_assert_eq!(staging.in_use(), held.len());
            }
        }
    }
}
