//! The page map: one [`Entry`] a page, in memory that a keeper can hold beyond the daemon's death.

use crate::entry::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use weir_core::{Memory, PageNo};

#[derive(Debug)]
pub(crate) struct Map {
    memory: Memory,
    pages: u32,
}

impl Map {
    pub fn new(pages: u32) -> std::io::Result<Self> {
        Ok(Self::over(Memory::shared("weir-map", pages as usize * 8)?, pages))
    }

    pub fn over(memory: Memory, pages: u32) -> Self {
        assert!(memory.len() >= pages as usize * 8, "the map covers every page");
        Map { memory, pages }
    }

    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    #[inline]
    fn word(&self, page: PageNo) -> &AtomicU64 {
        assert!(page.0 < self.pages, "page {} of {}", page.0, self.pages);
        // SAFETY: the pointer is inside the mapping (checked above) and aligned (8-byte steps from
        // a page boundary). The word is only ever accessed as an atomic, in this process and in the
        // keeper that holds the memfd.
        unsafe { &*self.memory.as_ptr().cast::<AtomicU64>().add(page.0 as usize) }
    }

    #[inline]
    pub fn load(&self, page: PageNo) -> Entry {
        Entry(self.word(page).load(Ordering::Acquire))
    }

    /// Prefetches a page's entry.
    #[inline]
    pub fn prefetch(&self, page: PageNo) {
        weir_core::prefetch_value(self.word(page));
    }

    /// Sets a page's entry while no other thread uses the map.
    pub fn set(&self, page: PageNo, entry: Entry) {
        self.word(page).store(entry.0, Ordering::SeqCst);
    }

    /// Publishes `entry` if the page's entry is still `was`.
    #[inline]
    pub fn replace(&self, page: PageNo, was: Entry, entry: Entry) -> bool {
        self.word(page).compare_exchange(was.0, entry.0, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }
}
